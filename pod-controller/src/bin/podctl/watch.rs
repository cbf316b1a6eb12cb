//! The same thing again and again, until somebody interrupts it.

use std::io::{IsTerminal, Write};
use std::time::Duration;

use crate::Failure;

/// The cursor to the upper left corner, and nothing on the screen.
const CLEAR: &str = "\x1b[H\x1b[2J";

/// Writes what `render` makes whenever that differs from what was written last: anew on a terminal, below it elsewhere.
pub(crate) fn repeat(
    every: Duration,
    out: &mut dyn Write,
    mut render: impl FnMut(&mut Vec<u8>) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let on_terminal = std::io::stdout().is_terminal();
    let mut last = None;
    loop {
        let mut shown = Vec::new();
        render(&mut shown)?;
        if last.as_ref() != Some(&shown) {
            if on_terminal {
                out.write_all(CLEAR.as_bytes())?;
            }
            out.write_all(&shown)?;
            out.flush()?;
            last = Some(shown);
        }
        std::thread::sleep(every);
    }
}
