//! When devices are relieved: what passes through NICs and what SSDs do is measured, and one that carries too much for a while
//! loses some of its leases, or volumes, to others.
//!
//! Decides only; time comes in as an argument. What has begun when the controller stops begins anew when it starts; what was moved
//! before counts on.

mod before;
mod load;
mod picture;
mod recent;
mod samples;
mod watch;

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use cxl_pool::EndpointId;
use pod_protocol::ids::{LeaseId, VolumeId};
use pod_protocol::telemetry::Telemetry;
use pod_state::{DeviceId, Lease, Measured, Rates, Relief, State, VolumeMove, VolumeRelief};

use self::load::Load;
pub use self::picture::LoadPicture;
use self::recent::Recent;
use self::samples::Samples;
use self::watch::Watch;

/// What is done about devices that carry too much.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum BalanceMode {
    /// Nothing.
    Off,
    /// It is told, with what would be done.
    #[default]
    Advise,
    /// Leases, or volumes, move.
    Move,
}

/// What is configured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BalancePolicy {
    /// Over which time rates are taken.
    pub window: Duration,
    /// What is done about NICs; leases leave them.
    pub nics: ReliefPolicy,
    /// What is done about SSDs; volumes leave them.
    pub ssds: ReliefPolicy,
    /// Volumes that are larger stay.
    pub volume_bytes_max: u64,
}

/// What is done about devices of one kind that carry too much.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReliefPolicy {
    /// What is done.
    pub mode: BalanceMode,
    /// How far they are relieved; its moves are for each period.
    pub relief: Relief,
    /// For how many windows in a row one must carry too much.
    pub windows: u32,
    /// For how long what was moved stays.
    pub rest: Duration,
    /// The time for which moves are counted.
    pub period: Duration,
}

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Tell that a device carries too much, and what could be done.
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
    /// Move a volume off an SSD.
    MoveVolume(VolumeMove),
}

/// What is known of the load.
#[derive(Debug)]
pub struct LoadHistory {
    policy: BalancePolicy,
    samples: Samples,
    nics: Watch<LeaseId>,
    ssds: Watch<VolumeId>,
    looked: Option<Instant>,
    look_at: Option<Instant>,
}

impl Verdict {
    /// The leases that may be moved, and where they are before that.
    pub fn may_move(
        state: &State,
        nics: &BTreeSet<DeviceId>,
        measured: &Measured,
    ) -> Vec<(LeaseId, DeviceId)> {
        let on = measured.leases.keys().filter_map(|id| Some((*id, state.leases.get(id)?.active_nic()?)));
        on.filter(|(_, nic)| nics.contains(*nic)).map(|(id, nic)| (id, nic.clone())).collect()
    }
}

impl BalancePolicy {
    /// How far SSDs are relieved in a period.
    pub const fn volume_relief(&self) -> VolumeRelief {
        VolumeRelief { relief: self.ssds.relief, bytes_max: self.volume_bytes_max }
    }
}

impl Default for BalancePolicy {
    fn default() -> Self {
        let nics = ReliefPolicy {
            mode: BalanceMode::default(),
            relief: Relief { high_percent: 80, low_percent: 60, moves_max: 4 },
            windows: 5,
            rest: Duration::from_mins(1),
            period: Duration::from_mins(1),
        };
        // To copy a volume takes minutes, and loads both SSDs meanwhile: that is for what lasts.
        let hour = Duration::from_hours(1);
        let ssds = ReliefPolicy { windows: 60, rest: hour, period: hour, ..nics };
        Self { window: Duration::from_secs(1), nics, ssds, volume_bytes_max: 256 << 30 }
    }
}

impl LoadHistory {
    /// Nothing is known yet.
    pub fn new(policy: BalancePolicy) -> Self {
        Self {
            policy,
            samples: Samples::new(policy.window),
            nics: Watch::new(policy.nics),
            ssds: Watch::new(policy.ssds),
            looked: None,
            look_at: None,
        }
    }

    /// From now on that is configured. What was moved stays where it is for as long as the new policy says, and counts; who carries
    /// too much is found out anew. Returns whether it is another one.
    pub fn obey(&mut self, policy: BalancePolicy) -> bool {
        if policy == self.policy {
            return false;
        }
        if policy.window != self.policy.window {
            self.samples = Samples::new(policy.window);
        }
        self.nics.obey(policy.nics);
        self.ssds.obey(policy.ssds);
        self.policy = policy;
        true
    }

    /// An endpoint says what it has counted.
    pub fn note(&mut self, endpoint: EndpointId, now: Instant, telemetry: &Telemetry) {
        if self.samples.note(endpoint, now, telemetry) {
            // No more often than once in a window, however many endpoints there are.
            let at = self.looked.map_or(now, |looked| now.max(looked + self.policy.window));
            self.look_at.get_or_insert(at);
        }
    }

    /// An endpoint is gone, and counts from zero when it is back.
    pub fn forget(&mut self, endpoint: EndpointId) {
        self.samples.forget(endpoint);
    }

    /// What is known now.
    pub fn picture(&self, now: Instant) -> LoadPicture {
        LoadPicture {
            policy: self.policy,
            overloaded: self.nics.overloaded(),
            overloaded_ssds: self.ssds.overloaded(),
            recent: self.samples.recent(now),
        }
    }

    /// When to look next.
    pub fn next(&self) -> Option<Instant> {
        self.look_at.filter(|_| !self.nics.is_off() || !self.ssds.is_off())
    }

    /// What is due.
    pub fn due(&mut self, state: &State, now: Instant) -> Vec<Verdict> {
        if self.next().is_none_or(|at| at > now) {
            return Vec::new();
        }
        // Looked again when something was measured again, not by the clock: a pod without telemetry is left alone.
        (self.looked, self.look_at) = (Some(now), None);
        let mut verdicts = Vec::new();
        let recent = self.samples.recent(now);
        if !self.nics.is_off() {
            self.due_nics(state, now, &recent, &mut verdicts);
        }
        if !self.ssds.is_off() {
            self.due_ssds(state, now, &recent, &mut verdicts);
        }
        verdicts
    }

    /// Leases that were on these NICs have left them, as far as they are elsewhere now.
    pub fn note_relief(&mut self, were: &[(LeaseId, DeviceId)], state: &State, now: Instant) {
        let is_there = |id, nic| state.leases.get(id).is_none_or(|lease| lease.active_nic() == Some(nic));
        for (lease, nic) in were.iter().filter(|(id, nic)| !is_there(id, nic)) {
            self.nics.note_move(now, *lease, nic);
        }
    }

    /// A volume leaves an SSD.
    pub fn note_volume_move(&mut self, volume: VolumeId, from: &DeviceId, now: Instant) {
        self.ssds.note_move(now, volume, from);
    }

    /// A volume that was to leave an SSD may not. It is left alone for a while.
    pub fn note_volume_refusal(&mut self, volume: VolumeId, now: Instant) {
        self.ssds.note_refusal(now, volume);
    }

    fn due_nics(&mut self, state: &State, now: Instant, recent: &Recent, verdicts: &mut Vec<Verdict>) {
        let nics = recent.nics();
        let relief = self.policy.nics.relief;
        let load = |nic, mbps| Load::of_nic(state, nic, mbps, relief);
        let loads = nics.iter().filter_map(|(nic, mbps)| {
            Some((nic, (load(nic, *mbps)?, recent.measured_at(nic.net_backend())?)))
        });
        self.nics.heat(&loads.collect());
        let nics = self.nics.overloaded();
        if nics.is_empty() {
            return;
        }
        let mut measured = recent.measured();
        // What is decided is kept for good, with what it follows from. Of all other leases nobody asks.
        let on = |lease: &Lease| lease.active_nic().is_some_and(|nic| nics.contains(nic));
        measured.leases.retain(|id, _| state.leases.get(id).is_some_and(on));
        let (resting, relief) = self.nics.leeway(now);
        let plan = state.plan_relief(&nics, &measured, &resting, relief);
        for nic in self.nics.untold() {
            let carries = measured.nics.get(&nic).copied().unwrap_or(0);
            let moves: Vec<String> =
                plan.iter().filter(|it| it.from == nic).map(|it| state.show_move(it)).collect();
            let why_none = "no lease on it fits another NIC that carries little enough";
            let remedy = self.nics.remedy(&moves, &relief, why_none);
            verdicts.push(Verdict::Tell(nic, format!("it carries {carries} Mbit/s: {remedy}")));
        }
        if self.nics.policy.mode == BalanceMode::Move && !plan.is_empty() {
            verdicts.push(Verdict::Relieve { nics, measured, resting, relief });
        }
    }

    fn due_ssds(&mut self, state: &State, now: Instant, recent: &Recent, verdicts: &mut Vec<Verdict>) {
        let done = recent.ssds();
        let relief = self.policy.ssds.relief;
        let load = |ssd: &DeviceId, does: Rates| {
            Load::of_ssd(state, ssd, does, relief).map(|load| match load {
                // What is copied or wiped there is over some time.
                Load::High if state.is_copying(ssd) => Load::Between,
                load => load,
            })
        };
        let loads = done.iter().filter_map(|(ssd, does)| {
            Some((ssd, (load(ssd, *does)?, recent.measured_at(ssd.blk_backend())?)))
        });
        self.ssds.heat(&loads.collect());
        let ssds = self.ssds.pressing();
        if ssds.is_empty() {
            return;
        }
        let measured = recent.disks();
        let (resting, relief) = self.ssds.leeway(now);
        let limits = VolumeRelief { relief, ..self.policy.volume_relief() };
        let plan = state.plan_volume_moves(&ssds, &measured, &resting, limits);
        for ssd in self.ssds.untold() {
            let does = measured.ssds.get(&ssd).copied().unwrap_or_default();
            let moves: Vec<String> =
                plan.iter().filter(|it| it.from == ssd).map(|it| state.show_volume_move(it)).collect();
            let why_none = "no volume on it can go to another SSD now that does little enough";
            let remedy = self.ssds.remedy(&moves, &relief, why_none);
            verdicts.push(Verdict::Tell(ssd, format!("it does {does}: {remedy}")));
        }
        if self.ssds.policy.mode == BalanceMode::Move {
            verdicts.extend(plan.into_iter().map(Verdict::MoveVolume));
        }
    }
}

#[cfg(test)]
mod nic_tests;
#[cfg(test)]
mod ssd_tests;
