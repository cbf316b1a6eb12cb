//! `podctl instances nic-policy` and `volumes qos`: what is said changes, and what is not said stays as it is, also where others change
//! it at the same time.

use std::net::IpAddr;
use std::str::FromStr;

use pod_api::client::{Client, ClientError};
use pod_api::{ByteSize, ChangeVolume, NicLimit, NicPolicy, Volume, VolumeQos};

use crate::Failure;
use crate::arguments::{NicChanges, QosChanges};

/// How often others may come in between until we give up.
const ATTEMPTS: u32 = 16;
/// The status of a change of what somebody else has changed meanwhile.
const PRECONDITION_FAILED: u16 = 412;

/// What is said of something that there need not be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Said<T> {
    /// `none`: it is taken away.
    Nothing,
    /// It is this from now on.
    This(T),
}

impl<T: FromStr> FromStr for Said<T> {
    type Err = T::Err;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text == "none" { Ok(Self::Nothing) } else { text.parse().map(Self::This) }
    }
}

/// What is there once this was said of it.
fn over<T: Copy>(there: Option<T>, said: Option<Said<T>>) -> Option<T> {
    match said {
        None => there,
        Some(Said::Nothing) => None,
        Some(Said::This(new)) => Some(new),
    }
}

fn bytes_over(there: Option<u64>, said: Option<Said<ByteSize>>) -> Option<u64> {
    over(there.map(ByteSize::new), said).map(ByteSize::get)
}

impl NicChanges {
    fn says_nothing(&self) -> bool {
        let bytes = [self.send, self.receive, self.send_minimum, self.receive_minimum];
        let packets = [self.send_packets, self.receive_packets];
        let rates = bytes.iter().all(Option::is_none) && packets.iter().all(Option::is_none);
        let rest = self.burst_ms.is_none() && self.addresses.is_empty() && self.vlan.is_none();
        rates && rest && !self.anew
    }

    /// Those that it may use; the same ones as before, if nothing is said of them.
    fn addresses(&self, there: Vec<IpAddr>) -> Result<Vec<IpAddr>, Failure> {
        match self.addresses.as_slice() {
            [] => Ok(there),
            [Said::Nothing] => Ok(Vec::new()),
            said => {
                let of = |said: &Said<IpAddr>| match said {
                    Said::This(address) => Ok(*address),
                    Said::Nothing => {
                        Err(Failure::Usage("--address none stands alone: it takes all away".to_owned()))
                    }
                };
                said.iter().map(of).collect()
            }
        }
    }

    fn of(&self, there: NicPolicy) -> Result<NicPolicy, Failure> {
        let NicPolicy { transmit, receive, addresses, vlan } =
            if self.anew { NicPolicy::default() } else { there };
        let limit = |there: NicLimit, bytes, packets, minimum| NicLimit {
            bytes_per_second: bytes_over(there.bytes_per_second, bytes),
            packets_per_second: over(there.packets_per_second, packets),
            burst_ms: self.burst_ms.unwrap_or(there.burst_ms),
            minimum_bytes_per_second: bytes_over(there.minimum_bytes_per_second, minimum),
        };
        Ok(NicPolicy {
            transmit: limit(transmit, self.send, self.send_packets, self.send_minimum),
            receive: limit(receive, self.receive, self.receive_packets, self.receive_minimum),
            addresses: self.addresses(addresses)?,
            vlan: over(vlan, self.vlan),
        })
    }
}

impl QosChanges {
    fn says_nothing(&self) -> bool {
        let requests = [self.iops, self.minimum_iops];
        let bytes = [self.bandwidth, self.minimum_bandwidth];
        let rates = requests.iter().all(Option::is_none) && bytes.iter().all(Option::is_none);
        rates && self.burst_ms.is_none() && !self.anew
    }

    fn of(&self, there: VolumeQos) -> VolumeQos {
        let there = if self.anew { VolumeQos::default() } else { there };
        VolumeQos {
            iops: over(there.iops, self.iops),
            bytes_per_second: bytes_over(there.bytes_per_second, self.bandwidth),
            burst_ms: self.burst_ms.unwrap_or(there.burst_ms),
            minimum_iops: over(there.minimum_iops, self.minimum_iops),
            minimum_bytes_per_second: bytes_over(there.minimum_bytes_per_second, self.minimum_bandwidth),
        }
    }
}

fn nothing_said(of: &str) -> Failure {
    Failure::Usage(format!("say what is to change of {of}, or --anew, and only what is said counts"))
}

/// Changes what an instance may do with a NIC of it. If a version is meant, then of that one only.
pub(crate) fn change_nic(
    client: &Client,
    changes: &NicChanges,
    version: Option<&str>,
) -> Result<(), Failure> {
    let NicChanges { name, nic, .. } = changes;
    if changes.says_nothing() {
        return Err(nothing_said(&format!("{nic} of {name}")));
    }
    again_if_changed(version, || {
        let instance = client.instance(name)?;
        let there = instance.nics.into_iter().find(|it| it.device == *nic);
        let there = there.ok_or_else(|| Failure::Usage(format!("{name} has no NIC {nic}")))?;
        let policy = changes.of(there.policy)?;
        Ok(expecting(client, version, instance.resource_version).change_nic(name, nic, &policy)?)
    })
}

/// Changes how much of its SSDs a volume may use. If a version is meant, then of that one only.
pub(crate) fn change_qos(
    client: &Client,
    changes: &QosChanges,
    version: Option<&str>,
) -> Result<Volume, Failure> {
    let name = &changes.name;
    if changes.says_nothing() {
        return Err(nothing_said(name));
    }
    again_if_changed(version, || {
        let volume = client.volume(name)?;
        let request = ChangeVolume { qos: Some(changes.of(volume.qos)), ..ChangeVolume::default() };
        Ok(expecting(client, version, volume.resource_version).change_volume(name, &request)?)
    })
}

fn expecting(client: &Client, meant: Option<&str>, seen: String) -> Client {
    client.clone().expecting(Some(meant.map_or(seen, str::to_owned)))
}

/// Looks, changes what it saw, and looks again if that was not there any more, unless one version is the only one that is meant.
fn again_if_changed<T>(
    version: Option<&str>,
    mut look_and_change: impl FnMut() -> Result<T, Failure>,
) -> Result<T, Failure> {
    let mut attempt = 0;
    loop {
        attempt += 1;
        match look_and_change() {
            Err(Failure::Client(error)) if has_changed(&error) && version.is_none() && attempt < ATTEMPTS => {
            }
            other => return other,
        }
    }
}

fn has_changed(error: &ClientError) -> bool {
    error.status() == Some(PRECONDITION_FAILED)
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;
    use pod_api::Problem;

    use super::*;
    use crate::arguments::{Arguments, Command, Instances, Volumes};

    fn command(line: &str) -> Command {
        Arguments::try_parse_from(line.split_whitespace()).expect("podctl takes it").command
    }

    fn nic(said: &str) -> NicChanges {
        match command(&format!("podctl instances nic-policy vm1 {said}")) {
            Command::Instances(Instances::NicPolicy(changes)) => changes,
            _ => panic!("another command"),
        }
    }

    fn qos(said: &str) -> QosChanges {
        match command(&format!("podctl volumes qos vol0 {said}")) {
            Command::Volumes(Volumes::Qos(changes)) => changes,
            _ => panic!("another command"),
        }
    }

    fn policy() -> NicPolicy {
        let limit = NicLimit {
            bytes_per_second: Some(10),
            packets_per_second: Some(20),
            burst_ms: 30,
            minimum_bytes_per_second: Some(5),
        };
        let addresses = vec!["192.0.2.1".parse().expect("an address")];
        NicPolicy { transmit: limit, receive: limit, addresses, vlan: Some(7) }
    }

    #[test]
    fn what_is_not_said_of_a_nic_stays() {
        let before = policy();
        let after = nic("--send 40").of(before.clone()).expect("it makes sense");
        let transmit = NicLimit { bytes_per_second: Some(40), ..before.transmit };
        assert_eq!(after, NicPolicy { transmit, ..before.clone() });
        let after = nic("--receive none --receive-minimum none --vlan none --address none --burst-ms 60")
            .of(before.clone())
            .expect("it makes sense");
        let receive = NicLimit {
            bytes_per_second: None,
            minimum_bytes_per_second: None,
            burst_ms: 60,
            ..before.receive
        };
        let transmit = NicLimit { burst_ms: 60, ..before.transmit };
        assert_eq!(after, NicPolicy { transmit, receive, addresses: Vec::new(), vlan: None });
    }

    #[test]
    fn anew_only_what_is_said_counts() {
        let after = nic("--anew --send-packets 7").of(policy()).expect("it makes sense");
        let transmit = NicLimit { packets_per_second: Some(7), ..NicLimit::default() };
        assert_eq!(after, NicPolicy { transmit, ..NicPolicy::default() });
        let there = VolumeQos { iops: Some(1), burst_ms: 2, ..VolumeQos::default() };
        assert_eq!(qos("--anew").of(there), VolumeQos::default());
    }

    #[test]
    fn what_is_not_said_of_a_volume_stays() {
        let before = VolumeQos {
            iops: Some(100),
            bytes_per_second: Some(200),
            burst_ms: 300,
            minimum_iops: Some(40),
            minimum_bytes_per_second: Some(50),
        };
        assert_eq!(qos("--iops 70").of(before), VolumeQos { iops: Some(70), ..before });
        let after = qos("--bandwidth none --minimum-iops none --minimum-bandwidth 1K").of(before);
        let expected = VolumeQos {
            bytes_per_second: None,
            minimum_iops: None,
            minimum_bytes_per_second: Some(1024),
            ..before
        };
        assert_eq!(after, expected);
    }

    #[test]
    fn who_says_nothing_or_two_things_at_once_is_refused() {
        assert!(nic("").says_nothing() && qos("").says_nothing());
        assert!(!nic("--nic net1 --vlan none").says_nothing() && !qos("--burst-ms 5").says_nothing());
        assert!(nic("--address 192.0.2.1 --address none").of(policy()).is_err());
        for line in ["podctl instances nic-policy vm1 --vlan nothing", "podctl volumes qos vol0 --iops many"]
        {
            assert!(Arguments::try_parse_from(line.split_whitespace()).is_err(), "{line}");
        }
    }

    #[test]
    fn it_looks_again_unless_one_version_is_meant() {
        let changed = || {
            ClientError::Refused(Problem {
                kind: "changed".to_owned(),
                title: "Precondition Failed".to_owned(),
                status: PRECONDITION_FAILED,
                detail: "the volume vol0 has changed since you looked".to_owned(),
            })
        };
        let tried = |version, changes: u32| {
            let mut attempts = 0;
            let outcome = again_if_changed(version, || {
                attempts += 1;
                if attempts > changes { Ok(()) } else { Err(Failure::Client(changed())) }
            });
            (outcome.is_ok(), attempts)
        };
        assert_eq!(tried(None, 2), (true, 3));
        assert_eq!(tried(Some("7"), 2), (false, 1));
        assert_eq!(tried(None, u32::MAX), (false, ATTEMPTS));
    }
}
