//! What makes a pool, its records and the region table visible is left out, one thing at a time; what readers rely on must break.

use std::path::Path;

use uuid::Uuid;

use crate::pool::{read_superblock, wipe, write_superblock};
use crate::regions::{self, Purpose, RegionEntry, RegionState, TableVersion, TableWriter};
use crate::simulated::{Faults, Mutilation, Omission, OmittingMemory, Random, SimulatedPool, calls};
use crate::{
    Area, ByteOffset, CoherenceMode, ControllerHello, EndpointId, FenceLine, Generation, Grant, Hello,
    HostId, Layout, LineCount, LineOffset, Memory, REGION_SLOTS_LEAST, Record, ReplicaHello, ReplicaId, Role,
    Superblock, read_beat,
};

const WRITER: HostId = HostId::new(1);
const READER: HostId = HostId::new(2);
const HOLDER: HostId = HostId::new(3);
const SIZE_BYTES: u64 = 16 << 20;
const REPLICA: ReplicaId = ReplicaId::new(0);

fn run(seed: u64, omission: &Omission) {
    let layout = Layout::new(SIZE_BYTES, 2, 2, REGION_SLOTS_LEAST).unwrap();
    let pool = SimulatedPool::new(seed, SIZE_BYTES);
    let (writer, reader) = (omission.in_memory(pool.host(WRITER)), omission.in_memory(pool.host(READER)));
    let endpoint = EndpointId::new(WRITER, Role::NetBackend);
    let (hello_at, fence_at) = (layout.hello(endpoint), layout.fence(REPLICA, endpoint));
    // Who takes something back relies on this: from the fence on, whoever looks sees it.
    for generation in 1..20 {
        FenceLine { generation, term: 1, incarnation: 0 }.publish(&writer, fence_at);
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
    other_records_are_seen(&layout, &writer, &reader);
    beats_are_seen(&layout, &writer, &reader);
    regions_are_read(seed, &layout, &writer, &reader);
    a_scrubbed_region_can_be_given_on(seed, &pool, omission);
    a_pool_made_anew_has_nothing_of_the_old_one(seed, &layout, &pool, omission);
    assert_eq!(pool.faults(), Faults::default());
}

/// Each of them is what somebody waits for.
fn other_records_are_seen<M: Memory>(layout: &Layout, writer: &M, reader: &M) {
    let endpoint = EndpointId::new(WRITER, Role::NetBackend);
    for life in 1..4 {
        let grant = Grant {
            endpoint_incarnation: life,
            controller_incarnation: 2,
            term: 3,
            fence_generation: 4,
            control_generation: Generation::new(5),
        };
        grant.publish(writer, layout.grant(REPLICA, endpoint));
        let controller = ControllerHello { incarnation: life, term: 2, pid: 3, protocol: (1, 2) };
        controller.publish(writer, layout.controller(REPLICA));
        let replica = ReplicaHello { incarnation: life, life: 2, pid: 3, protocol: (1, 2) };
        replica.publish(writer, layout.replica_hello(REPLICA));
        writer.full_fence();
        assert_eq!(Grant::look(reader, layout.grant(REPLICA, endpoint)), Some(grant));
        assert_eq!(ControllerHello::look(reader, layout.controller(REPLICA)), Some(controller));
        assert_eq!(ReplicaHello::look(reader, layout.replica_hello(REPLICA)), Some(replica));
    }
}

fn beats_are_seen<M: Memory>(layout: &Layout, writer: &M, reader: &M) {
    let at = layout.controller_heartbeat(REPLICA);
    for beat in 1..4 {
        writer.store(at, beat);
        writer.write_back(at, 8);
        writer.full_fence();
        assert_eq!(read_beat(reader, at), beat, "who lives seems to be dead");
    }
}

/// A region whose holder died is used on another host once its host was scrubbed.
fn a_scrubbed_region_can_be_given_on(seed: u64, pool: &SimulatedPool, omission: &Omission) {
    let area = Area::new(LineOffset::new(SIZE_BYTES / 64 - 64), LineCount::new(64));
    pool.host(HOLDER).write(area.start_byte(), &[0xdd; 4096]);
    pool.crash(HOLDER);
    regions::scrub(&omission.in_memory(pool.host(HOLDER)), area);
    let next = pool.host(READER);
    next.invalidate(area.start_byte(), area.bytes());
    next.full_fence();
    let mut random = Random::new(seed);
    let given: Vec<u8> = (0..512).flat_map(|_| random.bits().to_le_bytes()).collect();
    next.write(area.start_byte(), &given);
    next.flush(area.start_byte(), area.bytes());
    next.full_fence();
    for _ in 0..1000 {
        next.load(LineOffset::new(1).bytes());
    }
    let mut there = [0; 4096];
    pool.shared(area.start_byte(), &mut there);
    assert!(there[..] == given, "a line of the region's last holder came over it");
}

fn regions_are_read<M: Memory>(seed: u64, layout: &Layout, writer: &M, reader: &M) {
    let mut random = Random::new(seed);
    let mut table = TableWriter::new(layout, REPLICA);
    let area = |index| Area::new(LineOffset::new(4096), LineCount::new(u64::from(index)));
    for index in 1..20 {
        let entry = |number| RegionEntry {
            id: index * 16 + number,
            area: area(index),
            holder: WRITER,
            purpose: Purpose::TxArea,
            state: RegionState::Leased,
        };
        let entries: Vec<_> = (0..=u32::try_from(random.below(8)).unwrap()).map(entry).collect();
        table.clear();
        for entry in &entries {
            table.set(entry).unwrap();
        }
        table.publish(writer, TableVersion { term: 1, index: u64::from(index) });
        // In the middle of this one, an older table must still be there.
        let meanwhile = regions::read(reader, layout);
        assert!(index == 1 || meanwhile.is_some_and(|table| table.version.index + 1 >= u64::from(index)));
        writer.full_fence();
        let holding = regions::holding(reader, layout, area(index).start);
        assert_eq!(holding, Some((index * 16, WRITER)), "whose a line is, is not known");
        let table = regions::read(reader, layout).expect("one copy is always whole");
        assert_eq!(table.version.index, u64::from(index));
        assert_eq!(table.entries, entries);
    }
}

/// What was on a device before is no part of the pool that is made there.
fn a_pool_made_anew_has_nothing_of_the_old_one(
    seed: u64,
    layout: &Layout,
    pool: &SimulatedPool,
    omission: &Omission,
) {
    let (writer, reader) = (omission.in_memory(pool.host(WRITER)), omission.in_memory(pool.host(READER)));
    let mut random = Random::new(seed);
    let superblock = |uuid| Superblock {
        major: 1,
        minor: 0,
        uuid: Uuid::from_u128(uuid),
        size_bytes: SIZE_BYTES,
        mode: CoherenceMode::Software,
        host_slots: 2,
        replica_slots: 2,
        region_slots: REGION_SLOTS_LEAST,
    };
    let found = |reader: &OmittingMemory| {
        let decoded = Superblock::decode(read_superblock(reader), SIZE_BYTES, Path::new("pool"));
        decoded.ok().map(|superblock| superblock.uuid.as_u128())
    };
    let record = layout.controller(REPLICA);
    let whole = Area::new(LineOffset::new(0), LineCount::new(record.get() + 1));
    let hello = ControllerHello { incarnation: 1, term: 2, pid: 3, protocol: (1, 2) };
    write_superblock(&writer, &superblock(1));
    assert_eq!(found(&reader), Some(1), "the pool that was made is not seen");
    hello.publish(&writer, record);
    writer.full_fence();
    wipe(&writer, whole);
    if seed.is_multiple_of(2) {
        // Whoever makes it is killed before it goes on, and the superblock leaves its cache by itself.
        let killed = pool.host(WRITER);
        killed.write(ByteOffset::new(0), &superblock(2).encode());
        killed.write_back(ByteOffset::new(0), Superblock::WIRE_BYTES as u64);
        for _ in 0..random.below(2000) {
            killed.load(layout.hello(EndpointId::new(WRITER, Role::NetBackend)).bytes());
        }
    } else {
        write_superblock(&writer, &superblock(2));
        assert_eq!(found(&reader), Some(2), "the pool that was made is not seen");
    }
    // Who sees the superblock sees nothing older.
    if found(&reader) == Some(2) {
        assert_eq!(
            ControllerHello::look(&reader, record),
            None,
            "what was there before seems to be of this pool"
        );
    }
}

#[test]
fn every_omission_is_noticed() {
    Mutilation {
        target: "-p cxl-pool --lib",
        workspace: &Path::new(env!("CARGO_MANIFEST_DIR")).join(".."),
        sources: &["cxl-pool/src"],
        complete: 100,
        seeds: 300,
        excused: &EXCUSED,
        unmet: &[
            (
                "mapped.rs",
                "what the methods of `Memory` are made of: instructions, which no simulation carries out",
            ),
            ("memory.rs", "the same"),
            ("simulated/", "the simulation itself"),
        ],
    }
    .prove(run);
}

/// What is left out of each crate that does something for coherence: `cxl-channel` has its search besides.
const PROVEN: [&str; 6] =
    ["cxl-channel", "cxl-pool", "pod-protocol", "vhost-blk-cxl", "vhost-frontend", "vhost-net-cxl"];

#[test]
fn no_other_crate_does_anything_for_coherence() {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let members = std::fs::read_dir(&workspace).unwrap().map(|entry| entry.unwrap());
    let members = members.filter(|entry| entry.path().join("src").is_dir());
    let mut others = Vec::new();
    for member in members.map(|entry| entry.file_name().into_string().unwrap()) {
        let found = calls(&workspace, &format!("{member}/src"));
        if PROVEN.contains(&member.as_str()) {
            assert!(!found.is_empty(), "{member} does nothing for coherence");
        } else if member != "benches" {
            others.extend(found);
        }
    }
    assert_eq!(others, [], "nothing leaves these out: have the crate a test that does, with `Mutilation`");
}

/// Nobody relies on their order: a reader tells by the checksum what is whole, and finds the older table meanwhile, which a full fence
/// has made so; and whoever relies on being seen fences fully after publishing. `docs/channel.md` has the argument.
const EXCUSED: [&str; 3] = [
    "record.rs show: memory.store_fence()",
    "regions/writer.rs publish: memory.store_fence()",
    "regions/writer.rs publish: memory.store_fence() (2)",
];
