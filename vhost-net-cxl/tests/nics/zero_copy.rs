//! AF_XDP in zero-copy mode: a device that reads and writes the pool itself. No interface that a kernel makes up can do it, and the device
//! is therefore one of a virtual machine, whose guest runs this very program.

use std::env;
use std::fs;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use guest_images::agent::Agent;
use guest_images::cpio::Archive;
use guest_images::{EXEC_PORT, Guest, Silent};
use vhost_net_cxl::nic::Nic;
use vhost_net_cxl::nic::af_xdp::AfXdpNic;

use super::af_xdp::{all_flows_arrive, carries_frames_both_ways, nothing_is_sent_late, start};
use super::{Stage, Wire, config, has_carrier, in_namespace, sh};

/// How long an emulated machine may take for something.
const LONG: Duration = Duration::from_mins(2);
/// Where this program and its libraries lie in the guest.
const HOME: &str = "run/nics";
/// Says that this is the guest: elsewhere its interfaces are somebody's.
const IN_THE_GUEST: &str = "WADI_NICS_IN_THE_GUEST";
/// Of the device, each of which is a vCPU's.
const QUEUES: usize = 2;

/// QEMU, which ends with this.
struct Machine(Child);

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Machine {
    /// With a NIC for each of two taps of this network namespace.
    fn start(guest: &Guest, initrd: &Path, port: &Path) -> Self {
        let mut command = Command::new("qemu-system-x86_64");
        command.args(["-accel", "tcg", "-machine", "q35", "-cpu", "max", "-m", "384", "-smp", "2"]);
        command.args(["-nodefaults", "-no-user-config", "-display", "none"]);
        command.arg("-kernel").arg(&guest.kernel).arg("-initrd").arg(initrd);
        command.arg("-append").arg(&guest.command_line);
        command.args(["-device", "virtio-serial-pci", "-chardev"]);
        command.arg(format!("socket,id=exec,path={},server=on,wait=off", port.display()));
        command.args(["-device", &format!("virtserialport,chardev=exec,name={EXEC_PORT}")]);
        for (tap, queues) in [("ours", QUEUES), ("peer", 1)] {
            let more = if queues > 1 { format!(",queues={queues}") } else { String::new() };
            command.args(["-netdev", &format!("tap,id={tap},ifname={tap},script=no,downscript=no{more}")]);
            let more = if queues > 1 { format!(",mq=on,vectors={}", 2 * queues + 2) } else { String::new() };
            // A driver has the kernel map memory for the device only where the device has an IOMMU in mind, and pages of others no other way.
            command.args([
                "-device",
                &format!("virtio-net-pci,disable-legacy=on,iommu_platform=on,netdev={tap}{more}"),
            ]);
        }
        Self(command.stdin(Stdio::null()).spawn().expect("QEMU starts"))
    }
}

/// This program, and the libraries that it has loaded.
fn this_program() -> Archive {
    let mut archive = Archive::new();
    let mut put = |name: &str, from: &Path| {
        archive.put_file(&format!("{HOME}/{name}"), 0o755, fs::read(from).expect("can be read"));
    };
    put("nics", &env::current_exe().expect("known"));
    for line in fs::read_to_string("/proc/self/maps").expect("a list").lines() {
        let Some(path) = line.split_whitespace().nth(5) else { continue };
        let name = path.rsplit('/').next().unwrap_or_default();
        if name.contains(".so") {
            put(name, Path::new(path));
        }
    }
    archive
}

#[test]
fn a_device_reads_and_writes_the_pool_itself() {
    // There is no archive of packages in the namespace.
    let guest = Guest::ensure(&mut Silent).expect("a guest");
    let guest = guest.with_newer_kernel(&mut Silent).expect("a newer kernel");
    in_namespace(move || {
        let directory = tempfile::tempdir().expect("a directory");
        let (initrd, port) = (directory.path().join("initrd"), directory.path().join("exec"));
        let mut bytes = fs::read(&guest.initrd).expect("an initramfs");
        bytes.extend(this_program().into_bytes());
        fs::write(&initrd, bytes).expect("written");
        sh("ip link add br0 type bridge stp_state 0 forward_delay 0 mcast_snooping 0 && ip link set br0 up");
        for (tap, kind) in [("ours", "multi_queue"), ("peer", "")] {
            sh(&format!("ip tuntap add dev {tap} mode tap vnet_hdr {kind}"));
            sh(&format!("ip link set {tap} master br0 up"));
        }
        let _machine = Machine::start(&guest, &initrd, &port);
        let agent = Agent::connect(&port, LONG).expect("the guest is up");
        let run = format!(
            "{IN_THE_GUEST}=1 /{HOME}/ld-linux-x86-64.so.2 --library-path /{HOME} /{HOME}/nics --ignored --exact \
             zero_copy::in_the_guest --nocapture 2>&1"
        );
        let outcome = agent.run(&run, LONG).expect("it ends");
        let said = outcome.text();
        let passed = outcome.success() && said.contains("1 passed");
        let kernel = || {
            agent
                .run("dmesg | tail -n 20; ethtool -k eth0; ethtool -i eth0; ip link", LONG)
                .map(|it| it.text())
        };
        assert!(passed, "{said}\n{:?}", kernel());
    });
}

/// Whether the kernel has bound this socket in zero-copy mode.
fn is_zero_copy(socket: BorrowedFd<'_>) -> bool {
    let (mut options, mut bytes) = (0u32, 4);
    // SAFETY: the kernel writes at most as many bytes as there are.
    let result = unsafe {
        let into = (&raw mut options).cast();
        libc::getsockopt(socket.as_raw_fd(), libc::SOL_XDP, libc::XDP_OPTIONS, into, &raw mut bytes)
    };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
    options & libc::XDP_OPTIONS_ZEROCOPY != 0
}

#[test]
#[ignore = "for the guest that another test starts"]
fn in_the_guest() {
    assert!(env::var_os(IN_THE_GUEST).is_some(), "it would take the interfaces of this machine");
    sh(&format!("ethtool -L eth0 combined {QUEUES}"));
    for interface in ["eth0", "eth1"] {
        sh(&format!("ip link set {interface} up"));
        has_carrier(interface, true);
    }
    let wire = Wire::open("eth1");
    for round in 0..3 {
        let mut stage = Stage::new();
        let mut nic = AfXdpNic::open(
            &config("name='nic0'\ndriver='af-xdp'\ninterface='eth0'\nzero-copy=true"),
            &stage.pool,
        )
        .expect("opened");
        start(&mut nic, &mut stage);
        let sockets = nic.descriptors();
        assert_eq!(sockets.len(), QUEUES);
        assert!(sockets.into_iter().all(is_zero_copy), "round {round}");
        carries_frames_both_ways(&mut nic, &mut stage, &wire);
        all_flows_arrive(&mut nic, &mut stage, &wire);
    }
    nothing_is_sent_late("eth0", true, &wire);
}
