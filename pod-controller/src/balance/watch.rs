use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use pod_state::{DeviceId, Relief};

use super::load::Load;
use super::{BalanceMode, ReliefPolicy};

/// Devices of one kind that carry too much, and what was moved off them lately.
#[derive(Debug)]
pub(super) struct Watch<K> {
    pub(super) policy: ReliefPolicy,
    /// Devices that carry too much, until they carry little enough.
    hot: BTreeMap<DeviceId, Hot>,
    /// What was moved, or was to be, the oldest first.
    moved: VecDeque<Moved<K>>,
}

/// A device that carries too much.
#[derive(Debug)]
struct Hot {
    /// For how many windows.
    windows: u32,
    /// When was measured what counted last: it counts once, however often somebody looks.
    measured: Instant,
    /// Whether that was just now.
    anew: bool,
    /// Whether somebody was told.
    told: bool,
}

#[derive(Debug)]
struct Moved<K> {
    at: Instant,
    /// Nothing if it is not there any more.
    what: Option<K>,
    /// It was refused: it rests like others, and is no move.
    refused: bool,
}

impl Hot {
    /// It carries too much for another window.
    fn count(&mut self, measured: Instant) {
        *self = Self { windows: self.windows.saturating_add(1), measured, anew: true, told: self.told };
    }
}

impl<K: Ord + Copy> Watch<K> {
    pub(super) const fn new(policy: ReliefPolicy) -> Self {
        Self { policy, hot: BTreeMap::new(), moved: VecDeque::new() }
    }

    pub(super) fn obey(&mut self, policy: ReliefPolicy) {
        self.policy = policy;
        self.hot.clear();
    }

    pub(super) fn is_off(&self) -> bool {
        self.policy.mode == BalanceMode::Off
    }

    /// Counts for how long devices have carried too much, by what was measured and when. One that did stays among them until it carries
    /// little enough.
    pub(super) fn heat(&mut self, loads: &BTreeMap<&DeviceId, (Load, Instant)>) {
        self.hot.retain(|id, _| loads.contains_key(id));
        for (&id, &(load, measured)) in loads {
            match (load, self.hot.get_mut(id)) {
                (_, Some(hot)) if hot.measured == measured => hot.anew = false,
                (Load::High, None) => {
                    self.hot.insert(id.clone(), Hot { windows: 1, measured, anew: true, told: false });
                }
                (Load::High, Some(hot)) => hot.count(measured),
                (Load::Between, Some(hot)) if hot.windows >= self.policy.windows => hot.count(measured),
                (Load::Between | Load::Low, _) => {
                    self.hot.remove(id);
                }
            }
        }
    }

    /// Devices that have carried too much for long enough.
    pub(super) fn overloaded(&self) -> BTreeSet<DeviceId> {
        let hot = self.hot.iter().filter(|(_, hot)| hot.windows >= self.policy.windows);
        hot.map(|(id, _)| id.clone()).collect()
    }

    /// Those among them for which it is time to look what could be done: it takes a while, so that is once in so many windows.
    pub(super) fn pressing(&self) -> BTreeSet<DeviceId> {
        let is_time = |hot: &Hot| {
            hot.anew && hot.windows >= self.policy.windows && hot.windows.is_multiple_of(self.policy.windows)
        };
        let hot = self.hot.iter().filter(|(_, hot)| is_time(hot));
        hot.map(|(id, _)| id.clone()).collect()
    }

    /// What stays where it is now, and how far devices may be relieved with the moves that are left.
    pub(super) fn leeway(&mut self, now: Instant) -> (BTreeSet<K>, Relief) {
        let ReliefPolicy { relief, rest, period, .. } = self.policy;
        let age = |it: &Moved<K>| now.saturating_duration_since(it.at);
        while self.moved.front().is_some_and(|it| age(it) >= period.max(rest)) {
            self.moved.pop_front();
        }
        let within = |time: Duration| self.moved.iter().filter(move |it| age(it) < time);
        let resting = within(rest).filter_map(|it| it.what).collect();
        let used = within(period).filter(|it| !it.refused).count();
        let used = u32::try_from(used).unwrap_or(u32::MAX);
        (resting, Relief { moves_max: relief.moves_max.saturating_sub(used), ..relief })
    }

    /// Something moves off a device. What that changes shows in what is measured from now on.
    pub(super) fn note_move(&mut self, now: Instant, what: K, from: &DeviceId) {
        self.moved.push_back(Moved { at: now, what: Some(what), refused: false });
        self.hot.remove(from);
    }

    /// Something that was to move off a device does not.
    pub(super) fn note_refusal(&mut self, now: Instant, what: K) {
        self.moved.push_back(Moved { at: now, what: Some(what), refused: true });
    }

    /// Something was moved before this controller began. It may not be there any more.
    pub(super) fn remember(&mut self, at: Instant, what: Option<K>) {
        let place = self.moved.partition_point(|it| it.at <= at);
        self.moved.insert(place, Moved { at, what, refused: false });
    }

    /// Devices of which it has not been told that they carry too much. Each is told of once, until it has carried less for a while.
    pub(super) fn untold(&mut self) -> Vec<DeviceId> {
        let windows = self.policy.windows;
        let mut untold = Vec::new();
        for (id, hot) in &mut self.hot {
            if hot.windows >= windows && !std::mem::replace(&mut hot.told, true) {
                untold.push(id.clone());
            }
        }
        untold
    }

    /// What is told to be done, or to help, where these moves are planned.
    pub(super) fn remedy(&self, moves: &[String], left: &Relief, why_none: &str) -> String {
        match (moves, left.moves_max, self.policy.mode) {
            ([], 0, _) => "enough has moved for now".to_owned(),
            ([], ..) => why_none.to_owned(),
            (_, _, BalanceMode::Move) => format!("moving {}", moves.join(", ")),
            _ => format!("it would help to move {}", moves.join(", ")),
        }
    }
}
