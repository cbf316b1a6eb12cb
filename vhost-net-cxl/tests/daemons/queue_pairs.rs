//! Eight pairs of queues under traffic, while the guest changes how many it uses.

use std::collections::{BTreeMap, BTreeSet};
use std::thread;
use std::time::{Duration, Instant};

use cxl_pool::Role;
use pod_protocol::objects::{Object, PortObject, RegistrationState};
use vhost_frontend::mock::{MockGuest, Piece};
use virtio_bindings::virtio_net::{VIRTIO_NET_F_MQ, VIRTIO_NET_F_MRG_RXBUF};
use vm_memory::{Bytes, GuestAddress};

use crate::pod::{DEADLINE, MAC, endpoint, null_nic, port, run_directory};

const PAIRS: usize = 8;
const RING_SIZE: u16 = 128;
/// As many as one queue receives without new buffers, should all of them go there.
const BURST: u32 = 128;
const FLOWS: u32 = 64;
const HEADER_BYTES: usize = 12;
const FRAME_BYTES: usize = 100;
const BUFFER_BYTES: u64 = 2048;
const ETHERNET_BYTES: usize = 14;
/// Where a frame bears its number: behind the UDP header.
const NUMBER_AT: usize = ETHERNET_BYTES + 20 + 8;

/// A frame of UDP over IPv4, of one of the flows.
fn packet(number: u32) -> Vec<u8> {
    let mut packet = vec![0; HEADER_BYTES + FRAME_BYTES];
    let frame = &mut packet[HEADER_BYTES..];
    frame[..6].copy_from_slice(&[2, 0, 0, 0, 0, 200]);
    frame[6..12].copy_from_slice(&MAC.bytes());
    frame[12..14].copy_from_slice(&[8, 0]);
    frame[14..24].copy_from_slice(&[0x45, 0, 0, 86, 0, 0, 0x40, 0, 64, 17]);
    frame[26..34].copy_from_slice(&[10, 0, 0, 1, 10, 0, 0, 2]);
    let source_port = u16::try_from(1000 + number % FLOWS).expect("small");
    frame[34..36].copy_from_slice(&source_port.to_be_bytes());
    frame[36..40].copy_from_slice(&[0, 53, 0, 66]);
    frame[NUMBER_AT..][..4].copy_from_slice(&number.to_le_bytes());
    packet
}

/// A guest with a driver of our own. Pair `n` has receive ring `2 n` and transmit ring `2 n + 1`.
struct Guest {
    mock: MockGuest,
    /// Where the buffer of each receive descriptor lies.
    posted: BTreeMap<(usize, u16), u64>,
    active: usize,
    next: u32,
}

/// What arrived: the number of each frame, in order, by the pair that it came through.
type Arrived = Vec<Vec<u32>>;

impl Guest {
    fn connect(socket: &std::path::Path) -> Self {
        let mut mock = MockGuest::new(16 << 20, 2 * u16::try_from(PAIRS).expect("small"), RING_SIZE);
        let features = 1 << VIRTIO_NET_F_MRG_RXBUF | 1 << VIRTIO_NET_F_MQ | 1 << 29;
        mock.connect(socket, features);
        assert_eq!(mock.features() & features, features);
        let mut guest = Self { mock, posted: BTreeMap::new(), active: PAIRS, next: 0 };
        for pair in 0..PAIRS {
            for slot in 0..u64::from(RING_SIZE) {
                guest.post(pair, guest.buffer(2 * pair, slot));
            }
        }
        guest
    }

    fn buffer(&self, ring: usize, slot: u64) -> u64 {
        self.mock.data_start() + (ring as u64 * u64::from(RING_SIZE) + slot) * BUFFER_BYTES
    }

    fn post(&mut self, pair: usize, address: u64) {
        let piece = Piece { address, bytes: 2048, writable: true };
        let head = self.mock.offer(2 * pair, &[piece], None);
        self.posted.insert((pair, head), address);
    }

    /// Offers the next frame on this pair.
    fn send_on(&mut self, pair: usize) -> u32 {
        let (number, ring) = (self.next, 2 * pair + 1);
        self.next += 1;
        let address = self.buffer(ring, u64::from(number) % u64::from(RING_SIZE));
        let packet = packet(number);
        self.mock.memory().write_slice(&packet, GuestAddress(address)).expect("in memory");
        let bytes = u32::try_from(packet.len()).expect("short");
        self.mock.offer(ring, &[Piece { address, bytes, writable: false }], None);
        number
    }

    /// Offers frames, each flow's on one of the active pairs.
    fn send(&mut self, count: u32) {
        for _ in 0..count {
            self.send_on((self.next % FLOWS) as usize % self.active);
        }
    }

    /// What VIRTIO_NET_CTRL_MQ_VQ_PAIRS_SET makes a VMM do.
    fn use_pairs(&mut self, count: usize) {
        for ring in 0..2 * PAIRS {
            self.mock.enable_ring(ring, ring < 2 * count);
        }
        self.active = count;
    }

    /// Sends until what was asked for has reached the worker, ring by ring: nothing tells a VMM, either, when it has. From then on it stays so.
    fn wait_until_spread_over(&mut self, pairs: usize) {
        let began = Instant::now();
        loop {
            self.send(BURST);
            match spread(&self.take(BURST as usize), pairs) {
                Ok(_) => return,
                Err(problem) => assert!(began.elapsed() < DEADLINE, "{problem}"),
            }
        }
    }

    /// Waits until so many frames have arrived and as many are returned, and takes them.
    fn take(&mut self, count: usize) -> Arrived {
        self.take_until(count, count)
    }

    /// Waits until so many frames have arrived and so many are returned, which is all of them, and takes them.
    fn take_until(&mut self, count: usize, sent: usize) -> Arrived {
        let began = Instant::now();
        let mut arrived = vec![Vec::new(); PAIRS];
        let (mut heard, mut returned) = (0, 0);
        while heard < count || returned < sent {
            let before = heard + returned;
            for (pair, of_pair) in arrived.iter_mut().enumerate() {
                while let Some(used) = self.mock.used(2 * pair) {
                    assert_eq!(used.written as usize, HEADER_BYTES + FRAME_BYTES);
                    let address = self.posted.remove(&(pair, used.head)).expect("a buffer that was posted");
                    of_pair.push(self.number(address));
                    self.post(pair, address);
                    heard += 1;
                }
                while self.mock.used(2 * pair + 1).is_some() {
                    returned += 1;
                }
            }
            if heard + returned == before {
                assert!(
                    began.elapsed() < DEADLINE,
                    "of {count} frames {heard} arrived and {returned} were returned"
                );
                thread::sleep(Duration::from_micros(100));
            }
        }
        assert_eq!((heard, returned), (count, sent));
        arrived
    }

    /// The number of the frame in a buffer, which is the one that was sent but for the addresses.
    fn number(&self, address: u64) -> u32 {
        let mut got = [0; HEADER_BYTES + FRAME_BYTES];
        self.mock.memory().read_slice(&mut got, GuestAddress(address)).expect("in memory");
        let frame = &got[HEADER_BYTES..];
        let number = u32::from_le_bytes(frame[NUMBER_AT..][..4].try_into().expect("four bytes"));
        let sent = packet(number);
        assert_eq!(frame[12..], sent[HEADER_BYTES + 12..]);
        number
    }
}

/// Everything from `first` on arrived, once, each flow through one pair and in order, and by all pairs in use.
fn check(arrived: &Arrived, first: u32, count: u32, pairs: usize) {
    let mut all: Vec<u32> = arrived.iter().flatten().copied().collect();
    all.sort_unstable();
    assert_eq!(all, (first..first + count).collect::<Vec<_>>());
    let pair_of = spread(arrived, pairs).expect("each flow through one pair, and all pairs in use");
    assert_eq!(pair_of.keys().copied().collect::<BTreeSet<_>>(), (0..FLOWS).collect());
    for numbers in arrived {
        let mut last = BTreeMap::new();
        for number in numbers {
            let flow = number % FLOWS;
            assert!(
                last.insert(flow, number).is_none_or(|before| before < number),
                "flow {flow} out of order"
            );
        }
    }
}

/// Through which pair each flow came, if those in use are the first `pairs` and no flow is torn apart.
fn spread(arrived: &Arrived, pairs: usize) -> Result<BTreeMap<u32, usize>, String> {
    let used: Vec<usize> = (0..PAIRS).filter(|pair| !arrived[*pair].is_empty()).collect();
    if used != (0..pairs).collect::<Vec<_>>() {
        return Err(format!("pairs {used:?} are used, and not the first {pairs}"));
    }
    let mut pair_of = BTreeMap::new();
    for (pair, numbers) in arrived.iter().enumerate() {
        for flow in numbers.iter().map(|number| number % FLOWS) {
            let other = *pair_of.entry(flow).or_insert(pair);
            if other != pair {
                return Err(format!("flow {flow} is torn apart, by pairs {other} and {pair}"));
            }
        }
    }
    Ok(pair_of)
}

#[test]
fn traffic_spreads_over_the_pairs_that_the_guest_uses_and_over_no_other() {
    let directory = tempfile::tempdir_in("/dev/shm").expect("a directory");
    let directory = directory.path();
    let (mut controller, _daemons) = null_nic(directory, "echo", RegistrationState::Active);
    let queue_pairs = u16::try_from(PAIRS).expect("small");
    let object = PortObject { queue_pairs, standby: None, ..port((2, 1), (2, 1)) };
    controller.apply(endpoint(1, Role::NetFrontend), Object::Port(object));
    let mut guest = Guest::connect(&run_directory(directory).sockets().join("vm-net0.sock"));
    assert_eq!(guest.mock.config(12)[8..10], queue_pairs.to_le_bytes());

    for pairs in [8, 3, 8, 1, 5, 2, 8] {
        // While frames are under way, which arrive through either.
        guest.active = pairs;
        guest.send(BURST);
        guest.use_pairs(pairs);
        guest.take(BURST as usize);
        // These go nowhere, and nobody waits for them.
        (pairs..PAIRS).for_each(|pair| _ = guest.send_on(pair));
        guest.take_until(0, PAIRS - pairs);
        guest.wait_until_spread_over(pairs);
        for _ in 0..3 {
            let first = guest.next;
            guest.send(BURST);
            let arrived = guest.take(BURST as usize);
            check(&arrived, first, BURST, pairs);
        }
        guest.use_pairs(PAIRS);
    }
}
