//! All replicas, what goes wrong with them, and what is asked of them meanwhile.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use cxl_pool::simulated::Random;
use cxl_pool::{CreateOptions, Pool};
use openraft::ServerState;
use pod_state::model::options;
use pod_state::{Command, InstanceType, State};
use tempfile::TempDir;

use super::Broken;
use super::clients::{Clients, wish};
use super::net::{Net, Seen};
use super::node::{End, Node, Surroundings};
use super::oracle::Oracle;
use super::storage::Witness;
use crate::config::Config;

/// How much happens.
#[derive(Clone, Copy, Debug)]
pub(super) struct Size {
    pub(super) replicas: u16,
    /// For how long something goes wrong, in ms.
    pub(super) rough_ms: u64,
    /// A fault about every so many ms.
    pub(super) fault_every_ms: u64,
    /// A wish about every so many ms.
    pub(super) wish_every_ms: u64,
    /// How long they may take after everything was mended: whoever leads may wait for a minute for one to become a member that is
    /// not there any more.
    pub(super) calm_ms: u64,
    /// Several stand for election at once, messages are late, and processes die for moments: only so is it seen who votes twice.
    pub(super) restless: bool,
}

/// What is going to be mended.
#[derive(Debug)]
enum Mend {
    Ways,
    Weather,
    Full(usize),
    Slow(usize),
}

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
}

pub(super) struct Group {
    around: Surroundings,
    nodes: Vec<Node>,
    now_ms: u64,
    size: Size,
    agenda: BTreeMap<(u64, u64), Mend>,
    numbered: u64,
    clients: Clients,
    oracle: Oracle,
    /// What happened, line by line.
    pub(super) trace: Vec<String>,
    /// What was last said of each replica.
    said: Vec<String>,
    dice: Random,
    _directory: TempDir,
}

impl Group {
    pub(super) fn new(seed: u64, size: Size, broken: Option<Broken>) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let (path, run) = (directory.path().join("pool"), directory.path().join("run"));
        let pool = CreateOptions { size_bytes: Some(32 << 20), ..CreateOptions::default() };
        let pool = Pool::create(&path, &pool).expect("a pool");
        let (path, run) = (path.display(), run.display());
        let text =
            format!("[controller]\nstate = '/s'\n[pool]\npath = '{path}'\n[run]\ndirectory = '{run}'\n");
        let config = Config::parse(&text, Path::new("controller.toml")).expect("a configuration");
        let mut dice = Random::new(seed ^ 0x5eed_0000);
        let net = Net::new(dice.bits());
        let mut nodes: Vec<Node> =
            (0..size.replicas).map(|replica| Node::new(seed, replica, broken)).collect();
        nodes[0].begins = true;
        let around = Surroundings {
            pool,
            config,
            net,
            witness: Witness::default(),
            replicas: size.replicas,
            restless: size.restless,
            broken,
            state: State::new(options(64)),
        };
        Self {
            around,
            said: vec![String::new(); nodes.len()],
            nodes,
            now_ms: 0,
            size,
            agenda: BTreeMap::new(),
            numbered: 0,
            clients: Clients::default(),
            oracle: Oracle::default(),
            trace: Vec::new(),
            dice,
            _directory: directory,
        }
    }

    /// Runs it: they begin, faults, calm. What goes wrong is the error.
    pub(super) fn run(&mut self) -> Result<Summary, String> {
        let outcome = self.begin().and_then(|()| self.rough()).and_then(|()| self.calm());
        outcome.map_err(|what| format!("at {} ms: {what}", self.now_ms))?;
        Ok(Summary {
            promised: self.clients.promised.len(),
            open: self.clients.open,
            refused: self.clients.refused,
            voids: self.oracle.voids,
            leaders: self.oracle.leaders(),
            entries: self.oracle.last().unwrap_or(0),
            seen: self.around.net.seen(),
        })
    }

    fn begin(&mut self) -> Result<(), String> {
        let until = self.now_ms + self.size.calm_ms;
        while self.oracle.known.state.is_none() {
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
            if self.dice.one_in(self.size.wish_every_ms) && !self.clients.is_busy() {
                let state = self.oracle.known.state.as_ref().unwrap_or(&self.around.state);
                let (wish, persists) = (wish(&mut self.dice, state), self.dice.one_in(2));
                self.clients.ask(wish, persists);
            }
            self.step()?;
        }
        Ok(())
    }

    /// Everything is mended: they go on, and all know the same.
    fn calm(&mut self) -> Result<(), String> {
        self.say("everything is mended");
        self.agenda.clear();
        self.around.net.mend();
        self.around.net.set_weather(0, 3);
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
                    return Ok(());
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
        let last = self.oracle.last();
        let owners: BTreeSet<u64> = self.nodes.iter().map(|node| node.owner).collect();
        for node in &self.nodes {
            let Some(life) = &node.life else {
                return Some(format!("replica {} is not there", node.replica));
            };
            let metrics = life.standing.raft.metrics().borrow().clone();
            let voters: BTreeSet<u64> = metrics.membership_config.voter_ids().collect();
            if voters != owners {
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
            if Some(shown) != self.oracle.known.state.as_ref().map(|state| state.index) {
                return Some(format!("replica {} shows {shown}", node.replica));
            }
        }
        None
    }

    /// Lets a millisecond pass.
    fn step(&mut self) -> Result<(), String> {
        self.now_ms += 1;
        self.around.net.pass(self.now_ms);
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
        for applied in self.around.witness.heard() {
            self.oracle.applied(&applied)?;
        }
        let told = self.clients.hear(&self.nodes, &mut self.dice, &mut self.oracle)?;
        for what in told {
            self.say(&what);
        }
        self.look()
    }

    /// Looks at what every replica says of itself, and shows.
    fn look(&mut self) -> Result<(), String> {
        let mut lines = Vec::new();
        for (node, said) in self.nodes.iter_mut().zip(&mut self.said) {
            let Some(life) = &mut node.life else { continue };
            // What it said last in another life it says anew.
            if life.metrics.has_changed().unwrap_or(false) || said.is_empty() {
                let metrics = life.metrics.borrow_and_update();
                if metrics.state == ServerState::Leader && metrics.current_leader == Some(node.owner) {
                    self.oracle.leads(metrics.current_term, node.owner)?;
                }
                let news = format!(
                    "replica {} is {:?} in term {}, {:?} leads, log to {:?}, applied {:?}, snapshot {:?}, purged {:?}",
                    node.replica,
                    metrics.state,
                    metrics.current_term,
                    metrics.current_leader,
                    metrics.last_log_index,
                    metrics.last_applied.map(|id| id.index),
                    metrics.snapshot.map(|id| id.index),
                    metrics.purged.map(|id| id.index)
                );
                if news != *said {
                    said.clone_from(&news);
                    lines.push(news);
                }
            }
            if life.views.has_changed().unwrap_or(false) {
                let view = life.views.borrow_and_update().clone();
                self.oracle.shown(node.replica, &view.state)?;
            }
        }
        if self.now_ms.is_multiple_of(1000) {
            lines.push(format!("{:?}", self.around.net.seen()));
        }
        for what in lines {
            self.say(&what);
        }
        Ok(())
    }

    fn say(&mut self, what: &str) {
        self.trace.push(format!("{} ms: {what}", self.now_ms));
    }

    /// A process ends by itself; somebody starts it again.
    fn end(&mut self, number: usize, away_ms: u64) {
        let node = &mut self.nodes[number];
        let power = node.disk.has_failed();
        node.kill(&self.around, power);
        self.said[number].clear();
        node.starts_at_ms = self.now_ms + away_ms;
        self.say(&format!("replica {number} ends"));
    }

    fn plan(&mut self, after_ms: u64, mend: Mend) {
        self.numbered += 1;
        self.agenda.insert((self.now_ms + after_ms, self.numbered), mend);
    }

    fn mend(&mut self, mend: &Mend) {
        self.say(&format!("mended: {mend:?}"));
        match mend {
            Mend::Ways => self.around.net.mend(),
            Mend::Weather => self.around.net.set_weather(0, 3),
            Mend::Full(number) => self.nodes[*number].disk.set_full(false),
            Mend::Slow(number) => self.nodes[*number].disk.set_slow(0),
        }
    }

    /// Whoever leads, half of the time.
    fn whom(&mut self) -> usize {
        let leader = self.nodes.iter().position(|node| node.elected() != 0);
        let any = usize::try_from(self.dice.below(self.nodes.len() as u64)).unwrap_or(0);
        if self.dice.one_in(2) { leader.unwrap_or(any) } else { any }
    }

    fn fault(&mut self) {
        let whom = self.whom();
        let long = self.dice.one_in(4);
        let away_ms = if long { 500 + self.dice.below(3000) } else { 1 + self.dice.below(400) };
        let (kind, away_ms) =
            if self.size.restless { (0, 1 + self.dice.below(10)) } else { (self.dice.below(16), away_ms) };
        self.say(&format!("fault {kind} of replica {whom} for {away_ms} ms"));
        let others: Vec<u16> = (0..self.size.replicas).filter(|other| usize::from(*other) != whom).collect();
        let me = self.nodes[whom].replica;
        match kind {
            0 | 1 => {
                self.nodes[whom].kill(&self.around, kind == 1);
                self.said[whom].clear();
                self.nodes[whom].starts_at_ms = self.now_ms + away_ms;
            }
            2 | 3 => {
                let writes = self.dice.below(60);
                self.nodes[whom].disk.fail_in(writes);
            }
            4 => {
                for other in others {
                    self.around.net.cut(me, other);
                    self.around.net.cut(other, me);
                }
                self.plan(away_ms, Mend::Ways);
            }
            5 => {
                // It hears the others, and they do not hear it, or the other way round.
                let hears = self.dice.one_in(2);
                for other in others {
                    if hears { self.around.net.cut(me, other) } else { self.around.net.cut(other, me) }
                }
                self.plan(away_ms, Mend::Ways);
            }
            6 => {
                let other = others[usize::try_from(self.dice.below(others.len() as u64)).unwrap_or(0)];
                self.around.net.cut(me, other);
                self.plan(away_ms, Mend::Ways);
            }
            7 | 8 => {
                let (lost, late) = (3 + self.dice.below(20), 3 + self.dice.below(200));
                self.around.net.set_weather(lost, late);
                self.plan(away_ms, Mend::Weather);
            }
            9 => {
                let one_in = 1 + self.dice.below(4);
                self.nodes[whom].disk.set_slow(one_in);
                self.plan(away_ms, Mend::Slow(whom));
            }
            10 => {
                self.nodes[whom].disk.set_full(true);
                self.plan(away_ms, Mend::Full(whom));
            }
            11 | 12 => self.nodes[whom].still_until_ms = self.now_ms + away_ms,
            13 => self.nodes[whom].pace_permille = 700 + self.dice.below(600),
            14 => {
                let asked = usize::try_from(self.dice.below(self.nodes.len() as u64)).unwrap_or(0);
                if let Some(life) = self.nodes[asked].life.as_ref().filter(|_| self.can_do_without(whom)) {
                    life.dismiss(me);
                }
            }
            _ => {
                if self.can_do_without(whom) {
                    self.nodes[whom].lose_log(&self.around);
                    self.said[whom].clear();
                    self.nodes[whom].starts_at_ms = self.now_ms + away_ms;
                    self.say(&format!("the log of replica {whom} is lost"));
                }
            }
        }
    }

    /// Whether the others have a majority of every set of members that anybody counts on: a log that is lost is lost for good.
    fn can_do_without(&self, whom: usize) -> bool {
        let left = self.nodes.iter().enumerate().filter(|(number, _)| *number != whom);
        let left: BTreeSet<u64> = left.map(|(_, node)| node.owner).collect();
        self.nodes.iter().all(|node| {
            // Of whoever is away it is not known what it counts on.
            let Some(life) = &node.life else { return false };
            let metrics = life.standing.raft.metrics().borrow().clone();
            let members = metrics.membership_config.membership();
            members.get_joint_config().iter().all(|voters| {
                let there = voters.iter().filter(|voter| left.contains(voter)).count();
                there * 2 > voters.len()
            })
        })
    }
}
