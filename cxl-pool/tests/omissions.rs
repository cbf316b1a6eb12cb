//! What makes records and the region table visible is left out, one thing at a time; what readers rely on must break.

use std::panic::{self, AssertUnwindSafe};
use std::path::Path;

use cxl_pool::regions::{self, Purpose, RegionEntry, RegionState, TableVersion};
use cxl_pool::simulated::{Faults, Omission, Operation, Random, SimulatedPool};
use cxl_pool::{
    Area, EndpointId, FenceLine, Hello, HostId, Layout, LineCount, LineOffset, Memory, Record, ReplicaId,
    Role,
};

const WRITER: HostId = HostId::new(1);
const READER: HostId = HostId::new(2);
const SIZE_BYTES: u64 = 16 << 20;
const SEEDS: u64 = 300;

fn run(seed: u64, omission: &Omission) {
    let layout = Layout::new(SIZE_BYTES, 2, 2).unwrap();
    let pool = SimulatedPool::new(seed, SIZE_BYTES);
    let (writer, reader) = (omission.in_memory(pool.host(WRITER)), omission.in_memory(pool.host(READER)));
    let endpoint = EndpointId::new(WRITER, Role::NetBackend);
    let (hello_at, fence_at) = (layout.hello(endpoint), layout.fence(ReplicaId::new(0), endpoint));
    // Who takes something back relies on this: from the fence on, whoever looks sees it.
    for generation in 1..20 {
        FenceLine { generation, term: 1 }.publish(&writer, fence_at);
        writer.full_fence();
        let shown = FenceLine::look(&reader, fence_at).map(|line| line.generation);
        assert_eq!(shown, Some(generation), "a fence that was raised is not seen");
    }
    let hello = Hello { incarnation: 5, pid: 7, protocol: (1, 2), started_unix_ms: 9 };
    hello.publish(&writer, hello_at);
    writer.full_fence();
    assert_eq!(Hello::look(&reader, hello_at), Some(hello));
    Hello::erase(&writer, hello_at);
    writer.full_fence();
    assert_eq!(Hello::look(&reader, hello_at), None, "who has gone still seems to be there");
    regions_are_read(seed, &layout, &writer, &reader);
    assert_eq!(pool.faults(), Faults::default());
}

fn regions_are_read<M: Memory>(seed: u64, layout: &Layout, writer: &M, reader: &M) {
    let mut random = Random::new(seed);
    for index in 1..20 {
        let entry = RegionEntry {
            id: u32::try_from(index).unwrap(),
            area: Area::new(LineOffset::new(4096), LineCount::new(index)),
            holder: WRITER,
            purpose: Purpose::TxArea,
            state: RegionState::Leased,
        };
        let entries = vec![entry; 1 + usize::try_from(random.below(8)).unwrap()];
        let version = TableVersion { term: 1, index };
        regions::publish(writer, layout, ReplicaId::new(0), version, &entries).unwrap();
        // In the middle of this one, an older table must still be there.
        let meanwhile = regions::read(reader, layout);
        assert!(index == 1 || meanwhile.is_some_and(|table| table.version.index + 1 >= index));
        writer.full_fence();
        let table = regions::read(reader, layout).expect("one copy is always whole");
        assert_eq!(table.version.index, index);
        assert_eq!(table.entries, entries);
    }
}

fn notices(seed: u64, omission: &Omission) -> bool {
    panic::catch_unwind(AssertUnwindSafe(|| run(seed, omission))).is_err()
}

#[test]
fn every_omission_is_noticed() {
    let complete = Omission::default();
    (0..100).for_each(|seed| run(seed, &complete));
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let sites: Vec<_> =
        complete.seen().into_iter().filter(|site| site.file.starts_with("cxl-pool/src")).collect();
    assert!(sites.len() >= 5, "the sites are found by running into them: {sites:?}");
    let mut unnoticed = Vec::new();
    for site in sites {
        let name = site.name(&workspace);
        // Only for speed of delivery: a reader tells by the checksum what is whole, and finds the older table meanwhile; and
        // whoever relies on being seen fences fully after publishing.
        let excused = site.operation == Operation::StoreFence;
        let omission = Omission::of(site);
        match (0..SEEDS).find(|seed| notices(*seed, &omission)) {
            Some(seed) => println!("| `{name}` | seed {seed} |"),
            None if excused => println!("| `{name}` | – |"),
            None => unnoticed.push(name),
        }
    }
    assert_eq!(unnoticed, [""; 0]);
}
