//! What is true of resources now, read off what is shown of them.

use pod_api::{
    Condition, ConditionKind, Device, DeviceHealth, DeviceKind, EndpointHealth, Host, Instance, Nic,
    ReplicaState, Volume,
};

/// A condition that holds if there is nothing against it.
fn unless(kind: ConditionKind, against: &[String]) -> Condition {
    Condition { kind, status: against.is_empty(), message: against.join("; ") }
}

pub(super) fn of_instance(instance: &Instance) -> Vec<Condition> {
    let nics = instance.nics.iter().map(|nic| (&nic.device, nic.connected));
    let disks = instance.disks.iter().map(|disk| (&disk.device, disk.connected));
    let unconnected = nics.chain(disks).filter(|(_, connected)| !connected);
    let unconnected: Vec<String> = unconnected.map(|(device, _)| format!("no VMM uses {device}")).collect();
    let alone = {
        let in_use = |nic: &Nic| nic.rails.iter().filter(|rail| rail.in_use).count();
        instance.nics.iter().filter(move |nic| nic.backup.is_none() && in_use(nic) < 2)
    };
    let alone: Vec<String> = alone.map(|nic| format!("{} has no backup", nic.device)).collect();
    vec![
        unless(ConditionKind::Ready, &instance.waiting_for),
        unless(ConditionKind::Connected, &unconnected),
        unless(ConditionKind::Redundant, &alone),
    ]
}

/// Of a volume that lies on SSDs of which so many can be reached: one of a mirrored volume must be, all of a striped one. `contrary` is
/// what is not as its groups want it.
pub(super) fn of_volume(
    volume: &Volume,
    away: &[String],
    places: usize,
    contrary: &[String],
) -> Vec<Condition> {
    let striped = volume.stripe_bytes.is_some();
    let lost = if striped { !away.is_empty() } else { away.len() >= places };
    let away: Vec<String> = away.iter().map(|ssd| format!("{ssd} cannot be reached")).collect();
    let mut conditions = vec![unless(ConditionKind::Ready, if lost { &away } else { &[] })];
    if !striped && !volume.replicas.is_empty() {
        let behind = volume.replicas.iter().filter(|it| it.state != ReplicaState::InSync);
        let behind: Vec<String> = behind.map(|it| format!("{} is {}", it.device, it.state.word())).collect();
        conditions.push(unless(ConditionKind::Redundant, &behind));
    }
    if volume.apart.is_some() || volume.together.is_some() {
        conditions.push(unless(ConditionKind::Placed, contrary));
    }
    conditions
}

pub(super) fn of_host(host: &Host) -> Vec<Condition> {
    let silent = host.endpoints.iter().filter(|it| it.health != EndpointHealth::Joined);
    let silent: Vec<String> = silent.map(|it| format!("{} does not beat", it.role)).collect();
    vec![
        unless(ConditionKind::Ready, &silent),
        unless(ConditionKind::Schedulable, &drained(host.drained, Vec::new())),
    ]
}

/// `stay` are the volumes that have yet to leave it, although nobody uses them, since it is to be empty.
pub(super) fn of_device(device: &Device, stay: &[&str]) -> Vec<Condition> {
    let works = matches!(device.health, DeviceHealth::Up | DeviceHealth::Held);
    let reason = device.reason.clone().unwrap_or_else(|| "it does not work".to_owned());
    let mut against = Vec::new();
    if device.health != DeviceHealth::Up {
        against.push(reason.clone());
    }
    if let DeviceKind::Ssd { strangers, .. } = &device.kind
        && !strangers.is_empty()
    {
        against.push("it holds volumes that nobody has adopted".to_owned());
    }
    let mut schedulable = drained(device.drained, against);
    schedulable.extend(left_alone(stay));
    vec![
        unless(ConditionKind::Ready, &if works { Vec::new() } else { vec![reason] }),
        unless(ConditionKind::Schedulable, &schedulable),
    ]
}

/// Volumes that nobody uses leave when a copier has come to them.
fn left_alone(stay: &[&str]) -> Option<String> {
    let (first, others) = stay.split_first()?;
    Some(match others.len() {
        0 => format!(
            "{first}, which no instance uses, has yet to be copied to another SSD that has room for it"
        ),
        more => format!(
            "{first} and {more} more, which no instance uses, have yet to be copied to other SSDs that have room for them"
        ),
    })
}

fn drained(drained: bool, mut against: Vec<String>) -> Vec<String> {
    if drained {
        against.push("it is to be empty".to_owned());
    }
    against
}
