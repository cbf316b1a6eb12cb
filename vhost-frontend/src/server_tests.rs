//! Whole devices on their sockets, served by a small engine: what a VMM may do while rings run, and what it may not.

mod additional;
mod connecting;
mod ending;
mod forgotten;
mod hostile;
mod logging;

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::fs::MemfdFlags;
use vhost::VhostBackend;
use vhost::VhostUserMemoryRegionInfo;
use vhost::vhost_user::message::VhostUserProtocolFeatures;
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::mock::{MockGuest, Piece};
use crate::{
    Chain, ChainWriter, ConfigSpace, DeviceSink, DeviceSpec, GuestMemory, ListenError, Next, Ring, Server,
    StopReason, VMM_PATIENCE,
};

const PATIENCE: Duration = Duration::from_secs(20);
const QUEUES: u16 = 2;
const FILL: u8 = 0xab;
/// Where a test plugs memory in: in the guest, and in the VMM.
const PLUGGED: u64 = 0x4000_0000;
const PLUGGED_VMM: u64 = 0x7e00_0000_0000;
const PLUGGED_BYTES: u64 = 2 << 20;

/// What the engine has, and what it saw.
#[derive(Default)]
struct State {
    rings: Vec<Option<Ring>>,
    malformed: u32,
    broken: u32,
    connected: u32,
    unmet: u32,
    disconnected: u32,
    announced: Vec<[u8; 6]>,
    /// The VMM's end of the connection, to be looked at while rings stop.
    vmm: Option<UnixStream>,
    /// Rings that stopped when the VMM could know already that the connection had ended.
    stopped_late: u32,
}

#[derive(Clone, Default)]
struct Shared(Arc<Mutex<State>>);

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }
}

/// Fills what a chain lets it write, and gives it back.
fn serve(state: &mut State, chain: &mut Chain) -> bool {
    let State { rings, malformed, broken, .. } = state;
    let mut moved = false;
    for ring in rings.iter_mut().flatten() {
        loop {
            let written = match ring.next_chain(chain) {
                Ok(Next::Empty) => break,
                Ok(Next::Malformed(_)) => {
                    *malformed += 1;
                    0
                }
                Ok(Next::Chain) => {
                    let mut writer = ChainWriter::new(ring.memory(), chain.writable());
                    let fill = vec![FILL; usize::try_from(writer.left()).unwrap()];
                    let written = writer.write(&fill);
                    written.map_or(0, |()| u32::try_from(fill.len()).unwrap())
                }
                Err(_) => {
                    *broken += 1;
                    break;
                }
            };
            moved = true;
            if ring.complete(chain.head(), written).is_err() {
                *broken += 1;
            }
        }
        ring.signal();
    }
    moved
}

struct Sink(Shared);

impl DeviceSink for Sink {
    fn connected(&mut self) {
        self.0.lock().connected += 1;
    }

    fn nobody_came(&mut self) {
        self.0.lock().unmet += 1;
    }

    fn ring_started(&mut self, ring: Ring) {
        let index = usize::from(ring.index());
        assert!(self.0.lock().rings[index].replace(ring).is_none(), "a ring starts once");
    }

    fn ring_stopped(&mut self, index: u16, _reason: StopReason) -> u16 {
        let mut state = self.0.lock();
        state.stopped_late += u32::from(state.vmm.as_ref().is_some_and(ending::has_ended));
        let ring = state.rings[usize::from(index)].take();
        ring.expect("a ring that runs is stopped").next_available()
    }

    fn memory_changed(&mut self, memory: &GuestMemory) {
        for ring in self.0.lock().rings.iter_mut().flatten() {
            ring.set_memory(GuestMemory::clone(memory));
        }
    }

    fn announce(&mut self, address: [u8; 6]) {
        self.0.lock().announced.push(address);
    }

    fn disconnected(&mut self) {
        let mut state = self.0.lock();
        assert!(state.rings.iter().all(Option::is_none), "all rings were stopped");
        state.disconnected += 1;
    }
}

/// A device and its engine.
struct Device {
    server: Option<Server>,
    state: Shared,
    stop: Arc<AtomicBool>,
    engine: Option<JoinHandle<()>>,
    directory: tempfile::TempDir,
}

impl Device {
    fn start() -> Self {
        Self::start_by(Server::listen)
    }

    fn start_by(begin: impl FnOnce(&Path, DeviceSpec, Sink) -> Result<Server, ListenError>) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let state = Shared::default();
        state.lock().rings = (0..QUEUES).map(|_| None).collect();
        let spec = DeviceSpec {
            name: "device".to_owned(),
            virtio_features: 1 << 28 | 1 << 29,
            assumed_features: 1 << 32 | 1 << 28,
            config: ConfigSpace::new(vec![1, 2, 3, 4]),
            queues: QUEUES,
            queues_hint: |count| format!("ask for {count}"),
            queue_size_max: 256,
            in_order: false,
            announces: true,
            discards: |index| index == 1,
            pool_ram: None,
            vmm_patience: VMM_PATIENCE,
        };
        let server = begin(&directory.path().join("device.sock"), spec, Sink(state.clone()));
        let stop = Arc::new(AtomicBool::new(false));
        let engine = std::thread::spawn({
            let (state, stop) = (state.clone(), Arc::clone(&stop));
            move || {
                let mut chain = Chain::default();
                while !stop.load(Ordering::Relaxed) {
                    let moved = serve(&mut state.lock(), &mut chain);
                    if !moved {
                        std::thread::sleep(Duration::from_micros(200));
                    }
                }
            }
        });
        Self { server: Some(server.unwrap()), state, stop, engine: Some(engine), directory }
    }

    fn socket(&self) -> PathBuf {
        self.directory.path().join("device.sock")
    }

    fn eventually(&self, mut holds: impl FnMut(&State) -> bool) {
        let began = Instant::now();
        while !holds(&self.state.lock()) {
            assert!(began.elapsed() < PATIENCE, "it never came to hold");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        self.server = None;
        self.stop.store(true, Ordering::Relaxed);
        let engine = self.engine.take().map(JoinHandle::join);
        if !std::thread::panicking() {
            assert!(matches!(engine, Some(Ok(()))));
            assert!(!self.socket().exists());
        }
    }
}

fn connected(socket: &Path) -> MockGuest {
    let mut guest = MockGuest::new(1 << 20, QUEUES, 64);
    guest.connect(socket, u64::MAX);
    guest
}

/// Lets the device write somewhere; returns how much it says that it wrote.
fn request(guest: &mut MockGuest, ring: usize, address: u64) -> u32 {
    let head = guest.offer(ring, &[Piece { address, bytes: 512, writable: true }], None);
    let used = guest.wait_used(ring, PATIENCE).expect("an answer");
    assert_eq!(used.head, head);
    used.written
}

fn works(guest: &mut MockGuest) {
    for ring in 0..usize::from(QUEUES) {
        let address = guest.data_start() + 4096;
        guest.memory().write_slice(&[0; 512], GuestAddress(address)).unwrap();
        assert_eq!(request(guest, ring, address), 512);
        let mut data = [0; 512];
        guest.memory().read_slice(&mut data, GuestAddress(address)).unwrap();
        assert_eq!(data, [FILL; 512]);
    }
}

fn memory_file(bytes: u64) -> File {
    let file: File = rustix::fs::memfd_create("plugged", MemfdFlags::CLOEXEC).unwrap().into();
    file.set_len(bytes).unwrap();
    file
}

fn plugged(file: &File) -> VhostUserMemoryRegionInfo {
    VhostUserMemoryRegionInfo {
        guest_phys_addr: PLUGGED,
        memory_size: PLUGGED_BYTES,
        userspace_addr: PLUGGED_VMM,
        mmap_offset: 0,
        mmap_handle: file.as_raw_fd(),
    }
}

#[test]
fn memory_comes_and_goes_while_rings_run() {
    use std::os::unix::fs::FileExt;
    let device = Device::start();
    let mut guest = connected(&device.socket());
    works(&mut guest);
    let file = memory_file(PLUGGED_BYTES);
    for round in 1..4 {
        guest.frontend().add_mem_region(&plugged(&file)).unwrap();
        let at = PLUGGED + round * 512;
        assert_eq!(request(&mut guest, 0, at), 512);
        let mut data = [0; 512];
        file.read_exact_at(&mut data, round * 512).unwrap();
        assert_eq!(data, [FILL; 512]);
        works(&mut guest);
        guest.frontend().remove_mem_region(&plugged(&file)).unwrap();
        // What is not there any more is not written, and costs the request only.
        assert_eq!(request(&mut guest, 1, at), 0);
        assert_eq!(u64::from(device.state.lock().malformed), round);
        works(&mut guest);
    }
}

#[test]
fn memory_that_is_shared_for_each_queue_pair_stays_until_the_last_one() {
    let device = Device::start();
    let mut guest = connected(&device.socket());
    works(&mut guest);
    let file = memory_file(PLUGGED_BYTES);
    guest.frontend().add_mem_region(&plugged(&file)).unwrap();
    guest.frontend().add_mem_region(&plugged(&file)).unwrap();
    guest.frontend().remove_mem_region(&plugged(&file)).unwrap();
    assert_eq!(request(&mut guest, 0, PLUGGED), 512);
    guest.frontend().remove_mem_region(&plugged(&file)).unwrap();
    assert_eq!(request(&mut guest, 1, PLUGGED), 0);
    works(&mut guest);
}

#[test]
fn impossible_memory_costs_the_connection_only() {
    let device = Device::start();
    let file = memory_file(PLUGGED_BYTES);
    let good = plugged(&file);
    let (small, other) = (memory_file(4096), memory_file(PLUGGED_BYTES));
    let cases = [
        // Overlaps the one before.
        vec![good, VhostUserMemoryRegionInfo { guest_phys_addr: PLUGGED + 4096, ..good }],
        vec![good, VhostUserMemoryRegionInfo { mmap_handle: other.as_raw_fd(), ..good }],
        // Ends beyond its file.
        vec![VhostUserMemoryRegionInfo { mmap_handle: small.as_raw_fd(), ..good }],
        vec![VhostUserMemoryRegionInfo { mmap_offset: PLUGGED_BYTES, ..good }],
        // Ends beyond the address space.
        vec![VhostUserMemoryRegionInfo { guest_phys_addr: u64::MAX - 4095, ..good }],
    ];
    for regions in cases {
        let mut guest = connected(&device.socket());
        let results: Vec<bool> =
            regions.iter().map(|region| guest.frontend().add_mem_region(region).is_ok()).collect();
        assert_eq!(results.last(), Some(&false));
        drop(guest);
        works(&mut connected(&device.socket()));
    }
    // Memory that is not there cannot be removed.
    let mut guest = connected(&device.socket());
    assert!(guest.frontend().remove_mem_region(&good).is_err());
}

#[test]
fn a_ring_whose_memory_goes_is_parked() {
    let device = Device::start();
    let mut guest = connected(&device.socket());
    works(&mut guest);
    let empty = memory_file(PLUGGED_BYTES);
    // Everything is replaced by memory in which no ring lies.
    guest.frontend().set_mem_table(&[plugged(&empty)]).unwrap();
    guest.offer(0, &[Piece { address: PLUGGED, bytes: 512, writable: true }], None);
    device.eventually(|state| state.broken > 0);
    assert_eq!(guest.wait_used(0, Duration::from_millis(50)), None);
    drop(guest);
    works(&mut connected(&device.socket()));
}

#[test]
fn a_reset_device_starts_anew() {
    let device = Device::start();
    let mut guest = connected(&device.socket());
    for _ in 0..3 {
        works(&mut guest);
        guest.frontend().reset_device().unwrap();
        device.eventually(|state| state.rings.iter().all(Option::is_none));
        // Nothing runs, so nothing is answered.
        let address = guest.data_start();
        guest.offer(0, &[Piece { address, bytes: 512, writable: true }], None);
        assert_eq!(guest.wait_used(0, Duration::from_millis(20)), None);
        guest.start_rings();
        assert!(guest.wait_used(0, PATIENCE).is_some(), "the request was there all the time");
    }
    works(&mut guest);
}

#[test]
fn a_ring_that_is_disabled_is_handed_over_again_where_its_device_throws_away_what_is_in_it() {
    let device = Device::start();
    let mut guest = connected(&device.socket());
    works(&mut guest);
    let enabled = || {
        let state = device.state.lock();
        [0, 1].map(|index: usize| state.rings[index].as_ref().map(Ring::is_enabled))
    };
    for _ in 0..3 {
        for ring in [0, 1, 1, 0] {
            guest.enable_ring(ring, false);
        }
        assert_eq!(enabled(), [None, Some(false)]);
        guest.enable_ring(0, true);
        guest.enable_ring(1, true);
        assert_eq!(enabled(), [Some(true); 2]);
        works(&mut guest);
    }
    // One that was stopped meanwhile waits until it is enabled, as one that never was.
    guest.enable_ring(1, false);
    guest.stop_ring(1);
    guest.frontend().set_vring_kick(1, &EventFd::new(EFD_NONBLOCK).unwrap()).unwrap();
    assert_eq!(enabled(), [Some(true), None]);
    guest.enable_ring(1, true);
    assert_eq!(enabled(), [Some(true); 2]);
}

#[test]
fn a_ring_that_was_stopped_waits_for_its_kick_whatever_else_is_said() {
    let device = Device::start();
    let mut guest = connected(&device.socket());
    works(&mut guest);
    guest.stop_ring(0);
    // As when another host has the guest by now.
    for enable in [false, true] {
        guest.enable_ring(0, enable);
    }
    assert!(device.state.lock().rings[0].is_none());
    guest.frontend().set_vring_kick(0, &EventFd::new(EFD_NONBLOCK).unwrap()).unwrap();
    device.eventually(|state| state.rings[0].is_some());
}

#[test]
fn a_device_has_one_vmm_at_a_time() {
    let device = Device::start();
    let mut guest = connected(&device.socket());
    works(&mut guest);
    for _ in 0..3 {
        let second = Frontend::connect(device.socket(), 1).unwrap();
        assert!(second.get_features().is_err(), "it was turned away");
        works(&mut guest);
    }
    assert_eq!(device.state.lock().connected, 1);
    drop(guest);
    works(&mut connected(&device.socket()));
}

#[test]
fn what_was_completed_before_is_signalled_where_the_vmm_listens_in_the_end() {
    let device = Device::start();
    let mut guest = connected(&device.socket());
    works(&mut guest);
    // As after a death between a completion and its signal. QEMU starts the ring, and then says which descriptor it listens to.
    guest.connect(&device.socket(), u64::MAX);
    let last = EventFd::new(EFD_NONBLOCK).unwrap();
    guest.frontend().set_vring_call(0, &last).unwrap();
    assert_eq!(last.read().ok(), Some(1));
    // One of a ring that does not run has missed nothing.
    guest.stop_ring(0);
    guest.frontend().set_vring_call(0, &last).unwrap();
    assert!(last.read().is_err());
}

#[test]
fn a_vmm_that_went_away_finds_its_rings_again() {
    let device = Device::start();
    let mut guest = connected(&device.socket());
    for round in 1..30 {
        works(&mut guest);
        guest.disconnect();
        let address = guest.data_start();
        guest.offer(1, &[Piece { address, bytes: 512, writable: true }], None);
        guest.connect(&device.socket(), u64::MAX);
        assert_eq!(guest.wait_used(1, PATIENCE).map(|used| used.written), Some(512));
        assert_eq!(device.state.lock().disconnected, round);
    }
    // The device goes while a VMM is connected: nobody hangs.
    drop(device);
}
