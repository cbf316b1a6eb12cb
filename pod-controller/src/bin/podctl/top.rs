//! `podctl top`: who is there, and what passes through it per second.

mod live;
mod sample;
mod screen;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{IsTerminal, Write};
use std::thread::sleep;
use std::time::{Duration, Instant};

use pod_api::client::Client;
use pod_api::{Device, DeviceHealth, DeviceKind, ElementLoad, EndpointHealth, Host, Instance, Mchannel};
use serde::Serialize;

use crate::Failure;
use crate::arguments::{Output, Top};
use crate::show::show;
use crate::table::{device_health, plain};
use crate::watch;
pub(crate) use live::run as live;
use sample::{Rates, Sample};

/// What passed through something in a second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
struct Rate {
    /// Bytes to instances: received, or read.
    in_bytes: f64,
    /// Bytes from instances: sent, or written.
    out_bytes: f64,
    /// Frames or requests, both ways.
    operations: f64,
}

#[derive(Debug, Serialize)]
struct DeviceLine {
    device: String,
    health: DeviceHealth,
    leases: u32,
    rate: Rate,
    /// Of a NIC: how much of its speed the busier direction uses.
    #[serde(skip_serializing_if = "Option::is_none")]
    used_percent: Option<f64>,
}

#[derive(Debug, Serialize)]
struct InstanceLine {
    instance: String,
    host: String,
    network: Rate,
    storage: Rate,
}

#[derive(Debug, Serialize)]
struct MchannelLine {
    instance: String,
    /// Bytes/s that it moved to and from the pool.
    moves: f64,
    /// Bytes/s that it would, if nothing held it back.
    demand: u64,
    /// Bytes/s that it may; absent while nobody has to be held back.
    #[serde(skip_serializing_if = "Option::is_none")]
    share: Option<u64>,
    /// T_R/T_W.
    run_percent: u32,
    /// Of the time, summed over its devices.
    held_percent: f64,
    /// T_R/T_W of its vCPUs; absent while nobody holds them.
    #[serde(skip_serializing_if = "Option::is_none")]
    vcpus_run_percent: Option<u32>,
    /// Of the time, summed over its vCPUs.
    slept_percent: f64,
}

/// All that is shown of a moment.
#[derive(Debug, Serialize)]
struct Picture {
    hosts: usize,
    /// Hosts of which a daemon does not beat.
    hosts_silent: Vec<String>,
    /// Why nothing is known of loads, if so.
    #[serde(skip_serializing_if = "Option::is_none")]
    unknown_here: Option<String>,
    devices: Vec<DeviceLine>,
    instances: Vec<InstanceLine>,
    /// Instances that have a share of the fabric.
    mchannels: Vec<MchannelLine>,
    /// Elements of the fabric that hosts look at, and how loaded they are.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    fabric: BTreeMap<String, ElementLoad>,
}

/// What comes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    Busiest,
    Name,
}

/// Whether it is for somebody at a terminal, who can see it change.
pub(crate) fn fills_screen(top: &Top, format: Output) -> bool {
    let is_for_people = matches!(format, Output::Table | Output::Wide);
    is_for_people && !top.once && std::io::stdin().is_terminal() && std::io::stdout().is_terminal()
}

/// Shows the load, once or until somebody interrupts it.
pub(crate) fn run(client: &Client, top: &Top, format: Output, out: &mut dyn Write) -> Result<(), Failure> {
    let every = Duration::from_secs_f64(top.interval);
    let mut pictures = Pictures::begin(client)?;
    sleep(every);
    let mut render =
        |out: &mut Vec<u8>| show(out, format, &pictures.next(client)?, |picture| text(picture, top.lines));
    if top.once {
        let mut shown = Vec::new();
        render(&mut shown)?;
        return Ok(out.write_all(&shown)?);
    }
    watch::repeat(every, out, render)
}

/// Pictures of one moment after the other.
struct Pictures {
    /// What was counted at the last one, unless that could not be seen.
    before: Option<Sample>,
}

impl Pictures {
    fn begin(client: &Client) -> Result<Self, Failure> {
        Ok(Self { before: Some(look(client)?) })
    }

    /// What there is now, and what passed since the last one.
    fn next(&mut self, client: &Client) -> Result<Picture, Failure> {
        let before = self.before.take();
        let now = look(client)?;
        let picture = picture(client, &Rates::between(before.as_ref().unwrap_or(&now), &now))?;
        self.before = Some(now);
        Ok(picture)
    }
}

fn look(client: &Client) -> Result<Sample, Failure> {
    let text = client.metrics_of_leader()?;
    Ok(Sample::read(Instant::now(), &text))
}

fn picture(client: &Client, rates: &Rates) -> Result<Picture, Failure> {
    let (hosts, devices, instances) = (client.hosts()?, client.devices()?, client.instances()?);
    let is_silent = |host: &&Host| host.endpoints.iter().any(|it| it.health != EndpointHealth::Joined);
    let mut picture = Picture {
        hosts: hosts.len(),
        hosts_silent: hosts.iter().filter(is_silent).map(|host| host.name.clone()).collect(),
        unknown_here: client.balance()?.unknown_here,
        devices: devices.iter().map(|device| device_line(device, rates)).collect(),
        instances: instances.iter().map(|it| instance_line(it, rates)).collect(),
        mchannels: client.mchannels()?.into_iter().map(|it| mchannel_line(it, rates)).collect(),
        fabric: client.fabric()?.loads,
    };
    // Counters, which were read before, and all of the above may be missing, each by itself.
    picture.unknown_here = client.take_unmeasured().or(picture.unknown_here);
    picture.sort(Order::Busiest);
    Ok(picture)
}

impl Picture {
    /// What is alike comes in the order of its names.
    fn sort(&mut self, order: Order) {
        self.devices.sort_by(|a, b| a.device.cmp(&b.device));
        self.instances.sort_by(|a, b| a.instance.cmp(&b.instance));
        self.mchannels.sort_by(|a, b| a.instance.cmp(&b.instance));
        if order == Order::Busiest {
            let bytes = |rate: &Rate| rate.in_bytes + rate.out_bytes;
            let all = |it: &InstanceLine| bytes(&it.network) + bytes(&it.storage);
            self.devices.sort_by(|a, b| bytes(&b.rate).total_cmp(&bytes(&a.rate)));
            self.instances.sort_by(|a, b| all(b).total_cmp(&all(a)));
            self.mchannels.sort_by(|a, b| b.moves.total_cmp(&a.moves));
        }
    }
}

fn device_line(device: &Device, rates: &Rates) -> DeviceLine {
    let of = |metric: &str, labels: &[(&str, &str)]| {
        let mut labels = labels.to_vec();
        labels.push(("device", &device.name));
        rates.per_second(metric, &labels)
    };
    let (rate, used_percent) = match &device.kind {
        DeviceKind::Nic { speed_mbps, .. } => {
            let rate = Rate {
                in_bytes: of("wadi_device_bytes_total", &[("direction", "receive")]),
                out_bytes: of("wadi_device_bytes_total", &[("direction", "transmit")]),
                operations: of("wadi_device_packets_total", &[]),
            };
            let busier = rate.in_bytes.max(rate.out_bytes) * 8.0 / 1e6;
            #[expect(clippy::cast_precision_loss, reason = "no NIC has 2^53 Mbit/s")]
            let used = (*speed_mbps > 0).then(|| 100.0 * busier / *speed_mbps as f64);
            (rate, used)
        }
        DeviceKind::Ssd { .. } => {
            let rate = Rate {
                in_bytes: of("wadi_device_bytes_total", &[("direction", "read")]),
                out_bytes: of("wadi_device_bytes_total", &[("direction", "write")]),
                operations: of("wadi_device_operations_total", &[]),
            };
            (rate, None)
        }
    };
    DeviceLine {
        device: device.name.clone(),
        health: device.health,
        leases: device.leases,
        rate,
        used_percent,
    }
}

/// Frontends count what instances see; backends count the same again.
fn instance_line(instance: &Instance, rates: &Rates) -> InstanceLine {
    let endpoint = |role: &str| format!("{}/{role}", instance.host);
    let (net, blk) = (endpoint("net-frontend"), endpoint("blk-frontend"));
    let of = |metric: &str, endpoint: &str, direction: Option<&str>| {
        let mut labels = vec![("instance", instance.name.as_str()), ("endpoint", endpoint)];
        labels.extend(direction.map(|direction| ("direction", direction)));
        rates.per_second(metric, &labels)
    };
    let network = Rate {
        in_bytes: of("wadi_lease_bytes_total", &net, Some("receive")),
        out_bytes: of("wadi_lease_bytes_total", &net, Some("transmit")),
        operations: of("wadi_lease_packets_total", &net, None),
    };
    let storage = Rate {
        in_bytes: of("wadi_lease_bytes_total", &blk, Some("read")),
        out_bytes: of("wadi_lease_bytes_total", &blk, Some("write")),
        operations: of("wadi_lease_requests_total", &blk, None),
    };
    InstanceLine { instance: instance.name.clone(), host: instance.host.clone(), network, storage }
}

fn mchannel_line(it: Mchannel, rates: &Rates) -> MchannelLine {
    let of = |metric: &str| rates.per_second(metric, &[("instance", &it.instance)]);
    MchannelLine {
        moves: of("wadi_mchannel_bytes_total"),
        // Seconds in a second.
        held_percent: of("wadi_mchannel_held_seconds_total") * 100.0,
        slept_percent: of("wadi_mchannel_vcpu_slept_seconds_total") * 100.0,
        vcpus_run_percent: it.vcpus.map(|vcpus| vcpus.run_percent),
        instance: it.instance,
        demand: it.demand,
        share: it.share,
        run_percent: it.run_percent,
    }
}

fn text(picture: &Picture, lines: usize) -> String {
    let silent = match picture.hosts_silent.as_slice() {
        [] => String::new(),
        silent => format!(" ({} with a silent daemon)", silent.join(", ")),
    };
    let mut shown = format!(
        "{} hosts{silent}, {} devices, {} instances\n\n",
        picture.hosts,
        picture.devices.len(),
        picture.instances.len()
    );
    if let Some(why) = &picture.unknown_here {
        shown.push_str(why);
        shown.push_str("\n\n");
    }
    let rows = picture.devices.iter().take(lines).map(|it| {
        vec![
            it.device.clone(),
            device_health(it.health).to_owned(),
            it.leases.to_string(),
            amount(it.rate.in_bytes),
            amount(it.rate.out_bytes),
            count(it.rate.operations),
            it.used_percent.map_or_else(|| "-".to_owned(), |used| format!("{used:.1} %")),
        ]
    });
    let header = ["device", "health", "leases", "in/s", "out/s", "ops/s", "used"];
    shown.push_str(&plain(&header, &[2, 3, 4, 5, 6], rows.collect()));
    rest(&mut shown, picture.devices.len(), lines);
    let rows = picture.instances.iter().take(lines).map(|it| {
        vec![
            it.instance.clone(),
            it.host.clone(),
            amount(it.network.in_bytes),
            amount(it.network.out_bytes),
            count(it.network.operations),
            amount(it.storage.in_bytes),
            amount(it.storage.out_bytes),
            count(it.storage.operations),
        ]
    });
    let header =
        ["instance", "host", "received/s", "sent/s", "packets/s", "read/s", "written/s", "requests/s"];
    let table = plain(&header, &[2, 3, 4, 5, 6, 7], rows.collect());
    let _ = write!(shown, "\n\n{table}");
    rest(&mut shown, picture.instances.len(), lines);
    if !picture.mchannels.is_empty() {
        let rows = picture.mchannels.iter().take(lines).map(|it| {
            #[expect(clippy::cast_precision_loss, reason = "three digits are shown")]
            let exact = |bytes: u64| bytes as f64;
            vec![
                it.instance.clone(),
                amount(it.moves),
                amount(exact(it.demand)),
                it.share.map_or_else(|| "free".to_owned(), |share| amount(exact(share))),
                format!("{} %", it.run_percent),
                format!("{:.1} %", it.held_percent),
                it.vcpus_run_percent.map_or_else(|| "-".to_owned(), |run| format!("{run} %")),
                it.vcpus_run_percent.map_or_else(|| "-".to_owned(), |_| format!("{:.1} %", it.slept_percent)),
            ]
        });
        let header = [
            "shares of the fabric",
            "moves/s",
            "demand/s",
            "share/s",
            "runs",
            "held back",
            "vcpus run",
            "slept",
        ];
        let _ = write!(shown, "\n\n{}", plain(&header, &[1, 2, 3, 4, 5, 6, 7], rows.collect()));
        rest(&mut shown, picture.mchannels.len(), lines);
    }
    // On one line: it is there as a whole however short the tables are.
    for (position, (name, load)) in picture.fabric.iter().enumerate() {
        #[expect(clippy::cast_precision_loss, reason = "three digits are shown")]
        let capacity = amount(load.capacity as f64);
        let level = load.level.map_or_else(|| "unknown load".to_owned(), |level| level.to_string());
        let between = if position == 0 { "\n\nfabric: " } else { ", " };
        let _ = write!(shown, "{between}{name} carries {capacity}/s ({level})");
    }
    shown
}

/// Says how many more there are.
fn rest(shown: &mut String, there: usize, lines: usize) {
    if there > lines {
        let _ = write!(shown, "\n… and {} more", there - lines);
    }
}

pub(crate) fn amount(bytes: f64) -> String {
    let units = ["B", "kB", "MB", "GB"];
    let mut value = bytes.max(0.0);
    let mut unit = 0;
    while value >= 1000.0 && unit + 1 < units.len() {
        value /= 1000.0;
        unit += 1;
    }
    if unit == 0 { format!("{value:.0} {}", units[unit]) } else { format!("{value:.1} {}", units[unit]) }
}

fn count(per_second: f64) -> String {
    if per_second >= 1e6 { format!("{:.1} M", per_second / 1e6) } else { format!("{per_second:.0}") }
}

#[cfg(test)]
mod tests {
    use pod_api::LoadLevel;

    use super::*;

    #[test]
    fn load_is_shown_busiest_first_and_cut() {
        let line = |device: &str, in_bytes: f64, used_percent| DeviceLine {
            device: device.to_owned(),
            health: DeviceHealth::Up,
            leases: 1,
            rate: Rate { in_bytes, out_bytes: 0.0, operations: 1500.0 },
            used_percent,
        };
        let picture = Picture {
            hosts: 2,
            hosts_silent: vec!["h2".to_owned()],
            unknown_here: None,
            devices: vec![line("h2/nic0", 1.25e9, Some(100.0)), line("h2/ssd0", 999.0, None)],
            instances: Vec::new(),
            mchannels: vec![MchannelLine {
                instance: "vm1".to_owned(),
                moves: 75e6,
                demand: 100_000_000,
                share: Some(75_000_000),
                run_percent: 75,
                held_percent: 24.96,
                vcpus_run_percent: Some(12),
                slept_percent: 87.54,
            }],
            fabric: BTreeMap::new(),
        };
        let shown = text(&picture, 10);
        let lines: Vec<&str> = shown.lines().collect();
        assert_eq!(lines[0], "2 hosts (h2 with a silent daemon), 2 devices, 0 instances");
        assert_eq!(lines[3], "h2/nic0  up           1  1.2 GB    0 B   1500  100.0 %");
        assert_eq!(lines[4], "h2/ssd0  up           1   999 B    0 B   1500        -");
        assert_eq!(
            lines[lines.len() - 1],
            "vm1                   75.0 MB  100.0 MB  75.0 MB  75 %     25.0 %       12 %  87.5 %"
        );
        assert!(text(&picture, 1).contains("… and 1 more"), "{}", text(&picture, 1));
        let load = ElementLoad { level: Some(LoadLevel::Severe), capacity: 15_000_000_000 };
        let unknown = ElementLoad { level: None, ..load.clone() };
        let fabric = [("pool".to_owned(), load), ("port1".to_owned(), unknown)].into();
        let loaded = Picture { fabric, ..picture };
        let said = "fabric: pool carries 15.0 GB/s (severe overload), port1 carries 15.0 GB/s (unknown load)";
        assert_eq!(text(&loaded, 10).lines().last(), Some(said));
        let picture = loaded;
        let why = "ask controller replica 1".to_owned();
        let elsewhere = text(&Picture { unknown_here: Some(why.clone()), ..picture }, 10);
        assert_eq!(elsewhere.lines().nth(2), Some(why.as_str()), "{elsewhere}");
    }
}
