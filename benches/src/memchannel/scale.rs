//! 64 hosts with 256 VMs each, over two levels of switches, event by event: what a scheduling step costs, and where shares end up, whichever
//! level is the narrow one.

use anyhow::{Context as _, Result};
use mem_channel::fluid::{self, User};

use super::control::{Control, Cost, Setting};
use super::fabric::{Found, LINE, Simulation, Stream, number};
use super::parameters::Fabric;
use super::side_by_side;
use super::topology::Topology;

const HOSTS: usize = 64;
const VMS: usize = 256;
const LEAVES: usize = 8;
const DEVICES: usize = 16;
const TENANTS: usize = 8;
const K_US: f64 = 1000.0;
/// Until shares are where they stay.
const SETTLING_KS: f64 = 40.0;
/// In which they are looked at.
const COUNTED_KS: f64 = 10.0;
/// Lines that a VM has under way which wants more than there is.
const IN_FLIGHT: f64 = 4.0;
/// What one in four wants, in GB/s.
const LITTLE: f64 = 0.01;
/// How often steps of all VMs, and sums and shares of all hosts, are timed.
const TIMED: u32 = 100;

/// What each element carries, in GB/s: ports of hosts, uplinks of leaf switches, devices, which have a port each at the root switch. A quarter of
/// the links of today: what passes is simulated line by line, so it takes a quarter of the time.
struct Links {
    narrow: &'static str,
    port: f64,
    uplink: f64,
    device: f64,
}

/// All VMs together can have 352 GB/s at ports of 5.5 each, 176 at devices of 11, and so on: the least is what binds. In the last, each level
/// binds somewhere.
const PODS: [Links; 4] = [
    Links { narrow: "devices", port: 5.5, uplink: 44.0, device: 11.0 },
    Links { narrow: "ports", port: 2.0, uplink: 44.0, device: 11.0 },
    Links { narrow: "uplinks", port: 5.5, uplink: 15.0, device: 11.0 },
    Links { narrow: "all levels", port: 5.5, uplink: 22.0, device: 11.0 },
];

/// In the last pod ports of every fourth host, uplinks of every other leaf and every fourth device carry only this part.
const NARROWED: f64 = 0.3;

impl Links {
    fn topology(&self) -> Topology {
        let links = |count: usize, gb_s: f64, narrowed: usize| -> Vec<f64> {
            let is_narrow = |index: usize| self.narrow == "all levels" && index.is_multiple_of(narrowed);
            (0..count).map(|index| if is_narrow(index) { gb_s * NARROWED } else { gb_s }).collect()
        };
        Topology::two_levels(
            &links(HOSTS, self.port, 4),
            &links(LEAVES, self.uplink, 2),
            &links(DEVICES, self.device, 4),
        )
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

fn weight(number: usize) -> f64 {
    [1.0, 2.0, 4.0][number % 3]
}

/// The VMs, host by host.
fn vms() -> Vec<Stream> {
    let vm = |host: usize, vm: usize| {
        let wants_little = (vm + vm / DEVICES).is_multiple_of(4);
        Stream {
            host,
            write: false,
            in_flight: if wants_little { 1.0 } else { IN_FLIGHT },
            block: 1,
            threads: 1,
            egress: vm % DEVICES,
            pause_ns: if wants_little { LINE / LITTLE } else { 0.0 },
            tenant: vm / DEVICES % TENANTS,
            weight: weight(vm + host),
        }
    };
    (0..HOSTS).flat_map(|host| (0..VMS).map(move |number| vm(host, number))).collect()
}

pub(super) fn run() -> Result<Scale> {
    let (mut shares, mut control) = (Vec::new(), None);
    // Two at a time: each has some hundred MB.
    for pods in PODS.chunks(2) {
        let settled = side_by_side(pods, settle)?;
        for (found, by) in settled {
            shares.push(found);
            control = Some(by);
        }
    }
    let mut control = control.context("no pod was simulated")?;
    let Cost { step_ns, settle_ns, lines } = control.cost(TIMED)?;
    let steps_in_k = number(VMS as u64) * K_US / Fabric::PAPER.t_w_us;
    Ok(Scale {
        step_ns,
        all_ns: step_ns + settle_ns / steps_in_k,
        settle_us: settle_ns / 1000.0,
        lines,
        shares,
    })
}

/// Runs until shares are where they stay; what VMs get then.
fn settle(links: &Links) -> Result<(Shares, Control)> {
    let fabric = Fabric { k_us: K_US, ..Fabric::PAPER };
    let (topology, vms) = (links.topology(), vms());
    let tenants: Vec<f64> = (0..TENANTS).map(weight).collect();
    let users: Vec<User> = vms
        .iter()
        .map(|vm| {
            // What it would move if nothing were in its way.
            let demand = if vm.pause_ns > 0.0 { LITTLE } else { vm.in_flight * LINE / fabric.idle_ns };
            User { tenant: vm.tenant, weight: vm.weight, demand, path: topology.path(vm.host, vm.egress) }
        })
        .collect();
    let capacities: Vec<f64> = (0..topology.elements()).map(|element| topology.gb_s(element)).collect();
    let ideal = fluid::rates(&capacities, &tenants, &users);

    let mut simulation = Simulation::over(&fabric, topology, &tenants, &vms, Setting::Paper)?;
    simulation.run(SETTLING_KS * K_US)?;
    let found = simulation.run(COUNTED_KS * K_US)?;
    let moved: f64 = found.iter().map(|found| found.rate).sum();
    let of_vm = |((found, user), ideal): ((&Found, &User), &f64)| {
        (*ideal < user.demand * 0.99).then(|| found.rate / ideal)
    };
    let mut ratios: Vec<f64> = found.iter().zip(&users).zip(&ideal).filter_map(of_vm).collect();
    ratios.sort_by(f64::total_cmp);
    let fair = *ratios.get(ratios.len() / 100).context("no VM is held back")?;
    let shares = Shares { narrow: links.narrow, used: moved / ideal.iter().sum::<f64>(), fair };
    Ok((shares, simulation.control.context("it runs without control")?))
}
