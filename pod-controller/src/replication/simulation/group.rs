//! All replicas, what goes wrong with them, and what is asked of them meanwhile.

use std::collections::{BTreeMap, BTreeSet};

use cxl_pool::simulated::Random;
use openraft::ServerState;
use pod_protocol::protocol::Protocol;
use pod_state::model::{check, options};
use pod_state::{Command, InstanceType, Options, State};
use tempfile::TempDir;

use super::super::log::Sizes;
use super::Broken;
use super::clients::{Clients, wish};
use super::faults::Mend;
use super::leader::Pod;
use super::net::{Net, Seen};
use super::node::{End, Node, Surroundings};
use super::storage::Witness;
use crate::config::testing::pool_and_config;
use crate::simulation::alternatives::alternatives_are_used;
use crate::simulation::faults::{Around, FAULTS};
use crate::simulation::loads::{Busy, Loads, TOLD_EVERY_US};
use crate::simulation::physical::{Physical, Seen as Heard};
use crate::simulation::random::Random as Dice;
use crate::simulation::relief::Moves;

/// How much happens.
#[derive(Clone, Copy, Debug)]
pub(super) struct Size {
    pub(super) replicas: u16,
    /// How many of them, the last ones, are outside of the pod.
    pub(super) outside: u16,
    /// How many hosts with daemons there are.
    pub(super) hosts: u16,
    /// How many names there are for instances, and as many for volumes.
    pub(super) names: u64,
    /// For how long something goes wrong, in ms.
    pub(super) rough_ms: u64,
    /// A fault about every so many ms.
    pub(super) fault_every_ms: u64,
    /// A fault of the daemons or their devices about every so many ms.
    pub(super) pod_fault_every_ms: u64,
    /// A wish about every so many ms.
    pub(super) wish_every_ms: u64,
    /// How long they may take after everything was mended: whoever leads may wait for a minute for one to become a member that is
    /// not there any more.
    pub(super) calm_ms: u64,
    /// Several stand for election at once, messages are late, and processes die for moments: only so is it seen who votes twice.
    pub(super) restless: bool,
    /// How large the pool of the pod is that they control.
    pub(super) pool_mib: u64,
    /// So many volumes and instances are asked for before anything goes wrong.
    pub(super) filled: u64,
    /// How many ask for something at once, and how many wishes are gathered into one commit, at most.
    pub(super) asking_max: usize,
    pub(super) gathered_max: usize,
    /// All that replicas know is compared about every so many ms, and what a change touched after each; 0 to compare all after each.
    pub(super) compare_every_ms: u64,
    /// How often all of the state is looked at. What commands touched is after each.
    pub(super) check_every_ms: u64,
    /// How rarely guests are busy, if daemons tell it and whoever leads does something about it.
    pub(super) busy: Option<Busy>,
    /// In which pieces logs and snapshots are written and sent.
    pub(super) sizes: Sizes,
    pub(super) chunk_bytes: u64,
}

/// How often delays are doubled on the slowest ways between daemons and controllers.
const DOUBLINGS_MAX: u32 = 8;

/// What a run came to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Summary {
    pub(super) promised: usize,
    pub(super) open: u64,
    pub(super) refused: u64,
    pub(super) voids: u64,
    pub(super) leaders: usize,
    pub(super) entries: u64,
    pub(super) seen: Seen,
    /// What became of what daemons and controllers said to each other.
    pub(super) heard: Heard,
    /// How many instances there were at most.
    pub(super) instances_max: usize,
    /// How many orders the daemons obeyed, and in how many terms.
    pub(super) obeyed: (u64, usize),
    /// How often all that a replica knows was compared with what others do, where that is not so after each entry.
    pub(super) compared: u64,
    /// How often leases were moved off NICs that carried too much, and volumes off SSDs.
    pub(super) moved: [u64; 2],
}

pub(super) struct Group {
    pub(super) around: Surroundings,
    pub(super) nodes: Vec<Node>,
    pub(super) now_ms: u64,
    pub(super) size: Size,
    pub(super) agenda: BTreeMap<(u64, u64), Mend>,
    pub(super) numbered: u64,
    pub(super) clients: Clients,
    /// When all that a replica knows was compared last.
    pub(super) compared_ms: Vec<u64>,
    pub(super) compared: u64,
    /// What happened, line by line.
    pub(super) trace: Vec<String>,
    /// What was last said of each replica.
    pub(super) said: Vec<String>,
    pub(super) dice: Random,
    /// For what happens to the daemons.
    pub(super) pod_dice: Dice,
    pub(super) instances_max: usize,
    /// Who was elected last, and for which term.
    pub(super) elected: (usize, u64),
    /// Whoever is elected next stands still before it has done much.
    pub(super) stalls_next: bool,
    _directory: TempDir,
}

impl Group {
    pub(super) fn new(seed: u64, size: Size, broken: Option<Broken>) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let (pool, config) = pool_and_config(directory.path());
        let mut dice = Random::new(seed ^ 0x5eed_0000);
        let net = Net::new(dice.bits());
        let mut nodes: Vec<Node> =
            (0..size.replicas).map(|replica| Node::new(seed, replica, broken)).collect();
        nodes[0].begins = true;
        let mut pod_dice = Dice::new(seed ^ 0x5eed);
        let mut physical = Physical::new(seed, DOUBLINGS_MAX);
        physical.news = Some(Vec::new());
        physical.loads = size.busy.map(|busy| Loads::new(seed, busy));
        for host in 1..=size.hosts {
            physical.add_host(host, true, &mut pod_dice);
        }
        let state = State::new(Options {
            regions_max: 1 << 20,
            protocol_minor: Protocol::CURRENT.minor,
            ..options(size.pool_mib)
        });
        let witness = Witness::default();
        witness.oracle().compares_changes = size.compare_every_ms > 0;
        witness.oracle().moves = size.busy.map(|_| Moves::default());
        let around =
            Surroundings { pool, config, net, pod: Pod::new(physical), witness, size, broken, state };
        Self {
            around,
            said: vec![String::new(); nodes.len()],
            compared_ms: vec![0; nodes.len()],
            compared: 0,
            nodes,
            now_ms: 0,
            size,
            agenda: BTreeMap::new(),
            numbered: 0,
            clients: Clients::default(),
            trace: Vec::new(),
            dice,
            pod_dice,
            instances_max: 0,
            elected: (0, 0),
            stalls_next: false,
            _directory: directory,
        }
    }

    /// Runs it: they begin, faults, calm. What goes wrong is the error.
    pub(super) fn run(&mut self) -> Result<Summary, String> {
        let outcome =
            self.begin().and_then(|()| self.fill()).and_then(|()| self.rough()).and_then(|()| self.calm());
        outcome.map_err(|what| format!("at {} ms: {what}", self.now_ms))?;
        let (heard, obeyed) = {
            let physical = self.around.pod.physical();
            (physical.seen.clone(), physical.obeyed())
        };
        let oracle = self.around.witness.oracle();
        Ok(Summary {
            promised: self.clients.promised.len(),
            open: self.clients.open,
            refused: self.clients.refused,
            voids: oracle.voids,
            leaders: oracle.leaders(),
            entries: oracle.last().unwrap_or(0),
            seen: self.around.net.seen(),
            heard,
            instances_max: self.instances_max,
            obeyed,
            compared: self.compared,
            moved: oracle.moves.as_ref().map_or([0; 2], |moves| moves.count),
        })
    }

    fn begin(&mut self) -> Result<(), String> {
        let until = self.now_ms + self.size.calm_ms;
        while self.around.witness.oracle().known.state.is_none() {
            self.step()?;
            if self.now_ms > until {
                return Err("they do not begin".to_owned());
            }
        }
        // Nobody says so a second time, whatever is lost.
        self.nodes[0].begins = false;
        Ok(())
    }

    fn rough(&mut self) -> Result<(), String> {
        let until = self.now_ms + self.size.rough_ms;
        if self.size.restless {
            self.around.net.set_weather(20, 120);
        }
        while self.now_ms < until {
            if self.dice.one_in(self.size.fault_every_ms) {
                self.fault();
            }
            if self.dice.one_in(self.size.wish_every_ms) && !self.is_busy() {
                let oracle = self.around.witness.oracle();
                let state = oracle.known.state.as_ref().unwrap_or(&self.around.state);
                let physical = &mut self.around.pod.physical();
                let Size { hosts, names, .. } = self.size;
                let around = Around {
                    dice: &mut self.pod_dice,
                    physical,
                    state: Some(state),
                    hosts,
                    names,
                    grouped: true,
                };
                self.clients.ask(wish(around, state), self.dice.one_in(2));
            }
            if self.dice.one_in(self.size.pod_fault_every_ms) {
                let physical = &mut self.around.pod.physical();
                let Size { hosts, names, .. } = self.size;
                let oracle = self.around.witness.oracle();
                let state = oracle.known.state.as_ref();
                let mut around =
                    Around { dice: &mut self.pod_dice, physical, state, hosts, names, grouped: true };
                let fault = around.draw_fault(FAULTS);
                around.fault(fault);
                self.trace.push(format!("{} ms: {fault:?}", self.now_ms));
            }
            self.step()?;
        }
        Ok(())
    }

    /// Everything is mended: they go on, and all know the same.
    fn calm(&mut self) -> Result<(), String> {
        self.say("everything is mended");
        self.agenda.clear();
        self.stalls_next = false;
        self.around.net.mend();
        self.around.net.set_weather(0, 3);
        self.around.pod.physical().calm_down();
        for node in &mut self.nodes {
            node.disk.set_full(false);
            node.disk.set_slow(0);
            node.starts_at_ms = node.starts_at_ms.min(self.now_ms + 500);
            node.still_until_ms = node.still_until_ms.min(self.now_ms + 500);
        }
        let until = self.now_ms + self.size.calm_ms;
        let mut last = 0;
        loop {
            // Something new, again and again: nothing else shows that they go on.
            if !self.clients.waits() {
                if last > 1 && self.unsettled().is_none() {
                    return self.compare(true);
                }
                last += 1;
                let name = format!("last{last}");
                self.clients
                    .ask(Command::SetInstanceType { name, instance_type: InstanceType::default() }, true);
            }
            for _ in 0..50 {
                self.step()?;
            }
            if self.now_ms > until {
                let why = self.unsettled().unwrap_or_else(|| "clients wait for answers".to_owned());
                return Err(format!("after everything was mended: {why}"));
            }
        }
    }

    /// Why not all is as it should be in the end.
    fn unsettled(&self) -> Option<String> {
        let oracle = self.around.witness.oracle();
        let last = oracle.last();
        let owners: BTreeSet<u64> = self.nodes.iter().map(|node| node.owner).collect();
        for node in &self.nodes {
            let Some(life) = &node.life else {
                return Some(format!("replica {} is not there", node.replica));
            };
            let metrics = life.standing.raft.metrics().borrow().clone();
            let voters = metrics.membership_config.membership().get_joint_config();
            if *voters != [owners.clone()] {
                return Some(format!(
                    "replica {} counts on {voters:?}, and there are {owners:?}",
                    node.replica
                ));
            }
            if metrics.last_applied.map(|id| id.index) != last {
                return Some(format!(
                    "replica {} knows {:?} of {last:?}",
                    node.replica, metrics.last_applied
                ));
            }
            let shown = life.handle.view().state.index;
            if Some(shown) != oracle.known.state.as_ref().map(|state| state.index) {
                return Some(format!("replica {} shows {shown}", node.replica));
            }
        }
        let state = oracle.known.state.as_ref()?;
        let physical = self.around.pod.physical();
        let restless = || oracle.moves.as_ref().and_then(|moves| moves.restless(state, &physical));
        physical.unsettled(state).or_else(restless)
    }

    /// Lets a millisecond pass.
    pub(super) fn step(&mut self) -> Result<(), String> {
        self.now_ms += 1;
        self.around.net.pass(self.now_ms);
        self.daemons()?;
        while let Some(entry) = self.agenda.first_entry().filter(|entry| entry.key().0 <= self.now_ms) {
            let mend = entry.remove();
            self.mend(&mend);
        }
        for number in 0..self.nodes.len() {
            let node = &mut self.nodes[number];
            let ends = if node.life.is_some() {
                node.pass(self.now_ms)
            } else if node.starts_at_ms <= self.now_ms {
                node.start(&self.around)
            } else {
                Ok(())
            };
            match ends {
                Ok(()) => {}
                Err(End::Fails) => self.end(number, 300),
                Err(End::Wrong(what)) => return Err(what),
            }
        }
        self.watch_elections();
        self.judge()?;
        self.compare(false)?;
        let told = self.clients.hear(&self.nodes, &mut self.dice, &self.around.witness)?;
        for what in told {
            self.say(&what);
        }
        self.look()
    }

    /// Looks at what has come of it.
    fn judge(&mut self) -> Result<(), String> {
        let mut oracle = self.around.witness.oracle();
        oracle.violation.take().map_or(Ok(()), Err)?;
        let has_news = std::mem::take(&mut oracle.has_news);
        if let Some(state) = oracle.known.state.as_ref().filter(|_| has_news) {
            alternatives_are_used(state, &self.around.pod.physical(), None)?;
        }
        for node in &self.nodes {
            let told = node.life.as_ref().map_or(0, |life| life.office.told());
            oracle.told(node.replica, told)?;
        }
        if let Some(state) =
            oracle.known.state.as_ref().filter(|_| self.now_ms.is_multiple_of(self.size.check_every_ms))
        {
            check(state);
            self.instances_max = self.instances_max.max(state.instances.len());
        }
        Ok(())
    }

    /// Lets happen at the daemons, and between them and whoever leads or believes to, what is due by now.
    fn daemons(&mut self) -> Result<(), String> {
        let now_us = self.now_ms * 1000;
        let oracle = self.around.witness.oracle();
        let state = oracle.known.state.as_ref().unwrap_or(&self.around.state);
        let pod = self.around.pod.clone();
        let mut physical = pod.physical();
        while let Some(what) = physical.next_until(now_us) {
            let port = what.conversation().and_then(|(endpoint, connection)| {
                let mut ports = self.nodes.iter_mut().filter_map(|node| node.life.as_mut()?.office.port());
                ports.find(|port| port.has(endpoint, connection))
            });
            physical.happens(what, port, state);
        }
        physical.now_us = now_us;
        if now_us.is_multiple_of(TOLD_EVERY_US) {
            physical.tell_loads();
        }
        let news = physical.news.replace(Vec::new()).unwrap_or_default();
        self.trace.extend(news.into_iter().map(|what| format!("{} ms: {what}", self.now_ms)));
        physical.violation.take().map_or(Ok(()), Err)
    }

    /// Looks at what every replica says of itself, and shows.
    fn look(&mut self) -> Result<(), String> {
        let mut lines = Vec::new();
        let mut oracle = self.around.witness.oracle();
        for (node, said) in self.nodes.iter_mut().zip(&mut self.said) {
            let Some(life) = &mut node.life else { continue };
            // What it said last in another life it says anew.
            if life.metrics.has_changed().unwrap_or(false) || said.is_empty() {
                let metrics = life.metrics.borrow_and_update();
                let is_outside = node.replica >= self.size.replicas - self.size.outside;
                if is_outside && (life.office.port().is_some() || life.handle.office().leads) {
                    return Err(format!("replica {} leads, and is outside of the pod", node.replica));
                }
                if metrics.state == ServerState::Leader && metrics.current_leader == Some(node.owner) {
                    oracle.leads(metrics.current_term, node.owner)?;
                }
                let news = format!(
                    "replica {} is {:?} in term {}, {:?} leads, log to {:?}, applied {:?}, snapshot {:?}, purged {:?}, members {:?}",
                    node.replica,
                    metrics.state,
                    metrics.current_term,
                    metrics.current_leader,
                    metrics.last_log_index,
                    metrics.last_applied.map(|id| id.index),
                    metrics.snapshot.map(|id| id.index),
                    metrics.purged.map(|id| id.index),
                    metrics.membership_config.membership().get_joint_config()
                );
                if news != *said {
                    said.clone_from(&news);
                    lines.push(news);
                }
            }
            if life.views.has_changed().unwrap_or(false) {
                let view = life.views.borrow_and_update().clone();
                oracle.shown(node.replica, &view.state)?;
            }
        }
        if self.now_ms.is_multiple_of(1000) {
            // For the order of what it sends in one moment Raft's library draws lots, and so for who overtakes whom.
            lines.push(format!("{:?}", Seen { overtook: 0, ..self.around.net.seen() }));
        }
        drop(oracle);
        for what in lines {
            self.say(&what);
        }
        Ok(())
    }

    pub(super) fn say(&mut self, what: &str) {
        self.trace.push(format!("{} ms: {what}", self.now_ms));
    }

    /// A process ends by itself; somebody starts it again.
    pub(super) fn end(&mut self, number: usize, away_ms: u64) {
        let node = &mut self.nodes[number];
        let power = node.disk.has_failed();
        node.kill(&self.around, power);
        self.said[number].clear();
        node.starts_at_ms = self.now_ms + away_ms;
        self.say(&format!("replica {number} ends"));
    }
}
