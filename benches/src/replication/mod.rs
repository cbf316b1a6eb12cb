//! `replication`: how long a pod is without a controller that decides, when the one that leads dies.

mod host;
mod pod;

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use comfy_table::{CellAlignment, Table, presets};
use pod_api::{CreateInstance, DeviceHealth, EndpointHealth, EventKind, InstanceTypeSpec, NicRequest};
use pod_protocol::config::RunSection;
use pod_protocol::objects::Object;
use pod_protocol::reports::Report;

use self::host::Host;
use self::pod::{Pod, REPLICAS, until};
use crate::plot::{self, Panel, Series};
use crate::report::{self, Figure, Goal, median};

/// What a failure of a device that a live backend reports may cost in all, with the leader's death at the same time.
const GOAL_MS: f64 = 300.0;
/// How long it may take until a host counts as failed.
const DETECTION_GOAL_MS: f64 = 350.0;

/// The time without a leader: three controllers as processes over a pool, of which the leader is killed (`kill -9`).
///
/// `change`: nothing else happens, and a change is asked of another controller at once; until it is answered. `failover`: a NIC
/// loses its link in the same moment; until the frontend is told of the other NIC. `led`: the same failure while the
/// leader lives. `host`: all four daemons of a host are killed, whose NIC the instance uses; until all of them count as silent, with the
/// default `detect-ms`, and until the frontend is told of another NIC, which has to wait for the default `fence-ms` too. The other hosts'
/// daemons have no engines.
#[derive(Args)]
pub(crate) struct Options {
    /// Rounds of each kind.
    #[arg(long, default_value_t = 20)]
    rounds: u32,
    /// The controllers' `heartbeat-ms`.
    #[arg(long, default_value_t = 25, value_name = "MILLISECONDS")]
    heartbeat_ms: u64,
    /// The controllers' `election-ms`.
    #[arg(long, default_value_t = 120, value_name = "MILLISECONDS")]
    election_ms: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self { rounds: 20, heartbeat_ms: 25, election_ms: 120 }
    }
}

/// What happens in a round.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Change,
    Failover,
    Led,
    Host,
    /// The same death, until others act upon it.
    HostTold,
}

impl Kind {
    const ALL: [Self; 5] = [Self::Led, Self::Change, Self::Failover, Self::Host, Self::HostTold];

    const fn name(self) -> &'static str {
        match self {
            Self::Change => "leader killed: next change answered",
            Self::Failover => "leader killed, NIC fails: frontend told",
            Self::Led => "NIC fails: frontend told",
            Self::Host => "host killed: its failure known",
            Self::HostTold => "host killed, without fence-ms: frontend told",
        }
    }
}

/// Runs it all.
pub(crate) fn run(options: &Options, output: &Path) -> Result<()> {
    ensure!(options.rounds > 0, "use at least one round");
    let mut pod = Pod::start(options.heartbeat_ms, options.election_ms, output)?;
    let request = CreateInstance {
        name: "vm1".to_owned(),
        host: "h1".to_owned(),
        nics: vec![NicRequest::default()],
        volumes: Vec::new(),
        ..CreateInstance::default()
    };
    pod.client(0)?.create_instance(&request, Duration::from_secs(10))?;
    let mut took: [Vec<f64>; 5] = Default::default();
    for round in 0..options.rounds {
        let mut found = Vec::new();
        for kind in [Kind::Led, Kind::Change, Kind::Failover] {
            found.push(one(&mut pod, kind, round)?);
        }
        let (known, told) = kill_a_host(&pod)?;
        found.extend([known, told.saturating_sub(fence())]);
        for ((kind, it), took) in Kind::ALL.into_iter().zip(found).zip(&mut took) {
            let ms = it.as_secs_f64() * 1e3;
            eprintln!("round {}: {}: {ms:.1} ms", round + 1, kind.name());
            took.push(ms);
        }
    }
    show(options, &took, output)
}

/// One round, from the death or the failure on.
fn one(pod: &mut Pod, kind: Kind, round: u32) -> Result<Duration> {
    let leader = pod.leader(usize::from(REPLICAS))?;
    let follower = pod.client((leader + 1) % REPLICAS)?;
    let (host, name) = until("the NIC", || {
        let nic = follower.instance("vm1").ok()?.nics.first()?.nic.clone();
        nic.split_once('/').map(|(host, name)| (host.to_owned(), name.to_owned()))
    })?;
    // What was told before is not what is waited for.
    while pod.frontend().told.try_recv().is_ok() {}
    let link = |up, reason: &str| Report::Link { device: name.clone(), up, reason: reason.to_owned() };
    let took = match kind {
        Kind::Change => {
            let killed = pod.kill(leader)?;
            let spec =
                InstanceTypeSpec { reserved_mbps: u64::from(round) + 1, ..InstanceTypeSpec::default() };
            until("a change", || follower.set_instance_type("small", &spec).ok())?;
            killed.elapsed()
        }
        Kind::Failover | Kind::Led => {
            let began = if kind == Kind::Failover { pod.kill(leader)? } else { Instant::now() };
            pod.nic(&host).reporter.report(link(false, "carrier"));
            let told = until("the failover", || {
                pod.frontend().told.try_iter().find(|(_, object)| matches!(object, Object::Port(_)))
            })?;
            told.0.saturating_duration_since(began)
        }
        Kind::Host | Kind::HostTold => bail!("a host's death is a round of its own"),
    };
    if kind != Kind::Led {
        pod.start_controller(leader, false)?;
    }
    let leader = pod.leader(usize::from(REPLICAS))?;
    if kind != Kind::Change {
        pod.nic(&host).reporter.report(link(true, ""));
        let client = pod.client(leader)?;
        until("the link", || (client.device(&host, &name).ok()?.health == DeviceHealth::Up).then_some(()))?;
    }
    Ok(took)
}

/// For how long whoever may still act is waited for.
fn fence() -> Duration {
    Duration::from_millis(RunSection::default().fence_ms)
}

/// A round in which a host dies, and the controllers live. How long it takes until that is known, and until the frontend of an instance
/// whose NIC was there is told of another one.
fn kill_a_host(pod: &Pod) -> Result<(Duration, Duration)> {
    let leader = pod.leader(usize::from(REPLICAS))?;
    let (host, client) = (pod.start_host()?, pod.client(leader)?);
    until("the host's daemons", || {
        let endpoints = client.host(host::NAME).ok()?.endpoints;
        let joined = endpoints.iter().filter(|it| it.health == EndpointHealth::Joined).count();
        (joined == Host::daemons()).then_some(())
    })?;
    let of_it = |subject: &str| subject.split('/').next() == Some(host::NAME);
    client.migrate_nic("vm1", "net0", Some(&format!("{}/nic0", host::NAME)))?;
    until("the instance on that host", || {
        let instance = client.instance("vm1").ok()?;
        let nic = instance.nics.first()?;
        (of_it(&nic.nic) && nic.draining.is_none() && nic.backup.is_some() && instance.ready).then_some(())
    })?;
    let route = pod.frontend().told.try_iter().filter_map(|(_, object)| match object {
        Object::Port(port) => Some(port.active),
        _ => None,
    });
    let route = route.last().context("the frontend was not told of the NIC of that host")?;
    let before = client.events(0)?.events.last().map_or(0, |event| event.sequence);
    let killed = host.kill()?;
    until("its failure", || {
        let events = client.events(before).ok()?.events;
        let silent = events.iter().filter(|it| it.kind == EventKind::EndpointSilent && of_it(&it.subject));
        (silent.count() == Host::daemons()).then_some(())
    })?;
    let known = killed.elapsed();
    // What it was told of in between may be that the NIC does not answer.
    let told = until("another NIC", || {
        pod.frontend()
            .told
            .try_iter()
            .find(|(_, object)| matches!(object, Object::Port(port) if port.active.channel != route.channel))
    })?;
    Ok((known, told.0.saturating_duration_since(killed)))
}

fn show(options: &Options, took: &[Vec<f64>; 5], output: &Path) -> Result<()> {
    let worst = |values: &[f64]| values.iter().copied().fold(0.0, f64::max);
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header(["event", "rounds", "median [ms]", "worst [ms]"]);
    let mut figures = Vec::new();
    for (kind, values) in Kind::ALL.into_iter().zip(took) {
        let middle = median(values.iter().copied()).unwrap_or_default();
        table.add_row([
            kind.name().to_owned(),
            values.len().to_string(),
            format!("{middle:.1}"),
            format!("{:.1}", worst(values)),
        ]);
        let mut figure = Figure::new(format!("{}, median", kind.name()), middle, "ms");
        let mut longest = Figure::new(format!("{}, worst", kind.name()), worst(values), "ms");
        let goal = match kind {
            Kind::Failover => Some(GOAL_MS),
            Kind::Host => Some(DETECTION_GOAL_MS),
            Kind::Led | Kind::Change | Kind::HostTold => None,
        };
        if let Some(goal) = goal {
            figure = figure.with_goal(Goal::AtMost(goal));
            longest = longest.with_goal(Goal::AtMost(goal));
        }
        figures.extend([figure, longest]);
    }
    figures.push(Figure::new("host killed: of that, fence-ms".to_owned(), fence().as_secs_f64() * 1e3, "ms"));
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    println!(
        "\nThree controllers, heartbeat-ms = {}, election-ms = {}; fence-ms = {}, which comes on top\n{table}\n",
        options.heartbeat_ms,
        options.election_ms,
        fence().as_millis()
    );
    report::print_goals(&figures);
    let sorted = |values: &[f64]| {
        let mut values = values.to_vec();
        values.sort_by(f64::total_cmp);
        (1..).map(f64::from).zip(values).collect()
    };
    let series = Kind::ALL
        .into_iter()
        .zip(took)
        .map(|(kind, values)| Series { dashed: false, name: kind.name().to_owned(), points: sorted(values) })
        .collect();
    let panel = Panel { title: "Each round".to_owned(), x_label: "round, sorted", y_label: "ms", series };
    report::write(&output.join("replication.svg"), &plot::svg(&[panel]))?;
    report::write_figures(&output.join("replication.json"), &figures)
}
