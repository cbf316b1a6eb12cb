//! The pool, drawn to scale.

use std::collections::BTreeMap;
use std::fmt::Write;

use pod_api::{ByteSize, Pool, Region, RegionState};

use crate::table::{plain, region_state};

/// Cells of a line of the map.
const COLUMNS: u64 = 64;
/// Lines of the map.
const ROWS: u64 = 8;

const FREE: char = '.';
const QUARANTINED: char = '!';
const FAILED: char = 'X';

/// Summary, map and regions.
pub(crate) fn pool(pool: &Pool) -> String {
    let shown = use_of(pool);
    if pool.regions.is_empty() { shown } else { format!("{shown}\n{}", regions(pool)) }
}

/// Summary and map.
pub(crate) fn use_of(pool: &Pool) -> String {
    let mut shown = String::new();
    // Writing to a string does not fail.
    let _ = writeln!(
        shown,
        "pool {} ({}, coherence in {}, protocol {}), {}\ndata area {}: {} free (largest piece {}), {} quarantined, {} failed\n",
        pool.path,
        pool.uuid,
        pool.coherence,
        pool.protocol,
        ByteSize::new(pool.size_bytes),
        ByteSize::new(pool.data_bytes),
        ByteSize::new(pool.free_bytes),
        ByteSize::new(pool.largest_free_bytes),
        ByteSize::new(pool.quarantined_bytes),
        ByteSize::new(pool.failed_bytes),
    );
    shown.push_str(&map(pool));
    shown
}

/// The regions, one a line.
pub(crate) fn regions(pool: &Pool) -> String {
    let rows = pool.regions.iter().map(|region| {
        vec![
            region.id.to_string(),
            format!("{:#x}", region.start_bytes),
            ByteSize::new(region.size_bytes).to_string(),
            region.purpose.clone(),
            region_state(region.state).to_owned(),
            region.owner.clone(),
            region.holders.join(", "),
        ]
    });
    let header = ["region", "start", "size", "purpose", "state", "owner", "holders"];
    plain(&header, &[0, 1, 2], rows.collect())
}

/// Each cell is the same share of the data area and shows what it is used for most.
fn map(pool: &Pool) -> String {
    let cell_bytes = pool.data_bytes.div_ceil(COLUMNS * ROWS).max(1);
    let cells = pool.data_bytes.div_ceil(cell_bytes);
    let mut shares = vec![BTreeMap::new(); usize::try_from(cells).unwrap_or_default()];
    for region in &pool.regions {
        share_out(region, pool.data_start_bytes, cell_bytes, &mut shares);
    }
    let mut shown = String::new();
    let columns = usize::try_from(COLUMNS).unwrap_or(usize::MAX);
    for (row, shares) in (0..).zip(shares.chunks(columns)) {
        let _ =
            write!(shown, "{:>12}  ", format!("{:#x}", pool.data_start_bytes + row * COLUMNS * cell_bytes));
        shown.extend(shares.iter().map(most_of));
        shown.push('\n');
    }
    let _ = writeln!(
        shown,
        "{:>14}T transmit  R receive  D data  G guests' RAM  B boards  c rings  {QUARANTINED} quarantined  {FAILED} failed  {FREE} free; one cell is {}",
        "",
        ByteSize::new(cell_bytes)
    );
    shown
}

/// What each letter has of a cell, in bytes.
type Shares = BTreeMap<char, u64>;

/// Gives each cell in which a region lies its part of it.
fn share_out(region: &Region, data_start: u64, cell_bytes: u64, cells: &mut [Shares]) {
    let end = region.start_bytes + region.size_bytes;
    let first = region.start_bytes.saturating_sub(data_start) / cell_bytes;
    let cells = usize::try_from(first).ok().and_then(|first| cells.get_mut(first..)).unwrap_or_default();
    for (cell, shares) in (first..).zip(cells) {
        let start = data_start + cell * cell_bytes;
        if start >= end {
            break;
        }
        let bytes = end.min(start + cell_bytes).saturating_sub(start.max(region.start_bytes));
        if bytes > 0 {
            *shares.entry(letter(region)).or_default() += bytes;
        }
    }
}

/// A small region in a large cell is shown all the same: free only is what is free altogether.
fn most_of(shares: &Shares) -> char {
    shares.iter().max_by_key(|(_, bytes)| **bytes).map_or(FREE, |(letter, _)| *letter)
}

fn letter(region: &Region) -> char {
    match (region.state, region.purpose.as_str()) {
        (RegionState::Quarantined, _) => QUARANTINED,
        (RegionState::Failed, _) => FAILED,
        (RegionState::InUse, "transmit") => 'T',
        (RegionState::InUse, "receive") => 'R',
        (RegionState::InUse, "data") => 'D',
        (RegionState::InUse, "ram") => 'G',
        (RegionState::InUse, "board") => 'B',
        (RegionState::InUse, _) => 'c',
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn region(start_bytes: u64, size_bytes: u64, purpose: &str, state: RegionState) -> Region {
        let (owner, holders) = (String::new(), Vec::new());
        Region { id: 1, start_bytes, size_bytes, purpose: purpose.to_owned(), owner, state, holders }
    }

    #[test]
    fn map_is_to_scale() {
        let mib = 1 << 20;
        let shown = map(&Pool {
            data_start_bytes: mib,
            data_bytes: 512 * mib,
            regions: vec![
                region(mib, 64 * mib, "transmit", RegionState::InUse),
                region(65 * mib, 32 * mib, "receive", RegionState::InUse),
                region(97 * mib, 4096, "rings", RegionState::InUse),
                region(98 * mib, mib, "data", RegionState::Quarantined),
                region(99 * mib, mib, "data", RegionState::Failed),
            ],
            ..Pool::default()
        });
        let rows: Vec<&str> =
            shown.lines().map(|line| line.split_whitespace().last().unwrap_or_default()).collect();
        assert_eq!(rows[0], "T".repeat(64));
        assert_eq!(rows[1], format!("{}c!X{}", "R".repeat(32), ".".repeat(29)));
        assert_eq!(rows[7], ".".repeat(64));
        assert!(shown.contains("one cell is 1.0 MiB"), "{shown}");
    }

    #[test]
    fn empty_pool_has_a_map() {
        assert!(pool(&Pool::default()).contains("free"));
    }
}
