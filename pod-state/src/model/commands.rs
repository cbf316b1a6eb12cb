//! The commands that a step stands for.

use cxl_pool::{HostId, Role};
use pod_api::DEFAULT_TENANT;
use pod_protocol::objects::Priority;
use pod_protocol::reports::DeviceReport;

use super::pod::{MIB, devices_of, endpoint, fabric, join, nic, ssd, with_table};
use super::reports::{relieve, scrub_all, wipe_all};
use super::step::{InGroups, ROLES, Says, Step};
use crate::{Command, DeviceId, Groups, InstanceType, Labelled, Mchannel, NicWish, Presence, State, Volume};

/// The commands that a step stands for, given what there is.
#[expect(clippy::too_many_lines, reason = "a few lines for each of many steps")]
pub(super) fn commands(state: &State, step: &Step) -> Vec<Command> {
    match *step {
        Step::Join { host, role, restart, up, lacks } => {
            let endpoint = endpoint(host, ROLES[role]);
            let known = state.endpoints.get(&endpoint);
            let incarnation = match known {
                Some(known) if !restart && known.presence == Presence::Joined => known.incarnation,
                Some(known) => known.incarnation + 1,
                None => 1,
            };
            let mut devices = devices_of(endpoint, up);
            if endpoint.role == Role::BlkBackend && host == 1 {
                // Where a column can move to.
                devices.push(with_table(ssd("ssd0", 32)));
            }
            if endpoint.role == Role::BlkBackend {
                // Where volumes can move to on their host.
                devices.push(if host == 2 { ssd("ssd1", 32) } else { with_table(ssd("ssd1", 32)) });
            }
            for device in &mut devices {
                // Now and then a host's NIC is in a group with the other's.
                if let DeviceReport::Nic { lag, backup: false, .. } = device
                    && incarnation % 3 == 1
                {
                    *lag = Some("group".to_owned());
                }
            }
            if let Some(lacks) = lacks.filter(|lacks| *lacks < devices.len()) {
                devices.remove(lacks);
            }
            vec![Command::Join { endpoint, incarnation, join: join(host, devices) }]
        }
        Step::Silent { host, role } => vec![Command::Silent { endpoint: endpoint(host, ROLES[role]) }],
        Step::Back { host, role } => vec![Command::Back { endpoint: endpoint(host, ROLES[role]) }],
        Step::Gone { host, role } => vec![Command::Gone { endpoint: endpoint(host, ROLES[role]) }],
        Step::FenceExpired { host } => {
            let endpoint = endpoint(host, Role::NetBackend);
            let incarnation = state.endpoints.get(&endpoint).map_or(0, |known| known.incarnation);
            vec![Command::FenceExpired { endpoint, incarnation }]
        }
        Step::Link { host, nic, up } => {
            let device = DeviceId { host: HostId::new(host), name: format!("nic{nic}").into() };
            vec![Command::Link { device, up, reason: "carrier".to_owned() }]
        }
        Step::Failed { host, nic } => {
            let device = DeviceId { host: HostId::new(host), name: format!("nic{nic}").into() };
            vec![Command::DeviceFailed { device, reason: "broken".to_owned() }]
        }
        Step::DeviceBack { host, nic: number, up } => {
            let name = format!("nic{number}");
            let report = nic(&name, up, host == 3 && number == 0);
            vec![Command::DeviceBack {
                device: DeviceId { host: HostId::new(host), name: name.into() },
                report,
            }]
        }
        Step::Migrate { name, to } => {
            let to =
                to.map(|(host, nic)| DeviceId { host: HostId::new(host), name: format!("nic{nic}").into() });
            vec![Command::MigrateNic { instance: format!("vm{name}"), device: "net0".to_owned(), to }]
        }
        Step::Speaks { minor } => vec![state.speaking(minor)],
        Step::Drained { lease } => {
            let drain = state.drains().nth(lease % 2);
            drain.map(|(lease, generation)| Command::DrainExpired { lease, generation }).into_iter().collect()
        }
        Step::Relieve { host, mbps } => {
            let nic =
                DeviceId { host: HostId::new(host), name: format!("nic{}", u8::from(host == 3)).into() };
            vec![relieve(state, nic, mbps)]
        }
        Step::Drain { host, device, on } => {
            let device = device.map(|nic| if nic { "nic0".to_owned() } else { "ssd0".to_owned() });
            vec![Command::Drain { host: HostId::new(host), device, on }]
        }
        Step::Label { host, device, value } => {
            let (of, name) = match device {
                None => (Labelled::Host, format!("h{host}")),
                Some(nic) => (Labelled::Device, format!("h{host}/{}", if nic { "nic0" } else { "ssd0" })),
            };
            let labels = value.map(|value| ("tier".to_owned(), value.to_string())).into_iter().collect();
            vec![Command::SetLabels { of, name, labels }]
        }
        Step::FailBack { host, nic } => {
            vec![Command::FailBack {
                device: DeviceId { host: HostId::new(host), name: format!("nic{nic}").into() },
            }]
        }
        Step::Trust { host, nic, held } => {
            let device = DeviceId { host: HostId::new(host), name: format!("nic{nic}").into() };
            let reason = "flaps".to_owned();
            vec![if held {
                Command::HoldLink { device, reason }
            } else {
                Command::ReleaseLink { device, reason }
            }]
        }
        Step::Attach { lease, incoming, connected, running } => {
            attach_command(state, lease, incoming, (connected, running)).into_iter().collect()
        }
        Step::MoveTo { name, host } => {
            vec![Command::PrepareMigration { name: format!("vm{name}"), to: HostId::new(host) }]
        }
        Step::StayHere { name } => vec![Command::AbortMigration { name: format!("vm{name}") }],
        Step::MovedTo { name, force } => {
            vec![Command::ActivateMigration { name: format!("vm{name}"), force }]
        }
        Step::Scrub { endpoint, region } => scrub_command(state, endpoint, region).into_iter().collect(),
        Step::ScrubAll => scrub_all(state),
        Step::CreateVolume { name, mib, device, replicas, iops, groups } => vec![Command::CreateVolume {
            name: format!("vol{name}"),
            size_bytes: mib * MIB,
            device: device.map(|host| DeviceId { host: HostId::new(host), name: "ssd0".into() }),
            replicas,
            minimum_iops: iops.filter(|iops| iops % 3 != 0),
            minimum_bytes_per_second: iops.filter(|iops| iops % 2 != 0).map(|iops| iops << 12),
            groups: named(groups),
        }],
        Step::CreateStriped { name, mib, iops, groups } => vec![Command::CreateStriped {
            name: format!("vol{name}"),
            size_bytes: mib * MIB,
            columns: 2,
            stripe_bytes: 64 << 10,
            minimum_iops: iops.filter(|iops| iops % 3 != 0),
            minimum_bytes_per_second: iops.filter(|iops| iops % 2 != 0).map(|iops| iops << 12),
            groups: named(groups),
        }],
        Step::Group { name, groups } => vec![Command::ChangeVolume {
            name: format!("vol{name}"),
            size_bytes: None,
            qos: None,
            groups: Some(named(groups)),
            read_only: None,
        }],
        Step::Protect { name, on } => vec![Command::ChangeVolume {
            name: format!("vol{name}"),
            size_bytes: None,
            qos: None,
            groups: None,
            read_only: Some(on),
        }],
        Step::Replica { volume, number, epoch, says } => {
            replica_command(state, volume, number, epoch, says).into_iter().collect()
        }
        Step::AddReplica { name, device, replaces } => {
            let (device, replaces) = (device.map(numbered_ssd), replaces.map(numbered_ssd));
            vec![Command::AddReplica { name: format!("vol{name}"), device, replaces }]
        }
        Step::RemoveReplica { name, ssd } => {
            vec![Command::RemoveReplica { name: format!("vol{name}"), device: numbered_ssd(ssd) }]
        }
        Step::DeleteDevice { host, nic, lose_data } => {
            let name = nic.map_or_else(|| "ssd0".to_owned(), |nic| format!("nic{nic}"));
            let device = DeviceId { host: HostId::new(host), name: name.into() };
            vec![Command::DeleteDevice { device, lose_data }]
        }
        Step::DeleteVolume { name } => vec![Command::DeleteVolume { name: format!("vol{name}") }],
        Step::WipeAll => wipe_all(state),
        Step::Copiers => state.copiers_due(),
        Step::CreateInstance { name, host, nics, ref volumes, mac, ask } => {
            let mac = mac.map(|last| pod_protocol::ids::MacAddress::new([2, 0, 0, 0, 0, last]));
            let reserved_mbps = if ask.by_type { 0 } else { ask.reserved_mbps };
            let wish = NicWish {
                device: None,
                mac,
                reserved_mbps,
                rails: (ask.apart && ask.together).then_some(2),
                apart: ask.apart.then(|| "apart".to_owned()),
                together: ask.together.then(|| "together".to_owned()),
                ..NicWish::default()
            };
            let create = Command::CreateInstance {
                name: format!("vm{name}"),
                host: HostId::new(host),
                nics: vec![wish; nics],
                volumes: volumes.iter().map(|name| format!("vol{name}")).collect(),
                instance_type: ask.by_type.then(|| "type".to_owned()),
                vmm_listens: ask.apart,
                ram_bytes: ask.ram_mib.map(|mib| mib * MIB),
                priority: mac.and_then(|_| Priority::new(7)),
            };
            let volume_iops = ask.apart.then_some(ask.reserved_mbps.max(1));
            let reserved_mbps = ask.reserved_mbps;
            let priority = ask.together.then_some(Priority::MAX);
            let instance_type =
                InstanceType { nics: 1, reserved_mbps, volume_iops, priority, ..InstanceType::default() };
            let set = Command::SetInstanceType { name: "type".to_owned(), instance_type };
            vec![set, create]
        }
        Step::DeleteInstance { name } => {
            vec![Command::DeleteInstance { name: format!("vm{name}"), force: true }]
        }
        Step::DeviceComes { name, volume } => vec![Command::AttachDevice {
            instance: format!("vm{name}"),
            nic: volume.is_none().then(Box::default),
            volume: volume.map(|name| format!("vol{name}")),
        }],
        Step::DeviceGoes { lease, force, answer } => {
            let lease = state.leases.values().nth(lease % state.leases.len().max(1));
            let named = |lease: &crate::Lease| {
                let instance = state.instances.get(&lease.instance)?.name.clone();
                let device = lease.device.clone();
                Some(match answer {
                    Some(plugged) => Command::DeviceAnswered { instance, device, plugged, refused: None },
                    None => Command::DetachDevice { instance, device, force },
                })
            };
            lease.and_then(named).into_iter().collect()
        }
        Step::Fabric { elements, tenant, mb_per_second } => {
            let fabric = fabric(elements, tenant, mb_per_second * 1_000_000);
            vec![Command::SetFabric { fabric }]
        }
        Step::Mchannel { name, weight, element, tenant } => {
            let tenant = if tenant { "red" } else { DEFAULT_TENANT }.to_owned();
            let mchannel = Mchannel { weight, tenant, path: vec![format!("link{element}")] };
            // Who has more of the fabric may have more of devices as well.
            let priority = u16::try_from(weight).ok().and_then(Priority::new).unwrap_or_default();
            let set_priority = Command::SetPriority { name: format!("vm{name}"), priority };
            vec![Command::SetMchannel { instance: format!("vm{name}"), mchannel }, set_priority]
        }
        Step::ClearMchannel { name } => vec![Command::ClearMchannel { instance: format!("vm{name}") }],
    }
}

/// The groups of a volume, by the names that the groups of NICs have.
fn named(groups: InGroups) -> Groups {
    Groups {
        apart: groups.apart.then(|| "apart".to_owned()),
        together: groups.together.then(|| "together".to_owned()),
    }
}

/// An SSD by its host and its number there.
fn numbered_ssd((host, number): (u16, u8)) -> DeviceId {
    DeviceId { host: HostId::new(host), name: format!("ssd{number}").into() }
}

/// Somebody lets go of something.
fn scrub_command(state: &State, endpoint: usize, region: usize) -> Option<Command> {
    let (id, known) =
        state.endpoints.iter().nth(endpoint).filter(|(_, known)| known.presence == Presence::Joined)?;
    let region = *state.scrubs(*id).keys().nth(region)?;
    Some(Command::Scrubbed { endpoint: *id, incarnation: known.incarnation, region })
}

/// A frontend says something of a replica, in this epoch or so many before.
fn replica_command(state: &State, volume: usize, replica: u32, behind: u64, says: Says) -> Option<Command> {
    let told_of = |volume: &&Volume| volume.is_mirrored() || volume.beside.is_some();
    let mut mirrored = state.leases.values().filter_map(|lease| {
        let volume = state.volumes.get(&lease.volume()?).filter(told_of)?;
        Some((lease, volume))
    });
    let (lease, volume) = mirrored.nth(volume % 2)?;
    let (lease, endpoint) = (lease.id, state.frontend_of(lease)?);
    let epoch = volume.epoch.saturating_sub(behind);
    let reason = "it failed a write".to_owned();
    Some(match says {
        Says::Failed => Command::ReplicaFailed { endpoint, lease, replica, epoch, reason },
        Says::Synced => Command::ReplicaSynced { endpoint, lease, replica, epoch },
        Says::Left => Command::ReplicaLeft { endpoint, lease, replica, epoch },
    })
}

/// The frontend that serves a lease, or the one that will, speaks of its VMM.
fn attach_command(
    state: &State,
    lease: usize,
    incoming: bool,
    (connected, running): (bool, bool),
) -> Option<Command> {
    let lease = state.leases.values().nth(lease)?;
    let side = if incoming { state.incoming_frontend(lease) } else { state.frontend_of(lease) };
    let running = running && connected;
    Some(Command::Attachment {
        endpoint: side?,
        lease: lease.id,
        connected,
        running,
        write_through: false,
        untold: false,
    })
}
