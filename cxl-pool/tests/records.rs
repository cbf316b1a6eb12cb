//! Records and the region table on memory that misbehaves.

use cxl_pool::regions::{self, Purpose, RegionEntry, RegionState, TableVersion};
use std::cell::Cell;

use cxl_pool::simulated::{Random, SimulatedPool, check_seeds, seeds};
use cxl_pool::{
    Area, ControllerHello, EndpointId, FenceLine, Generation, Grant, Hello, HostId, Layout, LineCount,
    LineOffset, Memory, Record, ReplicaId, Role,
};

const A: HostId = HostId::new(1);
const B: HostId = HostId::new(2);
const SIZE_BYTES: u64 = 8 << 20;
const TARGET: &str = "-p cxl-pool --test records";

fn layout() -> Layout {
    Layout::new(SIZE_BYTES, 2, 2).unwrap()
}

#[test]
fn what_was_published_and_fenced_is_read_or_nothing_is() {
    let endpoint = EndpointId::new(A, Role::NetBackend);
    let at = layout().hello(endpoint);
    let (seen, missed) = (Cell::new(0), Cell::new(0));
    let count = 100;
    check_seeds(TARGET, count, |seed| {
        let pool = SimulatedPool::new(seed, SIZE_BYTES);
        let (writer, reader) = (pool.host(A), pool.host(B));
        assert_eq!(Hello::look(&reader, at), None, "zeros are no record");
        let mut newest = 0;
        for incarnation in 1..50 {
            let hello = Hello { incarnation, pid: 7, protocol: (1, 2), started_unix_ms: incarnation * 3 };
            hello.publish(&writer, at);
            match Hello::look(&reader, at) {
                Some(found) => {
                    assert_eq!(found.started_unix_ms, found.incarnation * 3, "seed {seed}");
                    assert!(found.incarnation >= newest, "seed {seed}");
                    newest = found.incarnation;
                    seen.set(seen.get() + 1);
                }
                None => missed.set(missed.get() + 1),
            }
        }
        writer.full_fence();
        assert_eq!(Hello::look(&reader, at).map(|hello| hello.incarnation), Some(49), "seed {seed}");
        Hello::erase(&writer, at);
        writer.full_fence();
        assert_eq!(Hello::look(&reader, at), None);
        Ok(())
    });
    let (seen, missed) = (seen.get(), missed.get());
    // One seed alone need not.
    let both = seen > 0 && missed > 0 || seeds(count).count() == 1;
    assert!(both, "the simulation shows both: {seen} seen, {missed} torn or not there yet");
}

#[test]
fn every_record_reads_back() {
    let pool = SimulatedPool::new(1, SIZE_BYTES);
    let memory = pool.host(A);
    let at = LineOffset::new(70);
    let grant = Grant {
        endpoint_incarnation: 1,
        controller_incarnation: 2,
        term: 3,
        fence_generation: 4,
        control_generation: Generation::new(5),
    };
    grant.publish(&memory, at);
    assert_eq!(Grant::look(&memory, at), Some(grant));
    assert_eq!(FenceLine::look(&memory, at), None, "a record of another kind is none");
    let fence = FenceLine { generation: 6, term: 7 };
    fence.publish(&memory, at);
    assert_eq!(FenceLine::look(&memory, at), Some(fence));
    let hello = ControllerHello { incarnation: 8, term: 9, pid: 10, protocol: (11, 12) };
    hello.publish(&memory, at);
    assert_eq!(ControllerHello::look(&memory, at), Some(hello));
}

fn entries(random: &mut Random, version: u64) -> Vec<RegionEntry> {
    let count = random.below(40);
    let entry = |id: u64| RegionEntry {
        id: u32::try_from(id).unwrap(),
        area: Area::new(LineOffset::new(version), LineCount::new(version)),
        holder: A,
        purpose: Purpose::DataArea,
        state: RegionState::Quarantined,
    };
    (0..count).map(entry).collect()
}

#[test]
fn a_reader_of_the_region_table_always_finds_a_whole_recent_one() {
    let layout = layout();
    check_seeds(TARGET, 60, |seed| {
        let pool = SimulatedPool::new(seed, SIZE_BYTES);
        let (writer, reader) = (pool.host(A), pool.host(B));
        let mut random = Random::new(seed);
        assert_eq!(regions::read(&reader, &layout), None);
        let mut newest = 0;
        for index in 1..40 {
            let version = TableVersion { term: 1, index };
            regions::publish(&writer, &layout, ReplicaId::new(0), version, &entries(&mut random, index))
                .unwrap();
            writer.full_fence();
            if random.one_in(3) {
                // A controller that dies in the middle of the next one leaves this one to be read.
                let next = TableVersion { term: 1, index: index + 1 };
                let pieces = entries(&mut random, 99);
                regions::publish(&writer, &layout, ReplicaId::new(0), next, &pieces).unwrap();
                let copies = layout.region_tables(ReplicaId::new(0));
                let torn = copies[usize::try_from(index % 2).unwrap()];
                writer.store(torn.start_byte(), 0xdead);
                writer.flush(torn.start_byte(), 8);
                writer.full_fence();
                let found = regions::read(&reader, &layout).expect("one copy is always whole");
                assert_eq!(found.version.index, index, "seed {seed}");
                break;
            }
            let table = regions::read(&reader, &layout).expect("one copy is always whole");
            assert_eq!(table.version.index, index, "seed {seed}");
            assert!(table.version.index > newest, "seed {seed}");
            assert!(table.entries.iter().all(|entry| entry.area.lines.get() == table.version.index));
            newest = table.version.index;
        }
        Ok(())
    });
}

#[test]
fn the_highest_version_of_all_replicas_counts() {
    let layout = layout();
    let memory = SimulatedPool::new(3, SIZE_BYTES).host(A);
    for (replica, term, index) in [(0, 1, 50), (1, 2, 10)] {
        let version = TableVersion { term, index };
        regions::publish(&memory, &layout, ReplicaId::new(replica), version, &[]).unwrap();
    }
    let table = regions::read(&memory, &layout).unwrap();
    assert_eq!((table.replica, table.version.term), (ReplicaId::new(1), 2));
}

#[test]
fn more_regions_than_fit_are_refused() {
    let layout = layout();
    let memory = SimulatedPool::new(3, SIZE_BYTES).host(A);
    let mut random = Random::new(1);
    let entry = loop {
        if let Some(entry) = entries(&mut random, 1).first() {
            break *entry;
        }
    };
    let too_many = vec![entry; 4096];
    let version = TableVersion { term: 1, index: 1 };
    assert!(regions::publish(&memory, &layout, ReplicaId::new(0), version, &too_many).is_err());
    assert_eq!(regions::read(&memory, &layout), None);
}
