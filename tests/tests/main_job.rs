//! The main job: an unmodified guest works through a NIC and an SSD of other hosts, and no byte is wrong.

use std::process::Command;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pod_api::DeviceKind;
use wadi_tests::fio::{Job, Pattern};
use wadi_tests::iperf::{self, Way};
use wadi_tests::pod::{CLIENT_ADDRESS, GUEST_ADDRESS};
use wadi_tests::probe::Probe;
use wadi_tests::stage::{Stage, VOLUME_BYTES, rounds};

const LONG: Duration = Duration::from_mins(2);

/// One pod for all of these tests, one after another.
fn stage() -> MutexGuard<'static, Stage> {
    static STAGE: LazyLock<Mutex<Stage>> = LazyLock::new(|| Mutex::new(Stage::set_up().unwrap()));
    STAGE.lock().unwrap_or_else(PoisonError::into_inner)
}

#[test]
fn devices_come_from_other_hosts() {
    let stage = stage();
    let instance = stage.pod.api().instance("vm1").unwrap();
    assert_eq!(instance.nics[0].nic, "h2/nic0");
    assert_eq!(instance.nics[0].backup.as_deref(), Some("h3/nic1"));
    assert_eq!(instance.disks[0].ssd, "h2/ssd0");
    assert!(instance.nics[0].connected && instance.disks[0].connected, "{instance:?}");
}

#[test]
fn guest_sees_standard_devices_as_they_were_leased() {
    let stage = stage();
    let (nic, disk) = (&stage.instance.nics[0], &stage.instance.disks[0]);
    assert_eq!(stage.vm.exec("cat /sys/class/net/eth0/address").unwrap().trim(), nic.mac);
    assert_eq!(stage.vm.exec("cat /sys/class/net/eth0/mtu").unwrap().trim(), nic.mtu.to_string());
    let driver = stage.vm.exec("readlink /sys/class/net/eth0/device/driver").unwrap();
    assert!(driver.trim().ends_with("/virtio_net"), "{driver}");
    let sectors: u64 = stage.vm.exec("cat /sys/block/vda/size").unwrap().trim().parse().unwrap();
    assert_eq!(sectors * 512, VOLUME_BYTES);
    assert_eq!(stage.vm.exec("cat /sys/block/vda/serial").unwrap().trim(), disk.serial);
    // Of a file on a host a discard gives whole blocks of the file system back.
    let image = stage.pod.directory().join("h2-ssd0.img");
    let block = Command::new("stat").args(["--file-system", "--format=%s"]).arg(image).output().unwrap();
    let block: u32 = String::from_utf8(block.stdout).unwrap().trim().parse().unwrap();
    let ssd = stage.pod.api().device("h2", "ssd0").unwrap();
    let DeviceKind::Ssd { discard_granularity_bytes, .. } = ssd.kind else { panic!("{ssd:?}") };
    assert_eq!(discard_granularity_bytes, Some(block));
    let shown = stage.vm.exec("cat /sys/block/vda/queue/discard_granularity").unwrap();
    assert_eq!(shown.trim(), block.to_string());
}

#[test]
fn random_writes_with_flushes_read_back() {
    let stage = stage();
    for round in 0..rounds() {
        let job = Job {
            disk: "vda".into(),
            offset_mib: (round % 8) * 32,
            size_mib: 32,
            pattern: Pattern::Random4K,
            flush_every: 64,
        };
        job.run(&stage.vm, LONG).unwrap();
    }
}

#[test]
fn sequential_writes_with_flushes_read_back() {
    let stage = stage();
    for _ in 0..rounds() {
        let job = Job {
            disk: "vda".into(),
            offset_mib: 256,
            size_mib: 256,
            pattern: Pattern::Sequential128K,
            flush_every: 32,
        };
        job.run(&stage.vm, LONG).unwrap();
    }
}

#[test]
fn last_block_is_there_and_the_one_after_is_not() {
    let stage = stage();
    let last = VOLUME_BYTES / 4096 - 1;
    stage
        .vm
        .exec(&format!(
            "head -c 4096 /dev/urandom > /tmp/block && \
             dd if=/tmp/block of=/dev/vda bs=4096 seek={last} count=1 conv=fsync 2>/dev/null && \
             echo 3 > /proc/sys/vm/drop_caches && \
             dd if=/dev/vda bs=4096 skip={last} count=1 2>/dev/null | cmp - /tmp/block"
        ))
        .unwrap();
    let beyond = stage
        .vm
        .run(&format!("dd if=/tmp/block of=/dev/vda bs=4096 seek={} count=1 conv=fsync", last + 1), LONG);
    assert!(!beyond.unwrap().success());
}

#[test]
fn discarded_and_zeroed_blocks_do_no_harm_to_their_neighbours() {
    let stage = stage();
    // 3 MiB of data at 700 MiB; the middle one goes.
    stage
        .vm
        .exec(
            "head -c 3145728 /dev/urandom > /tmp/data && \
             dd if=/tmp/data of=/dev/vda bs=1M seek=700 conv=fsync 2>/dev/null && \
             blkdiscard -o 734003200 -l 0 /dev/vda 2>/dev/null; \
             fio --name=z --filename=/dev/vda --rw=trim --bs=1m --size=1m --offset=701m --direct=1 --ioengine=sync >/dev/null; \
             echo 3 > /proc/sys/vm/drop_caches; \
             for i in 0 2; do \
               dd if=/dev/vda bs=1M skip=$((700 + i)) count=1 2>/dev/null > /tmp/got; \
               dd if=/tmp/data bs=1M skip=$i count=1 2>/dev/null | cmp - /tmp/got || exit 1; \
             done",
        )
        .unwrap();
}

#[test]
fn filesystem_is_clean_after_use() {
    let stage = stage();
    stage.vm.exec_within("mkfs.ext4 -q -F -E offset=0 /dev/vda 200M", LONG).unwrap();
    stage.vm.exec("mkdir -p /mnt && mount /dev/vda /mnt").unwrap();
    stage
        .vm
        .exec_within(
            "for i in $(seq 1 40); do head -c 300000 /dev/urandom > /mnt/$i; done; \
             cd /mnt && sha256sum * > /tmp/sums; cd /; sync",
            LONG,
        )
        .unwrap();
    stage.vm.exec_within("umount /mnt", LONG).unwrap();
    let check = stage.vm.exec_within("fsck.ext4 -f -n /dev/vda", LONG).unwrap();
    assert!(check.contains("Pass 5"), "{check}");
    stage
        .vm
        .exec_within(
            "echo 3 > /proc/sys/vm/drop_caches; mount /dev/vda /mnt && cd /mnt && \
             sha256sum -c -s /tmp/sums && cd / && umount /mnt",
            LONG,
        )
        .unwrap();
}

#[test]
fn guest_and_client_reach_each_other() {
    let stage = stage();
    let said = stage.vm.exec(&format!("ping -c 20 -i 0.05 -q {CLIENT_ADDRESS}")).unwrap();
    assert!(said.contains("20 packets received, 0% packet loss"), "{said}");
    let said = stage.vm.exec(&format!("ping -c 5 -i 0.1 -s 1472 -q {CLIENT_ADDRESS}")).unwrap();
    assert!(said.contains("5 packets received, 0% packet loss"), "{said}");

    let probe = Probe::start(stage.pod.client_namespace(), GUEST_ADDRESS).unwrap();
    std::thread::sleep(Duration::from_secs(1));
    let loss = probe.finish().unwrap();
    assert_eq!(loss.lost, 0, "{loss:?}");
}

#[test]
fn streams_go_both_ways() {
    let stage = stage();
    for _ in 0..rounds() {
        for way in [Way::Out, Way::In] {
            iperf::run(&stage.vm, way, 3).unwrap();
        }
    }
}

#[test]
fn files_arrive_unchanged_both_ways() {
    let stage = stage();
    let address = CLIENT_ADDRESS;
    let listener =
        stage.pod.client_namespace().inside(move || std::net::TcpListener::bind((address, 7777))).unwrap();
    let echo = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept()?;
        let mut reader = stream.try_clone()?;
        let bytes = std::io::copy(&mut reader, &mut stream)?;
        stream.shutdown(std::net::Shutdown::Both)?;
        std::io::Result::Ok(bytes)
    });
    // Everything that the guest sends comes back, so both directions carry it at once.
    stage
        .vm
        .exec_within(
            &format!(
                "head -c 20000000 /dev/urandom > /tmp/out && \
                 timeout 100 nc {address} 7777 < /tmp/out > /tmp/back; \
                 cmp /tmp/out /tmp/back && rm /tmp/out /tmp/back"
            ),
            LONG,
        )
        .unwrap();
    assert_eq!(echo.join().unwrap().unwrap(), 20_000_000);
}
