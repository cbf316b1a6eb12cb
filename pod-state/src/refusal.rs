use std::fmt;

use serde::{Deserialize, Serialize};

/// Why a command cannot be carried out. Nothing has changed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusal {
    /// For programs.
    pub kind: RefusalKind,
    /// For people: what failed, on what, what to try.
    pub detail: String,
}

/// What kind of refusal it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RefusalKind {
    /// A name breaks the rules for names.
    InvalidName,
    /// Another field makes no sense.
    InvalidValue,
    /// It does not exist.
    NotFound,
    /// It exists already.
    Exists,
    /// The idempotency key belongs to another request.
    KeyReused,
    /// It is not what somebody takes it to be any more.
    Changed,
    /// It is leased.
    Leased,
    /// A VMM uses it.
    Connected,
    /// A daemon of the host beats.
    HostAlive,
    /// The host may still hold something.
    NotReset,
    /// The host's daemon that is needed is not there.
    HostNotReady,
    /// It is under way already.
    Busy,
    /// No device can take it.
    NoDevice,
    /// The device or the pool is full.
    NoRoom,
    /// An endpoint contradicts what is known of its host.
    JoinConflict,
}

impl RefusalKind {
    /// A stable word for it.
    pub const fn word(self) -> &'static str {
        match self {
            Self::InvalidName => "invalid-name",
            Self::InvalidValue => "invalid-value",
            Self::NotFound => "not-found",
            Self::Exists => "exists",
            Self::KeyReused => "idempotency-key-reused",
            Self::Changed => "changed",
            Self::Leased => "leased",
            Self::Connected => "connected",
            Self::HostAlive => "host-alive",
            Self::NotReset => "not-reset",
            Self::HostNotReady => "host-not-ready",
            Self::Busy => "busy",
            Self::NoDevice => "no-device",
            Self::NoRoom => "no-room",
            Self::JoinConflict => "join-conflict",
        }
    }
}

impl Refusal {
    pub(super) fn new(kind: RefusalKind, detail: impl Into<String>) -> Self {
        Self { kind, detail: detail.into() }
    }

    pub(super) fn not_found(what: &str, name: &str) -> Self {
        Self::new(RefusalKind::NotFound, format!("there is no {what} named {}", shown(name)))
    }
}

/// A name from outside, quoted and cut to a length that a terminal bears.
pub(super) fn shown(name: &str) -> String {
    let cut: String = name.chars().take(64).collect();
    format!("{cut:?}")
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.detail)
    }
}

impl std::error::Error for Refusal {}
