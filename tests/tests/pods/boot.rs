//! A VM boots from its volume on another host's SSD, through BIOS and UEFI, and again after it was reset.

use std::fs;
use std::path::Path;
use std::time::Duration;

use guest_images::{Guest, Loader, Silent};
use vmm::{Firmware, Uefi, VmSpec};
use wadi_tests::pod::{CLIENT_ADDRESS, GUEST_ADDRESS, Pod, PodBuilder, PodVm, Role, VmShape};

const SHAPE: VmShape = VmShape { memory_mib: 384, cpus: 2 };
const LONG: Duration = Duration::from_mins(1);
/// The empty volume is the instance's first disk, and the system lies on its second.
const SYSTEM: &str = "vdb";

/// It came up as it should: from the volume, which nobody has changed, and its devices work.
fn check(vm: &PodVm, loader: Loader, image: &[u8]) {
    let line = vm.exec("cat /proc/cmdline").unwrap();
    assert!(line.contains(loader.word()), "{line}");
    let uefi = vm.exec("if [ -d /sys/firmware/efi ]; then echo UEFI; fi").unwrap();
    assert_eq!(uefi.trim() == "UEFI", loader == Loader::SystemdBoot, "{uefi}");
    let blocks = image.len().div_ceil(1 << 20);
    let read = format!("dd if=/dev/{SYSTEM} bs=1M count={blocks} iflag=direct 2>/dev/null | md5sum");
    let wanted = vm.exec_with_input("md5sum", image).unwrap();
    assert_eq!(vm.exec(&read).unwrap(), wanted);
    vm.exec(&format!("ip address add {GUEST_ADDRESS}/24 dev eth0 && ip link set eth0 up")).unwrap();
    vm.exec(&format!("ping -c 3 -W 5 {CLIENT_ADDRESS}")).unwrap();
    vm.exec("dd if=/dev/urandom of=/dev/vda bs=1M count=2 oflag=direct conv=fsync").unwrap();
}

fn boot(pod: &Pod, spec: &VmSpec) -> PodVm {
    let instance = pod.api().instance("vm1").unwrap();
    pod.begin_machine(&instance, spec.clone()).unwrap().arrived().unwrap()
}

#[test]
fn a_vm_boots_from_a_volume_through_bios_and_uefi() {
    let guest = Guest::ensure(&mut Silent).unwrap();
    let image = fs::read(guest.boot_disk(&mut Silent).unwrap()).unwrap();
    let mut pod = PodBuilder::three_hosts().start().unwrap();
    let volumes = [("vol0", 64 << 20, Some("h2/ssd0")), ("system", 64 << 20, Some("h2/ssd0"))];
    let instance = pod.create_instance("vm1", "h1", &volumes).unwrap();

    // Somebody installs it.
    let mut vm = pod.boot(&instance, &guest, SHAPE).unwrap();
    vm.exec_with_input(&format!("dd of=/dev/{SYSTEM} bs=1M oflag=direct conv=fsync"), &image).unwrap();
    vm.stop().unwrap();

    let uefi = Uefi::find(pod.directory().join("nvram/vm1.fd")).unwrap();
    let spec =
        VmSpec { kernel: None, boot: vec!["system".to_owned()], ..pod.machine(&instance, &guest, SHAPE) };
    let through = |firmware: Firmware| VmSpec { firmware, ..spec.clone() };

    let mut vm = boot(&pod, &through(Firmware::Bios));
    check(&vm, Loader::Syslinux, &image);
    vm.reboot(LONG).unwrap();
    check(&vm, Loader::Syslinux, &image);
    vm.stop().unwrap();

    let spec = through(Firmware::Uefi(uefi.clone()));
    let mut vm = boot(&pod, &spec);
    check(&vm, Loader::SystemdBoot, &image);
    assert!(differ(&uefi.variables, &uefi.template), "the firmware keeps its boot entries");
    // The firmware's drivers find a frontend that started after QEMU had.
    for role in [Role::NetFrontend, Role::BlkFrontend] {
        pod.daemon("h1", role).unwrap().kill().unwrap();
        pod.start_daemon("h1", role).unwrap();
    }
    pod.wait_until_joined().unwrap();
    vm.reboot(LONG).unwrap();
    check(&vm, Loader::SystemdBoot, &image);

    // A second machine with these variables is refused: it would destroy them.
    let second = VmSpec { directory: pod.directory().join("elsewhere"), disks: Vec::new(), ..spec.clone() };
    let second =
        VmSpec { networks: Vec::new(), kernel: pod.machine(&instance, &guest, SHAPE).kernel, ..second };
    let second = VmSpec { boot: Vec::new(), ..second };
    let error = vmm::Vm::start(second.clone()).unwrap_err().to_string();
    assert!(error.contains("another machine runs with the variables"), "{error}");
    vm.stop().unwrap();
    vmm::Vm::start(second).unwrap();
}

fn differ(one: &Path, other: &Path) -> bool {
    fs::read(one).unwrap() != fs::read(other).unwrap()
}
