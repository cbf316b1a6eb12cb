use super::*;

pub(crate) fn spec() -> VmSpec {
    VmSpec {
        name: "vm1".to_owned(),
        qemu: crate::QEMU.into(),
        memory_mib: 512,
        pool_ram: None,
        memory_max_mib: None,
        cpus: 2,
        cpus_max: None,
        accelerator: Accelerator::Tcg,
        firmware: Firmware::Bios,
        boot: Vec::new(),
        kernel: Some(DirectKernel {
            kernel: "/boot/vmlinuz".into(),
            initrd: Some("/boot/initrd".into()),
            command_line: "console=ttyS0 quiet".to_owned(),
        }),
        networks: vec![Network {
            device: "net0".to_owned(),
            socket: "/run/wadi/sockets/vm1-net0.sock".into(),
            slot: 0,
            mac: "52:54:00:00:00:01".to_owned(),
            mtu: 1500,
            queue_pairs: 1,
            guest_announces: true,
        }],
        disks: vec![Disk {
            device: "vol0".to_owned(),
            socket: "/run/wadi/sockets/vm1-vol0.sock".into(),
            slot: 1,
            queues: 2,
        }],
        ports: None,
        listens: false,
        directory: "/run/wadi/vm".into(),
        incoming: None,
        vcpu_shim: None,
    }
}

const QEMU_7_2: QemuVersion = QemuVersion { major: 7, minor: 2 };
const QEMU_10: QemuVersion = QemuVersion { major: 10, minor: 0 };

#[test]
fn memory_is_shared_and_sockets_reconnect() {
    let line = spec().arguments(QEMU_7_2).join(" ");
    assert!(line.contains("memory-backend-memfd,id=ram,size=524296k,share=on"), "{line}");
    assert!(line.contains("socket,id=wadi-net0,path=/run/wadi/sockets/vm1-net0.sock,reconnect=1"), "{line}");
    assert!(line.contains("mac=52:54:00:00:00:01,host_mtu=1500"), "{line}");
    assert!(line.contains("vhost-user-blk-pci,id=vol0,chardev=wadi-vol0,num-queues=2"), "{line}");
}

#[test]
fn memory_in_the_pool_begins_where_it_was_leased() {
    let ram = PoolRam {
        pool: "/dev/a,b".into(),
        uuid: String::new(),
        start_bytes: 64 << 20,
        size_bytes: 512 << 20,
    };
    let line = VmSpec { pool_ram: Some(ram), ..spec() }.arguments(QEMU_10).join(" ");
    let object =
        "memory-backend-file,id=ram,size=536870912,mem-path=/dev/a,,b,offset=67108864,align=2097152,share=on";
    assert!(line.contains(object) && !line.contains("memfd"), "{line}");
    assert!(line.contains("-m 524288k"), "{line}");
}

#[test]
fn what_may_grow_has_room_for_it() {
    let spec = VmSpec { memory_max_mib: Some(2048), cpus_max: Some(4), ..spec() };
    let words = spec.arguments(QEMU_7_2);
    assert!(
        ["524296k,slots=16,maxmem=2097160k", "2,maxcpus=4"]
            .iter()
            .all(|it| words.contains(&(*it).to_owned()))
    );
    let refused = |spec: VmSpec| spec.check().unwrap_err().to_string();
    assert!(
        refused(VmSpec { memory_max_mib: Some(512), cpus_max: None, ..spec.clone() }).contains("512 MiB")
    );
    assert!(refused(VmSpec { cpus_max: Some(2), ..spec }).contains("vCPUs cannot grow"));
}

#[test]
fn a_machine_that_listens_connects_to_nobody() {
    let line = VmSpec { listens: true, ..spec() }.arguments(QEMU_7_2).join(" ");
    for socket in ["net0,path=/run/wadi/sockets/vm1-net0.sock", "vol0,path=/run/wadi/sockets/vm1-vol0.sock"] {
        assert!(line.contains(&format!("socket,id=wadi-{socket},server=on")), "{line}");
    }
    assert!(!line.contains("reconnect"), "{line}");
}

#[test]
fn a_machine_that_listens_needs_a_place_for_its_sockets() {
    let mut spec = VmSpec { listens: true, ..spec() };
    assert!(spec.check().unwrap_err().to_string().contains("directory"));
    let directory = std::env::temp_dir();
    spec.networks[0].socket = directory.join("vm1-net0.sock");
    spec.disks[0].socket = directory.join("vm1-vol0.sock");
    spec.check().unwrap();
}

#[test]
fn a_machine_that_waits_for_a_guest_differs_in_nothing_else() {
    let own = spec().arguments(QEMU_7_2);
    let waiting = VmSpec { incoming: Some("tcp:0.0.0.0:4444".to_owned()), ..spec() }.arguments(QEMU_7_2);
    assert_eq!(waiting.strip_prefix(&*own).unwrap(), ["-incoming", "tcp:0.0.0.0:4444"]);
}

#[test]
fn vectors_are_off_only_where_qemu_would_crash() {
    let mut spec = spec();
    assert!(spec.arguments(QEMU_7_2).join(" ").contains("vectors=0"));
    assert!(!spec.arguments(QEMU_10).join(" ").contains("vectors=0"));
    spec.accelerator = Accelerator::Kvm;
    assert!(!spec.arguments(QEMU_7_2).join(" ").contains("vectors=0"));
}

#[test]
fn a_machine_without_anything_to_boot_is_refused() {
    let mut spec = spec();
    spec.kernel = None;
    spec.disks.clear();
    assert!(spec.check().unwrap_err().to_string().contains("--kernel"));
}

#[test]
fn firmware_tries_the_disks_or_what_it_is_told() {
    let mut spec = VmSpec { kernel: None, ..spec() };
    spec.disks.push(Disk { device: "vol1".to_owned(), ..spec.disks[0].clone() });
    let devices = |spec: &VmSpec| {
        let words = spec.arguments(QEMU_7_2);
        words.into_iter().filter(|word| word.contains(",id=")).collect::<Vec<_>>().join(" ")
    };
    let line = devices(&spec);
    assert!(line.contains("wadi-vol0,num-queues=2,bootindex=0"), "{line}");
    assert!(line.contains("wadi-vol1,num-queues=2,bootindex=1") && line.contains("romfile=,"), "{line}");
    spec.boot = vec!["vol1".to_owned(), "net0".to_owned()];
    let line = devices(&spec);
    assert!(
        line.contains("wadi-vol1,num-queues=2,bootindex=0") && line.contains("bootindex=1,bus"),
        "{line}"
    );
    assert!(line.matches("bootindex").count() == 2 && !line.contains("romfile"), "{line}");
    spec.boot.push("vol2".to_owned());
    let error = spec.check().unwrap_err().to_string();
    assert!(error.contains("from vol2: its devices are net0, vol0, vol1"), "{error}");
    spec.kernel = self::spec().kernel;
    assert!(!devices(&spec).contains("bootindex"), "a kernel is loaded, whatever is on the disks");
}

#[test]
fn devices_are_behind_ports_and_some_ports_are_free() {
    let ports = |spec: &VmSpec| {
        let words = spec.arguments(QEMU_7_2);
        let ports = words.into_iter().filter(|word| word.starts_with("pcie-root-port"));
        ports.collect::<Vec<String>>()
    };
    let mut spec = spec();
    assert_eq!(ports(&spec).len(), 8);
    assert_eq!(ports(&spec)[3], "pcie-root-port,id=port.3,chassis=4");
    let line = spec.arguments(QEMU_7_2).join(" ");
    assert!(
        line.contains("vectors=0,romfile=,bus=port.0") && line.contains("num-queues=2,bus=port.1"),
        "{line}"
    );
    // A device that was plugged in keeps its slot; so does it on the host that the guest moves to.
    spec.disks[0].slot = 8;
    assert_eq!(ports(&spec).len(), 16);
    spec.ports = Some(9);
    assert_eq!(ports(&spec).len(), 9);
    spec.ports = Some(8);
    let error = spec.check().unwrap_err().to_string();
    assert!(error.contains("--ports 9"), "{error}");
}

#[test]
fn uefi_is_two_flash_chips() {
    let uefi = crate::Uefi {
        code: "/usr/share/OVMF/CODE.fd".into(),
        template: "/usr/share/OVMF/VARS.fd".into(),
        variables: "/var/lib/a,b.fd".into(),
    };
    let line = VmSpec { firmware: Firmware::Uefi(uefi), ..spec() }.arguments(QEMU_7_2).join(" ");
    let chips = "-drive if=pflash,format=raw,unit=0,readonly=on,file=/usr/share/OVMF/CODE.fd \
                 -drive if=pflash,format=raw,unit=1,file=/var/lib/a,,b.fd";
    assert!(line.contains(chips), "{line}");
    assert!(!spec().arguments(QEMU_7_2).join(" ").contains("pflash"));
}

#[test]
fn a_missing_socket_is_named() {
    let error = spec().check().unwrap_err().to_string();
    assert!(error.contains("/run/wadi/sockets/vm1-net0.sock"), "{error}");
}
