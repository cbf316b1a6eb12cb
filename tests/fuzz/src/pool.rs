//! What lies in a pool that someone else formatted, or wrote to.

use std::path::Path;
use std::sync::OnceLock;

use cxl_pool::{
    CreateOptions, HardwareMemory, Layout, Memory, Pool, ReplicaId, Superblock, regions as table,
};

use super::input::Input;

/// A small pool without a name.
fn pool() -> &'static Pool {
    static POOL: OnceLock<Pool> = OnceLock::new();
    POOL.get_or_init(|| {
        let path = std::env::temp_dir().join(format!("wadi-fuzz-{}", std::process::id()));
        let options = CreateOptions {
            size_bytes: Some(8 << 20),
            host_slots: 1,
            replica_slots: 1,
            ..CreateOptions::default()
        };
        let pool = Pool::create(&path, &options).expect("a pool in the temporary directory");
        std::fs::remove_file(&path).expect("the pool's file");
        pool
    })
}

/// Its memory. Targets share it, so each has its own part: the region table, or half of the data area.
pub(crate) fn memory() -> HardwareMemory {
    pool().hardware()
}

pub(crate) fn layout() -> &'static Layout {
    pool().layout()
}

/// One byte that says whether to mend the checksum, the size of the device, then the superblock.
pub fn superblock(data: &[u8]) {
    let mut input = Input(data);
    let choice = input.byte();
    let mut actual_bytes = input.u64();
    let mut bytes: [u8; Superblock::WIRE_BYTES] = input.array();
    if choice & 1 == 0 {
        let (content, crc) = bytes.split_at_mut(Superblock::WIRE_BYTES - 4);
        crc.copy_from_slice(&crc32fast::hash(content).to_le_bytes());
    }
    if choice & 2 == 0 {
        actual_bytes = u64::from_le_bytes(std::array::from_fn(|at| bytes[32 + at]));
    }
    let Ok(superblock) = Superblock::decode(bytes, actual_bytes, Path::new("pool")) else { return };
    assert_eq!(superblock.size_bytes, actual_bytes);
    let Ok(layout) = Layout::of(&superblock) else { return };
    let (data, control) = (layout.data(), layout.control());
    assert!(data.end().bytes().get() <= actual_bytes && data.bytes() > 0 && !data.overlaps(&control));
    for replica in layout.replicas() {
        for copy in layout.region_tables(replica) {
            assert!(control.contains_area(&copy));
        }
        for endpoint in layout.endpoints() {
            assert!(control.contains_area(&layout.ring_to_endpoint(replica, endpoint)));
            assert!(control.contains_area(&layout.ring_from_endpoint(replica, endpoint)));
        }
    }
}

/// One byte that says whether to mend the checksums, then a header line and lines of entries.
pub fn regions(data: &[u8]) {
    let mut input = Input(data);
    let mend = input.byte() & 1 == 0;
    let mut header: [u8; 64] = input.array();
    let body = input.some(64 * 64);
    if mend {
        // As many entries as there are, unless the input insists on others.
        if header[16..20] == [0; 4] {
            let entries = u32::try_from(body.len() / 64).expect("64 at most");
            header[16..20].copy_from_slice(&entries.to_le_bytes());
        }
        let entries = u32::from_le_bytes(std::array::from_fn(|at| header[16 + at]));
        let whole = body.get(..64 * entries.min(64) as usize).unwrap_or(body);
        header[56..60].copy_from_slice(&crc32fast::hash(whole).to_le_bytes());
        let crc = crc32fast::hash(&header[..60]).max(1);
        header[60..].copy_from_slice(&crc.to_le_bytes());
    }
    let (memory, layout) = (memory(), layout());
    let [copy, other] = layout.region_tables(ReplicaId::new(0));
    for area in [copy, other] {
        memory.zero(area.start_byte(), 65 * 64);
    }
    memory.write(copy.start_byte(), &header);
    memory.write(copy.start_byte().saturating_add(64), body);
    let Some(read) = table::read(&memory, layout) else { return };
    assert_eq!(read.version.term, u64::from_le_bytes(std::array::from_fn(|at| header[at])));
    for (entry, other) in read.entries.iter().zip(read.entries.iter().skip(1)) {
        // Whoever shows or checks a table computes these.
        let _ = (entry.area.end(), entry.area.bytes(), entry.area.overlaps(&other.area));
        let _ = (layout.data().contains_area(&entry.area), entry.area.to_string());
    }
}
