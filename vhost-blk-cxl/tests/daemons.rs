//! The engine's daemons as they are deployed: processes that are killed while a guest works, a real controller, a real
//! pool file and a real file as the SSD. The guest must never see an error, and everything it wrote must be there.

#![allow(clippy::cast_possible_truncation, reason = "small numbers, chosen by the test")]

mod pod;
mod processes;

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use cxl_pool::CoherenceMode;
use pod::{ALL_FEATURES, Driver, OK, T_IN, T_OUT, pattern};
use pod_api::{ChangeVolume, CreateInstance, CreateVolume, DeviceHealth, DeviceKind};
use pod_controller::config::Config;
use processes::{Controller, Daemon, Load, PATIENCE, Pod, Side, VOLUME_BYTES, client, retry};

#[test]
fn a_backend_is_killed_and_nothing_is_lost() {
    let mut pod = Pod::start(CoherenceMode::Software, "socket");
    let mut load = Load::connect(&pod.socket);
    load.work(1000);
    for _ in 0..3 {
        pod.kill(Side::Backend);
        // It piles up while nobody serves it.
        load.offer();
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

/// What the device itself says is on it.
fn table_of(pod: &Pod) -> String {
    table_at(&pod.directory.path().join("ssd.img"))
}

fn table_at(device: &Path) -> String {
    let output =
        Command::new(env!("CARGO_BIN_EXE_vhost-blk-cxl")).arg("volumes").arg(device).output().unwrap();
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
    let grown = ChangeVolume { size: Some("20M".parse().unwrap()), ..ChangeVolume::default() };
    client(&pod).change_volume("vol0", &grown).unwrap();
    pod::eventually(|| table_of(&pod).contains("20971520 bytes"));
    let mut driver = Driver::new(1, 16);
    driver.guest.connect(&pod.socket, ALL_FEATURES);
    pod::eventually(|| driver.guest.config(8) == (20_u64 << 11).to_le_bytes());
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
    let request = CreateVolume { device: Some("h2/ssd0".to_owned()), ..CreateVolume::new("new", size) };
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
    let data = place(pod.directory.path());
    let used = data.chunks(4096).filter(|page| page.iter().any(|&byte| byte != 0)).count() as u64 * 4096;
    assert!(used > 0);
    let allocated = |name: &str| client(&pod).volume(name).unwrap().allocated_bytes;
    pod::eventually(|| allocated("vol0").is_some_and(|bytes| bytes >= used));
    let bytes = allocated("vol0").unwrap();
    assert!((used..=20 << 20).contains(&bytes), "{bytes} bytes, of which {used} are not zero");
    client(&pod).delete_volume("vol0").unwrap();
    pod::eventually(|| table_of(&pod) == "no volumes\n");
    assert!(place(pod.directory.path()).iter().all(|&byte| byte == 0));
    assert_eq!(client(&pod).create_volume(&request).unwrap().start_bytes, start);
    pod::eventually(|| allocated("new") == Some(0));
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

#[test]
fn a_frontend_offers_its_disk_before_the_backend_is_there() {
    let mut pod = Pod::start(CoherenceMode::Hardware, "socket");
    pod.kill(Side::Backend);
    pod.kill(Side::Frontend);
    pod.start_daemon(Side::Frontend);
    let mut driver = Driver::new(1, 16);
    driver.guest.connect(&pod.socket, ALL_FEATURES);
    let data = pattern(3, 4096);
    driver.write(driver.place(0).data, &data);
    driver.offer(0, 0, T_OUT, 8, 4096);
    assert!(driver.guest.wait_used(0, pod::QUIET * 3).is_none(), "there is nobody to answer it");
    pod.start_daemon(Side::Backend);
    driver.guest.wait_used(0, PATIENCE).expect("an answer");
    assert_eq!(driver.status(0), OK);
    assert_eq!(driver.read_sectors(8, 4096), data);
}

#[test]
fn an_ssd_that_is_not_there_keeps_nobody_from_the_others() {
    let mut pod = Pod::start(CoherenceMode::Hardware, "socket");
    pod.kill(Side::Backend);
    let missing = pod.directory.path().join("late.img");
    add_ssd(&pod, "file", &missing);
    pod.start_daemon(Side::Backend);
    let mut load = Load::connect(&pod.socket);
    load.work(300);
    assert!(client(&pod).device("h2", "ssd1").is_err(), "nobody has seen it yet");
    File::create(&missing).unwrap().set_len(64 << 20).unwrap();
    // It is for a supervisor to start it again.
    let status = pod.backend.as_mut().unwrap().0.wait().unwrap();
    assert_eq!(status.code(), Some(75));
    pod.start_daemon(Side::Backend);
    load.work(300);
    pod::eventually(|| client(&pod).device("h2", "ssd1").is_ok());
    // A volume's data stays where it is while its device is away.
    let size = "1M".parse().unwrap();
    let request = CreateVolume { device: Some("h2/ssd1".to_owned()), ..CreateVolume::new("late", size) };
    client(&pod).create_volume(&request).unwrap();
    pod.kill(Side::Backend);
    let elsewhere = missing.with_extension("elsewhere");
    fs::rename(&missing, &elsewhere).unwrap();
    pod.start_daemon(Side::Backend);
    load.work(300);
    let health = |name: &str| client(&pod).device("h2", name).unwrap().health;
    pod::eventually(|| health("ssd1") != health("ssd0"));
    assert!(client(&pod).volume("late").is_ok());
    load.finish(&pod);
}

/// Another program that serves a file as a disk.
fn serve_disk(disk: &Path, socket: &Path) -> Daemon {
    let target = Command::new("setpriv")
        .args(["--pdeathsig", "KILL", "qemu-storage-daemon", "--blockdev"])
        .arg(format!("driver=file,node-name=f0,filename={}", disk.display()))
        .arg("--export")
        .arg(format!(
            "type=vhost-user-blk,id=e0,node-name=f0,addr.type=unix,addr.path={},writable=on",
            socket.display()
        ))
        .spawn();
    let target = Daemon(target.expect("qemu-storage-daemon: apt-get install qemu-utils qemu-system-x86"));
    pod::eventually(|| UnixStream::connect(socket).is_ok());
    target
}

/// Gives the host of the backend one more SSD, from its next start on.
fn add_ssd(pod: &Pod, driver: &str, path: &Path) {
    let config = pod.directory.path().join("backend.toml");
    let table = format!("[[ssd]]\nname = \"ssd1\"\ndriver = \"{driver}\"\npath = \"{}\"\n", path.display());
    fs::write(&config, fs::read_to_string(&config).unwrap() + &table).unwrap();
}

/// A pod whose backend has such a disk as well, with this on it; where that and its socket are.
fn with_anothers_disk(mode: CoherenceMode, content: &[u8]) -> (Pod, Daemon, PathBuf, PathBuf) {
    let mut pod = Pod::start(mode, "socket");
    pod.kill(Side::Backend);
    let root = pod.directory.path();
    let (disk, socket) = (root.join("disk"), root.join("target.sock"));
    fs::write(&disk, content).unwrap();
    let target = serve_disk(&disk, &socket);
    add_ssd(&pod, "vhost-user", &socket);
    pod.start_daemon(Side::Backend);
    (pod, target, disk, socket)
}

/// As an SSD of the host's own does: whoever looks finds what is there, at its socket, too, and so does a controller that has lost its state.
#[test]
fn the_disk_of_another_program_tells_its_volumes() {
    let (mut pod, mut target, disk, socket) = with_anothers_disk(CoherenceMode::Hardware, &vec![0; 16 << 20]);
    let root = pod.directory.path().to_owned();
    let size = "2M".parse().unwrap();
    let request =
        |name: &str| CreateVolume { device: Some("h2/ssd1".to_owned()), ..CreateVolume::new(name, size) };
    let start = retry(Instant::now(), || client(&pod).create_volume(&request("tenant"))).start_bytes;
    let told = format!("tenant: {} bytes from {start}\n", 2 << 20);
    pod::eventually(|| table_at(&disk) == told);
    // The program that has the disk is another one by now, and has to be told the next table.
    target.kill();
    target = serve_disk(&disk, &socket);
    let other = retry(Instant::now(), || client(&pod).create_volume(&request("other"))).start_bytes;
    let told = format!("{told}other: {} bytes from {other}\n", 2 << 20);
    pod::eventually(|| table_at(&disk) == told);
    // With the controller and the backend away, the disk still knows.
    pod.controller = None;
    pod.kill(Side::Backend);
    assert_eq!(table_at(&socket), told);
    fs::remove_file(root.join("state.redb")).unwrap();
    pod.kill(Side::Frontend);
    pod.controller = Some(Controller::start(&Config::load(&root.join("controller.toml")).unwrap()));
    pod.start_daemon(Side::Backend);
    let device = retry(Instant::now(), || client(&pod).device("h2", "ssd1"));
    assert!(
        matches!(&device.kind, DeviceKind::Ssd { strangers, .. } if strangers == &["tenant", "other"]),
        "{device:?}"
    );
    client(&pod).adopt_volumes("h2", "ssd1").unwrap();
    assert_eq!(client(&pod).volume("tenant").unwrap().start_bytes, start);
    // What is deleted goes from there as well.
    for name in ["tenant", "other"] {
        client(&pod).delete_volume(name).unwrap();
    }
    pod::eventually(|| table_at(&disk) == "no volumes\n");
    drop(target);
}

/// Something else lies where its table would: the controller says what is there to each backend that begins.
#[test]
fn a_volume_on_the_disk_of_another_program_is_wiped_without_a_table_too() {
    const BYTES: usize = 1 << 20;
    let (mut pod, _target, disk, _) = with_anothers_disk(CoherenceMode::Hardware, &vec![7; 8 * BYTES]);
    let size = "1M".parse().unwrap();
    let request = CreateVolume { device: Some("h2/ssd1".to_owned()), ..CreateVolume::new("tenant", size) };
    let start = retry(Instant::now(), || client(&pod).create_volume(&request)).start_bytes as usize;
    // Another one begins, and does not know that it is there before it hears so.
    pod.kill(Side::Backend);
    pod.start_daemon(Side::Backend);
    client(&pod).delete_volume("tenant").unwrap();
    pod::eventually(|| fs::read(&disk).unwrap()[start..start + BYTES].iter().all(|&byte| byte == 0));
    let data = fs::read(&disk).unwrap();
    let wiped = start..start + BYTES;
    let expected = |at: usize| if wiped.contains(&at) { 0 } else { 7 };
    assert!(data.iter().enumerate().all(|(at, &byte)| byte == expected(at)), "others are left alone");
}

/// Each time another process takes over what it had.
#[test]
fn the_program_behind_a_disk_is_killed_under_load_and_nothing_is_lost() {
    let (pod, mut target, disk, socket) = with_anothers_disk(CoherenceMode::Software, &vec![0; 16 << 20]);
    let size = "8M".parse().unwrap();
    let volume = CreateVolume { device: Some("h2/ssd1".to_owned()), ..CreateVolume::new("tenant", size) };
    let start = retry(Instant::now(), || client(&pod).create_volume(&volume)).start_bytes;
    let request = CreateInstance {
        name: "tenant".to_owned(),
        host: "h1".to_owned(),
        volumes: vec!["tenant".to_owned()],
        ..CreateInstance::default()
    };
    let instance = retry(Instant::now(), || client(&pod).create_instance(&request, PATIENCE / 2));
    let mut load = Load::connect(Path::new(&instance.disks[0].socket));
    // Else a flush would say that what was not flushed may be lost with the program.
    load.write_through();
    load.work(1000);
    for _ in 0..3 {
        target.kill();
        load.offer();
        target = serve_disk(&disk, &socket);
        load.work(1000);
    }
    load.finish_on(&disk, start);
}

/// What it is doing with an SSD fills memory of the pool, and may be at that for as long as the kernel keeps its lock.
#[test]
fn a_backend_waits_for_the_end_of_what_a_predecessor_does_with_an_ssd() {
    let mut pod = Pod::start(CoherenceMode::Hardware, "socket");
    let mut load = Load::connect(&pod.socket);
    load.work(300);
    let root = pod.directory.path().to_owned();
    let (file, socket, config) = (root.join("held.img"), root.join("silent.sock"), root.join("backend.toml"));
    let held = File::create(&file).unwrap();
    held.set_len(64 << 20).unwrap();
    held.lock().unwrap();
    let _silent = UnixListener::bind(&socket).unwrap();
    let others = fs::read_to_string(&config).unwrap();
    for (times, driver, path) in [(1, "vhost-user", &socket), (2, "file", &file)] {
        pod.kill(Side::Backend);
        fs::write(&config, &others).unwrap();
        add_ssd(&pod, driver, path);
        pod.start_daemon(Side::Backend);
        let backend = &mut pod.backend.as_mut().unwrap().0;
        retry(Instant::now(), || backend.try_wait().unwrap().ok_or("it goes on"));
        let log = fs::read_to_string(root.join("log")).unwrap();
        assert!(!backend.wait().unwrap().success());
        assert_eq!(log.matches("may still be under way").count(), times, "{log}");
    }
    drop(held);
    pod.start_daemon(Side::Backend);
    load.work(300);
    load.finish(&pod);
}

/// Whoever pulls an SSD and puts an empty one in its place finds it left alone, not its volumes empty.
#[test]
fn an_ssd_that_was_replaced_by_an_empty_one_is_left_alone_until_somebody_says_what_to_do() {
    let mut pod = Pod::start(CoherenceMode::Hardware, "socket");
    let client = client(&pod);
    let (ssd, pulled) = (pod.directory.path().join("ssd.img"), pod.directory.path().join("pulled.img"));
    let data = pattern(1, 4096);
    let connect = |pod: &Pod| {
        let mut driver = Driver::new(1, 16);
        driver.guest.connect(&pod.socket, ALL_FEATURES);
        driver
    };
    let mut driver = connect(&pod);
    assert_eq!(driver.write_sectors(8, &data), OK);
    assert_eq!(driver.request(pod::T_FLUSH, 0, 0).0, OK);
    let until = |health: DeviceHealth, why: &str| {
        retry(Instant::now(), || {
            let device = client.device("h2", "ssd0").map_err(|error| error.to_string())?;
            let is = device.health == health && device.reason.as_deref().unwrap_or("").contains(why);
            if is { Ok(()) } else { Err(format!("{:?}: {:?}", device.health, device.reason)) }
        });
    };
    until(DeviceHealth::Up, "");
    pod.kill(Side::Backend);
    fs::rename(&ssd, &pulled).unwrap();
    pod.start_daemon(Side::Backend);
    until(DeviceHealth::Away, "another SSD");
    assert_eq!(driver.request(T_IN, 8, 4096).0, pod::IOERR, "no zeros");
    let refused = client.delete_device("h2", "ssd0", false).unwrap_err().to_string();
    assert!(refused.contains("nobody else has"), "{refused}");
    // Nothing was put on it.
    assert_eq!(table_of(&pod), "no volumes\n");
    // The one that was there comes back.
    pod.kill(Side::Backend);
    fs::rename(&pulled, &ssd).unwrap();
    pod.start_daemon(Side::Backend);
    until(DeviceHealth::Up, "");
    retry(Instant::now(), || if driver.request(T_IN, 8, 4096).0 == OK { Ok(()) } else { Err("I/O errors") });
    assert_eq!(driver.read_sectors(8, 4096), data);
    // It is gone for good, and the other one is taken when it was given up.
    pod.kill(Side::Backend);
    fs::rename(&ssd, &pulled).unwrap();
    pod.start_daemon(Side::Backend);
    until(DeviceHealth::Away, "another SSD");
    drop(driver);
    retry(Instant::now(), || client.delete_instance_by_force("vm"));
    retry(Instant::now(), || client.delete_device("h2", "ssd0", true));
    assert!(client.volumes().unwrap().is_empty());
    pod.kill(Side::Backend);
    pod.start_daemon(Side::Backend);
    until(DeviceHealth::Up, "");
    let volume = CreateVolume {
        device: Some("h2/ssd0".to_owned()),
        ..CreateVolume::new("vol1", "16M".parse().unwrap())
    };
    retry(Instant::now(), || client.create_volume(&volume));
}
