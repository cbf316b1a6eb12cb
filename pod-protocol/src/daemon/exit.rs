//! With which status a daemon ends.

use std::error::Error;
use std::fmt::Write;
use std::process::ExitCode;

/// Why a daemon ended without an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// It was told to: status 0.
    Stopped,
    /// The controller fenced it: status 75, `EX_TEMPFAIL`. A supervisor starts it again, and it joins anew.
    Fenced,
    /// It has something to do that it can do only from its beginning: status 75 as well.
    Again,
}

impl Exit {
    /// The status of the process.
    pub(crate) fn status(self) -> u8 {
        match self {
            Self::Stopped => 0,
            Self::Fenced | Self::Again => 75,
        }
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit.status())
    }
}

/// Prints an error with its causes as one line on stderr and returns the status that goes with it, 1.
pub fn print_error(error: &dyn Error) -> ExitCode {
    eprintln!("error: {}", one_line(&with_causes(error)));
    ExitCode::FAILURE
}

/// Messages do not repeat their causes, so all of them together tell what happened.
fn with_causes(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let _ = write!(text, ": {error}");
        cause = error.source();
    }
    text
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn causes_are_told_once() {
        let source = std::io::Error::from(std::io::ErrorKind::NotFound);
        let cause = source.to_string();
        let error = crate::config::ConfigError::Read { path: "/x".into(), source };
        assert_eq!(with_causes(&error), format!("cannot read the configuration /x: {cause}"));
    }

    #[test]
    fn errors_are_shown_in_one_line() {
        assert_eq!(one_line("cannot open:\n   no such file\n"), "cannot open: no such file");
    }
}
