use cxl_pool::HostId;
use pod_protocol::ids::{PlaceNumber, VolumeId};
use pod_protocol::objects::Qos;
use serde::{Deserialize, Serialize};

use super::{DeviceId, Groups, Labels, Refusal, RefusalKind};

/// Volumes begin at multiples of this.
pub(super) const EXTENT_ALIGN_BYTES: u64 = 1 << 20;
/// The size of a volume is a multiple of this, whatever the block of its SSD.
const SIZE_MULTIPLE_BYTES: u64 = 4096;

/// A contiguous range of an SSD, or the same on several.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Record")]
pub struct Volume {
    /// Its number.
    pub id: VolumeId,
    /// Its name.
    pub name: String,
    /// Where it lies. There is one place at least, and each is on another host, but for one that comes in place of another there.
    pub replicas: Vec<Replica>,
    /// Grows whenever another set of its replicas may be relied on.
    pub epoch: u64,
    /// How long it is.
    pub size_bytes: u64,
    /// How much of each SSD it may use.
    pub qos: Qos,
    /// So many requests per second the kind of the instance that has leased it promises, if its own share is sure of less. Ends with the lease.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub promised_iops: Option<u64>,
    /// It was deleted, and its place is given on when it was wiped.
    pub deleted: bool,
    /// Places that it has left, and that are given on when they were wiped.
    #[serde(default)]
    pub former: Vec<Replica>,
    /// The number that its next replica gets. Numbers are not used twice.
    #[serde(default)]
    pub next_number: u32,
    /// So many bytes lie in one of its places, then as many in the next: each has a share of it. Otherwise each has all of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stripe_bytes: Option<u64>,
    /// Of a striped volume: a place beside the column of that number. The column moves there, or has left it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub beside: Option<Replica>,
    /// Words to find it by.
    #[serde(default, skip_serializing_if = "Labels::is_empty")]
    pub labels: Labels,
    /// With which others it is to lie, or not to lie.
    #[serde(default, skip_serializing_if = "Groups::is_empty")]
    pub groups: Groups,
    /// Guests only read it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub read_only: bool,
    /// The number under which it was found on its SSD, if it was adopted from there: the SSD may know no other one yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub adopted: Option<VolumeId>,
}

/// A place where a volume lies.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Replica {
    /// Its number within the volume.
    pub number: u32,
    /// The SSD.
    pub device: DeviceId,
    /// Where it begins there.
    pub start_bytes: u64,
    /// Which of the volume's places on its host it is: while the volume moves between two SSDs of that, there are two.
    #[serde(default, skip_serializing_if = "PlaceNumber::is_first")]
    pub place: PlaceNumber,
    /// It may miss something that was acknowledged.
    #[serde(default)]
    pub stale: bool,
    /// It is to go as soon as another one has everything and its frontend has let go of it.
    #[serde(default)]
    pub leaving: bool,
    /// While it has everything, the one with this number is to go.
    #[serde(default)]
    pub replaces: Option<u32>,
}

impl Replica {
    /// A place with everything.
    pub(super) fn new(number: u32, device: DeviceId, start_bytes: u64) -> Self {
        let place = PlaceNumber::FIRST;
        Self { number, device, start_bytes, place, stale: false, leaving: false, replaces: None }
    }
}

impl Volume {
    /// A volume in these places.
    pub(super) fn new(id: VolumeId, name: String, replicas: Vec<Replica>, size_bytes: u64) -> Self {
        let next_number = replicas.iter().map(|replica| replica.number + 1).max().unwrap_or(0);
        let qos = Qos::default();
        Self {
            id,
            name,
            replicas,
            epoch: 0,
            size_bytes,
            qos,
            promised_iops: None,
            deleted: false,
            former: Vec::new(),
            next_number,
            stripe_bytes: None,
            beside: None,
            labels: Labels::new(),
            groups: Groups::default(),
            read_only: false,
            adopted: None,
        }
    }

    /// Whether data of it is, or was, on a device of this host.
    pub fn touches(&self, host: HostId) -> bool {
        self.all_places().any(|replica| replica.device.host == host)
    }

    /// Its place on an SSD.
    pub fn replica_on(&self, device: &DeviceId) -> Option<&Replica> {
        self.places().find(|replica| replica.device == *device)
    }

    /// Where it lies, with what a column of it moves to or has left.
    pub fn places(&self) -> impl Iterator<Item = &Replica> {
        self.replicas.iter().chain(&self.beside)
    }

    pub(super) fn places_mut(&mut self) -> impl Iterator<Item = &mut Replica> {
        self.replicas.iter_mut().chain(&mut self.beside)
    }

    /// The same with what has yet to be wiped.
    pub(super) fn all_places(&self) -> impl Iterator<Item = &Replica> {
        self.places().chain(&self.former)
    }

    /// Whether a place of it comes in place of another, or goes.
    pub(super) fn is_moving(&self) -> bool {
        self.places().any(|place| place.leaving || place.replaces.is_some()) || self.beside.is_some()
    }

    /// Whether it has several places, with all of it in each.
    pub fn is_mirrored(&self) -> bool {
        self.replicas.len() > 1 && self.stripe_bytes.is_none()
    }

    /// What it takes in each of its places.
    pub fn place_bytes(&self) -> u64 {
        place_bytes(self.size_bytes, self.columns(), self.stripe_bytes)
    }

    /// Over how many places its data is spread, if it is striped. That does not change: places are numbered once and for all,
    /// and one that a column moves to has the column's number. While it is wiped, it has fewer and fewer.
    pub(super) fn columns(&self) -> u32 {
        self.next_number
    }

    /// The SSDs that it lies on.
    pub fn devices(&self) -> impl Iterator<Item = &DeviceId> {
        self.places().map(|replica| &replica.device)
    }
}

/// A volume as it was kept: before there were replicas, it had one place.
#[derive(Deserialize)]
struct Record {
    id: VolumeId,
    name: String,
    device: Option<DeviceId>,
    start_bytes: Option<u64>,
    #[serde(default)]
    replicas: Vec<Replica>,
    #[serde(default)]
    epoch: u64,
    size_bytes: u64,
    #[serde(default)]
    qos: Qos,
    promised_iops: Option<u64>,
    #[serde(default)]
    deleted: bool,
    #[serde(default)]
    former: Vec<Replica>,
    #[serde(default)]
    next_number: u32,
    stripe_bytes: Option<u64>,
    beside: Option<Replica>,
    #[serde(default)]
    labels: Labels,
    #[serde(default)]
    groups: Groups,
    #[serde(default)]
    read_only: bool,
}

impl From<Record> for Volume {
    fn from(record: Record) -> Self {
        let Record {
            id,
            name,
            mut replicas,
            epoch,
            size_bytes,
            qos,
            promised_iops,
            deleted,
            former,
            stripe_bytes,
            beside,
            labels,
            groups,
            read_only,
            ..
        } = record;
        if let (Some(device), Some(start_bytes)) = (record.device, record.start_bytes) {
            replicas.push(Replica::new(0, device, start_bytes));
        }
        let mut volume = Self::new(id, name, replicas, size_bytes);
        volume.next_number = volume.next_number.max(record.next_number);
        Self {
            epoch,
            qos,
            promised_iops,
            deleted,
            former,
            stripe_bytes,
            beside,
            labels,
            groups,
            read_only,
            ..volume
        }
    }
}

/// What a volume of this size takes in each of its places: all of it, or if it is striped, of so many columns, a share.
pub(super) fn place_bytes(size_bytes: u64, columns: u32, stripe_bytes: Option<u64>) -> u64 {
    match stripe_bytes {
        Some(unit) => size_bytes.div_ceil(unit.saturating_mul(columns.into()).max(1)).saturating_mul(unit),
        None => size_bytes,
    }
}

/// Refuses what no volume can have as its size.
pub(super) fn check_size(size_bytes: u64) -> Result<(), Refusal> {
    if size_bytes != 0 && size_bytes.is_multiple_of(SIZE_MULTIPLE_BYTES) {
        return Ok(());
    }
    let next = size_bytes.max(1).div_ceil(SIZE_MULTIPLE_BYTES).saturating_mul(SIZE_MULTIPLE_BYTES);
    Err(Refusal::new(
        RefusalKind::InvalidValue,
        format!(
            "{size_bytes} bytes is no size for a volume: take a multiple of {SIZE_MULTIPLE_BYTES}, such as {next}"
        ),
    ))
}

/// The first place on an SSD where a volume fits between those that are there: `(start, size)`, in order.
pub(super) fn first_fit(
    from_bytes: u64,
    device_bytes: u64,
    wanted_bytes: u64,
    taken: impl IntoIterator<Item = (u64, u64)>,
) -> Option<u64> {
    let mut start = from_bytes;
    for (taken_start, taken_bytes) in taken {
        if start.checked_add(wanted_bytes)? <= taken_start {
            return Some(start);
        }
        let end = taken_start.checked_add(taken_bytes)?;
        start = start.max(end.checked_next_multiple_of(EXTENT_ALIGN_BYTES)?);
    }
    (start.checked_add(wanted_bytes)? <= device_bytes).then_some(start)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn first_gap_that_fits_is_taken() {
        let taken = [(0, 2 * MIB), (4 * MIB, 2 * MIB), (8 * MIB, MIB)];
        assert_eq!(first_fit(0, 16 * MIB, 2 * MIB, taken), Some(2 * MIB));
        assert_eq!(first_fit(0, 16 * MIB, 3 * MIB, taken), Some(9 * MIB));
        assert_eq!(first_fit(0, 16 * MIB, 7 * MIB, taken), Some(9 * MIB));
        assert_eq!(first_fit(0, 16 * MIB, 7 * MIB + 4096, taken), None);
    }

    #[test]
    fn starts_are_aligned_after_an_odd_size() {
        assert_eq!(first_fit(0, 16 * MIB, MIB, [(0, 4096)]), Some(MIB));
    }

    #[test]
    fn a_volume_that_was_kept_with_one_place_has_one_replica() {
        let old =
            r#"{"id":3,"name":"a","device":{"host":2,"name":"ssd0"},"start_bytes":4096,"size_bytes":8192}"#;
        let volume: Volume = serde_json::from_str(old).unwrap();
        assert_eq!((volume.replicas.len(), volume.replicas[0].start_bytes), (1, 4096));
        let again: Volume = serde_json::from_str(&serde_json::to_string(&volume).unwrap()).unwrap();
        assert_eq!(again, volume);
    }

    #[test]
    fn sizes_that_overflow_do_not_fit() {
        assert_eq!(first_fit(0, u64::MAX, u64::MAX, [(0, 4096)]), None);
        assert_eq!(first_fit(0, 16 * MIB, u64::MAX - 4095, []), None);
    }
}
