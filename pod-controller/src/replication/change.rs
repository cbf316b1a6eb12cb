//! What stands in the replicated log.

use std::fmt;
use std::io::Cursor;

use cxl_pool::ReplicaId;
use pod_api::Event;
use pod_state::{Command, State};
use serde::{Deserialize, Serialize};

openraft::declare_raft_types!(
    /// What Raft replicates here.
    pub(crate) Replicated:
        D = Change,
        R = Outcome,
        Node = Member,
);

pub(crate) type Raft = openraft::Raft<Replicated>;
/// Names a replica's log. A replica that lost its log gets another one, since it does not know any more what it promised.
pub(crate) type LogOwner = u64;

/// An entry of the log.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Change {
    /// The first one: what was known before there were replicas.
    Begin {
        /// The state.
        state: Box<State>,
        /// Recent events.
        events: Vec<Event>,
        /// How many terms of office there were.
        terms: u64,
    },
    /// What one turn of the leader decided.
    Turn {
        /// The index of the state that it was decided upon. On another one it is void.
        base: u64,
        /// The commands, each one index further.
        commands: Vec<Command>,
        /// What is told of it.
        events: Vec<Event>,
    },
}

impl Change {
    /// See [`Command::may_lower_protocol`].
    pub(super) fn may_lower_protocol(&self) -> bool {
        matches!(self, Self::Turn { commands, .. } if commands.iter().any(Command::may_lower_protocol))
    }

    /// What a turn decided that led to this state.
    pub(crate) fn turn(commands: &[(u64, &Command)], events: &[Event], state: &State) -> Self {
        let base = commands.first().map_or(state.index, |(index, _)| index - 1);
        let commands = commands.iter().map(|(_, command)| Command::clone(command)).collect();
        Self::Turn { base, commands, events: events.to_vec() }
    }
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Begin { .. } => f.write_str("begin"),
            Self::Turn { base, commands, .. } => write!(f, "{} commands after {base}", commands.len()),
        }
    }
}

/// What became of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Outcome {
    /// It was made.
    Done,
    /// It was void: another one had come before it.
    Void,
}

/// What the members know of one of them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Member {
    /// Its number. It has this slot of the pool, unless it is outside of the pod.
    pub(crate) replica: ReplicaId,
    /// Of one outside of the pod, the minor of the protocol that it speaks: of others it stands in the pool. Replicas of earlier versions
    /// skip it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) outside: Option<u16>,
}

impl Member {
    /// One that reaches the pool.
    pub(crate) const fn in_pod(replica: ReplicaId) -> Self {
        Self { replica, outside: None }
    }

    /// Whether it can lead.
    pub(crate) const fn is_in_pod(&self) -> bool {
        self.outside.is_none()
    }
}
