//! Tokens: what says who somebody is.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::Path;

use sha2::{Digest, Sha256};

use crate::Failure;

/// As many bytes as nobody guesses.
const BYTES: usize = 32;

/// Makes a token, and shows it with the lines that make it known.
pub(crate) fn make(name: &str, role: &str, out: &mut dyn Write) -> Result<(), Failure> {
    let mut secret = [0; BYTES];
    File::open("/dev/urandom")
        .and_then(|mut random| random.read_exact(&mut secret))
        .map_err(Failure::Output)?;
    let token = hex(&secret);
    let digest = hex(&Sha256::digest(token.as_bytes()));
    writeln!(out, "token (give it to {name}; it is not kept anywhere):\n{token}\n")?;
    writeln!(
        out,
        "lines for the controller's file of tokens:\n[[token]]\nname = {name:?}\nrole = \"{role}\""
    )?;
    writeln!(out, "sha256 = \"{digest}\"")?;
    Ok(())
}

/// The token of a file.
pub(crate) fn read(path: &Path) -> Result<String, Failure> {
    let text = fs::read_to_string(path)
        .map_err(|error| Failure::Usage(format!("cannot read the token in {}: {error}", path.display())))?;
    let token = text.trim();
    if token.is_empty() || !token.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err(Failure::Usage(format!("{} has no token in it, or more than that", path.display())));
    }
    Ok(token.to_owned())
}

fn hex(bytes: &[u8]) -> String {
    let digit = |nibble: u8| char::from_digit(nibble.into(), 16).unwrap_or('0');
    bytes.iter().flat_map(|byte| [digit(byte >> 4), digit(byte & 15)]).collect()
}
