//! The engine's two sides as one task: they take turns on one core, and each turn's time is counted for its side.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use cxl_pool::Memory;
use pod_protocol::worker::{Progress, Reply, Sources, Task, Token};
use vhost_net_cxl::backend::Backend;
use vhost_net_cxl::frontend::{Frontend, Order};

use super::flood::Stream;
use super::round_trip::{Latencies, RoundTrips};

/// One turn of so many is timed, and stands for all of them: to ask for the time thrice in each turn took a twentieth of it.
const TIMED_TURNS: u64 = 8;

/// Time that each side was at work: turns that found nothing to do do not count.
#[derive(Debug, Default)]
pub(super) struct Spent {
    pub(super) frontend_ns: AtomicU64,
    pub(super) backend_ns: AtomicU64,
}

/// What the worker is told.
pub(super) enum Message {
    /// For the frontend.
    Order(Order),
    /// Drive a port from this thread, and answer with what was measured.
    RoundTrips(Box<RoundTrips>, Reply<Latencies>),
    /// Drive a port from this thread until told to end.
    Stream(Box<Stream>),
    /// Let go of that port, and say how it went.
    EndStream(Reply<anyhow::Result<()>>),
}

/// What drives a port from the engine's thread.
pub(super) enum Load {
    RoundTrips(Box<RoundTrips>, Reply<Latencies>),
    /// With what went wrong, if it did.
    Stream(Box<Stream>, anyhow::Result<()>),
}

impl Load {
    /// One step; nothing is left once it has come to its end.
    fn step(self) -> Option<Self> {
        match self {
            Self::RoundTrips(mut load, reply) => match load.step() {
                Some(latencies) => {
                    reply.send(latencies);
                    None
                }
                None => Some(Self::RoundTrips(load, reply)),
            },
            Self::Stream(mut stream, mut outcome) => {
                if outcome.is_ok() {
                    outcome = stream.step();
                }
                Some(Self::Stream(stream, outcome))
            }
        }
    }
}

/// A frontend, and perhaps a backend and a load on the same thread.
pub(super) struct Engine<M: Memory> {
    pub(super) frontend: Frontend<M>,
    pub(super) backend: Option<Backend<M>>,
    pub(super) spent: Arc<Spent>,
    pub(super) load: Option<Load>,
    pub(super) turns: u64,
}

fn timed(spent: &AtomicU64, began: Option<Instant>, progress: Progress) -> Option<Instant> {
    let (began, now) = (began?, Instant::now());
    if progress == Progress::Busy {
        // One writer.
        let ns = u64::try_from(now.duration_since(began).as_nanos()).unwrap_or(0);
        spent.store(spent.load(Ordering::Relaxed) + TIMED_TURNS * ns, Ordering::Relaxed);
    }
    Some(now)
}

impl<M: Memory> Task for Engine<M> {
    type Message = Message;

    fn message(&mut self, message: Message, sources: &mut Sources) {
        match message {
            Message::Order(order) => self.frontend.message(order, sources),
            Message::RoundTrips(load, reply) => self.load = Some(Load::RoundTrips(load, reply)),
            Message::Stream(stream) => self.load = Some(Load::Stream(stream, Ok(()))),
            Message::EndStream(reply) => {
                let ended = match self.load.take() {
                    Some(Load::Stream(stream, outcome)) => {
                        stream.disconnect();
                        outcome
                    }
                    other => {
                        self.load = other;
                        Ok(())
                    }
                };
                reply.send(ended);
            }
        }
    }

    fn turn(&mut self) -> Progress {
        self.load = self.load.take().and_then(Load::step);
        self.turns += 1;
        let began = self.turns.is_multiple_of(TIMED_TURNS).then(Instant::now);
        let frontend = self.frontend.turn();
        let Some(backend) = &mut self.backend else { return frontend };
        let between = timed(&self.spent.frontend_ns, began, frontend);
        let backend = backend.turn();
        timed(&self.spent.backend_ns, between, backend);
        if frontend == Progress::Busy { frontend } else { backend }
    }

    fn ready(&mut self, token: Token) {
        // A backend looks at all of its NICs in each turn, whatever became readable.
        self.frontend.ready(token);
    }

    // It has a core of its own and never sleeps; these are complete all the same.
    fn prepare_sleep(&mut self) -> bool {
        let frontend = self.frontend.prepare_sleep();
        let backend = self.backend.as_mut().is_none_or(Task::prepare_sleep);
        frontend && backend && self.load.is_none()
    }

    fn resume(&mut self) {
        self.frontend.resume();
        if let Some(backend) = &mut self.backend {
            backend.resume();
        }
    }
}
