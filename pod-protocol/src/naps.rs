//! How long a thread sleeps between two looks at its rings where nobody can ring (`wakeup = "poll"`).

use std::time::{Duration, Instant};

/// The shortest sleep: less is hardly a sleep, since timers are late by as much.
const FIRST: Duration = Duration::from_micros(50);
/// What it sleeps of the time for which nothing was said: an answer is found late by that part of the time that it took.
const PART: u32 = 4;
/// What it sleeps at least of the time that its last turn took: one that looks at many rings does not look all the time.
const REST: u32 = 2;

/// Short sleeps while a conversation goes on, longer ones the longer nothing is said.
#[derive(Debug)]
pub(crate) struct Naps {
    longest: Duration,
    last_word: Instant,
    woke: Instant,
}

impl Naps {
    /// `longest` is what the first word of a conversation may wait for.
    pub(crate) fn new(longest: Duration, now: Instant) -> Self {
        Self { longest, last_word: now, woke: now }
    }

    /// Something was said or heard, to which the other side may have an answer.
    pub(crate) fn spoke(&mut self, now: Instant) {
        self.last_word = now;
    }

    /// How long to sleep now.
    pub(crate) fn next(&self, now: Instant) -> Duration {
        let turn = now.saturating_duration_since(self.woke);
        let quiet = now.saturating_duration_since(self.last_word);
        (quiet / PART).max(turn * REST).clamp(FIRST, self.longest)
    }

    /// A turn begins.
    pub(crate) fn woke(&mut self, now: Instant) {
        self.woke = now;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONGEST: Duration = Duration::from_millis(1);

    /// Sleeps until something is found that comes after this time. Returns how late, and after how many looks.
    fn find(after: Duration, turn: Duration) -> (Duration, u32) {
        let said = Instant::now();
        let mut naps = Naps::new(LONGEST, said);
        naps.spoke(said);
        let (mut now, mut looks) = (said, 0);
        while now < said + after {
            naps.woke(now);
            now += turn;
            now += naps.next(now);
            looks += 1;
        }
        (now - (said + after), looks)
    }

    #[test]
    fn an_answer_is_found_soon_after_it_came() {
        for micros in [1, 10, 49, 51, 100, 333, 1000, 2500, 9999, 100_000] {
            let after = Duration::from_micros(micros);
            let (late, _) = find(after, Duration::ZERO);
            assert!(
                late <= FIRST.max(after / 3).min(LONGEST),
                "what came after {after:?} was found {late:?} late"
            );
        }
    }

    #[test]
    fn few_looks_find_it() {
        let (_, looks) = find(Duration::from_millis(4), Duration::ZERO);
        assert!(looks < 30, "{looks} looks");
        let (_, more) = find(Duration::from_millis(104), Duration::ZERO);
        assert!((95..=105).contains(&(more - looks)), "{} looks in 100 ms of silence", more - looks);
    }

    #[test]
    fn whoever_has_much_to_look_at_does_not_look_all_the_time() {
        let turn = Duration::from_micros(200);
        let (_, looks) = find(Duration::from_millis(12), turn);
        assert!(looks <= 20, "{looks} looks of {turn:?} each in 12 ms");
    }

    #[test]
    fn the_longest_is_the_longest_even_where_turns_take_longer() {
        let (late, _) = find(Duration::from_micros(5_500), Duration::from_millis(5));
        assert!(late <= Duration::from_millis(5) + LONGEST, "{late:?}");
    }
}
