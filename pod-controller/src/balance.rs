//! When NICs are relieved: what passes through them is measured, and one that carries too much for a while loses some of its
//! leases to others.
//!
//! Decides only; time comes in as an argument. What has begun when the controller stops begins anew when it starts.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use cxl_pool::{EndpointId, Role};
use pod_protocol::ids::LeaseId;
use pod_protocol::telemetry::Telemetry;

use crate::state::{DeviceId, Measured, Move, Relief, State, share};

/// What is done about NICs that carry too much.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum BalanceMode {
    /// Nothing.
    Off,
    /// It is told, with what would be done.
    #[default]
    Advise,
    /// Leases move.
    Move,
}

/// What is configured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BalancePolicy {
    /// What is done.
    pub mode: BalanceMode,
    /// How far NICs are relieved; its moves are for each period.
    pub relief: Relief,
    /// Over which time rates are taken.
    pub window: Duration,
    /// For how many windows in a row a NIC must carry too much.
    pub windows: u32,
    /// For how long a lease that was moved stays.
    pub rest: Duration,
    /// The time for which moves are counted.
    pub period: Duration,
}

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Tell that a NIC carries too much, and what could be done.
    Tell(DeviceId, String),
    /// Move leases off these NICs.
    Relieve {
        /// Which.
        nics: BTreeSet<DeviceId>,
        /// What was measured.
        measured: Measured,
        /// Which leases stay.
        resting: BTreeSet<LeaseId>,
        /// How far.
        relief: Relief,
    },
}

/// Counters of a NIC or a lease at one endpoint: bytes in and out.
type Bytes = [u64; 2];

/// An endpoint's counters when its rates were taken last.
#[derive(Debug)]
struct Sample {
    at: Instant,
    nics: BTreeMap<String, Bytes>,
    leases: BTreeMap<LeaseId, Bytes>,
}

/// Rates of an endpoint.
#[derive(Debug, Default)]
struct Rates {
    nics: BTreeMap<String, u64>,
    leases: BTreeMap<LeaseId, u64>,
}

/// What is known of the load.
#[derive(Debug)]
pub struct LoadHistory {
    policy: BalancePolicy,
    samples: BTreeMap<EndpointId, Sample>,
    rates: BTreeMap<EndpointId, (Instant, Rates)>,
    /// NICs that carry too much: for how many windows, and whether that was told.
    hot: BTreeMap<DeviceId, (u32, bool)>,
    /// When leases were moved, the oldest first.
    moved: VecDeque<(Instant, LeaseId)>,
    looked: Option<Instant>,
    look_at: Option<Instant>,
}

/// What is known of the load, for others to see.
#[derive(Clone, Debug)]
pub struct LoadPicture {
    /// What is done about it.
    pub policy: BalancePolicy,
    /// What passes through NICs.
    pub measured: Measured,
    /// NICs that have carried too much for a while.
    pub overloaded: BTreeSet<DeviceId>,
}

impl LoadPicture {
    /// Which leases would move off NICs that carry too much now, were nothing waited for.
    pub fn plan(&self, state: &State) -> Vec<Move> {
        let high = self.policy.relief.high_percent;
        let carries_too_much = |(nic, mbps): &(&DeviceId, &u64)| {
            state.speed_mbps(nic).is_some_and(|speed| **mbps >= share(speed, high).max(1))
        };
        let now = self.measured.nics.iter().filter(carries_too_much).map(|(nic, _)| nic);
        let nics = now.chain(&self.overloaded).cloned().collect();
        state.plan_relief(&nics, &self.measured, &BTreeSet::new(), self.policy.relief)
    }
}

impl Default for BalancePolicy {
    fn default() -> Self {
        Self {
            mode: BalanceMode::default(),
            relief: Relief { high_percent: 80, low_percent: 60, moves_max: 4 },
            window: Duration::from_secs(1),
            windows: 5,
            rest: Duration::from_mins(1),
            period: Duration::from_mins(1),
        }
    }
}

impl LoadHistory {
    /// Nothing is known yet.
    pub fn new(policy: BalancePolicy) -> Self {
        Self {
            policy,
            samples: BTreeMap::new(),
            rates: BTreeMap::new(),
            hot: BTreeMap::new(),
            moved: VecDeque::new(),
            looked: None,
            look_at: None,
        }
    }

    /// An endpoint says what it has counted.
    pub fn note(&mut self, endpoint: EndpointId, now: Instant, telemetry: &Telemetry) {
        if !matches!(endpoint.role, Role::NetBackend | Role::NetFrontend) {
            return;
        }
        let before = self.samples.get(&endpoint);
        let elapsed = before.map(|before| now.saturating_duration_since(before.at));
        if elapsed.is_some_and(|elapsed| elapsed < self.policy.window) {
            return;
        }
        let nics = telemetry.devices.iter().filter(|_| endpoint.role == Role::NetBackend);
        let leases = telemetry.leases.iter().filter(|_| endpoint.role == Role::NetFrontend);
        let sample = Sample {
            at: now,
            nics: nics.map(|it| (it.name.clone(), [it.rx_bytes, it.tx_bytes])).collect(),
            leases: leases.map(|it| (it.lease, [it.rx_bytes, it.tx_bytes])).collect(),
        };
        if let (Some(before), Some(elapsed)) = (before, elapsed) {
            let rates = Rates {
                nics: rates(&before.nics, &sample.nics, elapsed),
                leases: rates(&before.leases, &sample.leases, elapsed),
            };
            self.rates.insert(endpoint, (now, rates));
            // No more often than once in a window, however many endpoints there are.
            let at = self.looked.map_or(now, |looked| now.max(looked + self.policy.window));
            self.look_at.get_or_insert(at);
        }
        self.samples.insert(endpoint, sample);
    }

    /// An endpoint is gone, and counts from zero when it is back.
    pub fn forget(&mut self, endpoint: EndpointId) {
        self.samples.remove(&endpoint);
        self.rates.remove(&endpoint);
    }

    /// What was measured not long ago.
    pub fn measured(&self, now: Instant) -> Measured {
        let fresh = self.rates.iter().filter(|(_, (at, _))| {
            now.saturating_duration_since(*at) <= 3 * self.policy.window + Duration::from_secs(1)
        });
        let mut measured = Measured::default();
        for (endpoint, (_, rates)) in fresh {
            let host = endpoint.host;
            measured
                .nics
                .extend(rates.nics.iter().map(|(name, mbps)| (DeviceId { host, name: name.clone() }, *mbps)));
            for (lease, mbps) in &rates.leases {
                // While an instance moves, two frontends know its leases.
                *measured.leases.entry(*lease).or_default() += mbps;
            }
        }
        measured
    }

    /// NICs that have carried too much for long enough.
    fn overloaded(&self) -> BTreeSet<DeviceId> {
        let hot = self.hot.iter().filter(|(_, (windows, _))| *windows >= self.policy.windows);
        hot.map(|(nic, _)| nic.clone()).collect()
    }

    /// What is known now.
    pub fn picture(&self, now: Instant) -> LoadPicture {
        LoadPicture { policy: self.policy, measured: self.measured(now), overloaded: self.overloaded() }
    }

    /// When to look next.
    pub fn next(&self) -> Option<Instant> {
        self.look_at.filter(|_| self.policy.mode != BalanceMode::Off)
    }

    /// What is due.
    pub fn due(&mut self, state: &State, now: Instant) -> Vec<Verdict> {
        if self.next().is_none_or(|at| at > now) {
            return Vec::new();
        }
        // Looked again when something was measured again, not by the clock: a pod without telemetry is left alone.
        (self.looked, self.look_at) = (Some(now), None);
        let measured = self.measured(now);
        self.heat(state, &measured);
        let nics = self.overloaded();
        if nics.is_empty() {
            return Vec::new();
        }
        let (period, rest) = (self.policy.period, self.policy.rest);
        while self.moved.front().is_some_and(|(at, _)| now.saturating_duration_since(*at) >= period.max(rest))
        {
            self.moved.pop_front();
        }
        let recent = |within: Duration| {
            self.moved.iter().filter(move |(at, _)| now.saturating_duration_since(*at) < within)
        };
        let resting: BTreeSet<LeaseId> = recent(rest).map(|(_, lease)| *lease).collect();
        let used = u32::try_from(recent(period).count()).unwrap_or(u32::MAX);
        let relief =
            Relief { moves_max: self.policy.relief.moves_max.saturating_sub(used), ..self.policy.relief };
        let plan = state.plan_relief(&nics, &measured, &resting, relief);
        let mut verdicts = self.tell(state, &measured, &plan, relief);
        if self.policy.mode == BalanceMode::Move && !plan.is_empty() {
            // What has moved shows in what is measured from now on.
            for it in &plan {
                self.moved.push_back((now, it.lease));
                self.hot.remove(&it.from);
            }
            verdicts.push(Verdict::Relieve { nics, measured, resting, relief });
        }
        verdicts
    }

    /// Counts for how long NICs have carried too much. One that did stays among them until it carries little enough.
    fn heat(&mut self, state: &State, measured: &Measured) {
        let relief = self.policy.relief;
        self.hot.retain(|nic, _| measured.nics.contains_key(nic));
        for (nic, mbps) in &measured.nics {
            let Some(speed_mbps) = state.speed_mbps(nic) else { continue };
            if *mbps >= share(speed_mbps, relief.high_percent).max(1) {
                let (windows, _) = self.hot.entry(nic.clone()).or_default();
                *windows = windows.saturating_add(1);
            } else if let Some((windows, _)) = self.hot.get(nic)
                && (*mbps <= share(speed_mbps, relief.low_percent) || *windows < self.policy.windows)
            {
                self.hot.remove(nic);
            }
        }
    }

    /// Tells of each NIC once, until it has carried less for a while.
    fn tell(&mut self, state: &State, measured: &Measured, plan: &[Move], relief: Relief) -> Vec<Verdict> {
        let mut verdicts = Vec::new();
        for (nic, (windows, told)) in &mut self.hot {
            if *windows < self.policy.windows || std::mem::replace(told, true) {
                continue;
            }
            let carries = measured.nics.get(nic).copied().unwrap_or(0);
            let moves: Vec<String> =
                plan.iter().filter(|it| it.from == *nic).map(|it| state.show_move(it)).collect();
            let remedy = match (moves.is_empty(), relief.moves_max, self.policy.mode) {
                (true, 0, _) => "enough leases have moved for now".to_owned(),
                (true, ..) => "no lease on it fits another NIC that carries little enough".to_owned(),
                (false, _, BalanceMode::Move) => format!("moving {}", moves.join(", ")),
                (false, ..) => format!("it would help to move {}", moves.join(", ")),
            };
            verdicts.push(Verdict::Tell(nic.clone(), format!("it carries {carries} Mbit/s: {remedy}")));
        }
        verdicts
    }
}

/// What grew, in Mbit/s of the direction that grew more; nothing of what began anew.
fn rates<K: Ord + Clone>(
    before: &BTreeMap<K, Bytes>,
    now: &BTreeMap<K, Bytes>,
    elapsed: Duration,
) -> BTreeMap<K, u64> {
    let us = u64::try_from(elapsed.as_micros()).unwrap_or(u64::MAX).max(1);
    let rate = |(key, bytes): (&K, &Bytes)| {
        let before = before.get(key)?;
        let grown = bytes.iter().zip(before).map(|(now, before)| now.checked_sub(*before));
        let most = grown.collect::<Option<Vec<u64>>>()?.into_iter().max()?;
        // A bit per microsecond is a Mbit per second.
        Some((key.clone(), most.saturating_mul(8) / us))
    };
    now.iter().filter_map(rate).collect()
}

#[cfg(test)]
mod tests;
