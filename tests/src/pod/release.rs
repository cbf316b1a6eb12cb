use std::path::PathBuf;
use std::process::Command;

use pod_protocol::protocol::Protocol;

/// Directory of the programs of the release before, to upgrade from those themselves.
const PREVIOUS_BINARIES: &str = "WADI_PREVIOUS_BINARIES";

/// Of which release daemons are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Release {
    /// What was built with this test.
    This,
    /// What speaks the minor version before: the programs below `WADI_PREVIOUS_BINARIES`, or, without that, those of this
    /// release, told to speak it.
    Previous,
}

impl Release {
    /// The version of the protocol that its daemons speak.
    pub fn protocol(self) -> Protocol {
        match self {
            Self::This => Protocol::CURRENT,
            Self::Previous => Protocol::of_minor(Protocol::CURRENT.minor - 1),
        }
    }

    /// Where its programs are, if not with the others.
    pub(super) fn binaries(self) -> Option<PathBuf> {
        match self {
            Self::This => None,
            Self::Previous => std::env::var_os(PREVIOUS_BINARIES).map(PathBuf::from),
        }
    }

    /// Has a daemon speak its version.
    pub fn tell(self, command: &mut Command) {
        // What is of that release itself speaks nothing else, and may not know the option.
        if self == Self::Previous && self.binaries().is_none() {
            command.arg("--protocol-minor").arg(self.protocol().minor.to_string());
        }
    }
}
