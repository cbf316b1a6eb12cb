//! The region table on memory that misbehaves.

use std::collections::BTreeMap;

use cxl_pool::regions::{
    self, Purpose, RegionEntry, RegionState, RegionTable, TableFull, TableVersion, TableWriter,
};
use cxl_pool::simulated::{Random, SimulatedPool, check_seeds};
use cxl_pool::{
    Area, HostId, LINE_BYTES, Layout, LineCount, LineOffset, Memory, REGION_SLOTS_LEAST, ReplicaId,
};

const A: HostId = HostId::new(1);
const B: HostId = HostId::new(2);
const SIZE_BYTES: u64 = 8 << 20;
const TARGET: &str = "-p cxl-pool --test region_table";
const REPLICA: ReplicaId = ReplicaId::new(0);
/// Several blocks of entries.
const IDS: u64 = 300;

/// What the table is to show.
type Shown = BTreeMap<u32, RegionEntry>;

fn layout() -> Layout {
    Layout::new(SIZE_BYTES, 2, 2, REGION_SLOTS_LEAST).unwrap()
}

fn version(index: u64) -> TableVersion {
    TableVersion { term: 1, index }
}

fn entry(id: u32, lines: u64) -> RegionEntry {
    RegionEntry {
        id,
        area: Area::new(LineOffset::new(lines), LineCount::new(lines)),
        holder: A,
        purpose: Purpose::DataArea,
        state: RegionState::Quarantined,
    }
}

/// Regions come, change and go.
fn change(random: &mut Random, table: &mut TableWriter, shown: &mut Shown, index: u64) {
    let coming = random.one_in(2);
    for _ in 0..random.below(40) {
        let id = u32::try_from(random.below(IDS)).unwrap();
        if random.one_in(4) == coming {
            table.remove(id);
            shown.remove(&id);
        } else {
            table.set(&entry(id, index)).unwrap();
            shown.insert(id, entry(id, index));
        }
    }
}

/// The table of a controller that begins anew.
fn anew(layout: &Layout, shown: &Shown) -> TableWriter {
    let mut table = TableWriter::new(layout, REPLICA);
    for entry in shown.values() {
        table.set(entry).unwrap();
    }
    table
}

fn by_id(table: &RegionTable) -> Shown {
    let entries: Shown = table.entries.iter().map(|entry| (entry.id, *entry)).collect();
    assert_eq!(entries.len(), table.entries.len(), "a region twice");
    entries
}

#[test]
fn a_reader_always_finds_a_whole_recent_one() {
    let layout = layout();
    check_seeds(TARGET, 60, |seed| {
        let pool = SimulatedPool::new(seed, SIZE_BYTES);
        let (writer, reader) = (pool.host(A), pool.host(B));
        let mut random = Random::new(seed);
        assert_eq!(regions::read(&reader, &layout), None);
        let (mut table, mut shown) = (TableWriter::new(&layout, REPLICA), Shown::new());
        for index in 1..80 {
            change(&mut random, &mut table, &mut shown, index);
            if random.one_in(20) {
                table = anew(&layout, &shown);
            }
            table.publish(&writer, version(index));
            writer.full_fence();
            let found = regions::read(&reader, &layout).expect("one copy is always whole");
            assert_eq!((found.version.index, by_id(&found)), (index, shown.clone()), "seed {seed}");
            if random.one_in(6) {
                // A controller that dies in the middle of the next one leaves this one to be read.
                let before = found;
                change(&mut random, &mut table, &mut shown, index + 1);
                table.publish(&writer, version(index + 1));
                let copies = layout.region_tables(REPLICA);
                let newer = copies.into_iter().find(|copy| {
                    writer.invalidate(copy.start_byte(), LINE_BYTES as u64);
                    writer.full_fence();
                    writer.load(copy.start_byte().saturating_add(8)) == index + 1
                });
                let torn = newer.expect("it was published");
                writer.store(torn.start_byte(), 0xdead);
                writer.flush(torn.start_byte(), 8);
                writer.full_fence();
                assert_eq!(regions::read(&reader, &layout).as_ref(), Some(&before), "seed {seed}");
                table = anew(&layout, &shown);
            }
        }
        Ok(())
    });
}

#[test]
fn a_line_that_somebody_destroyed_is_whole_again_after_a_while() {
    let layout = layout();
    let memory = SimulatedPool::new(5, SIZE_BYTES).host(A);
    let shown: Shown = (0..200).map(|id| (id, entry(id, 7))).collect();
    let mut table = anew(&layout, &shown);
    table.publish(&memory, version(1));
    table.publish(&memory, version(2));
    for copy in layout.region_tables(REPLICA) {
        let at = copy.start_byte().saturating_add(150 * LINE_BYTES as u64);
        memory.store(at, 0xdead);
        memory.flush(at, 8);
    }
    memory.full_fence();
    assert_eq!(regions::read(&memory, &layout), None, "who reads it sees that it is not whole");
    for index in 3..60 {
        table.publish(&memory, version(index));
    }
    for index in 60..64 {
        table.publish(&memory, version(index));
        memory.full_fence();
        let found = regions::read(&memory, &layout).expect("both copies are whole");
        assert_eq!((found.version.index, by_id(&found)), (index, shown.clone()));
    }
}

#[test]
fn the_highest_version_of_all_replicas_counts() {
    let layout = layout();
    let memory = SimulatedPool::new(3, SIZE_BYTES).host(A);
    for (replica, term, index) in [(0, 1, 50), (1, 2, 10)] {
        let mut table = TableWriter::new(&layout, ReplicaId::new(replica));
        table.publish(&memory, TableVersion { term, index });
    }
    let table = regions::read(&memory, &layout).unwrap();
    assert_eq!((table.replica, table.version.term), (ReplicaId::new(1), 2));
}

#[test]
fn more_regions_than_fit_are_refused_and_those_that_are_there_stay() {
    for slots in [REGION_SLOTS_LEAST, 5000] {
        let layout = Layout::new(SIZE_BYTES, 2, 2, slots).unwrap();
        let memory = SimulatedPool::new(3, SIZE_BYTES).host(A);
        let shown: Shown = (0..slots).map(|id| (id, entry(id, 7))).collect();
        let mut table = anew(&layout, &shown);
        assert_eq!(table.set(&entry(slots, 7)), Err(TableFull { slots: slots as usize }));
        table.publish(&memory, version(1));
        assert_eq!(regions::read(&memory, &layout).map(|found| by_id(&found)), Some(shown));
        // One goes, and there is room for another one.
        table.remove(17);
        table.set(&entry(slots, 7)).unwrap();
        table.publish(&memory, version(2));
        let found = by_id(&regions::read(&memory, &layout).unwrap());
        assert!(found.len() == slots as usize && found.contains_key(&slots) && !found.contains_key(&17));
    }
}

#[test]
fn who_wrote_the_newest_table_is_known_also_while_its_entries_change() {
    let layout = layout();
    let memory = SimulatedPool::new(3, SIZE_BYTES).host(A);
    assert_eq!(regions::newest(&memory, &layout), None);
    for (replica, term, index) in [(0, 1, 50), (1, 2, 10)] {
        let mut table = TableWriter::new(&layout, ReplicaId::new(replica));
        table.set(&entry(1, 7)).unwrap();
        for index in [index, index + 1] {
            table.publish(&memory, TableVersion { term, index });
        }
        for copy in layout.region_tables(ReplicaId::new(replica)) {
            let at = copy.start_byte().saturating_add(LINE_BYTES as u64);
            memory.store(at, 0xdead);
            memory.flush(at, 8);
            memory.full_fence();
        }
    }
    assert_eq!(regions::read(&memory, &layout), None, "no copy is whole");
    let newest = TableVersion { term: 2, index: 11 };
    assert_eq!(regions::newest(&memory, &layout), Some((ReplicaId::new(1), newest)));
}
