//! What the frontend writes into a guest that is moving to another host is logged: packets in one buffer and in several,
//! and what it says in both used rings.

use std::collections::BTreeSet;
use std::fs::File;
use std::os::unix::fs::FileExt as _;

use cxl_pool::HostId;
use cxl_pool::simulated::SimulatedPool;
use vhost_frontend::{DirtyLog, LOG_PAGE_BYTES};

use crate::echo::{frame, returned};
use crate::guest::{Guest, MEMORY_BYTES, QUEUE_BYTES, RINGS_BYTES, USED_RING};
use crate::pod::{POOL_BYTES, TestBackend, TestFrontend, Turn, all_features, area, serve, settle};

const QUEUE_SIZE: u16 = 64;
const FRAMES: u32 = 60;

/// The pages that only the device writes: receive buffers and used rings.
fn devices_pages() -> impl Iterator<Item = u64> {
    let used = [USED_RING, QUEUE_BYTES + USED_RING].map(|at| at / LOG_PAGE_BYTES);
    used.into_iter().chain(RINGS_BYTES / LOG_PAGE_BYTES..QUEUE_BYTES / LOG_PAGE_BYTES)
}

fn logged_pages(file: &File) -> BTreeSet<u64> {
    let mut bits = vec![0; usize::try_from(file.metadata().expect("a file").len()).expect("small")];
    file.read_exact_at(&mut bits, 0).expect("as long as it is");
    let pages = (0u64..).zip(bits).flat_map(|(byte, bits)| {
        (0..8).filter(move |bit| bits >> bit & 1 == 1).map(move |bit| byte * 8 + bit)
    });
    pages.collect()
}

fn written_pages_are_logged(buffer_bytes: u32) {
    let pool = SimulatedPool::new(7, POOL_BYTES);
    let (here, there) = (pool.host(HostId::new(1)), pool.host(HostId::new(2)));
    let mut frontend = TestFrontend::new(&here);
    let mut backend = TestBackend::new(&there, "mode = 'echo'", area(32, 16));
    serve(&mut frontend, &mut backend);

    let mut guest = Guest::new(QUEUE_SIZE);
    let file = tempfile::tempfile().expect("a file");
    let bytes = (MEMORY_BYTES as u64).div_ceil(8 * LOG_PAGE_BYTES);
    file.set_len(bytes).expect("a small file");
    guest.log(&DirtyLog::map(file.try_clone().expect("a descriptor"), 0, bytes).expect("a log"));
    guest.post(QUEUE_SIZE, buffer_bytes);
    let before = guest.image();
    frontend.start(1, &guest, all_features());
    settle(&mut [&mut frontend, &mut backend]);

    let mut arrived = 0;
    for number in 0..FRAMES {
        assert!(guest.send(&[0; 12], &frame(number, 60 + 24 * number as usize)));
        for _ in 0..50 {
            frontend.turn_once();
            backend.turn_once();
        }
        for (_, got) in guest.received(buffer_bytes) {
            assert_eq!(got, returned(&frame(arrived, 60 + 24 * arrived as usize)));
            arrived += 1;
        }
        guest.transmit.reclaim_pairs();
    }
    assert_eq!(arrived, FRAMES);

    let (after, logged) = (guest.image(), logged_pages(&file));
    let page = |image: &[u8], number: u64| {
        let start = usize::try_from(number * LOG_PAGE_BYTES).expect("small");
        image[start..start + 4096].to_vec()
    };
    let changed: BTreeSet<u64> =
        devices_pages().filter(|number| page(&before, *number) != page(&after, *number)).collect();
    assert!(changed.len() > 3, "buffers and used rings changed: {changed:?}");
    assert_eq!(changed.difference(&logged).collect::<Vec<_>>(), Vec::<&u64>::new(), "would be lost");
    let ours: BTreeSet<u64> = devices_pages().collect();
    assert_eq!(logged.difference(&ours).collect::<Vec<_>>(), Vec::<&u64>::new(), "nobody wrote there");
}

#[test]
fn packets_in_one_buffer_are_logged() {
    written_pages_are_logged(2048);
}

#[test]
fn packets_over_several_buffers_are_logged() {
    written_pages_are_logged(256);
}
