//! What the thread of a replica does, step by step: it hands on what it is asked for, and leads while it is elected. That is what
//! [`Replica`](super::super::Replica) and the conductor do, without daemons.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::TryRecvError;

use pod_api::{Event, EventKind};
use pod_state::{Command, Effect, Refusal};
use tokio::runtime::Runtime;
use tokio::task::JoinHandle;

use super::super::change::Change;
use super::super::forwarding::forward;
use super::super::machine::Known;
use super::super::proposer::propose;
use super::super::replica::{ReplicationError, Standing, catch_up};
use super::Broken;
use crate::controller::{Desk, Handle, Reply, Request, SubmitError};

/// How much is gathered into one commit.
const WISHES_MAX: usize = 8;

type Outcomes = JoinHandle<Result<(), ReplicationError>>;
type Answers = Vec<(Reply, Result<(), Refusal>)>;

/// See the [module](self).
pub(super) struct Office {
    duty: Duty,
    /// The first change of all, where this replica is to begin.
    pub(super) begin: Option<Change>,
    broken: Option<Broken>,
}

enum Duty {
    Follows,
    CatchesUp { elected: u64, task: Outcomes },
    Begins { elected: u64, task: Outcomes },
    Leads { elected: u64, known: Known },
    Commits { elected: u64, known: Known, task: Outcomes, answers: Answers },
}

impl Office {
    pub(super) fn new(begin: Option<Change>, broken: Option<Broken>) -> Self {
        Self { duty: Duty::Follows, begin, broken }
    }

    /// Does what there is to do now. The error is what ends the process.
    pub(super) fn step(
        &mut self,
        runtime: &Runtime,
        standing: &Arc<Standing>,
        (desk, handle): (&Desk, &Handle),
    ) -> Result<(), ReplicationError> {
        loop {
            let duty = std::mem::replace(&mut self.duty, Duty::Follows);
            let elected_now = standing.elected.load(Ordering::Acquire);
            let outcome = match duty {
                Duty::Follows if elected_now == 0 => {
                    hand_on(runtime, standing, (desk, handle));
                    return Ok(());
                }
                Duty::Follows => {
                    let raft = standing.raft.clone();
                    let task = runtime.spawn(async move { catch_up(&raft).await });
                    self.duty = Duty::CatchesUp { elected: elected_now, task };
                    return Ok(());
                }
                Duty::CatchesUp { elected, task } if task.is_finished() => match finished(runtime, task) {
                    Ok(()) => self.enter(runtime, standing, elected, handle),
                    Err(error) => Err(error),
                },
                Duty::Begins { elected, task } if task.is_finished() => match finished(runtime, task) {
                    Ok(()) => self.enter(runtime, standing, elected, handle),
                    Err(error) => Err(error),
                },
                Duty::Leads { elected, .. } if elected != elected_now => {
                    standing.resign(handle);
                    continue;
                }
                Duty::Leads { elected, known } => {
                    self.lead(runtime, standing, (desk, handle), (elected, known));
                    return Ok(());
                }
                Duty::Commits { elected, known, task, answers } if task.is_finished() => {
                    match finished(runtime, task) {
                        Ok(()) => {
                            handle.catch_up(&known, || true);
                            for (reply, answer) in answers {
                                // A client that went away needs no answer.
                                let _ = reply.send(answer.map_err(SubmitError::Refused));
                            }
                            self.duty = Duty::Leads { elected, known };
                            Ok(())
                        }
                        Err(error) => Err(error),
                    }
                }
                waiting => {
                    self.duty = waiting;
                    return Ok(());
                }
            };
            match outcome {
                Ok(()) => {}
                Err(ReplicationError::Deposed(_)) => {
                    turn_away(desk);
                    standing.resign(handle);
                    // Elected still, it begins anew, but not at once.
                    return Ok(());
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// It knows what was decided before, and begins to lead: the first thing that it commits is to say so.
    fn enter(
        &mut self,
        runtime: &Runtime,
        standing: &Arc<Standing>,
        elected: u64,
        handle: &Handle,
    ) -> Result<(), ReplicationError> {
        let mut known = standing.machine.look(Clone::clone);
        let Some(state) = &known.state else {
            let begin = self.begin.take().ok_or(ReplicationError::Ended("it has not begun".to_owned()))?;
            let task = self.propose(runtime, standing, begin);
            self.duty = Duty::Begins { elected, task };
            return Ok(());
        };
        handle.catch_up(&known, || true);
        standing.leading.store(elected, Ordering::Release);
        let started = (EventKind::ControllerStarted, "controller".to_owned(), format!("term {elected}"));
        let events = told(&known, [started]);
        let change = Change::turn(&[], &events, state);
        known.events.extend(events);
        let task = self.propose(runtime, standing, change);
        self.duty = Duty::Commits { elected, known, task, answers: Vec::new() };
        Ok(())
    }

    /// One turn of a leader.
    fn lead(
        &mut self,
        runtime: &Runtime,
        standing: &Arc<Standing>,
        (desk, handle): (&Desk, &Handle),
        (elected, mut known): (u64, Known),
    ) {
        let Some(state) = &mut known.state else { return };
        let (mut logged, mut effects, mut answers) = (Vec::new(), Vec::new(), Vec::new());
        while answers.len() < WISHES_MAX {
            let Ok(request) = desk.requests().try_recv() else { break };
            let Request::Apply { command, reply } = request else { continue };
            let answer = state.carry_out(&command).map(|outcome| {
                effects.extend(outcome.effects);
                if outcome.changed {
                    logged.push((state.index, command));
                }
            });
            answers.push((reply, answer));
        }
        let events = effects.into_iter().filter_map(|effect| match effect {
            Effect::Event { kind, subject, message } => Some((kind, subject, message)),
            _ => None,
        });
        let state = state.clone();
        let events = told(&known, events);
        if logged.is_empty() && events.is_empty() {
            for (reply, answer) in answers {
                let _ = reply.send(answer.map_err(SubmitError::Refused));
            }
            self.duty = Duty::Leads { elected, known };
            return;
        }
        let commands: Vec<(u64, &Command)> =
            logged.iter().map(|(index, command)| (*index, command)).collect();
        let change = Change::turn(&commands, &events, &state);
        known.events.extend(events);
        if self.broken == Some(Broken::ShowsTooEarly) {
            handle.catch_up(&known, || true);
        }
        let task = self.propose(runtime, standing, change);
        self.duty = Duty::Commits { elected, known, task, answers };
    }

    fn propose(&self, runtime: &Runtime, standing: &Arc<Standing>, change: Change) -> Outcomes {
        let raft = standing.raft.clone();
        let lies = self.broken == Some(Broken::AnswersWhatIsVoid);
        runtime.spawn(async move {
            match propose(&raft, change).await {
                Err(ReplicationError::Deposed(why)) if lies && why == "another change came before" => Ok(()),
                outcome => outcome,
            }
        })
    }
}

/// Events after those that are known.
fn told(known: &Known, events: impl IntoIterator<Item = (EventKind, String, String)>) -> Vec<Event> {
    let last = known.events.back().map_or(0, |event| event.sequence);
    let numbered = (last + 1..).zip(events);
    let event = |(sequence, (kind, subject, message))| Event { sequence, time_ms: 0, kind, subject, message };
    numbered.map(event).collect()
}

fn finished(runtime: &Runtime, task: Outcomes) -> Result<(), ReplicationError> {
    runtime.block_on(task).unwrap_or_else(|error| Err(ReplicationError::Ended(error.to_string())))
}

fn hand_on(runtime: &Runtime, standing: &Arc<Standing>, (desk, handle): (&Desk, &Handle)) {
    while let Ok(request) = desk.requests().try_recv() {
        if let Request::Apply { command, reply } = request {
            runtime.spawn(forward(Arc::clone(standing), handle.clone(), command, reply));
        }
    }
}

/// Answers those who wait that nobody leads.
fn turn_away(desk: &Desk) {
    loop {
        match desk.requests().try_recv() {
            Ok(Request::Apply { reply, .. }) => {
                let _ = reply.send(Err(SubmitError::NoLeader));
            }
            Ok(_) => {}
            Err(TryRecvError::Empty | TryRecvError::Disconnected) => return,
        }
    }
}
