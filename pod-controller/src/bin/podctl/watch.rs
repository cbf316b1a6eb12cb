//! The same thing again and again, until somebody interrupts it.

use std::io::{IsTerminal, Write};
use std::time::Duration;

use pod_api::client::ClientError;

use crate::Failure;

/// The cursor to the upper left corner, and nothing on the screen.
const CLEAR: &str = "\x1b[H\x1b[2J";

/// Writes what `render` makes whenever that differs from what was written last: anew on a terminal, below it elsewhere. While the
/// controller is away, what was written last stays, with a note; elsewhere than on a terminal the note goes to stderr.
pub(crate) fn repeat(
    every: Duration,
    out: &mut dyn Write,
    mut render: impl FnMut(&mut Vec<u8>) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let on_terminal = std::io::stdout().is_terminal();
    let mut last: Option<Vec<u8>> = None;
    let mut told = false;
    loop {
        let mut shown = Vec::new();
        match render(&mut shown) {
            // What is broken may be mended while somebody watches; that it is stands in what is shown.
            Ok(()) | Err(Failure::Broken(_)) if told || last.as_ref() != Some(&shown) => {
                if on_terminal {
                    out.write_all(CLEAR.as_bytes())?;
                }
                out.write_all(&shown)?;
                out.flush()?;
                last = Some(shown);
                told = false;
            }
            Ok(()) | Err(Failure::Broken(_)) => {}
            // Whoever was never there is somewhere else.
            Err(Failure::Client(error)) if last.is_some() && is_away(&error) => {
                if !told && on_terminal {
                    writeln!(out, "\n{error}")?;
                    out.flush()?;
                } else if !told {
                    eprintln!("{error}");
                }
                told = true;
            }
            Err(failure) => return Err(failure),
        }
        std::thread::sleep(every);
    }
}

/// Whether the controller is likely to answer again.
fn is_away(error: &ClientError) -> bool {
    match error {
        ClientError::Unreachable { .. } => true,
        ClientError::Refused(problem) => problem.status >= 500,
        ClientError::SetUp(_) | ClientError::Garbled { .. } => false,
    }
}
