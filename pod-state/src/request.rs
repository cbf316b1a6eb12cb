//! Requests that clients may send twice: a client that got no answer asks again with the same key, and what it wants is done
//! once.

use std::collections::{BTreeSet, VecDeque};

use serde::{Deserialize, Serialize};

use super::labels::check_labels;
use super::{Command, Effect, Expected, Labelled, Labels, Measured, Refusal, RefusalKind, Relief, State};

/// How many keys are remembered. The oldest is forgotten first.
pub const KEYS_MAX: usize = 1024;

/// What a client calls a request of its own.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IdempotencyKey {
    /// Its name for it.
    pub key: String,
    /// A digest of all that it asked for.
    pub digest: String,
}

impl IdempotencyKey {
    /// What says that a request of this key was begun, for one whose deed is none of the state's. No client's key has a space in it.
    #[must_use]
    pub fn begun(&self) -> Self {
        Self { key: format!("{} begun", self.key), digest: self.digest.clone() }
    }
}

/// Keys of requests that were carried out, oldest first.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Keys(VecDeque<IdempotencyKey>);

impl Keys {
    /// Whether this very request was carried out already.
    fn is_known(&self, request: &IdempotencyKey) -> Result<bool, Refusal> {
        match self.0.iter().find(|known| known.key == request.key) {
            None => Ok(false),
            Some(known) if known.digest == request.digest => Ok(true),
            Some(_) => {
                let key = &request.key;
                let detail = format!(
                    "the idempotency key {key:?} was used for another request: use a new key for each, and the same one \
                     only to send the same request again"
                );
                Err(Refusal::new(RefusalKind::KeyReused, detail))
            }
        }
    }

    /// The one that was remembered last. Whatever is remembered next is another one.
    pub(super) fn latest(&self) -> Option<&str> {
        self.0.back().map(|it| it.key.as_str())
    }

    fn remember(&mut self, request: IdempotencyKey) {
        if self.0.len() >= KEYS_MAX {
            self.0.pop_front();
        }
        self.0.push_back(request);
    }
}

impl Command {
    /// What changes nothing, and what every version of the controller knows: a request whose deed is none of the state's, such as that a
    /// controller is a member no longer, leaves its key with it.
    #[must_use]
    pub fn nothing() -> Self {
        Self::Relieve {
            nics: BTreeSet::new(),
            measured: Measured::default(),
            resting: BTreeSet::new(),
            relief: Relief { high_percent: 100, low_percent: 100, moves_max: 0 },
        }
    }
}

impl State {
    /// Whether a request of this key was carried out already; refused where the key was another request's.
    pub fn was_done(&self, key: &IdempotencyKey) -> Result<bool, Refusal> {
        self.keys.is_known(key)
    }

    /// Carries out what a client asks for, unless that was done already: then nothing changes, whatever was expected. What was
    /// refused is not remembered, and may do when it is asked for again.
    pub(super) fn request(
        &mut self,
        (key, expected): (Option<&IdempotencyKey>, Option<&Expected>),
        labels: &Labels,
        command: &Command,
    ) -> Result<Vec<Effect>, Refusal> {
        if let Some(key) = key
            && self.keys.is_known(key)?
        {
            return Ok(Vec::new());
        }
        if let Some(expected) = expected {
            self.check_version(expected)?;
        }
        check_labels(labels)?;
        let effects = self.apply(command)?;
        let of = match command {
            Command::CreateInstance { name, .. } => Some((Labelled::Instance, name)),
            Command::CreateVolume { name, .. } | Command::CreateStriped { name, .. } => {
                Some((Labelled::Volume, name))
            }
            _ => None,
        };
        if let Some((of, name)) = of.filter(|_| !labels.is_empty()) {
            self.set_labels(of, name, labels)?;
            // Nothing follows from labels.
            self.conclude(&mut Vec::new());
        }
        if let Some(key) = key {
            self.keys.remember(key.clone());
        }
        Ok(effects)
    }
}
