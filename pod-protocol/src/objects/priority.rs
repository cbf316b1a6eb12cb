use std::fmt;

use serde::{Deserialize, Serialize};

/// How much of a device an instance gets next to others that want more of it than there is: shares are in proportion to
/// priorities. Whoever is alone has all of it (Oasis §3.2: instances that come before others while a shared device is under load).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "u16", into = "u16")]
pub struct Priority(u16);

impl Priority {
    /// The lowest.
    pub const MIN: Self = Self(1);
    /// That of instances of which nothing else was said.
    pub const DEFAULT: Self = Self(100);
    /// The highest.
    pub const MAX: Self = Self(1000);

    /// A priority from 1 to 1000.
    pub const fn new(priority: u16) -> Option<Self> {
        if priority < Self::MIN.0 || priority > Self::MAX.0 { None } else { Some(Self(priority)) }
    }

    /// Its number.
    pub const fn get(self) -> u16 {
        self.0
    }

    /// Whether it is that of instances of which nothing else was said.
    pub fn is_default(&self) -> bool {
        *self == Self::DEFAULT
    }
}

impl Default for Priority {
    fn default() -> Self {
        Self::DEFAULT
    }
}

impl fmt::Display for Priority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// There is no such [`Priority`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no priority {0}: use {min} to {max}, where {usual} is what instances have otherwise",
    min = Priority::MIN, max = Priority::MAX, usual = Priority::DEFAULT)]
pub struct NoPriority(pub u16);

impl TryFrom<u16> for Priority {
    type Error = NoPriority;

    fn try_from(priority: u16) -> Result<Self, NoPriority> {
        Self::new(priority).ok_or(NoPriority(priority))
    }
}

impl From<Priority> for u16 {
    fn from(priority: Priority) -> Self {
        priority.0
    }
}
