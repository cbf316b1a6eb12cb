//! Frontends that exchange their sums over simulated memory, a K at a time; devices that move what they want and may.

use std::collections::BTreeMap;
use std::sync::Arc;

use cxl_pool::simulated::{SimulatedMemory, SimulatedPool, check_seeds};
use cxl_pool::{Area, EndpointId, HostId, LineCount, LineOffset, Role};
use mem_channel::ByteBudget;
use pod_protocol::ids::{InstanceId, LeaseId};
use pod_protocol::objects::{ElementObject, FabricObject, MchannelObject, PeerObject, Signal, TenantObject};
use tempfile::TempDir;

use super::metered::{Metered, Moves, Part};
use super::plan::Plan;
use super::round::{Exchange, Exchanges};
use super::vm_budget::VmBudget;
use super::{Pacer, Pacing, Waker, Way, as_f64, whole};

const K_US: u32 = 10_000;
pub(super) const CAPACITY: u64 = 100_000_000;
const LINES: u64 = 16;

/// A device of an instance at a frontend.
pub(super) struct Vm {
    frontend: usize,
    instance: u32,
    weight: u32,
    tenant: u32,
    /// In bytes/s; so many K on, then so many off.
    demand: f64,
    on_off: (u32, u32),
    moved: f64,
}

impl Vm {
    pub(super) fn new(frontend: usize, instance: u32, weight: u32, demand: f64) -> Self {
        Self { frontend, instance, weight, tenant: 0, demand, on_off: (1, 0), moved: 0.0 }
    }
}

pub(super) struct Frontend {
    pub(super) plan: Plan,
    pub(super) exchange: Exchange<SimulatedMemory>,
    all: BTreeMap<Part, Metered>,
}

pub(super) struct Pod {
    pub(super) pool: SimulatedPool,
    pub(super) frontends: Vec<Frontend>,
    vms: Vec<Vm>,
    /// The thread of this frontend that measures is held up. Its workers are not.
    held_up: Option<usize>,
    k_us: u32,
    round: u32,
    now_us: f64,
    /// Where budgets lie that two frontends of a host use.
    _budgets: TempDir,
}

fn area(number: u64) -> Area {
    Area::new(LineOffset::new(LINES * number), LineCount::new(LINES))
}

/// Frontends come in pairs, two to a host.
pub(super) fn endpoint(frontend: usize) -> EndpointId {
    let host = HostId::new(u16::try_from(frontend / 2 + 1).unwrap());
    EndpointId::new(host, if frontend.is_multiple_of(2) { Role::NetFrontend } else { Role::BlkFrontend })
}

pub(super) fn fabric(frontend: usize, count: usize) -> FabricObject {
    let others = (0..count).filter(|other| *other != frontend);
    let peer = |other| PeerObject { endpoint: endpoint(other), sums: area(2 * other as u64) };
    let sibling = frontend ^ 1;
    FabricObject {
        window_us: 1000,
        sample_us: K_US,
        sums: area(2 * frontend as u64),
        vms: area(2 * frontend as u64 + 1),
        peers: others.map(peer).collect(),
        sibling: (sibling < count).then(|| area(2 * sibling as u64 + 1)),
        elements: vec![ElementObject { element: 7, bytes_per_second: CAPACITY, signal: Signal::Off }],
        tenants: vec![TenantObject { tenant: 0, weight: 1 }, TenantObject { tenant: 1, weight: 1 }],
    }
}

impl Frontend {
    /// Has it share another fabric, as the meter does.
    pub(super) fn becomes(&mut self, fabric: FabricObject) {
        let Self { plan, exchange, all } = self;
        assert!(plan.may_become(&fabric));
        plan.become_(fabric, all).unwrap();
        exchange.follow(plan);
    }
}

impl Pod {
    pub(super) fn new(seed: u64, frontends: usize, vms: Vec<Vm>) -> Self {
        let pool = SimulatedPool::new(seed, 1 << 16);
        let waker = Waker::new();
        let start = |frontend| {
            let plan = Plan::new(fabric(frontend, frontends)).unwrap();
            let exchange = Exchange::new(pool.host(endpoint(frontend).host), &plan);
            Frontend { plan, exchange, all: BTreeMap::new() }
        };
        let mut frontends: Vec<Frontend> = (0..frontends).map(start).collect();
        let mut together: BTreeMap<(usize, u32), Arc<VmBudget>> = BTreeMap::new();
        let budgets = tempfile::tempdir().unwrap();
        for (number, vm) in (1..).zip(&vms) {
            let lease = LeaseId::new(number).unwrap();
            let Vm { instance, weight, tenant, .. } = *vm;
            let instance = InstanceId::new(instance);
            let object =
                MchannelObject { lease, instance, name: String::new(), weight, tenant, path: vec![7] };
            let budget = || {
                let EndpointId { host, role } = endpoint(vm.frontend);
                let path = budgets.path().join(format!("{host}-{}", vm.instance));
                Arc::new(VmBudget::shared(&path, role, 0.0).unwrap())
            };
            let together = Arc::clone(together.entry((vm.frontend, vm.instance)).or_insert_with(budget));
            let mut metered = Metered::device(object, Pacing::new(Arc::clone(&waker), together, 1000.0));
            let frontend = &mut frontends[vm.frontend];
            frontend.plan.open(&mut metered);
            frontend.all.insert(Part::Device(lease), metered);
        }
        let now_us = f64::from(K_US);
        Self { pool, frontends, vms, held_up: None, k_us: K_US, round: 0, now_us, _budgets: budgets }
    }

    fn metered(&self, vm: usize) -> &Metered {
        let lease = LeaseId::new(u32::try_from(vm + 1).unwrap()).unwrap();
        &self.frontends[self.vms[vm].frontend].all[&Part::Device(lease)]
    }

    pub(super) fn run(&mut self, rounds: u32) {
        for _ in 0..rounds {
            let (k_us, began_us) = (f64::from(self.k_us), self.now_us);
            self.now_us += k_us;
            for vm in 0..self.vms.len() {
                let Vm { on_off: (on, off), demand, .. } = self.vms[vm];
                let wants = if self.round % (on + off) < on { demand } else { 0.0 };
                let pacing = Arc::clone(self.metered(vm).pacing().unwrap());
                let limit = f64::from_bits(pacing.rate.load(std::sync::atomic::Ordering::Relaxed));
                let moves = wants.min(limit) * k_us / 1e6;
                pacing.count(whole(moves), 1);
                if wants > limit {
                    // It waits from when its share is used up.
                    pacing.hold(began_us + k_us * limit / wants);
                    pacing.release(began_us + k_us);
                }
                self.vms[vm].moved += moves;
            }
            self.round += 1;
            let held_up = self.held_up;
            let frontends = self.frontends.iter_mut().enumerate();
            for (number, frontend) in frontends.filter(|(number, _)| Some(*number) != held_up) {
                // Each has a K of its own.
                let now_us = began_us + k_us + 100.0 * as_f64(number as u64);
                frontend.exchange.round(&mut frontend.plan, &mut frontend.all, k_us, now_us);
            }
        }
    }

    /// Has all frontends measure with another K.
    fn sample_every(&mut self, k_us: u32) {
        self.k_us = k_us;
        let count = self.frontends.len();
        for (number, Frontend { plan, exchange, all }) in self.frontends.iter_mut().enumerate() {
            let new = FabricObject { sample_us: k_us, ..fabric(number, count) };
            assert!(!plan.may_become(&new));
            *plan = Plan::new(new).unwrap();
            for metered in all.values_mut() {
                plan.open(metered);
            }
            exchange.follow(plan);
        }
    }

    /// Mean rates over so many K, in parts of the capacity.
    pub(super) fn rates(&mut self, rounds: u32) -> Vec<f64> {
        for vm in &mut self.vms {
            vm.moved = 0.0;
        }
        self.run(rounds);
        let all = f64::from(rounds) * f64::from(self.k_us) / 1e6 * as_f64(CAPACITY);
        self.vms.iter().map(|vm| vm.moved / all).collect()
    }
}

pub(super) const ALL: f64 = 100e6;

fn near(rates: &[f64], expected: &[f64]) {
    let close = |(rate, expected): (&f64, &f64)| (rate - expected).abs() <= 0.05 * expected;
    assert!(rates.iter().zip(expected).all(close), "{rates:?}, not {expected:?}");
}

#[test]
fn weights_hold_across_hosts_that_are_not_coherent() {
    check_seeds("-p vhost-frontend --lib", 20, |seed| {
        let vms = vec![Vm::new(0, 1, 1, ALL), Vm::new(2, 2, 3, ALL), Vm::new(3, 3, 1, ALL / 10.0)];
        let mut pod = Pod::new(seed, 4, vms);
        pod.run(100);
        near(&pod.rates(50), &[0.9 / 4.0, 0.9 * 3.0 / 4.0, 0.1]);
        let Moves::Queues(queues) = &pod.metered(2).moves else { panic!("a device has queues") };
        assert!(queues.held_us < 1.0, "who wants less than his share is never held back");
        assert_eq!(pod.pool.faults().lost_updates, 0);
        Ok(())
    });
}

#[test]
fn what_an_on_off_one_leaves_the_others_take() {
    let on_off = Vm { on_off: (50, 50), ..Vm::new(1, 3, 1, ALL) };
    let mut pod = Pod::new(1, 4, vec![Vm::new(0, 1, 1, ALL), Vm::new(2, 2, 3, ALL), on_off]);
    pod.run(200);
    // Half of the time all three want everything, half of it only two.
    near(&pod.rates(400), &[0.225, 0.675, 0.1]);
}

#[test]
fn a_vm_has_one_share_for_all_its_devices() {
    // One with a NIC and two disks against one with a NIC.
    let vms =
        vec![Vm::new(0, 1, 1, ALL), Vm::new(1, 1, 1, ALL), Vm::new(1, 1, 1, ALL), Vm::new(2, 2, 1, ALL)];
    let mut pod = Pod::new(3, 4, vms);
    pod.run(200);
    let rates = pod.rates(100);
    near(&[rates[0] + rates[1] + rates[2], rates[3]], &[0.5, 0.5]);
    near(&rates[..3], &[1.0 / 6.0; 3]);
    // What its disks do not want, its NIC gets.
    pod.vms[1].demand = ALL / 20.0;
    pod.vms[2].demand = 0.0;
    pod.run(200);
    near(&pod.rates(100)[..2], &[0.45, 0.05]);
}

#[test]
fn a_small_demand_beside_a_large_one_at_the_other_frontend_is_seen_as_both() {
    // A NIC, and a disk that wants everything beside one that wants a tenth of the share. Taken for two that want half of it all each, the
    // NIC would leave them two thirds.
    let vms = vec![
        Vm::new(0, 1, 1, ALL),
        Vm::new(1, 1, 1, ALL),
        Vm::new(1, 1, 1, ALL / 20.0),
        Vm::new(2, 2, 1, ALL),
    ];
    let mut pod = Pod::new(21, 4, vms);
    pod.run(200);
    near(&pod.rates(100), &[0.225, 0.225, 0.05, 0.5]);
}

#[test]
fn tenants_share_first() {
    let vm = |frontend, instance, tenant| Vm { tenant, ..Vm::new(frontend, instance, 1, ALL) };
    let mut pod = Pod::new(5, 4, vec![vm(0, 1, 0), vm(1, 2, 1), vm(2, 3, 1), vm(3, 4, 1)]);
    pod.run(200);
    near(&pod.rates(100), &[0.5, 0.5 / 3.0, 0.5 / 3.0, 0.5 / 3.0]);
}

#[test]
fn one_that_nobody_disturbs_is_not_limited_below_what_its_path_carries() {
    let mut pod = Pod::new(7, 2, vec![Vm::new(0, 1, 1, 3.0 * ALL)]);
    pod.run(50);
    near(&pod.rates(20), &[1.0]);
    assert!(pod.metered(0).said.limit.is_some_and(|limit| limit <= ALL + 1.0));
}

#[test]
fn the_share_of_a_frontend_that_dies_goes_to_the_others() {
    let mut pod = Pod::new(9, 4, vec![Vm::new(0, 1, 1, ALL), Vm::new(2, 2, 1, ALL)]);
    pod.run(100);
    near(&pod.rates(50), &[0.5, 0.5]);
    pod.vms[1].demand = 0.0;
    pod.frontends.truncate(2);
    pod.vms.truncate(1);
    pod.run(120);
    near(&pod.rates(20), &[1.0]);
}

/// A second is a hundred K here.
#[test]
fn a_frontend_whose_thread_is_held_up_counts_for_a_second_as_its_workers_go_on() {
    let mut pod = Pod::new(9, 4, vec![Vm::new(0, 1, 1, ALL), Vm::new(2, 2, 1, ALL)]);
    pod.run(100);
    pod.held_up = Some(2);
    for _ in 0..9 {
        near(&pod.rates(10), &[0.5, 0.5]);
    }
    pod.held_up = None;
    near(&pod.rates(50), &[0.5, 0.5]);
    // It is as good as dead.
    pod.held_up = Some(2);
    pod.vms[1].demand = 0.0;
    pod.run(120);
    near(&pod.rates(20)[..1], &[1.0]);
}

#[test]
fn others_count_for_ten_ks_of_the_k_there_is_now_or_a_second() {
    let vms = || vec![Vm::new(0, 1, 1, ALL), Vm::new(2, 2, 1, ALL)];
    for (before_us, after_us, counts) in [(K_US, 100 * K_US, 9), (100 * K_US, K_US, 99)] {
        let mut pod = Pod::new(9, 4, vms());
        pod.sample_every(before_us + 1);
        pod.run(100);
        pod.sample_every(after_us);
        pod.run(100);
        near(&pod.rates(50), &[0.5, 0.5]);
        // Nothing is heard of the other one any more: for so many K it counts.
        pod.vms[1].demand = 0.0;
        pod.frontends.truncate(2);
        pod.vms.truncate(1);
        pod.run(counts);
        assert!(pod.metered(0).said.limit.is_some_and(|limit| limit < 0.6 * ALL), "to {after_us} us");
        pod.run(20);
        near(&pod.rates(20), &[1.0]);
    }
}

#[test]
fn a_capacity_that_changes_holds_soon_and_keeps_what_is_known() {
    let mut pod = Pod::new(11, 2, vec![Vm::new(0, 1, 1, ALL), Vm::new(1, 2, 3, ALL)]);
    pod.run(100);
    for (number, frontend) in pod.frontends.iter_mut().enumerate() {
        let mut half = fabric(number, 2);
        half.elements[0].bytes_per_second = CAPACITY / 2;
        frontend.becomes(half);
    }
    pod.run(50);
    near(&pod.rates(50), &[0.125, 0.375]);
    let other = FabricObject { window_us: 2000, ..fabric(0, 2) };
    assert!(!pod.frontends[0].plan.may_become(&other));
}

#[test]
fn elements_and_tenants_come_and_go_and_nobody_begins_anew() {
    let mut pod = Pod::new(11, 2, vec![Vm::new(0, 1, 1, ALL), Vm::new(1, 2, 3, ALL)]);
    pod.run(100);
    near(&pod.rates(50), &[0.25, 0.75]);
    let (element, tenant) =
        (ElementObject { element: 5, bytes_per_second: CAPACITY, signal: Signal::Off }, 9);
    for comes in [true, false, true] {
        for (number, frontend) in pod.frontends.iter_mut().enumerate() {
            let mut other = fabric(number, 2);
            if comes {
                // Before the others.
                other.elements.insert(0, element);
                other.tenants.insert(0, TenantObject { tenant, weight: 1 });
            }
            frontend.becomes(other);
        }
        // Whoever begins anew may move all that there is until it is known what he wants.
        near(&pod.rates(1), &[0.25, 0.75]);
    }
    // A device comes to use what came; then that goes, before it is said of the device that it does not use it any more.
    let Frontend { plan, all, .. } = &mut pod.frontends[0];
    let [metered] = &mut all.values_mut().collect::<Vec<_>>()[..] else { panic!("one device") };
    let object = MchannelObject { path: vec![7, 5], tenant, ..metered.object.clone() };
    plan.change(metered, object.clone());
    assert!(metered.id.is_some());
    pod.frontends[0].becomes(fabric(0, 2));
    assert_eq!(pod.metered(0).id, None);
    // And it is held again when that is there again.
    for (number, frontend) in pod.frontends.iter_mut().enumerate() {
        let mut again = fabric(number, 2);
        again.elements.insert(0, element);
        again.tenants[1] = TenantObject { tenant, weight: 1 };
        frontend.becomes(again);
    }
    assert!(pod.metered(0).id.is_some());
    pod.run(50);
    near(&pod.rates(20), &[0.5, 0.5]);
}

/// §4.5: in any interval of K = 10 ms a VM is let move at most w·α·K·(1 + 2·T_W/K) bytes, where w·α is the most that it was then; also
/// one that is quiet and bursts, and whatever the others do meanwhile.
#[test]
fn no_interval_of_ten_milliseconds_has_more_bytes_than_the_bound_allows() {
    const T_W_US: f64 = 1000.0;
    const STEP_US: f64 = 100.0;
    const MESSAGE: u64 = 4096;
    let k_us = f64::from(K_US);
    // Each wants all there is for so many steps, and nothing for so many: shorter and longer than T_W and K.
    let patterns = [(1_u32, 0_u32), (7, 13), (100, 100), (330, 170), (3, 250)];
    let vms =
        (1..).zip(patterns).map(|(number, _)| Vm::new(number as usize % 4, number, 1 + number % 3, ALL));
    let mut pod = Pod::new(13, 4, vms.collect());
    let mut budgets = patterns.map(|_| ByteBudget::new(T_W_US, 0.0));
    let mut moved = patterns.map(|_| Vec::new());
    let steps = k_us / STEP_US;
    for step in 0..20_000_u32 {
        let now_us = f64::from(step) * STEP_US;
        for (vm, (on, off)) in patterns.into_iter().enumerate() {
            let pacing = Arc::clone(pod.metered(vm).pacing().unwrap());
            let limit = f64::from_bits(pacing.rate.load(std::sync::atomic::Ordering::Relaxed));
            if (budgets[vm].rate() - limit).abs() > 0.0 {
                budgets[vm].set_rate(limit, now_us);
            }
            pacing.release(now_us);
            if step % (on + off) >= on {
                continue;
            }
            while budgets[vm].admit(MESSAGE, now_us) {
                pacing.count(MESSAGE, 1);
                moved[vm].push((now_us, limit));
            }
            pacing.hold(now_us);
        }
        if f64::from(step + 1) % steps == 0.0 {
            for frontend in &mut pod.frontends {
                frontend.exchange.round(&mut frontend.plan, &mut frontend.all, k_us, now_us + STEP_US);
            }
        }
    }
    for (vm, moved) in moved.iter().enumerate() {
        assert!(moved.len() > 1000, "{vm} moves");
        let mut start = 0;
        for end in 0..moved.len() {
            while moved[start].0 < moved[end].0 - k_us {
                start += 1;
            }
            let most = moved[start..=end].iter().fold(0.0, |most: f64, (_, limit)| most.max(*limit));
            let (bytes, bound) =
                (as_f64((end - start + 1) as u64 * MESSAGE), most * (k_us + 2.0 * T_W_US) / 1e6);
            assert!(bytes <= bound, "VM {vm} at {} us: {bytes} bytes, where {bound} may be", moved[end].0);
        }
    }
}

/// A VM of many devices that are quiet and burst together moves no more than one share, although each of them may have all of it while
/// the others are quiet.
#[test]
fn devices_that_burst_together_have_one_share() {
    let worst = devices_burst_together(|_| 0);
    assert!(worst <= 1.0, "{worst} times what the bound allows");
}

/// Of what is wanted at the other frontend a frontend knows only after a K.
#[test]
fn devices_of_both_frontends_that_burst_together_have_one_share() {
    let worst = devices_burst_together(|device| device % 2);
    assert!(worst <= 1.0, "{worst} times what the bound allows");
    let worst = devices_burst_together(|device| usize::from(device == 3));
    assert!(worst <= 1.0, "{worst} times what the bound allows");
}

/// Returns how many times as much as the bound allows went through these frontends in the worst interval.
fn devices_burst_together(frontend_of: impl Fn(usize) -> usize) -> f64 {
    const DEVICES: usize = 8;
    const MESSAGE: u64 = 4096;
    const STEP_US: f64 = 100.0;
    let (k_us, bursts) = (f64::from(K_US), (100_u32, 500_u32));
    let mut vms: Vec<Vm> = (0..DEVICES).map(|device| Vm::new(frontend_of(device), 1, 1, ALL)).collect();
    vms.push(Vm::new(2, 2, 1, ALL));
    let mut pod = Pod::new(17, 4, vms);
    let pacings: Vec<Arc<Pacing>> =
        (0..=DEVICES).map(|vm| Arc::clone(pod.metered(vm).pacing().unwrap())).collect();
    let mut pacers: Vec<Pacer> =
        pacings.iter().map(|pacing| Pacer::begin_at(Arc::clone(pacing), 1.0, 0.0)).collect();
    let mut moved = Vec::new();
    let steps = 60_000_u32;
    for step in 0..steps {
        let now_us = k_us + f64::from(step) * STEP_US;
        for (vm, pacer) in pacers.iter_mut().enumerate() {
            pacer.look_at(now_us);
            if vm < DEVICES && step % (bursts.0 + bursts.1) >= bursts.0 {
                pacings[vm].release(now_us);
                continue;
            }
            while pacer.admit(Way::Asked, MESSAGE) {
                // Nothing is lent before it is known what all want.
                if vm < DEVICES && f64::from(step) > 3.0 * k_us / STEP_US {
                    moved.push((now_us, pacings[vm].vm.rate()));
                }
            }
        }
        if f64::from(step + 1) % (k_us / STEP_US) == 0.0 {
            for frontend in &mut pod.frontends {
                let end_us = now_us + STEP_US;
                frontend.exchange.round(&mut frontend.plan, &mut frontend.all, k_us, end_us);
            }
        }
    }
    let (mut start, mut worst) = (0, 0.0_f64);
    for end in 0..moved.len() {
        while moved[start].0 < moved[end].0 - k_us {
            start += 1;
        }
        let most = moved[start..=end].iter().fold(0.0, |most: f64, (_, limit)| most.max(*limit));
        let bytes = as_f64((end - start + 1) as u64 * MESSAGE);
        worst = worst.max(bytes / (most * (k_us + 2.0 * 1000.0) / 1e6));
    }
    assert!(moved.len() > 1000, "{} messages", moved.len());
    let mean = as_f64(moved.len() as u64 * MESSAGE) / (f64::from(steps) * STEP_US / 1e6);
    assert!(mean <= 1.05 * 0.5 * ALL, "{mean} bytes/s");
    worst
}
