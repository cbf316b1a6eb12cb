//! What devices carry, and what would be done about it.

use pod_api::{Balance, BalanceMode, ByteSize, VolumeBalance};

use crate::output::yes;
use crate::table::{plain, speed};

pub(crate) fn balance(balance: &Balance, wide: bool) -> String {
    if let Some(why) = &balance.unknown_here {
        return why.clone();
    }
    let mut parts = vec![nics(balance)];
    parts.extend(balance.volumes.as_ref().map(|it| volumes(it, wide)));
    parts.join("\n\n")
}

fn nics(balance: &Balance) -> String {
    let rows = balance.nics.iter().map(|nic| {
        let percent = nic.carries_mbps.saturating_mul(100) / nic.speed_mbps.max(1);
        let carries = format!("{} Mbit/s", nic.carries_mbps);
        vec![nic.name.clone(), carries, speed(nic.speed_mbps), format!("{percent} %"), yes(nic.overloaded)]
    });
    let table = plain(&["nic", "carries", "speed", "used", "overloaded"], &[1, 2, 3], rows.collect());
    let mode = match balance.mode {
        BalanceMode::Off => "nothing is done about NICs that carry too much",
        BalanceMode::Advise => "events tell what would help; nothing moves by itself",
        BalanceMode::Move => "leases move by themselves",
    };
    let (high, low) = (balance.high_percent, balance.low_percent);
    let moves = balance.moves.iter().map(|it| {
        let (instance, device, from, to, mbps) = (&it.instance, &it.device, &it.from, &it.to, it.mbps);
        format!("{device} of {instance} would move from {from} to {to} with {mbps} Mbit/s")
    });
    let moves = planned(&moves.collect::<Vec<_>>(), "nothing would move");
    format!("{mode}: from {high} % of a NIC's speed down to {low} %\n\n{table}\n\n{moves}")
}

fn volumes(balance: &VolumeBalance, wide: bool) -> String {
    let per_second = |bytes: u64| format!("{}/s", ByteSize::new(bytes));
    let rows = balance.ssds.iter().map(|ssd| {
        let used = ssd.used_percent.map_or_else(|| "-".to_owned(), |percent| format!("{percent} %"));
        let does = [ssd.iops.to_string(), per_second(ssd.bytes_per_second)];
        let [requests, bytes] = does;
        let mut row = vec![ssd.name.clone(), requests, bytes, used, yes(ssd.overloaded)];
        row.extend(wide.then(|| yes(ssd.copying)));
        row
    });
    let mut header = vec!["ssd", "requests/s", "bytes/s", "used", "overloaded"];
    header.extend(wide.then_some("copying"));
    let table = plain(&header, &[1, 2, 3], rows.collect());
    let mode = match balance.mode {
        BalanceMode::Off => "nothing is done about SSDs that do too much",
        BalanceMode::Advise => "events tell what would help; no volume moves by itself",
        BalanceMode::Move => "volumes move by themselves",
    };
    let (high, low, most) = (balance.high_percent, balance.low_percent, ByteSize::new(balance.bytes_max));
    let moves = balance.moves.iter().map(|it| {
        let (volume, instance, from, to) = (&it.volume, &it.instance, &it.from, &it.to);
        let (requests, bytes) = (it.iops, per_second(it.bytes_per_second));
        format!(
            "{volume} of {instance} would move from {from} to {to} with {requests} requests/s and {bytes}"
        )
    });
    let moves = planned(&moves.collect::<Vec<_>>(), "no volume would move");
    format!(
        "{mode}: from {high} % of what an SSD can do down to {low} %, volumes of {most} at most\n\n{table}\n\n{moves}"
    )
}

fn planned(moves: &[String], none: &str) -> String {
    if moves.is_empty() { none.to_owned() } else { moves.join("\n") }
}
