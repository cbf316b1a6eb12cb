//! How a command or a join is answered.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::protocol::Protocol;

/// Why something was not done.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Refusal {
    /// In the words of whoever was asked.
    Refused(String),
    /// Whoever was asked does not know such a message, and will not know it next time. Since 1.1; 1.0 refuses it.
    NotUnderstood {
        /// What cannot be read of it.
        not_understood: String,
    },
}

/// What a command or a join is answered with.
pub type Answer = Result<(), Refusal>;

impl Refusal {
    /// As a peer can read it with whom this version is spoken.
    pub(crate) fn spoken(self, protocol: Protocol) -> Self {
        match self {
            Self::NotUnderstood { not_understood } if protocol.minor < Protocol::TELLS_NOT_UNDERSTOOD => {
                Self::Refused(not_understood)
            }
            refusal => refusal,
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused(reason) | Self::NotUnderstood { not_understood: reason } => f.write_str(reason),
        }
    }
}

impl From<String> for Refusal {
    fn from(reason: String) -> Self {
        Self::Refused(reason)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_of_every_version_are_read_and_each_peer_gets_its_own() {
        let unknown = || Refusal::NotUnderstood { not_understood: "not understood: x".into() };
        let (old, new) = (Protocol::of_minor(0), Protocol::of_minor(1));
        for (answer, json) in [
            (Ok(()), r#"{"Ok":null}"#),
            (Err(Refusal::Refused("no such NIC".into())), r#"{"Err":"no such NIC"}"#),
            (Err(unknown().spoken(new)), r#"{"Err":{"not_understood":"not understood: x"}}"#),
            (Err(unknown().spoken(old)), r#"{"Err":"not understood: x"}"#),
        ] {
            assert_eq!(serde_json::to_string::<Answer>(&answer).expect("plain data"), json);
            assert_eq!(serde_json::from_str::<Answer>(json).expect("it is read"), answer);
        }
        // What 1.0 makes of an answer to it.
        let old_answer = serde_json::from_str::<Result<(), String>>(r#"{"Err":"not understood: x"}"#);
        assert_eq!(old_answer.expect("it is read"), Err("not understood: x".to_owned()));
    }
}
