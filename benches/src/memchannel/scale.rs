//! 64 hosts with 256 VMs each, over two levels of switches, on ideal links: what a scheduling step costs, and where shares end up.

use std::time::Instant;

use anyhow::{Context, Result};
use mem_channel::{
    ElementId, Host, MchannelId, MchannelOptions, Measured, Parameters, Peers, TenantId, TenantOptions,
    encode, fluid,
};

const HOSTS: u32 = 64;
const VMS: u32 = 256;
const LEAVES: u32 = 8;
const DEVICES: u32 = 16;
const TENANTS: u32 = 8;
const WINDOWS_IN_K: u32 = 10;
const KS: u32 = 40;
const PORT: f64 = 22e9;
const UPLINK: f64 = 8.0 * PORT;
const DEVICE: f64 = 2.0 * PORT;

pub(super) struct Scale {
    /// ns per mchannel and T_W: MCHANNEL_SCHED.
    pub(super) step_ns: f64,
    /// The same with the sums and shares of each K, spread over its windows.
    pub(super) all_ns: f64,
    /// µs per host and K, for sums, records of the others, and shares.
    pub(super) settle_us: f64,
    /// Used part of the links that limit.
    pub(super) used: f64,
    /// The 1st percentile of what hungry VMs get, over the fair share.
    pub(super) fair: f64,
}

struct Vm {
    host: usize,
    id: MchannelId,
    device: u32,
    demand: f64,
    run_us: f64,
    moved: f64,
}

/// Device `d` has its own port at the root switch; hosts reach that through the leaf switch of their group.
fn elements(host: u32, device: u32) -> [ElementId; 3] {
    [ElementId(host), ElementId(1000 + host * LEAVES / HOSTS), ElementId(2000 + device)]
}

pub(super) fn run() -> Result<Scale> {
    let parameters = Parameters::default();
    let mut hosts = Vec::new();
    let mut vms = Vec::new();
    for number in 0..HOSTS {
        let mut host = Host::new(parameters)?;
        for tenant in 0..TENANTS {
            host.set_tenant(TenantId(tenant), TenantOptions { weight: 1.0 })?;
        }
        for device in 0..DEVICES {
            let [port, uplink, egress] = elements(number, device);
            for (element, capacity) in [(port, PORT), (uplink, UPLINK), (egress, DEVICE)] {
                host.set_element(element, capacity)?;
            }
        }
        for vm in 0..VMS {
            let device = vm % DEVICES;
            let path = elements(number, device).to_vec();
            let tenant = TenantId(vm / DEVICES % TENANTS);
            let id = host.open(&MchannelOptions { tenant, weight: 1.0, path })?;
            // One in four wants little.
            let demand = if (vm + vm / DEVICES) % 4 == 3 { 10e6 } else { 2e9 };
            vms.push(Vm { host: number as usize, id, device, demand, run_us: parameters.t_w_us, moved: 0.0 });
        }
        hosts.push((host, Peers::new(10.0 * parameters.k_us)));
    }
    let (mut schedule_ns, mut settle_ns) = (0.0, 0.0);
    for window in 1..=KS * WINDOWS_IN_K {
        let last = window > (KS - 5) * WINDOWS_IN_K;
        let overload = step(&mut vms, &mut hosts, &parameters, last, &mut schedule_ns)?;
        if window % WINDOWS_IN_K == 0 {
            settle_ns += exchange(&mut hosts, &parameters, window, &overload)?;
        }
    }
    let steps = f64::from(HOSTS * VMS) * f64::from(KS * WINDOWS_IN_K);
    let seconds = f64::from(5 * WINDOWS_IN_K) * parameters.t_w_us / 1e6;
    let mut on_device: Vec<f64> = vec![0.0; DEVICES as usize];
    for vm in &vms {
        on_device[vm.device as usize] += vm.moved / seconds;
    }
    let mut ratios = Vec::new();
    for device in 0..DEVICES {
        // All tenants at a device are alike, so the tree does not matter here.
        let users: Vec<&Vm> = vms.iter().filter(|vm| vm.device == device).collect();
        let flows: Vec<fluid::Flow> =
            users.iter().map(|vm| fluid::Flow { demand: vm.demand, weight: 1.0 }).collect();
        // A leaf's uplink or a host's port may be the narrower one.
        let alpha = fluid::solve(DEVICE.min(PORT * f64::from(HOSTS) / f64::from(DEVICES)), &flows);
        for vm in users {
            if let Some(alpha) = alpha.filter(|alpha| vm.demand > *alpha) {
                ratios.push(vm.moved / seconds / alpha);
            }
        }
    }
    ratios.sort_by(f64::total_cmp);
    let used = on_device.iter().sum::<f64>() / (DEVICE * f64::from(DEVICES));
    let fair = *ratios.get(ratios.len() / 100).context("no VM is held back")?;
    Ok(Scale {
        step_ns: schedule_ns / steps,
        all_ns: (schedule_ns + settle_ns) / steps,
        settle_us: settle_ns / f64::from(HOSTS * KS) / 1000.0,
        used,
        fair,
    })
}

/// One T_W of all VMs; the part by which each device was overloaded.
fn step(
    vms: &mut [Vm],
    hosts: &mut [(Host, Peers)],
    parameters: &Parameters,
    last: bool,
    schedule_ns: &mut f64,
) -> Result<Vec<f64>> {
    let mut load = vec![0.0; DEVICES as usize];
    for vm in vms.iter() {
        load[vm.device as usize] += vm.demand * vm.run_us / parameters.t_w_us;
    }
    let measured: Vec<Measured> = vms
        .iter_mut()
        .map(|vm| {
            let room = (DEVICE / load[vm.device as usize]).min(1.0);
            let bytes = vm.demand * vm.run_us / 1e6 * room;
            if last {
                vm.moved += bytes;
            }
            let line_bytes = u64::from(super::parameters::whole(bytes));
            let (elapsed_us, run_us) = (parameters.t_w_us, vm.run_us);
            Measured { elapsed_us, run_us, line_bytes, queue_open_us: elapsed_us, ..Measured::default() }
        })
        .collect();
    let begun = Instant::now();
    for (vm, measured) in vms.iter_mut().zip(&measured) {
        vm.run_us = hosts[vm.host].0.schedule(vm.id, measured)?.t_r_us;
    }
    *schedule_ns += begun.elapsed().as_secs_f64() * 1e9;
    Ok(load.into_iter().map(|load| ((load / DEVICE - 1.0) * 2.0).clamp(0.0, 1.0)).collect())
}

fn exchange(
    hosts: &mut [(Host, Peers)],
    parameters: &Parameters,
    window: u32,
    overload: &[f64],
) -> Result<f64> {
    let now_us = f64::from(window) * parameters.t_w_us;
    let mut boards = Vec::new();
    let mut spent = 0.0;
    for (host, _) in hosts.iter_mut() {
        for (device, overload) in (0..).zip(overload) {
            host.observe(ElementId(2000 + device), *overload)?;
        }
        let begun = Instant::now();
        let lines: Vec<_> =
            host.sample(parameters.k_us).iter().map(|record| encode(record, window)).collect();
        spent += begun.elapsed().as_secs_f64() * 1e9;
        boards.push(lines);
    }
    for (number, (host, peers)) in hosts.iter_mut().enumerate() {
        let begun = Instant::now();
        for (other, lines) in boards.iter().enumerate().filter(|(other, _)| *other != number) {
            for (line, words) in (0..).zip(lines) {
                peers.take(u16::try_from(other)?, line, words, now_us);
            }
        }
        host.settle(peers.records(now_us));
        spent += begun.elapsed().as_secs_f64() * 1e9;
    }
    Ok(spent)
}
