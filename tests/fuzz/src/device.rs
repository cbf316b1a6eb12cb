//! What lies on a device that somebody else may have written to.

use std::fs::{File, remove_file};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use pod_protocol::ids::VolumeId;
use vhost_blk_cxl::intent_log::{BYTES, COVERED_MAX, IntentLog, LENGTH};
use vhost_blk_cxl::ssd::{LABEL_BYTES, Label};

use super::input::Input;

const SECTOR_BYTES: usize = 512;
/// A label has two copies of its table.
const COPY_BYTES: u64 = LABEL_BYTES / 2;
const TABLE_BYTES_MAX: usize = (COPY_BYTES / 2) as usize;
const HEADER_BYTES: usize = 64;

/// One byte, a number of volume, then the sectors of a log, of which all that a bit of the byte is set for are made whole.
pub fn intent_log(data: &[u8]) {
    let mut input = Input(data);
    let whole = input.byte();
    let volume = VolumeId::new(input.u32());
    let grown_bytes = input.u64();
    let mut bytes: [u8; LENGTH] = input.array();
    for (number, sector) in (0_u32..).zip(bytes.chunks_exact_mut(SECTOR_BYTES)) {
        if whole & 1 << number != 0 {
            sector[..8].copy_from_slice(b"WADIWILG");
            sector[12..16].copy_from_slice(&2_u32.to_le_bytes());
            sector[16..20].copy_from_slice(&number.to_le_bytes());
            sector[20..24].copy_from_slice(&volume.get().to_le_bytes());
            let checksum = crc32fast::hash(&sector[12..]);
            sector[8..12].copy_from_slice(&checksum.to_le_bytes());
        }
    }
    let Some((mut log, version)) = IntentLog::decode(&bytes, volume) else { return };
    assert!(log.covered.len() <= COVERED_MAX);
    let in_volume = |log: &IntentLog| {
        let units = log.size_bytes().div_ceil(log.unit_bytes());
        assert!(log.marked.iter().all(|unit| unit < units), "what is marked lies in the volume");
    };
    in_volume(&log);
    assert_eq!(IntentLog::decode(&log.encode(version), volume), Some((log.clone(), version)));
    let marked = log.marked.iter().next().map(|unit| unit * log.unit_bytes());
    log.grow(grown_bytes);
    in_volume(&log);
    if let Some(at) = marked {
        assert!(
            log.units(at, 1).all(|unit| log.marked.contains(unit)),
            "a larger volume has the marks of before"
        );
    }
}

/// A file as long as a label, without a name. Whoever looks at a device opens it by one.
static DEVICE: Mutex<Option<File>> = Mutex::new(None);

/// One byte, of which bits 0 and 1 say which copies are made whole and bit 2 that the first one is newer; the length of the first copy's
/// table; the tables as JSON, or headers and all where they are not made whole.
pub fn label(data: &[u8]) {
    let mut input = Input(data);
    let choice = input.byte();
    let length = usize::from(input.u16());
    let first = input.some(length);
    let second = input.some(TABLE_BYTES_MAX - HEADER_BYTES);
    let newer = u64::from(choice >> 2 & 1);
    let copies = [copy(first, choice & 1 != 0, 1 + newer), copy(second, choice & 2 != 0, 2 - newer)];
    let mut device = DEVICE.lock().unwrap_or_else(PoisonError::into_inner);
    let file = device.get_or_insert_with(|| {
        let path = std::env::temp_dir().join(format!("wadi-label-{}", std::process::id()));
        let file = File::options().create(true).truncate(true).read(true).write(true).open(&path);
        let file = file.expect("a file");
        remove_file(path).expect("it was made");
        file
    });
    file.set_len(0).expect("empty");
    file.set_len(LABEL_BYTES).expect("room");
    for (copy, at) in copies.iter().zip([0, COPY_BYTES]) {
        file.write_all_at(copy, at).expect("written");
    }
    let path = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
    let Ok(label) = Label::inspect(&path) else { return };
    let mut logs = Vec::new();
    for volume in &label.table().volumes {
        let Some(start_bytes) = label.intent_log(volume.id) else { continue };
        let in_copy = start_bytes % COPY_BYTES;
        assert!(in_copy >= TABLE_BYTES_MAX as u64 && in_copy + BYTES <= COPY_BYTES, "behind a table");
        assert!(start_bytes + BYTES <= LABEL_BYTES, "in the label");
        if !logs.contains(&(volume.id, start_bytes)) {
            assert!(logs.iter().all(|&(_, other)| other != start_bytes), "each volume has its own log");
            logs.push((volume.id, start_bytes));
        }
        let read = label.read_intent_log(volume.id);
        assert!(read.is_ok(), "{read:?}");
    }
}

/// A copy of a table, with a header that fits it.
fn copy(table: &[u8], whole: bool, sequence: u64) -> Vec<u8> {
    if !whole {
        return table.to_vec();
    }
    let mut bytes = vec![0; HEADER_BYTES];
    bytes[..8].copy_from_slice(b"WADIVOLS");
    bytes[8..12].copy_from_slice(&1_u32.to_le_bytes());
    bytes[16..24].copy_from_slice(&sequence.to_le_bytes());
    let length = u32::try_from(table.len()).expect("a copy is short");
    bytes[24..28].copy_from_slice(&length.to_le_bytes());
    bytes.extend_from_slice(table);
    let checksum = crc32fast::hash(&bytes[16..]);
    bytes[12..16].copy_from_slice(&checksum.to_le_bytes());
    bytes
}
