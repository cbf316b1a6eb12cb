//! The production code of MemChannel in the simulated fabric: an mchannel for each thread.

use anyhow::Result;
use mem_channel::{
    ElementId, Host, MchannelId, MchannelOptions, Measured, Parameters, Peers, TenantId, TenantOptions,
    encode,
};

use super::fabric::Thread;
use super::parameters::Fabric;

pub(super) struct Control {
    parameters: Parameters,
    hosts: Vec<(Host, Peers)>,
    mchannels: Vec<(usize, MchannelId, f64)>,
    sequence: u32,
}

/// Host ports have odd numbers, and egress ports even ones.
fn port(host: usize) -> ElementId {
    ElementId(u32::try_from(2 * host + 1).unwrap_or(u32::MAX))
}

fn egress(place: usize) -> ElementId {
    ElementId(u32::try_from(2 * place).unwrap_or(u32::MAX))
}

impl Control {
    pub(super) fn new(
        fabric: &Fabric,
        threads: &[Thread],
        hosts: usize,
        egress_ports: usize,
    ) -> Result<Self> {
        let parameters = Parameters {
            t_w_us: fabric.t_w_us,
            k_us: fabric.k_us,
            delta: fabric.delta,
            ..Parameters::default()
        };
        let mut hosts: Vec<(Host, Peers)> = (0..hosts)
            .map(|_| Ok((Host::new(parameters)?, Peers::new(10.0 * parameters.k_us))))
            .collect::<Result<_>>()?;
        for (index, (host, _)) in hosts.iter_mut().enumerate() {
            for element in (0..egress_ports).map(egress).chain([port(index)]) {
                host.set_element(element, fabric.link_gb_s * 1e9 * fabric.told)?;
            }
            host.set_tenant(TenantId(0), TenantOptions { weight: 1.0 })?;
        }
        let mut mchannels = Vec::new();
        for thread in threads {
            let path = vec![port(thread.host), egress(thread.egress)];
            let id =
                hosts[thread.host].0.open(&MchannelOptions { tenant: TenantId(0), weight: 1.0, path })?;
            mchannels.push((thread.host, id, parameters.t_w_us));
        }
        Ok(Self { parameters, hosts, mchannels, sequence: 0 })
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

    /// A host's K is over. `at_port` and `at_egress`: L of its port and of each egress port.
    pub(super) fn sample(&mut self, host: usize, at_port: f64, at_egress: &[f64], now_us: f64) -> Result<()> {
        self.sequence += 1;
        let records = {
            let ours = &mut self.hosts[host].0;
            ours.observe(port(host), at_port)?;
            for (place, overloaded) in at_egress.iter().enumerate() {
                ours.observe(egress(place), *overloaded)?;
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
        Ok(())
    }
}
