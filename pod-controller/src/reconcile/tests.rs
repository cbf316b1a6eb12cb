use cxl_pool::{Area, HostId, LineCount, LineOffset, Role};
use pod_protocol::reports::{DeviceReport, Join};
use pod_state::{self as state, DeviceId, NicWish, Options};

use super::remote::RETRY_AFTER;
use super::*;

const FRONTEND: EndpointId = EndpointId::new(HostId::new(1), Role::NetFrontend);
const BACKEND: EndpointId = EndpointId::new(HostId::new(2), Role::NetBackend);

const BACKUP: EndpointId = EndpointId::new(HostId::new(3), Role::NetBackend);

/// A reconciler with everything it has sent, by ticket.
#[derive(Default)]
struct Bench {
    reconciler: Reconciler<usize>,
    sent: Vec<(EndpointId, Command)>,
    answered: usize,
}

impl Bench {
    fn pump(&mut self, state: &State, now: Instant) -> Option<Instant> {
        let sent = &mut self.sent;
        self.reconciler.pump(state, &Stale::Everyone, Version::default(), now, &mut |endpoint, command| {
            sent.push((endpoint, command.clone()));
            sent.len() - 1
        })
    }

    /// Answers what was sent since, in the order of sending, and pumps until nothing more is sent.
    fn answer_all(&mut self, state: &State, now: Instant) {
        while self.answered < self.sent.len() {
            let endpoint = self.sent[self.answered].0;
            self.reconciler.answered(endpoint, self.answered, Ok(()), now);
            self.answered += 1;
            self.pump(state, now);
        }
    }

    fn since(&self, start: usize) -> Vec<(EndpointId, String)> {
        let name = |command: &Command| match command {
            Command::Apply { object, .. } => format!("apply {}", object.id()),
            Command::Remove { id, .. } => format!("remove {id}"),
            Command::Synced { .. } => "synced".to_owned(),
            Command::Scrub { .. } => "scrub".to_owned(),
        };
        self.sent[start..].iter().map(|(endpoint, command)| (*endpoint, name(command))).collect()
    }
}

fn joined(state: &mut State, endpoint: EndpointId, incarnation: u64) {
    let devices = if endpoint.role == Role::BlkBackend {
        vec![DeviceReport::Ssd {
            name: "ssd0".to_owned(),
            driver: "null".to_owned(),
            size_bytes: 64 << 20,
            block_bytes: 512,
            discard_granularity_bytes: None,
            table: None,
            reserved_bytes: 0,
            identity: None,
            iops: None,
            bytes_per_second: None,
        }]
    } else if endpoint.role == Role::NetBackend {
        vec![DeviceReport::Nic {
            name: "nic0".to_owned(),
            driver: "null".to_owned(),
            mac: None,
            up: true,
            speed_mbps: 1000,
            mtu: 1500,
            features: 0,
            backup: endpoint == BACKUP,
            lag: None,
        }]
    } else {
        Vec::new()
    };
    let join = Join {
        host_name: endpoint.host.to_string(),
        software: String::new(),
        pid: 1,
        devices,
        memory_failures: Vec::new(),
        fence_ms: None,
    };
    state.apply(&state::Command::Join { endpoint, incarnation, join }).expect("a good join");
}

fn options() -> Options {
    Options {
        pool: uuid::Uuid::nil(),
        data: Area { start: LineOffset::new(0), lines: LineCount::covering(64 << 20) },
        tx_area: LineCount::covering(1 << 20),
        rx_area: LineCount::covering(1 << 20),
        data_area: LineCount::covering(1 << 20),
        net_slots: 64,
        blk_slots: 64,
        rx_quota_buffers: 64,
        disk_queues: 1,
        socket_name_bytes_max: 80,
        regions_max: pod_state::REGIONS_MAX,
        nic_leases_max: pod_state::NIC_LEASES_MAX,
        placement: pod_state::PlacementPolicy::default(),
        protocol_minor: 0,
    }
}

fn state_with_vm() -> State {
    let mut state = State::new(options());
    joined(&mut state, FRONTEND, 1);
    joined(&mut state, BACKEND, 1);
    let nics = vec![NicWish::default()];
    state
        .apply(&state::model::create_instance("vm1", FRONTEND.host.get(), nics, &[]))
        .expect("there is a NIC");
    state
}

#[test]
fn frontend_hears_of_a_lease_when_the_backend_has_answered() {
    let (state, now) = (state_with_vm(), Instant::now());
    let lease = *state.leases.keys().next().expect("a lease");
    let mut bench = Bench::default();
    bench.reconciler.connected(FRONTEND);
    bench.reconciler.connected(BACKEND);
    bench.pump(&state, now);
    let first = bench.since(0);
    assert!(!first.iter().any(|(_, command)| command.contains("port")), "{first:?}");
    assert!(!first.contains(&(FRONTEND, "synced".to_owned())), "not everything was said yet");
    assert!(first.contains(&(BACKEND, "synced".to_owned())));
    assert!(bench.reconciler.waiting_for(&state, &state.leases[&lease], FRONTEND).is_some());
    bench.answer_all(&state, now);
    let all = bench.since(0);
    let place = |command: &str| all.iter().position(|(_, said)| said == command);
    let registration = place("apply registration of lease-1 with nic nic0").expect("said");
    assert!(registration < place("apply port of lease-1").expect("said"));
    assert_eq!(all.last(), Some(&(FRONTEND, "synced".to_owned())));
    assert_eq!(bench.reconciler.waiting_for(&state, &state.leases[&lease], FRONTEND), None);

    let sent = bench.sent.len();
    bench.pump(&state, now);
    assert_eq!(bench.sent.len(), sent, "what is as it should be is not said again");
}

/// A pod whose second host has an ordinary NIC, and whose third has one that stands by.
fn state_with_backup() -> State {
    let mut state = state_with_vm();
    joined(&mut state, BACKUP, 1);
    let lease = state.leases.values().next().expect("a lease");
    let nics = (lease.active_nic().cloned(), lease.standby_nic().cloned());
    assert_eq!(nics, (Some(nic_of(BACKEND)), Some(nic_of(BACKUP))));
    state
}

fn nic_of(backend: EndpointId) -> DeviceId {
    DeviceId { host: backend.host, name: "nic0".into() }
}

/// All have been told all of it.
fn settled(state: &State, now: Instant) -> Bench {
    let mut bench = Bench::default();
    for endpoint in [FRONTEND, BACKEND, BACKUP] {
        bench.reconciler.connected(endpoint);
    }
    bench.pump(state, now);
    bench.answer_all(state, now);
    bench
}

#[test]
fn frontend_hears_of_a_failover_together_with_the_backend_that_stood_by() {
    let (mut state, now) = (state_with_backup(), Instant::now());
    let mut bench = settled(&state, now);
    let start = bench.sent.len();
    let failed = state::Command::DeviceFailed { device: nic_of(BACKEND), reason: "pulled".to_owned() };
    state.apply(&failed).expect("it works until then");
    bench.pump(&state, now);
    let told = bench.since(start);
    let place = |to, what: &str| told.iter().position(|it| *it == (to, what.to_owned()));
    let backend = place(BACKUP, "apply registration of lease-1 with nic nic0").expect("it is told");
    let frontend = place(FRONTEND, "apply port of lease-1").expect("it is told before anybody has answered");
    assert!(backend < frontend, "{told:?}");
    // What it was told is not held from then on, and not said again.
    bench.answer_all(&state, now);
    let ports = bench.since(start).into_iter().filter(|(_, it)| it == "apply port of lease-1");
    assert_eq!(ports.count(), 1);
}

/// The instance's NIC moves to the one of this backend, in order.
fn migrate(to: EndpointId) -> state::Command {
    state::Command::MigrateNic { instance: "vm1".to_owned(), device: "net0".to_owned(), to: Some(nic_of(to)) }
}

#[test]
fn frontend_waits_for_the_backend_where_a_lease_moves_in_order() {
    let (mut state, now) = (state_with_backup(), Instant::now());
    let mut bench = settled(&state, now);
    let start = bench.sent.len();
    state.apply(&migrate(BACKUP)).expect("it is there");
    bench.pump(&state, now);
    let told = bench.since(start);
    assert!(
        told.iter().any(|(to, _)| *to == BACKUP) && told.iter().all(|(to, _)| *to != FRONTEND),
        "{told:?}"
    );
    bench.answer_all(&state, now);
    assert!(bench.since(start).contains(&(FRONTEND, "apply port of lease-1".to_owned())));
}

#[test]
fn a_nic_is_left_once_a_lease_is_served_where_it_moves_to() {
    // There and back: whichever of the two backends is told first otherwise.
    let (mut state, now) = (state_with_backup(), Instant::now());
    let mut bench = settled(&state, now);
    for (old, new) in [(BACKEND, BACKUP), (BACKUP, BACKEND)] {
        let start = bench.sent.len();
        state.apply(&migrate(new)).expect("it is there");
        bench.pump(&state, now);
        let registration = |to| (to, "apply registration of lease-1 with nic nic0".to_owned());
        assert_eq!(bench.since(start), [registration(new)], "nobody else until it has answered");
        bench.reconciler.answered(new, start, Ok(()), now);
        bench.pump(&state, now);
        let port = (FRONTEND, "apply port of lease-1".to_owned());
        assert_eq!(bench.since(start + 1), [port], "nobody else until that has answered");
        bench.reconciler.answered(FRONTEND, start + 1, Ok(()), now);
        bench.pump(&state, now);
        assert_eq!(bench.since(start + 2), [registration(old)]);
        bench.answered = start + 2;
        bench.answer_all(&state, now);
        let (lease, generation) = state.drains().next().expect("it drains");
        state.apply(&state::Command::DrainExpired { lease, generation }).expect("it does");
        bench.pump(&state, now);
        bench.answer_all(&state, now);
    }
}

#[test]
fn a_nic_is_left_at_once_where_the_one_that_a_lease_moves_to_is_away() {
    let (mut state, now) = (state_with_backup(), Instant::now());
    let mut bench = settled(&state, now);
    bench.reconciler.disconnected(BACKUP);
    let start = bench.sent.len();
    state.apply(&migrate(BACKUP)).expect("it is there");
    bench.pump(&state, now);
    let frontend =
        bench.since(start).iter().position(|it| *it == (FRONTEND, "apply port of lease-1".to_owned()));
    bench.reconciler.answered(FRONTEND, start + frontend.expect("it is told"), Ok(()), now);
    bench.pump(&state, now);
    assert!(bench.since(start).iter().any(|(to, _)| *to == BACKEND), "{:?}", bench.since(start));
}

#[test]
fn a_nic_is_left_at_once_where_the_frontend_is_away_or_has_yet_to_serve() {
    for begins_anew in [false, true] {
        let (mut state, now) = (state_with_backup(), Instant::now());
        let mut bench = settled(&state, now);
        bench.reconciler.disconnected(FRONTEND);
        let start = bench.sent.len();
        state.apply(&migrate(BACKUP)).expect("it is there");
        if begins_anew {
            // It waits for the NIC to be left itself: another frontend may have served the lease meanwhile.
            bench.reconciler.connected(FRONTEND);
        }
        bench.pump(&state, now);
        bench.answered = start;
        bench.answer_all(&state, now);
        let told = bench.since(start);
        assert!(told.iter().any(|(to, what)| *to == BACKEND && what.contains("registration")), "{told:?}");
        let ports = told.iter().filter(|it| **it == (FRONTEND, "apply port of lease-1".to_owned()));
        assert_eq!(ports.count(), usize::from(begins_anew));
    }
}

#[test]
fn frontend_does_not_wait_for_a_backend_that_is_away() {
    let (state, now) = (state_with_vm(), Instant::now());
    let mut bench = Bench::default();
    bench.reconciler.connected(FRONTEND);
    bench.pump(&state, now);
    bench.answer_all(&state, now);
    assert!(bench.since(0).contains(&(FRONTEND, "apply port of lease-1".to_owned())));
}

#[test]
fn users_are_removed_before_what_they_stand_on_and_scrubbed_last() {
    let (mut state, now) = (state_with_vm(), Instant::now());
    let mut bench = Bench::default();
    bench.reconciler.connected(FRONTEND);
    bench.reconciler.connected(BACKEND);
    bench.pump(&state, now);
    bench.answer_all(&state, now);
    let start = bench.sent.len();
    state.apply(&state::Command::DeleteInstance { name: "vm1".to_owned(), force: false }).expect("it exists");
    bench.pump(&state, now);
    let at = |bench: &Bench, endpoint| -> Vec<String> {
        bench.since(start).into_iter().filter(|(at, _)| *at == endpoint).map(|(_, command)| command).collect()
    };
    assert_eq!(at(&bench, FRONTEND), ["remove port of lease-1", "remove channel-1"]);
    assert_eq!(at(&bench, BACKEND), ["remove registration of lease-1 with nic nic0", "remove channel-1"]);
    bench.answer_all(&state, now);
    // Everybody who was given a region lets go of it: the frontend of both rings and its area, and so the backend.
    assert_eq!(at(&bench, FRONTEND)[2..], ["scrub", "scrub", "scrub"]);
    assert_eq!(at(&bench, BACKEND)[2..], ["scrub", "scrub", "scrub"]);
}

/// A storage backend that is new flushes what its predecessor served, and later lets go of it: two scrubs of one region.
#[test]
fn what_was_flushed_before_it_was_served_is_flushed_again_when_it_is_given_up() {
    let now = Instant::now();
    let (frontend, backend) =
        (EndpointId::new(FRONTEND.host, Role::BlkFrontend), EndpointId::new(BACKEND.host, Role::BlkBackend));
    let mut state = State::new(options());
    for (endpoint, incarnation) in [(frontend, 1), (backend, 1)] {
        joined(&mut state, endpoint, incarnation);
    }
    let command = |state: &mut State, command| state.apply(&command).expect("it is possible");
    let (name, size_bytes) = ("vol0".to_owned(), 1 << 20);
    command(
        &mut state,
        state::Command::CreateVolume {
            name,
            size_bytes,
            device: None,
            replicas: 1,
            minimum_iops: None,
            minimum_bytes_per_second: None,
            groups: state::Groups::default(),
        },
    );
    command(&mut state, state::model::create_instance("vm1", frontend.host.get(), Vec::new(), &["vol0"]));
    joined(&mut state, backend, 2);
    let data = state.leases.values().next().and_then(|lease| lease.area).expect("an area").region;

    let mut bench = Bench::default();
    bench.reconciler.connected(backend);
    bench.pump(&state, now);
    let scrubs = |bench: &Bench| -> Vec<usize> {
        let of_data = |(_, order): &(EndpointId, Command)| matches!(order, Command::Scrub { region, .. } if *region == data);
        (0..bench.sent.len()).filter(|ticket| of_data(&bench.sent[*ticket])).collect()
    };
    bench.answer_all(&state, now);
    assert_eq!(scrubs(&bench).len(), 1);
    let scrubbed = state::Command::Scrubbed { endpoint: backend, incarnation: 2, region: data };
    command(&mut state, scrubbed);
    command(&mut state, state::Command::DeleteInstance { name: "vm1".to_owned(), force: true });
    assert!(state.scrubs(backend).contains_key(&data), "it may have served the area since");
    bench.pump(&state, now);
    bench.answer_all(&state, now);
    assert_eq!(scrubs(&bench).len(), 2);
}

#[test]
fn refusal_is_told_once_and_tried_again_later() {
    let (state, now) = (state_with_vm(), Instant::now());
    let mut bench = Bench::default();
    bench.reconciler.connected(FRONTEND);
    bench.pump(&state, now);
    let ticket = bench.sent.len() - 2;
    assert!(matches!(bench.sent[ticket].1, Command::Apply { object: Object::Port(_), .. }));
    let refuse = || Err(CommandFailure::Refused("the socket exists".to_owned()));
    let answer = bench.reconciler.answered(FRONTEND, ticket, refuse(), now);
    assert!(matches!(answer, Answer::Refused { .. }));
    let sent = bench.sent.len();
    let again = bench.pump(&state, now).expect("another try");
    assert_eq!(bench.sent.len(), sent, "not at once");
    bench.pump(&state, again);
    assert_eq!(bench.sent.len(), sent + 1);
    assert_eq!(bench.reconciler.answered(FRONTEND, sent, refuse(), again), Answer::Fine, "known already");
    assert_eq!(
        bench.reconciler.answered(FRONTEND, 999, Ok(()), again),
        Answer::Fine,
        "nobody knows that ticket"
    );
}

#[test]
fn what_could_not_be_removed_when_all_was_said_is_tried_again() {
    let (state, now) = (state_with_vm(), Instant::now());
    let mut bench = Bench::default();
    bench.reconciler.connected(BACKEND);
    bench.pump(&state, now);
    let is_synced = |(_, command): &(EndpointId, Command)| matches!(command, Command::Synced { .. });
    let ticket = bench.sent.iter().position(is_synced).expect("all was said");
    let told = bench.sent.len();
    for other in (0..told).filter(|other| *other != ticket) {
        bench.reconciler.answered(BACKEND, other, Ok(()), now);
    }
    assert_eq!(bench.pump(&state, now), None, "its answer is awaited");
    let refuse = || Err(CommandFailure::Refused("a VM has it".to_owned()));
    let answer = bench.reconciler.answered(BACKEND, ticket, refuse(), now);
    assert!(matches!(answer, Answer::Refused { .. }));
    let again = bench.pump(&state, now).expect("another try");
    assert_eq!(bench.sent.len(), told, "not at once");
    bench.pump(&state, again);
    assert_eq!(bench.since(told), [(BACKEND, "synced".to_owned())]);
    bench.reconciler.answered(BACKEND, told, Ok(()), again);
    assert_eq!(bench.pump(&state, again), None);
    bench.pump(&state, again + RETRY_AFTER);
    assert_eq!(bench.sent.len(), told + 1, "it has let go of it");
}

#[test]
fn what_an_endpoint_does_not_know_it_is_told_once_for_each_connection() {
    let (state, now) = (state_with_vm(), Instant::now());
    let mut bench = Bench::default();
    bench.reconciler.connected(FRONTEND);
    bench.pump(&state, now);
    let ticket = bench.sent.len() - 2;
    let unknown = Err(CommandFailure::NotUnderstood("not understood: a port".to_owned()));
    let answer = bench.reconciler.answered(FRONTEND, ticket, unknown, now);
    assert!(matches!(answer, Answer::Refused { .. }));
    let sent = bench.sent.len();
    assert_eq!(bench.pump(&state, now), None, "no other try is due");
    bench.pump(&state, now + 10 * RETRY_AFTER);
    assert_eq!(bench.sent.len(), sent);
    bench.reconciler.connected(FRONTEND);
    bench.pump(&state, now);
    assert!(bench.sent.len() > sent, "it may be another release by now");
}

#[test]
fn every_daemon_is_told_what_the_pod_speaks_once_that_is_more_than_the_first_version() {
    let (mut state, now) = (state_with_vm(), Instant::now());
    let mut bench = Bench::default();
    bench.reconciler.connected(FRONTEND);
    bench.reconciler.connected(BACKEND);
    bench.pump(&state, now);
    bench.answer_all(&state, now);
    let sent = bench.sent.len();
    state.apply(&state.speaking(1)).expect("it is possible");
    bench.pump(&state, now);
    bench.answer_all(&state, now);
    let told = |to| (to, "apply the version of the pod".to_owned());
    // Only then a frontend knows what to do with where its backends receive.
    let limited = (FRONTEND, "apply channel-1".to_owned());
    assert_eq!(bench.since(sent), [told(BACKEND), told(FRONTEND), limited.clone()]);
    let sent = bench.sent.len();
    state.apply(&state.speaking(0)).expect("it is possible");
    bench.pump(&state, now);
    let taken = |from| (from, "remove the version of the pod".to_owned());
    assert_eq!(bench.since(sent), [taken(BACKEND), limited, taken(FRONTEND)]);
}
