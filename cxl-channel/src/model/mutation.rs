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
    const ALL: [Self; 10] = [
        Self::Store,
        Self::WriteBack,
        Self::Invalidate,
        Self::Flush,
        Self::FullFence,
        Self::LoadWords,
        Self::StoreWords,
        Self::LoadLines,
        Self::StoreLines,
        Self::Epoch,
    ];

    /// How a call of it begins.
    fn method(self) -> &'static str {
        match self {
            Self::Store => "store(",
            Self::WriteBack => "write_back(",
            Self::Invalidate => "invalidate(",
            Self::Flush => "flush(",
            Self::FullFence => "full_fence(",
            Self::LoadWords => "load_words",
            Self::StoreWords | Self::Epoch => "store_words(",
            Self::LoadLines => "load_lines(",
            Self::StoreLines => "store_lines(",
        }
    }

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

/// The code that the search runs.
const SOURCES: [(&str, &str, &str); 2] = [
    ("Sender", "sender.rs", include_str!("../sender.rs")),
    ("Receiver", "receiver.rs", include_str!("../receiver.rs")),
];

impl Site {
    /// The sites that the source has: those that no run meets prove nothing.
    pub(super) fn in_source() -> Vec<Self> {
        let calls = Operation::ALL.into_iter().flat_map(|operation| {
            let call = format!("memory.{}", operation.method());
            let of = move |(_, file, source): (_, &'static str, &'static str)| -> Vec<Self> {
                let numbered = (1..).zip(source.lines().take_while(|line| *line != "#[cfg(test)]"));
                let with_call = numbered.filter(|(_, line)| line.contains(&call));
                with_call.map(|(line, _)| Self { file, line, operation }).collect()
            };
            SOURCES.into_iter().flat_map(of)
        });
        calls.collect()
    }

    /// Whether it is this one: paths begin where the compiler was called.
    pub(super) fn is(&self, other: &Self) -> bool {
        (self.line, self.operation) == (other.line, other.operation) && other.file.ends_with(self.file)
    }

    pub(super) fn new(operation: Operation, location: &'static Location<'static>) -> Self {
        Self { file: location.file(), line: location.line(), operation }
    }

    /// In words that only change when the code there does: the function, and the line; with its number, if the function has
    /// several such lines.
    pub(super) fn name(&self) -> String {
        let of = SOURCES.into_iter().find(|(_, file, _)| self.file.ends_with(file));
        let (side, _, source) = of.unwrap_or(("?", "", ""));
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
