//! A pod with everything that can go wrong in it, and what must hold all the while.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use cxl_pool::EndpointId;
use pod_protocol::ids::{LeaseGeneration, VolumeId};
use pod_protocol::protocol::Protocol;
use pod_state::model::{Apart, check, options};
use pod_state::{Command, Options, Purpose, Region, RegionUse, State};

use super::Broken;
use super::deeds::Deed;
use super::faults::{Around, FAULTS, MEMORY};
use super::happening::Happening;
use super::kinds::Kind;
use super::lines::Lines;
use super::loads::{Loads, TOLD_EVERY_US};
use super::physical::{FENCE_US, Physical, STARTED_WITHIN_US};
use super::random::Random;
use super::relief;
use super::size::Size;
use super::world::Simulated;
use crate::balance::BalancePolicy;
use crate::controller::conductor::{Conductor, Delays};
use crate::link_policy::{FailBack, LinkPolicy};

/// How often every slot of the pool is looked at.
pub(super) const SWEEP_US: u64 = 20_000;
/// How often is looked for what has to be copied and nobody uses.
const COPIERS_EVERY_US: u64 = 100_000;
/// How long the longest slice is.
pub(super) const SLICE_MAX_US: u64 = 2000;
/// How many instances are asked for at once before anything goes wrong.
const FILLED_AT_ONCE: usize = 8;
/// How long a pod in which nothing fails any more may take until all is as it should be.
const CALM_US: u64 = 30_000_000;
/// How long the controller gives whom it fenced: its bound on a slow clock, and a moment.
pub(super) const FENCE_DELAY_US: u64 = FENCE_US * 11 / 10 + 10_000;

pub(super) struct Pod {
    pub(super) conductor: Option<Conductor<Simulated>>,
    /// While no controller runs.
    orphan: Option<Simulated>,
    pub(super) size: Size,
    pub(super) broken: Option<Broken>,
    term: u64,
    pub(super) controller_since_us: u64,
    due: Option<Instant>,
    /// What was promised by an answer: names of volumes and instances.
    promised: BTreeSet<String>,
    /// What was asked for and is not answered yet.
    asked: BTreeMap<u64, Command>,
    /// Since when disks could do without a backend that stands still, and count on it.
    pub(super) waits: BTreeMap<(VolumeId, EndpointId), u64>,
    wishes: u64,
    turns: u64,
    apart: Apart,
    /// How many instances there were at most.
    pub(super) instances_max: usize,
    pub(super) dice: Random,
}

impl Pod {
    pub(super) fn new(seed: u64, size: Size, broken: Option<Broken>) -> Self {
        let mut physical = Physical::new(seed, size.doublings_max);
        let mut dice = Random::new(seed ^ 0x5eed);
        for number in 1..=size.hosts {
            physical.add_host(number, size.grouped, &mut dice);
        }
        // Sometimes the pool is too small for everybody.
        let each = if dice.once_in(3) { size.least_mib } else { 100 };
        // There may be more regions than a pool's table has room for: not that is tried here.
        let protocol_minor = Protocol::CURRENT.minor;
        let regions_max = 1 << 20;
        let options = options(each * size.names);
        if size.has_lines {
            let end = options.data.end();
            let scrubs_nothing = broken == Some(Broken::ScrubsNothing);
            physical.lines = Some(Lines::new(seed, end, scrubs_nothing));
            physical.knows_holders = broken != Some(Broken::GivesDirtyRegionsOn);
        }
        physical.loads = size.busy.map(|busy| Loads::new(seed, busy));
        let state = State::new(Options { regions_max, protocol_minor, ..options });
        let world = Simulated::new(physical, Instant::now(), broken, &state);
        let mut pod = Self {
            conductor: None,
            orphan: Some(world),
            size,
            broken,
            term: 0,
            controller_since_us: 0,
            due: None,
            promised: BTreeSet::new(),
            asked: BTreeMap::new(),
            waits: BTreeMap::new(),
            wishes: 0,
            turns: 0,
            apart: Apart::default(),
            instances_max: 0,
            dice,
        };
        pod.start_controller();
        pod
    }

    /// Runs it through faults, calm and its end. What goes wrong is the error.
    pub(super) fn run(&mut self) -> Result<(), String> {
        self.fill()?;
        let end = self.now_us() + self.size.seconds * 1_000_000;
        while self.now_us() < end {
            if self.dice.once_in(self.size.fault_every) {
                self.fault();
            }
            let count = if self.dice.once_in(self.size.wish_every) { self.size.wishes } else { 0 };
            let wishes = (0..count).map(|_| self.around().wish()).collect();
            self.slice(wishes)?;
            if let Some(conductor) = &self.conductor {
                self.instances_max = self.instances_max.max(conductor.state.instances.len());
            }
        }
        self.calm_down();
        self.settle_down("after all faults were mended")?;
        self.alternatives_are_used()?;
        self.disks_wait_for_nobody()?;
        self.wind_down()?;
        self.every_step_was_checked()?;
        self.world().physical.lines.as_ref().map_or(Ok(()), Lines::are_whole)
    }

    /// Has the pod get many instances in little time.
    fn fill(&mut self) -> Result<(), String> {
        if self.size.filled == 0 {
            return Ok(());
        }
        for _ in 0..STARTED_WITHIN_US / self.size.slice_us {
            self.slice(Vec::new())?;
        }
        // In a small pod all is asked for at once, and nobody may have an SSD yet.
        while self.size.busy.is_some() && !self.world().physical.daemons.values().all(|it| it.joined) {
            self.slice(Vec::new())?;
        }
        let numbers: Vec<u64> = (0..self.size.filled).collect();
        for some in numbers.chunks(FILLED_AT_ONCE) {
            let mut wishes = Vec::new();
            for number in some {
                let mut around = self.around();
                let host = around.random_daemon().host;
                wishes.extend([around.create_volume(*number), around.create_instance(*number, host)]);
            }
            self.slice(wishes)?;
        }
        Ok(())
    }

    fn now_us(&mut self) -> u64 {
        self.world().physical.now_us
    }

    pub(super) fn world(&mut self) -> &mut Simulated {
        match (&mut self.conductor, &mut self.orphan) {
            (Some(conductor), _) => &mut conductor.world,
            (None, Some(world)) => world,
            (None, None) => unreachable!("the world is with the controller or without one"),
        }
    }

    /// What may happen to it.
    fn around(&mut self) -> Around<'_> {
        let Size { hosts, names, grouped, .. } = self.size;
        let dice = &mut self.dice;
        let (physical, state) = match (&mut self.conductor, &mut self.orphan) {
            (Some(conductor), _) => (&mut conductor.world.physical, Some(&conductor.state)),
            (None, Some(world)) => (&mut world.physical, None),
            (None, None) => unreachable!("the world is with the controller or without one"),
        };
        Around { dice, physical, state, hosts, names, grouped }
    }

    fn fault(&mut self) {
        let kinds = if self.size.memory_fails { MEMORY + 1 } else { MEMORY };
        let fault = self.around().draw_fault(kinds);
        match fault.kind {
            MEMORY => self.around().fault(fault),
            FAULTS if self.may_crash() && self.dice.once_in(self.size.crash_every) => self.crash_controller(),
            FAULTS => {}
            kind if kind > FAULTS => {
                if self.may_crash() && self.dice.once_in(self.size.crash_every / 2) {
                    let after = self.dice.once_in(2);
                    if let Some(conductor) = &mut self.conductor {
                        conductor.world.crash_at_commit = Some(after);
                    }
                }
            }
            _ => self.around().fault(fault),
        }
    }

    /// A controller that is broken inside would not survive its own log.
    fn may_crash(&self) -> bool {
        !matches!(
            self.broken,
            Some(Broken::KeepsGenerations | Broken::DoesNotWaitForScrubs | Broken::GivesDirtyRegionsOn)
        )
    }

    fn start_controller(&mut self) {
        let Some(mut world) = self.orphan.take() else { return };
        self.term += 1;
        world.physical.seen.faults.note(Kind::TookOver, self.term > 1);
        let (state, instant) = (world.recover(self.term), world.instant());
        let fence = Duration::from_micros(FENCE_DELAY_US);
        let hasty = self.broken == Some(Broken::DoesNotWaitForFences);
        let delays = Delays {
            fence: if hasty { Duration::ZERO } else { fence },
            blk_grace: Duration::from_secs(1),
            drain: Duration::from_millis(300),
        };
        let policy = LinkPolicy {
            flaps: 3,
            flap_window: Duration::from_secs(1),
            hold: Duration::from_millis(500),
            fail_back: FailBack::Return,
            stable: Duration::from_secs(1),
        };
        let told = world.moves.told.clone();
        let time_ms = world.physical.now_us / 1000;
        let mut conductor = Conductor::new(world, state, self.term, (delays, policy, self.balance_policy()));
        if self.broken != Some(Broken::ForgetsWhatMoved) {
            conductor.remember(&told, (instant, time_ms));
        }
        self.conductor = match conductor.resume(Vec::new(), instant) {
            Ok(()) => Some(conductor),
            Err(_) => unreachable!("nothing crashes a commit yet"),
        };
        self.due = None;
        self.controller_since_us = self.now_us();
    }

    /// What the controller does about loads.
    fn balance_policy(&self) -> BalancePolicy {
        let mut policy = if self.size.busy.is_some() { relief::policy() } else { BalancePolicy::default() };
        if self.broken == Some(Broken::MovesTooMuch) {
            for kind in [&mut policy.nics, &mut policy.ssds] {
                (kind.relief.moves_max, kind.rest) = (1000, Duration::from_millis(1));
            }
        }
        if matches!(self.broken, Some(Broken::MovesTooMuch | Broken::ForgetsWhatMoved)) {
            // So that it is sure before what moved has rested.
            policy.window = Duration::from_millis(200);
        }
        policy
    }

    /// The controller is killed. What it had not answered may have been done or not.
    pub(super) fn crash_controller(&mut self) {
        let Some(conductor) = self.conductor.take() else { return };
        // The next one has to see anew who stands still.
        self.waits.clear();
        self.orphan = Some(conductor.world);
        for command in std::mem::take(&mut self.asked).into_values() {
            if let Some((name, _)) = creates(&command) {
                self.promised.remove(&name);
            }
        }
        self.world().physical.seen.faults.note(Kind::ControllerDied, true);
        let after = self.dice.below(self.size.orphaned_us);
        self.world().physical.schedule(after, Happening::ControllerStarts);
    }

    fn slice(&mut self, mut wishes: Vec<Command>) -> Result<(), String> {
        let until = self.now_us() + self.size.slice_us;
        loop {
            let world = self.world();
            let Some(what) = world.physical.next_until(until) else { break };
            match what {
                Happening::ControllerStarts => {
                    self.start_controller();
                    self.promises_are_kept()?;
                }
                what => match (&mut self.conductor, &mut self.orphan) {
                    (Some(conductor), _) => conductor.world.happens(what, &conductor.state),
                    (None, Some(world)) => world.happens(what, &nobody()),
                    (None, None) => {}
                },
            }
        }
        self.world().physical.now_us = until;
        if until.is_multiple_of(TOLD_EVERY_US) {
            self.world().physical.tell_loads();
        }
        if let Some(what) = self.world().physical.violation.take() {
            return Err(what);
        }
        let Some(conductor) = &mut self.conductor else { return Ok(()) };
        if until.is_multiple_of(SWEEP_US) {
            conductor.world.sweep();
        }
        if until.is_multiple_of(COPIERS_EVERY_US) {
            wishes.extend(conductor.state.copiers_due());
        }
        let now = conductor.world.instant();
        if wishes.is_empty() && conductor.world.is_calm() && self.due.is_none_or(|due| due > now) {
            return Ok(());
        }
        let mut numbered = Vec::new();
        for wish in wishes {
            self.wishes += 1;
            if let Command::DeleteInstance { name, .. } | Command::DeleteVolume { name } = &wish {
                // From here on it may be gone; if it is refused, it is not.
                if self.promised.remove(name) {
                    self.asked.insert(self.wishes, wish.clone());
                }
            } else {
                self.asked.insert(self.wishes, wish.clone());
            }
            numbered.push((wish, self.wishes));
        }
        let Ok(due) = conductor.turn(numbered, now) else {
            self.crash_controller();
            return Ok(());
        };
        self.due = due;
        self.break_it();
        self.hear_replies();
        self.after_turn()
    }

    fn hear_replies(&mut self) {
        for (number, answer) in std::mem::take(&mut self.world().replies) {
            let Some(command) = self.asked.remove(&number) else { continue };
            if answer.is_ok() {
                let deeds = Deed::of(&command);
                deeds.for_each(|deed| self.world().physical.seen.deeds.note(deed, true));
            }
            match (creates(&command), &command) {
                (Some((name, _)), _) if answer.is_ok() => {
                    self.promised.insert(name);
                }
                (None, Command::DeleteInstance { name, .. } | Command::DeleteVolume { name })
                    if answer.is_err() =>
                {
                    self.promised.insert(name.clone());
                }
                _ => {}
            }
        }
    }

    fn break_it(&mut self) {
        let Some(conductor) = &mut self.conductor else { return };
        match self.broken {
            Some(Broken::KeepsGenerations) => {
                for lease in conductor.state.leases.values_mut() {
                    lease.generation = LeaseGeneration::new(1);
                }
            }
            Some(Broken::DoesNotWaitForScrubs | Broken::GivesDirtyRegionsOn) => {
                for command in pod_state::model::scrub_all(&conductor.state) {
                    // It never refuses.
                    let _ = conductor.state.apply(&command);
                }
            }
            _ => {}
        }
    }

    fn after_turn(&mut self) -> Result<(), String> {
        self.turns += 1;
        self.alternatives_are_used()?;
        self.disks_wait_for_nobody()?;
        if let Some(conductor) = &self.conductor {
            self.apart.check(&conductor.state)?;
        }
        if self.turns.is_multiple_of(self.size.check_every) {
            self.promises_are_kept()?;
            if let Some(conductor) = &self.conductor {
                check(&conductor.state);
            }
        }
        Ok(())
    }

    /// What commands touched was looked at after every one that is in the state.
    fn every_step_was_checked(&self) -> Result<(), String> {
        match &self.conductor {
            Some(it) if self.broken.is_none() && it.world.checked != it.state.index => {
                Err(format!("of {} commands {} were checked", it.state.index, it.world.checked))
            }
            _ => Ok(()),
        }
    }

    /// What was answered is there, whatever became of the controller that answered.
    fn promises_are_kept(&self) -> Result<(), String> {
        let Some(conductor) = &self.conductor else { return Ok(()) };
        for name in &self.promised {
            let there = conductor.state.instance_named(name).is_some()
                || conductor.state.volume_named(name).is_some();
            if !there {
                return Err(format!("{name} was promised, and is not there"));
            }
        }
        Ok(())
    }

    /// Everything is mended, and everybody is there.
    fn calm_down(&mut self) {
        if let Some(conductor) = &mut self.conductor {
            conductor.world.crash_at_commit = None;
        }
        self.world().physical.calm_down();
    }

    /// Runs until every daemon has exactly what it should have and nobody waits for anything.
    fn settle_down(&mut self, when: &str) -> Result<(), String> {
        let end = self.now_us() + CALM_US;
        let mut why = String::new();
        while self.now_us() < end {
            for _ in 0..200 {
                self.slice(Vec::new())?;
            }
            match self.unsettled() {
                None => return Ok(()),
                Some(what) => why = what,
            }
        }
        Err(format!("{when}: {why}"))
    }

    fn unsettled(&self) -> Option<String> {
        let Some(conductor) = &self.conductor else { return Some("no controller".to_owned()) };
        let world = &conductor.world;
        let unsettled = world.physical.unsettled(&conductor.state).or_else(|| world.restless());
        unsettled.or_else(|| world.moves.restless(&conductor.state, &world.physical))
    }

    /// Everything is given up, and nothing is left.
    fn wind_down(&mut self) -> Result<(), String> {
        let Some(conductor) = &self.conductor else { return Err("no controller at the end".to_owned()) };
        let names = |of: &mut dyn Iterator<Item = &String>| of.cloned().collect::<Vec<_>>();
        let instances = names(&mut conductor.state.instances.values().map(|it| &it.name));
        let volumes = names(&mut conductor.state.volumes.values().map(|it| &it.name));
        let delete = |name: String| Command::DeleteInstance { name, force: true };
        self.slice(instances.into_iter().map(delete).collect())?;
        self.slice(volumes.into_iter().map(|name| Command::DeleteVolume { name }).collect())?;
        self.slice(vec![Command::SetFabric { fabric: pod_state::model::fabric(0, false, 0) }])?;
        self.settle_down("after everything was deleted")?;
        let Some(conductor) = &self.conductor else { return Err("no controller at the end".to_owned()) };
        let state = &conductor.state;
        check(state);
        if state.leases.len() + state.channels.len() + state.volumes.len() > 0 {
            return Err("leases, channels or volumes are left".to_owned());
        }
        // What failed is nobody's for ever.
        let memory = &conductor.world.physical.memory;
        let stays = |it: &Region| match it.usage {
            RegionUse::Failed => memory.holds(&it.area),
            _ => matches!(it.purpose, Purpose::Receive(_)),
        };
        let left = state.regions.iter().find(|region| !stays(region));
        left.map_or(Ok(()), |region| Err(format!("{region:?} is left")))
    }
}

fn creates(command: &Command) -> Option<(String, bool)> {
    match command {
        Command::CreateVolume { name, .. } | Command::CreateStriped { name, .. } => {
            Some((name.clone(), false))
        }
        Command::CreateInstance { name, .. } => Some((name.clone(), true)),
        _ => None,
    }
}

/// What a controller that is not there knows of anybody.
fn nobody() -> State {
    State::new(options(2))
}
