//! How many devices a pod needs, found by trying: its instances, as they come and go on their hosts, are placed by the
//! controller's state machine, which refuses what does not fit.

use anyhow::{Result, anyhow, bail};
use cxl_pool::{Area, EndpointId, HostId, LineCount, LineOffset, REGION_SLOTS_MOST, Role};
use pod_protocol::protocol::Protocol;
use pod_protocol::reports::{DeviceReport, Join};
use pod_state::{
    Command, Filling, Groups, NIC_LEASES_MAX, NicWish, Options, PlacementPolicy, RefusalKind, State,
};
use uuid::Uuid;

use super::schedule::Placed;

/// NICs that a host would have of its own, and what each can do.
pub(super) const NICS: usize = 2;
const NIC_MBPS: f64 = 100_000.0;
/// SSDs that a host would have of its own, and what each can hold.
pub(super) const SSDS: usize = 4;
const SSD_BYTES: f64 = 960e9;
/// The most of a device that is asked of it in one piece: the smaller, the fewer devices do, and the more of them a VM has.
const PIECE_MAX: f64 = 0.25;
const MIB: f64 = 1_048_576.0;

/// What is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Device {
    Nic,
    Ssd,
}

/// A VM comes or goes.
#[derive(Clone, Copy, Debug)]
struct Event {
    at: f64,
    comes: bool,
    number: usize,
}

/// How many devices a pod needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Needed {
    /// For all that is used at a time, if it could be cut as one likes.
    pub(super) at_least: usize,
    /// Where devices are filled one after the other.
    pub(super) packed: usize,
    /// Where load is spread.
    pub(super) spread: usize,
}

/// The least number of devices with which everything on these hosts is placed.
pub(super) fn needed(device: Device, placed: &[Placed], hosts: &[usize]) -> Result<Needed> {
    let here: Vec<&Placed> = placed.iter().filter(|it| hosts.contains(&it.host)).collect();
    let mut events: Vec<Event> = Vec::new();
    for (number, it) in here.iter().enumerate() {
        events.push(Event { at: it.start, comes: true, number });
        events.push(Event { at: it.end, comes: false, number });
    }
    // Who goes makes room for who comes at the same moment.
    events.sort_by(|a, b| a.at.total_cmp(&b.at).then(a.comes.cmp(&b.comes)).then(a.number.cmp(&b.number)));
    let part = |it: &Placed| if device == Device::Nic { it.parts.nic } else { it.parts.ssd };
    let own = if device == Device::Nic { NICS } else { SSDS };
    let (mut now, mut most) = (0.0_f64, 0.0_f64);
    for event in &events {
        now += if event.comes { part(here[event.number]) } else { -part(here[event.number]) };
        most = most.max(now);
    }
    // Fewer than would hold the peak cannot do.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "a small count"
    )]
    let least = ((most * own as f64 - 1e-6).ceil() as usize).max(1);
    let with = |filling: Filling| {
        for count in least..=2 * own * hosts.len() {
            if place_all((device, count, filling), &here, &events, hosts)? {
                return Ok(count);
            }
        }
        bail!("{hosts:?} need more than twice the devices that they have")
    };
    Ok(Needed { at_least: least, packed: with(Filling::Pack)?, spread: with(Filling::Spread)? })
}

/// Whether everything is placed with so many devices.
fn place_all(
    (device, count, filling): (Device, usize, Filling),
    here: &[&Placed],
    events: &[Event],
    hosts: &[usize],
) -> Result<bool> {
    let mut pod = Pod::new((device, count, filling), hosts.len())?;
    for event in events {
        let it = here[event.number];
        let host = hosts.iter().position(|host| *host == it.host).unwrap_or(0);
        if !event.comes {
            pod.remove(event.number)?;
        } else if !pod.add(event.number, host, it)? {
            return Ok(false);
        }
    }
    Ok(true)
}

struct Pod {
    state: State,
    device: Device,
    /// How many volumes each VM has.
    volumes: Vec<(usize, usize)>,
}

impl Pod {
    fn new((device, count, filling): (Device, usize, Filling), hosts: usize) -> Result<Self> {
        let mut state = State::new(options(filling));
        for host in 0..hosts {
            let own = (0..count).filter(|number| number % hosts == host);
            let (roles, devices): ([Role; 2], Vec<DeviceReport>) = match device {
                Device::Nic => ([Role::NetFrontend, Role::NetBackend], own.map(nic).collect()),
                Device::Ssd => ([Role::BlkFrontend, Role::BlkBackend], own.map(ssd).collect()),
            };
            for role in roles {
                let owns = matches!(role, Role::NetBackend | Role::BlkBackend);
                let endpoint = EndpointId::new(host_id(host)?, role);
                let join = Join {
                    host_name: format!("h{}", host + 1),
                    software: "bench 1".to_owned(),
                    pid: 1,
                    devices: if owns { devices.clone() } else { Vec::new() },
                    memory_failures: Vec::new(),
                    fence_ms: None,
                };
                must(&mut state, &Command::Join { endpoint, incarnation: 1, join })?;
            }
        }
        Ok(Self { state, device, volumes: Vec::new() })
    }

    /// False if it was refused for want of room.
    fn add(&mut self, number: usize, host: usize, it: &Placed) -> Result<bool> {
        match self.device {
            Device::Nic => {
                #[expect(clippy::cast_precision_loss, reason = "a small count")]
                let pieces = pieces(it.parts.nic * NICS as f64);
                let wish =
                    |part: f64| NicWish { reserved_mbps: whole(part * NIC_MBPS), ..NicWish::default() };
                self.try_to(&Command::CreateInstance {
                    name: format!("vm{number}"),
                    host: host_id(host)?,
                    nics: pieces.into_iter().map(wish).collect(),
                    volumes: Vec::new(),
                    instance_type: None,
                    vmm_listens: false,
                    ram_bytes: None,
                    priority: None,
                })
            }
            Device::Ssd => {
                #[expect(clippy::cast_precision_loss, reason = "a small count")]
                let pieces = pieces(it.parts.ssd * SSDS as f64);
                self.volumes.push((number, pieces.len()));
                for (piece, part) in pieces.into_iter().enumerate() {
                    let command = Command::CreateVolume {
                        name: format!("vol{number}-{piece}"),
                        size_bytes: whole(part * SSD_BYTES / MIB) << 20,
                        device: None,
                        replicas: 1,
                        minimum_iops: None,
                        minimum_bytes_per_second: None,
                        groups: Groups::default(),
                    };
                    if !self.try_to(&command)? {
                        return Ok(false);
                    }
                }
                Ok(true)
            }
        }
    }

    fn remove(&mut self, number: usize) -> Result<()> {
        if self.device == Device::Nic {
            let name = format!("vm{number}");
            must(&mut self.state, &Command::DeleteInstance { name, force: true })?;
            return self.let_go();
        }
        let at = self.volumes.iter().position(|(known, _)| *known == number);
        let pieces = at.map_or(0, |at| self.volumes.swap_remove(at).1);
        for piece in 0..pieces {
            let name = format!("vol{number}-{piece}");
            let known = self.state.volume_named(&name).ok_or_else(|| anyhow!("{name} is not there"))?;
            let (volume, device) = (known.id, known.devices().next().cloned());
            must(&mut self.state, &Command::DeleteVolume { name })?;
            if let Some(device) = device {
                must(&mut self.state, &Command::VolumeWiped { device, volume })?;
            }
        }
        Ok(())
    }

    /// Everybody confirms what they have let go of.
    fn let_go(&mut self) -> Result<()> {
        let endpoints: Vec<EndpointId> = self.state.endpoints.keys().copied().collect();
        for endpoint in endpoints {
            let regions: Vec<_> = self.state.scrubs(endpoint).into_keys().collect();
            for region in regions {
                must(&mut self.state, &Command::Scrubbed { endpoint, incarnation: 1, region })?;
            }
        }
        Ok(())
    }

    fn try_to(&mut self, command: &Command) -> Result<bool> {
        match self.state.apply(command) {
            Ok(_) => Ok(true),
            Err(refusal) if refusal.kind == RefusalKind::NoRoom => Ok(false),
            Err(refusal) => Err(anyhow!("{command:?} was refused: {refusal}")),
        }
    }
}

fn must(state: &mut State, command: &Command) -> Result<()> {
    let applied = state.apply(command);
    applied.map(drop).map_err(|refusal| anyhow!("{command:?} was refused: {refusal}"))
}

/// What is more than a quarter of a device lies on several, in equal pieces: parts of a device each.
fn pieces(devices: f64) -> Vec<f64> {
    if devices < 1e-9 {
        return Vec::new();
    }
    let number = (devices / PIECE_MAX - 1e-9).ceil().max(1.0);
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a small count")]
    let count = number as usize;
    vec![devices / number; count]
}

fn whole(value: f64) -> u64 {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "sizes and rates are positive and small"
    )]
    let whole = value.floor().max(1.0) as u64;
    whole
}

fn host_id(host: usize) -> Result<HostId> {
    Ok(HostId::new(u16::try_from(host + 1)?))
}

fn nic(number: usize) -> DeviceReport {
    DeviceReport::Nic {
        name: format!("nic{number}"),
        driver: "null".to_owned(),
        mac: None,
        up: true,
        speed_mbps: whole(NIC_MBPS),
        mtu: 1500,
        features: 0,
        backup: false,
        lag: None,
    }
}

fn ssd(number: usize) -> DeviceReport {
    DeviceReport::Ssd {
        name: format!("ssd{number}"),
        driver: "null".to_owned(),
        size_bytes: whole(SSD_BYTES / MIB) << 20,
        block_bytes: 4096,
        discard_granularity_bytes: None,
        table: None,
        reserved_bytes: 0,
        identity: None,
        iops: None,
        bytes_per_second: None,
    }
}

/// A pool with room for everything: it is devices that are counted. Nothing is kept for the failure of a host, as in the paper.
fn options(filling: Filling) -> Options {
    Options {
        pool: Uuid::from_u128(1),
        data: Area { start: LineOffset::new(0), lines: LineCount::covering(1 << 40) },
        tx_area: LineCount::covering(1 << 20),
        rx_area: LineCount::covering(1 << 20),
        data_area: LineCount::covering(1 << 20),
        net_slots: 1024,
        blk_slots: 1024,
        rx_quota_buffers: 4096,
        disk_queues: 1,
        socket_name_bytes_max: 80,
        regions_max: REGION_SLOTS_MOST as usize,
        nic_leases_max: NIC_LEASES_MAX,
        placement: PlacementPolicy {
            prove_failover: false,
            nics: filling,
            ssds: filling,
            ..PlacementPolicy::default()
        },
        protocol_minor: Protocol::PACKS_DEVICES,
    }
}

#[cfg(test)]
mod tests {
    use super::super::trace::Parts;
    use super::*;

    fn vm(host: usize, start: f64, end: f64, ssd: f64, nic: f64) -> Placed {
        Placed { host, start, end, parts: Parts { cores: 0.1, memory: 0.1, ssd, nic } }
    }

    #[test]
    fn pods_need_what_their_hosts_need_together() {
        // Each host fills its devices, but not at the same time.
        let placed = [vm(0, 0.0, 1.0, 1.0, 1.0), vm(1, 1.0, 2.0, 1.0, 1.0), vm(2, 0.0, 2.0, 0.1, 0.1)];
        for (device, own) in [(Device::Nic, NICS), (Device::Ssd, SSDS)] {
            let needed = |hosts: &[usize]| {
                let Needed { at_least, packed, spread } = needed(device, &placed, hosts).expect("it fits");
                assert_eq!((at_least, packed), (spread, spread), "{hosts:?}");
                spread
            };
            assert_eq!(needed(&[0]), own);
            assert_eq!(needed(&[0, 1]), own);
            assert_eq!(needed(&[0, 1, 2]), own + 1);
            assert_eq!(needed(&[2]), 1);
        }
    }

    #[test]
    fn what_is_packed_leaves_room_for_what_is_large() {
        // Two small ones, on SSDs of their own where they are spread: there is no room for the seventh quarter then.
        let of_host = |ssds: f64| ssds / 4.0;
        let small = (0..2).map(|_| vm(0, 0.0, 2.0, of_host(0.1), 0.0));
        let large = (0..7).map(|_| vm(0, 1.0, 2.0, of_host(0.25), 0.0));
        let placed: Vec<Placed> = small.chain(large).collect();
        let found = needed(Device::Ssd, &placed, &[0]).expect("it fits");
        assert_eq!(found, Needed { at_least: 2, packed: 2, spread: 3 });
    }

    #[test]
    fn what_does_not_fit_one_device_lies_on_several() {
        assert_eq!(pieces(0.25), [0.25]);
        assert_eq!(pieces(0.375), [0.1875, 0.1875]);
        assert_eq!(pieces(1.125), [0.225; 5]);
        assert!(pieces(0.0).is_empty());
    }
}
