//! The receiving side of a channel.

mod ahead;

use cxl_pool::{ByteOffset, Generation, LINE_BYTES, LINE_WORDS, Memory};

use crate::handover::{Handover, Way};
use crate::header::{self, EPOCH_BIT, Sleep};
use crate::policy::PREFETCH_LINES;
use crate::{ReceivePolicy, RingPlacement};
use ahead::AWAY_LINES;

/// The receiving side of a channel of messages of `WORDS` words: 2 (16 B) or 8 (64 B).
#[cfg_attr(test, derive(Clone, Hash))]
pub struct Receiver<M: Memory, const WORDS: usize> {
    memory: M,
    placement: RingPlacement,
    generation: Generation,
    policy: ReceivePolicy,
    first_slot: ByteOffset,
    slots: u64,
    lines: u64,
    received: u64,
    /// On coherent memory: messages before this one need not be waited for.
    sure: u64,
    /// On coherent memory: how many came since a look found nothing, up to as many as it looks ahead.
    streak: u64,
    /// On coherent memory: from this message on it looks ahead without such a streak.
    away_at: u64,
    /// On coherent memory: of lines between the two sides.
    handover: Handover,
    /// On coherent memory: whether the sender was asked to write back what it has written.
    through_memory: bool,
    /// How many messages the sender was told are consumed.
    acknowledged: u64,
    /// Lines before this one, counted over all laps, were prefetched since they were last invalidated.
    prefetched: u64,
    /// How many lines ahead to prefetch now.
    ahead: u64,
    /// The line at which a look last found nothing, and the one up to which as many follow as came since the look before.
    paused: u64,
    expected: u64,
    /// The line before the current one was consumed and is still to be invalidated, if the policy adapts: once the current one
    /// is consumed too, or a look finds nothing. Done at once, it is waited for by the first fence of whoever answers the message.
    lingers: bool,
    state: State,
    sleep: Sleep,
    /// Whether it ever waits for its doorbell.
    doorbell: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
#[cfg_attr(test, derive(Hash))]
enum State {
    /// The sender has not begun the generation, as far as is known.
    Waiting,
    Open,
    /// The sender began another generation.
    Closed,
}

impl<M: Memory, const WORDS: usize> Receiver<M, WORDS> {
    const SLOT_BYTES: u64 = {
        assert!(WORDS.is_power_of_two() && WORDS <= LINE_BYTES / 8, "a message must not straddle lines");
        WORDS as u64 * 8
    };
    const SLOTS_PER_LINE: u64 = LINE_BYTES as u64 / Self::SLOT_BYTES;

    /// Gets ready to receive this generation. Messages come once the sender has begun it; see
    /// [`ready`](Self::ready).
    ///
    /// # Panics
    ///
    /// If the placement is not one that [`RingPlacement::check`] accepts, or the generation is 0.
    pub fn open(memory: M, placement: RingPlacement, generation: Generation) -> Self {
        placement.expect_valid(WORDS, &memory);
        assert!(generation.get() != 0, "generation 0 stands for none");
        let slots = u64::from(placement.slots);
        let lines = slots / Self::SLOTS_PER_LINE;
        let policy = ReceivePolicy::default();
        Self {
            memory,
            placement,
            generation,
            policy,
            first_slot: placement.first_slot(),
            slots,
            lines,
            received: 0,
            sure: 0,
            streak: 0,
            away_at: AWAY_LINES * Self::SLOTS_PER_LINE,
            handover: Handover::new(lines),
            through_memory: false,
            acknowledged: 0,
            prefetched: 0,
            ahead: 0,
            paused: 0,
            expected: 0,
            lingers: false,
            state: State::Waiting,
            sleep: Sleep::default(),
            doorbell: true,
        }
    }

    /// Receives in another way than the default one.
    #[must_use]
    pub fn with_policy(mut self, policy: ReceivePolicy) -> Self {
        self.policy = policy;
        self.ahead = if policy.adapts() { 0 } else { PREFETCH_LINES };
        self
    }

    /// Never waits for the doorbell: its sender need not look each time whether it sleeps. To be said before
    /// [`ready`](Self::ready) is asked the first time.
    #[must_use]
    pub fn without_doorbell(mut self) -> Self {
        self.doorbell = false;
        self
    }

    /// The channel's generation.
    pub fn generation(&self) -> Generation {
        self.generation
    }

    /// How many messages were received.
    pub fn received(&self) -> u64 {
        self.received
    }

    /// How many messages were received of which the sender does not know yet: at most half a ring.
    pub fn lag(&self) -> u64 {
        self.received - self.acknowledged
    }

    /// How many messages the sender knows to be consumed.
    pub fn acknowledged(&self) -> u64 {
        self.acknowledged
    }

    /// Whether the sender has begun this generation and this side has accepted it. Cheap once it has. The sender
    /// may be asleep when this turns true: ring its doorbell.
    pub fn ready(&mut self) -> bool {
        if self.state == State::Waiting && self.begun() {
            // What this host has cached of the ring may be of an older generation, or of another ring that lay here. From here on, it is
            // what the sender emptied, or newer.
            self.memory.invalidate(self.first_slot, self.slots * Self::SLOT_BYTES);
            // So may what it has of its own line. The first store would have all of that seen again, and of another ring here the numbers
            // of generations were the same ones.
            self.memory.flush(self.placement.receiver_line(), LINE_BYTES as u64);
            self.memory.full_fence();
            if !self.doorbell {
                // In the line of the acceptance, and before it: whoever sees that sees this.
                let at = self.placement.receiver_line().saturating_add(header::BELL_UNUSED);
                self.memory.store(at, header::tagged(self.generation, 1));
            }
            self.announce(Sleep::default());
            self.acknowledge();
            self.memory.full_fence();
            self.state = State::Open;
        }
        self.state == State::Open
    }

    /// The next message, with its top bit clear; nothing if there is none.
    #[inline]
    pub fn receive(&mut self) -> Option<[u64; WORDS]> {
        if self.state != State::Open && !self.ready() {
            return None;
        }
        let at = self.next_slot();
        if !M::COHERENT && self.policy.invalidates_before() {
            self.memory.invalidate(at, Self::SLOT_BYTES);
            self.memory.full_fence();
        }
        let epoch = self.epoch();
        // Whoever waits for a message that fills a line looks at one word of it only, and so finds the message sooner.
        // On coherent memory what is read of the line afterwards is as new as that word, or newer.
        if M::COHERENT && WORDS == LINE_WORDS && self.last_word(at) & EPOCH_BIT != epoch {
            self.found_nothing(at);
            return None;
        }
        // The word with the epoch was written last, so it is read first.
        let mut message = self.memory.load_words::<WORDS>(at);
        let last = message[WORDS - 1];
        // One bit is enough to tell a new message from an old one. When the receiver was here a lap ago it consumed that
        // lap's message, so its copy was that recent; a copy is replaced by a newer one only. And the sender is at
        // most one lap ahead. So what the slot seems to hold is of this lap or of the one before it.
        if last & EPOCH_BIT != epoch {
            self.found_nothing(at);
            return None;
        }
        // In laps whose epoch is 0, a slot that the sender of a newer generation emptied looks like a message that ends
        // in zeros.
        if last == 0 && !self.begun() {
            self.state = State::Closed;
            return None;
        }
        message[WORDS - 1] = last & !EPOCH_BIT;
        self.received += 1;
        self.consumed(at);
        Some(message)
    }

    /// Receives as many messages as there are and fit, and says how many.
    #[inline]
    pub fn receive_batch(&mut self, into: &mut [[u64; WORDS]]) -> usize {
        // Whoever waits looks at one word: to find a line not to be full takes longer, and so would what comes meanwhile.
        if M::COHERENT && self.streak == 0 && self.state == State::Open {
            let at = self.next_slot();
            if self.last_word(at) & EPOCH_BIT != self.epoch() {
                self.found_nothing(at);
                return 0;
            }
        }
        let mut count = 0;
        while count < into.len() {
            let whole = self.receive_lines(&mut into[count..]);
            count += whole;
            if whole == 0 {
                match self.receive() {
                    Some(message) => into[count] = message,
                    None => break,
                }
                count += 1;
            }
        }
        count
    }

    /// Receives the messages of the next lines that are full of new ones, some of them at least. If there are none, nothing
    /// changes, and [`receive`](Self::receive) finds out what is the matter.
    #[inline]
    fn receive_lines(&mut self, into: &mut [[u64; WORDS]]) -> usize {
        let at_line = self.received.is_multiple_of(Self::SLOTS_PER_LINE);
        if !at_line || self.state != State::Open || !M::COHERENT && self.policy.invalidates_before() {
            return 0;
        }
        if M::COHERENT && self.received + into.len() as u64 > self.sure {
            self.look_ahead();
        }
        let line = (self.received / Self::SLOTS_PER_LINE) & (self.lines - 1);
        let epoch = self.epoch();
        // On to the end of the lap, where the epoch changes, or until the sender is to be told. What is done to the cache, is
        // done line by line.
        let until_told = (self.slots / 2).saturating_sub(self.lag()).div_ceil(Self::SLOTS_PER_LINE).max(1);
        let most = if M::COHERENT { (self.lines - line).min(until_told) } else { 1 };
        let lines = into.as_flattened_mut().as_chunks_mut().0;
        let most = lines.len().min(header::low_bits(most) as usize);
        let at = self.line(line);
        let count = self.memory.load_lines(at, &mut lines[..most], header::mark::<WORDS>(epoch));
        let count = count * (LINE_WORDS / WORDS);
        if count > 0 {
            self.received += count as u64;
            if M::COHERENT {
                self.streak = (self.streak + count as u64).min(self.distance());
                let bytes = count as u64 * Self::SLOT_BYTES;
                if self.handover.read(bytes / LINE_BYTES as u64) != Way::Kept {
                    self.memory.let_go(at, bytes);
                }
            }
            self.consumed(at);
        }
        count
    }

    /// Where the next message will be.
    #[inline]
    fn next_slot(&self) -> ByteOffset {
        self.first_slot.saturating_add((self.received & (self.slots - 1)) * Self::SLOT_BYTES)
    }

    /// The epoch of the next message.
    #[inline]
    fn epoch(&self) -> u64 {
        header::epoch(self.received >> self.slots.trailing_zeros())
    }

    /// The word that the sender writes last, of the slot at `at`.
    #[inline]
    fn last_word(&self, at: ByteOffset) -> u64 {
        self.memory.load(at.saturating_add(Self::SLOT_BYTES - 8))
    }

    /// Announces sleep and looks once more: true if there is still nothing, so that the sender will ring for the
    /// next message. Otherwise the receiver counts as awake again. Without a doorbell it only looks.
    ///
    /// Also true if the sender has not begun the generation: then nothing would be heard of that, so sleep only
    /// briefly.
    pub fn announce_sleep(&mut self) -> bool {
        if !self.ready() {
            return true;
        }
        if self.doorbell {
            let announcement = self.sleep.announcement.wrapping_add(1) & (u32::MAX >> 1);
            self.announce(Sleep { asleep: true, announcement });
            // First the announcement must have arrived, and only then comes the look: see `Sender::publish`.
            if !M::COHERENT {
                self.memory.full_fence();
            }
        }
        let at = self.next_slot();
        self.memory.invalidate(at, Self::SLOT_BYTES);
        self.memory.full_fence();
        let last = self.last_word(at);
        let empty = last & EPOCH_BIT != self.epoch();
        if !empty {
            self.wake();
        }
        empty
    }

    /// Takes the announcement of sleep back, if there is one. To be called when the doorbell rang or the sleep ended.
    pub fn wake(&mut self) {
        if self.sleep.asleep {
            // It need not be visible soon: until then, the sender rings once in vain at most.
            self.announce(Sleep { asleep: false, ..self.sleep });
        }
    }

    /// Tells the sender of all that was received, which otherwise is done every half ring, and returns once it can see that. For
    /// whoever counts what it does not know as room that is taken, and has little left.
    pub fn acknowledge_now(&mut self) {
        if self.lag() > 0 {
            self.acknowledge();
            self.settle();
        }
    }

    /// Returns once the sender can see what is [acknowledged](Self::acknowledged): before its doorbell is rung for that, since whoever
    /// is woken looks once and may sleep again.
    pub(crate) fn settle(&self) {
        self.memory.full_fence();
    }

    /// Whether the sender was seen to have begun another generation.
    #[cfg(test)]
    pub(crate) fn is_closed(&self) -> bool {
        self.state == State::Closed
    }

    /// Whether the sender was not yet seen to have begun the generation.
    #[cfg(test)]
    pub(crate) fn is_waiting(&self) -> bool {
        self.state == State::Waiting
    }

    fn begun(&self) -> bool {
        let line = self.placement.sender_line();
        self.memory.invalidate(line, LINE_BYTES as u64);
        self.memory.full_fence();
        self.memory.load(line.saturating_add(header::GENERATION)) == u64::from(self.generation.get())
    }

    /// After a look that found nothing new: the next one must not see the same stale lines.
    #[inline]
    fn found_nothing(&mut self, at: ByteOffset) {
        if M::COHERENT {
            self.streak = 0;
            self.handover.found_nothing();
        }
        if M::COHERENT || self.policy.invalidates_before() {
            return;
        }
        let line = self.received / Self::SLOTS_PER_LINE;
        if self.policy.adapts() {
            // They are asked for again below, which does nothing for a line that has not left the cache.
            for prefetched in line + 1..self.prefetched {
                self.memory.invalidate(self.line(prefetched), 1);
            }
            self.prefetched = line;
            if self.lingers {
                self.memory.invalidate(self.line(line - 1), 1);
                self.lingers = false;
            }
        }
        self.memory.invalidate(at, Self::SLOT_BYTES);
        self.memory.full_fence();
        if self.policy.invalidates_prefetched() && !self.policy.adapts() {
            // Not fenced: should it take effect late, a look finds nothing and the line is invalidated again.
            for prefetched in line + 1..self.prefetched {
                self.memory.invalidate(self.line(prefetched), 1);
            }
            self.prefetched = line;
        }
        if self.policy.adapts() {
            // As many lines as came between the last two of these looks are likely to come until the next one. They are fetched
            // together with the one that is looked at.
            self.ahead = (line - self.paused).min(PREFETCH_LINES);
            (self.paused, self.expected) = (line, line + self.ahead);
            self.prefetch();
            self.ahead = 0;
        }
    }

    /// After a message was taken out of the slot at `at`.
    #[inline]
    fn consumed(&mut self, at: ByteOffset) {
        if !M::COHERENT {
            let line_done = self.received.is_multiple_of(Self::SLOTS_PER_LINE);
            if line_done && self.policy.invalidates_consumed() {
                // Not fenced: should it take effect late, the next lap finds an old message and looks again.
                if !self.policy.adapts() {
                    self.memory.invalidate(at, Self::SLOT_BYTES);
                } else if self.lingers {
                    self.memory.invalidate(self.line(self.received / Self::SLOTS_PER_LINE - 2), 1);
                }
                self.lingers = self.policy.adapts();
            }
            if line_done && self.policy.adapts() && self.received / Self::SLOTS_PER_LINE > self.expected {
                self.ahead = (self.ahead + 1).min(PREFETCH_LINES);
            }
            if self.policy.prefetches() {
                self.prefetch();
            }
        }
        if self.received - self.acknowledged >= self.slots / 2 {
            self.acknowledge();
        }
    }

    #[inline]
    fn prefetch(&mut self) {
        let line = self.received / Self::SLOTS_PER_LINE;
        if !self.policy.adapts() && line < self.prefetched {
            // The steps of the paper's figure ask after each message, for so many lines at a time: the next ones once these are
            // used up. What is there or on its way already is not fetched again.
            for wanted in line + 1..self.prefetched {
                self.memory.prefetch(self.line(wanted));
            }
            return;
        }
        let until = line + self.ahead.min(self.lines - 1);
        self.prefetched = self.prefetched.max(line);
        while self.prefetched < until {
            self.memory.prefetch(self.line(self.prefetched));
            self.prefetched += 1;
        }
    }

    /// The line with this number, counted over all laps.
    #[inline]
    fn line(&self, number: u64) -> ByteOffset {
        self.first_slot.saturating_add((number & (self.lines - 1)) * LINE_BYTES as u64)
    }

    fn acknowledge(&mut self) {
        self.acknowledged = self.received;
        if M::COHERENT {
            self.ask_for_the_way();
        }
        let at = self.placement.receiver_line().saturating_add(header::CONSUMED);
        self.memory.store(at, header::tagged(self.generation, header::low_bits(self.received)));
        self.memory.write_back(at, 8);
    }

    /// Has the sender write back what it has written, or not any more. It hears of it with the consumed count, in the same line.
    fn ask_for_the_way(&mut self) {
        let through_memory = self.handover.way() == Way::ThroughMemory;
        if through_memory != self.through_memory {
            self.through_memory = through_memory;
            let at = self.placement.receiver_line().saturating_add(header::THROUGH_MEMORY);
            self.memory.store(at, header::tagged(self.generation, through_memory.into()));
        }
    }

    fn announce(&mut self, sleep: Sleep) {
        self.sleep = sleep;
        let at = self.placement.receiver_line().saturating_add(header::SLEEP);
        self.memory.store(at, header::tagged(self.generation, sleep.encode()));
        self.memory.write_back(at, 8);
    }
}
