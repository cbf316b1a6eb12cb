//! The production code of MemChannel in the simulated fabric: an mchannel for each thread.

use std::collections::BTreeSet;
use std::time::Instant;

use anyhow::Result;
use mem_channel::{
    Host, MchannelId, MchannelOptions, Measured, Parameters, Peers, TenantId, TenantOptions, encode,
};

use super::fabric::Thread;
use super::parameters::Fabric;
use super::topology::{Element, Topology, id};

pub(super) struct Control {
    parameters: Parameters,
    hosts: Vec<(Host, Peers)>,
    mchannels: Vec<(usize, MchannelId, f64)>,
    /// What lines of each host pass: of that responses tell it.
    passed: Vec<BTreeSet<Element>>,
    sequence: u32,
}

/// What control takes of this machine's time.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cost {
    /// ns for an mchannel and T_W: MCHANNEL_SCHED.
    pub(super) step_ns: f64,
    /// ns for a host and K: sums, records of the others, and shares.
    pub(super) settle_ns: f64,
    /// Lines that a host publishes at most.
    pub(super) lines: usize,
}

impl Control {
    pub(super) fn new(
        fabric: &Fabric,
        topology: &Topology,
        tenants: &[f64],
        threads: &[Thread],
    ) -> Result<Self> {
        let parameters = Parameters {
            t_w_us: fabric.t_w_us,
            k_us: fabric.k_us,
            delta: fabric.delta,
            ..Parameters::default()
        };
        let mut hosts: Vec<(Host, Peers)> = (0..topology.hosts())
            .map(|_| Ok((Host::new(parameters)?, Peers::new(10.0 * parameters.k_us))))
            .collect::<Result<_>>()?;
        for (host, _) in &mut hosts {
            // As in a pod, each is told of all of them.
            for element in 0..topology.elements() {
                host.set_element(id(element), topology.gb_s(element) * 1e9 * fabric.told)?;
            }
            for (tenant, weight) in (0..).zip(tenants) {
                host.set_tenant(TenantId(tenant), TenantOptions { weight: *weight })?;
            }
        }
        let mut mchannels = Vec::new();
        let mut passed = vec![BTreeSet::new(); topology.hosts()];
        for thread in threads {
            let path = topology.path(thread.host, thread.egress);
            passed[thread.host].extend(path.iter().copied());
            let path = path.into_iter().map(id).collect();
            let tenant = TenantId(u32::try_from(thread.tenant)?);
            let opened =
                hosts[thread.host].0.open(&MchannelOptions { tenant, weight: thread.weight, path })?;
            mchannels.push((thread.host, opened, parameters.t_w_us));
        }
        Ok(Self { parameters, hosts, mchannels, passed, sequence: 0 })
    }

    pub(super) fn t_w_ns(&self) -> f64 {
        self.parameters.t_w_us * 1000.0
    }

    pub(super) fn k_ns(&self) -> f64 {
        self.parameters.k_us * 1000.0
    }

    /// A thread's window is over; returns for how many ns it may run in the next.
    pub(super) fn window(&mut self, thread: usize, line_bytes: u64) -> Result<f64> {
        let (host, id, run_us) = &mut self.mchannels[thread];
        let measured = Measured {
            elapsed_us: self.parameters.t_w_us,
            run_us: *run_us,
            line_bytes,
            queue_open_us: self.parameters.t_w_us,
            ..Measured::default()
        };
        *run_us = self.hosts[*host].0.schedule(*id, &measured)?.t_r_us;
        Ok(*run_us * 1000.0)
    }

    /// A host's K is over. `overloaded`: L of each element, by its number. Returns how many lines it publishes.
    pub(super) fn sample(&mut self, host: usize, overloaded: &[f64], now_us: f64) -> Result<usize> {
        self.sequence += 1;
        let records = {
            let ours = &mut self.hosts[host].0;
            for element in &self.passed[host] {
                ours.observe(id(*element), overloaded[*element])?;
            }
            ours.sample(self.parameters.k_us).to_vec()
        };
        for (line, record) in (0..).zip(&records) {
            let words = encode(record, self.sequence);
            for (other, (_, peers)) in self.hosts.iter_mut().enumerate() {
                if other != host {
                    peers.take(u16::try_from(host)?, line, &words, now_us);
                }
            }
        }
        let (ours, peers) = &mut self.hosts[host];
        ours.settle(peers.records(now_us));
        Ok(records.len())
    }

    /// Measures that with all mchannels and hosts, one after the other, so many times.
    pub(super) fn cost(&mut self, times: u32) -> Result<Cost> {
        let ns = |begun: Instant, count: usize| {
            begun.elapsed().as_secs_f64() * 1e9 / (f64::from(times) * super::fabric::number(count as u64))
        };
        let begun = Instant::now();
        for round in 0..times {
            for thread in 0..self.mchannels.len() {
                self.window(thread, 1024 + u64::from(round))?;
            }
        }
        let step_ns = ns(begun, self.mchannels.len());
        let idle = vec![0.0; 1 + self.passed.iter().flatten().max().copied().unwrap_or(0)];
        let (begun, mut lines) = (Instant::now(), 0);
        for round in 0..times {
            // After all that was simulated.
            let now_us = 1e9 + f64::from(round) * self.parameters.k_us;
            for host in 0..self.hosts.len() {
                lines = lines.max(self.sample(host, &idle, now_us)?);
            }
        }
        Ok(Cost { step_ns, settle_ns: ns(begun, self.hosts.len()), lines })
    }
}
