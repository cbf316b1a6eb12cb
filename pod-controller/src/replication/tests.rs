//! Raft over rings in memory that hosts do not see coherently, while messages are lost and late and replicas are cut off.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use cxl_pool::simulated::{Faults, Random, SimulatedPool, check_seeds};
use cxl_pool::{HostId, Layout, REGION_SLOTS_LEAST, ReplicaId};
use openraft::storage::RaftLogStorage;
use pod_api::{Event, EventKind};
use pod_protocol::controller::PortWaker;
use pod_protocol::protocol::Protocol;
use pod_protocol::replicas::{ReplicaPort, ReplicaPortError};
use pod_protocol::run_directory::RunDirectory;
use pod_state::{Command, InstanceType};
use tempfile::TempDir;

use super::change::{Change, LogOwner, Member, Outcome, Raft};
use super::clerk::answer_for_raft;
use super::log::{Log, LogFile};
use super::machine::Machine;
use super::machine::tests::begin;
use super::network::Network;
use super::post::{Answer, Clerk, Post, Question};
use super::raft_config::raft_config;
use super::renewal::renew_log;
use super::replica::{Standing, know_all, show_what_is_known};
use super::roll::Roll;
use crate::config::ReplicationSection;
use crate::config::testing::pool_and_config;
use crate::controller::Desk;
use crate::store::StoreError;

/// Far longer than anything takes; only a test that fails waits for it.
const PATIENCE: Duration = Duration::from_mins(1);
/// How long a change may take before it counts as open.
const COMMIT: Duration = Duration::from_millis(1500);
const REPLICAS: u16 = 3;
const CHANGES: u64 = 24;

/// What happens to messages.
struct Weather {
    random: Mutex<Random>,
    /// One in so many is lost, and as many are late; 0 for none.
    lost_one_in: AtomicU64,
    /// Which replica nobody reaches; `u64::MAX` for none.
    cut_off: AtomicU64,
    /// How many bytes of a question arrive in a ms; 0 for all of them at once.
    bytes_per_ms: AtomicU64,
}

impl Weather {
    /// Whether a message between these arrives, and after how long.
    fn delay(&self, from: u16, to: u16) -> Option<Duration> {
        let cut_off = self.cut_off.load(Ordering::Relaxed);
        if cut_off == u64::from(from) || cut_off == u64::from(to) {
            return None;
        }
        let one_in = self.lost_one_in.load(Ordering::Relaxed);
        let mut random = self.random.lock().expect("no panic");
        if one_in > 0 && random.one_in(one_in) {
            return None;
        }
        let late = one_in > 0 && random.one_in(one_in);
        Some(Duration::from_millis(if late { random.below(60) } else { 0 }))
    }

    /// How long a question is on its way.
    fn way(&self, question: &Question) -> Duration {
        let bytes_per_ms = self.bytes_per_ms.load(Ordering::Relaxed);
        if bytes_per_ms == 0 {
            return Duration::ZERO;
        }
        let bytes = serde_json::to_vec(question).expect("it was read").len() as u64;
        Duration::from_millis(bytes / bytes_per_ms)
    }
}

struct Node {
    owner: LogOwner,
    raft: Raft,
    machine: Machine,
    post: Post,
    carrier: Option<JoinHandle<Result<(), ReplicaPortError>>>,
}

struct Group {
    nodes: Vec<Node>,
    weather: Arc<Weather>,
    runtime: tokio::runtime::Runtime,
    pool: SimulatedPool,
    directory: TempDir,
}

impl Group {
    fn new(seed: u64) -> Self {
        let size_bytes = 32 << 20;
        let pool = SimulatedPool::new(seed, size_bytes);
        let layout = Layout::new(size_bytes, 4, REPLICAS, REGION_SLOTS_LEAST).expect("large enough");
        let directory = tempfile::tempdir().expect("a directory");
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
        let runtime = runtime.expect("a runtime");
        let weather = Arc::new(Weather {
            random: Mutex::new(Random::new(seed)),
            lost_one_in: AtomicU64::new(0),
            cut_off: AtomicU64::new(u64::MAX),
            bytes_per_ms: AtomicU64::new(0),
        });
        let mut group = Self { nodes: Vec::new(), weather, runtime, pool, directory };
        for replica in 0..REPLICAS {
            group.start(&layout, replica);
        }
        let members: BTreeMap<LogOwner, Member> = group
            .nodes
            .iter()
            .zip(0..)
            .map(|(node, replica)| (node.owner, Member::in_pod(ReplicaId::new(replica))))
            .collect();
        group.runtime.block_on(group.nodes[0].raft.initialize(members)).expect("the first");
        group
    }

    fn start(&mut self, layout: &Layout, replica: u16) {
        let path = self.directory.path().join(format!("log{replica}"));
        let file = Arc::new(LogFile::open(&path).expect("a new file"));
        let (owner, machine) = (file.owner(), Machine::open(Arc::clone(&file)).expect("empty"));
        let waker = PortWaker::new().expect("a descriptor");
        let (post, outbox) = Post::new(waker.clone());
        let rings = ReplicaPort::open(
            layout,
            self.pool.host(HostId::new(replica + 1)),
            RunDirectory::new(self.directory.path().join("run")),
            (ReplicaId::new(replica), Protocol::CURRENT),
            (true, waker),
        )
        .expect("a slot");
        let section = ReplicationSection {
            replica,
            log: None,
            outside: false,
            heartbeat_ms: 40,
            election_ms: 240,
            tcp: None,
        };
        let config = Arc::new(raft_config(&section).expect("good"));
        let network = Network { post: post.clone(), me: owner, roll: Roll::default() };
        let raft = openraft::Raft::new(owner, config, network, Log(file), machine.clone());
        let raft = self.runtime.block_on(raft).expect("an empty log");
        let clerk: Clerk = {
            let (raft, weather) = (raft.clone(), Arc::clone(&self.weather));
            Arc::new(move |from, question| {
                let (raft, weather) = (raft.clone(), Arc::clone(&weather));
                Box::pin(async move {
                    // Whoever asks waits in vain for what is lost, be it the question or the answer.
                    let Some(late) = weather.delay(from.get(), replica) else {
                        tokio::time::sleep(PATIENCE).await;
                        return Answer::Failed("lost".to_owned());
                    };
                    tokio::time::sleep(late + weather.way(&question)).await;
                    let answer = answer_for_raft(&raft, owner, question).await;
                    match weather.delay(replica, from.get()) {
                        Some(late) => tokio::time::sleep(late).await,
                        None => tokio::time::sleep(PATIENCE).await,
                    }
                    answer
                })
            })
        };
        let carrier = std::thread::spawn({
            let (post, runtime) = (post.clone(), self.runtime.handle().clone());
            move || post.carry(&outbox, rings, &clerk, &runtime)
        });
        self.nodes.push(Node { owner, raft, machine, post, carrier: Some(carrier) });
    }

    /// Makes a change with whoever leads. Nothing if it is open what became of it, or void.
    fn change(&self, make: impl Fn(&Machine) -> Change) -> Option<()> {
        let leads = |node: &&Node| node.raft.metrics().borrow().current_leader == Some(node.owner);
        let leader = self.nodes.iter().rfind(leads)?;
        self.runtime.block_on(async {
            tokio::time::timeout(COMMIT, leader.raft.ensure_linearizable()).await.ok()?.ok()?;
            let change = make(&leader.machine);
            let written = tokio::time::timeout(COMMIT, leader.raft.client_write(change)).await.ok()?.ok()?;
            (written.data == Outcome::Done).then_some(())
        })
    }

    fn types(&self, replica: usize) -> BTreeSet<String> {
        self.nodes[replica].machine.look(|known| {
            known.state.as_ref().map(|state| state.types.keys().cloned().collect()).unwrap_or_default()
        })
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        for node in &mut self.nodes {
            let ended = async { tokio::time::timeout(Duration::from_secs(5), node.raft.shutdown()).await };
            let _ = self.runtime.block_on(ended);
            node.post.stop();
            if let Some(carrier) = node.carrier.take() {
                let _ = carrier.join();
            }
        }
        if !std::thread::panicking() {
            assert_eq!(self.pool.faults(), Faults::default(), "a rule of non-coherent memory was broken");
        }
    }
}

fn until(what: &str, mut look: impl FnMut() -> bool) -> Result<(), String> {
    let began = Instant::now();
    while !look() {
        if began.elapsed() > PATIENCE {
            return Err(format!("waited in vain for {what}"));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

fn what_was_answered_survives(seed: u64) -> Result<(), String> {
    let group = Group::new(seed);
    let mut random = Random::new(seed ^ 0xc0ff_ee00);
    until("the beginning", || group.change(|_| begin()).is_some() || group.nodes[0].machine.index() > 0)?;
    group.weather.lost_one_in.store(6, Ordering::Relaxed);
    let mut answered = BTreeSet::new();
    for number in 0..CHANGES {
        if number % 8 == 4 {
            // Whoever leads, in half of the cases.
            let leads = |node: &Node| node.raft.metrics().borrow().current_leader == Some(node.owner);
            let leader = group.nodes.iter().position(leads).unwrap_or(0) as u64;
            let whom = if random.one_in(2) { leader } else { random.below(REPLICAS.into()) };
            group.weather.cut_off.store(whom, Ordering::Relaxed);
        } else if number % 8 == 0 {
            group.weather.cut_off.store(u64::MAX, Ordering::Relaxed);
        }
        let name = format!("t{number}");
        let command = Command::SetInstanceType { name: name.clone(), instance_type: InstanceType::default() };
        let made = group.change(|machine| Change::Turn {
            base: machine.index(),
            commands: vec![command.clone()],
            events: Vec::new(),
        });
        if made.is_some() {
            answered.insert(name);
        } else {
            std::thread::sleep(Duration::from_millis(random.below(100)));
        }
    }
    group.weather.cut_off.store(u64::MAX, Ordering::Relaxed);
    group.weather.lost_one_in.store(0, Ordering::Relaxed);
    until("a last change", || {
        let last =
            Command::SetInstanceType { name: "last".to_owned(), instance_type: InstanceType::default() };
        let turn = |machine: &Machine| Change::Turn {
            base: machine.index(),
            commands: vec![last.clone()],
            events: Vec::new(),
        };
        group.types(0).contains("last") || group.change(turn).is_some()
    })?;
    let states = || -> Vec<_> {
        group.nodes.iter().map(|node| node.machine.look(|known| known.state.clone())).collect()
    };
    until("the same everywhere", || {
        let states = states();
        group.types(0).contains("last") && states.iter().all(|state| *state == states[0])
    })?;
    let lost: Vec<_> = answered.difference(&group.types(0)).cloned().collect();
    if answered.is_empty() || !lost.is_empty() {
        return Err(format!("of {} changes that were answered these are lost: {lost:?}", answered.len()));
    }
    Ok(())
}

/// A group of one, with what a file has of its log and its state.
async fn alone(path: &Path) -> (Raft, Machine, Arc<LogFile>) {
    let began = Instant::now();
    let file = loop {
        match LogFile::open(path) {
            Ok(file) => break Arc::new(file),
            // Who had it before may not have let go of it quite yet.
            Err(StoreError::InUse { .. }) if began.elapsed() < PATIENCE => {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            Err(error) => panic!("{error}"),
        }
    };
    let (owner, machine) = (file.owner(), Machine::open(Arc::clone(&file)).expect("undamaged"));
    let (post, _outbox) = Post::new(PortWaker::new().expect("a descriptor"));
    let network = Network { post, me: owner, roll: Roll::default() };
    let section = ReplicationSection {
        replica: 0,
        log: None,
        outside: false,
        heartbeat_ms: 40,
        election_ms: 240,
        tcp: None,
    };
    let config = Arc::new(raft_config(&section).expect("good"));
    let raft = openraft::Raft::new(owner, config, network, Log(Arc::clone(&file)), machine.clone());
    (raft.await.expect("a log"), machine, file)
}

/// It remembers a little late how far its log was decided.
#[test]
fn who_leads_again_in_its_old_term_knows_all_that_its_log_has() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("log");
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.expect("a runtime").block_on(async {
        let (raft, machine, file) = alone(&path).await;
        let member = Member::in_pod(ReplicaId::new(0));
        raft.initialize(BTreeMap::from([(file.owner(), member)])).await.expect("the first");
        let leads = raft.wait(Some(PATIENCE)).current_leader(file.owner(), "it leads").await;
        leads.expect("there is nobody else");
        raft.client_write(begin()).await.expect("begun");
        let remembered = raft.metrics().borrow().last_applied;
        for number in 0..CHANGES {
            let name = format!("t{number}");
            let command = Command::SetInstanceType { name, instance_type: InstanceType::default() };
            raft.client_write(turn(&machine, &command)).await.expect("changed");
        }
        raft.shutdown().await.expect("ended");
        Log(Arc::clone(&file)).save_committed(remembered).await.expect("written");
        drop((raft, machine, file));

        let (raft, machine, _file) = alone(&path).await;
        know_all(&raft).await.expect("it leads");
        let types = machine.look(|known| known.state.as_ref().map_or(0, |state| state.types.len()));
        assert_eq!(types as u64, CHANGES);
        raft.shutdown().await.expect("ended");
    });
}

/// A turn upon what is known with this one command.
fn turn(machine: &Machine, command: &Command) -> Change {
    Change::Turn { base: machine.index(), commands: vec![command.clone()], events: Vec::new() }
}

/// As [`turn`], with something to tell that has so many bytes.
fn long_turn(machine: &Machine, command: &Command, bytes: usize) -> Change {
    let event = Event {
        sequence: 0,
        time_ms: 0,
        kind: EventKind::LinkUp,
        subject: "h1/nic0".to_owned(),
        message: "x".repeat(bytes),
    };
    Change::Turn { base: machine.index(), commands: vec![command.clone()], events: vec![event] }
}

/// Raft waits one heartbeat for an answer, which is 40 ms here, and then asks again.
#[test]
fn what_takes_longer_than_a_heartbeat_arrives() -> Result<(), String> {
    let group = Group::new(3);
    until("the beginning", || group.change(|_| begin()).is_some() || group.nodes[0].machine.index() > 0)?;
    let set = |name: &str| Command::SetInstanceType {
        name: name.to_owned(),
        instance_type: InstanceType::default(),
    };
    let arrives = |name: &str, bytes: usize| {
        until(name, || {
            let known = |replica| group.types(replica).contains(name);
            (0..REPLICAS.into()).any(known)
                || group.change(|machine| long_turn(machine, &set(name), bytes)).is_some()
        })
    };
    group.weather.bytes_per_ms.store(8 << 10, Ordering::Relaxed);
    arrives("large", 1 << 20)?;
    until("it everywhere", || (0..REPLICAS.into()).all(|replica| group.types(replica).contains("large")))?;

    group.weather.cut_off.store(2, Ordering::Relaxed);
    for number in 0..70 {
        arrives(&format!("t{number}"), 20 << 10)?;
    }
    group.weather.cut_off.store(u64::MAX, Ordering::Relaxed);
    until("all of them there", || group.types(2).contains("t69"))
}

/// A replica of the version before may know none of the commands before.
#[test]
fn the_log_begins_anew_when_the_pod_may_speak_an_older_version() -> Result<(), String> {
    let group = Group::new(1);
    for node in &group.nodes {
        group.runtime.spawn(renew_log(node.raft.clone(), node.machine.renewals()));
    }
    until("the beginning", || group.change(|_| begin()).is_some() || group.nodes[0].machine.index() > 0)?;
    let options =
        group.nodes[0].machine.look(|known| known.state.as_ref().map(|state| state.options.clone()));
    let mut options = options.ok_or("it has begun")?;
    let some = Command::SetInstanceType { name: "some".to_owned(), instance_type: InstanceType::default() };
    until("a command", || {
        group.change(|machine| turn(machine, &some)).is_some() || group.types(0).contains("some")
    })?;
    let metrics = |node: &Node| node.raft.metrics().borrow().clone();
    let before: Vec<u64> = group.nodes.iter().filter_map(|node| metrics(node).last_log_index).collect();
    assert!(group.nodes.iter().all(|node| metrics(node).purged.is_none()), "nothing of it is gone");
    options.disk_queues += 1;
    let configure = Command::Configure { options };
    until("a change of options", || group.change(|machine| turn(machine, &configure)).is_some())?;
    let is_renewed = |(node, last): (&Node, &u64)| metrics(node).purged.is_some_and(|id| id.index > *last);
    until("new logs", || group.nodes.iter().zip(&before).all(is_renewed))
}

/// The others elect another leader, which changes something, while this one still takes itself for the leader.
#[test]
fn a_leader_that_learns_late_of_another_shows_what_that_one_changed() -> Result<(), String> {
    let group = Group::new(2);
    until("the beginning", || group.change(|_| begin()).is_some() || group.nodes[0].machine.index() > 0)?;
    let Node { owner, raft, machine, post, .. } = &group.nodes[1];
    until("it to be known there", || machine.look(|known| known.state.is_some()))?;

    let (pool, config) = pool_and_config(group.directory.path());
    let state = machine.look(|known| known.state.clone()).ok_or("it has begun")?;
    let (_desk, handle) = Desk::new(&pool, &config, &state, Vec::new()).expect("a descriptor");
    let standing = Arc::new(Standing {
        owner: *owner,
        me: ReplicaId::new(1),
        raft: raft.clone(),
        machine: machine.clone(),
        post: post.clone(),
        outside: None,
        trusted: Duration::ZERO,
        elected: AtomicU64::new(0),
        leading: AtomicU64::new(1),
    });
    group.runtime.spawn(show_what_is_known(Arc::clone(&standing), handle.clone()));

    let set = |name: &str| Command::SetInstanceType {
        name: name.to_owned(),
        instance_type: InstanceType::default(),
    };
    let arrives = |name: &str| {
        until(name, || {
            let known = group.types(1).contains(name);
            known
                || group.change(|machine| turn(machine, &set(name))).is_some()
                    && group.types(1).contains(name)
        })
    };
    arrives("meanwhile")?;
    let shown = |name: &str| handle.view().state.types.contains_key(name);
    assert!(!shown("meanwhile"), "it leads, for all it knows");
    standing.resign(&handle);
    assert!(shown("meanwhile"), "nobody changes anything more");
    arrives("afterwards")?;
    until("what came afterwards", || shown("afterwards"))
}

#[test]
fn what_was_answered_survives_loss_delay_and_partitions() {
    check_seeds("-p pod-controller --lib replication", 2, what_was_answered_survives);
}
