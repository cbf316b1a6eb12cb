//! Long frames that a NIC is to cut: TCP over IPv6 (TSO6) of a real guest, and UDP (USO), which guests' kernels know since 6.2, of one without a VM. Both cross
//! the pool whole, and the kernel behind a TAP device cuts them where somebody takes no long ones.

use std::fs;
use std::net::UdpSocket;
use std::time::Duration;

use guest_images::{Guest, Silent};
use pod_api::Nic;
use pod_protocol::ids::MacAddress;
use vhost_frontend::mock::{MockGuest, Piece};
use vm_memory::{Bytes as _, GuestAddress};
use wadi_tests::iperf::{self, Way};
use wadi_tests::pod::{CLIENT_ADDRESS, HostPlan, Pod, PodBuilder, VmShape};
use wadi_tests::waiting::{until, wait_for};

const CLIENT: &str = "fd77::1";
const GUEST: &str = "fd77::2";
/// Longer than a frame of the usual length.
const LONG_BYTES: u64 = 2000;

fn pod() -> Pod {
    PodBuilder::new()
        .host(HostPlan::new("h1").vms())
        .host(HostPlan::new("h2").nic("nic0"))
        .host(HostPlan::new("h3").nic("nic1"))
        .start()
        .unwrap()
}

/// Frames and their bytes that the instance's frontend has counted in this direction.
fn counted(pod: &Pod, direction: &str) -> (u64, u64) {
    let page = pod.api().metrics().unwrap();
    let of = ["instance=\"vm1\"", "endpoint=\"h1/net-frontend\"", &format!("direction=\"{direction}\"")];
    let number = |name: &str| {
        let mut lines = page.lines().filter(|line| line.starts_with(name));
        let line = lines.find(|line| of.iter().all(|label| line.contains(label)));
        line.and_then(|line| line.rsplit_once(' ')?.1.parse().ok()).unwrap_or(0)
    };
    (number("wadi_lease_packets_total{"), number("wadi_lease_bytes_total{"))
}

#[test]
fn tcp_over_ipv6_crosses_the_pool_in_long_frames() {
    let guest = Guest::ensure(&mut Silent).unwrap();
    let pod = pod();
    let client = pod.client_namespace();
    client.inside(|| fs::write("/proc/sys/net/ipv6/conf/eth0/disable_ipv6", "0")).unwrap();
    client.ip(&["-6", "address", "add", &format!("{CLIENT}/64"), "dev", "eth0", "nodad"]).unwrap();
    let instance = pod.create_instance("vm1", "h1", &[]).unwrap();
    let vm = pod.boot(&instance, &guest, VmShape::default()).unwrap();
    let offloads = vm.exec("ethtool -k eth0").unwrap();
    assert!(offloads.contains("tx-tcp6-segmentation: on"), "{offloads}");
    // Nobody else has this address.
    vm.exec("echo 0 > /proc/sys/net/ipv6/conf/eth0/accept_dad").unwrap();
    vm.exec(&format!("ip -6 address add {GUEST}/64 dev eth0")).unwrap();
    let server = iperf::Server::start(&pod).unwrap();
    for (way, direction) in [(Way::Out, "transmit"), (Way::In, "receive")] {
        let before = counted(&pod, direction);
        let output = vm.exec_within(&iperf::command_to(CLIENT, way, 2), Duration::from_secs(40)).unwrap();
        let moved = iperf::Report::parse(&output).unwrap().bytes;
        // What daemons count is said now and then.
        let (frames, bytes) = until("all of it to be counted", || {
            let now = counted(&pod, direction);
            (now.1 - before.1 > moved).then_some((now.0 - before.0, now.1 - before.1))
        });
        assert!(bytes / frames > LONG_BYTES, "{way:?}: {bytes} bytes in {frames} frames");
    }
    drop(server);
}

/// Features of virtio-net.
const CSUM: u64 = 1 << 0;
const GUEST_CSUM: u64 = 1 << 1;
const MRG_RXBUF: u64 = 1 << 15;
const GUEST_USO: u64 = 1 << 54 | 1 << 55;
const HOST_USO: u64 = 1 << 56;
/// Of a virtio-net header: the checksum is yet to be made; UDP that is yet to be cut.
const NEEDS_CHECKSUM: u8 = 1;
const GSO_UDP_L4: u8 = 5;
const HEADER_BYTES: usize = 12;
/// Ethernet, IPv4 and UDP.
const FRONT_BYTES: usize = 14 + 20 + 8;
const RECEIVE: usize = 0;
const TRANSMIT: usize = 1;
const BUFFER_BYTES: u32 = 64 << 10;
const PORT: u16 = 9;
const DATAGRAM_BYTES: u16 = 1000;
const DATAGRAMS: u16 = 40;
const CLIENT_MAC: &str = "02:77:00:00:00:01";

/// A guest that sends and takes UDP uncut.
struct Cutless {
    guest: MockGuest,
    /// Where what it sends lies; what it receives lies behind that.
    place: u64,
}

impl Cutless {
    fn connect(nic: &Nic) -> Self {
        let mut guest = MockGuest::new(4 << 20, 2, 16);
        let place = guest.data_start();
        guest.connect(nic.socket.as_ref(), CSUM | GUEST_CSUM | MRG_RXBUF | GUEST_USO | HOST_USO);
        for number in 1..=8 {
            let address = place + number * u64::from(BUFFER_BYTES);
            guest.offer(RECEIVE, &[Piece { address, bytes: BUFFER_BYTES, writable: true }], None);
        }
        Self { guest, place }
    }

    /// Whether a NIC cuts for it and lets it have what is not cut.
    fn is_cut_for(&self) -> bool {
        self.guest.features() & (HOST_USO | GUEST_USO) == HOST_USO | GUEST_USO
    }

    fn send(&mut self, packet: &[u8]) {
        self.guest.memory().write_slice(packet, GuestAddress(self.place)).unwrap();
        let bytes = u32::try_from(packet.len()).unwrap();
        self.guest.offer(TRANSMIT, &[Piece { address: self.place, bytes, writable: false }], None);
        wait_for("the frame to be taken", || self.guest.used(TRANSMIT).is_some());
    }

    /// The next packet that it got, whatever that is.
    fn receive(&mut self) -> Option<Vec<u8>> {
        let used = self.guest.used(RECEIVE)?;
        // Buffers are used in the order in which they were offered, one descriptor each.
        let address = self.place + (u64::from(used.head) + 1) * u64::from(BUFFER_BYTES);
        let mut packet = vec![0; used.written as usize];
        self.guest.memory().read_slice(&mut packet, GuestAddress(address)).unwrap();
        Some(packet)
    }
}

/// The sum of 16-bit words, folded.
fn sum(bytes: &[u8]) -> u16 {
    let words =
        bytes.chunks(2).map(|word| u32::from(word[0]) << 8 | word.get(1).map_or(0, |low| u32::from(*low)));
    let mut sum: u32 = words.sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    u16::try_from(sum).unwrap()
}

/// Many datagrams in one packet, with a checksum that is yet to be made.
fn uncut(to: MacAddress, from: MacAddress, addresses: [[u8; 4]; 2]) -> Vec<u8> {
    let payload = usize::from(DATAGRAM_BYTES) * usize::from(DATAGRAMS);
    let udp_bytes = u16::try_from(8 + payload).unwrap();
    let csum_start = 14_u16 + 20;
    let mut packet = vec![NEEDS_CHECKSUM, GSO_UDP_L4];
    for word in [42_u16, DATAGRAM_BYTES, csum_start, 6, 0] {
        packet.extend(word.to_le_bytes());
    }
    packet.extend([&to.bytes()[..], &from.bytes(), &0x0800_u16.to_be_bytes()].concat());
    let [source, destination] = addresses;
    let total = (20 + udp_bytes).to_be_bytes();
    let mut ip =
        [&[0x45, 0, total[0], total[1], 0, 1, 0x40, 0, 64, 17, 0, 0], &source[..], &destination].concat();
    let checksum = !sum(&ip);
    ip[10..12].copy_from_slice(&checksum.to_be_bytes());
    packet.extend(ip);
    let pseudo = [&source[..], &destination, &[0, 17], &udp_bytes.to_be_bytes()].concat();
    for word in [PORT, PORT, udp_bytes, sum(&pseudo)] {
        packet.extend(word.to_be_bytes());
    }
    packet.extend((0..payload).map(|at| content(at / usize::from(DATAGRAM_BYTES))));
    packet
}

/// What a datagram is filled with.
fn content(number: usize) -> u8 {
    u8::try_from(number).unwrap() + 1
}

#[test]
fn datagrams_that_are_yet_to_be_cut_cross_the_pool_as_one_frame() {
    let pod = pod();
    let request = |name: &str| pod.create_instance(name, "h1", &[]).unwrap();
    let (one, other) = (request("vm1"), request("vm2"));
    let [home, away] = [&one, &other].map(|instance| instance.nics[0].nic.clone());
    assert_ne!(home, away, "each on a NIC of its own");
    let (mut sender, mut receiver) = (Cutless::connect(&one.nics[0]), Cutless::connect(&other.nics[0]));
    if !sender.is_cut_for() {
        eprintln!("this kernel's TAP devices do not cut UDP: there is nothing to be seen");
        return;
    }
    let socket = pod.client_namespace().inside(|| UdpSocket::bind((CLIENT_ADDRESS, PORT))).unwrap();
    socket.set_read_timeout(Some(Duration::from_mins(1))).unwrap();
    let mac = |nic: &Nic| nic.mac.parse::<MacAddress>().unwrap();
    pod.client_namespace().ip(&["link", "set", "dev", "eth0", "address", CLIENT_MAC]).unwrap();
    let client = CLIENT_MAC.parse::<MacAddress>().unwrap();
    let [ours, theirs, clients] = [[10, 77, 0, 2], [10, 77, 0, 3], [10, 77, 0, 1]];

    // To a socket, which takes datagrams one by one.
    sender.send(&uncut(client, mac(&one.nics[0]), [ours, clients]));
    let mut datagram = [0; 2000];
    for number in 0..usize::from(DATAGRAMS) {
        let bytes = socket.recv(&mut datagram).unwrap();
        assert_eq!(bytes, usize::from(DATAGRAM_BYTES));
        assert!(datagram[..bytes].iter().all(|byte| *byte == content(number)), "datagram {number}");
    }

    // To a guest behind another NIC that takes them as they are.
    let sent = uncut(mac(&other.nics[0]), mac(&one.nics[0]), [ours, theirs]);
    sender.send(&sent);
    let got = until("the frame", || receiver.receive().filter(|it| it.len() > HEADER_BYTES + FRONT_BYTES));
    assert_eq!(got[1] & 0x7f, GSO_UDP_L4, "it was cut");
    assert_eq!(u16::from_le_bytes([got[4], got[5]]), DATAGRAM_BYTES);
    assert!(got[HEADER_BYTES..] == sent[HEADER_BYTES..], "{} bytes of {}", got.len(), sent.len());
}
