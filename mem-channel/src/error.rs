//! What can be asked wrongly.

use thiserror::Error;

use crate::{ElementId, MchannelId, TenantId};

/// A setting or a name that makes no sense.
#[derive(Clone, Copy, Debug, PartialEq, Error)]
pub enum MemChannelError {
    /// A parameter outside its range.
    #[error("{name} is {value}, but must be {range}")]
    Parameter {
        /// Which one.
        name: &'static str,
        /// What it was set to.
        value: f64,
        /// What it may be.
        range: &'static str,
    },
    /// A path names an element that the host was not told of.
    #[error("element {0:?} is unknown: add it before a path that uses it")]
    UnknownElement(ElementId),
    /// A path names an element twice, or none at all.
    #[error("a path of {0} elements: give at least one, and each once")]
    Path(usize),
    /// The mchannel was closed, or never opened.
    #[error("{0:?} is not open")]
    UnknownMchannel(MchannelId),
    /// The tenant was never added.
    #[error("{0:?} is unknown: add it before its mchannels")]
    UnknownTenant(TenantId),
    /// An open mchannel passes through it.
    #[error("{0:?} is in use: close the mchannels that pass through it first")]
    ElementInUse(ElementId),
    /// It has open mchannels.
    #[error("{0:?} is in use: close its mchannels first")]
    TenantInUse(TenantId),
    /// `u32::MAX` stands for the root.
    #[error("{0:?} cannot be used: the number is reserved")]
    ReservedTenant(TenantId),
}

/// Checks a setting.
pub(crate) fn check(
    name: &'static str,
    value: f64,
    range: &'static str,
    good: bool,
) -> Result<(), MemChannelError> {
    if good { Ok(()) } else { Err(MemChannelError::Parameter { name, value, range }) }
}
