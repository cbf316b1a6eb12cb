//! What makes buffers change hands safely is left out, one thing at a time, wherever the engine does it; something that a
//! guest sees, or a rule of the memory, must break.

#![allow(clippy::cast_possible_truncation, reason = "small numbers, chosen by the test")]

mod common;

use std::panic::{self, AssertUnwindSafe};
use std::path::Path;
use std::thread;
use std::time::Duration;

use common::ram::{Control, RamSsd};
use common::*;
use cxl_pool::simulated::{Faults, Omission, OmittingMemory, SimulatedPool};
use cxl_pool::{Area, HostId, LineCount, LineOffset, Memory};
use pod_protocol::endpoint::Handler;
use pod_protocol::ids::RegionId;

const FRONTEND: HostId = HostId::new(1);
const BACKEND: HostId = HostId::new(2);
const OTHER: HostId = HostId::new(3);
/// Which of the threads comes first is not in the seeds, so some omissions show in a few of a hundred only.
const SEEDS: u64 = 4000;
/// As small as an area may be.
const AREA_BYTES: u64 = 4 << 20;
const REQUEST_BYTES: usize = 2 << 10;
/// What a predecessor left in the frontend's cache.
const LEFT_BYTES: usize = 256 << 10;

struct Scene {
    pool: SimulatedPool,
    memory: [OmittingMemory; 2],
    pod: Pod<OmittingMemory>,
}

fn scene(seed: u64, omission: &Omission) -> Scene {
    let pool = SimulatedPool::new(seed, 16 << 20);
    let start = LineOffset::new(4096);
    let data = Area::new(LineOffset::new(start.get() + 16384), LineCount::covering(AREA_BYTES));
    // Predecessors on both hosts have used the area and died: what they wrote may leave the caches at any time.
    for host in [FRONTEND, BACKEND] {
        let memory = pool.host(host);
        if host == FRONTEND {
            memory.write(data.start_byte(), &vec![0xee; LEFT_BYTES]);
        }
        memory.read(data.start_byte(), &mut vec![0; 4096]);
        pool.crash(host);
    }
    let memory = [FRONTEND, BACKEND].map(|host| omission.in_memory(pool.host(host)));
    // In the middle of everything the other side may act.
    for memory in &memory {
        memory.interruption().set(|| thread::sleep(Duration::from_micros(20)));
    }
    let mut pod = Pod::new(memory[0].clone(), memory[1].clone(), start);
    pod.data = data;
    pod.disk.data_area = data;
    pod.volume.data_area = data;
    let ssd = RamSsd { memory: pod.backend_memory.clone(), control: Control::new() };
    pod.start(Box::new(ssd));
    Scene { pool, memory, pod }
}

/// What was written is read, many times over the same buffers. Something else is written in between: a buffer that still holds
/// what it was last used for must not hold the right answer by that.
fn data_stays_whole(scene: &Scene) {
    let mut driver = Driver::connected(&scene.pod);
    for round in 0..20_u64 {
        let first = round % 7 * 16;
        let both =
            [(first, pattern(2 * round, REQUEST_BYTES)), (first + 8, pattern(2 * round + 1, REQUEST_BYTES))];
        for (sector, data) in &both {
            assert_eq!(driver.write_sectors(*sector, data), OK);
        }
        for (sector, data) in &both {
            assert!(
                driver.read_sectors(*sector, REQUEST_BYTES as u32) == *data,
                "round {round} reads something else"
            );
        }
    }
}

/// A region whose users are gone is used on another host once each of the hosts has scrubbed it.
fn a_scrubbed_region_can_be_given_on(scene: &mut Scene) {
    let area = Area::new(LineOffset::new(200_000), LineCount::new(64));
    let mut read = vec![0; area.bytes() as usize];
    for memory in &scene.memory {
        memory.write(area.start_byte(), &vec![0xdd; read.len()]);
    }
    // Two writers of one line break a rule by themselves; here only what comes later counts.
    let before = scene.pool.faults();
    let region = RegionId::new(9);
    scene.pod.frontend.as_mut().unwrap().scrub(region, area).unwrap();
    scene.pod.backend.as_mut().unwrap().scrub(region, area).unwrap();
    let after_scrubbing = scene.pool.faults();
    let other = scene.pool.host(OTHER);
    other.invalidate(area.start_byte(), area.bytes());
    other.full_fence();
    let given = pattern(77, read.len());
    other.write(area.start_byte(), &given);
    other.flush(area.start_byte(), area.bytes());
    other.full_fence();
    for _ in 0..4000 {
        other.load(LineOffset::new(1).bytes());
    }
    scene.pool.shared(area.start_byte(), &mut read);
    assert!(read == given, "a line of the region's last user came over it");
    assert_eq!(scene.pool.faults(), after_scrubbing, "{before:?} before");
}

fn run(seed: u64, omission: &Omission) {
    let mut scene = scene(seed, omission);
    data_stays_whole(&scene);
    assert_eq!(scene.pool.faults(), Faults::default());
    a_scrubbed_region_can_be_given_on(&mut scene);
}

/// What this test cannot notice, and why.
const EXCUSED: [&str; 4] = [
    // The look that finds no more messages fences too. These are for a turn whose budget ends before it comes to that.
    "backend/dispatch.rs receive: self.memory.full_fence()",
    "frontend/task.rs receive: self.memory.full_fence()",
    // For requests that came before their volume, and for a channel that begins anew: neither happens here.
    "backend/task.rs volume: self.memory.full_fence()",
    "backend/task.rs is_ready: self.memory.full_fence()",
];

fn notices(seed: u64, omission: &Omission) -> bool {
    panic::catch_unwind(AssertUnwindSafe(|| run(seed, omission))).is_err()
}

#[test]
fn every_omission_in_the_engine_is_noticed() {
    let complete = Omission::default();
    (0..5).for_each(|seed| run(seed, &complete));
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let sites: Vec<_> =
        complete.seen().into_iter().filter(|site| site.file.starts_with("vhost-blk-cxl/src")).collect();
    assert!(sites.len() >= 5, "the sites are found by running into them: {sites:?}");
    let mut unnoticed = Vec::new();
    for site in sites {
        let name = site.name(&workspace);
        let omission = Omission::of(site);
        let excused = EXCUSED.contains(&name.as_str());
        match (0..if excused { 10 } else { SEEDS }).find(|seed| notices(*seed, &omission)) {
            Some(seed) => println!("| `{name}` | seed {seed} |"),
            None if excused => println!("| `{name}` | – |"),
            None => unnoticed.push(name),
        }
    }
    assert_eq!(unnoticed, [""; 0]);
}
