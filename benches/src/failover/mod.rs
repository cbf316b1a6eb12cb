//! Failover and graceful migration through a whole pod: real daemons, a real controller, cables that are pulled out of a
//! bridge.
//!
//! UDP round trips go to a guest without a VM, since an emulated one would hide much; TCP goes to memcached in a real guest,
//! whose kernel has the retransmission timers that count. Interruptions are measured at the client and include
//! everything from the cable to the new port of the switch; beside them stands from when on the NIC's host could know.

mod sight;
mod summary;
mod tcp;
mod udp;

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use clap::Args;
use guest_images::{Guest, Silent};
use pod_api::{CreateInstance, DeviceHealth, Instance, NicRequest};
use vhost_frontend::mock::EchoGuest;
use wadi_tests::pod::{GUEST_ADDRESS, HostPlan, Pod, PodBuilder, VmShape};

use self::sight::Sight;
use self::summary::Measured;

/// How long the pod may take to be ready for the next round.
const READY: Duration = Duration::from_secs(20);
/// Before a round, so that what the last one began has ended.
const CALM: Duration = Duration::from_millis(500);

/// Failover: packets and time lost when a cable is pulled; nothing lost when a lease is moved.
#[derive(Args, Clone, Debug)]
pub(crate) struct Options {
    /// Rounds of each kind.
    #[arg(long, default_value_t = 10)]
    rounds: u32,
    /// Length of a round in seconds; what is measured happens in its middle.
    #[arg(long, default_value_t = 10.0, value_name = "SECONDS")]
    seconds: f64,
    /// Datagrams per second. More keep two cores so busy that the time at which somebody runs is what is measured.
    #[arg(long, default_value_t = 1000)]
    rate: u32,
    /// Connections to memcached; 0 leaves it, and with it the real guest, out.
    #[arg(long, default_value_t = 4)]
    connections: u16,
}

impl Default for Options {
    fn default() -> Self {
        Self { rounds: 10, seconds: 10.0, rate: 1000, connections: 4 }
    }
}

impl Options {
    /// Shorter rounds, for a run of all benchmarks.
    pub(crate) fn short() -> Self {
        Self { seconds: 4.0, ..Self::default() }
    }
}

/// Runs it all.
pub(crate) fn run(options: &Options, output: &Path) -> Result<()> {
    if options.rounds == 0 || options.rate == 0 || !(1.0..=3600.0).contains(&options.seconds) {
        bail!("use at least one round, one datagram per second, and 1 to 3600 seconds");
    }
    let mut measured = Measured::default();
    udp_rounds(options, &mut measured)?;
    rail_rounds(options, &mut measured)?;
    if options.connections > 0 {
        tcp_rounds(options, &mut measured)?;
    }
    summary::show(&measured, options.rate, output)
}

fn pod() -> Result<Pod> {
    PodBuilder::new()
        .coherence("hardware")
        .host(HostPlan::new("h1").vms())
        .host(HostPlan::new("h2").nic("nic0"))
        .host(HostPlan::new("h3").backup_nic("nic1"))
        .start()
}

/// The NIC in use, as host and name, and the other one.
fn nics(pod: &Pod) -> Result<[(&'static str, &'static str); 2]> {
    let both = [("h2", "nic0"), ("h3", "nic1")];
    let now = &pod.api().instance("vm1")?.nics[0].nic;
    Ok(if now == "h2/nic0" { both } else { [both[1], both[0]] })
}

/// Waits until both NICs work and nothing is on its way, then a little.
fn settle(pod: &Pod) -> Result<()> {
    let started = Instant::now();
    loop {
        let devices = pod.api().devices()?;
        let up = devices.iter().filter(|device| device.health == DeviceHealth::Up).count();
        if up == 2 && pod.api().instance("vm1")?.nics[0].draining.is_none() {
            thread::sleep(CALM);
            return Ok(());
        }
        if started.elapsed() > READY {
            bail!("the NICs are not ready after {} s: {devices:?}", READY.as_secs());
        }
        thread::sleep(Duration::from_millis(20));
    }
}

/// What happens in the middle of a round.
#[derive(Clone, Copy)]
enum Event {
    Nothing,
    PulledCable,
    Migration,
}

fn udp_rounds(options: &Options, measured: &mut Measured) -> Result<()> {
    let pod = pod()?;
    let instance = pod.create_instance("vm1", "h1", &[])?;
    let _guest = echo(&pod, &instance)?;
    let length = Duration::from_secs_f64(options.seconds);
    let interval = Duration::from_secs(1) / options.rate;
    for round in 0..options.rounds {
        for event in [Event::Nothing, Event::PulledCable, Event::Migration] {
            settle(&pod)?;
            let [active, other] = nics(&pod)?;
            let sight = Sight::begin(&pod, active.0)?;
            let mut pulled = None;
            let mut seen = udp::round(pod.client_namespace(), length, interval, || match event {
                Event::Nothing => Ok(()),
                Event::PulledCable => {
                    pulled = Some(Instant::now());
                    pod.pull_cable(active.0, active.1)
                }
                Event::Migration => {
                    Ok(pod.api().migrate_nic("vm1", "net0", Some(&format!("{}/{}", other.0, other.1)))?)
                }
            })?;
            if let (Some(pulled), Some(visible)) = (pulled, sight.seen()) {
                seen.became_visible(pulled, visible);
            }
            eprintln!(
                "round {}: {} of {} lost, {:?}, of which {:?} since its host could know",
                round + 1,
                seen.lost,
                seen.sent,
                seen.interruption,
                seen.since_visible.unwrap_or_default()
            );
            match event {
                Event::Nothing => measured.undisturbed.push(seen),
                Event::PulledCable => {
                    pod.plug_cable(active.0, active.1)?;
                    measured.failovers.push(seen);
                }
                Event::Migration => measured.migrations.push(seen),
            }
        }
    }
    Ok(())
}

/// A guest that answers datagrams and nothing else, so the client is told where it is.
fn echo(pod: &Pod, instance: &Instance) -> Result<EchoGuest> {
    let nic = &instance.nics[0];
    let guest = EchoGuest::start(Path::new(&nic.socket));
    let neighbour =
        ["neighbour", "add", GUEST_ADDRESS, "lladdr", &nic.mac, "dev", "eth0", "nud", "permanent"];
    pod.client_namespace().ip(&neighbour)?;
    Ok(guest)
}

/// As the others, but the guest uses both NICs at the same time: the cable is pulled over which its flow goes.
fn rail_rounds(options: &Options, measured: &mut Measured) -> Result<()> {
    let pod = PodBuilder::new()
        .coherence("hardware")
        .host(HostPlan::new("h1").vms())
        .host(HostPlan::new("h2").nic("nic0").in_group("rack1"))
        .host(HostPlan::new("h3").nic("nic1").in_group("rack1"))
        .start()?;
    let instance = pod.create_instance_as(&CreateInstance {
        name: "vm1".to_owned(),
        host: "h1".to_owned(),
        nics: vec![NicRequest { rails: Some(2), ..NicRequest::default() }],
        ..CreateInstance::default()
    })?;
    let _guest = echo(&pod, &instance)?;
    let length = Duration::from_secs_f64(options.seconds);
    let interval = Duration::from_secs(1) / options.rate;
    for round in 0..options.rounds {
        settle(&pod)?;
        let mut pulled = None;
        let seen = udp::round(pod.client_namespace(), length, interval, || {
            let (host, nic) = pod.cable_towards(&instance.nics[0].mac)?;
            pulled = Some((host.clone(), nic.clone()));
            pod.pull_cable(&host, &nic)
        })?;
        if let Some((host, nic)) = pulled {
            pod.plug_cable(&host, &nic)?;
            // Pulled that often, it would be held otherwise.
            let _ = pod.api().release_link(&host, &nic);
        }
        eprintln!("rails, round {}: {} of {} lost, {:?}", round + 1, seen.lost, seen.sent, seen.interruption);
        measured.rails.push(seen);
    }
    Ok(())
}

fn tcp_rounds(options: &Options, measured: &mut Measured) -> Result<()> {
    let image = Guest::ensure(&mut Silent)?;
    let pod = pod()?;
    let instance = pod.create_instance("vm1", "h1", &[])?;
    let vm = pod.boot(&instance, &image, VmShape::default())?;
    tcp::serve(&vm)?;
    let length = Duration::from_secs_f64(options.seconds);
    let load = (options.connections, length, Duration::from_millis(2));
    for round in 0..options.rounds {
        settle(&pod)?;
        let [active, _] = nics(&pod)?;
        let seen = tcp::round(pod.client_namespace(), &vm, load, || pod.pull_cable(active.0, active.1))?;
        pod.plug_cable(active.0, active.1)?;
        eprintln!(
            "memcached, round {}: P99 {:?} before, back after {:?}, {} timers",
            round + 1,
            seen.before().unwrap_or_default(),
            seen.back_after().unwrap_or_default(),
            seen.timers
        );
        measured.tcp.push(seen);
    }
    Ok(())
}
