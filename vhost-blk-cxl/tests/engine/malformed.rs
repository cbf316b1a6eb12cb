//! Requests whose form is wrong: they are answered where there is a place for the answer, else they break the one ring that they
//! are in.

use vhost_frontend::mock::{Piece, RawDescriptor};
use vm_memory::{Bytes, GuestAddress};

use crate::pod::ram::pod;
use crate::pod::*;

#[test]
fn malformed_requests_with_a_place_for_their_status_are_answered() {
    let (mut pod, control) = pod(6);
    let mut driver = Driver::connected(&pod);
    let place = driver.place(0);
    let piece = |address, bytes, writable| Piece { address, bytes, writable };
    let (header, status) = (piece(place.header, 16, false), piece(place.status, 1, true));
    let end = driver.guest.end();
    let cases = [
        // Out of guest memory.
        vec![piece(end, 16, false), status],
        vec![header, piece(u64::MAX - 100, 512, true), status],
        vec![header, piece(place.data, 512, true), piece(end - 100, 512, true), status],
        // Readable behind writable.
        vec![header, status, piece(place.data, 512, false)],
        vec![header, piece(place.data, 512, true), piece(place.data, 512, false), status],
    ];
    let count = cases.len() as u64;
    for pieces in cases {
        for table in [None, Some(place.header + 256)] {
            driver.write_header(place, T_IN, 0);
            driver.write(place.status, &[UNTOUCHED]);
            let head = driver.guest.offer(0, &pieces, table);
            assert_eq!(driver.answer(0, 0, head), (IOERR, 1), "{pieces:?}");
        }
    }
    assert_eq!(control.log(), []);
    // A header cut short has a place for its status.
    driver.write_header(place, T_IN, 0);
    let head = driver.guest.offer(0, &[piece(place.header, 15, false), status], None);
    assert_eq!(driver.answer(0, 0, head), (IOERR, 1));
    // And so has one that is longer than any request.
    driver.write_header(place, T_IN, 0);
    let long = [header, piece(place.header, 60 << 20, true), status];
    let head = driver.guest.offer(0, &long, None);
    assert_eq!(driver.answer(0, 0, head), (IOERR, 1));
    assert_eq!(driver.read_sectors(0, 512), [0; 512]);
    let drops = pod.frontend_lease().drops;
    assert_eq!((drops["malformed"], drops.get("broken-rings")), (2 * count, None));
}

#[test]
fn data_of_the_wrong_direction_or_length_is_refused_and_never_reaches_the_backend() {
    let (mut pod, control) = pod(15);
    let mut driver = Driver::connected(&pod);
    let place = driver.place(0);
    let piece = |address, bytes, writable| Piece { address, bytes, writable };
    let (header, status) = (piece(place.header, 16, false), piece(place.status, 1, true));
    let data = |bytes, writable| piece(place.data, bytes, writable);
    let before = pattern(1, 4096);
    let cases = [
        ("a read with data of the guest's", T_IN, vec![header, data(512, false), status]),
        ("a read with data of both", T_IN, vec![header, data(512, false), data(512, true), status]),
        ("a write into the guest's memory", T_OUT, vec![header, data(512, true), status]),
        ("a write with data of both", T_OUT, vec![header, data(512, false), data(512, true), status]),
        ("an id with data of the guest's", T_GET_ID, vec![header, data(20, false), data(20, true), status]),
        ("an id with no room for it", T_GET_ID, vec![header, data(19, true), status]),
        ("a discard whose range is written", T_DISCARD, vec![header, data(16, true), status]),
        ("a discard without a range", T_DISCARD, vec![header, status]),
        ("a discard of half a range", T_DISCARD, vec![header, data(15, false), status]),
        ("a discard of more ranges than one", T_DISCARD, vec![header, data(32, false), status]),
        ("zeroes without a range", T_WRITE_ZEROES, vec![header, status]),
        ("zeroes of more ranges than one", T_WRITE_ZEROES, vec![header, data(48, false), status]),
        ("no header", T_IN, vec![status]),
    ];
    let count = cases.len() as u64;
    for (what, kind, pieces) in cases {
        driver.write_header(place, kind, 0);
        driver.write(place.data, &before);
        let head = driver.guest.offer(0, &pieces, None);
        assert_eq!(driver.answer(0, 0, head), (IOERR, 1), "{what}");
        assert!(driver.read(place.data, 4096) == before, "{what}: the guest's memory was written");
    }
    // In bytes, these end where a disk begins.
    let last = u64::MAX / SECTOR;
    for (kind, sector, sectors) in
        [(T_DISCARD, last, 1), (T_WRITE_ZEROES, last, 1), (T_DISCARD, last - 1, 2), (T_DISCARD, last + 1, 8)]
    {
        assert_eq!(driver.range_request(kind, sector, sectors, 0), IOERR, "{kind} {sector} {sectors}");
    }
    assert_eq!(control.log(), []);
    assert_eq!(pod.frontend_lease().drops["refused"], count + 4);
    assert_eq!(driver.read_sectors(0, 512), [0; 512]);
}

#[test]
fn empty_segments_are_skipped_and_a_chain_that_is_too_long_costs_the_request_only() {
    let (mut pod, control) = pod(16);
    let mut driver = Driver::connected(&pod);
    let place = driver.place(0);
    let piece = |address, bytes, writable| Piece { address, bytes, writable };
    let (header, status) = (piece(place.header, 16, false), piece(place.status, 1, true));
    for (at, empty) in [(0, false), (1, false), (1, true), (2, true)] {
        let mut pieces = vec![header, status];
        pieces.insert(at, piece(place.data, 0, empty));
        for table in [None, Some(place.header + 256)] {
            driver.write_header(place, T_FLUSH, 0);
            let head = driver.guest.offer(0, &pieces, table);
            assert_eq!(driver.answer(0, 0, head), (OK, 1), "an empty one at {at}, writable: {empty}");
        }
    }
    let flushes = control.log().len();
    // Segments of one byte each, and one more than a chain may have.
    let table = driver.place(1).header;
    let mut pieces = vec![header];
    pieces.extend((0..1023).map(|at| piece(place.data + at, 1, true)));
    pieces.push(status);
    driver.write_header(place, T_IN, 0);
    let head = driver.guest.offer(0, &pieces, Some(table));
    assert_eq!(driver.answer(0, 0, head), (IOERR, 1));
    assert_eq!((flushes, control.log().len()), (8, 8));
    // As many as it may have are served.
    pieces.drain(512 + 1..pieces.len() - 1);
    let head = driver.guest.offer(0, &pieces, Some(table));
    assert_eq!(driver.answer(0, 0, head), (OK, 513));
    assert_eq!(pod.frontend_lease().drops["malformed"], 1);
}

#[test]
fn a_broken_ring_is_parked_and_the_other_one_lives() {
    let (mut pod, _control) = pod(7);
    let mut driver = Driver::connected(&pod);
    let memory = driver.guest.memory().clone();
    driver.guest.ring(1).set_available_index(&memory, 5000);
    driver.guest.ring(1).kick();
    assert_eq!(driver.write_sectors(0, &pattern(4, 512)), OK);
    eventually(|| pod.frontend_lease().drops.contains_key("broken-rings"));
    assert_eq!(driver.read_sectors(0, 512), pattern(4, 512));
    // The driver resets the ring, and it works again.
    driver.guest.stop_ring(1);
    driver.guest.ring(1).set_available_index(&memory, 0);
    driver.guest.start_rings();
    let head = driver.offer(1, 1, T_FLUSH, 0, 0);
    assert_eq!(driver.answer(1, 1, head), (OK, 1));
}

/// Puts a request on the second ring.
type Offer = Box<dyn Fn(&mut Driver)>;

/// Makes descriptors available on the second ring from number 100 on, whatever they say.
fn offer_raw(driver: &mut Driver, descriptors: &[RawDescriptor]) {
    let memory = driver.guest.memory().clone();
    let ring = driver.guest.ring(1);
    for (index, descriptor) in (100..).zip(descriptors) {
        ring.write_descriptor(&memory, index, *descriptor);
    }
    ring.publish(&memory, 100);
    ring.kick();
}

#[test]
fn a_request_that_cannot_be_answered_breaks_its_ring_and_no_other() {
    const NEXT: u16 = 1;
    const WRITE: u16 = 2;
    const INDIRECT: u16 = 4;
    const BEHIND: u64 = 100;
    let raw = |address, bytes, flags, next| RawDescriptor { address, bytes, flags, next };
    let pieces = |driver: &mut Driver, writable: &[(u64, u32)]| {
        let place = driver.place(1);
        driver.write_header(place, T_IN, 0);
        let mut pieces = vec![Piece { address: place.header, bytes: 16, writable: false }];
        pieces.extend(writable.iter().map(|&(address, bytes)| Piece { address, bytes, writable: true }));
        driver.guest.offer(1, &pieces, None);
    };
    let cases: [(&str, Offer); 8] = [
        ("nothing is writable", Box::new(move |driver| pieces(driver, &[]))),
        (
            "the status is no guest memory",
            Box::new(move |driver| {
                let (data, end) = (driver.place(1).data, driver.guest.end());
                pieces(driver, &[(data, 512), (end, 1)]);
            }),
        ),
        ("the status ends beyond all addresses", Box::new(move |driver| pieces(driver, &[(u64::MAX, 2)]))),
        ("a circle", Box::new(move |driver| offer_raw(driver, &[raw(0, 0, NEXT, 100)]))),
        (
            "a circle of writable parts",
            Box::new(move |driver| {
                let at = driver.place(1).status;
                offer_raw(driver, &[raw(at, 1, NEXT | WRITE, 101), raw(at, 1, NEXT | WRITE, 100)]);
            }),
        ),
        (
            "out of the table",
            Box::new(move |driver| {
                let at = driver.place(1).status;
                offer_raw(driver, &[raw(at, 1, NEXT | WRITE, 5000)]);
            }),
        ),
        (
            "an indirect table in another one",
            Box::new(move |driver| {
                let at = driver.place(1).header;
                let memory = driver.guest.memory().clone();
                for (word, value) in [(0, at), (1, 16 | u64::from(INDIRECT) << 32)] {
                    memory.write_obj(value, GuestAddress(at + 8 * word)).unwrap();
                }
                offer_raw(driver, &[raw(at, 16, INDIRECT, 0)]);
            }),
        ),
        (
            "an indirect table that is no guest memory",
            Box::new(move |driver| {
                let end = driver.guest.end();
                offer_raw(driver, &[raw(end, 32, INDIRECT, 0)]);
            }),
        ),
    ];
    let (mut pod, control) = pod(17);
    let mut driver = Driver::connected(&pod);
    for (answered, (what, offer)) in (0_u16..).zip(cases) {
        let broken = u64::from(answered) + 1;
        offer(&mut driver);
        eventually(|| pod.frontend_lease().drops.get("broken-rings") == Some(&broken));
        // Nothing behind it is served, and the other ring is.
        driver.offer(1, 2, T_OUT, BEHIND, 512);
        assert_eq!(driver.write_sectors(broken, &pattern(broken, 512)), OK, "{what}");
        assert_eq!(driver.read_sectors(broken, 512), pattern(broken, 512), "{what}");
        assert!(driver.guest.used(1).is_none(), "{what}");
        assert_eq!(driver.guest.stop_ring(1), u32::from(answered), "{what}: it is in its ring");
        // The driver resets the ring, and it works again.
        let memory = driver.guest.memory().clone();
        driver.guest.ring(1).set_available_index(&memory, answered);
        driver.guest.start_rings();
        let head = driver.offer(1, 1, T_FLUSH, 0, 0);
        assert_eq!(driver.answer(1, 1, head), (OK, 1), "{what}");
    }
    let behind = VOLUME_START + BEHIND * SECTOR;
    assert!(!control.log().iter().any(|it| it.operation.writes() && it.offset_bytes == behind));
}

#[test]
fn what_was_under_way_in_a_ring_that_breaks_is_answered_and_nothing_else() {
    let (mut pod, control) = pod(18);
    let mut driver = Driver::connected(&pod);
    let memory = driver.guest.memory().clone();
    let breaks: [Offer; 2] = [
        Box::new(|driver| {
            let place = driver.place(2);
            driver.write_header(place, T_IN, 0);
            driver.guest.offer(1, &[Piece { address: place.header, bytes: 16, writable: false }], None);
        }),
        Box::new(|driver| {
            let memory = driver.guest.memory().clone();
            driver.guest.ring(1).set_available_index(&memory, 5000);
            driver.guest.ring(1).kick();
        }),
    ];
    let mut answered = 0;
    for (broken, offer) in (1..).zip(breaks) {
        control.hold(true);
        let data = pattern(broken, 512);
        driver.write(driver.place(0).data, &data);
        let write = driver.offer(1, 0, T_OUT, 7, 512);
        let read = driver.offer(1, 1, T_IN, 8, 512);
        eventually(|| control.waiting() == 2);
        offer(&mut driver);
        eventually(|| pod.frontend_lease().drops.get("broken-rings") == Some(&broken));
        assert!(driver.guest.used(1).is_none());
        control.hold(false);
        // The guest is told of both, as it would be without the one behind them.
        assert_eq!(driver.answer(1, 0, write), (OK, 1));
        assert_eq!(driver.answer(1, 1, read), (OK, 513));
        assert!(driver.read(driver.place(1).data, 512) == [0; 512]);
        answered += 2;
        // What broke the ring is the next in it.
        assert_eq!(driver.guest.stop_ring(1), answered);
        driver.guest.ring(1).set_available_index(&memory, answered as u16);
        driver.guest.start_rings();
        assert!(driver.read_sectors(7, 512) == data);
    }
    let head = driver.offer(1, 1, T_FLUSH, 0, 0);
    assert_eq!(driver.answer(1, 1, head), (OK, 1));
}
