//! The drivers on real interfaces, in network namespaces of their own. Needs root, as the drivers do.

mod af_xdp;
mod falling_back;
mod tap;
mod zero_copy;

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::process::Command;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use cxl_pool::{Area, CoherenceMode, CreateOptions, LineCount, LineOffset, Memory, Pool};
use rustix::thread::{UnshareFlags, unshare_unsafe};
use vhost_net_cxl::backend::receive_buffers::ReceiveBuffers;
use vhost_net_cxl::nic::af_xdp::AfXdpNic;
use vhost_net_cxl::nic::statistics::{DriverTroubles, TroubleWatch, Troubles};
use vhost_net_cxl::nic::tap::TapNic;
use vhost_net_cxl::nic::{Batch, Nic, NicConfig, Piece, Taken};
use vhost_net_cxl::offloads::Offloads;

const POOL_BYTES: u64 = 32 << 20;
const DEADLINE: Duration = Duration::from_secs(10);
/// An experimental Ethernet type: nobody else sends it.
const TYPE: [u8; 2] = [0x88, 0xb5];

/// Runs a test in a network namespace of its own, which goes away with its thread.
fn in_namespace(test: impl FnOnce() + Send + 'static) {
    let thread = std::thread::spawn(|| {
        // SAFETY: a network namespace does not affect file descriptors or memory.
        unsafe { unshare_unsafe(UnshareFlags::NEWNET) }.expect("run as root");
        sh("ip link set lo up");
        test();
    });
    if let Err(panic) = thread.join() {
        std::panic::resume_unwind(panic);
    }
}

fn sh(command: &str) {
    let output = Command::new("sh").args(["-c", command]).output().expect("a shell");
    assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
}

/// A veth pair with everything quiet: `ours` for the driver or the bridge, `peer` as the wire's other end.
fn veth() {
    sh("ip link add ours type veth peer name peer");
    veth_up();
}

fn veth_up() {
    for end in ["ours", "peer"] {
        sh(&format!("ethtool -K {end} tso off gso off gro off tx off >/dev/null"));
        sh(&format!("ip link set {end} up"));
    }
}

/// One packet, for a NIC to send.
fn one(packet: Piece) -> Batch {
    let mut batch = Batch::new();
    batch.push_frame(packet);
    batch
}

/// The same packet in three pieces, two of which lie elsewhere in the pool, the last first.
fn scattered(memory: &impl Memory, packet: Piece) -> Batch {
    const FRONT: u32 = 70;
    let mut batch = Batch::new();
    batch.push_piece(Piece { at: packet.at, bytes: FRONT });
    let mut rest = vec![0; (packet.bytes - FRONT) as usize];
    memory.read(packet.at.saturating_add(u64::from(FRONT)), &mut rest);
    let elsewhere = packet.at.saturating_add(1 << 20);
    for (part, at) in rest.chunks(rest.len().div_ceil(2)).zip([100_000, 1]) {
        let at = elsewhere.saturating_add(at);
        memory.write(at, part);
        batch.push_piece(Piece { at, bytes: u32::try_from(part.len()).expect("short") });
    }
    // They count, the copy does not.
    memory.write(packet.at.saturating_add(u64::from(FRONT)), &vec![0xee; rest.len()]);
    batch.end_frame();
    batch
}

struct Stage {
    _directory: tempfile::TempDir,
    pool: Pool,
    buffers: ReceiveBuffers,
    arrived: VecDeque<([u8; 12], Vec<u8>)>,
}

impl Stage {
    fn new() -> Self {
        let directory = tempfile::tempdir_in("/dev/shm").expect("a directory");
        let options = CreateOptions {
            size_bytes: Some(POOL_BYTES),
            mode: CoherenceMode::Hardware,
            ..CreateOptions::default()
        };
        let pool = Pool::create(&directory.path().join("pool"), &options).expect("a pool");
        let start = LineOffset::new((8 << 20) / 64);
        let buffers = ReceiveBuffers::new(Area::new(start, LineCount::new((8 << 20) / 64)));
        Self { _directory: directory, pool, buffers, arrived: VecDeque::new() }
    }

    /// Puts a packet where an instance's transmit area would be.
    fn packet(&self, header: [u8; 12], frame: &[u8]) -> Piece {
        let memory = self.pool.hardware();
        let at = LineOffset::new((24 << 20) / 64).bytes();
        memory.write(at, &header);
        memory.write(at.saturating_add(12), frame);
        Piece { at, bytes: u32::try_from(12 + frame.len()).expect("short") }
    }

    /// Receives until a frame of our type arrives: its header and content.
    fn receive(&mut self, nic: &mut dyn Nic) -> ([u8; 12], Vec<u8>) {
        let memory = self.pool.hardware();
        let mut batch = Batch::new();
        let start = Instant::now();
        while start.elapsed() < DEADLINE {
            if let Some(packet) = self.arrived.pop_front() {
                return packet;
            }
            batch.clear();
            nic.receive(&mut self.buffers, &mut batch).expect("received");
            nic.flush().expect("flushed");
            for index in 0..batch.len() {
                let mut packet = Vec::new();
                for piece in batch.frame(index) {
                    let mut bytes = vec![0; piece.bytes as usize];
                    memory.read(piece.at, &mut bytes);
                    packet.extend(bytes);
                    self.buffers.give_back(self.buffers.at(piece.at).expect("a receive buffer"));
                }
                let frame = packet.split_off(12);
                if frame[12..14] == TYPE || frame[12..14] == [8, 0] {
                    self.arrived.push_back((packet.try_into().expect("twelve bytes"), frame));
                }
            }
        }
        panic!("no frame arrived");
    }
}

fn config(text: &str) -> NicConfig {
    NicConfig::parse(&text.parse().expect("TOML")).expect("valid")
}

fn frame(bytes: usize, mark: u8) -> Vec<u8> {
    let mut frame = vec![mark; bytes];
    frame[..6].fill(0xff);
    frame[6..12].copy_from_slice(&[2, 0, 0, 0, 0, mark]);
    frame[12..14].copy_from_slice(&TYPE);
    frame
}

/// The wire's other end: a second TAP would need a bridge, a packet socket does not.
struct Wire(std::os::fd::OwnedFd);

impl Wire {
    fn open(interface: &str) -> Self {
        use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
        let socket = socket_with(
            AddressFamily::PACKET,
            SocketType::RAW,
            SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
            Some(rustix::net::Protocol::from_raw(std::num::NonZero::new(0x0300).expect("not zero"))),
        )
        .expect("a packet socket");
        let index = rustix::net::netdevice::name_to_index(&socket, interface).expect("an interface");
        // SAFETY: plain data for which zeroes are valid.
        let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
        address.sll_family = u16::try_from(libc::AF_PACKET).expect("small");
        address.sll_protocol = 0x0300;
        address.sll_ifindex = i32::try_from(index).expect("an index");
        // SAFETY: the address lives until the call returns.
        let bound = unsafe {
            let bytes = u32::try_from(size_of_val(&address)).expect("small");
            libc::bind(socket.as_fd().as_raw_fd(), (&raw const address).cast(), bytes)
        };
        assert_eq!(bound, 0, "{}", std::io::Error::last_os_error());
        Self(socket)
    }

    fn send(&self, frame: &[u8]) {
        let mut file = std::fs::File::from(self.0.try_clone().expect("a descriptor"));
        file.write_all(frame).expect("sent");
    }

    /// Waits for a frame of our type.
    fn receive(&self) -> Vec<u8> {
        let mut file = std::fs::File::from(self.0.try_clone().expect("a descriptor"));
        let mut bytes = vec![0; 70_000];
        let start = Instant::now();
        while start.elapsed() < DEADLINE {
            match file.read(&mut bytes) {
                Ok(length) if length > 14 && (bytes[12..14] == TYPE || bytes[12..14] == [0x80, 0x35]) => {
                    bytes.truncate(length);
                    return bytes;
                }
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => std::thread::yield_now(),
                Err(error) => panic!("{error}"),
            }
        }
        panic!("no frame arrived");
    }
}

fn link_changes(nic: &mut dyn Nic) -> Receiver<(bool, String)> {
    let (tell, told) = channel();
    nic.watch_link(Box::new(move |up, reason| {
        let _ = tell.send((up, reason.to_owned()));
    }))
    .expect("watched");
    told
}

#[test]
fn a_link_that_changes_before_it_is_watched_is_told() {
    in_namespace(|| {
        veth();
        let stage = Stage::new();
        let text = "name='nic0'\ndriver='tap'\ninterface='tap0'\nuplink='ours'";
        for (before, after) in [("down", "up"), ("up", "down")] {
            sh(&format!("ip link set peer {before}"));
            has_carrier("ours", before == "up");
            let mut nic = TapNic::open(&config(text), &stage.pool).expect("opened");
            assert_eq!(nic.link().is_up(), before == "up");
            sh(&format!("ip link set peer {after}"));
            has_carrier("ours", after == "up");
            let told = link_changes(&mut nic);
            assert_eq!(told.recv_timeout(DEADLINE).expect("told").0, after == "up");
            assert_eq!(nic.link().is_up(), after == "up");
        }
    });
}

/// Waits until the kernel sees it so.
fn has_carrier(interface: &str, carrier: bool) {
    let not = if carrier { "" } else { "!" };
    sh(&format!(
        "for i in $(seq 1000); do {not} ip link show {interface} | grep -q LOWER_UP && exit 0; sleep 0.01; done; exit 1"
    ));
}

#[test]
fn a_tap_carries_frames_both_ways() {
    in_namespace(|| {
        veth();
        sh("ip link add br0 type bridge stp_state 0 forward_delay 0 mcast_snooping 0 && ip link set br0 up");
        let mut stage = Stage::new();
        let text = "name='nic0'\ndriver='tap'\ninterface='tap0'\nuplink='ours'";
        let mut nic = TapNic::open(&config(text), &stage.pool).expect("opened");
        sh("ip link set tap0 master br0 && ip link set ours master br0");
        nic.start(&mut stage.buffers).expect("started");
        assert!(nic.link().is_up());
        assert_eq!(nic.identity().mtu, 1500);
        let wire = Wire::open("peer");
        for (bytes, mark) in [(60, 1), (1514, 2), (777, 3)] {
            let packet = stage.packet([0; 12], &frame(bytes, mark));
            assert_eq!(nic.transmit(&one(packet)).expect("sent"), 1);
            assert_eq!(wire.receive(), frame(bytes, mark));
            wire.send(&frame(bytes, mark + 100));
            let (header, got) = stage.receive(&mut nic);
            assert_eq!(header[..10], [0; 10]);
            assert_eq!(got, frame(bytes, mark + 100));
        }
        let packet = stage.packet([0; 12], &frame(1400, 4));
        let memory = stage.pool.hardware();
        assert_eq!(nic.transmit(&scattered(&memory, packet)).expect("sent"), 1);
        assert_eq!(wire.receive(), frame(1400, 4), "in pieces");
        assert_eq!(nic.transmit_frame(&frame(60, 9)).expect("sent"), Taken::Whole);
        assert_eq!(wire.receive(), frame(60, 9));
        // Nothing there is no error, and no buffer is lost.
        let mut batch = Batch::new();
        nic.receive(&mut stage.buffers, &mut batch).expect("nothing");
        assert!(batch.is_empty());
    });
}

/// Puts the checksum, which is zero yet, into the header of an IPv4 packet.
fn sum_up_ipv4(frame: &mut [u8]) {
    let sum: u32 = frame[14..34].chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(pair[1])).sum();
    let sum = !u16::try_from((sum & 0xffff) + (sum >> 16)).expect("folded");
    frame[24..26].copy_from_slice(&sum.to_be_bytes());
}

/// A TCP segment of `payload` bytes over IPv4 to `10.9.0.2`, with its checksum left undone.
fn tcp(payload: usize) -> Vec<u8> {
    let mut frame = vec![0; 54 + payload];
    frame[..12].copy_from_slice(&[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 2, 0, 0, 0, 0, 1]);
    frame[12..14].copy_from_slice(&[8, 0]);
    let total = u16::try_from(40 + payload).expect("short").to_be_bytes();
    frame[14..34].copy_from_slice(&[
        0x45, 0, total[0], total[1], 0, 1, 0x40, 0, 64, 6, 0, 0, 10, 9, 0, 1, 10, 9, 0, 2,
    ]);
    sum_up_ipv4(&mut frame);
    frame[34..38].copy_from_slice(&[0x12, 0x34, 0, 80]);
    frame[46..48].copy_from_slice(&[0x50, 0x10]);
    for (place, byte) in frame[54..].iter_mut().enumerate() {
        *byte = place.to_le_bytes()[0];
    }
    frame
}

#[test]
fn a_frame_of_60_kib_crosses_a_tap_whole_or_in_segments() {
    in_namespace(|| {
        sh("ip link add br0 type bridge stp_state 0 forward_delay 0 mcast_snooping 0 && ip link set br0 up");
        let mut stage = Stage::new();
        let open = |name: &str| {
            let text = format!("name='{name}'\ndriver='tap'\ninterface='{name}'");
            TapNic::open(&config(&text), &stage.pool).expect("opened")
        };
        let (mut left, mut right) = (open("left"), open("right"));
        sh("ip link set left master br0 && ip link set right master br0");
        right.start(&mut stage.buffers).expect("started");
        // NEEDS_CSUM, TCPV4, headers of 54 bytes, segments of 1448, checksum at 34 + 16.
        let header = [1, 1, 54, 0, 0xa8, 5, 34, 0, 16, 0, 0, 0];
        let sent = tcp(60_000);
        let packet = stage.packet(header, &sent);

        right.set_receiver_offloads(Offloads::ALL).expect("set");
        assert_eq!(left.transmit(&one(packet)).expect("sent"), 1);
        let (got_header, got) = stage.receive(&mut right);
        assert_eq!(got_header[..2], header[..2]);
        assert_eq!(got.len(), sent.len());
        assert_eq!(got[54..], sent[54..]);

        // For a receiver that cannot take it the kernel cuts it up.
        right.set_receiver_offloads(Offloads::NONE).expect("set");
        assert_eq!(left.transmit(&one(packet)).expect("sent"), 1);
        let mut payload = Vec::new();
        while payload.len() < 60_000 {
            let (got_header, got) = stage.receive(&mut right);
            assert_eq!(got_header[1], 0, "no large frame");
            assert!(got.len() <= 1514);
            payload.extend_from_slice(&got[54..]);
        }
        assert_eq!(payload, sent[54..]);
    });
}

#[test]
fn a_pulled_cable_is_seen_and_so_is_its_return() {
    in_namespace(|| {
        veth();
        let stage = Stage::new();
        let text = "name='nic0'\ndriver='tap'\ninterface='tap0'\nuplink='ours'";
        let mut nic = TapNic::open(&config(text), &stage.pool).expect("opened");
        let told = link_changes(&mut nic);
        sh("ip link set peer down");
        let (up, reason) = told.recv_timeout(DEADLINE).expect("told");
        assert!(!up && reason.contains("ours"), "{reason}");
        assert!(!nic.link().is_up());
        sh("ip link set peer up");
        assert!(told.recv_timeout(DEADLINE).expect("told").0);
        sh("ip link del ours");
        while told.recv_timeout(DEADLINE).expect("told").0 {}
        assert!(!nic.link().is_up());
    });
}

#[test]
fn a_tap_that_is_taken_down_has_no_link_whatever_its_uplink_has() {
    in_namespace(|| {
        veth();
        let stage = Stage::new();
        let text = "name='nic0'\ndriver='tap'\ninterface='tap0'\nuplink='ours'";
        let mut nic = TapNic::open(&config(text), &stage.pool).expect("opened");
        assert!(nic.link().is_up());
        // Before anybody watches, and then while somebody does.
        sh("ip link set tap0 down");
        let told = link_changes(&mut nic);
        for _ in 0..2 {
            let (up, reason) = told.recv_timeout(DEADLINE).expect("told");
            assert!(!up && reason.contains("tap0"), "{reason}");
            assert!(!nic.link().is_up());
            sh("ip link set tap0 up");
            assert!(told.recv_timeout(DEADLINE).expect("told").0);
            sh("ip link set tap0 down");
        }
        assert!(!told.recv_timeout(DEADLINE).expect("told").0);
        // One that is back is not enough.
        sh("ip link set peer down");
        has_carrier("ours", false);
        sh("ip link set tap0 up");
        has_carrier("tap0", true);
        assert!(!nic.link().is_up());
        sh("ip link set peer up");
        let (up, reason) = told.recv_timeout(DEADLINE).expect("told");
        assert!(up && reason.contains("ours"), "{reason}");
    });
}

/// Its watch says so a moment later, and the instance moves: what was taken until then would be lost.
#[test]
fn a_tap_that_is_down_takes_nothing_until_it_was_down_for_long() {
    in_namespace(|| {
        veth();
        let stage = Stage::new();
        let text = "name='nic0'\ndriver='tap'\ninterface='tap0'\nuplink='ours'";
        let mut nic = TapNic::open(&config(text), &stage.pool).expect("opened");
        let packet = stage.packet([0; 12], &frame(100, 7));
        sh("ip link set tap0 down");
        assert_eq!(nic.transmit(&one(packet)).expect("no error"), 0);
        assert_eq!(nic.transmit_frame(&frame(60, 8)).expect("no error"), Taken::NoRoom);
        assert_eq!(nic.errors(), 0);
        sh("ip link set tap0 up");
        let host = Wire::open("tap0");
        assert_eq!(nic.transmit(&one(packet)).expect("sent"), 1);
        assert_eq!(host.receive(), frame(100, 7));
        // Nobody tries for ever, even if no watch says anything.
        sh("ip link set tap0 down");
        let start = Instant::now();
        while nic.transmit(&one(packet)).expect("no error") == 0 {
            assert!(start.elapsed() < DEADLINE, "it is tried still");
        }
        assert_eq!(nic.errors(), 1);
    });
}

/// Looks until something was counted: then all of it.
fn until_counted(watch: &mut TroubleWatch, driver: &DriverTroubles, name: &str) -> Troubles {
    let start = Instant::now();
    while start.elapsed() < DEADLINE {
        // A watch looks once per second of the time that it is told.
        let later = Instant::now() + start.elapsed() * 10_000;
        let troubles = watch.counts(later, driver);
        if troubles.get(name).is_some_and(|count| *count > 0) {
            return troubles.clone();
        }
    }
    panic!("{name} is not counted");
}

#[test]
fn what_the_kernel_drops_before_a_tap_that_is_not_read_is_counted_apart_from_its_uplink() {
    in_namespace(|| {
        veth();
        sh("ip link add br0 type bridge stp_state 0 forward_delay 0 mcast_snooping 0 && ip link set br0 up");
        let stage = Stage::new();
        let text = config("name='nic0'\ndriver='tap'\ninterface='tap0'\nuplink='ours'");
        let nic = TapNic::open(&text, &stage.pool).expect("opened");
        sh("ip link set tap0 txqueuelen 10 && ip link set tap0 master br0 && ip link set ours master br0");
        let wire = Wire::open("peer");
        for number in 0..200 {
            wire.send(&frame(100, number));
        }
        let mut watch = TroubleWatch::new(&text);
        let troubles = until_counted(&mut watch, &DriverTroubles::default(), "tap-tx-dropped");
        assert_eq!(troubles["tx-dropped"], 0, "its uplink dropped nothing: {troubles:?}");
        drop(nic);
    });
}

#[test]
fn what_cannot_be_opened_says_why() {
    in_namespace(|| {
        let stage = Stage::new();
        sh("ip link add br0 type bridge");
        let open = |text: &str| {
            let error = match config(text).driver {
                vhost_net_cxl::nic::Driver::Tap => TapNic::open(&config(text), &stage.pool).err(),
                _ => AfXdpNic::open(&config(text), &stage.pool).err(),
            };
            error.expect("refused").to_string()
        };
        let message = open("name='nic0'\ndriver='tap'\ninterface='tap0'\nuplink='eth9'");
        assert!(message.contains("no interface eth9"), "{message}");
        let message = open("name='nic0'\ndriver='af-xdp'\ninterface='eth9'");
        assert!(message.contains("no interface eth9"), "{message}");
        veth();
        let message = open("name='nic0'\ndriver='af-xdp'\ninterface='ours'\nqueue=1");
        assert!(
            message.contains("ours has 1 receive queues") && message.contains("queue in [[nic]]"),
            "{message}"
        );
        let message = open("name='nic0'\ndriver='tap'\ninterface='br0'");
        assert!(message.contains("no single-queue TAP device"), "{message}");
        let _first = TapNic::open(&config("name='nic0'\ndriver='tap'\ninterface='tap0'"), &stage.pool);
        let message = open("name='nic1'\ndriver='tap'\ninterface='tap0'");
        assert!(message.contains("another process uses it"), "{message}");
    });
}
