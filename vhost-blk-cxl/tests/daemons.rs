//! The engine's daemons as they are deployed: processes that are killed while a guest works, a real controller, a real
//! pool file and a real file as the SSD. The guest must never see an error, and everything it wrote must be there.

#![allow(clippy::cast_possible_truncation, reason = "small numbers, chosen by the test")]

mod common;

use std::collections::HashMap;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use common::{ALL_FEATURES, Driver, OK, SECTOR, T_FLUSH, T_IN, T_OUT, pattern};
use cxl_pool::{CoherenceMode, CreateOptions, Pool};
use pod_controller::api::{ChangeVolume, CreateInstance, CreateVolume, DeviceKind};
use pod_controller::client::Client;
use pod_controller::config::Config;
use pod_controller::controller::{AnyController, ControllerError, Handle};
use pod_controller::rest::{self, Listeners};
use pod_controller::store::Store;

/// Longer than any recovery takes; only a test that fails waits for it.
const PATIENCE: Duration = Duration::from_secs(40);
const VOLUME_BYTES: u64 = 16 << 20;
const QUEUES: u16 = 2;

#[derive(Debug, Clone, Copy)]
enum Side {
    Frontend,
    Backend,
}

/// A daemon's process.
struct Daemon(Child);

impl Daemon {
    fn kill(mut self) {
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

struct Controller {
    handle: Handle,
    runtime: Option<tokio::runtime::Runtime>,
    thread: Option<JoinHandle<Result<(), ControllerError>>>,
}

impl Controller {
    fn start(config: &Config) -> Self {
        let pool = Pool::open(&config.pool.path).unwrap();
        let store = Store::open(&config.controller.state).unwrap();
        let (controller, handle) = AnyController::open(&pool, config, store).unwrap();
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
struct Pod {
    backend: Option<Daemon>,
    frontend: Option<Daemon>,
    controller: Option<Controller>,
    socket: PathBuf,
    volume_start: u64,
    /// Last: the rest lives in it.
    directory: tempfile::TempDir,
}

impl Pod {
    fn start(mode: CoherenceMode, wakeup: &str) -> Self {
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let root = directory.path();
        let options =
            CreateOptions { size_bytes: Some(128 << 20), mode, host_slots: 4, ..CreateOptions::default() };
        Pool::create(&root.join("pool"), &options).unwrap();
        let shared = format!(
            "[pool]\npath = \"{0}/pool\"\n[run]\ndirectory = \"{0}/run\"\nwakeup = \"{wakeup}\"\n",
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
            "[controller]\nstate = \"{}/state.redb\"\ndata-area = \"8M\"\ndisk-queues = {QUEUES}\ndetect-ms = 2000\n{shared}",
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
        let volume = CreateVolume { name: "vol0".to_owned(), size, device: Some("h2/ssd0".to_owned()) };
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

    fn start_daemon(&mut self, side: Side) {
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

    fn kill(&mut self, side: Side) {
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

fn retry<T, E: std::fmt::Display>(began: Instant, mut attempt: impl FnMut() -> Result<T, E>) -> T {
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
struct Load {
    driver: Driver,
    in_flight: HashMap<(usize, u16), u64>,
    work: Vec<Work>,
    done: u64,
}

const WORKERS: u64 = 48;
const REGION_BYTES: u64 = 64 << 10;
/// What any file wants.
const BLOCK: u64 = 4096;

impl Load {
    fn connect(socket: &Path) -> Self {
        let mut driver = Driver::new(QUEUES, 256);
        driver.guest.connect(socket, ALL_FEATURES);
        let work = vec![Work { kind: T_FLUSH, version: 0 }; WORKERS as usize];
        Self { driver, in_flight: HashMap::new(), work, done: 0 }
    }

    fn reconnect(&mut self, socket: &Path) {
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
    fn collect(&mut self) -> Vec<u64> {
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

    /// Works until so many more requests were answered.
    fn work(&mut self, requests: u64) {
        let (began, until) = (Instant::now(), self.done + requests);
        while self.done < until {
            let busy: Vec<u64> = self.in_flight.values().copied().collect();
            for index in (0..WORKERS).filter(|index| !busy.contains(index)) {
                self.offer_next(index);
            }
            self.collect();
            assert!(began.elapsed() < PATIENCE, "stuck with {} requests in flight", self.in_flight.len());
        }
    }

    /// Waits for the end of everything, and compares the SSD with what was written.
    fn finish(&mut self, pod: &Pod) {
        let began = Instant::now();
        while !self.in_flight.is_empty() {
            self.collect();
            assert!(began.elapsed() < PATIENCE, "stuck with {} requests in flight", self.in_flight.len());
        }
        assert!(self.driver.guest.used(0).is_none() && self.driver.guest.used(1).is_none());
        let ssd = File::open(pod.directory.path().join("ssd.img")).unwrap();
        for index in 0..WORKERS {
            let expected = Self::data(index, self.work[index as usize].version);
            let mut found = vec![0; expected.len()];
            ssd.read_exact_at(&mut found, pod.volume_start + index * REGION_BYTES).unwrap();
            assert!(found == expected, "the SSD does not have version {:?}", self.work[index as usize]);
        }
        const { assert!(WORKERS * REGION_BYTES <= VOLUME_BYTES) };
    }
}

#[test]
fn a_backend_is_killed_and_nothing_is_lost() {
    let mut pod = Pod::start(CoherenceMode::Software, "socket");
    let mut load = Load::connect(&pod.socket);
    load.work(1000);
    for _ in 0..3 {
        pod.kill(Side::Backend);
        // Some of it piles up while nobody serves it.
        std::thread::sleep(Duration::from_millis(100));
        load.collect();
        pod.start_daemon(Side::Backend);
        load.work(1000);
    }
    load.finish(&pod);
}

#[test]
fn a_frontend_is_killed_and_the_guest_does_not_notice() {
    let mut pod = Pod::start(CoherenceMode::Hardware, "socket");
    let mut load = Load::connect(&pod.socket);
    load.work(1000);
    for _ in 0..3 {
        pod.kill(Side::Frontend);
        pod.start_daemon(Side::Frontend);
        load.reconnect(&pod.socket);
        load.work(1000);
    }
    load.finish(&pod);
}

#[test]
fn both_are_killed_on_hosts_that_cannot_ring() {
    let mut pod = Pod::start(CoherenceMode::Software, "poll");
    let mut load = Load::connect(&pod.socket);
    load.work(500);
    for order in [[Side::Frontend, Side::Backend], [Side::Backend, Side::Frontend]] {
        pod.kill(Side::Frontend);
        pod.kill(Side::Backend);
        for side in order {
            pod.start_daemon(side);
        }
        load.reconnect(&pod.socket);
        load.work(500);
    }
    load.finish(&pod);
}

#[test]
fn a_request_that_comes_before_everything_is_ready_is_answered() {
    let mut pod = Pod::start(CoherenceMode::Hardware, "socket");
    for round in 0..6u64 {
        let restarted = [&[Side::Frontend][..], &[Side::Backend], &[Side::Backend, Side::Frontend]];
        for &side in restarted[round as usize % 3] {
            pod.kill(side);
            pod.start_daemon(side);
        }
        // As soon as there is a socket.
        let mut driver = Driver::new(1, 16);
        driver.guest.connect(&pod.socket, ALL_FEATURES);
        let data = pattern(round, 4096);
        driver.write(driver.place(0).data, &data);
        let write = driver.offer(0, 0, T_OUT, round * 8, 4096);
        let used = driver.guest.wait_used(0, PATIENCE).expect("an answer");
        assert_eq!((used.head, driver.status(0)), (write, OK));
        driver.offer(0, 1, T_IN, round * 8, 4096);
        driver.guest.wait_used(0, PATIENCE).expect("an answer");
        assert_eq!((driver.status(1), driver.read(driver.place(1).data, 4096)), (OK, data));
    }
}

#[test]
fn the_controller_is_not_on_the_data_path() {
    let mut pod = Pod::start(CoherenceMode::Hardware, "socket");
    let mut load = Load::connect(&pod.socket);
    load.work(500);
    pod.controller = None;
    load.work(500);
    // Not even a guest that comes anew needs it.
    load.reconnect(&pod.socket);
    load.work(500);
    load.finish(&pod);
}

fn client(pod: &Pod) -> Client {
    let config = Config::load(&pod.directory.path().join("controller.toml")).unwrap();
    Client::unix(&config.listen()).unwrap()
}

/// What the device itself says is on it.
fn table_of(pod: &Pod) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_vhost-blk-cxl"))
        .arg("volumes")
        .arg(pod.directory.path().join("ssd.img"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn a_device_tells_its_volumes_and_a_deleted_one_is_wiped() {
    let mut pod = Pod::start(CoherenceMode::Hardware, "socket");
    assert_eq!(table_of(&pod), format!("vol0: {VOLUME_BYTES} bytes from {}\n", pod.volume_start));
    let mut load = Load::connect(&pod.socket);
    load.work(300);
    load.finish(&pod);
    drop(load);
    // It grows while it is in use.
    let grown = ChangeVolume { size: Some("20M".parse().unwrap()), qos: None };
    client(&pod).change_volume("vol0", &grown).unwrap();
    common::eventually(|| table_of(&pod).contains("20971520 bytes"));
    let mut driver = Driver::new(1, 16);
    driver.guest.connect(&pod.socket, ALL_FEATURES);
    common::eventually(|| driver.guest.config(8) == (20_u64 << 11).to_le_bytes());
    let last = (20 << 11) - 8;
    assert_eq!(driver.write_sectors(last, &pattern(1, 4096)), OK);
    assert_eq!(driver.read_sectors(last, 4096), pattern(1, 4096));
    drop(driver);
    // With the controller and the backend away, the device still knows.
    pod.controller = None;
    pod.kill(Side::Backend);
    assert!(table_of(&pod).starts_with("vol0: 20971520 bytes"));
    // A controller that has lost its state leaves it alone until it is told to adopt.
    fs::remove_file(pod.directory.path().join("state.redb")).unwrap();
    let config = Config::load(&pod.directory.path().join("controller.toml")).unwrap();
    pod.kill(Side::Frontend);
    pod.controller = Some(Controller::start(&config));
    pod.start_daemon(Side::Backend);
    let began = Instant::now();
    let device = retry(began, || client(&pod).device("h2", "ssd0"));
    assert!(
        matches!(&device.kind, DeviceKind::Ssd { strangers, .. } if strangers == &["vol0"]),
        "{device:?}"
    );
    let size = "1M".parse().unwrap();
    let request = CreateVolume { name: "new".to_owned(), size, device: Some("h2/ssd0".to_owned()) };
    assert!(client(&pod).create_volume(&request).is_err());
    client(&pod).adopt_volumes("h2", "ssd0").unwrap();
    assert_eq!(client(&pod).volume("vol0").unwrap().size_bytes, 20 << 20);
    // Deleted, its place is given on when nothing of it is left.
    let start = pod.volume_start;
    let place = move |root: &Path| {
        let mut place = vec![0; 20 << 20];
        File::open(root.join("ssd.img")).unwrap().read_exact_at(&mut place, start).unwrap();
        place
    };
    assert!(place(pod.directory.path()).iter().any(|&byte| byte != 0));
    client(&pod).delete_volume("vol0").unwrap();
    common::eventually(|| table_of(&pod) == "no volumes\n");
    assert!(place(pod.directory.path()).iter().all(|&byte| byte == 0));
    assert_eq!(client(&pod).create_volume(&request).unwrap().start_bytes, start);
}

#[test]
fn a_device_with_other_data_is_left_alone() {
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = directory.path().join("disk");
    fs::write(&path, vec![7; 2 << 20]).unwrap();
    let output =
        Command::new(env!("CARGO_BIN_EXE_vhost-blk-cxl")).arg("volumes").arg(&path).output().unwrap();
    assert!(!output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains("no table of volumes"));
}
