//! What volumes are sure of, and what SSDs can do, in a second.

use std::fmt;

use pod_api::ByteSize;
use pod_protocol::objects::Qos;

use super::ssd_loads::SsdLoad;
use super::{Device, DeviceId, Kind, State, Volume};

/// What is done by an SSD, or reserved of it. Zero is nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rates {
    /// Requests per second.
    pub iops: u64,
    /// Bytes per second.
    pub bytes_per_second: u64,
}

/// What an SSD can do, or what may be reserved of it, as far as that is known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RateCapacity {
    /// Requests per second.
    pub iops: Option<u64>,
    /// Bytes per second.
    pub bytes_per_second: Option<u64>,
}

/// The share of a volume that is sure of something, and limited by nothing.
pub(super) fn guarantee(minimum_iops: Option<u64>, minimum_bytes_per_second: Option<u64>) -> Qos {
    Qos { minimum_iops, minimum_bytes_per_second, ..Qos::default() }
}

impl Rates {
    /// What a volume is sure of.
    pub fn sure_of(qos: &Qos) -> Self {
        Self {
            iops: qos.minimum_iops.unwrap_or(0),
            bytes_per_second: qos.minimum_bytes_per_second.unwrap_or(0),
        }
    }

    /// Both together.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        Self {
            iops: self.iops.saturating_add(other.iops),
            bytes_per_second: self.bytes_per_second.saturating_add(other.bytes_per_second),
        }
    }

    pub(super) fn minus(self, other: Self) -> Self {
        Self {
            iops: self.iops.saturating_sub(other.iops),
            bytes_per_second: self.bytes_per_second.saturating_sub(other.bytes_per_second),
        }
    }

    /// As words that follow a size: nothing if nothing is wanted.
    pub(super) fn as_well(self) -> String {
        if self == Self::default() { String::new() } else { format!(" and {self}") }
    }
}

impl fmt::Display for Rates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = ByteSize::new(self.bytes_per_second);
        match (self.iops, self.bytes_per_second) {
            (iops, 0) => write!(f, "{iops} requests/s"),
            (0, _) => write!(f, "{bytes}/s"),
            (iops, _) => write!(f, "{iops} requests/s and {bytes}/s"),
        }
    }
}

impl RateCapacity {
    /// So much of it.
    pub fn part(self, percent: u32) -> Self {
        let part = |all: u64| u64::try_from(u128::from(all) * u128::from(percent) / 100).unwrap_or(u64::MAX);
        Self { iops: self.iops.map(part), bytes_per_second: self.bytes_per_second.map(part) }
    }

    /// Whether something is known of it.
    pub const fn is_known(self) -> bool {
        self.iops.is_some() || self.bytes_per_second.is_some()
    }

    /// Whether so much is all of it, in requests or in bytes.
    pub fn is_used_up(self, now: Rates) -> bool {
        self.iops.is_some_and(|all| now.iops >= all.max(1))
            || self.bytes_per_second.is_some_and(|all| now.bytes_per_second >= all.max(1))
    }

    /// How much of it this is, in thousandths: of requests or of bytes, whichever is more.
    pub fn used_permille(self, now: Rates) -> Option<u64> {
        let pairs = [(now.iops, self.iops), (now.bytes_per_second, self.bytes_per_second)];
        let used = |(part, all): (u64, Option<u64>)| {
            u64::try_from(u128::from(part) * 1000 / u128::from(all?.max(1))).ok()
        };
        pairs.into_iter().filter_map(used).max()
    }

    /// What is left when so much is reserved.
    pub fn left(self, reserved: Rates) -> Self {
        Self {
            iops: self.iops.map(|all| all.saturating_sub(reserved.iops)),
            bytes_per_second: self.bytes_per_second.map(|all| all.saturating_sub(reserved.bytes_per_second)),
        }
    }

    /// Whether so much may be reserved of this.
    pub fn has(self, wanted: Rates) -> bool {
        self.iops.is_none_or(|all| wanted.iops <= all)
            && self.bytes_per_second.is_none_or(|all| wanted.bytes_per_second <= all)
    }

    /// The smallest part of what there is that is left when so much is reserved, in millionths.
    pub(super) fn free_share(self, reserved: Rates) -> u128 {
        let left = self.left(reserved);
        let shares = [(left.iops, self.iops), (left.bytes_per_second, self.bytes_per_second)];
        let known = shares.into_iter().filter_map(|(part, all)| Some(super::ssd_loads::share(part?, all?)));
        known.min().unwrap_or(u128::MAX)
    }

    /// What an operator reads about it when so much is reserved of it.
    pub fn told(self, reserved: Rates) -> Vec<String> {
        let mut parts = Vec::new();
        parts.extend(self.iops.map(|all| format!("{} of {all} requests/s reserved", reserved.iops)));
        parts.extend(self.bytes_per_second.map(|all| {
            format!("{}/s of {}/s reserved", ByteSize::new(reserved.bytes_per_second), ByteSize::new(all))
        }));
        parts
    }
}

impl Volume {
    /// What it is sure of on each of its SSDs.
    pub fn rates_of_place(&self) -> Rates {
        Rates::sure_of(&self.share_of_place())
    }
}

impl Device {
    /// What it can do, if it is an SSD and says so.
    pub const fn can_do(&self) -> RateCapacity {
        match self.kind {
            Kind::Ssd { iops, bytes_per_second, .. } => RateCapacity { iops, bytes_per_second },
            Kind::Nic { .. } => RateCapacity { iops: None, bytes_per_second: None },
        }
    }
}

impl State {
    /// What may be reserved of an SSD.
    pub fn rate_capacity(&self, device: &Device) -> RateCapacity {
        device.can_do().part(self.options.placement.ssd_overcommit_percent)
    }

    /// The first SSD of a volume that does not have what the volume is to be sure of, beside what others are, and what it has.
    pub(super) fn short_of<'a>(
        &self,
        volume: &'a Volume,
        qos: &Qos,
    ) -> Option<(&'a DeviceId, Rates, RateCapacity)> {
        let (now, loads) = (volume.rates_of_place(), self.ssd_loads_now());
        let wanted = Volume { qos: *qos, ..volume.clone() }.rates_of_place();
        volume.devices().find_map(|ssd| {
            let capacity = self.rate_capacity(self.devices.get(ssd)?);
            let left = capacity.left(loads.get(ssd).map_or_else(Rates::default, SsdLoad::rates).minus(now));
            // What an SSD lacks already, for it does less than it did, is no reason to refuse less than there was.
            let more = Rates {
                iops: if wanted.iops > now.iops { wanted.iops } else { 0 },
                bytes_per_second: if wanted.bytes_per_second > now.bytes_per_second {
                    wanted.bytes_per_second
                } else {
                    0
                },
            };
            (!left.has(more)).then_some((ssd, more, left))
        })
    }
}
