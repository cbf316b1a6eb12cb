use std::collections::BTreeMap;

use cxl_pool::EndpointId;
use pod_api as api;
use pod_protocol::ids::InstanceId;
use pod_protocol::objects::Signal;
use pod_protocol::telemetry::VcpuTelemetry;
use pod_state::{Element, Mchannel};

use super::View;
use crate::controller::Sample;

impl View {
    /// What the fabric consists of, and how loaded it is.
    pub fn fabric(&self, telemetry: &BTreeMap<EndpointId, Sample>) -> api::Fabric {
        let fabric = &self.state.fabric;
        let signal = |signal: Signal| match signal {
            Signal::Off => None,
            Signal::Probe => Some(api::FabricSignal::Probe),
            Signal::Device => Some(api::FabricSignal::Device),
        };
        let signals =
            fabric.elements.iter().filter_map(|(name, it)| Some((name.clone(), signal(it.signal)?)));
        api::Fabric {
            window_us: fabric.window_us,
            sample_us: fabric.sample_us,
            elements: fabric.elements.iter().map(|(name, it)| (name.clone(), it.bytes_per_second)).collect(),
            tenants: fabric.tenants.iter().map(|(name, it)| (name.clone(), it.weight)).collect(),
            signals: signals.collect(),
            loads: self.loads(telemetry),
            resource_version: self.state.fabric_version(),
        }
    }

    /// How loaded the elements are that frontends look at, by name: as whoever sees the most of it says.
    pub(crate) fn loads(
        &self,
        telemetry: &BTreeMap<EndpointId, Sample>,
    ) -> BTreeMap<String, api::ElementLoad> {
        let looked_at = self.state.fabric.elements.iter().filter(|(_, it)| !it.signal.is_off());
        let load = |(name, it): (&String, &Element)| {
            let said = telemetry.values().flat_map(|sample| &sample.telemetry.elements);
            let said = said.filter(|said| said.element == it.number);
            let shown = said.map(|said| {
                let level = said.level.map(api::LoadLevel::of_number);
                api::ElementLoad { level, capacity: said.capacity.min(it.bytes_per_second) }
            });
            let worst = |a: api::ElementLoad, b: api::ElementLoad| api::ElementLoad {
                level: a.level.max(b.level),
                capacity: a.capacity.min(b.capacity),
            };
            Some((name.clone(), shown.reduce(worst)?))
        };
        looked_at.filter_map(load).collect()
    }

    /// All instances that have a share of it, by name.
    pub fn mchannels(&self, telemetry: &BTreeMap<EndpointId, Sample>) -> Vec<api::Mchannel> {
        let all = self.state.fabric.mchannels.iter();
        let mut shown: Vec<api::Mchannel> =
            all.filter_map(|(id, it)| self.show_mchannel(*id, it, telemetry)).collect();
        shown.sort_by(|a, b| a.instance.cmp(&b.instance));
        shown
    }

    /// The share of the instance with this name.
    pub fn mchannel(
        &self,
        instance: &str,
        telemetry: &BTreeMap<EndpointId, Sample>,
    ) -> Option<api::Mchannel> {
        let id = self.state.instance_named(instance)?.id;
        self.show_mchannel(id, self.state.fabric.mchannels.get(&id)?, telemetry)
    }

    fn show_mchannel(
        &self,
        id: InstanceId,
        mchannel: &Mchannel,
        telemetry: &BTreeMap<EndpointId, Sample>,
    ) -> Option<api::Mchannel> {
        let instance = self.state.instances.get(&id)?;
        let mut shown = api::Mchannel {
            instance: instance.name.clone(),
            resource_version: self.state.mchannel_version(id)?,
            host: self.state.host_name(instance.host),
            weight: mchannel.weight,
            tenant: mchannel.tenant.clone(),
            path: mchannel.path.clone(),
            rate: 0,
            demand: 0,
            share: None,
            run_percent: 100,
            bytes: 0,
            messages: 0,
            held_ms: 0,
            vcpus: None,
            vcpus_uncounted: false,
        };
        // While it moves, the other host's frontends have nothing to say of it yet.
        let here = telemetry.iter().filter(|(endpoint, _)| endpoint.host == instance.host);
        let mut held_us = 0_u64;
        for counted in here.clone().flat_map(|(_, sample)| &sample.telemetry.mchannels) {
            let lease = counted.lease.and_then(|lease| self.state.leases.get(&lease));
            if lease.is_none_or(|lease| lease.instance != id) {
                continue;
            }
            shown.rate = shown.rate.saturating_add(counted.rate);
            shown.demand = shown.demand.saturating_add(counted.demand);
            shown.bytes = shown.bytes.saturating_add(counted.bytes);
            shown.messages = shown.messages.saturating_add(counted.messages);
            held_us = held_us.saturating_add(counted.held_us);
            shown.share = less(shown.share, counted.share);
        }
        if let Some(counted) = newest(here.map(|(_, sample)| sample), id) {
            shown.rate = shown.rate.saturating_add(counted.rate);
            shown.demand = shown.demand.saturating_add(counted.demand);
            shown.bytes = shown.bytes.saturating_add(counted.bytes);
            shown.share = less(shown.share, counted.share);
            shown.vcpus = Some(vcpus(counted));
        }
        // Where no VMM uses a device of it, it does not run.
        let runs = || self.state.leases.values().any(|lease| lease.instance == id && lease.connected);
        shown.vcpus_uncounted = instance.ram.is_some() && shown.vcpus.is_none() && runs();
        shown.held_ms = held_us / 1000;
        shown.run_percent = run_percent(shown.share, shown.demand);
        Some(shown)
    }
}

/// What is known of an instance's vCPUs. One frontend counts them; when that dies, another one may before the last word of the dead one is
/// forgotten.
fn newest<'a>(samples: impl Iterator<Item = &'a Sample>, id: InstanceId) -> Option<&'a VcpuTelemetry> {
    let of_instance = |sample: &'a Sample| {
        let counted = sample.telemetry.vcpus.iter().find(|counted| counted.instance == Some(id))?;
        Some((sample.at, counted))
    };
    samples.filter_map(of_instance).max_by_key(|(at, _)| *at).map(|(_, counted)| counted)
}

/// What its frontends say of a share differs by a K at most.
fn less(known: Option<u64>, share: Option<u64>) -> Option<u64> {
    match (known, share) {
        (Some(known), Some(share)) => Some(known.min(share)),
        (known, share) => known.or(share),
    }
}

fn vcpus(counted: &VcpuTelemetry) -> api::MchannelVcpus {
    let part = u128::from(counted.run_ns) * 100 / u128::from(counted.window_ns.max(1));
    // Before the first report there is no window, and nobody is held.
    let percent = if counted.window_ns == 0 { 100 } else { part.min(100) };
    api::MchannelVcpus {
        rate: counted.rate,
        demand: counted.demand,
        run_us: counted.run_ns / 1000,
        window_us: counted.window_ns / 1000,
        run_percent: u32::try_from(percent).unwrap_or(100),
        bytes: counted.bytes,
        slept_ms: counted.slept_us / 1000,
    }
}

/// T_R/T_W = min(w·α, D) / D (Eq. 7).
#[expect(clippy::cast_precision_loss, reason = "a part of a whole")]
pub(crate) fn run_ratio(share: Option<u64>, demand: u64) -> f64 {
    share.filter(|share| *share < demand).map_or(1.0, |share| share as f64 / demand as f64)
}

/// The same in percent.
fn run_percent(share: Option<u64>, demand: u64) -> u32 {
    let part = |share: u64| u128::from(share.min(demand)) * 100 / u128::from(demand);
    let percent = share.filter(|_| demand > 0).map_or(100, part);
    u32::try_from(percent).unwrap_or(100)
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use pod_protocol::telemetry::Telemetry;

    use super::*;

    #[test]
    fn vcpus_are_counted_by_one_frontend_also_after_another_one_has_died() {
        let (id, other, now) = (InstanceId::new(1), InstanceId::new(2), Instant::now());
        let sample = |age_ms: u64, vcpus: &[(InstanceId, u64)]| {
            let of = |(id, bytes): &(InstanceId, u64)| VcpuTelemetry {
                instance: Some(*id),
                bytes: *bytes,
                ..VcpuTelemetry::default()
            };
            let telemetry = Telemetry { vcpus: vcpus.iter().map(of).collect(), ..Telemetry::default() };
            Sample { at: now + Duration::from_millis(9000 - age_ms), telemetry }
        };
        let bytes = |samples: &[Sample]| newest(samples.iter(), id).map(|counted| counted.bytes);
        let (dead, alive) = (sample(900, &[(id, 7), (other, 8)]), sample(20, &[(other, 3), (id, 5)]));
        assert_eq!(bytes(&[dead.clone(), alive.clone()]), Some(5));
        assert_eq!(bytes(&[alive, dead.clone()]), Some(5));
        assert_eq!(bytes(&[dead, sample(10, &[])]), Some(7));
        assert_eq!(bytes(&[sample(10, &[(other, 3)])]), None);
    }

    #[test]
    fn vcpus_show_their_window() {
        let counted = VcpuTelemetry { run_ns: 1_250_000, window_ns: 10_000_000, ..VcpuTelemetry::default() };
        let shown = vcpus(&counted);
        assert_eq!((shown.run_us, shown.window_us, shown.run_percent), (1250, 10_000, 12));
        assert_eq!(vcpus(&VcpuTelemetry::default()).run_percent, 100);
        let odd = VcpuTelemetry { run_ns: u64::MAX, window_ns: 1, ..VcpuTelemetry::default() };
        assert_eq!(vcpus(&odd).run_percent, 100);
    }

    #[test]
    fn a_part_of_the_time_is_a_share_of_a_demand() {
        assert_eq!(run_percent(None, 7), 100);
        assert_eq!(run_percent(Some(5), 0), 100);
        assert_eq!(run_percent(Some(25), 100), 25);
        assert_eq!(run_percent(Some(u64::MAX), u64::MAX), 100);
        for (share, demand, ratio) in [
            (None, 7, 1.0),
            (Some(5), 0, 1.0),
            (Some(9), 7, 1.0),
            (Some(25), 10_000, 0.0025),
            (Some(0), 7, 0.0),
        ] {
            assert!((run_ratio(share, demand) - ratio).abs() < 1e-12, "{share:?} of {demand}");
        }
    }
}
