//! What the target says about its disk: struct virtio_blk_config.

use virtio_bindings::bindings::virtio_blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_SEG_MAX,
    VIRTIO_BLK_F_WRITE_ZEROES,
};
use virtio_bindings::bindings::virtio_ring::VIRTIO_RING_F_INDIRECT_DESC;

use super::requests::Abilities;
use super::ring::SEGMENTS_MAX;
use crate::ssd::Geometry;

/// As much of it as is looked at.
pub(super) const CONFIG_BYTES: u32 = 60;
const SECTOR_BYTES: u32 = 512;
const SEG_MAX_AT: usize = 12;
const BLK_SIZE_AT: usize = 20;
const DISCARD_AT: usize = 36;
const DISCARD_ALIGNMENT_AT: usize = 44;
const ZEROES_AT: usize = 48;

/// Reads it, given the features agreed on.
pub(super) fn parse(config: &[u8], features: u64) -> (Geometry, Abilities) {
    let has = |bit: u32| features & 1 << bit != 0;
    let word = |at: usize| {
        let bytes = config.get(at..at + 4).and_then(|bytes| bytes.try_into().ok());
        bytes.map_or(0, u32::from_le_bytes)
    };
    let capacity = u64::from(word(0)) | u64::from(word(4)) << 32;
    let block_bytes = match word(BLK_SIZE_AT) {
        block if has(VIRTIO_BLK_F_BLK_SIZE) && block.is_power_of_two() && (512..=4096).contains(&block) => {
            block
        }
        _ => 512,
    };
    let size_bytes = capacity.saturating_mul(SECTOR_BYTES.into());
    let size_bytes = size_bytes - size_bytes % u64::from(block_bytes);
    let most = |bit, at| if has(bit) { word(at) } else { 0 };
    // Lists go as indirect tables.
    let segments_max =
        if has(VIRTIO_RING_F_INDIRECT_DESC) { most(VIRTIO_BLK_F_SEG_MAX, SEG_MAX_AT) } else { 1 };
    let abilities = Abilities {
        flush: has(VIRTIO_BLK_F_FLUSH),
        discard_sectors_max: most(VIRTIO_BLK_F_DISCARD, DISCARD_AT),
        discard_granularity_bytes: most(VIRTIO_BLK_F_DISCARD, DISCARD_ALIGNMENT_AT)
            .checked_mul(SECTOR_BYTES)
            .filter(|&bytes| bytes > 0),
        zeroes_sectors_max: most(VIRTIO_BLK_F_WRITE_ZEROES, ZEROES_AT),
        segments_max: u16::try_from(segments_max).unwrap_or(u16::MAX).clamp(1, SEGMENTS_MAX),
    };
    (Geometry { size_bytes, block_bytes }, abilities)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_count_where_their_features_were_agreed_on() {
        let mut config = vec![0; CONFIG_BYTES as usize];
        config[..8].copy_from_slice(&1001_u64.to_le_bytes());
        config[BLK_SIZE_AT..BLK_SIZE_AT + 4].copy_from_slice(&4096_u32.to_le_bytes());
        config[DISCARD_AT..DISCARD_AT + 4].copy_from_slice(&77_u32.to_le_bytes());
        config[DISCARD_ALIGNMENT_AT..DISCARD_ALIGNMENT_AT + 4].copy_from_slice(&16_u32.to_le_bytes());
        let none = Abilities {
            flush: false,
            discard_sectors_max: 0,
            discard_granularity_bytes: None,
            zeroes_sectors_max: 0,
            segments_max: 1,
        };
        let plain = Geometry { size_bytes: 1001 * 512, block_bytes: 512 };
        assert_eq!(parse(&config, 0), (plain, none));
        let features = 1 << VIRTIO_BLK_F_BLK_SIZE | 1 << VIRTIO_BLK_F_DISCARD | 1 << VIRTIO_BLK_F_FLUSH;
        let blocks = Geometry { size_bytes: 125 * 4096, block_bytes: 4096 };
        assert_eq!(
            parse(&config, features),
            (
                blocks,
                Abilities {
                    flush: true,
                    discard_sectors_max: 77,
                    discard_granularity_bytes: Some(8192),
                    ..none
                }
            )
        );
        for silly in [0, u32::MAX] {
            config[DISCARD_ALIGNMENT_AT..DISCARD_ALIGNMENT_AT + 4].copy_from_slice(&silly.to_le_bytes());
            assert_eq!(parse(&config, features).1.discard_granularity_bytes, None);
        }
        let lists = 1 << VIRTIO_BLK_F_SEG_MAX | 1 << VIRTIO_RING_F_INDIRECT_DESC;
        for (offered, agreed) in [(0, 1), (1, 1), (126, 126), (254, 126), (u32::MAX, 126)] {
            config[SEG_MAX_AT..SEG_MAX_AT + 4].copy_from_slice(&offered.to_le_bytes());
            assert_eq!(parse(&config, lists).1.segments_max, agreed);
            assert_eq!(parse(&config, 1 << VIRTIO_BLK_F_SEG_MAX).1.segments_max, 1);
            assert_eq!(parse(&config, 1 << VIRTIO_RING_F_INDIRECT_DESC).1.segments_max, 1);
        }
        assert_eq!(parse(&[1, 2], features).0.size_bytes, 0, "a target that says too little has nothing");
    }
}
