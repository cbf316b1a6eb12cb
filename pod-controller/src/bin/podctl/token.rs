//! Tokens: what says who somebody is.

use std::fs::File;
use std::io::{Read, Write};

use sha2::{Digest, Sha256};

use crate::Failure;

/// As many bytes as nobody guesses.
const BYTES: usize = 32;

/// Makes a token, and shows it with the lines that make it known.
pub(crate) fn make(name: &str, role: &str, host: Option<&str>, out: &mut dyn Write) -> Result<(), Failure> {
    if host.is_some() && role != "host" {
        return Err(Failure::Usage("--host is for --role host".to_owned()));
    }
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
    if let Some(host) = host {
        writeln!(out, "host = {host:?}")?;
    }
    writeln!(out, "sha256 = \"{digest}\"")?;
    Ok(())
}

fn hex(bytes: &[u8]) -> String {
    let digit = |nibble: u8| char::from_digit(nibble.into(), 16).unwrap_or('0');
    bytes.iter().flat_map(|byte| [digit(byte >> 4), digit(byte & 15)]).collect()
}
