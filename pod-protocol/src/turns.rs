//! Whose turn it is among those who wait for one device: deficit round robin (Shreedhar and Varghese, 1995), weighed by
//! priorities.
//!
//! Each of them has a credit. It goes on while that is above zero, and pays for what it does, which may be more than it has. Then the
//! next one has its turn, and it gets its share for the round after. So over time all pay in proportion to their priorities, whatever
//! their steps cost, and nobody waits for longer than the others' shares of one round.

use std::collections::VecDeque;

use crate::objects::Priority;

/// See the [module](self). `K` names those who wait.
#[derive(Clone, Debug)]
pub struct Turns<K> {
    /// The first one's turn it is.
    order: VecDeque<Turn<K>>,
    /// Those who cannot go on for now whatever their credit.
    aside: Vec<Turn<K>>,
    /// What a priority of [`Priority::DEFAULT`] gets per round.
    quantum: i64,
}

#[derive(Clone, Copy, Debug)]
struct Turn<K> {
    key: K,
    /// What it gets per round; above zero.
    share: i64,
    credit: i64,
}

impl<K: Copy + Eq> Turns<K> {
    /// Turns of so much per round for an ordinary priority, in whatever unit steps are paid for: about what one or a few steps cost.
    pub const fn new(quantum: u32) -> Self {
        Self { order: VecDeque::new(), aside: Vec::new(), quantum: quantum as i64 }
    }

    /// Makes room for so many: with fewer of them nothing is allocated.
    pub fn reserve(&mut self, members: usize) {
        self.order.reserve(members.saturating_sub(self.order.len()));
    }

    fn share(&self, priority: Priority) -> i64 {
        (self.quantum * i64::from(priority.get()) / i64::from(Priority::DEFAULT.get())).max(1)
    }

    /// One more waits, behind all others. It must not be among them.
    pub fn enter(&mut self, key: K, priority: Priority) {
        let share = self.share(priority);
        self.order.push_back(Turn { key, share, credit: share });
    }

    /// Gives one of them another priority, from its next round on. Of whoever does not wait it changes nothing.
    pub fn set_priority(&mut self, key: K, priority: Priority) {
        let share = self.share(priority);
        let mut all = self.order.iter_mut().chain(&mut self.aside);
        if let Some(turn) = all.find(|turn| turn.key == key) {
            turn.share = share;
        }
    }

    /// One does not wait any more, and neither its credit nor its debt is remembered.
    pub fn leave(&mut self, key: K) {
        self.order.retain(|turn| turn.key != key);
        self.aside.retain(|turn| turn.key != key);
    }

    /// Whose turn it is. It pays, leaves, or is set aside before anybody else has a turn.
    #[inline]
    pub fn current(&mut self) -> Option<K> {
        loop {
            for _ in 0..self.order.len() {
                let first = self.order.front_mut()?;
                if first.credit > 0 {
                    return Some(first.key);
                }
                first.credit += first.share;
                self.order.rotate_left(1);
            }
            // All are in debt: as many rounds pass at once as it takes until one of them is not.
            let rounds_of = |turn: &Turn<K>| -turn.credit / turn.share;
            let rounds = self.order.iter().map(rounds_of).min()?;
            self.order.iter_mut().for_each(|turn| turn.credit += rounds.max(0) * turn.share);
        }
    }

    /// The one whose turn it is pays for something.
    #[inline]
    pub fn pay(&mut self, cost: u64) {
        if let Some(first) = self.order.front_mut() {
            first.credit = first.credit.saturating_sub(i64::try_from(cost).unwrap_or(i64::MAX));
        }
    }

    /// The one whose turn it is has nothing left to do, and does not wait any more.
    #[inline]
    pub fn leave_first(&mut self) {
        self.order.pop_front();
    }

    /// The one whose turn it is cannot go on for now: the others do not wait for it, until it is [taken back](Turns::take_back).
    pub fn set_aside(&mut self) {
        self.aside.extend(self.order.pop_front());
    }

    /// All that were set aside are where they were, and first.
    pub fn take_back(&mut self) {
        while let Some(turn) = self.aside.pop() {
            self.order.push_front(turn);
        }
    }

    /// Whether nobody waits.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.order.is_empty() && self.aside.is_empty()
    }

    /// All who wait, beginning with the one whose turn it is.
    pub fn iter(&self) -> impl Iterator<Item = K> {
        self.order.iter().chain(&self.aside).map(|turn| turn.key)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const QUANTUM: u32 = 3 << 10;

    fn priority(priority: u16) -> Priority {
        Priority::new(priority).expect("in range")
    }

    /// What each has paid after so many steps, all of them with something to do all the time.
    fn contest(members: &[(u16, u32)], steps: usize) -> Vec<u32> {
        let mut turns = Turns::new(QUANTUM);
        turns.reserve(members.len());
        (0..).zip(members).for_each(|(key, (weight, _))| turns.enter(key, priority(*weight)));
        let mut paid = vec![0; members.len()];
        for _ in 0..steps {
            let key: usize = turns.current().expect("all wait");
            turns.pay(members[key].1.into());
            paid[key] += members[key].1;
        }
        paid
    }

    proptest! {
        #[test]
        fn what_is_paid_is_in_proportion_to_priorities(
            members in proptest::collection::vec((1_u16..=1000, 1_u32..70_000), 1..12),
            steps in 1_usize..20_000,
        ) {
            let paid = contest(&members, steps);
            // By each unit of priority as much, but for what one is ahead of another: a step and a share of a round each.
            for (one, (weight, cost)) in paid.iter().zip(&members) {
                for (other, (their_weight, their_cost)) in paid.iter().zip(&members) {
                    let per = |paid: u32, weight: u16| f64::from(paid) / f64::from(weight);
                    let ahead = per(*one, *weight) - per(*other, *their_weight);
                    let round = f64::from(QUANTUM) / 100.0;
                    // Shares are whole numbers.
                    let rounding = 0.04 * per(*one, *weight).max(per(*other, *their_weight));
                    let steps = per(*cost, *weight) + per(*their_cost, *their_weight);
                    prop_assert!(ahead <= 2.0 * round + steps + rounding, "{members:?}: {paid:?}");
                }
            }
        }

        #[test]
        fn one_alone_never_waits(weight in 1_u16..=1000, costs in proptest::collection::vec(0_u64..1 << 20, 1..50)) {
            let mut turns = Turns::new(QUANTUM);
            turns.enter('a', priority(weight));
            for cost in costs {
                prop_assert_eq!(turns.current(), Some('a'));
                turns.pay(cost);
            }
        }
    }

    #[test]
    fn a_debt_is_paid_before_the_next_turn_also_by_who_has_nothing_left_to_do() {
        let mut turns = Turns::new(1000);
        turns.enter('a', Priority::DEFAULT);
        turns.enter('b', Priority::DEFAULT);
        assert_eq!(turns.current(), Some('a'));
        turns.pay(5000);
        // It has had five rounds' worth: the other one has as much before it is asked again whether it has anything to do.
        for _ in 0..5 {
            assert_eq!(turns.current(), Some('b'));
            turns.pay(1000);
        }
        assert_eq!(turns.current(), Some('a'));
        turns.leave_first();
        assert!(turns.current() == Some('b') && turns.iter().eq(['b']));
    }

    #[test]
    fn who_is_set_aside_keeps_its_place_and_its_credit() {
        let mut turns = Turns::new(1000);
        for key in ['a', 'b', 'c'] {
            turns.enter(key, Priority::DEFAULT);
        }
        assert_eq!(turns.current(), Some('a'));
        turns.pay(400);
        turns.set_aside();
        assert_eq!(turns.current(), Some('b'));
        turns.set_aside();
        assert_eq!(turns.current(), Some('c'));
        turns.pay(1500);
        assert_eq!(turns.current(), Some('c'), "it is alone");
        assert!(turns.iter().eq(['c', 'a', 'b']));
        turns.take_back();
        assert!(turns.iter().eq(['a', 'b', 'c']));
        assert_eq!(turns.current(), Some('a'));
        turns.pay(600);
        assert_eq!(turns.current(), Some('b'));
        turns.leave('b');
        turns.set_aside();
        turns.leave('a');
        turns.leave('c');
        assert!(turns.is_empty() && turns.current().is_none());
    }

    #[test]
    fn another_priority_holds_from_the_next_round_on() {
        let mut turns = Turns::new(1000);
        turns.enter('a', Priority::DEFAULT);
        turns.enter('b', Priority::DEFAULT);
        turns.set_priority('a', priority(300));
        turns.set_priority('z', priority(300));
        let mut order = String::new();
        for _ in 0..9 {
            order.extend(turns.current());
            turns.pay(1000);
        }
        assert_eq!(order, "abaaabaaa");
    }
}
