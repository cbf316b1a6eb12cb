//! Guests whose memory lies in the pool: the same answers as everywhere else, and no copy where none is needed.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread;

use cxl_pool::simulated::Random;
use cxl_pool::{Area, ByteOffset, CreateOptions, LineCount, Memory, Pool};
use pod_protocol::endpoint::Handler;
use pod_protocol::ids::{ChannelId, PlaceNumber};
use pod_protocol::objects::{DiskObject, ObjectId, ReplicaObject, Route};
use vhost::VhostUserMemoryRegionInfo;
use vhost::vhost_user::VhostUserFrontend;
use vhost_blk_cxl::message::Operation;
use vhost_blk_cxl::segments::Segment;
use vhost_frontend::mock::{MockGuest, Piece};

use crate::pod::ram::{Control, Given, RamSsd};
use crate::pod::*;

const QUEUES: u16 = 2;
const QUEUE_SIZE: u16 = 128;
/// Memory that a guest gets and gives back while it runs.
const PLUGGED_BYTES: u64 = 1 << 20;

/// A pod over a real pool, with room for a guest's memory.
struct Setup<M: Memory> {
    pod: Pod<M>,
    control: Arc<Control>,
    pool: Pool,
    ram: Area,
}

pub(crate) fn pool() -> Pool {
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let options = CreateOptions { size_bytes: Some(96 << 20), ..CreateOptions::default() };
    // The mapping and its file are enough from here on, and nothing is left of a test that is killed.
    Pool::create(&directory.path().join("pool"), &options).unwrap()
}

impl<M: Memory> Setup<M> {
    fn new(pool: Pool, memory: &M, lease_ram: bool) -> Self {
        let mut pod = Pod::new(memory.clone(), memory.clone(), pool.layout().data().start);
        let lines = LineCount::covering(Driver::ram_bytes(QUEUES));
        let ram = Area::new(pod.data.start.saturating_add(pod.data.lines), lines);
        pod.pool_file = Some(pool.file_identity());
        if lease_ram {
            pod.disk.ram_area = Some(ram);
            pod.volume.ram_area = Some(ram);
        }
        let control = Control::new();
        pod.start(Box::new(RamSsd { memory: memory.clone(), control: Arc::clone(&control) }));
        Self { pod, control, pool, ram }
    }

    /// A guest whose memory is this much of the pool from there on.
    fn guest_at(&self, start: u64) -> MockGuest {
        let file = File::from(self.pool.fd().try_clone_to_owned().unwrap());
        MockGuest::in_file(file, start, Driver::ram_bytes(QUEUES), QUEUES, QUEUE_SIZE)
    }

    fn connected(&self) -> Driver {
        let mut driver = Driver { guest: self.guest_at(self.ram.start_byte().get()) };
        driver.guest.connect(&self.pod.socket(), ALL_FEATURES);
        driver
    }

    /// How many commands used the guest's own memory, and how many did not.
    fn direct_and_bounced(&self) -> (usize, usize) {
        let data = self.control.given().into_iter().filter(|given| given.command.operation.has_data());
        let (direct, bounced): (Vec<_>, Vec<_>) = data.partition(|Given { command, list }| {
            let in_ram = |it: &Segment| self.ram.contains(it.start, it.bytes.into());
            assert!(list.is_empty() || list.iter().all(in_ram));
            !list.is_empty() || self.ram.contains(command.data, command.length_bytes)
        });
        let in_buffers = |it: &Given| self.pod.data.contains(it.command.data, it.command.length_bytes);
        assert!(bounced.iter().all(in_buffers));
        (direct.len(), bounced.len())
    }
}

/// Both ways to keep hosts coherent; on one machine the caches are, so what differs is what is executed.
macro_rules! with_both_memories {
    ($($name:ident => $check:ident;)*) => {$(
        #[test]
        fn $name() {
            let pool = $crate::zero_copy::pool();
            let memory = pool.hardware();
            $check(&memory, pool);
            let pool = $crate::zero_copy::pool();
            let memory = pool.software();
            $check(&memory, pool);
        }
    )*};
}
pub(crate) use with_both_memories;

with_both_memories! {
    whole_sectors_in_one_piece_are_not_copied => no_copy;
    what_is_not_in_whole_sectors_is_copied => bounce;
    chains_of_any_shape_go_as_lists_where_they_can => shapes;
    memory_that_a_device_may_still_fill_is_not_given_back => failed;
    nor_is_it_while_the_channel_begins_anew => failed_anew;
    a_vmm_that_comes_back_waits_for_what_the_device_still_has => reconnected;
    what_is_read_is_logged_for_a_guest_that_moves => logged;
    memory_that_is_taken_back_is_gone_when_no_device_uses_it => taken_back;
}

/// A read that the device itself put into the guest's memory, and one that was copied there.
fn logged<M: Memory>(memory: &M, pool: Pool) {
    let setup = Setup::new(pool, memory, true);
    let mut driver = setup.connected();
    let data = pattern(3, 64 << 10);
    assert_eq!(driver.write_sectors(0, &data), OK);
    driver.guest.start_logging();
    for (shift, counts) in [(0, (2, 0)), (1, (2, 1))] {
        let place = driver.place(2);
        let place = Place { data: place.data + shift, ..place };
        driver.write_header(place, T_IN, 0);
        driver.guest.dirty_pages();
        let head = driver.guest.offer(1, &Driver::pieces(place, T_IN, 64 << 10), None);
        assert_eq!(driver.answer(1, 2, head), (OK, (64 << 10) + 1));
        assert_eq!(driver.read(place.data, 64 << 10), data);
        assert_eq!(setup.direct_and_bounced(), counts);
        let pages = driver.guest.dirty_pages();
        assert_eq!(pages.lost(), Vec::<u64>::new());
        assert!((0..16).all(|page| pages.logged.contains(&(place.data / 4096 + page))));
        // Data, its status, the used ring.
        assert!(pages.logged.len() <= 16 + 1 + 2 + usize::from(shift > 0), "{:?}", pages.logged);
    }
    // It stays after all.
    driver.guest.stop_logging();
    driver.guest.dirty_pages();
    assert_eq!(driver.read_sectors(0, 64 << 10), data);
    assert!(driver.guest.dirty_pages().logged.is_empty());
}

fn no_copy<M: Memory>(memory: &M, pool: Pool) {
    let setup = Setup::new(pool, memory, true);
    let mut driver = setup.connected();
    for (round, bytes) in [512, 4096, 4608, 128 << 10, 1 << 19].into_iter().enumerate() {
        let data = pattern(round as u64, bytes);
        let sector = 64 * round as u64;
        assert_eq!(driver.write_sectors(sector, &data), OK);
        assert_eq!(driver.read_sectors(sector, bytes as u32), data);
        assert_eq!(setup.control.bytes(VOLUME_START + sector * SECTOR, bytes), data);
    }
    assert_eq!(setup.direct_and_bounced(), (10, 0));
    // Header, data and status in pieces that happen to lie one after the other.
    let place = driver.place(1);
    let cut = |at: u64, bytes, writable| Piece { address: place.data + at, bytes, writable };
    driver.write_header(place, T_IN, 64);
    let head_piece = Piece { address: place.header, bytes: 16, writable: false };
    let status = Piece { address: place.status, bytes: 1, writable: true };
    let pieces = [head_piece, cut(0, 100, true), cut(100, 3996, true), cut(4096, 512, true), status];
    let head = driver.guest.offer(0, &pieces, None);
    assert_eq!(driver.answer(0, 1, head), (OK, 4609));
    assert_eq!(driver.read(place.data, 4608), setup.control.bytes(VOLUME_START + 64 * SECTOR, 4608));
    assert_eq!(setup.direct_and_bounced(), (11, 0));
    // A device that fails is noticed all the same.
    setup.control.fail(true);
    assert_eq!(driver.request(T_IN, 0, 4096), (IOERR, 1));
    assert_eq!(driver.request(T_OUT, 0, 4096), (IOERR, 1));
}

fn bounce<M: Memory>(memory: &M, pool: Pool) {
    let setup = Setup::new(pool, memory, true);
    let mut driver = setup.connected();
    let data = pattern(7, 8192);
    let place = driver.place(0);
    let around = pattern(8, 3 * 8192);
    let mut bounced = 0;
    // Where the data begins, and where its second half does.
    for (first, second) in [(1, 4097), (64, 4160), (511, 4607), (0, 8193), (8192 + 64, 0), (0, 4096 + 511)] {
        for kind in [T_OUT, T_IN] {
            driver.write(place.data, &around);
            if kind == T_OUT {
                driver.write(place.data + first, &data[..4096]);
                driver.write(place.data + second, &data[4096..]);
            }
            driver.write_header(place, kind, 32);
            let piece = |at, bytes, writable| Piece { address: at, bytes, writable };
            let writable = kind == T_IN;
            let pieces = [
                piece(place.header, 16, false),
                piece(place.data + first, 4096, writable),
                piece(place.data + second, 4096, writable),
                piece(place.status, 1, true),
            ];
            let head = driver.guest.offer(0, &pieces, None);
            assert_eq!(driver.answer(0, 0, head).0, OK);
            bounced += 1;
        }
        assert_eq!(setup.control.bytes(VOLUME_START + 32 * SECTOR, 8192), data);
        let mut expected = around.clone();
        expected[first as usize..][..4096].copy_from_slice(&data[..4096]);
        expected[second as usize..][..4096].copy_from_slice(&data[4096..]);
        assert!(driver.read(place.data, around.len()) == expected, "bytes beside the data changed");
    }
    assert_eq!(setup.direct_and_bounced(), (0, bounced));
}

/// Where a request's data lies: whole sectors in any order, now and then something else; header and data are cut anywhere.
struct Shape {
    /// Offset in the place, length.
    pieces: Vec<(u64, u32)>,
    whole: bool,
}

impl Shape {
    fn any(random: &mut Random) -> Self {
        let most = if random.one_in(8) { 120 } else { 6 };
        let count = 1 + random.below(most);
        let whole = !random.one_in(4);
        let mut places: Vec<u64> = (0..PIECES).collect();
        let mut pieces = Vec::new();
        for left in (1..=count).rev() {
            let place = places.swap_remove(random.below(places.len() as u64) as usize) * PIECE_BYTES;
            // With room for what makes the last one whole.
            let sectors = 1 + random.below(PIECE_BYTES / SECTOR - 1);
            let (at, mut bytes) = (place, (sectors * SECTOR) as u32);
            // A part of a sector is made up for by the next piece.
            if !whole && left % 2 == 1 && left > 1 {
                bytes -= 100;
            } else if !whole && left % 2 == 0 && left < count {
                bytes = (bytes + 100).min((PIECE_BYTES - SECTOR) as u32);
            }
            pieces.push((at, bytes));
        }
        // All together whole sectors.
        let rest = pieces.iter().map(|it| u64::from(it.1)).sum::<u64>() % SECTOR;
        if rest > 0 {
            pieces.last_mut().unwrap().1 += (SECTOR - rest) as u32;
        }
        let sectors = |&(at, bytes): &(u64, u32)| at % SECTOR == 0 && u64::from(bytes) % SECTOR == 0;
        Self { whole: pieces.iter().all(sectors), pieces }
    }

    fn bytes(&self) -> u32 {
        self.pieces.iter().map(|it| it.1).sum()
    }
}

const PIECES: u64 = 128;
const PIECE_BYTES: u64 = 4096;
const AROUND_BYTES: usize = (PIECES * PIECE_BYTES) as usize + SECTOR as usize;

fn shapes<M: Memory>(memory: &M, pool: Pool) {
    let setup = Setup::new(pool, memory, true);
    let mut driver = setup.connected();
    let mut random = Random::new(4711);
    let (mut direct, mut bounced) = (0, 0);
    let place = driver.place(0);
    for round in 0..300 {
        let shape = Shape::any(&mut random);
        let length = shape.bytes();
        let data = pattern(round, length as usize);
        let sector = random.below((VOLUME_BYTES - u64::from(length)) / SECTOR);
        for kind in [T_OUT, T_IN] {
            let around = pattern(1000 + round, AROUND_BYTES);
            driver.write(place.data, &around);
            let mut expected = around;
            let mut left = &data[..];
            for &(at, bytes) in &shape.pieces {
                let (piece, rest) = left.split_at(bytes as usize);
                expected[at as usize..][..piece.len()].copy_from_slice(piece);
                left = rest;
            }
            if kind == T_OUT {
                driver.write(place.data, &expected);
            }
            driver.write_header(place, kind, sector);
            let mut pieces = Vec::new();
            let header_cut = random.below(17) as u32;
            for (at, bytes) in [(0, header_cut), (u64::from(header_cut), 16 - header_cut)] {
                if bytes > 0 {
                    pieces.push(Piece { address: place.header + at, bytes, writable: false });
                }
            }
            let room = 126 - shape.pieces.len();
            let mut cuts = 0;
            for &(at, bytes) in &shape.pieces {
                let cut = if cuts < room / 2 && random.one_in(3) {
                    1 + random.below(u64::from(bytes) - 1) as u32
                } else {
                    bytes
                };
                for (from, bytes) in [(0, cut), (cut, bytes - cut)] {
                    if bytes > 0 {
                        let address = place.data + at + u64::from(from);
                        pieces.push(Piece { address, bytes, writable: kind == T_IN });
                    }
                }
                cuts += usize::from(cut < bytes);
            }
            pieces.push(Piece { address: place.status, bytes: 1, writable: true });
            let head = driver.guest.offer(0, &pieces, None);
            assert_eq!(driver.answer(0, 0, head).0, OK, "round {round}");
            let stored = setup.control.bytes(VOLUME_START + sector * SECTOR, data.len());
            assert!(stored == data, "round {round}: the device has something else");
            assert!(
                driver.read(place.data, expected.len()) == expected,
                "round {round}: bytes beside the data changed"
            );
            if shape.whole { direct += 1 } else { bounced += 1 }
        }
        assert_eq!(setup.direct_and_bounced(), (direct, bounced), "round {round}: {:?}", shape.pieces);
    }
    assert!(direct > 100 && bounced > 50, "{direct} {bounced}");
    let lists = setup.control.given().into_iter().filter(|given| !given.list.is_empty());
    assert!(lists.count() > 100);
}

/// A device that holds back a read of the first queue's and a write of the second's.
fn holding<M: Memory>(memory: &M, pool: Pool) -> (Setup<M>, Driver, [u16; 2]) {
    let setup = Setup::new(pool, memory, true);
    let mut driver = setup.connected();
    setup.control.hold(true);
    let read = driver.offer(0, 1, T_IN, 0, 4096);
    let write = driver.offer(1, 2, T_OUT, 64, 4096);
    eventually(|| setup.control.waiting() == 2);
    (setup, driver, [read, write])
}

fn failed<M: Memory>(memory: &M, pool: Pool) {
    let (mut setup, mut driver, [read, write]) = holding(memory, pool);
    setup.pod.disk.failed = true;
    setup.pod.apply_disk();
    assert_eq!(driver.answer(1, 2, write), (IOERR, 1));
    assert_eq!(driver.guest.wait_used(0, QUIET), None, "the device may write there at any time");
    // What comes now is answered at once.
    let later = driver.offer(0, 3, T_IN, 0, 512);
    assert_eq!(driver.answer(0, 3, later), (IOERR, 1));
    assert_eq!(driver.guest.wait_used(0, QUIET), None);
    setup.control.hold(false);
    assert_eq!(driver.answer(0, 1, read), (OK, 4097));
    // The backend's host is written off while it has one.
    setup.pod.disk.failed = false;
    setup.pod.apply_disk();
    setup.control.hold(true);
    let lost = driver.offer(0, 1, T_IN, 0, 4096);
    eventually(|| setup.control.waiting() == 1);
    setup.pod.disk.failed = true;
    setup.pod.apply_disk();
    assert_eq!(driver.guest.wait_used(0, QUIET), None);
    setup.pod.remove_channel();
    assert_eq!(driver.answer(0, 1, lost), (IOERR, 1));
    setup.control.hold(false);
}

fn failed_anew<M: Memory>(memory: &M, pool: Pool) {
    let (mut setup, mut driver, [read, write]) = holding(memory, pool);
    // Both are to be sent again, and the device still has them.
    setup.pod.next_channel();
    setup.pod.apply_channel_at_frontend().unwrap();
    setup.pod.disk.failed = true;
    setup.pod.apply_disk();
    assert_eq!(driver.answer(1, 2, write), (IOERR, 1));
    assert_eq!(driver.guest.wait_used(0, QUIET), None, "the device may write there at any time");
    setup.pod.apply_channel().unwrap();
    assert_eq!(driver.guest.wait_used(0, QUIET), None, "the device may still write there");
    setup.control.hold(false);
    assert_eq!(driver.answer(0, 1, read), (IOERR, 1));
    assert_eq!(setup.control.log().len(), 2, "nothing is done again that was given up");
}

fn reconnected<M: Memory>(memory: &M, pool: Pool) {
    let setup = Setup::new(pool, memory, true);
    let mut driver = setup.connected();
    let data = pattern(9, 4096);
    assert_eq!(driver.write_sectors(8, &data), OK);
    setup.control.hold(true);
    let head = driver.offer(0, 1, T_IN, 8, 4096);
    eventually(|| setup.control.waiting() == 1);
    driver.guest.disconnect();
    driver.guest.connect(&setup.pod.socket(), ALL_FEATURES);
    assert_eq!(driver.guest.wait_used(0, QUIET), None);
    assert_eq!(setup.control.waiting(), 1, "it is not asked for again while the first is under way");
    setup.control.hold(false);
    assert_eq!(driver.answer(0, 1, head), (OK, 4097));
    assert_eq!(driver.read(driver.place(1).data, 4096), data);
    let reads = setup.control.log().into_iter().filter(|command| command.operation == Operation::Read);
    assert_eq!(reads.count(), 2, "the in-flight region had it done again");
}

fn taken_back<M: Memory>(memory: &M, pool: Pool) {
    let setup = Setup::new(pool, memory, true);
    // Its rings lie elsewhere.
    let mut driver = Driver::connected(&setup.pod);
    let start = setup.ram.start_byte().get();
    let file = setup.pool.fd().try_clone_to_owned().unwrap();
    let first = driver.guest.end().next_multiple_of(PLUGGED_BYTES);
    let [plugged, other] = [0, PLUGGED_BYTES].map(|from| VhostUserMemoryRegionInfo {
        guest_phys_addr: first + from,
        memory_size: PLUGGED_BYTES,
        userspace_addr: first + from,
        mmap_offset: start + from,
        mmap_handle: file.as_raw_fd(),
    });
    driver.guest.frontend().add_mem_region(&other).unwrap();
    let data = pattern(5, 4096);
    assert_eq!(driver.write_sectors(8, &data), OK);
    for (kind, elsewhere) in [(T_IN, false), (T_OUT, false), (T_IN, true)] {
        driver.guest.frontend().add_mem_region(&plugged).unwrap();
        setup.control.hold(true);
        let place = driver.place(1);
        let place = Place { data: if elsewhere { &other } else { &plugged }.guest_phys_addr, ..place };
        driver.write_header(place, kind, 8);
        let head = driver.guest.offer(0, &Driver::pieces(place, kind, 4096), None);
        eventually(|| setup.control.waiting() == 1);
        let mut vmm = driver.guest.frontend().clone();
        let (tells, told) = channel();
        let taking = thread::spawn(move || tells.send(vmm.remove_mem_region(&plugged).is_ok()).unwrap());
        if elsewhere {
            assert_eq!(told.recv_timeout(PATIENCE), Ok(true), "nothing of it is in use");
        } else {
            assert!(told.recv_timeout(QUIET).is_err(), "the device may use it at any time");
        }
        setup.control.hold(false);
        assert_eq!(driver.answer(0, 1, head).0, OK);
        if kind == T_IN && !elsewhere {
            let mut read = vec![0; 4096];
            memory.read(ByteOffset::new(start), &mut read);
            assert_eq!(read, data);
        }
        if !elsewhere {
            assert_eq!(told.recv_timeout(PATIENCE), Ok(true));
        }
        taking.join().unwrap();
    }
    assert_eq!(setup.direct_and_bounced(), (3, 1));
}

#[test]
fn a_guest_that_would_map_what_is_not_its_own_is_refused() {
    let pool = pool();
    let memory = pool.hardware();
    let setup = Setup::new(pool, &memory, true);
    let start = setup.ram.start_byte().get();
    let superblock = || {
        let mut bytes = [0; 64];
        memory.read(ByteOffset::new(0), &mut bytes);
        bytes
    };
    let before = superblock();
    assert!(setup.guest_at(start).can_share_memory(&setup.pod.socket()));
    for wrong in [0, 4096, start - 4096, start + 4096, setup.pod.data.start_byte().get()] {
        assert!(!setup.guest_at(wrong).can_share_memory(&setup.pod.socket()), "{wrong:#x}");
    }
    assert_eq!(superblock(), before);
    // Elsewhere it may have its memory as ever.
    let mut driver = Driver::connected(&setup.pod);
    let data = pattern(1, 4096);
    assert_eq!(driver.write_sectors(0, &data), OK);
    assert_eq!(driver.read_sectors(0, 4096), data);
    assert_eq!(setup.direct_and_bounced(), (0, 2));
}

#[test]
fn without_a_lease_for_it_memory_in_the_pool_is_refused() {
    let pool = pool();
    let memory = pool.hardware();
    let setup = Setup::new(pool, &memory, false);
    let guest = setup.guest_at(setup.ram.start_byte().get());
    assert!(!guest.can_share_memory(&setup.pod.socket()));
}

/// Its data is copied, but what its VMM maps is the guest's all the same.
#[test]
fn nor_may_the_guest_of_a_disk_in_several_places_map_what_is_not_its_own() {
    for stripe_bytes in [None, Some(64 << 10)] {
        let pool = pool();
        let memory = pool.hardware();
        let mut setup = Setup::new(pool, &memory, true);
        let DiskObject { lease, route, .. } = setup.pod.disk;
        setup.pod.frontend.as_mut().unwrap().remove(ObjectId::Disk(lease)).unwrap();
        let place = |number: u32| ReplicaObject {
            number,
            ssd: format!("h{number}/ssd0"),
            route: Route { channel: ChannelId::new(route.channel.get() + number), ..route },
            place: PlaceNumber::FIRST,
            in_sync: true,
            away: false,
            leaving: false,
        };
        setup.pod.disk.replicas = vec![place(0), place(1)];
        setup.pod.disk.stripe_bytes = stripe_bytes;
        setup.pod.apply_disk();
        let start = setup.ram.start_byte().get();
        assert!(setup.guest_at(start).can_share_memory(&setup.pod.socket()));
        for wrong in [0, 4096, start - 4096, start + 4096, setup.pod.data.start_byte().get()] {
            assert!(!setup.guest_at(wrong).can_share_memory(&setup.pod.socket()), "{wrong:#x}");
        }
    }
}
