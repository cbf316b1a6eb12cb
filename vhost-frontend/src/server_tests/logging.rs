//! A VMM that moves its guest must be told of every page that the device writes, and of none when it does not ask.

use proptest::prelude::*;

use super::*;

fn fill(guest: &mut MockGuest, ring: usize, address: u64, bytes: u32) {
    let end = address + u64::from(bytes);
    let middle = address + u64::from(bytes) / 2;
    let pieces = [(address, middle - address), (middle, end - middle)];
    let pieces = pieces.map(|(address, bytes)| Piece {
        address,
        bytes: u32::try_from(bytes).unwrap(),
        writable: true,
    });
    guest.offer(ring, &pieces, None);
    assert_eq!(guest.wait_used(ring, PATIENCE).map(|used| used.written), Some(bytes));
}

/// Lets the guest have other data there, so that what the device writes is a change.
fn clear(guest: &MockGuest) {
    let bytes = usize::try_from(guest.end() - guest.data_start()).unwrap();
    guest.memory().write_slice(&vec![1; bytes], GuestAddress(guest.data_start())).unwrap();
}

#[derive(Debug, Clone, Copy)]
enum Step {
    Fill { ring: usize, at: u64, bytes: u32 },
    Log(bool),
    NewLog,
    Look,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => (0..usize::from(QUEUES), 0_u64..1 << 18, 2_u32..20_000)
            .prop_map(|(ring, at, bytes)| Step::Fill { ring, at, bytes }),
        1 => any::<bool>().prop_map(Step::Log),
        1 => Just(Step::NewLog),
        2 => Just(Step::Look),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn every_page_that_the_device_writes_is_logged(steps in prop::collection::vec(step(), 1..60)) {
        let device = Device::start();
        let mut guest = connected(&device.socket());
        clear(&guest);
        guest.start_logging();
        let mut on = true;
        for step in steps {
            match step {
                Step::Fill { ring, at, bytes } => {
                    let address = guest.data_start() + at;
                    fill(&mut guest, ring, address, bytes);
                }
                Step::Log(wanted) if wanted != on => {
                    // What happened before counts for what was wanted then.
                    let pages = guest.dirty_pages();
                    prop_assert!(if on { pages.lost().is_empty() } else { pages.logged.is_empty() }, "{:?}", pages);
                    if wanted { guest.start_logging() } else { guest.stop_logging() }
                    on = wanted;
                }
                Step::NewLog if on => {
                    prop_assert_eq!(guest.dirty_pages().lost(), Vec::<u64>::new());
                    let bytes = guest.log_bytes() + 8;
                    guest.share_log(bytes).unwrap();
                }
                Step::Look if on => {
                    let pages = guest.dirty_pages();
                    prop_assert_eq!(pages.lost(), Vec::<u64>::new());
                    clear(&guest);
                    guest.dirty_pages();
                }
                Step::Log(_) | Step::NewLog | Step::Look => {}
            }
        }
        let pages = guest.dirty_pages();
        prop_assert!(if on { pages.lost().is_empty() } else { pages.logged.is_empty() }, "{:?}", pages);
    }
}

#[test]
fn data_used_ring_and_what_says_whether_to_kick_are_logged_and_nothing_else() {
    let device = Device::start();
    let mut guest = connected(&device.socket());
    guest.start_logging();
    let at = guest.data_start() + 3 * 4096;
    fill(&mut guest, 0, at + 4000, 200);
    let pages = guest.dirty_pages();
    let ring = guest.ring(0).descriptor_table() / 4096;
    let used = ring + 5;
    assert_eq!(pages.changed.iter().copied().collect::<Vec<_>>(), [used, at / 4096, at / 4096 + 1]);
    assert_eq!(pages.logged, pages.changed);
    // Polling or not, it says so in the used ring.
    device.state.lock().rings[1].as_mut().unwrap().disable_notifications();
    device.state.lock().rings[1].as_mut().unwrap().enable_notifications();
    let pages = guest.dirty_pages();
    assert_eq!(pages.logged.into_iter().collect::<Vec<_>>(), [used + 8]);
}

#[test]
fn a_guest_that_stays_is_not_logged_any_more_and_works_on() {
    let device = Device::start();
    let mut guest = connected(&device.socket());
    for _ in 0..3 {
        guest.start_logging();
        works(&mut guest);
        assert!(!guest.dirty_pages().logged.is_empty());
        guest.stop_logging();
        works(&mut guest);
        assert!(guest.dirty_pages().logged.is_empty());
    }
    // Nor is its successor.
    guest.start_logging();
    guest.disconnect();
    guest.connect(&device.socket(), u64::MAX);
    guest.dirty_pages();
    works(&mut guest);
    assert!(guest.dirty_pages().logged.is_empty());
}

#[test]
fn nothing_is_written_before_there_is_the_log_that_the_vmm_wants() {
    let device = Device::start();
    let mut guest = connected(&device.socket());
    // The log of its connection before is not that of the next one.
    guest.start_logging();
    works(&mut guest);
    let at = guest.data_start() + 7 * 4096;
    guest.connect_logging(&device.socket(), u64::MAX, |guest| {
        guest.offer(0, &[Piece { address: at, bytes: 512, writable: true }], None);
        assert!(device.state.lock().rings.iter().all(Option::is_none), "a ring runs, and nothing is logged");
    });
    assert_eq!(guest.wait_used(0, PATIENCE).map(|used| used.written), Some(512));
    let pages = guest.dirty_pages();
    assert!(pages.changed.contains(&(at / 4096)) && pages.lost().is_empty(), "{pages:?}");
    // The guest stays after all, before there is a log.
    let address = guest.data_start();
    guest.connect_logging(&device.socket(), u64::MAX, |guest| {
        guest.stop_logging();
        assert_eq!(request(guest, 1, address), 512);
    });
}

#[test]
fn a_log_that_is_too_short_is_refused_as_soon_as_it_is_to_be_used() {
    let device = Device::start();
    let mut guest = connected(&device.socket());
    guest.start_logging();
    let short = guest.log_bytes() - 1;
    assert!(guest.share_log(short).is_err());
    drop(guest);
    let mut guest = connected(&device.socket());
    guest.start_logging();
    // Memory beyond the log, too.
    assert!(guest.frontend().add_mem_region(&plugged(&memory_file(PLUGGED_BYTES))).is_err());
    drop(guest);
    works(&mut connected(&device.socket()));
}

/// QEMU starts the rings first, and then shares a new log.
#[test]
fn what_is_written_between_a_restart_of_the_device_and_its_new_log_is_in_that() {
    let device = Device::start();
    let mut guest = connected(&device.socket());
    guest.start_logging();
    works(&mut guest);
    guest.dirty_pages();
    for ring in 0..usize::from(QUEUES) {
        guest.stop_ring(ring);
    }
    guest.start_rings();
    let at = guest.data_start() + 7 * 4096;
    fill(&mut guest, 0, at, 100);
    let bytes = guest.log_bytes();
    guest.share_log(bytes).unwrap();
    let logged = guest.dirty_pages().logged;
    assert!(logged.contains(&(at / 4096)), "{logged:?}");
}
