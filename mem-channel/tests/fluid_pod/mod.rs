//! A pod whose links are ideal: hosts with VMs, stepped one T_W at a time, and what max-min fairness says of it.

#![allow(dead_code, reason = "each test uses a part of it")]

pub(crate) mod topologies;

use mem_channel::fluid::{self, User};
use mem_channel::{
    ByteBudget, Decision, ElementId, Host, MchannelId, MchannelOptions, Measured, Parameters, Peers,
    TenantId, TenantOptions, encode,
};

/// How a VM reaches its memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Kind {
    /// Loads and stores: its vCPUs are stopped.
    Lines,
    /// Queues: its messages of so many bytes wait for the budget.
    Queue(u64),
}

#[derive(Clone, Debug)]
pub(crate) struct Vm {
    pub(crate) host: usize,
    pub(crate) tenant: u32,
    pub(crate) weight: f64,
    pub(crate) path: Vec<usize>,
    /// In bytes/s.
    pub(crate) demand: f64,
    pub(crate) kind: Kind,
    /// If set: so many windows on, then so many off.
    pub(crate) on_off: Option<(u32, u32)>,
}

impl Vm {
    pub(crate) fn new(host: usize, path: &[usize], demand: f64) -> Self {
        Self { host, tenant: 0, weight: 1.0, path: path.to_vec(), demand, kind: Kind::Lines, on_off: None }
    }

    pub(crate) fn is_on(&self, window: u32) -> bool {
        self.on_off.is_none_or(|(on, off)| window % (on + off) < on)
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Topology {
    pub(crate) hosts: usize,
    /// Bytes/s of each element.
    pub(crate) capacities: Vec<f64>,
    /// Of each tenant.
    pub(crate) weights: Vec<f64>,
    pub(crate) vms: Vec<Vm>,
}

/// What a VM did in one T_W.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Window {
    /// How long it ran, in µs.
    pub(crate) run_us: f64,
    pub(crate) bytes: f64,
    /// w·α when that was decided; infinite where nobody had to be held back.
    pub(crate) share: f64,
}

struct Running {
    vm: Vm,
    id: MchannelId,
    t_r_us: f64,
    budget: ByteBudget,
    backlog: f64,
    decision: Option<Decision>,
    moved: f64,
    slept_us: f64,
    windows: Vec<Window>,
}

pub(crate) struct Pod {
    parameters: Parameters,
    capacities: Vec<f64>,
    windows_in_k: u32,
    hosts: Vec<(Host, Peers)>,
    vms: Vec<Running>,
    /// Nothing that is sent off is delayed by what others send.
    unhindered: bool,
    /// Hosts hear of it where elements are overloaded.
    signals: bool,
    window: u32,
    overload: Vec<f64>,
    sequence: u32,
    /// What each element moved.
    pub(crate) carried: Vec<f64>,
}

impl Pod {
    pub(crate) fn new(topology: &Topology) -> Self {
        Self::with(topology, Parameters::default().t_w_us, 10)
    }

    /// One in which all arrives at once, however overloaded elements are.
    pub(crate) fn unhindered(topology: &Topology, t_w_us: f64, windows_in_k: u32) -> Self {
        Self { unhindered: true, ..Self::with(topology, t_w_us, windows_in_k) }
    }

    /// One whose hosts are told of no overload, as without a source of signals: capacities are what they were set to.
    pub(crate) fn without_signals(topology: &Topology) -> Self {
        Self { signals: false, ..Self::new(topology) }
    }

    fn with(topology: &Topology, t_w_us: f64, windows_in_k: u32) -> Self {
        let k_us = t_w_us * f64::from(windows_in_k);
        let parameters = Parameters { t_w_us, k_us, ..Parameters::default() };
        let element = |index: usize| ElementId(u32::try_from(index).unwrap());
        let mut hosts: Vec<(Host, Peers)> = (0..topology.hosts)
            .map(|_| (Host::new(parameters).unwrap(), Peers::new(10.0 * parameters.k_us)))
            .collect();
        for (host, _) in &mut hosts {
            for (index, capacity) in topology.capacities.iter().enumerate() {
                host.set_element(element(index), *capacity).unwrap();
            }
            for (index, weight) in topology.weights.iter().enumerate() {
                let tenant = TenantId(u32::try_from(index).unwrap());
                host.set_tenant(tenant, TenantOptions { weight: *weight }).unwrap();
            }
        }
        let mut pod = Self {
            parameters,
            capacities: topology.capacities.clone(),
            windows_in_k,
            hosts,
            vms: Vec::new(),
            unhindered: false,
            signals: true,
            window: 0,
            overload: vec![0.0; topology.capacities.len()],
            sequence: 0,
            carried: vec![0.0; topology.capacities.len()],
        };
        for vm in &topology.vms {
            pod.add(vm.clone());
        }
        pod
    }

    pub(crate) fn add(&mut self, vm: Vm) {
        let path = vm.path.iter().map(|index| ElementId(u32::try_from(*index).unwrap())).collect();
        let options = MchannelOptions { tenant: TenantId(vm.tenant), weight: vm.weight, path };
        let id = self.hosts[vm.host].0.open(&options).unwrap();
        let (t_w_us, now_us) = (self.parameters.t_w_us, self.now_us());
        self.vms.push(Running {
            vm,
            id,
            t_r_us: t_w_us,
            budget: ByteBudget::new(t_w_us, now_us),
            backlog: 0.0,
            decision: None,
            moved: 0.0,
            slept_us: 0.0,
            windows: Vec::new(),
        });
    }

    pub(crate) fn set_demand(&mut self, vm: usize, demand: f64) {
        self.vms[vm].vm.demand = demand;
    }

    pub(crate) fn now_us(&self) -> f64 {
        f64::from(self.window) * self.parameters.t_w_us
    }

    /// Bytes each VM moved since the last call.
    pub(crate) fn take_moved(&mut self) -> Vec<f64> {
        self.carried.fill(0.0);
        self.vms.iter_mut().map(|vm| std::mem::take(&mut vm.moved)).collect()
    }

    /// For how long each VM's vCPUs were stopped since the start, in µs.
    pub(crate) fn slept_us(&self) -> Vec<f64> {
        self.vms.iter().map(|vm| vm.slept_us).collect()
    }

    /// All that a VM did so far.
    pub(crate) fn windows(&self, vm: usize) -> &[Window] {
        &self.vms[vm].windows
    }

    pub(crate) fn run(&mut self, windows: u32) {
        for _ in 0..windows {
            self.step();
        }
    }

    /// Mean rates in bytes/s over so many K.
    pub(crate) fn rates(&mut self, ks: u32) -> Vec<f64> {
        self.take_moved();
        self.run(ks * self.windows_in_k);
        let seconds = f64::from(ks * self.windows_in_k) * self.parameters.t_w_us / 1e6;
        self.take_moved().into_iter().map(|bytes| bytes / seconds).collect()
    }

    fn step(&mut self) {
        let (t_w_us, now_us, window) = (self.parameters.t_w_us, self.now_us(), self.window);
        let wanted: Vec<f64> = self.vms.iter_mut().map(|vm| vm.offer(window, now_us, t_w_us)).collect();
        let room = self.room(&wanted);
        for (overload, room) in self.overload.iter_mut().zip(&room) {
            // The more is asked for than fits, the more of the time something waits.
            *overload += ((1.0 / room - 1.0) * 2.0).min(1.0) / f64::from(self.windows_in_k);
        }
        for (vm, wanted) in self.vms.iter_mut().zip(wanted) {
            let factor = vm.vm.path.iter().fold(1.0_f64, |least, element| least.min(room[*element]));
            let bytes = if self.unhindered { wanted } else { wanted * factor };
            let share = vm.decision.map_or(f64::INFINITY, |decision| decision.share);
            vm.windows.push(Window { run_us: vm.t_r_us, bytes, share });
            vm.moved += bytes;
            for element in &vm.vm.path {
                self.carried[*element] += bytes;
            }
            #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
            let count = bytes.round() as u64;
            let mut measured = Measured { elapsed_us: t_w_us, run_us: vm.t_r_us, ..Measured::default() };
            if vm.vm.kind == Kind::Lines {
                measured.line_bytes = count;
                measured.queue_open_us = t_w_us;
            } else {
                measured.queue_bytes = count;
                measured.queue_open_us = vm.budget.take_open_us(t_w_us, now_us + t_w_us);
            }
            let decision = self.hosts[vm.vm.host].0.schedule(vm.id, &measured).unwrap();
            vm.t_r_us = decision.t_r_us;
            vm.slept_us += t_w_us - decision.t_r_us;
            vm.budget.set_rate(decision.queue_rate, now_us + t_w_us);
            vm.decision = Some(decision);
        }
        self.window += 1;
        for index in 0..self.hosts.len() {
            // Every host has a K of its own.
            if (self.window + u32::try_from(index).unwrap() * 3).is_multiple_of(self.windows_in_k) {
                self.exchange(index);
            }
        }
        if self.window.is_multiple_of(self.windows_in_k) {
            self.overload.fill(0.0);
        }
    }

    /// What part of what reaches each element it carries. What waits at one element of its path loads no other: where the path's
    /// narrowest element is, is found by turns.
    fn room(&self, wanted: &[f64]) -> Vec<f64> {
        let mut room = vec![1.0; self.capacities.len()];
        for _ in 0..20 {
            for element in 0..room.len() {
                let through = self.vms.iter().zip(wanted).filter(|(vm, _)| vm.vm.path.contains(&element));
                let load = through.fold(0.0, |load, (vm, wanted)| {
                    let others = vm.vm.path.iter().filter(|other| **other != element);
                    load + wanted * others.fold(1.0_f64, |least, other| least.min(room[*other]))
                });
                room[element] = (self.capacities[element] * self.parameters.t_w_us / 1e6 / load).min(1.0);
            }
        }
        room
    }

    fn exchange(&mut self, index: usize) {
        let now_us = self.now_us();
        for (element, overload) in self.overload.iter().enumerate().filter(|_| self.signals) {
            let element = ElementId(u32::try_from(element).unwrap());
            self.hosts[index].0.observe(element, *overload).unwrap();
        }
        let records = self.hosts[index].0.sample(self.parameters.k_us).to_vec();
        self.sequence += 1;
        for (line, record) in (0..).zip(&records) {
            let words = encode(record, self.sequence);
            for (other, (_, peers)) in self.hosts.iter_mut().enumerate() {
                if other != index {
                    peers.take(u16::try_from(index).unwrap(), line, &words, now_us);
                }
            }
        }
        let (host, peers) = &mut self.hosts[index];
        host.settle(peers.records(now_us));
    }
}

impl Running {
    fn wants(&self, window: u32) -> f64 {
        if self.vm.is_on(window) { self.vm.demand } else { 0.0 }
    }

    /// Bytes that it sends off in this window.
    fn offer(&mut self, window: u32, now_us: f64, t_w_us: f64) -> f64 {
        let demand = self.wants(window);
        match self.vm.kind {
            Kind::Lines => demand * self.t_r_us / 1e6,
            Kind::Queue(message) => {
                #[allow(clippy::cast_precision_loss)]
                let size = message as f64;
                // At most a window of work waits: it is a closed loop.
                self.backlog = (self.backlog + demand * t_w_us / 1e6).min(demand * t_w_us / 1e6 + size);
                let mut sent = 0.0;
                for part in 0..10 {
                    let at_us = now_us + t_w_us * f64::from(part) / 10.0;
                    while self.backlog >= size && self.budget.admit(message, at_us) {
                        self.backlog -= size;
                        sent += size;
                    }
                }
                sent
            }
        }
    }
}

/// Weighted max-min rates of a flat network by progressive filling: all rates grow together, until a demand or an element
/// stops some of them.
pub(crate) fn progressive_filling(topology: &Topology) -> Vec<f64> {
    let vms = &topology.vms;
    let (mut rates, mut growing) = (vec![0.0; vms.len()], vec![true; vms.len()]);
    let mut rounds = 0;
    while growing.iter().any(|growing| *growing) {
        rounds += 1;
        assert!(rounds < 100, "{topology:?} {rates:?} {growing:?}");
        let mut step = f64::INFINITY;
        for (index, vm) in vms.iter().enumerate().filter(|(index, _)| growing[*index]) {
            step = step.min((vm.demand - rates[index]) / vm.weight);
        }
        let left: Vec<f64> = topology
            .capacities
            .iter()
            .enumerate()
            .map(|(element, capacity)| {
                let used = through(vms, element).fold(0.0, |sum, index| sum + rates[index]);
                // Not `sum`: of nothing that is -0.0, which divides to -∞.
                let growing = through(vms, element).filter(|index| growing[*index]);
                let weights = growing.fold(0.0, |sum, index| sum + vms[index].weight);
                (capacity - used).max(0.0) / weights
            })
            .collect();
        step = left.iter().copied().fold(step, f64::min).max(0.0);
        for (index, vm) in vms.iter().enumerate().filter(|(index, _)| growing[*index]) {
            rates[index] += step * vm.weight;
        }
        for (index, vm) in vms.iter().enumerate() {
            let met = rates[index] >= vm.demand * (1.0 - 1e-9);
            let full = vm.path.iter().any(|element| left[*element] <= step * (1.0 + 1e-9));
            growing[index] &= !(met || full);
        }
    }
    rates
}

/// What rates ought to be of those that are on.
pub(crate) fn ideal_rates(topology: &Topology, is_on: impl Fn(usize) -> bool) -> Vec<f64> {
    let user = |(index, vm): (usize, &Vm)| User {
        tenant: vm.tenant as usize,
        weight: vm.weight,
        demand: if is_on(index) { vm.demand } else { 0.0 },
        path: vm.path.clone(),
    };
    let users: Vec<User> = topology.vms.iter().enumerate().map(user).collect();
    fluid::rates(&topology.capacities, &topology.weights, &users)
}

fn through(vms: &[Vm], element: usize) -> impl Iterator<Item = usize> {
    (0..vms.len()).filter(move |index| vms[*index].path.contains(&element))
}

/// The parts of a distribution that the given parts of all values do not exceed.
pub(crate) fn quantiles<const N: usize>(values: &mut [f64], parts: [f64; N]) -> [f64; N] {
    values.sort_by(f64::total_cmp);
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    parts.map(|part| values[(count(values.len() - 1) * part) as usize])
}

/// No more than `most` of these parts of all values; what they are is printed.
#[track_caller]
pub(crate) fn distributed<const N: usize>(what: &str, values: &mut [f64], parts: [f64; N], most: [f64; N]) {
    let found = quantiles(values, parts);
    println!("{what}: {found:.3?} at {parts:?}; the worst {:.3}", values[values.len() - 1]);
    assert!(found.iter().zip(most).all(|(found, most)| *found <= most), "{what}: {found:?}");
}

#[allow(clippy::cast_precision_loss)]
pub(crate) fn count(count: usize) -> f64 {
    count as f64
}

/// How often a property is tried: so many times `WADI_ROUNDS`.
pub(crate) fn cases(count: u32) -> proptest::test_runner::Config {
    let rounds = std::env::var("WADI_ROUNDS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(1_u32);
    proptest::test_runner::Config::with_cases(count * rounds.max(1))
}
