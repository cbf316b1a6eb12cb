//! What came in one turn, and who waits for what becomes of it.

use cxl_pool::EndpointId;
use pod_api::EventKind;
use pod_state::{Command, Effect, Refusal};

use super::world::World;

/// Commands that came in one turn, in their order.
pub(super) struct Inbox<W: World> {
    pub(super) commands: Vec<(Command, Waiting<W>)>,
    pub(super) events: Vec<Effect>,
}

/// Who waits for what becomes of a command.
pub(crate) enum Waiting<W: World> {
    Nobody,
    /// Whoever reads events: what was done, or what was not, to which the reason is added.
    Events {
        done: Effect,
        refused: Notice,
    },
    Api(W::Reply),
    Join {
        endpoint: EndpointId,
        incarnation: u64,
        request: W::Request,
    },
}

/// What came of a turn, before it is kept and anybody hears of it.
pub(crate) struct Decided<W: World> {
    /// The commands that changed something, each with the index of the state that it led to.
    pub(super) logged: Vec<(u64, Command)>,
    pub(super) effects: Vec<Effect>,
    pub(super) answers: Vec<(Waiting<W>, Result<(), Refusal>)>,
    pub(super) regions_changed: bool,
}

impl<W: World> Decided<W> {
    /// Whether there is anything to be kept.
    pub(crate) fn is_worth_a_commit(&self) -> bool {
        !self.logged.is_empty() || !self.effects.is_empty()
    }
}

/// What there is to be told: of which kind, of what, and in words.
pub(super) type Notice = (EventKind, String, String);

impl<W: World> Waiting<W> {
    /// What is told where the command was refused.
    pub(super) fn refused(&self, refusal: &Refusal) -> Option<Effect> {
        let (kind, subject, message) = match self {
            Self::Nobody | Self::Api(_) => return None,
            Self::Join { endpoint, .. } => {
                (EventKind::JoinRefused, endpoint.to_string(), refusal.to_string())
            }
            Self::Events { refused: (kind, subject, message), .. } => {
                (*kind, subject.clone(), format!("{message}: {refusal}"))
            }
        };
        Some(Effect::Event { kind, subject, message })
    }
}

impl<W: World> Inbox<W> {
    pub(super) fn add(&mut self, command: Command) {
        self.commands.push((command, Waiting::Nobody));
    }

    /// The same, with what is told once it is carried out, and if it is refused.
    pub(super) fn add_told(&mut self, command: Command, done: Effect, refused: Notice) {
        self.commands.push((command, Waiting::Events { done, refused }));
    }

    pub(super) fn tell(&mut self, kind: EventKind, subject: String, message: String) {
        self.events.push(Effect::Event { kind, subject, message });
    }
}
