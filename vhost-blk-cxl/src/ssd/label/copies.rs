//! The two copies of a table as bytes, and which of them counts.

use std::io;
use std::path::Path;

use super::{LabelError, Stored, TABLE_BYTES_MAX};

const HEADER_BYTES: usize = 64;
const MAGIC: &[u8; 8] = b"WADIVOLS";
pub(super) const VERSION: u32 = 1;
const MAGIC_AT: usize = 0;
pub(super) const VERSION_AT: usize = 8;
const CHECKSUM_AT: usize = 12;
const SEQUENCE_AT: usize = 16;
const LENGTH_AT: usize = 24;

/// A copy as it was found.
enum Copy {
    Whole { sequence: u64, stored: Stored },
    Newer(u32),
    None,
}

/// The table that counts.
#[derive(Debug)]
pub(super) struct Chosen {
    pub(super) sequence: u64,
    pub(super) stored: Stored,
    /// Why the other copy could not be read, if so.
    pub(super) missing: Option<io::Error>,
}

/// Of the copies as they were read, the table that counts. One that the medium does not give back any more leaves the other, which may be the
/// older one: whoever knows better writes it anew.
pub(super) fn choose(path: &Path, copies: [io::Result<Vec<u8>>; 2]) -> Result<Chosen, LabelError> {
    let path = || path.to_owned();
    let (mut newest, mut unreadable) = (None, None);
    let (mut is_empty, mut halves) = (true, Vec::new());
    for copy in copies {
        let bytes = match copy {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                return Err(LabelError::TooSmall { path: path() });
            }
            Err(error) => {
                unreadable = Some(error);
                continue;
            }
        };
        match parse(&bytes) {
            Copy::Whole { sequence, stored } => {
                if newest.as_ref().is_none_or(|(known, _)| *known < sequence) {
                    newest = Some((sequence, stored));
                }
            }
            Copy::Newer(found) => return Err(LabelError::Version { path: path(), found }),
            Copy::None => {}
        }
        is_empty &= bytes.iter().all(|&byte| byte == 0);
        halves.push(bytes);
    }
    match (newest, unreadable) {
        (Some((sequence, stored)), missing) => Ok(Chosen { sequence, stored, missing }),
        (None, Some(source)) => Err(LabelError::Io { what: "read", path: path(), source }),
        // The first copy ever may have been torn; nothing was entrusted to it.
        (None, None) if is_empty || is_torn_first(&halves) => {
            Ok(Chosen { sequence: 0, stored: Stored::default(), missing: None })
        }
        (None, None) => Err(LabelError::Foreign { path: path() }),
    }
}

/// The bytes of a copy; none if that would be too long.
pub(super) fn format(sequence: u64, stored: &Stored) -> Option<Vec<u8>> {
    let mut copy = vec![0; HEADER_BYTES];
    serde_json::to_writer(&mut copy, stored).ok()?;
    let length = u32::try_from(copy.len() - HEADER_BYTES).ok()?;
    copy[MAGIC_AT..VERSION_AT].copy_from_slice(MAGIC);
    copy[VERSION_AT..CHECKSUM_AT].copy_from_slice(&VERSION.to_le_bytes());
    copy[SEQUENCE_AT..LENGTH_AT].copy_from_slice(&sequence.to_le_bytes());
    copy[LENGTH_AT..LENGTH_AT + 4].copy_from_slice(&length.to_le_bytes());
    let checksum = crc32fast::hash(&copy[SEQUENCE_AT..]);
    copy[CHECKSUM_AT..SEQUENCE_AT].copy_from_slice(&checksum.to_le_bytes());
    (copy.len() as u64 <= TABLE_BYTES_MAX).then_some(copy)
}

fn parse(copy: &[u8]) -> Copy {
    let word = |at: usize| {
        let mut word = [0; 4];
        word.copy_from_slice(&copy[at..at + 4]);
        u32::from_le_bytes(word)
    };
    if copy[MAGIC_AT..VERSION_AT] != MAGIC[..] {
        return Copy::None;
    }
    let length = word(LENGTH_AT) as usize;
    let Some(covered) = copy.get(SEQUENCE_AT..HEADER_BYTES.saturating_add(length)) else { return Copy::None };
    if crc32fast::hash(covered) != word(CHECKSUM_AT) {
        return Copy::None;
    }
    if word(VERSION_AT) != VERSION {
        return Copy::Newer(word(VERSION_AT));
    }
    let sequence = u64::from(word(SEQUENCE_AT)) | u64::from(word(SEQUENCE_AT + 4)) << 32;
    match serde_json::from_slice::<Stored>(&copy[HEADER_BYTES..HEADER_BYTES + length]) {
        Ok(stored) if stored.has_places_for_logs() => Copy::Whole { sequence, stored },
        Ok(_) | Err(_) => Copy::None,
    }
}

/// Whether this is what a crash left of the first table: nothing in the first half, and in the second one the beginning
/// of a copy, or of one whose beginning did not arrive.
fn is_torn_first(halves: &[Vec<u8>]) -> bool {
    let [first, second] = halves else { return false };
    first.iter().all(|&byte| byte == 0)
        && (second.starts_with(MAGIC) || second[..512].iter().all(|&byte| byte == 0))
}
