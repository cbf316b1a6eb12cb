//! A pod of processes, as they are deployed, over a real pool file and with a real file as the SSD; the controller is a thread.

#![allow(dead_code, reason = "every test file uses another part of it")]
#![allow(unreachable_pub, reason = "a test has no public interface")]

use std::collections::HashMap;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use cxl_pool::{CoherenceMode, CreateOptions, Pool};
use pod_api::client::Client;
use pod_api::{CreateInstance, CreateVolume};
use pod_controller::config::Config;
use pod_controller::controller::{self, ControllerError, Handle};
use pod_controller::rest::{self, Listeners};
use pod_controller::store::Store;

use crate::pod::{ALL_FEATURES, Driver, OK, SECTOR, T_FLUSH, T_IN, T_OUT, pattern};

/// Longer than any recovery takes; only a test that fails waits for it.
pub const PATIENCE: Duration = Duration::from_secs(40);
pub const VOLUME_BYTES: u64 = 16 << 20;
const QUEUES: u16 = 2;

#[derive(Debug, Clone, Copy)]
pub enum Side {
    Frontend,
    Backend,
}

/// A daemon's process.
pub struct Daemon(pub Child);

impl Daemon {
    pub fn kill(mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
        std::mem::forget(self);
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub struct Controller {
    handle: Handle,
    runtime: Option<tokio::runtime::Runtime>,
    thread: Option<JoinHandle<Result<(), ControllerError>>>,
}

impl Controller {
    pub fn start(config: &Config) -> Self {
        let pool = Pool::open(&config.pool.path).unwrap();
        let store = Store::open(&config.controller.state).unwrap();
        let (controller, handle) = controller::Controller::open(&pool, config, store).unwrap();
        let thread = std::thread::spawn(move || controller.run());
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let listeners = runtime.block_on(Listeners::bind(&config.listen(), None)).unwrap();
        runtime.spawn(listeners.serve(rest::router(handle.clone())));
        Self { handle, runtime: Some(runtime), thread: Some(thread) }
    }
}

impl Drop for Controller {
    fn drop(&mut self) {
        self.handle.stop();
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_timeout(Duration::from_millis(200));
        }
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Host 1 with a frontend, host 2 with a backend.
pub struct Pod {
    pub backend: Option<Daemon>,
    pub frontend: Option<Daemon>,
    pub controller: Option<Controller>,
    pub socket: PathBuf,
    pub volume_start: u64,
    /// Last: the rest lives in it.
    pub directory: tempfile::TempDir,
}

impl Pod {
    pub fn start(mode: CoherenceMode, wakeup: &str) -> Self {
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let pool = directory.path().join("pool");
        Self::start_in(directory, &pool, mode, wakeup)
    }

    /// With a pool that lies somewhere else.
    pub fn start_in(directory: tempfile::TempDir, pool: &Path, mode: CoherenceMode, wakeup: &str) -> Self {
        let root = directory.path();
        let options =
            CreateOptions { size_bytes: Some(128 << 20), mode, host_slots: 4, ..CreateOptions::default() };
        Pool::create(pool, &options).unwrap();
        let shared = format!(
            "[pool]\npath = \"{}\"\n[run]\ndirectory = \"{}/run\"\nwakeup = \"{wakeup}\"\n",
            pool.display(),
            root.display()
        );
        let ssd = format!(
            "[[ssd]]\nname = \"ssd0\"\ndriver = \"file\"\npath = \"{}/ssd.img\"\nsize = \"64M\"\n",
            root.display()
        );
        fs::write(root.join("frontend.toml"), format!("[host]\nid = 1\nname = \"h1\"\n{shared}")).unwrap();
        fs::write(root.join("backend.toml"), format!("[host]\nid = 2\nname = \"h2\"\n{shared}{ssd}"))
            .unwrap();
        let controller = format!(
            "[controller]\nstate = \"{}/state.redb\"\nlisten-tcp = \"none\"\ndata-area = \"8M\"\ndisk-queues = {QUEUES}\ndetect-ms = 2000\n{shared}",
            root.display()
        );
        fs::write(root.join("controller.toml"), controller).unwrap();
        let config = Config::load(&root.join("controller.toml")).unwrap();
        let mut pod = Self {
            backend: None,
            frontend: None,
            controller: Some(Controller::start(&config)),
            socket: PathBuf::new(),
            volume_start: 0,
            directory,
        };
        pod.start_daemon(Side::Backend);
        pod.start_daemon(Side::Frontend);
        pod.create_instance(&Client::unix(&config.listen()).unwrap());
        pod
    }

    fn create_instance(&mut self, client: &Client) {
        let began = Instant::now();
        let size = "16M".parse().unwrap();
        let volume = CreateVolume { device: Some("h2/ssd0".to_owned()), ..CreateVolume::new("vol0", size) };
        let volume = retry(began, || client.create_volume(&volume));
        self.volume_start = volume.start_bytes;
        let request = CreateInstance {
            name: "vm".to_owned(),
            host: "h1".to_owned(),
            volumes: vec!["vol0".to_owned()],
            ..CreateInstance::default()
        };
        let instance = retry(began, || client.create_instance(&request, PATIENCE / 2));
        assert!(instance.ready, "it waits for {:?}", instance.waiting_for);
        self.socket = instance.disks[0].socket.clone().into();
    }

    pub fn start_daemon(&mut self, side: Side) {
        let (name, place) = match side {
            Side::Frontend => ("frontend", &mut self.frontend),
            Side::Backend => ("backend", &mut self.backend),
        };
        let root = self.directory.path();
        let log = File::options().create(true).append(true).open(root.join("log")).unwrap();
        // Nothing outlives a test, however it ends.
        let child = Command::new("setpriv")
            .args(["--pdeathsig", "KILL", env!("CARGO_BIN_EXE_vhost-blk-cxl"), name, "--config"])
            .arg(root.join(format!("{name}.toml")))
            .stderr(log)
            .stdin(Stdio::null())
            .spawn();
        *place = Some(Daemon(child.unwrap()));
    }

    pub fn kill(&mut self, side: Side) {
        match side {
            Side::Frontend => self.frontend.take(),
            Side::Backend => self.backend.take(),
        }
        .unwrap()
        .kill();
    }
}

impl Drop for Pod {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", fs::read_to_string(self.directory.path().join("log")).unwrap_or_default());
        }
    }
}

pub fn retry<T, E: std::fmt::Display>(began: Instant, mut attempt: impl FnMut() -> Result<T, E>) -> T {
    loop {
        match attempt() {
            Ok(done) => return done,
            Err(error) => assert!(began.elapsed() < PATIENCE, "{error}"),
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// What a place of the guest is doing. Each has sectors of its own, writes them, reads them back, and so on; now and
/// then it flushes.
#[derive(Debug, Clone, Copy)]
struct Work {
    kind: u32,
    version: u64,
}

/// A guest that has many requests in flight, and knows what each must find.
pub struct Load {
    driver: Driver,
    pub in_flight: HashMap<(usize, u16), u64>,
    work: Vec<Work>,
    done: u64,
}

const WORKERS: u64 = 48;
const REGION_BYTES: u64 = 64 << 10;
/// What any file wants.
const BLOCK: u64 = 4096;

impl Load {
    pub fn connect(socket: &Path) -> Self {
        let mut driver = Driver::new(QUEUES, 256);
        driver.guest.connect(socket, ALL_FEATURES);
        let work = vec![Work { kind: T_FLUSH, version: 0 }; WORKERS as usize];
        Self { driver, in_flight: HashMap::new(), work, done: 0 }
    }

    /// The guest has no write cache from here on.
    pub fn write_through(&mut self) {
        self.driver.guest.set_config(32, &[0]);
        assert_eq!(self.driver.guest.config(60)[32], 0);
    }

    pub fn reconnect(&mut self, socket: &Path) {
        self.driver.guest.disconnect();
        self.driver.guest.connect(socket, ALL_FEATURES);
    }

    /// From one block to all of the region.
    fn bytes(index: u64, version: u64) -> u32 {
        (BLOCK * (1 + (index * 37 + version * 11) % (REGION_BYTES / BLOCK))) as u32
    }

    fn data(index: u64, version: u64) -> Vec<u8> {
        pattern(index << 32 | version, Self::bytes(index, version) as usize)
    }

    fn offer_next(&mut self, index: u64) {
        let work = &mut self.work[index as usize];
        *work = match work.kind {
            T_OUT => Work { kind: T_IN, ..*work },
            T_IN if work.version % 4 == 3 => Work { kind: T_FLUSH, ..*work },
            _ => Work { kind: T_OUT, version: work.version + 1 },
        };
        let work = *work;
        let bytes = if work.kind == T_FLUSH { 0 } else { Self::bytes(index, work.version) };
        let place = self.driver.place(index);
        match work.kind {
            T_OUT => self.driver.write(place.data, &Self::data(index, work.version)),
            T_IN => self.driver.write(place.data, &vec![0x55; bytes as usize]),
            _ => {}
        }
        let sector = if work.kind == T_FLUSH { 0 } else { index * REGION_BYTES / SECTOR };
        let queue = (index % u64::from(QUEUES)) as usize;
        let head = self.driver.offer(queue, index, work.kind, sector, bytes);
        assert_eq!(self.in_flight.insert((queue, head), index), None);
    }

    /// Offers a write, whatever would come next.
    pub fn offer_write(&mut self, index: u64) {
        self.work[index as usize].kind = T_FLUSH;
        self.offer_next(index);
    }

    fn check(&mut self, queue: usize, head: u16) -> u64 {
        let index = self.in_flight.remove(&(queue, head)).expect("each request is answered once");
        let work = self.work[index as usize];
        assert_eq!(self.driver.status(index), OK, "place {index}, {work:?}");
        if work.kind == T_IN {
            let expected = Self::data(index, work.version);
            let read = self.driver.read(self.driver.place(index).data, expected.len());
            assert!(read == expected, "place {index} read something else than version {}", work.version);
        }
        self.done += 1;
        index
    }

    /// Takes what was answered. Sleeps, until the device signals, if nothing was.
    pub fn collect(&mut self) -> Vec<u64> {
        let mut ended = Vec::new();
        for queue in 0..usize::from(QUEUES) {
            while let Some(used) = self.driver.guest.used(queue) {
                ended.push(self.check(queue, used.head));
            }
        }
        if ended.is_empty()
            && let Some(used) = self.driver.guest.wait_used(0, Duration::from_millis(5))
        {
            ended.push(self.check(0, used.head));
        }
        ended
    }

    /// Has everybody ask for something who waits for nothing.
    pub fn offer(&mut self) {
        let busy: Vec<u64> = self.in_flight.values().copied().collect();
        for index in (0..WORKERS).filter(|index| !busy.contains(index)) {
            self.offer_next(index);
        }
    }

    /// Works until so many more requests were answered.
    pub fn work(&mut self, requests: u64) {
        let (began, until) = (Instant::now(), self.done + requests);
        while self.done < until {
            self.offer();
            self.collect();
            assert!(began.elapsed() < PATIENCE, "stuck with {} requests in flight", self.in_flight.len());
        }
    }

    /// Waits for the end of everything, and compares the SSD with what was written.
    pub fn finish(&mut self, pod: &Pod) {
        self.finish_on(&pod.directory.path().join("ssd.img"), pod.volume_start);
    }

    /// The same, of a volume that lies elsewhere.
    pub fn finish_on(&mut self, ssd: &Path, volume_start: u64) {
        let began = Instant::now();
        while !self.in_flight.is_empty() {
            self.collect();
            assert!(began.elapsed() < PATIENCE, "stuck with {} requests in flight", self.in_flight.len());
        }
        assert!(self.driver.guest.used(0).is_none() && self.driver.guest.used(1).is_none());
        let ssd = File::open(ssd).unwrap();
        for index in 0..WORKERS {
            let expected = Self::data(index, self.work[index as usize].version);
            let mut found = vec![0; expected.len()];
            ssd.read_exact_at(&mut found, volume_start + index * REGION_BYTES).unwrap();
            assert!(found == expected, "the SSD does not have version {:?}", self.work[index as usize]);
        }
        const { assert!(WORKERS * REGION_BYTES <= VOLUME_BYTES) };
    }
}

pub fn client(pod: &Pod) -> Client {
    let config = Config::load(&pod.directory.path().join("controller.toml")).unwrap();
    Client::unix(&config.listen()).unwrap()
}
