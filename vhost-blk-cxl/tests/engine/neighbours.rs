//! Disks of one frontend that share a channel, and perhaps a device: what one does must not stop the others.

use std::sync::Arc;

use cxl_pool::{Area, CreateOptions, HardwareMemory, LineOffset, Memory, Pool};
use pod_protocol::endpoint::Handler;
use pod_protocol::ids::{LeaseId, PlaceNumber, VolumeId};
use pod_protocol::objects::{DiskObject, Object, Priority, Qos, VolumeObject};
use vhost_blk_cxl::backend::QUEUE_DEPTH;
use vhost_blk_cxl::message::{Charge, Holder, Operation};
use vhost_blk_cxl::ssd::Ssd;

use crate::generations::Sleeper;
use crate::pod::ram::{Control, RamSsd};
use crate::pod::*;

/// A pod with a second disk beside its own.
struct Two {
    pod: Pod<HardwareMemory>,
    disk: DiskObject,
    volume: VolumeObject,
    control: Arc<Control>,
    other: Arc<Control>,
}

/// A second disk of the pod's instance, whose volume lies on this SSD, before the first one's if it is the same.
pub(crate) fn second<M: Memory>(pod: &Pod<M>, ssd: &str) -> (DiskObject, VolumeObject) {
    let lease = LeaseId::new(8).unwrap();
    let data_area = Area::new(LineOffset::new(pod.data.end().get()), pod.data.lines);
    let disk = DiskObject {
        lease,
        device: "vol1".to_owned(),
        socket: "vm0-vol1.sock".to_owned(),
        vmm_listens: false,
        size_bytes: VOLUME_START,
        data_area,
        ..pod.disk.clone()
    };
    let volume = VolumeObject {
        lease,
        volume: VolumeId::new(2),
        ssd: ssd.to_owned(),
        start_bytes: 0,
        size_bytes: VOLUME_START,
        data_area,
        ..pod.volume.clone()
    };
    (disk, volume)
}

impl Two {
    /// The second disk's volume lies on a device of its own, or before the first one's on the same.
    fn new(same_device: bool) -> Self {
        Self::with_depth(same_device, QUEUE_DEPTH)
    }

    /// The devices have so many requests while several volumes want them.
    fn with_depth(same_device: bool, queue_depth: u32) -> Self {
        Self::with(same_device, queue_depth, SLOTS)
    }

    /// The channel has so many slots.
    fn with(same_device: bool, queue_depth: u32, slots: u32) -> Self {
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let options = CreateOptions { size_bytes: Some(64 << 20), ..CreateOptions::default() };
        let pool = Pool::create(&directory.path().join("pool"), &options).unwrap();
        let mut pod = Pod::new(pool.hardware(), pool.hardware(), pool.layout().data().start);
        pod.slots = slots;
        let (control, other) = (Control::new(), Control::new());
        let ram = |control| -> Box<dyn Ssd> {
            Box::new(RamSsd { memory: pool.hardware(), control: Arc::clone(control) })
        };
        pod.start_backend_with(vec![
            OpenedSsd { queue_depth, ..OpenedSsd::new("ssd0", ram(&control)) },
            OpenedSsd { queue_depth, ..OpenedSsd::new("ssd1", ram(&other)) },
        ]);
        pod.start_frontend();
        let ssd = if same_device { "ssd0" } else { "ssd1" };
        let (disk, volume) = second(&pod, ssd);
        let mut two = Self { pod, disk, volume, control, other };
        two.pod.new_channel();
        two.pod.apply_volume();
        two.apply_volume();
        two.pod.apply_disk();
        let disk = two.disk.clone();
        two.pod.frontend.as_mut().unwrap().apply(Object::Disk(disk)).unwrap();
        two
    }

    /// A frontend begins after another one has died: its leases have a newer generation, and it has areas of its own.
    fn restart_frontend(&mut self) {
        self.pod.crash_frontend();
        self.pod.start_frontend();
        self.pod.new_lease_generation();
        let mut start = self.disk.data_area.end();
        for (disk, volume) in [(&mut self.pod.disk, &mut self.pod.volume), (&mut self.disk, &mut self.volume)]
        {
            disk.data_area = Area::new(start, disk.data_area.lines);
            volume.data_area = disk.data_area;
            start = disk.data_area.end();
        }
        self.volume.generation = self.pod.volume.generation;
        self.disk.route.generation = self.pod.disk.route.generation;
        self.pod.new_channel();
        self.pod.apply_volume();
        self.apply_volume();
        self.pod.apply_disk();
        let disk = self.disk.clone();
        self.pod.frontend.as_mut().unwrap().apply(Object::Disk(disk)).unwrap();
    }

    fn apply_volume(&mut self) {
        let volume = self.volume.clone();
        self.pod.backend.as_mut().unwrap().apply(Object::Volume(volume)).unwrap();
    }

    fn driver(&self) -> Driver {
        let mut driver = Driver::new(2, 128);
        driver.guest.connect(&self.pod.run.sockets().join(&self.disk.socket), ALL_FEATURES);
        driver
    }
}

fn offer(driver: &mut Driver, count: u64, kind: u32) {
    for index in 0..count {
        driver.write(driver.place(index).data, &pattern(index, 4096));
        let bytes = if kind == T_FLUSH { 0 } else { 4096 };
        driver.offer((index % 2) as usize, index, kind, index * 8, bytes);
    }
}

fn collect(driver: &mut Driver, count: u64) {
    for index in 0..count {
        assert!(driver.guest.wait_used((index % 2) as usize, PATIENCE).is_some(), "answer {index}");
    }
    assert!((0..count).all(|index| driver.status(index) == OK));
}

#[test]
fn a_device_that_hangs_stops_only_its_own_disk() {
    let mut two = Two::new(false);
    let mut hung = Driver::connected(&two.pod);
    let mut other = two.driver();
    two.control.hold(true);
    two.control.set_depth(4);
    // More than the device takes; the channel has room for a few more.
    offer(&mut hung, 24, T_OUT);
    eventually(|| two.control.waiting() == 4);
    for round in 0..20 {
        assert_eq!(other.write_sectors(round, &pattern(round, 512)), OK);
        assert_eq!(other.read_sectors(round, 512), pattern(round, 512));
    }
    assert_eq!(two.control.waiting(), 4);
    // Not even a frontend that starts anew waits for it: each disk does for itself.
    two.restart_frontend();
    for (driver, socket) in [(&mut hung, &two.pod.disk.socket), (&mut other, &two.disk.socket)] {
        driver.guest.disconnect();
        driver.guest.connect(&two.pod.run.sockets().join(socket), ALL_FEATURES);
    }
    assert_eq!(other.write_sectors(0, &pattern(77, 512)), OK);
    assert_eq!(two.other.bytes(0, 512), pattern(77, 512));
    two.control.set_depth(usize::MAX);
    two.control.hold(false);
    collect(&mut hung, 24);
}

/// The channel has not as many slots as the disk has requests.
#[test]
fn a_device_that_hangs_leaves_room_in_the_channel_for_the_disks_of_others() {
    for kind in [T_OUT, T_IN] {
        let two = Two::with(false, QUEUE_DEPTH, 32);
        let mut hung = Driver::connected(&two.pod);
        let mut other = two.driver();
        two.control.hold(true);
        offer(&mut hung, 60, kind);
        eventually(|| two.control.waiting() >= 15);
        for round in 0..20 {
            assert_eq!(other.write_sectors(round, &pattern(round, 512)), OK);
            assert_eq!(other.read_sectors(round, 512), pattern(round, 512));
        }
        // As many at once as it may have beside the other one.
        two.other.hold(true);
        offer(&mut other, 8, kind);
        eventually(|| two.other.waiting() == 8);
        assert_eq!(two.control.waiting(), 16, "half of them, as long as nobody else has any");
        two.other.hold(false);
        collect(&mut other, 8);
        two.control.hold(false);
        collect(&mut hung, 60);
    }
}

#[test]
fn a_volume_keeps_to_its_rate_until_it_is_changed() {
    let mut two = Two::new(true);
    // One request a second: it does not come to the second one here.
    two.pod.volume.qos = Qos { iops: Some(1), burst_ms: 0, ..Qos::default() };
    two.pod.apply_volume();
    let mut limited = Driver::connected(&two.pod);
    let mut other = two.driver();
    offer(&mut limited, 24, T_OUT);
    // The other one is not held up.
    offer(&mut other, 24, T_OUT);
    collect(&mut other, 24);
    let begun = || two.control.log().iter().filter(|it| it.offset_bytes >= VOLUME_START).count();
    assert!((1..20).contains(&begun()), "{} began", begun());
    assert!(two.pod.backend_lease().throttled > 0);
    // Bytes count as well as requests.
    let before = begun();
    two.pod.volume.qos = Qos { bytes_per_second: Some(4096), burst_ms: 0, ..Qos::default() };
    two.pod.apply_volume();
    // The first one at once: nothing was used of that yet.
    eventually(|| begun() > before);
    std::thread::sleep(QUIET);
    assert!(begun() < 20, "{} began", begun());
    two.pod.volume.qos = Qos::default();
    two.pod.apply_volume();
    collect(&mut limited, 24);
}

#[test]
fn a_rate_is_kept_while_the_worker_sleeps() {
    let mut two = Two::new(true);
    two.pod.volume.qos = Qos { iops: Some(200), burst_ms: 0, ..Qos::default() };
    two.pod.apply_volume();
    let mut limited = Driver::connected(&two.pod);
    // Nothing but the timer goes on with the second and later ones.
    offer(&mut limited, 30, T_FLUSH);
    collect(&mut limited, 30);
    assert!(two.pod.backend_lease().throttled >= 20);
}

#[test]
fn who_is_below_its_minimum_of_requests_comes_first() {
    comes_first(Qos { minimum_iops: Some(1_000_000), ..Qos::default() });
}

#[test]
fn who_is_below_its_minimum_of_bytes_comes_first() {
    comes_first(Qos { minimum_bytes_per_second: Some(1 << 40), ..Qos::default() });
}

fn comes_first(qos: Qos) {
    let mut two = Two::new(true);
    two.volume.qos = qos;
    two.apply_volume();
    let mut greedy = Driver::connected(&two.pod);
    let mut modest = two.driver();
    two.control.hold(true);
    two.control.set_depth(1);
    offer(&mut greedy, 50, T_OUT);
    eventually(|| two.control.waiting() == 1);
    offer(&mut modest, 4, T_OUT);
    std::thread::sleep(QUIET);
    two.control.hold(false);
    collect(&mut greedy, 50);
    collect(&mut modest, 4);
    let log = two.control.log();
    let last = log.iter().rposition(|command| command.offset_bytes < VOLUME_START).unwrap();
    assert!(last < 12, "its last request was number {last} of {}", log.len());
}

#[test]
fn a_device_that_cannot_do_it_all_is_shared_by_priorities() {
    let mut two = Two::new(true);
    two.volume.priority = Priority::new(200).unwrap();
    two.apply_volume();
    let mut first = Driver::connected(&two.pod);
    let mut second = two.driver();
    two.control.hold(true);
    two.control.set_depth(1);
    offer(&mut first, 30, T_OUT);
    eventually(|| two.control.waiting() == 1);
    offer(&mut second, 30, T_OUT);
    std::thread::sleep(QUIET);
    // It holds for what waits already.
    two.pod.volume.priority = Priority::new(600).unwrap();
    two.pod.apply_volume();
    two.control.hold(false);
    collect(&mut first, 30);
    collect(&mut second, 30);
    let log = two.control.log();
    // While both had something to do: the first one was at it before.
    let both = &log[1..37];
    let of_first = both.iter().filter(|command| command.offset_bytes >= VOLUME_START).count();
    assert!((25..=29).contains(&of_first), "{of_first} of {}", both.len());
}

/// They pay for nothing, so a volume that is sure of a minimum would be below it for as long as there are any.
#[test]
fn what_is_copied_for_a_volume_does_not_come_first_because_of_its_minimum() {
    const EACH: usize = 20;
    let (mut pod, ssd, control) = crate::pod::ram::idle_pod(68);
    pod.start_backend(ssd);
    pod.next_channel();
    pod.apply_channel_at_backend().unwrap();
    pod.volume.qos = Qos { minimum_iops: Some(1000), ..Qos::default() };
    pod.apply_volume();
    let (_, other) = second(&pod, "ssd0");
    pod.backend.as_mut().unwrap().apply(Object::Volume(other.clone())).unwrap();
    let mut sleeper = Sleeper::new(&pod);
    let mut all = Vec::new();
    for (volume, charge) in [(&pod.volume, Charge::Nothing), (&other, Charge::Whole)] {
        let place = PlaceNumber::FIRST;
        let holder = Holder { lease: volume.lease, place, generation: volume.generation };
        all.extend((0..EACH).map(|_| sleeper.request(holder, (Operation::Read, charge), volume.data_area)));
    }
    sleeper.send_all(all);
    eventually(|| control.log().len() == 2 * EACH);
    let first_ones = &control.log()[..EACH];
    let of_other = first_ones.iter().filter(|command| command.offset_bytes < VOLUME_START).count();
    assert!((EACH / 2 - 2..=EACH / 2 + 2).contains(&of_other), "{of_other} of {EACH}");
}

#[test]
fn a_device_has_a_short_queue_as_soon_as_several_volumes_want_it() {
    let two = Two::with_depth(true, 4);
    let mut first = Driver::connected(&two.pod);
    let mut second = two.driver();
    two.control.hold(true);
    // One alone has all of the device.
    offer(&mut first, 30, T_OUT);
    eventually(|| two.control.waiting() == 30);
    offer(&mut second, 30, T_OUT);
    std::thread::sleep(QUIET);
    assert_eq!(two.control.waiting(), 30, "the other one's wait where its turns count");
    two.control.let_pass(27);
    eventually(|| two.control.log().len() == 31 && two.control.waiting() == 4);
    two.control.hold(false);
    collect(&mut first, 30);
    collect(&mut second, 30);
}

/// A device that cannot do them otherwise writes zeros, and what it is told to forget keeps it busy too.
#[test]
fn zeroes_and_discards_count_for_the_bytes_that_a_volume_may_move() {
    let (mut pod, control) = crate::pod::ram::pod(66);
    let mut driver = Driver::connected(&pod);
    for kind in [T_WRITE_ZEROES, T_DISCARD] {
        pod.volume.qos = Qos { bytes_per_second: Some(1), burst_ms: 0, ..Qos::default() };
        pod.apply_volume();
        assert_eq!(driver.range_request(kind, 0, 64, 0), OK);
        let begun = control.log().len();
        driver.write(driver.place(0).data, &pattern(1, 512));
        let write = driver.offer(0, 0, T_OUT, 8, 512);
        assert!(driver.guest.wait_used(0, QUIET).is_none(), "it has had more than its share");
        assert_eq!(control.log().len(), begun);
        pod.volume.qos = Qos::default();
        pod.apply_volume();
        assert_eq!(driver.answer(0, 0, write), (OK, 1));
    }
}

#[test]
fn another_setting_does_not_forgive_what_a_volume_has_had() {
    let (mut pod, _control) = crate::pod::ram::pod(67);
    let mut driver = Driver::connected(&pod);
    let qos = Qos { bytes_per_second: Some(1), burst_ms: 0, ..Qos::default() };
    pod.volume.qos = qos;
    pod.apply_volume();
    assert_eq!(driver.write_sectors(8, &pattern(1, 512)), OK);
    let write = driver.offer(0, 0, T_OUT, 8, 512);
    for qos in [qos, Qos { iops: Some(1000), ..qos }, Qos { bytes_per_second: Some(2), ..qos }] {
        pod.volume.qos = qos;
        pod.apply_volume();
        assert!(driver.guest.wait_used(0, QUIET).is_none(), "it has had its share of {qos:?}");
    }
    pod.volume.qos = Qos::default();
    pod.apply_volume();
    assert_eq!(driver.answer(0, 0, write), (OK, 1));
}
