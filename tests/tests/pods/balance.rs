//! An SSD that does too much is relieved: the volume that keeps it busy moves to another host's while its guest reads and writes.

#![allow(clippy::cast_possible_truncation, reason = "small numbers, chosen here")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use pod_api::{CreateInstance, Disk, EventKind, SsdLoad, VolumeBalance};
use vhost_frontend::mock::{MockGuest, Piece};
use vm_memory::{Bytes, GuestAddress};
use wadi_tests::pod::{HostPlan, Pod, PodBuilder};
use wadi_tests::waiting::until;

/// Of a volume, and of a request.
const BLOCK_BYTES: usize = 64 << 10;
const BLOCKS: u64 = 512;
/// Requests that a guest has in flight, each on another block.
const DEPTH: usize = 4;
/// Of each a part of the guest's memory: header, status, data.
const PLACE_BYTES: u64 = 128 << 10;
const DATA: u64 = 4096;
/// A request that takes longer has been lost.
const PATIENCE: Duration = Duration::from_secs(30);

const READ: u32 = 0;
const WRITE: u32 = 1;

/// Windows of 200 ms, ten of which count.
const BALANCE: &str = "\n[balance]\nwindow-ms = 200\n\n[balance.volumes]\nmode = \"move\"\nwindows = 10\n";

/// A guest that writes and reads a volume, so many requests per second, and knows what must be there.
struct Load {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Guest>,
}

struct Guest {
    mock: MockGuest,
    /// How often each block was written.
    versions: Vec<u64>,
    /// By their place: head, block, what is being done.
    in_flight: [Option<(u16, u64, u32)>; DEPTH],
    random: u64,
}

impl Load {
    fn start(socket: &str, per_second: u32) -> Self {
        let (socket, stop) = (socket.to_owned(), Arc::new(AtomicBool::new(false)));
        let stopped = Arc::clone(&stop);
        let thread = thread::spawn(move || {
            let mut guest = Guest::connect(&socket);
            let pause = Duration::from_secs(1) / per_second;
            let mut due = Instant::now();
            while !stopped.load(Ordering::Relaxed) {
                thread::sleep(due.saturating_duration_since(Instant::now()));
                guest.random_request();
                // What was missed is not made up for: that would be another load.
                due = Instant::now().max(due + pause);
            }
            guest
        });
        Self { stop, thread }
    }

    /// Ends it. Whatever was written is read again.
    fn finish(self) {
        self.stop.store(true, Ordering::Relaxed);
        let mut guest = self.thread.join().expect("a guest that found what it wrote");
        (0..BLOCKS).for_each(|block| guest.request(block, READ));
        while guest.in_flight.iter().any(Option::is_some) {
            guest.wait();
        }
        assert!(guest.versions.iter().sum::<u64>() > 0);
    }
}

impl Guest {
    fn connect(socket: &str) -> Self {
        let mut mock = MockGuest::new(1 << 20, 1, 64);
        mock.connect(socket.as_ref(), 0);
        Self { mock, versions: vec![0; BLOCKS as usize], in_flight: [None; DEPTH], random: 1 }
    }

    fn random_request(&mut self) {
        self.random =
            self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let (block, what) = ((self.random >> 33) % BLOCKS, if self.random >> 62 == 0 { READ } else { WRITE });
        self.request(block, what);
    }

    /// Asks for something, once there is room, and nothing else is being done with the block.
    fn request(&mut self, block: u64, what: u32) {
        let place = loop {
            let is_busy = self.in_flight.iter().flatten().any(|it| it.1 == block);
            match self.in_flight.iter().position(Option::is_none) {
                Some(place) if !is_busy => break place,
                _ => self.wait(),
            }
        };
        let start = self.start(place);
        if what == WRITE {
            self.versions[block as usize] += 1;
            let data = content(block, self.versions[block as usize]);
            self.mock.memory().write_slice(&data, GuestAddress(start + DATA)).unwrap();
        }
        let mut header = [0; 16];
        header[..4].copy_from_slice(&what.to_le_bytes());
        header[8..].copy_from_slice(&(block * (BLOCK_BYTES as u64 / 512)).to_le_bytes());
        self.mock.memory().write_slice(&header, GuestAddress(start)).unwrap();
        self.mock.memory().write_slice(&[9], GuestAddress(start + 16)).unwrap();
        let piece = |address, bytes, writable| Piece { address, bytes, writable };
        let pieces = [
            piece(start, 16, false),
            piece(start + DATA, BLOCK_BYTES as u32, what == READ),
            piece(start + 16, 1, true),
        ];
        self.in_flight[place] = Some((self.mock.offer(0, &pieces, None), block, what));
    }

    /// Waits for an answer, and checks what was read.
    fn wait(&mut self) {
        let used = self.mock.wait_used(0, PATIENCE).expect("a request is not answered");
        let is_it = |it: &Option<(u16, u64, u32)>| it.is_some_and(|it| it.0 == used.head);
        let place = self.in_flight.iter().position(is_it).expect("each is answered once");
        let (_, block, what) = self.in_flight[place].take().unwrap();
        let mut status = [9];
        self.mock.memory().read_slice(&mut status, GuestAddress(self.start(place) + 16)).unwrap();
        assert_eq!(status, [0], "an I/O error");
        if what == READ {
            let mut data = vec![0; BLOCK_BYTES];
            self.mock.memory().read_slice(&mut data, GuestAddress(self.start(place) + DATA)).unwrap();
            let version = self.versions[block as usize];
            assert!(
                data == content(block, version),
                "block {block} is not what was written, {version} times"
            );
        }
    }

    fn start(&self, place: usize) -> u64 {
        self.mock.data_start() + place as u64 * PLACE_BYTES
    }
}

/// What a block holds that was written so often.
fn content(block: u64, version: u64) -> Vec<u8> {
    if version == 0 {
        return vec![0; BLOCK_BYTES];
    }
    let words = (0..BLOCK_BYTES as u64 / 8).map(|word| (block << 40 | version << 16 | word).to_le_bytes());
    words.flatten().collect()
}

fn balance(pod: &Pod) -> VolumeBalance {
    pod.api().balance().unwrap().volumes.expect("this controller balances SSDs")
}

fn load_of(balance: &VolumeBalance, ssd: &str) -> Option<SsdLoad> {
    balance.ssds.iter().find(|it| it.name == ssd).cloned()
}

fn told(pod: &Pod, kind: EventKind) -> Vec<(String, String)> {
    let events = pod.api().events(0).unwrap().events.into_iter();
    events.filter(|it| it.kind == kind).map(|it| (it.subject, it.message)).collect()
}

#[test]
fn a_busy_volume_leaves_an_ssd_that_does_too_much() {
    let pod = PodBuilder::new()
        .host(HostPlan::new("h1").vms())
        .host(HostPlan::new("h2").ssd("ssd0", "256M").iops(200))
        .host(HostPlan::new("h3").ssd("ssd1", "256M").iops(800))
        .controller_sections(BALANCE)
        .start()
        .unwrap();
    let size = BLOCKS * BLOCK_BYTES as u64;
    for name in ["busy", "calm"] {
        let wish = serde_json::json!({ "name": name, "size": size, "device": "h2/ssd0" });
        pod.api().create_volume(&serde_json::from_value(wish).unwrap()).unwrap();
    }
    let request = CreateInstance {
        name: "vm1".into(),
        host: "h1".into(),
        volumes: vec!["busy".into(), "calm".into()],
        ..Default::default()
    };
    let instance = pod.create_instance_as(&request).unwrap();
    // More than h2/ssd0 can do, and much less than h3/ssd1 can.
    let began = Instant::now();
    let start = |(disk, rate): (&Disk, u32)| Load::start(&disk.socket, rate);
    let loads: Vec<Load> = instance.disks.iter().zip([240, 10]).map(start).collect();

    until("the busy volume to be on h3/ssd1 alone", || {
        let volume = pod.api().volume("busy").unwrap();
        (volume.device == "h3/ssd1" && volume.replicas.is_empty()).then_some(())
    });
    eprintln!("the busy volume had moved after {:?}", began.elapsed());
    let calm = until("no SSD to do too much", || {
        let balance = balance(&pod);
        let [left, reached] = ["h2/ssd0", "h3/ssd1"].map(|ssd| load_of(&balance, ssd));
        let (left, reached) = (left?, reached?);
        let done = reached.used_percent? > 0 && !left.copying && !reached.copying;
        (done && left.used_percent? <= 60 && !left.overloaded && !reached.overloaded).then_some(balance)
    });
    assert!(calm.moves.is_empty(), "{calm:?}");
    // Longer than it takes until an SSD is overloaded.
    thread::sleep(Duration::from_secs(4));
    assert_eq!(pod.api().volume("calm").unwrap().device, "h2/ssd0");
    let balanced = told(&pod, EventKind::Balanced);
    assert_eq!(balanced, [("vm1".to_owned(), "busy moves from h2/ssd0 to h3/ssd1".to_owned())]);
    let overloaded = told(&pod, EventKind::Overloaded);
    assert!(
        matches!(&overloaded[..], [(ssd, why)] if ssd == "h2/ssd0" && why.contains("moving busy of vm1 with")),
        "{overloaded:?}"
    );
    let table = pod.podctl(&["balance", "-o", "wide"]).unwrap();
    for shown in ["volumes move by themselves: from 80 %", "REQUESTS/S", "h3/ssd1", "no volume would move"] {
        assert!(table.contains(shown), "{shown} is not in\n{table}");
    }
    let explained = pod.podctl(&["explain", "instance", "vm1"]).unwrap();
    eprintln!("{table}\n{explained}");
    assert!(explained.contains("does ") && explained.contains("requests/s"), "{explained}");
    loads.into_iter().for_each(Load::finish);
}
