//! Two hosts, one ring, and memory that misbehaves: a schedule drawn from a seed, and what must hold in it.

use cxl_channel::{ReceivePolicy, Receiver, RingPlacement, Sender, Wake};
use cxl_pool::simulated::{self, Faults, Random, SimulatedMemory, SimulatedPool};
use cxl_pool::{Generation, HostId, LineOffset, Memory};

pub(crate) const SENDING: HostId = HostId::new(1);
pub(crate) const RECEIVING: HostId = HostId::new(2);
/// Who had the place before, and hands it out now.
const PREVIOUS: HostId = HostId::new(3);

/// Runs a check with so many seeds. If one fails, it says how to run that one again.
pub(crate) fn check_seeds(count: u64, check: impl Fn(u64) -> Result<(), String>) {
    simulated::check_seeds("-p cxl-channel --test simulated", count, check);
}

/// What a run is to be like.
#[derive(Clone, Copy)]
pub(crate) struct Scenario {
    /// At most so many messages of each generation.
    pub(crate) messages: u64,
    /// The receiver sleeps when it finds nothing, until it is woken.
    pub(crate) sleeps: bool,
    /// Processes crash, and the channel begins another generation, so many times at most.
    pub(crate) restarts: u64,
    /// Rings have more lines than are fetched ahead or acknowledged at once, and a run goes on for three laps.
    pub(crate) large: bool,
}

/// The words of a message: all of them follow from where it belongs, so that a wrong one is recognised.
fn message<const WORDS: usize>(seed: u64, generation: Generation, number: u64) -> [u64; WORDS] {
    let mut random = Random::new(seed ^ u64::from(generation.get()) << 32 ^ number);
    // Now and then zeros, which a receiver must tell from a ring that was zeroed.
    if random.one_in(16) { [0; WORDS] } else { std::array::from_fn(|_| random.bits()) }
}

/// The two sides and what each has done.
struct World<M: Memory, const WORDS: usize, W> {
    seed: u64,
    scenario: Scenario,
    random: Random,
    pool: SimulatedPool,
    wrap: W,
    placement: RingPlacement,
    policy: ReceivePolicy,
    /// The receiver has no doorbell.
    polls: bool,
    sender: Sender<M, WORDS>,
    /// Messages sent in the sender's generation.
    sent: u64,
    receiver: Receiver<M, WORDS>,
    /// Messages received in the receiver's generation.
    received: u64,
    asleep: bool,
}

/// Runs a scenario; an error says what went wrong. `wrap` may put something between a host and its memory.
pub(crate) fn run<M: Memory, const WORDS: usize>(
    seed: u64,
    scenario: Scenario,
    wrap: impl Fn(HostId, SimulatedMemory) -> M,
) -> Result<(), String> {
    let mut random = Random::new(seed ^ 0x5eed);
    // Mostly small, so that many laps fit a run; large ones now and then.
    let kinds = if random.one_in(64) { 9 } else { 5 };
    let slots = if scenario.large { 256 << random.below(6) } else { 4 << random.below(kinds) };
    let messages = if scenario.large { 3 * u64::from(slots) } else { 1 + random.below(scenario.messages) };
    // Some receivers poll, and say that they never wait for their doorbell; their sender may know that anyway.
    let polls = random.one_in(4);
    let scenario = Scenario { messages, sleeps: scenario.sleeps && !polls, ..scenario };
    let lines = RingPlacement::lines(slots, WORDS).get();
    let pool = SimulatedPool::new(seed, (lines + 20) * 64);
    let placement = RingPlacement { start: LineOffset::new(random.below(20)), slots };
    let policy = [
        ReceivePolicy::Bypass,
        ReceivePolicy::NaivePrefetch,
        ReceivePolicy::InvalidateConsumed,
        ReceivePolicy::InvalidatePrefetched,
        ReceivePolicy::Adaptive,
    ][usize::try_from(random.below(5)).unwrap()];
    let generation = Generation::new(1);
    if random.one_in(8) {
        leave_something::<WORDS>(&pool.host(PREVIOUS), placement);
        for host in [SENDING, RECEIVING] {
            // It took part in that, or its processor fetched something of it by itself.
            let memory = pool.host(host);
            for line in 0..placement.area(WORDS).lines.get() {
                if random.one_in(2) {
                    memory.load(placement.start.bytes().saturating_add(line * 64));
                }
            }
        }
        placement.clear(&wrap(PREVIOUS, pool.host(PREVIOUS)));
    }
    let mut receiver = open(wrap(RECEIVING, pool.host(RECEIVING)), placement, generation, policy, polls);
    for _ in 0..random.below(3) {
        if receiver.ready() {
            return Err("the receiver accepted a generation that was not begun".to_owned());
        }
    }
    let mut sender = Sender::begin(wrap(SENDING, pool.host(SENDING)), placement, generation);
    if sender.ready() {
        return Err("the sender believes that a generation was accepted that was not".to_owned());
    }
    sender.set_wakeups(!polls || random.one_in(2));
    let mut world = World::<M, WORDS, _> {
        seed,
        scenario,
        random,
        wrap,
        placement,
        policy,
        polls,
        sender,
        sent: 0,
        receiver,
        received: 0,
        asleep: false,
        pool,
    };
    for _ in 0..scenario.restarts {
        let steps = world.random.below(scenario.messages * 4);
        for _ in 0..steps {
            world.step()?;
        }
        world.restart()?;
    }
    world.finish()?;
    match world.pool.faults() {
        faults if faults == Faults::default() => Ok(()),
        faults => Err(format!("{faults:?}")),
    }
}

fn open<M: Memory, const WORDS: usize>(
    memory: M,
    placement: RingPlacement,
    generation: Generation,
    policy: ReceivePolicy,
    polls: bool,
) -> Receiver<M, WORDS> {
    let receiver = Receiver::open(memory, placement, generation).with_policy(policy);
    if polls { receiver.without_doorbell() } else { receiver }
}

/// Leaves something where the ring will be, the worst that it can be: it says that the first generation was begun and accepted, that
/// half a ring was consumed by a receiver that never sleeps, and that every slot holds a message of the first lap.
fn leave_something<const WORDS: usize>(memory: &SimulatedMemory, placement: RingPlacement) {
    let area = placement.area(WORDS);
    let line = |number: u64| area.start_byte().saturating_add(number * 64);
    memory.store(line(0), 1);
    memory.store(line(0).saturating_add(8), u64::MAX);
    let said = |value: u32| 1 << 32 | u64::from(value);
    for (word, value) in (0..).zip([placement.slots / 2, 0, 1, 0]) {
        memory.store(line(1).saturating_add(word * 8), said(value));
    }
    for number in 2..area.lines.get() {
        memory.write(line(number), &[0xff; 64]);
    }
    memory.flush(area.start_byte(), area.bytes());
    memory.full_fence();
}

impl<M: Memory, const WORDS: usize, W: Fn(HostId, SimulatedMemory) -> M> World<M, WORDS, W> {
    /// Something that one of the two would do next.
    fn step(&mut self) -> Result<(), String> {
        if self.random.one_in(2) { self.send() } else { self.receive() }
    }

    fn send(&mut self) -> Result<(), String> {
        let burst = 1 << self.random.below(6);
        let left = burst.min(self.scenario.messages - self.sent);
        let (seed, generation) = (self.seed, self.sender.generation());
        let message = |number| message(seed, generation, number);
        if self.random.one_in(2) {
            let mut batch = [[0; WORDS]; 32];
            for (number, place) in (self.sent..self.sent + left).zip(&mut batch) {
                *place = message(number);
            }
            // As many as there is room for; the others come again later.
            self.sent += self.sender.send_batch(&batch[..usize::try_from(left).unwrap_or(0)]) as u64;
        } else {
            for number in self.sent..self.sent + left {
                if self.sender.send(message(number)).is_err() {
                    break;
                }
                self.sent += 1;
            }
        }
        if self.sent > self.received + u64::from(self.placement.slots)
            && self.sender.generation() == self.receiver.generation()
        {
            return Err(format!("message {} overwrote one that was not received", self.sent));
        }
        // A sender may also be slow to publish.
        if !self.random.one_in(4) {
            self.publish();
        }
        Ok(())
    }

    fn publish(&mut self) {
        if self.sender.publish() == Wake::Needed && self.asleep {
            self.asleep = false;
            self.receiver.wake();
        }
    }

    fn receive(&mut self) -> Result<(), String> {
        if self.asleep {
            return Ok(());
        }
        let most = 1 << self.random.below(6);
        let mut batch = [[0; WORDS]; 32];
        let in_batch = self.random.one_in(2);
        let mut taken = 0;
        while taken < most {
            let count = if in_batch {
                self.receiver.receive_batch(&mut batch[..most - taken])
            } else {
                self.receiver.receive().map(|found| batch[0] = found).iter().count()
            };
            if count == 0 {
                let sleepy = self.scenario.sleeps && self.receiver.ready() && self.random.one_in(2);
                self.asleep = sleepy && self.receiver.announce_sleep();
                return Ok(());
            }
            taken += count;
            for found in &batch[..count] {
                self.expect(found)?;
            }
        }
        Ok(())
    }

    /// What arrived is the next message of the generation.
    fn expect(&mut self, found: &[u64; WORDS]) -> Result<(), String> {
        let mut expected = message(self.seed, self.receiver.generation(), self.received);
        expected[WORDS - 1] &= !(1 << 63);
        if *found != expected {
            return Err(format!(
                "message {} of generation {} arrived as {found:x?} instead of {expected:x?} ({:?})",
                self.received,
                self.receiver.generation(),
                self.policy
            ));
        }
        self.received += 1;
        Ok(())
    }

    /// Either process may crash. Both sides change over to the next generation, in either order, and what is left of
    /// the older one goes on for a while.
    fn restart(&mut self) -> Result<(), String> {
        let generation = self.sender.generation().next();
        let (sender_crashed, receiver_crashed) = (self.random.one_in(2), self.random.one_in(2));
        if sender_crashed {
            self.pool.crash(SENDING);
        }
        if receiver_crashed {
            self.pool.crash(RECEIVING);
        }
        let meanwhile = self.random.below(30);
        if self.random.one_in(2) {
            self.begin_sending(generation);
            for _ in 0..meanwhile {
                if receiver_crashed { self.send()? } else { self.step()? }
            }
            self.open_receiving(generation);
        } else {
            self.open_receiving(generation);
            for _ in 0..meanwhile {
                if sender_crashed { self.receive()? } else { self.step()? }
            }
            self.begin_sending(generation);
        }
        Ok(())
    }

    fn begin_sending(&mut self, generation: Generation) {
        let memory = (self.wrap)(SENDING, self.pool.host(SENDING));
        self.sender = Sender::begin(memory, self.placement, generation);
        self.sent = 0;
    }

    fn open_receiving(&mut self, generation: Generation) {
        let memory = (self.wrap)(RECEIVING, self.pool.host(RECEIVING));
        self.receiver = open(memory, self.placement, generation, self.policy, self.polls);
        self.received = 0;
        self.asleep = false;
    }

    /// Everything that was sent arrives, however the memory behaves.
    fn finish(&mut self) -> Result<(), String> {
        let mut steps = 0;
        while self.received < self.scenario.messages {
            self.step()?;
            if self.sent == self.scenario.messages {
                self.publish();
            }
            steps += 1;
            if steps > 40_000 + 4 * self.scenario.messages {
                let (sent, received, asleep) = (self.sent, self.received, self.asleep);
                return Err(format!("stuck: {sent} sent, {received} received, asleep: {asleep}"));
            }
        }
        if self.receiver.receive().is_some() {
            return Err("a message came that was never sent".to_owned());
        }
        Ok(())
    }
}

#[test]
#[should_panic(expected = "cargo test -p cxl-channel --test simulated -- --exact")]
fn a_failure_prints_the_command_that_shows_it_again() {
    check_seeds(5, |_| Err("wrong".to_owned()));
}
