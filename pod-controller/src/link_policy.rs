//! When a link is trusted, and when leases go back to the NIC where they belong.
//!
//! Decides only; time comes in as an argument. What has begun when the controller stops begins anew when it starts.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use pod_state::DeviceId;

/// A hold is twice as long each time, up to this many times its first length.
const HOLD_FACTOR_MAX: u32 = 32;

/// Whether leases go back to a NIC that works again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FailBack {
    /// They stay where they are until they have to move again, or are told to.
    #[default]
    Stay,
    /// They go back once it has worked for a while.
    Return,
}

/// What is configured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkPolicy {
    /// A link that is lost this often within the window is held down; zero: never.
    pub flaps: u32,
    /// The window.
    pub flap_window: Duration,
    /// For how long it is held down the first time, after it was lost last.
    pub hold: Duration,
    /// Whether leases go back.
    pub fail_back: FailBack,
    /// How long a NIC has to work before they do.
    pub stable: Duration,
}

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Trust it no longer.
    Hold(DeviceId, String),
    /// Trust it again.
    Release(DeviceId),
    /// Bring its leases home.
    FailBack(DeviceId),
}

/// A NIC that is held.
#[derive(Clone, Copy, Debug)]
struct Hold {
    until: Instant,
    /// For how long it is held after the next loss.
    length: Duration,
    /// The state has it as well: what is decided here takes effect a little later.
    in_effect: bool,
}

/// What is known of the links.
#[derive(Debug)]
pub struct LinkHistory {
    policy: LinkPolicy,
    losses: BTreeMap<DeviceId, VecDeque<Instant>>,
    /// Those that were lost and have not worked since: whatever else is told of them, and however often, is the same loss.
    down: BTreeSet<DeviceId>,
    holds: BTreeMap<DeviceId, Hold>,
    /// How long the last hold was, and when it ended.
    past: BTreeMap<DeviceId, (Duration, Instant)>,
    /// Since when leases could go home.
    homes: BTreeMap<DeviceId, Instant>,
}

impl LinkHistory {
    /// Nothing is known yet.
    pub fn new(policy: LinkPolicy) -> Self {
        Self {
            policy,
            losses: BTreeMap::new(),
            down: BTreeSet::new(),
            holds: BTreeMap::new(),
            past: BTreeMap::new(),
            homes: BTreeMap::new(),
        }
    }

    /// A NIC lost its link, or failed.
    pub fn lost(&mut self, nic: &DeviceId, now: Instant) -> Option<Verdict> {
        if self.policy.flaps == 0 || !self.down.insert(nic.clone()) {
            return None;
        }
        if let Some(hold) = self.holds.get_mut(nic) {
            // Calm is what it has to prove.
            hold.until = now + hold.length;
            return None;
        }
        let losses = self.losses.entry(nic.clone()).or_default();
        losses.push_back(now);
        while losses.front().is_some_and(|at| now.saturating_duration_since(*at) > self.policy.flap_window) {
            losses.pop_front();
        }
        if losses.len() < self.policy.flaps as usize {
            return None;
        }
        let count = losses.len();
        losses.clear();
        let longest = self.policy.hold * HOLD_FACTOR_MAX;
        let length = match self.past.get(nic) {
            // It was held not long ago.
            Some((length, ended))
                if now.saturating_duration_since(*ended) < 2 * *length + self.policy.flap_window =>
            {
                (2 * *length).min(longest)
            }
            _ => self.policy.hold,
        };
        self.holds.insert(nic.clone(), Hold { until: now + length, length, in_effect: false });
        let seconds = self.policy.flap_window.as_secs_f32();
        let reason = format!(
            "lost {count} times within {seconds} s: nothing moves to it until it has been calm for {} s",
            length.as_secs_f32()
        );
        Some(Verdict::Hold(nic.clone(), reason))
    }

    /// A NIC has a link: the next loss is another one.
    pub fn works(&mut self, nic: &DeviceId) {
        self.down.remove(nic);
    }

    /// What is due, given the NICs that are held and those that leases could go back to.
    pub fn due<'a>(
        &mut self,
        held: impl Iterator<Item = &'a DeviceId>,
        homes: impl Iterator<Item = &'a DeviceId>,
        now: Instant,
    ) -> Vec<Verdict> {
        let held: BTreeSet<&DeviceId> = held.collect();
        self.holds.retain(|nic, hold| held.contains(nic) || !hold.in_effect && now < hold.until);
        let mut verdicts = Vec::new();
        for nic in held {
            let length = self.policy.hold;
            let anew = Hold { until: now + length, length, in_effect: true };
            let known = self.holds.entry(nic.clone()).or_insert(anew);
            known.in_effect = true;
            let Hold { until, length, .. } = *known;
            if until <= now {
                self.holds.remove(nic);
                self.past.insert(nic.clone(), (length, now));
                verdicts.push(Verdict::Release(nic.clone()));
            }
        }
        let homes: BTreeSet<&DeviceId> =
            if self.policy.fail_back == FailBack::Return { homes.collect() } else { BTreeSet::new() };
        self.homes.retain(|nic, _| homes.contains(nic));
        for nic in homes {
            let since = *self.homes.entry(nic.clone()).or_insert(now);
            if now.saturating_duration_since(since) >= self.policy.stable {
                // If it does not come about, it is due again after as long a time.
                self.homes.insert(nic.clone(), now);
                verdicts.push(Verdict::FailBack(nic.clone()));
            }
        }
        verdicts
    }

    /// When something is due next.
    pub fn next(&self) -> Option<Instant> {
        let releases = self.holds.values().map(|hold| hold.until);
        let returns = self.homes.values().map(|since| *since + self.policy.stable);
        releases.chain(returns).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cxl_pool::HostId;

    const SECOND: Duration = Duration::from_secs(1);

    fn nic(host: u16) -> DeviceId {
        DeviceId { host: HostId::new(host), name: "nic0".into() }
    }

    fn history(fail_back: FailBack) -> LinkHistory {
        LinkHistory::new(LinkPolicy {
            flaps: 3,
            flap_window: 10 * SECOND,
            hold: 20 * SECOND,
            fail_back,
            stable: 30 * SECOND,
        })
    }

    /// It loses its link, and has it again.
    fn flap(history: &mut LinkHistory, nic: &DeviceId, now: Instant) -> Option<Verdict> {
        let verdict = history.lost(nic, now);
        history.works(nic);
        verdict
    }

    fn due(history: &mut LinkHistory, held: &[DeviceId], homes: &[DeviceId], now: Instant) -> Vec<Verdict> {
        history.due(held.iter(), homes.iter(), now)
    }

    #[test]
    fn a_link_that_is_lost_now_and_then_is_trusted() {
        let mut history = history(FailBack::Stay);
        let start = Instant::now();
        for round in 0..20 {
            assert_eq!(flap(&mut history, &nic(1), start + 6 * SECOND * round), None, "round {round}");
            assert_eq!(flap(&mut history, &nic(2), start + 6 * SECOND * round), None);
        }
    }

    #[test]
    fn a_flapping_link_is_held_until_it_has_been_calm_and_longer_each_time() {
        let mut history = history(FailBack::Stay);
        let mut now = Instant::now();
        let held = [nic(1)];
        for expected in [20, 40, 80] {
            assert_eq!(flap(&mut history, &nic(1), now), None);
            assert_eq!(flap(&mut history, &nic(1), now + SECOND), None);
            now += 2 * SECOND;
            let verdict = flap(&mut history, &nic(1), now);
            let Some(Verdict::Hold(which, reason)) = verdict else { panic!("not held") };
            assert_eq!(which, nic(1));
            // It is carried out a little later.
            assert_eq!(due(&mut history, &[], &[], now), []);
            assert!(reason.contains(&format!("{expected} s")), "{reason}");
            assert_eq!(due(&mut history, &held, &[], now + (expected - 1) * SECOND), []);
            // One more loss: the time begins anew.
            now += (expected - 1) * SECOND;
            assert_eq!(flap(&mut history, &nic(1), now), None);
            assert_eq!(history.next(), Some(now + expected * SECOND));
            assert_eq!(due(&mut history, &held, &[], now + (expected - 1) * SECOND), []);
            now += expected * SECOND;
            assert_eq!(due(&mut history, &held, &[], now), [Verdict::Release(nic(1))]);
            assert_eq!(due(&mut history, &[], &[], now), []);
        }
        // After a long calm, the past is forgotten.
        now += 1000 * SECOND;
        flap(&mut history, &nic(1), now);
        flap(&mut history, &nic(1), now);
        let Some(Verdict::Hold(_, reason)) = flap(&mut history, &nic(1), now) else { panic!("not held") };
        assert!(reason.contains("20 s"), "{reason}");
    }

    #[test]
    fn one_loss_that_is_told_several_times_is_one() {
        let mut history = history(FailBack::Stay);
        let now = Instant::now();
        for round in 0..2 {
            // No carrier, then a driver that fails, then a backend that says it again to a controller that it lost for a moment.
            for _ in 0..4 {
                assert_eq!(history.lost(&nic(1), now), None, "round {round}");
            }
            history.works(&nic(1));
        }
        assert!(matches!(history.lost(&nic(1), now), Some(Verdict::Hold(..))));
    }

    #[test]
    fn a_hold_that_never_takes_effect_ends_all_the_same() {
        let mut history = history(FailBack::Stay);
        let now = Instant::now();
        for _ in 0..3 {
            flap(&mut history, &nic(1), now);
        }
        assert_eq!(due(&mut history, &[], &[], now + 20 * SECOND), []);
        assert_eq!(history.next(), None);
    }

    #[test]
    fn what_an_earlier_controller_held_is_released_too() {
        let mut history = history(FailBack::Stay);
        let now = Instant::now();
        assert_eq!(due(&mut history, &[nic(3)], &[], now), []);
        assert_eq!(due(&mut history, &[nic(3)], &[], now + 20 * SECOND), [Verdict::Release(nic(3))]);
    }

    #[test]
    fn leases_go_home_once_it_has_been_stable() {
        let mut history = history(FailBack::Return);
        let now = Instant::now();
        assert_eq!(due(&mut history, &[], &[nic(1)], now), []);
        assert_eq!(due(&mut history, &[], &[nic(1)], now + 29 * SECOND), []);
        // It was away in between.
        assert_eq!(due(&mut history, &[], &[], now + 29 * SECOND), []);
        assert_eq!(due(&mut history, &[], &[nic(1)], now + 30 * SECOND), []);
        assert_eq!(history.next(), Some(now + 60 * SECOND));
        assert_eq!(due(&mut history, &[], &[nic(1)], now + 60 * SECOND), [Verdict::FailBack(nic(1))]);
    }

    #[test]
    fn leases_stay_where_they_are_unless_told() {
        let mut history = history(FailBack::Stay);
        let now = Instant::now();
        assert_eq!(due(&mut history, &[], &[nic(1)], now), []);
        assert_eq!(due(&mut history, &[], &[nic(1)], now + 1000 * SECOND), []);
        assert_eq!(history.next(), None);
    }
}
