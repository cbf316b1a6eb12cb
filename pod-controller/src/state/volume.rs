use pod_protocol::ids::VolumeId;
use pod_protocol::objects::Qos;
use serde::{Deserialize, Serialize};

use super::{DeviceId, Refusal, RefusalKind};

/// Volumes begin at multiples of this.
pub(super) const EXTENT_ALIGN_BYTES: u64 = 1 << 20;
/// The size of a volume is a multiple of this, whatever the block of its SSD.
const SIZE_MULTIPLE_BYTES: u64 = 4096;

/// A contiguous range of an SSD.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Volume {
    /// Its number.
    pub id: VolumeId,
    /// Its name.
    pub name: String,
    /// The SSD it lies on.
    pub device: DeviceId,
    /// Where it begins there.
    pub start_bytes: u64,
    /// How long it is.
    pub size_bytes: u64,
    /// How much of the SSD it may use.
    #[serde(default)]
    pub qos: Qos,
    /// It was deleted, and its place is given on when it was wiped.
    #[serde(default)]
    pub deleted: bool,
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

/// The first place on an SSD where a volume fits between those that are there: `(start, size)`, in any order.
pub(super) fn first_fit(
    from_bytes: u64,
    device_bytes: u64,
    wanted_bytes: u64,
    mut taken: Vec<(u64, u64)>,
) -> Option<u64> {
    taken.sort_unstable();
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
        let taken = vec![(8 * MIB, MIB), (0, 2 * MIB), (4 * MIB, 2 * MIB)];
        assert_eq!(first_fit(0, 16 * MIB, 2 * MIB, taken.clone()), Some(2 * MIB));
        assert_eq!(first_fit(0, 16 * MIB, 3 * MIB, taken.clone()), Some(9 * MIB));
        assert_eq!(first_fit(0, 16 * MIB, 7 * MIB, taken.clone()), Some(9 * MIB));
        assert_eq!(first_fit(0, 16 * MIB, 7 * MIB + 4096, taken), None);
    }

    #[test]
    fn starts_are_aligned_after_an_odd_size() {
        assert_eq!(first_fit(0, 16 * MIB, MIB, vec![(0, 4096)]), Some(MIB));
    }

    #[test]
    fn sizes_that_overflow_do_not_fit() {
        assert_eq!(first_fit(0, u64::MAX, u64::MAX, vec![(0, 4096)]), None);
        assert_eq!(first_fit(0, 16 * MIB, u64::MAX - 4095, Vec::new()), None);
    }
}
