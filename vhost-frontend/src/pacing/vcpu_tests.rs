//! Agents that hold vCPUs as they are told, a while later and not exactly, and meters that count what they report.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use cxl_pool::simulated::{Random, SimulatedMemory, SimulatedPool};
use cxl_pool::{Area, EndpointId, HostId, LineCount, LineOffset, Role};
use mem_channel::fluid::{Flow, solve};
use pod_protocol::ids::{InstanceId, LeaseId};
use pod_protocol::objects::{ElementObject, FabricObject, MchannelObject, PeerObject, Signal, TenantObject};
use pod_protocol::vcpus::{Order, Report};
use proptest::prelude::*;

use super::metered::{Metered, Moves, Part};
use super::plan::Plan;
use super::round::{Exchange, Exchanges};
use super::vcpus::{Agent, Vcpus};
use super::{Pacing, Waker, as_f64, whole};

const K_US: f64 = 100_000.0;
const CAPACITY: f64 = 20e6;
const LINES: u64 = 16;
/// A K passes in so many steps.
const STEPS: u32 = 50;

struct Told(Arc<Mutex<Option<Order>>>);

impl Agent for Told {
    fn order(&self, order: Order) {
        *self.0.lock().unwrap() = Some(order);
    }

    fn dismiss(&self, _: &str) {}
}

/// A VM whose vCPUs always want to run, and its agent.
#[derive(Clone, Debug)]
struct Guest {
    weight: u32,
    /// What it moves while it runs, in bytes/s.
    wants: f64,
    /// What part of what it is told its actuator gives it.
    gain: f64,
    /// How late its agent may be, in parts of K.
    late: f64,
}

struct Running {
    guest: Guest,
    told: Arc<Mutex<Option<Order>>>,
    /// T_R/T_W, and what it will be from when.
    part: f64,
    next: Option<(f64, f64)>,
    report_at: f64,
    /// Since the last report.
    since: (f64, f64, f64),
    moved: f64,
    slept_us: f64,
}

struct Frontend {
    plan: Plan,
    exchange: Exchange<SimulatedMemory>,
    all: BTreeMap<Part, Metered>,
}

/// Each guest has a host of its own.
struct Pod {
    pool: SimulatedPool,
    frontends: Vec<Frontend>,
    guests: Vec<Running>,
    random: Random,
    now_us: f64,
}

fn area(number: usize) -> Area {
    Area::new(LineOffset::new(LINES * number as u64), LineCount::new(LINES))
}

pub(super) fn endpoint(number: usize) -> EndpointId {
    EndpointId::new(HostId::new(u16::try_from(number + 1).unwrap()), Role::BlkFrontend)
}

pub(super) fn fabric(number: usize, count: usize, sample_us: f64) -> FabricObject {
    let peer = |other| PeerObject { endpoint: endpoint(other), sums: area(2 * other) };
    FabricObject {
        window_us: 1000,
        sample_us: u32::try_from(whole(sample_us)).unwrap(),
        sums: area(2 * number),
        vms: area(2 * number + 1),
        peers: (0..count).filter(|other| *other != number).map(peer).collect(),
        sibling: None,
        elements: vec![ElementObject { element: 7, bytes_per_second: whole(CAPACITY), signal: Signal::Off }],
        tenants: vec![TenantObject { tenant: 0, weight: 1 }],
    }
}

pub(super) fn object(number: usize, weight: u32) -> MchannelObject {
    let number = u32::try_from(number + 1).unwrap();
    MchannelObject {
        lease: LeaseId::new(number).unwrap(),
        instance: InstanceId::new(number),
        name: format!("vm{number}"),
        weight,
        tenant: 0,
        path: vec![7],
    }
}

impl Pod {
    fn new(seed: u64, guests: &[Guest]) -> Self {
        let pool = SimulatedPool::new(seed, 1 << 16);
        let (random, now_us) = (Random::new(seed), 0.0);
        let mut pod = Self { pool, frontends: Vec::new(), guests: Vec::new(), random, now_us };
        for (number, guest) in guests.iter().enumerate() {
            let told = Arc::new(Mutex::new(None));
            let frontend = pod.frontend(fabric(number, guests.len(), K_US), number, guest.weight, &told);
            pod.frontends.push(frontend);
            pod.guests.push(Running {
                guest: guest.clone(),
                told,
                part: 1.0,
                next: None,
                report_at: 0.9 * K_US,
                since: (0.0, 0.0, 0.0),
                moved: 0.0,
                slept_us: 0.0,
            });
        }
        pod
    }

    /// A frontend that the agent of its guest has just come to.
    fn frontend(
        &self,
        fabric: FabricObject,
        number: usize,
        weight: u32,
        told: &Arc<Mutex<Option<Order>>>,
    ) -> Frontend {
        let mut plan = Plan::new(fabric).unwrap();
        let exchange = Exchange::new(self.pool.host(endpoint(number).host), &plan);
        let vcpus = Vcpus::new(Box::new(Told(Arc::clone(told))), (1, 1), true);
        let object = object(number, weight);
        let part = Part::Vcpus(object.instance);
        let mut metered = Metered::vcpus(object, vcpus);
        plan.open(&mut metered);
        Frontend { plan, exchange, all: [(part, metered)].into() }
    }

    /// A frontend is killed. Its guest's agent goes on with its last order.
    fn kill(&mut self, number: usize) {
        self.frontends[number].all.clear();
        *self.guests[number].told.lock().unwrap() = None;
    }

    /// Another one takes its place, with a board of its own, of which the others are told.
    fn replace(&mut self, number: usize) {
        let count = self.frontends.len();
        let board =
            |fabric: &mut FabricObject| (fabric.sums, fabric.vms) = (area(2 * count), area(2 * count + 1));
        let mut own = fabric(number, count, K_US);
        board(&mut own);
        let (weight, told) = (self.guests[number].guest.weight, Arc::clone(&self.guests[number].told));
        self.frontends[number] = self.frontend(own, number, weight, &told);
        for other in (0..count).filter(|other| *other != number) {
            let mut fabric = fabric(other, count, K_US);
            let peer = fabric.peers.iter_mut().find(|peer| peer.endpoint == endpoint(number)).unwrap();
            peer.sums = area(2 * count);
            let Frontend { plan, exchange, all } = &mut self.frontends[other];
            plan.become_(fabric, all).unwrap();
            exchange.follow(plan);
        }
    }

    /// What frontends that live were told of a guest, in bytes.
    fn told_of(&self, number: usize) -> f64 {
        let vcpus = self.frontends[number].all.values().filter_map(|it| match &it.moves {
            Moves::Vcpus(vcpus) => Some(as_f64(vcpus.bytes)),
            Moves::Queues(_) => None,
        });
        vcpus.sum()
    }

    fn random_part(&mut self) -> f64 {
        as_f64(self.random.below(1001)) / 1000.0
    }

    fn run(&mut self, rounds: u32) {
        for _ in 0..rounds {
            for _ in 0..STEPS {
                self.now_us += K_US / f64::from(STEPS);
                for number in 0..self.guests.len() {
                    self.step(number, K_US / f64::from(STEPS));
                }
            }
            for number in 0..self.frontends.len() {
                let frontend = &mut self.frontends[number];
                if frontend.all.is_empty() {
                    continue;
                }
                let now_us = self.now_us + 100.0 * as_f64(number as u64);
                frontend.exchange.round(&mut frontend.plan, &mut frontend.all, K_US, now_us);
                let late = self.random_part() * self.guests[number].guest.late * K_US;
                let guest = &mut self.guests[number];
                if let Some(order) = guest.told.lock().unwrap().take() {
                    guest.next = Some((self.now_us + late / 3.0, order.part()));
                    if guest.report_at.is_infinite() {
                        guest.report_at = self.now_us + 0.9 * K_US + late;
                    }
                }
            }
        }
    }

    fn step(&mut self, number: usize, us: f64) {
        let now_us = self.now_us;
        let it = &mut self.guests[number];
        if let Some((at_us, part)) = it.next
            && at_us <= now_us
        {
            (it.part, it.next) = (part, None);
        }
        let runs = if it.part >= 1.0 { 1.0 } else { (it.part * it.guest.gain).min(1.0) };
        let bytes = it.guest.wants * runs * us / 1e6;
        it.moved += bytes;
        it.slept_us += (1.0 - runs) * us;
        it.since = (it.since.0 + us, it.since.1 + bytes, it.since.2 + runs * us);
        if it.report_at > now_us {
            return;
        }
        let Some(metered) = self.frontends[number].all.values_mut().next() else {
            // It is told to the next one.
            it.report_at += K_US;
            return;
        };
        let (elapsed_us, bytes, run_us) = std::mem::take(&mut it.since);
        it.report_at = f64::INFINITY;
        let report = Report {
            elapsed_us: whole(elapsed_us),
            bytes: whole(bytes),
            run_us: whole(run_us),
            ..Report::default()
        };
        let Moves::Vcpus(vcpus) = &mut metered.moves else { panic!("there is nothing else") };
        vcpus.report(&report).unwrap();
    }

    /// Mean rates over so many K, in bytes/s.
    fn rates(&mut self, rounds: u32) -> Vec<f64> {
        let before: Vec<f64> = self.guests.iter().map(|it| it.moved).collect();
        self.run(rounds);
        let seconds = f64::from(rounds) * K_US / 1e6;
        self.guests.iter().zip(before).map(|(it, before)| (it.moved - before) / seconds).collect()
    }
}

fn guest(weight: u32, wants: f64) -> Guest {
    Guest { weight, wants, gain: 1.0, late: 0.0 }
}

/// What max-min fairness gives each.
fn fair(guests: &[Guest]) -> Vec<f64> {
    let flow = |guest: &Guest| Flow { demand: guest.wants, weight: f64::from(guest.weight) };
    let alpha = solve(CAPACITY, &guests.iter().map(flow).collect::<Vec<_>>());
    let share =
        |guest: &Guest| alpha.map_or(guest.wants, |alpha| guest.wants.min(alpha * f64::from(guest.weight)));
    guests.iter().map(share).collect()
}

fn assert_near(rates: &[f64], expected: &[f64], by: f64) {
    let is_near = |(rate, expected): (&f64, &f64)| (rate - expected).abs() <= by * expected;
    assert!(rates.iter().zip(expected).all(is_near), "{rates:.0?}, not {expected:.0?}");
}

#[test]
fn two_that_always_run_get_what_their_weights_say_and_it_stays_so() {
    let mut pod = Pod::new(1, &[guest(1, 40e6), guest(3, 40e6)]);
    pod.run(20);
    for _ in 0..50 {
        assert_near(&pod.rates(5), &[5e6, 15e6], 0.02);
    }
}

#[test]
fn late_agents_and_inexact_actuators_do_not_make_shares_swing() {
    for late in [0.05, 0.2, 1.0, 2.5] {
        let guests =
            [Guest { late, gain: 1.05, ..guest(1, 40e6) }, Guest { late, gain: 0.95, ..guest(3, 60e6) }];
        let mut pod = Pod::new(7, &guests);
        pod.run(40);
        for _ in 0..10 {
            assert_near(&pod.rates(30), &[5e6, 15e6], 0.15);
        }
    }
}

#[test]
fn one_below_its_share_never_sleeps_and_the_rest_goes_to_others() {
    let mut pod = Pod::new(3, &[guest(1, 3e6), guest(3, 40e6), guest(1, 40e6)]);
    pod.run(200);
    assert!(pod.guests[0].slept_us < 1e-6, "{}", pod.guests[0].slept_us);
    assert_near(&pod.rates(50), &[3e6, 12.75e6, 4.25e6], 0.02);
    // It goes on to want as much as the others.
    pod.guests[0].guest.wants = 40e6;
    pod.run(30);
    assert_near(&pod.rates(50), &[4e6, 12e6, 4e6], 0.02);
    assert!(pod.guests[0].slept_us > 0.0);
    // All fits: nobody sleeps any more.
    for it in &mut pod.guests {
        it.guest.wants = 6e6;
    }
    pod.run(20);
    let slept = |pod: &Pod| pod.guests.iter().map(|it| it.slept_us).sum::<f64>();
    let before = slept(&pod);
    pod.run(20);
    assert!((slept(&pod) - before).abs() < 1e-6);
}

#[test]
fn a_path_that_is_a_little_too_small_settles() {
    // Who wants little for its weight is on another host than who has to be held back.
    let mut pod = Pod::new(1, &[guest(1, 9.8e6), guest(3, 10.7e6)]);
    pod.run(30);
    for _ in 0..10 {
        assert_near(&pod.rates(5), &[9.3e6, 10.7e6], 0.01);
    }
}

/// The agent goes on as it was told last, and says everything to the new one; nobody runs freely meanwhile, and nothing is counted
/// twice, which would have the other guest get less.
#[test]
fn a_frontend_that_is_replaced_changes_next_to_nothing() {
    for gone in 0..8 {
        let mut pod = Pod::new(11, &[guest(1, 40e6), guest(3, 40e6)]);
        pod.run(40);
        let before = pod.told_of(0);
        pod.kill(0);
        pod.run(gone);
        pod.replace(0);
        for round in 0..20 {
            let rates = pod.rates(1);
            assert!(rates[0] <= 1.6 * 5e6 && rates[1] >= 0.6 * 15e6, "{gone} + {round}: {rates:.0?}");
        }
        for _ in 0..10 {
            assert_near(&pod.rates(5), &[5e6, 15e6], 0.02);
        }
        // All but what was reported to nobody yet.
        let moved = pod.guests[0].moved - pod.guests[0].since.1 - before;
        assert!((pod.told_of(0) - moved).abs() <= 100.0, "{} of {moved}", pod.told_of(0));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn shares_become_those_of_max_min_fairness(
        seed in any::<u64>(),
        guests in prop::collection::vec((1_u32..6, 2e6..80e6f64, 0.0..0.3f64), 2..5),
    ) {
        let guests: Vec<Guest> = guests
            .into_iter()
            .map(|(weight, wants, late)| Guest { late, ..guest(weight, wants) })
            .collect();
        let mut pod = Pod::new(seed, &guests);
        pod.run(100);
        let (rates, expected) = (pod.rates(100), fair(&guests));
        for (rate, expected) in rates.iter().zip(&expected) {
            prop_assert!((rate - expected).abs() <= 0.08 * expected, "{rates:.0?}, not {expected:.0?}");
        }
    }
}

/// What a lone VM's queues move, which always want more, and its vCPUs, which want so much and are held or not, in bytes/s.
fn beside_queues(holds: bool, wants: f64) -> [f64; 2] {
    beside_queues_on_a_host(holds, wants, 1.0).0
}

/// The same where the host has a processor for them only for this part of the time in which they would run; and their VM's share.
fn beside_queues_on_a_host(holds: bool, wants: f64, has: f64) -> ([f64; 2], Option<f64>) {
    let pool = SimulatedPool::new(1, 1 << 16);
    let mut plan = Plan::new(fabric(0, 1, K_US)).unwrap();
    let mut exchange = Exchange::new(pool.host(endpoint(0).host), &plan);
    let mut all = BTreeMap::new();
    let waker = Waker::new();
    let pacing = Pacing::new(Arc::clone(&waker), Arc::default(), 1000.0);
    let told = Arc::new(Mutex::new(None));
    let vcpus = Vcpus::new(Box::new(Told(Arc::clone(&told))), (1, 1), holds);
    let parts = [Metered::device(object(0, 1), Arc::clone(&pacing)), Metered::vcpus(object(0, 1), vcpus)];
    let keys = [Part::Device(object(0, 1).lease), Part::Vcpus(object(0, 1).instance)];
    for (key, mut metered) in keys.into_iter().zip(parts) {
        plan.open(&mut metered);
        all.insert(key, metered);
    }
    let (mut part, mut moved) = (1.0, (0.0, 0.0));
    for round in 0..100 {
        let now_us = K_US * f64::from(round + 1);
        let limit = f64::from_bits(pacing.rate.load(std::sync::atomic::Ordering::Relaxed));
        let (queues, lines) = (limit.min(100e6) * K_US / 1e6, wants * part * has * K_US / 1e6);
        pacing.count(whole(queues), 1);
        pacing.hold(now_us - K_US + 1.0);
        pacing.release(now_us - 2.0);
        let Moves::Vcpus(vcpus) = &mut all.get_mut(&keys[1]).unwrap().moves else { panic!("they are") };
        let report = Report {
            elapsed_us: whole(K_US),
            bytes: whole(lines),
            run_us: whole(part * has * K_US),
            ..Report::default()
        };
        vcpus.report(&report).unwrap();
        exchange.round(&mut plan, &mut all, K_US, now_us);
        part = told.lock().unwrap().take().map_or(1.0, |order: Order| order.part());
        if round >= 50 {
            moved = (moved.0 + queues, moved.1 + lines);
        }
    }
    let seconds = 50.0 * K_US / 1e6;
    ([moved.0 / seconds, moved.1 / seconds], all[&keys[0]].said.share)
}

#[test]
fn vcpus_and_queues_of_a_vm_have_one_share() {
    assert_near(&beside_queues(true, 50e6), &[CAPACITY / 2.0, CAPACITY / 2.0], 0.05);
}

#[test]
fn queues_have_what_vcpus_leave_that_nobody_holds() {
    assert_near(&beside_queues(false, 13e6), &[CAPACITY - 13e6, 13e6], 0.05);
    // More than all that the path carries: still something is left of the share, or no disk would answer.
    let [queues, vcpus] = beside_queues(false, 50e6);
    assert!(queues > CAPACITY / 20.0 && queues <= CAPACITY / 10.0, "{queues}");
    assert_near(&[vcpus], &[50e6], 0.05);
}

#[test]
fn queues_have_what_vcpus_move_less_that_wait_for_a_processor() {
    // They want 12 MB/s and get to move 6. Held back by as much as they want, queues would have the rest only once shares have grown beyond what the path carries,
    // for all that share it.
    let (rates, share) = beside_queues_on_a_host(false, 12e6, 0.5);
    assert_near(&rates, &[CAPACITY - 6e6, 6e6], 0.05);
    assert_near(&[share.unwrap()], &[CAPACITY], 0.05);
}
