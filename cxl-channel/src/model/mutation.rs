//! What is left out or done wrong, to see that it is noticed.

use std::panic::Location;

/// What a channel does to memory, and how it is done wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Operation {
    /// Left out.
    Store,
    /// Left out.
    WriteBack,
    /// Left out.
    Invalidate,
    /// Left out.
    Flush,
    /// Left out.
    FullFence,
    /// The last word is loaded last.
    LoadWords,
    /// The last word is stored first.
    StoreWords,
    /// The marks are loaded last.
    LoadLines,
    /// The marks are stored first.
    StoreLines,
    /// The bit is 1 in every lap.
    Epoch,
}

impl Operation {
    fn how(self) -> &'static str {
        match self {
            Self::LoadWords => ", last word last",
            Self::StoreWords => ", last word first",
            Self::LoadLines => ", marks last",
            Self::StoreLines => ", marks first",
            Self::Epoch => ", epoch always 1",
            _ => "",
        }
    }
}

/// Where in the source.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Site {
    file: &'static str,
    line: u32,
    operation: Operation,
}

/// One thing that is done wrong.
#[derive(Clone, Debug)]
pub(super) struct Mutation {
    pub(super) site: Site,
}

impl Site {
    pub(super) fn new(operation: Operation, location: &'static Location<'static>) -> Self {
        Self { file: location.file(), line: location.line(), operation }
    }

    /// In words that only change when the code there does: the function, and the line; with its number, if the function has
    /// several such lines.
    pub(super) fn name(&self) -> String {
        let (side, source) = if self.file.ends_with("sender.rs") {
            ("Sender", include_str!("../sender.rs"))
        } else {
            ("Receiver", include_str!("../receiver.rs"))
        };
        let before: Vec<&str> = source.lines().take(self.line as usize).map(str::trim).collect();
        let begins = before.iter().rposition(|line| line.contains("fn ")).unwrap_or(0);
        let (_, function) = before[begins].split_once("fn ").unwrap_or_default();
        let function = function.split(['(', '<']).next().unwrap_or_default();
        let code = before.last().copied().unwrap_or_default();
        let nth = before[begins..].iter().filter(|line| **line == code).count();
        let nth = if nth > 1 { format!(" ({nth})") } else { String::new() };
        let code = code.trim_end_matches(';').trim_start_matches("self.").trim_start_matches("memory.");
        format!("{side}::{function}: {code}{nth}{}", self.operation.how())
    }
}
