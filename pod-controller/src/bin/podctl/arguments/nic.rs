//! A NIC as it is asked for in one argument: `mac=02:00:00:00:00:02,vlan=7,send=125M`.

use std::str::FromStr;

use pod_api::{ByteSize, NicRequest};

use super::instances::parse_mbps;

/// What an option may be, as it is said to whoever writes another one.
const OPTIONS: &str = "device=…, mac=…, mtu=…, queue-pairs=…, reserve=…, apart=…, together=…, rails=…, vlan=…, address=…, send=…, \
                       send-packets=…, send-minimum=…, receive=…, receive-packets=…, receive-minimum=…, burst-ms=…";

/// Reads all options of a NIC.
pub(super) fn parse(text: &str) -> Result<NicRequest, String> {
    let mut nic = NicRequest::default();
    for option in text.split(',').filter(|option| !option.is_empty()) {
        let (name, value) = option.split_once('=').unwrap_or((option, ""));
        let number = || read::<u16>(option, value, "a number up to 65535");
        let count = || read::<u64>(option, value, "a number");
        let bytes = || read::<ByteSize>(option, value, "a number of bytes, such as 125M").map(ByteSize::get);
        let policy = &mut nic.policy;
        match name {
            _ if value.is_empty() => return Err(format!("{option:?} is none of {OPTIONS}")),
            "device" => nic.device = Some(value.to_owned()),
            "mac" => nic.mac = Some(value.to_owned()),
            "mtu" => nic.mtu = Some(number()?),
            "queue-pairs" => nic.queue_pairs = Some(number()?),
            "reserve" => nic.reserved_mbps = parse_mbps(value)?,
            "apart" => nic.apart = Some(value.to_owned()),
            "together" => nic.together = Some(value.to_owned()),
            "rails" => nic.rails = Some(read(option, value, "a number, such as 2")?),
            "vlan" => policy.vlan = Some(read(option, value, "a number from 1 to 4094")?),
            "address" => policy.addresses.push(read(option, value, "an IPv4 or IPv6 address")?),
            "send" => policy.transmit.bytes_per_second = Some(bytes()?),
            "send-packets" => policy.transmit.packets_per_second = Some(count()?),
            "send-minimum" => policy.transmit.minimum_bytes_per_second = Some(bytes()?),
            "receive" => policy.receive.bytes_per_second = Some(bytes()?),
            "receive-packets" => policy.receive.packets_per_second = Some(count()?),
            "receive-minimum" => policy.receive.minimum_bytes_per_second = Some(bytes()?),
            "burst-ms" => {
                let ms = read(option, value, "a number of milliseconds")?;
                (policy.transmit.burst_ms, policy.receive.burst_ms) = (ms, ms);
            }
            _ => return Err(format!("{option:?} is none of {OPTIONS}")),
        }
    }
    Ok(nic)
}

fn read<T: FromStr>(option: &str, value: &str, what: &str) -> Result<T, String> {
    value.parse().map_err(|_| format!("{option:?} needs {what}"))
}

#[cfg(test)]
mod tests {
    use pod_api::{NicLimit, NicPolicy};

    use super::*;

    #[test]
    fn a_nic_has_from_the_beginning_all_that_it_may_have_later() {
        let nic = parse(
            "mac=02:00:00:00:00:02,vlan=7,address=10.0.0.2,address=fe80::2,send=125M,send-packets=9,send-minimum=1M,receive=2M,\
             receive-packets=8,receive-minimum=3M,burst-ms=50,reserve=1G",
        );
        let limit = |bytes: u64, packets, minimum: u64| NicLimit {
            bytes_per_second: Some(bytes << 20),
            packets_per_second: Some(packets),
            burst_ms: 50,
            minimum_bytes_per_second: Some(minimum << 20),
        };
        let policy = NicPolicy {
            transmit: limit(125, 9, 1),
            receive: limit(2, 8, 3),
            addresses: ["10.0.0.2", "fe80::2"].map(|it| it.parse().expect("an address")).into(),
            vlan: Some(7),
        };
        let mac = Some("02:00:00:00:00:02".to_owned());
        assert_eq!(nic, Ok(NicRequest { mac, reserved_mbps: 1000, policy, ..NicRequest::default() }));
        assert_eq!(parse(""), Ok(NicRequest::default()));
    }

    #[test]
    fn what_it_cannot_have_is_refused_with_what_it_can() {
        for (said, expected) in [
            ("colour=red", "is none of device="),
            ("vlan", "is none of device="),
            ("vlan=", "is none of device="),
            ("vlan=red", "needs a number from 1 to 4094"),
            ("address=10.0.0", "needs an IPv4 or IPv6 address"),
            ("send=much", "needs a number of bytes"),
            ("send-packets=-1", "needs a number"),
            ("mtu=70000", "needs a number up to 65535"),
        ] {
            let refusal = parse(said).expect_err(said);
            assert!(refusal.contains(expected), "{said}: {refusal}");
        }
    }
}
