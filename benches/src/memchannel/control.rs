//! The production code of MemChannel in the simulated fabric: an mchannel for each thread.
//!
//! What is around it is either the paper's, or what a pod has.

use std::collections::BTreeSet;
use std::time::Instant;

use anyhow::Result;
use mem_channel::{
    Host, MchannelId, MchannelOptions, Measured, Parameters, Peers, TenantId, TenantOptions, encode,
    part_among,
};
use vcpu_slicing::Phase;

use super::fabric::{Thread, rounded_down};
use super::parameters::Fabric;
use super::sliced::{Next, Sliced};
use super::topology::{Element, Topology, id};

/// Who holds threads to their shares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Setting {
    /// Nobody.
    Uncontrolled,
    /// As the paper has it: each window a share is computed anew, and responses tell how loaded elements are.
    Paper,
    /// As a pod has it: each thread is a vCPU whose agent reports once in a K, and hears then what part of each window it may run.
    Pod(Signal),
}

impl Setting {
    fn is_pod(self) -> bool {
        matches!(self, Self::Pod(_))
    }
}

/// What tells a pod how loaded egress ports are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Signal {
    /// Nothing does, unless an operator chooses something.
    Off,
    /// Each host looks once in a K how long a line takes.
    Probe,
}

/// An agent reports so much of a K after it was told.
const REPORT_AFTER: f64 = 0.9;
/// In a pod what others published counts for so long at least, in µs.
const POD_STALE_AFTER_US: f64 = 1e6;

pub(super) struct Control {
    setting: Setting,
    parameters: Parameters,
    hosts: Vec<(Host, Peers)>,
    mchannels: Vec<(usize, MchannelId, f64)>,
    /// What lines of each host pass: of that responses tell it.
    passed: Vec<BTreeSet<Element>>,
    /// In a pod, each thread, and what it was found to want, in bytes/s.
    sliced: Vec<(Sliced, f64)>,
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
        setting: Setting,
        topology: &Topology,
        tenants: &[f64],
        threads: &[Thread],
    ) -> Result<Self> {
        let parameters = Parameters {
            t_w_us: fabric.t_w_us,
            k_us: fabric.k_us,
            delta: fabric.delta,
            g: fabric.g,
            lambda_per_s: fabric.lambda_per_s,
            least_capacity: fabric.least_capacity,
            ..Parameters::default()
        };
        let mut stale_after_us = 10.0 * parameters.k_us;
        if setting.is_pod() {
            stale_after_us = stale_after_us.max(POD_STALE_AFTER_US);
        }
        let mut hosts: Vec<(Host, Peers)> = (0..topology.hosts())
            .map(|_| Ok((Host::new(parameters)?, Peers::new(stale_after_us))))
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
        // Each program is a machine, and each of its threads a vCPU.
        let phase =
            |it: &Thread| -> Result<Phase> { Ok(Phase::of(u32::try_from(it.stream)?, it.number_in_stream)) };
        let sliced = match setting {
            Setting::Pod(_) => {
                threads.iter().map(|it| Ok((Sliced::new(phase(it)?), 0.0))).collect::<Result<_>>()?
            }
            Setting::Uncontrolled | Setting::Paper => Vec::new(),
        };
        Ok(Self { setting, parameters, hosts, mchannels, passed, sliced, sequence: 0 })
    }

    pub(super) fn setting(&self) -> Setting {
        self.setting
    }

    pub(super) fn t_w_ns(&self) -> f64 {
        self.parameters.t_w_us * 1000.0
    }

    pub(super) fn k_ns(&self) -> f64 {
        self.parameters.k_us * 1000.0
    }

    /// How long after a host's K is over the agents there report, in ns; nothing where there are none.
    pub(super) fn report_after_ns(&self) -> Option<f64> {
        self.setting.is_pod().then(|| REPORT_AFTER * self.k_ns())
    }

    /// A thread's agent reports.
    pub(super) fn report(&mut self, thread: usize, now_ns: u64, line_bytes: u64) {
        self.sliced[thread].0.report(now_ns, line_bytes);
    }

    /// The timer of a thread's account fired.
    pub(super) fn look(&mut self, thread: usize, now_ns: u64) -> Next {
        self.sliced[thread].0.look(now_ns)
    }

    /// Before a host's K is over: what the agents there reported is measured.
    fn measure(&mut self, host: usize) -> Result<()> {
        let elapsed_us = self.parameters.k_us;
        for ((of, id, _), (sliced, demand)) in self.mchannels.iter().zip(&mut self.sliced) {
            if *of == host {
                let (line_bytes, run_us) = sliced.account.measure(*demand, elapsed_us);
                let measured = Measured {
                    elapsed_us,
                    run_us,
                    line_bytes,
                    queue_open_us: elapsed_us,
                    ..Measured::default()
                };
                *demand = self.hosts[host].0.schedule(*id, &measured)?.demand;
            }
        }
        Ok(())
    }

    /// After it: agents are told what follows. Returns which threads are to be looked at now.
    fn order(&mut self, host: usize) -> Result<Vec<usize>> {
        let mut now = Vec::new();
        let window_ns = rounded_down(self.t_w_ns());
        for (thread, ((of, id, _), (sliced, _))) in self.mchannels.iter().zip(&mut self.sliced).enumerate() {
            if *of == host {
                // Nothing more was measured; but α is new.
                let decision = self.hosts[host].0.schedule(*id, &Measured::default())?;
                let limit = part_among(decision.share, &[]);
                let part = sliced.account.decide(limit, decision.demand);
                now.extend(part.filter(|part| sliced.obey(*part, window_ns)).map(|_| thread));
            }
        }
        Ok(now)
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

    /// A host's K is over. `overloaded`: L of each element, by its number. Returns which threads are to be looked at now.
    pub(super) fn round(&mut self, host: usize, overloaded: &[f64], now_us: f64) -> Result<Vec<usize>> {
        if self.setting.is_pod() {
            self.measure(host)?;
        }
        for element in &self.passed[host] {
            self.hosts[host].0.observe(id(*element), overloaded[*element])?;
        }
        self.exchange(host, now_us)?;
        if self.setting.is_pod() { self.order(host) } else { Ok(Vec::new()) }
    }

    /// Publishes what a host measured, reads what others did, and settles shares. Returns how many lines it publishes.
    fn exchange(&mut self, host: usize, now_us: f64) -> Result<usize> {
        self.sequence += 1;
        let records = self.hosts[host].0.sample(self.parameters.k_us).to_vec();
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
        let (begun, mut lines) = (Instant::now(), 0);
        for round in 0..times {
            // After all that was simulated.
            let now_us = 1e9 + f64::from(round) * self.parameters.k_us;
            for host in 0..self.hosts.len() {
                lines = lines.max(self.exchange(host, now_us)?);
            }
        }
        Ok(Cost { step_ns, settle_ns: ns(begun, self.hosts.len()), lines })
    }
}
