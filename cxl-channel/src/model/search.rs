//! The search through everything that two sides and the memory between them can do.

use std::collections::HashSet;

use cxl_pool::{Generation, LineOffset};

use super::fingerprint::fingerprint;
use super::memory::{LINES, ModelMemory, in_step, set_wide};
use super::shared::{RECEIVING, SENDING, Shared};
use super::step::Step;
use crate::{ReceivePolicy, Receiver, RingPlacement, Sender, Wake};

/// So many times in a row the sender may find no room in an empty ring: once because it looked before it was empty.
const PATIENCE: u8 = 3;
/// How far looks that find nothing are counted while messages may still be on their way.
const IDLE: u8 = 2;
/// How far after that: the first look may have begun before, the second one find a stale line, the third one may not.
const STUCK: u8 = IDLE + 3;

const FIRST_GENERATION: u32 = 1;

/// What the two sides do.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scenario {
    pub(super) name: &'static str,
    pub(super) slots: u32,
    pub(super) policy: ReceivePolicy,
    /// Messages of the first generation.
    pub(super) messages: u8,
    /// Messages of each later one.
    pub(super) messages_later: u8,
    /// How many are handed over at a time.
    pub(super) batch: usize,
    /// Whether whole lines are stored and loaded by instructions that say nothing of the order inside them.
    pub(super) wide: bool,
    /// Whether the sender may go on without publishing each time.
    pub(super) lazy: bool,
    /// Whether the receiver ever waits for its doorbell.
    pub(super) doorbell: bool,
    /// How often the receiver may go to sleep.
    pub(super) sleeps: u8,
    /// How often the sender may die, whatever it is just doing, and come back in the next generation. The receiver follows.
    pub(super) sender_deaths: u8,
    /// The same for the receiver, which the sender follows.
    pub(super) receiver_deaths: u8,
}

impl Scenario {
    fn messages_of(&self, generation: u32) -> u8 {
        if generation == FIRST_GENERATION { self.messages } else { self.messages_later }
    }
}

/// What was found.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Explored {
    pub(super) states: usize,
    pub(super) steps: usize,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum SenderCall {
    Begin,
    Ready,
    Send,
    /// Publish, or send more first.
    Decide,
    Publish,
    /// Time passes: all that was written back arrives.
    Settle,
    Done,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum ReceiverCall {
    Open,
    Receive,
    /// Look again, or sleep.
    Decide,
    AnnounceSleep,
    Asleep,
    Wake,
    /// The sender began another generation.
    Closed,
}

/// One side: its end of the channel as it was when the call began that is under way.
#[derive(Clone, Hash)]
struct Side<End, Call> {
    end: Option<End>,
    call: Call,
    loaded: Vec<u64>,
    done: usize,
    generation: u32,
    /// How many messages it has sent or received in its generation.
    count: u8,
    /// How many calls in a row did nothing, up to a limit.
    idle: u8,
    deaths: u8,
}

impl<End, Call: Copy> Side<End, Call> {
    fn new(call: Call, deaths: u8) -> Self {
        let generation = FIRST_GENERATION;
        Self { end: None, call, loaded: Vec::new(), done: 0, generation, count: 0, idle: 0, deaths }
    }

    /// The generations in which it may take part from here on: the next one, with one death less left, or that of the other side,
    /// if that is ahead.
    fn restarts(&self, call: Call, other: u32) -> impl Iterator<Item = Self> {
        let dies = self.deaths.checked_sub(1).map(|deaths| (self.generation + 1, deaths));
        let follows = (other > self.generation).then_some((other, self.deaths));
        let restart = move |(generation, deaths)| Self { generation, ..Self::new(call, deaths) };
        dies.into_iter().chain(follows).map(restart)
    }
}

#[derive(Clone, Hash)]
struct State<const COHERENT: bool, const WORDS: usize> {
    shared: Shared,
    sending: Side<Sender<ModelMemory<COHERENT>, WORDS>, SenderCall>,
    receiving: Side<Receiver<ModelMemory<COHERENT>, WORDS>, ReceiverCall>,
    sleeps: u8,
    rung: bool,
}

/// The words of a message. Some are zeros, which must not be taken for emptied slots.
fn message<const WORDS: usize>(generation: u32, number: u8) -> [u64; WORDS] {
    if number % 4 == 1 {
        return [0; WORDS];
    }
    // Words that never change need not be explored.
    let mut message = [0; WORDS];
    message[0] = u64::from(generation) << 16 | u64::from(number) | 1 << 8;
    message[WORDS - 1] = message[0] | 1 << 62;
    message
}

/// Goes through everything that can happen. An error says what went wrong, and how it came to that.
pub(super) fn explore<const COHERENT: bool, const WORDS: usize>(
    scenario: Scenario,
) -> Result<Explored, String> {
    set_wide(scenario.wide);
    let placement = RingPlacement { start: LineOffset::new(0), slots: scenario.slots };
    assert!(placement.area(WORDS).lines.get() <= LINES);
    let start = State::<COHERENT, WORDS> {
        shared: Shared::new(placement.area(WORDS).lines.get(), COHERENT),
        sending: Side::new(SenderCall::Begin, scenario.sender_deaths),
        receiving: Side::new(ReceiverCall::Open, scenario.receiver_deaths),
        sleeps: scenario.sleeps,
        rung: false,
    };
    let search = Search { scenario, placement };
    let mut explored = Explored::default();
    let mut seen = HashSet::new();
    let (_, start) = search.step(&start, SENDING, None)?;
    let start =
        start.map(|start| search.step(&start, RECEIVING, None)).transpose()?.and_then(|(_, start)| start);
    let mut open: Vec<_> = start.into_iter().collect();
    while let Some(state) = open.pop() {
        if !seen.insert(fingerprint(&state)) {
            continue;
        }
        explored.states += 1;
        let mut next = Vec::new();
        search.successors(&state, &mut next)?;
        explored.steps += next.len();
        if next.is_empty() && !search.finished(&state) {
            return Err(format!("nothing moves any more: {}", describe(&state)));
        }
        open.append(&mut next);
    }
    Ok(explored)
}

fn describe<const COHERENT: bool, const WORDS: usize>(state: &State<COHERENT, WORDS>) -> String {
    format!(
        "sender of generation {} sent {} and is in {:?}; receiver of generation {} received {} and is in {:?}",
        state.sending.generation,
        state.sending.count,
        state.sending.call,
        state.receiving.generation,
        state.receiving.count,
        state.receiving.call
    )
}

struct Search {
    scenario: Scenario,
    placement: RingPlacement,
}

type Successors<const COHERENT: bool, const WORDS: usize> = Vec<State<COHERENT, WORDS>>;

impl Search {
    fn finished<const COHERENT: bool, const WORDS: usize>(&self, state: &State<COHERENT, WORDS>) -> bool {
        state.receiving.generation == state.sending.generation
            && state.receiving.count == self.scenario.messages_of(state.receiving.generation)
    }

    /// All that can come next.
    fn successors<const COHERENT: bool, const WORDS: usize>(
        &self,
        state: &State<COHERENT, WORDS>,
        next: &mut Successors<COHERENT, WORDS>,
    ) -> Result<(), String> {
        if self.finished(state) && state.sending.call == SenderCall::Done {
            return Ok(());
        }
        for host in [SENDING, RECEIVING] {
            let mut choice = 0;
            loop {
                let (alternatives, after) = self.step(state, host, Some(choice))?;
                next.extend(after);
                choice += 1;
                if choice >= alternatives {
                    break;
                }
            }
        }
        // Who follows the other side may do so in the middle of a call, and lose what is under way, as if it had died as well: more
        // than can happen to one that lives on.
        for sending in state.sending.restarts(SenderCall::Begin, state.receiving.generation) {
            let mut after = State { sending, ..state.clone() };
            after.shared.crash(SENDING);
            next.extend(self.step(&after, SENDING, None)?.1);
        }
        for receiving in state.receiving.restarts(ReceiverCall::Open, state.sending.generation) {
            let mut after = State { receiving, rung: false, ..state.clone() };
            after.shared.crash(RECEIVING);
            next.extend(self.step(&after, RECEIVING, None)?.1);
        }
        Ok(())
    }

    /// One side goes on: it does what it stopped before, with this choice, and all up to the next thing whose order matters.
    /// Without a choice it has only begun, and goes up to the first such thing. Also says how many choices there are.
    fn step<const COHERENT: bool, const WORDS: usize>(
        &self,
        state: &State<COHERENT, WORDS>,
        host: usize,
        choice: Option<usize>,
    ) -> Result<(usize, Option<State<COHERENT, WORDS>>), String> {
        let mut after = state.clone();
        let mut step = Step::new(state.shared.clone(), host, choice);
        let (loaded, done) = if host == SENDING {
            (&mut after.sending.loaded, &mut after.sending.done)
        } else {
            (&mut after.receiving.loaded, &mut after.receiving.done)
        };
        (step.loaded, step.done) = (std::mem::take(loaded), *done);
        let mut step = Some(step);
        let went_on = loop {
            let went_on = if host == SENDING {
                self.send(&mut after, &mut step)?
            } else {
                self.receive(&mut after, &mut step)?
            };
            if let Some(rule) = step.as_ref().and_then(|step| step.broken_rule) {
                return Err(format!("{rule}: {}", describe(state)));
            }
            match went_on {
                Progress::Returned => {}
                Progress::Suspended => break true,
                Progress::Nothing => break step.as_ref().is_some_and(|step| step.choice.is_none()),
            }
        };
        let step = step.expect("a step is given back");
        let side = if host == SENDING {
            (&mut after.sending.loaded, &mut after.sending.done)
        } else {
            (&mut after.receiving.loaded, &mut after.receiving.done)
        };
        (*side.0, *side.1) = (step.loaded, step.done);
        after.shared = step.shared;
        Ok((step.alternatives, went_on.then_some(after)))
    }

    /// Makes the sender's next call, or goes on with it.
    fn send<const COHERENT: bool, const WORDS: usize>(
        &self,
        state: &mut State<COHERENT, WORDS>,
        step: &mut Option<Step>,
    ) -> Result<Progress, String> {
        let drained = state.sending.count == state.receiving.count
            && (state.receiving.idle >= IDLE || state.receiving.call == ReceiverCall::Asleep);
        let accepted = state.receiving.generation == state.sending.generation
            && state.receiving.idle >= IDLE
            && state.receiving.end.as_ref().is_some_and(|receiver| !receiver.is_waiting());
        let (side, rung) = (&mut state.sending, &mut state.rung);
        let generation = Generation::new(side.generation);
        let messages = self.scenario.messages_of(side.generation);
        let left = usize::from(messages - side.count);
        let mut end = side.end.clone();
        let mut call = side.call;
        let (mut count, mut idle, mut rings) = (side.count, side.idle, false);
        let progress = match call {
            SenderCall::Done => return Ok(Progress::Nothing),
            SenderCall::Decide => {
                let Some(choice) = take_choice(step, 2) else { return Ok(Progress::Suspended) };
                side.call = if choice == 0 { SenderCall::Publish } else { SenderCall::Send };
                return Ok(Progress::Returned);
            }
            SenderCall::Settle => {
                let Some(_) = take_choice(step, 1) else { return Ok(Progress::Suspended) };
                if let Some(step) = step {
                    step.shared.full_fence(SENDING);
                }
                side.call = SenderCall::Done;
                return Ok(Progress::Returned);
            }
            SenderCall::Begin => make(step, || {
                end = Some(Sender::begin(ModelMemory, self.placement, generation));
                call = SenderCall::Ready;
            }),
            SenderCall::Ready => make(step, || {
                idle = (idle + u8::from(accepted)).min(PATIENCE);
                if end.as_mut().is_some_and(Sender::ready) {
                    (call, idle) = (SenderCall::Send, 0);
                }
            }),
            SenderCall::Send => make(step, || {
                let Some(sender) = &mut end else { return };
                let batch: Vec<_> = (count..)
                    .map(|number| message(side.generation, number))
                    .take(left.min(self.scenario.batch))
                    .collect();
                let sent = if self.scenario.batch > 1 {
                    sender.send_batch(&batch)
                } else {
                    usize::from(sender.send(batch[0]).is_ok())
                };
                count += u8::try_from(sent).expect("few");
                idle = if sent > 0 { 0 } else { (idle + u8::from(drained)).min(PATIENCE) };
                let publishes = sent == 0 || count == messages;
                call =
                    if !publishes && self.scenario.lazy { SenderCall::Decide } else { SenderCall::Publish };
            }),
            SenderCall::Publish => make(step, || {
                rings = end.as_mut().is_some_and(|sender| sender.publish() == Wake::Needed);
                call = if count == messages { SenderCall::Settle } else { SenderCall::Send };
            }),
        };
        if progress == Progress::Returned {
            (side.end, side.call, side.count, side.idle) = (end, call, count, idle);
            *rung |= rings;
            if COHERENT
                && idle > 0
                && let Some(step) = step
            {
                step.shared.full_fence(SENDING);
            }
            if idle == PATIENCE {
                return Err(format!(
                    "the sender does not find that the receiver is ready for more: {}",
                    describe(state)
                ));
            }
            // What a batch has received counts once the call has ended.
            if self.scenario.batch == 1
                && state.sending.generation == state.receiving.generation
                && u32::from(count) > u32::from(state.receiving.count) + self.scenario.slots
            {
                return Err(format!("a message overwrote one that was not received: {}", describe(state)));
            }
        }
        Ok(progress)
    }

    /// Makes the receiver's next call, or goes on with it.
    fn receive<const COHERENT: bool, const WORDS: usize>(
        &self,
        state: &mut State<COHERENT, WORDS>,
        step: &mut Option<Step>,
    ) -> Result<Progress, String> {
        let all_sent =
            state.sending.call == SenderCall::Done && state.sending.generation == state.receiving.generation;
        let begun =
            state.sending.call == SenderCall::Ready && state.sending.generation == state.receiving.generation;
        let side = &mut state.receiving;
        let generation = Generation::new(side.generation);
        let mut end = side.end.clone();
        let mut call = side.call;
        let mut found: Option<Vec<[u64; WORDS]>> = None;
        let mut sleeps = state.sleeps;
        let progress = match call {
            ReceiverCall::Closed => return Ok(Progress::Nothing),
            ReceiverCall::Decide => {
                let Some(choice) = take_choice(step, 2) else { return Ok(Progress::Suspended) };
                side.call = if choice == 0 { ReceiverCall::Receive } else { ReceiverCall::AnnounceSleep };
                return Ok(Progress::Returned);
            }
            ReceiverCall::Asleep => {
                // The doorbell is a matter of the kernel, in which nothing gets lost.
                if !state.rung {
                    return Ok(Progress::Nothing);
                }
                let Some(_) = take_choice(step, 1) else { return Ok(Progress::Suspended) };
                state.rung = false;
                side.call = ReceiverCall::Wake;
                return Ok(Progress::Returned);
            }
            ReceiverCall::Open => make(step, || {
                let receiver =
                    Receiver::open(ModelMemory, self.placement, generation).with_policy(self.scenario.policy);
                end = Some(if self.scenario.doorbell { receiver } else { receiver.without_doorbell() });
                call = ReceiverCall::Receive;
            }),
            ReceiverCall::Receive => make(step, || {
                let Some(receiver) = &mut end else { return };
                let messages = if self.scenario.batch > 1 {
                    let mut messages = vec![[0; WORDS]; self.scenario.batch];
                    let count = receiver.receive_batch(&mut messages);
                    messages.truncate(count);
                    messages
                } else {
                    receiver.receive().into_iter().collect()
                };
                let tired = messages.is_empty() && sleeps > 0;
                call = if tired { ReceiverCall::Decide } else { ReceiverCall::Receive };
                if receiver.is_closed() {
                    call = ReceiverCall::Closed;
                }
                found = Some(messages);
            }),
            ReceiverCall::AnnounceSleep => make(step, || {
                let Some(receiver) = &mut end else { return };
                let safe = receiver.ready() && receiver.announce_sleep();
                let sleeps_on = safe && self.scenario.doorbell;
                call = if sleeps_on { ReceiverCall::Asleep } else { ReceiverCall::Receive };
                sleeps -= 1;
            }),
            ReceiverCall::Wake => make(step, || {
                end.iter_mut().for_each(Receiver::wake);
                call = ReceiverCall::Receive;
            }),
        };
        if progress == Progress::Suspended {
            return Ok(progress);
        }
        (side.end, side.call, state.sleeps) = (end, call, sleeps);
        if let Some(messages) = found {
            side.idle = if messages.is_empty() { (side.idle + 1).min(STUCK) } else { 0 };
            for words in messages {
                let mut expected = message(side.generation, side.count);
                expected[WORDS - 1] &= !(1 << 63);
                if words != expected || side.count == self.scenario.messages_of(side.generation) {
                    return Err(format!("{words:x?} arrived instead of {expected:x?}: {}", describe(state)));
                }
                side.count += 1;
            }
            if COHERENT
                && side.idle > 0
                && let Some(step) = step
            {
                step.shared.full_fence(RECEIVING);
            }
            // What was sent before this side last looked has arrived.
            let waits = begun && side.end.as_ref().is_some_and(Receiver::is_waiting);
            if !all_sent && !waits {
                side.idle = side.idle.min(IDLE);
            } else if side.idle == STUCK && side.count < self.scenario.messages_of(side.generation) {
                return Err(format!("the receiver does not find what was sent: {}", describe(state)));
            }
        }
        Ok(progress)
    }
}

/// Makes a call, or goes on with it.
fn make(step: &mut Option<Step>, call: impl FnOnce()) -> Progress {
    if let Some(step) = step {
        step.rewind();
    }
    in_step(step, call);
    let Some(step) = step else { return Progress::Suspended };
    if step.suspended {
        return Progress::Suspended;
    }
    step.finish_call();
    Progress::Returned
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Progress {
    /// The call ended; the next one may go on at once.
    Returned,
    /// The next thing that it would do needs a step of its own.
    Suspended,
    /// There is nothing to do.
    Nothing,
}

fn take_choice(step: &mut Option<Step>, alternatives: usize) -> Option<usize> {
    let step = step.as_mut()?;
    let choice = step.choice.take()?;
    step.alternatives = alternatives;
    Some(choice)
}
