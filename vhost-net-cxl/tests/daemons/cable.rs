//! A cable is pulled, and interfaces are deleted and made again.

use std::path::Path;
use std::process::Command;

use cxl_pool::Role;
use pod_protocol::objects::{NicObject, Object, RegistrationState};
use pod_protocol::protocol::Protocol;
use rustix::thread::{UnshareFlags, unshare_unsafe};
use vhost_frontend::mock::{MockGuest, Piece};
use vhost_net_cxl::daemon::{run_backend, run_frontend};
use vhost_net_cxl::offloads::Offloads;
use virtio_bindings::virtio_net::VIRTIO_NET_F_MRG_RXBUF;
use vm_memory::{Bytes, GuestAddress};

use crate::pod::{
    DEADLINE, Daemon, MAC, area, channel_pair, controller, endpoint, port, registration, run_directory,
    write_config,
};

const FRAME_BYTES: u32 = 200;

fn sh(command: &str) {
    let output = Command::new("sh").args(["-c", command]).output().expect("a shell");
    assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
}

/// A guest that sends broadcast frames and hears what comes back.
struct Guest {
    mock: MockGuest,
    next: u8,
}

impl Guest {
    fn connect(socket: &Path) -> Self {
        let mut mock = MockGuest::new(8 << 20, 2, 128);
        mock.connect(socket, 1 << VIRTIO_NET_F_MRG_RXBUF | Offloads::ALL.features() | 1 << 29 | 1 << 28);
        let mut guest = Self { mock, next: 0 };
        for slot in 0..64 {
            guest.post(slot);
        }
        guest
    }

    fn post(&mut self, slot: u64) {
        let address = self.mock.data_start() + slot * 2048;
        self.mock.offer(0, &[Piece { address, bytes: 2048, writable: true }], None);
    }

    /// Waits for a frame of the client; the hosts' own multicast may come in between.
    fn hear(&mut self) {
        loop {
            let used = self.mock.wait_used(0, DEADLINE).expect("a frame arrives");
            if used.written == 12 + FRAME_BYTES {
                return;
            }
        }
    }

    /// Sends the next frame: to everybody, marked with its number.
    fn send(&mut self) -> u8 {
        let number = self.next;
        self.next += 1;
        let mut packet = vec![number; 12 + FRAME_BYTES as usize];
        packet[..12].fill(0);
        packet[12..18].fill(0xff);
        packet[18..24].copy_from_slice(&MAC.bytes());
        packet[24..26].copy_from_slice(&[0x88, 0xb5]);
        let address = self.mock.data_start() + (256 + u64::from(number) * 4) * 1024;
        self.mock.memory().write_slice(&packet, GuestAddress(address)).expect("in memory");
        let bytes = 12 + FRAME_BYTES;
        self.mock.offer(1, &[Piece { address, bytes, writable: false }], None);
        number
    }
}

/// The switch of the test: a bridge with a veth to each host, and a TAP of the client behind it.
fn build_network() {
    sh("ip link set lo up");
    sh("ip link add tor type bridge stp_state 0 forward_delay 0 mcast_snooping 0 && ip link set tor up");
    for host in ["h2", "h3"] {
        sh(&format!("ip link add {host} type veth peer name {host}-tor"));
        sh(&format!("ip link add {host}-br type bridge stp_state 0 forward_delay 0 mcast_snooping 0"));
        sh(&format!("ip tuntap add {host}-tap mode tap"));
        sh(&format!("ip link set {host}-tor master tor && ip link set {host} master {host}-br"));
        sh(&format!("ip link set {host}-tap master {host}-br"));
        for link in ["", "-tor", "-br", "-tap"] {
            sh(&format!("ip link set {host}{link} up"));
        }
    }
    sh("ip link add client type veth peer name client-tor");
    sh("ip link set client-tor master tor && ip link set client-tor up && ip link set client up");
}

#[test]
fn an_instance_moves_to_the_backup_nic_when_the_cable_is_pulled() {
    let thread = std::thread::spawn(|| {
        // SAFETY: a network namespace does not affect file descriptors or memory.
        unsafe { unshare_unsafe(UnshareFlags::NEWNET) }.expect("run as root");
        build_network();
        let directory = tempfile::tempdir_in("/dev/shm").expect("a directory");
        run(directory.path());
    });
    if let Err(panic) = thread.join() {
        std::panic::resume_unwind(panic);
    }
}

fn run(directory: &Path) {
    let run_directory = run_directory(directory);
    let mut controller = controller(directory);
    let backend = |host: u16| {
        let nic = format!(
            "[[nic]]\nname = \"nic0\"\ndriver = \"tap\"\ninterface = \"h{host}-tap\"\nuplink = \"h{host}\"\n\
             reopen-ms = 20\n"
        );
        let config = write_config(directory, host, &nic);
        Daemon::start(move |stop| run_backend(&config, Protocol::CURRENT, stop))
    };
    let _backends = [backend(2), backend(3)];
    let config = write_config(directory, 1, "");
    let _frontend = Daemon::start(move |stop| run_frontend(&config, Protocol::CURRENT, stop));
    controller.serve_until("three daemons joining", |it| it.joined.len() == 3);

    for host in [2, 3] {
        for (to, object) in channel_pair(host) {
            controller.apply(to, Object::Channel(object));
        }
        let nic = NicObject { nic: "nic0".into(), rx_area: area(if host == 2 { 8 } else { 20 }, 8) };
        controller.apply(endpoint(host, Role::NetBackend), Object::Nic(nic));
    }
    let (first, second, frontend) =
        (endpoint(2, Role::NetBackend), endpoint(3, Role::NetBackend), endpoint(1, Role::NetFrontend));
    controller.apply(first, registration(2, 1, RegistrationState::Active));
    controller.apply(second, registration(3, 1, RegistrationState::Standby));
    controller.apply(frontend, Object::Port(port((2, 1), (3, 1))));

    let client = packet_socket::Packets::open("client");
    let mut guest = Guest::connect(&run_directory.sockets().join("vm-net0.sock"));
    // Out: through the first NIC to the client. The address was announced there before.
    for _ in 0..10 {
        let number = guest.send();
        assert_eq!(client.receive(DEADLINE), number);
    }
    // In: from the client to the guest.
    client.send(MAC, 77);
    guest.hear();

    // The cable is pulled; what is sent now has to arrive all the same, in order.
    sh("ip link set h2-tor down");
    controller.serve_until("the loss of the link", |it| it.links.contains(&(first, false)));
    let numbers: Vec<u8> = (0..10).map(|_| guest.send()).collect();
    controller.apply(second, registration(3, 2, RegistrationState::Active));
    controller.apply(frontend, Object::Port(port((3, 2), (2, 2))));
    controller.apply(first, registration(2, 2, RegistrationState::Standby));
    let got: Vec<u8> = numbers.iter().map(|_| client.receive(DEADLINE)).collect();
    assert_eq!(got, numbers);
    // The bridge has learnt the new port from the announcement: unicast arrives.
    client.send(MAC, 78);
    guest.hear();
    for _ in 0..20 {
        assert!(guest.mock.wait_used(1, DEADLINE).is_some(), "every descriptor comes back");
    }

    // Somebody deletes the device under the driver, and makes it again: it is used again, by itself.
    for _ in 0..2 {
        let told = controller.devices.len();
        sh("ip link del h3-tap");
        controller.serve_until("the failure of the NIC", |it| it.devices[told..].contains(&(second, false)));
        let number = guest.send();
        // Under its name only once it is on the bridge: the driver takes it as soon as it sees it.
        sh("ip tuntap add new mode tap && ip link set new master h3-br && ip link set new name h3-tap");
        controller.serve_until("the return of the NIC", |it| it.devices[told..].contains(&(second, true)));
        assert_eq!(client.receive(DEADLINE), number, "what was sent meanwhile");
        client.send(MAC, 79);
        guest.hear();
        assert!(guest.mock.wait_used(1, DEADLINE).is_some());
    }

    // So is the port whose carrier is the link.
    let told = controller.links.len();
    sh("ip link del h3");
    controller.serve_until("the loss of the port", |it| it.links[told..].contains(&(second, false)));
    sh(
        "ip link add h3 type veth peer name h3-tor && ip link set h3-tor master tor && ip link set h3 master h3-br",
    );
    sh("ip link set h3 up && ip link set h3-tor up");
    controller.serve_until("the return of the port", |it| it.links[told..].last() == Some(&(second, true)));
    let number = guest.send();
    assert_eq!(client.receive(DEADLINE), number);
}

/// A packet socket of the client.
mod packet_socket {
    use std::fs::File;
    use std::io::{Read, Write};
    use std::num::NonZero;
    use std::os::fd::{AsRawFd, OwnedFd};
    use std::time::{Duration, Instant};

    use pod_protocol::ids::MacAddress;
    use rustix::net::{AddressFamily, Protocol, SocketFlags, SocketType, netdevice, socket_with};

    const ALL_TYPES: u16 = 0x0300;

    pub(super) struct Packets(File);

    impl Packets {
        pub(super) fn open(interface: &str) -> Self {
            let protocol = Protocol::from_raw(NonZero::new(u32::from(ALL_TYPES)).expect("not zero"));
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            let socket: OwnedFd = socket_with(AddressFamily::PACKET, SocketType::RAW, flags, Some(protocol))
                .expect("a packet socket");
            let index = netdevice::name_to_index(&socket, interface).expect("an interface");
            // SAFETY: plain data for which zeroes are valid.
            let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
            address.sll_family = u16::try_from(libc::AF_PACKET).expect("small");
            address.sll_protocol = ALL_TYPES;
            address.sll_ifindex = i32::try_from(index).expect("an index");
            let bytes = u32::try_from(size_of_val(&address)).expect("small");
            // SAFETY: the address lives until the call returns.
            let bound = unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), bytes) };
            assert_eq!(bound, 0, "{}", std::io::Error::last_os_error());
            Self(socket.into())
        }

        pub(super) fn send(&self, to: MacAddress, mark: u8) {
            let mut frame = vec![mark; super::FRAME_BYTES as usize];
            frame[..6].copy_from_slice(&to.bytes());
            frame[6..12].copy_from_slice(&[2, 0, 0, 0, 0, 99]);
            frame[12..14].copy_from_slice(&[0x88, 0xb5]);
            (&self.0).write_all(&frame).expect("sent");
        }

        /// The number of the next frame of the guest.
        pub(super) fn receive(&self, deadline: Duration) -> u8 {
            let start = Instant::now();
            let mut frame = [0; 2048];
            while start.elapsed() < deadline {
                match (&self.0).read(&mut frame) {
                    Ok(_) if frame[6..14] == [2, 0, 0, 0, 0, 1, 0x88, 0xb5] => {
                        assert!(frame[15..super::FRAME_BYTES as usize].iter().all(|byte| *byte == frame[14]));
                        return frame[14];
                    }
                    Ok(_) => {}
                    Err(_) => std::thread::sleep(Duration::from_micros(200)),
                }
            }
            panic!("no frame of the guest arrived");
        }
    }
}
