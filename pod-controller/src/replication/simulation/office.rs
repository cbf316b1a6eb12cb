//! What the thread of a replica does, step by step: it hands on what it is asked for, and leads while it is elected. The thread itself
//! waits where it stands; here the others have to run meanwhile. What is decided and what comes of it is the real conductor's.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::TryRecvError;
use std::time::{Duration, Instant};

use tokio::runtime::Runtime;
use tokio::task::JoinHandle;

use super::super::change::Change;
use super::super::forwarding::forward;
use super::super::proposer::propose;
use super::super::replica::{ReplicationError, Standing, catch_up, know_all};
use super::Broken;
use super::leader::{Leading, Pod, finished};
use crate::balance::BalancePolicy;
use crate::controller::conductor::{Conductor, Delays};
use crate::controller::inbox::Decided;
use crate::controller::{Desk, Handle, Reply, Request, SubmitError};
use crate::link_policy::{FailBack, LinkPolicy};
use crate::simulation::physical::FENCE_US;
use crate::simulation::port::Port;
use crate::simulation::relief;

/// How often every slot of the pool is looked at.
const SWEEP_EVERY: Duration = Duration::from_millis(20);
/// How long whom it fenced is given: the bound on a slow clock, and a moment.
const FENCE_DELAY: Duration = Duration::from_micros(FENCE_US * 11 / 10 + 10_000);

type Outcome = JoinHandle<Result<(), ReplicationError>>;

/// See the [module](self).
pub(super) struct Office {
    duty: Duty,
    /// The first change of all, where this replica is to begin.
    begin: Option<Change>,
    pod: Pod,
    /// How much is gathered into one commit.
    gathered_max: usize,
    broken: Option<Broken>,
}

enum Duty {
    Follows,
    CatchesUp { elected: u64, task: Outcome },
    Begins { elected: u64, task: Outcome },
    Leads { elected: u64, tenure: Box<Tenure> },
}

/// One term of office.
struct Tenure {
    conductor: Conductor<Leading>,
    stage: Stage,
    swept: Option<Instant>,
}

/// What the thread of a leader does.
enum Stage {
    /// It sleeps, until something is due.
    Sleeps(Option<Instant>),
    /// It waits until it is committed that it leads.
    Takes,
    /// It waits until what it decided then is committed.
    Decided(Decided<Leading>, Instant),
    /// As before, and it did not wait.
    HasLetOut(Option<Instant>),
}

impl Office {
    pub(super) fn new(begin: Option<Change>, pod: Pod, gathered_max: usize, broken: Option<Broken>) -> Self {
        Self { duty: Duty::Follows, begin, pod, gathered_max, broken }
    }

    /// Where it talks to daemons, while it leads.
    pub(super) fn port(&mut self) -> Option<&mut Port> {
        match &mut self.duty {
            Duty::Leads { tenure, .. } => Some(&mut tenure.conductor.world.port),
            _ => None,
        }
    }

    /// The last state of which it has told daemons something in this term.
    pub(super) fn told(&self) -> u64 {
        match &self.duty {
            Duty::Leads { tenure, .. } => tenure.conductor.world.told,
            _ => 0,
        }
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
                    // Whoever knows all that its log has before it leads hardly ever makes a void change.
                    let is_hasty =
                        matches!(self.broken, Some(Broken::TakesAnyBase | Broken::AnswersWhatIsVoid));
                    let task = runtime.spawn(async move {
                        if is_hasty { catch_up(&raft).await } else { know_all(&raft).await }
                    });
                    self.duty = Duty::CatchesUp { elected: elected_now, task };
                    return Ok(());
                }
                Duty::CatchesUp { elected, task } | Duty::Begins { elected, task } if task.is_finished() => {
                    finished(runtime, task)
                        .and_then(|()| self.enter(runtime, standing, elected, (desk, handle)))
                }
                Duty::Leads { elected, .. } if elected != elected_now => {
                    standing.resign(handle);
                    continue;
                }
                Duty::Leads { elected, mut tenure } => match tenure.step(runtime, desk, self.gathered_max) {
                    Ok(()) => {
                        self.duty = Duty::Leads { elected, tenure };
                        return Ok(());
                    }
                    Err(error) => Err(error),
                },
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
        (desk, handle): (&Desk, &Handle),
    ) -> Result<(), ReplicationError> {
        let known = standing.machine.look(Clone::clone);
        let raft = standing.raft.clone();
        if known.state.is_none() {
            let begin = self.begin.take().ok_or(ReplicationError::Ended("it has not begun".to_owned()))?;
            let task = runtime.spawn(async move { propose(&raft, begin).await });
            self.duty = Duty::Begins { elected, task };
            return Ok(());
        }
        handle.catch_up(standing.machine.sight(handle.journal().last()), || true);
        standing.leading.store(elected, Ordering::Release);
        let Some(state) = known.state else { return Ok(()) };
        let term = known.terms + elected;
        let around = (Arc::clone(&desk.shared), raft, standing.trusted);
        let world = Leading::new(self.pod.clone(), term, around, runtime.handle().clone(), self.broken);
        let loaded = self.pod.physical().loads.is_some();
        let mut conductor = Conductor::new(world, state, term, policies(loaded));
        let told = handle.journal().after(0, usize::MAX).events;
        conductor.remember(&told, (self.pod.now(), self.pod.time_ms()));
        let mut begun = conductor.begin(Vec::new());
        conductor.keep(&mut begun, self.pod.now())?;
        let tenure = Tenure { conductor, stage: Stage::Takes, swept: None };
        self.duty = Duty::Leads { elected, tenure: Box::new(tenure) };
        Ok(())
    }
}

impl Tenure {
    fn step(&mut self, runtime: &Runtime, desk: &Desk, gathered_max: usize) -> Result<(), ReplicationError> {
        let now = self.conductor.world.pod.now();
        if !matches!(self.stage, Stage::Sleeps(_)) {
            match self.conductor.world.committed(runtime) {
                None => return Ok(()),
                Some(outcome) => outcome?,
            }
            let due = match std::mem::replace(&mut self.stage, Stage::Sleeps(None)) {
                Stage::Sleeps(due) | Stage::HasLetOut(due) => due,
                Stage::Takes => {
                    self.conductor.publish_regions();
                    Some(now)
                }
                Stage::Decided(decided, at) => self.conductor.let_out(decided, at),
            };
            self.stage = Stage::Sleeps(due);
        }
        let Leading { pod, port, .. } = &mut self.conductor.world;
        if self.swept.is_none_or(|swept| swept + SWEEP_EVERY <= now) {
            self.swept = Some(now);
            port.sweep(&pod.physical());
        }
        let wishes = wishes(desk, gathered_max);
        let sleeps = matches!(self.stage, Stage::Sleeps(due) if due.is_none_or(|due| due > now));
        if wishes.is_empty() && port.is_calm() && sleeps {
            return Ok(());
        }
        let mut decided = self.conductor.decide(wishes, now);
        match self.conductor.world.broken {
            Some(Broken::ShowsTooEarly) => {
                let state = Arc::new(self.conductor.state.clone());
                let Leading { shared, unseen, .. } = &mut self.conductor.world;
                shared.show(state, crate::view::Waiting::default(), std::mem::take(unseen));
            }
            Some(Broken::TellsTooEarly) => {
                self.conductor.keep(&mut decided, now)?;
                self.stage = Stage::HasLetOut(self.conductor.let_out(decided, now));
                return Ok(());
            }
            _ => {}
        }
        self.conductor.keep(&mut decided, now)?;
        self.stage = Stage::Decided(decided, now);
        Ok(())
    }
}

fn policies(loaded: bool) -> (Delays, LinkPolicy, BalancePolicy) {
    let delays =
        Delays { fence: FENCE_DELAY, blk_grace: Duration::from_secs(1), drain: Duration::from_millis(300) };
    let links = LinkPolicy {
        flaps: 3,
        flap_window: Duration::from_secs(1),
        hold: Duration::from_millis(500),
        fail_back: FailBack::Return,
        stable: Duration::from_secs(1),
    };
    (delays, links, if loaded { relief::policy() } else { BalancePolicy::default() })
}

fn wishes(desk: &Desk, most: usize) -> Vec<(pod_state::Command, Reply)> {
    let mut wishes = Vec::new();
    while wishes.len() < most {
        match desk.requests().try_recv() {
            Ok(Request::Apply { command, reply }) => wishes.push((command, reply)),
            Ok(_) => {}
            Err(TryRecvError::Empty | TryRecvError::Disconnected) => break,
        }
    }
    wishes
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
