//! With which status a daemon ends.

use std::fmt::Display;
use std::process::ExitCode;

/// Why a daemon ended without an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// It was told to: status 0.
    Stopped,
    /// The controller fenced it: status 75, `EX_TEMPFAIL`. A supervisor starts it again, and it joins anew.
    Fenced,
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        match exit {
            Exit::Stopped => Self::SUCCESS,
            Exit::Fenced => Self::from(75),
        }
    }
}

/// Prints an error as one line on stderr and returns the status that goes with it, 1.
pub fn print_error(error: &dyn Display) -> ExitCode {
    eprintln!("error: {}", one_line(&format!("{error:#}")));
    ExitCode::FAILURE
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_shown_in_one_line() {
        assert_eq!(one_line("cannot open:\n   no such file\n"), "cannot open: no such file");
    }
}
