//! 64 hosts with 256 VMs each, over two levels of switches, on ideal links: what a scheduling step costs, and where shares end up,
//! whichever level is the narrow one.

use std::time::Instant;

use anyhow::{Context, Result};
use mem_channel::fluid::{self, User};
use mem_channel::{
    ElementId, Host, MchannelId, MchannelOptions, Measured, Parameters, Peers, TenantId, TenantOptions,
    encode,
};

const HOSTS: usize = 64;
const VMS: usize = 256;
const LEAVES: usize = 8;
const DEVICES: usize = 16;
const TENANTS: usize = 8;
const WINDOWS_IN_K: u32 = 10;
const KS: u32 = 60;
/// Of these, in which shares are looked at.
const LAST_KS: u32 = 10;

/// What each element carries, in bytes/s: ports of hosts, uplinks of leaf switches, devices, which have a port each at the root switch.
struct Fabric {
    narrow: &'static str,
    port: f64,
    uplink: f64,
    device: f64,
}

/// All VMs together can have 1408 GB/s at ports of 22 each, 704 at devices of 44, and so on: the least is what binds. In the last, each level
/// binds somewhere.
const FABRICS: [Fabric; 4] = [
    Fabric { narrow: "devices", port: 22e9, uplink: 176e9, device: 44e9 },
    Fabric { narrow: "ports", port: 8e9, uplink: 176e9, device: 44e9 },
    Fabric { narrow: "uplinks", port: 22e9, uplink: 60e9, device: 44e9 },
    Fabric { narrow: "all levels", port: 22e9, uplink: 88e9, device: 44e9 },
];

/// In the last fabric ports of every fourth host, uplinks of every other leaf and every fourth device carry only this part.
const NARROWED: f64 = 0.3;

impl Fabric {
    fn capacities(&self) -> Vec<f64> {
        let part = |index: usize, each: usize| {
            if self.narrow == "all levels" && index.is_multiple_of(each) { NARROWED } else { 1.0 }
        };
        let ports = (0..HOSTS).map(|host| self.port * part(host, 4));
        let uplinks = (0..LEAVES).map(|leaf| self.uplink * part(leaf, 2));
        let devices = (0..DEVICES).map(|device| self.device * part(device, 4));
        ports.chain(uplinks).chain(devices).collect()
    }
}

/// Where shares end up.
pub(super) struct Shares {
    /// Which level is the narrow one.
    pub(super) narrow: &'static str,
    /// What is moved, of what ideal shares would move.
    pub(super) used: f64,
    /// The 1st percentile of what VMs that are held back get, over the ideal share.
    pub(super) fair: f64,
}

pub(super) struct Scale {
    /// ns per mchannel and T_W: MCHANNEL_SCHED.
    pub(super) step_ns: f64,
    /// The same with the sums and shares of each K, spread over its windows.
    pub(super) all_ns: f64,
    /// µs per host and K, for sums, records of the others, and shares.
    pub(super) settle_us: f64,
    /// How many lines each host publishes.
    pub(super) lines: usize,
    pub(super) shares: Vec<Shares>,
}

struct Vm {
    host: usize,
    id: MchannelId,
    run_us: f64,
    moved: f64,
}

/// What it costs, in ns and lines.
#[derive(Default)]
struct Cost {
    schedule_ns: f64,
    settle_ns: f64,
    lines: usize,
}

/// A pod, and what its VMs want.
struct Pod {
    parameters: Parameters,
    capacities: Vec<f64>,
    users: Vec<User>,
    vms: Vec<Vm>,
    hosts: Vec<(Host, Peers)>,
    /// The part by which each element was overloaded, in this K.
    overload: Vec<f64>,
    cost: Cost,
}

fn id(element: usize) -> ElementId {
    ElementId(u32::try_from(element).unwrap_or(u32::MAX))
}

/// A VM's path: the host's port, the uplink of its leaf switch, the device.
fn path(host: usize, device: usize) -> [usize; 3] {
    [host, HOSTS + host * LEAVES / HOSTS, HOSTS + LEAVES + device]
}

fn weight(number: usize) -> f64 {
    [1.0, 2.0, 4.0][number % 3]
}

pub(super) fn run() -> Result<Scale> {
    let mut costs = Cost::default();
    let mut shares = Vec::new();
    for fabric in &FABRICS {
        let mut pod = Pod::new(fabric)?;
        shares.push(pod.settle(fabric.narrow)?);
        costs.schedule_ns += pod.cost.schedule_ns;
        costs.settle_ns += pod.cost.settle_ns;
        costs.lines = costs.lines.max(pod.cost.lines);
    }
    let ks = f64::from(KS) * super::fabric::number(FABRICS.len() as u64);
    let steps = super::fabric::number((HOSTS * VMS) as u64) * ks * f64::from(WINDOWS_IN_K);
    Ok(Scale {
        step_ns: costs.schedule_ns / steps,
        all_ns: (costs.schedule_ns + costs.settle_ns) / steps,
        settle_us: costs.settle_ns / (super::fabric::number(HOSTS as u64) * ks) / 1000.0,
        lines: costs.lines,
        shares,
    })
}

impl Pod {
    fn new(fabric: &Fabric) -> Result<Self> {
        let parameters = Parameters::default();
        let capacities = fabric.capacities();
        let (mut hosts, mut vms, mut users) = (Vec::new(), Vec::new(), Vec::new());
        for number in 0..HOSTS {
            let mut host = Host::new(parameters)?;
            for tenant in 0..TENANTS {
                let options = TenantOptions { weight: weight(tenant) };
                host.set_tenant(TenantId(u32::try_from(tenant)?), options)?;
            }
            // As in a pod, it is told of all of them.
            for (element, capacity) in capacities.iter().enumerate() {
                host.set_element(id(element), *capacity)?;
            }
            for vm in 0..VMS {
                let (device, tenant) = (vm % DEVICES, vm / DEVICES % TENANTS);
                let (path, weight) = (path(number, device), weight(vm + number));
                // One in four wants little.
                let demand = if (vm + vm / DEVICES).is_multiple_of(4) { 10e6 } else { 2e9 };
                let options = MchannelOptions {
                    tenant: TenantId(u32::try_from(tenant)?),
                    weight,
                    path: path.iter().map(|element| id(*element)).collect(),
                };
                let id = host.open(&options)?;
                vms.push(Vm { host: number, id, run_us: parameters.t_w_us, moved: 0.0 });
                users.push(User { tenant, weight, demand, path: path.to_vec() });
            }
            hosts.push((host, Peers::new(10.0 * parameters.k_us)));
        }
        let overload = vec![0.0; capacities.len()];
        Ok(Self { parameters, capacities, users, vms, hosts, overload, cost: Cost::default() })
    }

    /// Runs until shares are where they stay; what VMs get then.
    fn settle(&mut self, narrow: &'static str) -> Result<Shares> {
        for window in 1..=KS * WINDOWS_IN_K {
            self.step(window > (KS - LAST_KS) * WINDOWS_IN_K)?;
            if window.is_multiple_of(WINDOWS_IN_K) {
                self.exchange(window)?;
            }
        }
        let tenants: Vec<f64> = (0..TENANTS).map(weight).collect();
        let ideal = fluid::rates(&self.capacities, &tenants, &self.users);
        let seconds = f64::from(LAST_KS * WINDOWS_IN_K) * self.parameters.t_w_us / 1e6;
        let moved: f64 = self.vms.iter().map(|vm| vm.moved / seconds).sum();
        let of_vm = |((vm, user), ideal): ((&Vm, &User), &f64)| {
            (*ideal < user.demand * 0.99).then(|| vm.moved / seconds / ideal)
        };
        let mut ratios: Vec<f64> = self.vms.iter().zip(&self.users).zip(&ideal).filter_map(of_vm).collect();
        ratios.sort_by(f64::total_cmp);
        let fair = *ratios.get(ratios.len() / 100).context("no VM is held back")?;
        Ok(Shares { narrow, used: moved / ideal.iter().sum::<f64>(), fair })
    }

    /// One T_W of all VMs.
    fn step(&mut self, is_counted: bool) -> Result<()> {
        let t_w_us = self.parameters.t_w_us;
        let wanted: Vec<f64> =
            self.vms.iter().zip(&self.users).map(|(vm, user)| user.demand * vm.run_us / t_w_us).collect();
        let room = self.room(&wanted);
        for (overload, room) in self.overload.iter_mut().zip(&room) {
            *overload += ((1.0 / room - 1.0) * 2.0).min(1.0) / f64::from(WINDOWS_IN_K);
        }
        let mut measured = Vec::with_capacity(self.vms.len());
        for ((vm, user), wanted) in self.vms.iter_mut().zip(&self.users).zip(&wanted) {
            let part = user.path.iter().fold(1.0_f64, |least, element| least.min(room[*element]));
            let bytes = wanted * part * t_w_us / 1e6;
            if is_counted {
                vm.moved += bytes;
            }
            let line_bytes = u64::from(super::parameters::whole(bytes));
            let times = Measured { elapsed_us: t_w_us, run_us: vm.run_us, ..Measured::default() };
            measured.push(Measured { line_bytes, queue_open_us: t_w_us, ..times });
        }
        let begun = Instant::now();
        for (vm, measured) in self.vms.iter_mut().zip(&measured) {
            vm.run_us = self.hosts[vm.host].0.schedule(vm.id, measured)?.t_r_us;
        }
        self.cost.schedule_ns += begun.elapsed().as_secs_f64() * 1e9;
        Ok(())
    }

    /// What part of what reaches each element it carries. What waits at one loads no other: where a path is narrowest is found by turns.
    fn room(&self, wanted: &[f64]) -> Vec<f64> {
        let mut room = vec![1.0_f64; self.capacities.len()];
        for _ in 0..4 {
            let mut load = vec![0.0; room.len()];
            for (user, wanted) in self.users.iter().zip(wanted) {
                for element in &user.path {
                    let others = user.path.iter().filter(|other| *other != element);
                    load[*element] += wanted * others.fold(1.0_f64, |least, other| least.min(room[*other]));
                }
            }
            for ((room, capacity), load) in room.iter_mut().zip(&self.capacities).zip(load) {
                *room = (capacity / load).min(1.0);
            }
        }
        room
    }

    fn exchange(&mut self, window: u32) -> Result<()> {
        let now_us = f64::from(window) * self.parameters.t_w_us;
        let mut boards = Vec::new();
        for (number, (host, _)) in self.hosts.iter_mut().enumerate() {
            // What passes through its own elements each host can see.
            let used = (0..DEVICES).flat_map(|device| path(number, device));
            for element in used {
                host.observe(id(element), self.overload[element])?;
            }
            let begun = Instant::now();
            let records = host.sample(self.parameters.k_us).iter();
            let lines: Vec<_> = records.map(|record| encode(record, window)).collect();
            self.cost.settle_ns += begun.elapsed().as_secs_f64() * 1e9;
            self.cost.lines = self.cost.lines.max(lines.len());
            boards.push(lines);
        }
        for (number, (host, peers)) in self.hosts.iter_mut().enumerate() {
            let begun = Instant::now();
            for (other, lines) in boards.iter().enumerate().filter(|(other, _)| *other != number) {
                for (line, words) in (0..).zip(lines) {
                    peers.take(u16::try_from(other)?, line, words, now_us);
                }
            }
            host.settle(peers.records(now_us));
            self.cost.settle_ns += begun.elapsed().as_secs_f64() * 1e9;
        }
        self.overload.fill(0.0);
        Ok(())
    }
}
