//! What the replicas of a mirrored volume lie on, and the logs of intents there.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use cxl_pool::{CreateOptions, Pool};
use pod_protocol::endpoint::Handler;
use pod_protocol::ids::VolumeId;
use pod_protocol::objects::{Object, Qos, TableObject, VolumeObject};
use pod_protocol::run_directory::RunDirectory;
use pod_protocol::volume_table::{MirrorEntry, VolumeEntry, VolumeTable};
use vhost_blk_cxl::intent_log::{self, IntentLog};
use vhost_blk_cxl::ssd::Label;

use super::VOLUME_START;
use super::column_move::Columns;
use super::mirror::{MirrorPod, RINGS};

/// What the replicas lie on.
pub enum Drives {
    /// Devices that a test holds back and looks into, by a simulated memory.
    Ram,
    /// The production driver with a volatile write cache, by the memory of this machine.
    Files {
        pool: Pool,
        seed: u64,
        /// How often one was opened, so that each time another part of the cache is lost.
        opened: u64,
        /// Else flushes do nothing.
        obeys_flush: bool,
    },
}

impl MirrorPod {
    /// The same with SSDs that carry logs of intents.
    pub fn logging(seed: u64, replicas: u16) -> Self {
        let mut pod = Self::new(seed, replicas);
        pod.labelled = true;
        pod.start_all();
        pod
    }

    /// The same with the production driver, and drives that lose what was not flushed.
    pub fn on_volatile_drives(seed: u64, replicas: u16) -> Self {
        let mut pod = Self::new(seed, replicas);
        pod.take_volatile_drives(seed, true);
        pod.labelled = true;
        pod.start_all();
        pod
    }

    /// A volume that lies on all of these hosts' drives, unit by unit, which lose what was not flushed, or even that.
    pub fn striped_on_volatile_drives(seed: u64, hosts: u16, unit_bytes: u64, obeys_flush: bool) -> Self {
        let mut pod = Self::new(seed, hosts);
        pod.disk.stripe_bytes = Some(unit_bytes);
        pod.columns = Some(Columns::new(hosts));
        pod.take_volatile_drives(seed, obeys_flush);
        pod.start_all();
        pod
    }

    fn take_volatile_drives(&mut self, seed: u64, obeys_flush: bool) {
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let options = CreateOptions {
            size_bytes: Some(32 << 20),
            host_slots: 1,
            replica_slots: 1,
            ..CreateOptions::default()
        };
        let pool = Pool::create(&directory.path().join("pool"), &options).unwrap();
        assert!(pool.layout().data().start.get() <= RINGS, "the areas begin there");
        self.drives = Drives::Files { pool, seed, opened: 0, obeys_flush };
        self.directory = directory;
        self.run = RunDirectory::new(self.directory.path());
        self.run.prepare().unwrap();
    }

    /// The file that a replica's drive is, or that stands in for the beginning of one in memory.
    pub fn drive(&self, index: usize) -> PathBuf {
        self.directory.path().join(format!("drive{index}"))
    }

    pub(super) fn label(&self, index: usize) -> Label {
        let path = self.drive(index);
        if !path.exists() {
            File::create(&path).unwrap().set_len(VOLUME_START).unwrap();
        }
        Label::open(&path).unwrap()
    }

    pub(super) fn table(&self, index: usize) -> TableObject {
        let volume = self.volume(index);
        let entry = VolumeEntry {
            id: volume.volume,
            name: "vol0".to_owned(),
            start_bytes: volume.start_bytes,
            size_bytes: volume.size_bytes,
            deleted: false,
            mirror: Some(MirrorEntry { epoch: 0, number: index as u32, replicas: Vec::new() }),
            stripe: None,
        };
        TableObject { ssd: "ssd0".to_owned(), table: VolumeTable { volumes: vec![entry] } }
    }

    /// What is to be found in so many bytes of a replica's drive.
    pub fn on_drive(&self, index: usize, at: u64, bytes: usize) -> Vec<u8> {
        match self.drives {
            Drives::Ram => self.controls[index].bytes(at, bytes),
            Drives::Files { .. } => {
                let mut read = vec![0; bytes];
                File::open(self.drive(index)).unwrap().read_exact_at(&mut read, at).unwrap();
                read
            }
        }
    }

    pub(super) fn put_on_drive(&self, index: usize, at: u64, bytes: &[u8]) {
        match self.drives {
            Drives::Ram => self.controls[index].set_bytes(at, bytes),
            Drives::Files { .. } => {
                let file = File::options().write(true).open(self.drive(index)).unwrap();
                file.write_all_at(bytes, at).unwrap();
            }
        }
    }

    pub(super) fn log_start(&self, index: usize) -> u64 {
        self.label(index).intent_log(VolumeId::new(1)).expect("a log of intents")
    }

    /// What a replica's log of intents says, if it says anything.
    pub fn intent_log(&self, index: usize) -> Option<IntentLog> {
        let bytes = self.on_drive(index, self.log_start(index), intent_log::LENGTH);
        IntentLog::decode(&bytes.try_into().unwrap(), self.disk.volume).map(|(log, _)| log)
    }

    /// Has a replica's log say that nothing was being written. For what must be noticed.
    pub fn forget_intents(&self, index: usize) {
        let Some(mut log) = self.intent_log(index) else { return };
        log.marked.clear();
        self.put_on_drive(index, self.log_start(index), &log.encode(1 << 40));
    }

    /// Whether nothing is marked in any replica's log.
    pub fn is_unmarked(&self) -> bool {
        (0..self.controls.len()).all(|index| self.intent_log(index).is_some_and(|log| log.marked.is_empty()))
    }

    /// A write arrives late of a volume that had the slot of a replica's log before: the first sectors of it, or all.
    pub fn leave_in_log(&self, index: usize, volume: VolumeId, bytes: usize) {
        let mut log = IntentLog::of_unknown(volume, self.disk.size_bytes, vec![0, 1]);
        log.marked.clear();
        self.put_on_drive(index, self.log_start(index), &log.encode(1 << 40)[..bytes]);
    }

    /// Sets what a replica's backend allows the volume.
    pub fn limit(&mut self, index: usize, qos: Qos) {
        let volume = VolumeObject { qos, ..self.volume(index) };
        self.backends[index].as_mut().unwrap().apply(Object::Volume(volume)).unwrap();
    }

    /// How many requests had to wait at a replica's backend for their share.
    pub fn throttled(&mut self, index: usize) -> u64 {
        let telemetry = self.backends[index].as_mut().unwrap().telemetry();
        telemetry.leases.iter().find(|lease| lease.lease == self.disk.lease).unwrap().throttled
    }

    /// A part of a replica's log is damaged.
    pub fn tear_log(&self, index: usize) {
        self.put_on_drive(index, self.log_start(index) + 1024, &[0x11; 100]);
    }

    /// Everything loses its power at once, the guest as well.
    pub fn cut_power(&mut self) {
        self.frontend = None;
        self.backends.iter_mut().for_each(|backend| *backend = None);
    }

    /// Everything starts again.
    pub fn restore_power(&mut self) {
        for replica in &mut self.disk.replicas {
            replica.route.generation = replica.route.generation.next();
        }
        self.start_all();
    }
}
