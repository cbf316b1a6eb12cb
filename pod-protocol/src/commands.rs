//! What the controller tells an endpoint to do. Each command is answered, and may be sent again: it is idempotent.

use cxl_pool::Area;
use serde::{Deserialize, Serialize};

use crate::ids::RegionId;
use crate::objects::{Object, ObjectId};
use crate::protocol::Protocol;

/// Of the committed decision behind a command: later ones are larger.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Version {
    /// The controller's term of office.
    pub term: u64,
    /// Its place in the log.
    pub index: u64,
}

/// From the controller to an endpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "snake_case")]
#[expect(clippy::large_enum_variant, reason = "there is one at a time, and never on the way of a packet")]
pub enum Command {
    /// Have this object, exactly so.
    Apply {
        /// Of the decision.
        version: Version,
        /// What to have.
        object: Object,
    },
    /// Have this object no longer.
    Remove {
        /// Of the decision.
        version: Version,
        /// What to give up.
        id: ObjectId,
    },
    /// Since the grant every object has been applied: give up all others.
    Synced {
        /// Of the newest decision behind them.
        version: Version,
    },
    /// This area was held by the endpoint or by its dead predecessor: answer once nothing of theirs is in flight on
    /// it and every line of it has left this host's cache.
    Scrub {
        /// Of the decision.
        version: Version,
        /// Which region it was.
        region: RegionId,
        /// Where it lies.
        area: Area,
    },
}

impl Command {
    /// The first minor version of the protocol that knows it: whoever speaks an older one is not to be told.
    pub fn since_minor(&self) -> u16 {
        match self {
            Self::Apply { object: Object::Protocol(_), .. } | Self::Remove { id: ObjectId::Protocol, .. } => {
                Protocol::TELLS_POD_VERSION
            }
            Self::Apply { .. } | Self::Remove { .. } | Self::Synced { .. } | Self::Scrub { .. } => 0,
        }
    }

    /// Of the decision behind it.
    pub fn version(&self) -> Version {
        match self {
            Self::Apply { version, .. }
            | Self::Remove { version, .. }
            | Self::Synced { version }
            | Self::Scrub { version, .. } => *version,
        }
    }
}
