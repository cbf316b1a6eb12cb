//! A guest whose volume lies on a block device: what is forgotten, and what is zeros.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::thread;

use cxl_pool::{CreateOptions, HardwareMemory};
use pod_protocol::endpoint::{Handler, Reporter};
use pod_protocol::objects::{Object, ObjectId, TableObject};
use pod_protocol::reports::{DeviceReport, Report};
use pod_protocol::volume_table::{VolumeEntry, VolumeTable};
use vhost_blk_cxl::backend::device_reports;
use vhost_blk_cxl::ssd::{FileSsd, Label, OpenError, Ssd};

use crate::pod::loop_device::LoopDevice;
use crate::pod::*;

const DEVICE_BYTES: u64 = VOLUME_START + VOLUME_BYTES + (1 << 20);
/// Of a write of zeroes.
const UNMAP: u32 = 1;
/// In sectors.
const MIB: u64 = (1 << 20) / SECTOR;

struct Scene {
    pod: Pod<HardwareMemory>,
    reporter: Reporter,
    device: LoopDevice,
    _directory: tempfile::TempDir,
}

impl Scene {
    /// None where there is no such device to be had. It is full of something else than zeros, but for where its table is.
    fn new() -> Option<Self> {
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let backing = directory.path().join("backing");
        let file = File::create(&backing).unwrap();
        file.set_len(DEVICE_BYTES).unwrap();
        file.write_all_at(&vec![7; (DEVICE_BYTES - VOLUME_START) as usize], VOLUME_START).unwrap();
        let device = LoopDevice::over(&backing)?;
        let options = CreateOptions { size_bytes: Some(32 << 20), ..CreateOptions::default() };
        let pool = cxl_pool::Pool::create(&directory.path().join("pool"), &options).unwrap();
        let mut pod = Pod::new(pool.hardware(), pool.hardware(), pool.layout().data().start);
        let reporter = Reporter::new().unwrap();
        pod.reporter = Some(reporter.clone());
        let ssd = FileSsd::open("ssd0", &device.path, None, &pool).unwrap();
        pod.start_backend(Box::new(ssd));
        let label = Label::open(&device.path).unwrap();
        pod.backend.as_mut().unwrap().keep_tables(vec![("ssd0".to_owned(), label)]);
        Some(Self { pod, reporter, device, _directory: directory })
    }

    fn put_table(&mut self, deleted: bool) {
        let entry = VolumeEntry {
            id: self.pod.volume.volume,
            name: "vol0".to_owned(),
            start_bytes: VOLUME_START,
            size_bytes: VOLUME_BYTES,
            deleted,
            mirror: None,
            stripe: None,
        };
        let table = TableObject { ssd: "ssd0".to_owned(), table: VolumeTable { volumes: vec![entry] } };
        eventually(|| self.pod.backend.as_mut().unwrap().apply(Object::Table(table.clone())).is_ok());
    }

    /// A guest that uses the volume.
    fn driver(&mut self) -> Driver {
        self.put_table(false);
        self.pod.start_frontend();
        self.pod.new_channel();
        self.pod.apply_volume();
        self.pod.apply_disk();
        Driver::connected(&self.pod)
    }
}

/// What a loop device heeds is a block of the file system below.
#[test]
fn what_a_block_device_or_a_file_heeds_is_told() {
    let Some(scene) = Scene::new() else { return };
    let limits = scene.device.sysfs().join("queue/discard_granularity");
    let device: u32 = std::fs::read_to_string(limits).unwrap().trim().parse().unwrap();
    let told = |path: &Path| {
        let pool = crate::zero_copy::pool();
        let ssd = FileSsd::open("ssd1", path, Some(1 << 20), &pool).unwrap();
        let reports = device_reports([("ssd1", &ssd as &dyn Ssd)]);
        let [DeviceReport::Ssd { discard_granularity_bytes, .. }] = reports[..] else {
            panic!("{reports:?}")
        };
        discard_granularity_bytes
    };
    let Scene { pod, device: loop_device, .. } = scene;
    drop(pod);
    assert_eq!(told(&loop_device.path), Some(device));
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    assert_eq!(told(&directory.path().join("file")), Some(4096));
}

#[test]
fn what_a_guest_discards_and_zeroes_reads_as_it_should() {
    let Some(mut scene) = Scene::new() else { return };
    let mut driver = scene.driver();
    let data = pattern(1, 1 << 20);
    for at in 0..8 {
        assert_eq!(driver.write_sectors(at * MIB, &data[..512 << 10]), OK);
        assert_eq!(driver.write_sectors(at * MIB + MIB / 2, &data[512 << 10..]), OK);
    }
    let before = scene.device.done().discards;
    assert_eq!(driver.range_request(T_DISCARD, MIB, MIB as u32, 0), OK);
    assert_eq!(scene.device.done().discards, before + 1, "the device has heard of it");
    assert_eq!(driver.range_request(T_WRITE_ZEROES, 3 * MIB, MIB as u32, UNMAP), OK);
    // In blocks of the disk, not of what lies below.
    assert_eq!(driver.range_request(T_WRITE_ZEROES, 5 * MIB + 1, MIB as u32 - 2, 0), OK);
    assert_eq!(driver.request(T_FLUSH, 0, 0).0, OK);
    assert_eq!(scene.device.done().discards, before + 1, "zeroes are no discards");
    let mut expected = data.repeat(8);
    expected[1 << 20..2 << 20].fill(0);
    expected[3 << 20..4 << 20].fill(0);
    expected[(5 << 20) + 512..(6 << 20) - 512].fill(0);
    for at in 0..16 {
        let found = driver.read_sectors(at * MIB / 2, 512 << 10);
        assert!(found == expected[at as usize * (512 << 10)..][..512 << 10], "{at}");
    }
}

/// What is written to a place that is being forgotten or zeroed stays.
#[test]
fn a_write_behind_a_discard_of_its_place_stays() {
    let Some(mut scene) = Scene::new() else { return };
    let mut driver = scene.driver();
    for round in 0..30_u64 {
        let (kind, flags) = if round % 2 == 0 { (T_DISCARD, 0) } else { (T_WRITE_ZEROES, UNMAP) };
        let place = driver.place(1);
        let mut range = 0_u64.to_le_bytes().to_vec();
        range.extend((VOLUME_BYTES as u32 / SECTOR as u32).to_le_bytes());
        range.extend(u32::to_le_bytes(flags));
        driver.write_header(place, kind, 0);
        driver.write(place.data, &range);
        let data = pattern(round, 64 << 10);
        driver.write(driver.place(2).data, &data);
        driver.guest.offer(0, &Driver::pieces(place, kind, 16), None);
        driver.offer(0, 2, T_OUT, round * 8, 64 << 10);
        for _ in 0..2 {
            driver.guest.wait_used(0, PATIENCE).expect("an answer");
        }
        assert_eq!((driver.status(1), driver.status(2)), (OK, OK));
        assert!(driver.read_sectors(round * 8, 64 << 10) == data, "round {round}");
    }
}

/// Whoever gets its place sees nothing of it, and its neighbour keeps what it has.
#[test]
fn a_deleted_volume_is_wiped_on_a_block_device() {
    let Some(mut scene) = Scene::new() else { return };
    let mut driver = scene.driver();
    assert_eq!(driver.write_sectors(8, &pattern(1, 64 << 10)), OK);
    drop(driver);
    let before = scene.device.done().discards;
    scene.put_table(true);
    let (id, volume) = (scene.pod.volume.id(), scene.pod.volume.volume);
    scene.pod.backend.as_mut().unwrap().remove(ObjectId::Volume(id)).unwrap();
    let reporter = scene.reporter.clone();
    eventually(|| {
        // It is what has it look for what was wiped.
        scene.pod.backend.as_mut().unwrap().telemetry();
        let of_it = |it: Report| matches!(it, Report::VolumeWiped { volume: of, .. } if of == volume);
        reporter.take().into_iter().any(of_it)
    });
    assert_eq!(scene.device.done().discards, before, "to forget is not to be empty");
    let file = File::open(&scene.device.path).unwrap();
    let mut found = vec![0; (DEVICE_BYTES - VOLUME_START) as usize];
    file.read_exact_at(&mut found, VOLUME_START).unwrap();
    let (wiped, neighbour) = found.split_at(VOLUME_BYTES as usize);
    assert!(wiped.iter().all(|&byte| byte == 0) && neighbour.iter().all(|&byte| byte == 7));
}

/// As for a file system, and in a RAID.
fn claim(path: &Path) -> std::io::Result<File> {
    let flags = rustix::fs::OFlags::EXCL.bits().cast_signed();
    File::options().read(true).write(true).custom_flags(flags).open(path)
}

#[test]
fn a_block_device_that_is_in_use_is_refused_and_one_in_our_hands_is_claimed() {
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let backing = directory.path().join("backing");
    File::create(&backing).unwrap().set_len(DEVICE_BYTES).unwrap();
    let Some(device) = LoopDevice::over(&backing) else { return };
    let pool = crate::zero_copy::pool();
    let open = || FileSsd::open("ssd0", &device.path, None, &pool);
    let claimed = claim(&device.path).unwrap();
    let error = open().err().expect("somebody else has claimed it");
    assert!(matches!(error, OpenError::Claimed { .. }) && error.may_hide_requests(), "{error}");
    // Who is about to let go of it is waited for.
    let waiting = format!("/proc/self/task/{}/wchan", rustix::thread::gettid().as_raw_nonzero());
    let leaving = thread::spawn(move || {
        eventually(|| fs::read_to_string(&waiting).is_ok_and(|at| at.contains("nanosleep")));
        drop(claimed);
    });
    let ssd = open().unwrap();
    leaving.join().unwrap();
    let busy = claim(&device.path).err().and_then(|error| error.raw_os_error());
    assert_eq!(busy, Some(rustix::io::Errno::BUSY.raw_os_error()));
    // Its own table is another matter.
    Label::open(&device.path).unwrap();
    drop(ssd);
    eventually(|| claim(&device.path).is_ok());
}

#[test]
fn a_block_device_and_its_partition_are_not_two_devices() {
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let backing = directory.path().join("backing");
    File::create(&backing).unwrap().set_len(DEVICE_BYTES).unwrap();
    let Some((device, partition)) = LoopDevice::with_partition(&backing) else { return };
    let pool = crate::zero_copy::pool();
    for (first, second) in [(&device.path, &partition), (&partition, &device.path)] {
        let ssd = FileSsd::open("ssd0", first, None, &pool).unwrap();
        let error = FileSsd::open("ssd1", second, None, &pool).err().expect("it is the same device");
        assert!(matches!(error, OpenError::Claimed { .. }), "{error}");
        drop(ssd);
    }
}
