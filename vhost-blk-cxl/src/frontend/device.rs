//! What the guest sees: features, configuration space, limits.

use virtio_bindings::bindings::virtio_blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_CONFIG_WCE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH,
    VIRTIO_BLK_F_MQ, VIRTIO_BLK_F_RO, VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_SIZE_MAX, VIRTIO_BLK_F_TOPOLOGY,
    VIRTIO_BLK_F_WRITE_ZEROES,
};
use virtio_bindings::bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

use pod_protocol::objects::DiskObject;

/// virtio-blk counts in sectors of this size, whatever the disk's block is.
pub(crate) const SECTOR_BYTES: u64 = 512;

/// The longest vring.
pub(crate) const QUEUE_SIZE_MAX: u16 = 1024;
/// Data segments of a request.
const SEGMENTS_MAX: u32 = 126;
/// Bytes of a segment.
const SEGMENT_BYTES_MAX: u32 = 32 << 10;
/// Data that is sent to a backend at once, in bytes: what a guest that keeps to the limits above sends at most.
pub(crate) const REQUEST_BYTES_MAX: u64 = (SEGMENTS_MAX * SEGMENT_BYTES_MAX) as u64;

/// Data of a guest's request, in bytes. Firmware does not keep to the limits above: it reads a whole kernel with one request.
pub(crate) const TRANSFER_BYTES_MAX: u64 = 1 << 31;

/// Sectors of one discard.
const DISCARD_SECTORS_MAX: u32 = 1 << 21;
/// What fits most devices that do not say what they heed.
const DISCARD_BYTES_CAREFUL: u32 = 4096;
/// Sectors of one write of zeroes; without help of the file system they are really written.
const ZEROES_SECTORS_MAX: u32 = 1 << 17;

/// Bytes that a guest reads as the disk's id.
pub(crate) const ID_BYTES: u32 = 20;

/// Where in the configuration space the driver turns the write cache on and off.
pub(crate) const WRITEBACK_AT: usize = 32;

/// Bytes of the configuration space that we fill.
const CONFIG_BYTES: usize = 60;

/// The features that a disk offers.
pub(crate) fn features(disk: &DiskObject) -> u64 {
    let mut bits = vec![
        VIRTIO_BLK_F_SIZE_MAX,
        VIRTIO_BLK_F_SEG_MAX,
        VIRTIO_BLK_F_BLK_SIZE,
        VIRTIO_BLK_F_FLUSH,
        VIRTIO_BLK_F_TOPOLOGY,
        VIRTIO_BLK_F_CONFIG_WCE,
        VIRTIO_BLK_F_MQ,
        VIRTIO_RING_F_INDIRECT_DESC,
        VIRTIO_RING_F_EVENT_IDX,
    ];
    if disk.read_only {
        bits.push(VIRTIO_BLK_F_RO);
    } else {
        bits.extend([VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_WRITE_ZEROES]);
    }
    bits.into_iter().fold(0, |features, bit| features | 1 << bit)
}

/// Whether completed writes may still be in a cache, given what the driver acknowledged and wrote to `writeback`.
pub(crate) fn caches_writes(acknowledged: u64, writeback: bool) -> bool {
    // A driver that cannot flush must never need to.
    let flushes = acknowledged & 1 << VIRTIO_BLK_F_FLUSH != 0;
    let switches = acknowledged & 1 << VIRTIO_BLK_F_CONFIG_WCE != 0;
    flushes && (writeback || !switches)
}

/// The configuration space: struct virtio_blk_config.
pub(crate) fn config_space(disk: &DiskObject, writeback: bool) -> Vec<u8> {
    let mut config = Vec::with_capacity(CONFIG_BYTES);
    config.extend((disk.size_bytes / SECTOR_BYTES).to_le_bytes()); // capacity
    config.extend(SEGMENT_BYTES_MAX.to_le_bytes()); // size_max
    config.extend(SEGMENTS_MAX.to_le_bytes()); // seg_max
    config.extend([0; 4]); // geometry: not offered
    config.extend(disk.block_bytes.to_le_bytes()); // blk_size
    // topology: what is physically written at once is a page of the host's at least
    let physical_exponent = match disk.block_bytes {
        512 => 3,
        1024 => 2,
        2048 => 1,
        _ => 0u8,
    };
    config.extend([physical_exponent, 0]);
    config.extend(1u16.to_le_bytes()); // min_io_size, in blocks
    config.extend(0u32.to_le_bytes()); // opt_io_size
    debug_assert_eq!(config.len(), WRITEBACK_AT);
    config.extend([u8::from(writeback), 0]);
    config.extend(disk.queues.to_le_bytes());
    config.extend(DISCARD_SECTORS_MAX.to_le_bytes());
    config.extend(1u32.to_le_bytes()); // max_discard_seg
    config.extend(discard_sectors(disk).to_le_bytes()); // discard_sector_alignment
    config.extend(ZEROES_SECTORS_MAX.to_le_bytes());
    config.extend(1u32.to_le_bytes()); // max_write_zeroes_seg
    config.extend([1, 0, 0, 0]); // write_zeroes_may_unmap
    debug_assert_eq!(config.len(), CONFIG_BYTES);
    config
}

/// What the driver's discards should be multiples of, in sectors: pieces that are less waste everybody's time. It is advice, and smaller
/// ones are carried out too.
fn discard_sectors(disk: &DiskObject) -> u32 {
    let block = disk.block_bytes.max(512);
    let fits =
        |&bytes: &u32| bytes.is_multiple_of(block) && (1..=DISCARD_SECTORS_MAX).contains(&(bytes / 512));
    // What is no whole blocks, or longer than any discard, makes no sense.
    let whole = disk.discard_granularity_bytes.map(|bytes| bytes.max(block)).filter(fits);
    whole.unwrap_or(block.max(DISCARD_BYTES_CAREFUL)) / 512
}

/// The longest range of a discard or a write of zeroes.
pub(crate) fn range_sectors_max(discard: bool) -> u32 {
    if discard { DISCARD_SECTORS_MAX } else { ZEROES_SECTORS_MAX }
}
