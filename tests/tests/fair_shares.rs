//! Instances of several hosts share a path of the fabric by their weights, judged by the bytes that they are let move.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use pod_controller::api::{CreateInstance, Fabric, Mchannel, MchannelSpec};
use vhost_frontend::mock::{MockGuest, Piece};
use vm_memory::{Bytes, GuestAddress};
use wadi_tests::pod::{HostPlan, Pod, PodBuilder};

/// What the path carries, in bytes/s: little, so that a busy machine is no other bottleneck.
const CAPACITY: u64 = 24_000_000;
const REQUEST_BYTES: u32 = 16 << 10;
/// Requests that a guest has in flight.
const DEPTH: u64 = 8;
/// Of each a part of the guest's memory: data, header, status.
const PLACE_BYTES: u64 = 32 << 10;
/// How long shares may take until they are as they should be, on a machine that does much else.
const PATIENCE: Duration = Duration::from_mins(1);
const WINDOW: Duration = Duration::from_millis(1500);

/// What a guest does.
const STOP: u8 = 0;
const HUNGRY: u8 = 1;
const MODEST: u8 = 2;
const BURSTS: u8 = 3;

/// A guest that reads its disk.
struct Load {
    how: Arc<AtomicU8>,
    bytes: Arc<AtomicU64>,
    thread: Option<JoinHandle<()>>,
}

impl Load {
    fn start(socket: &str) -> Self {
        let (how, bytes) = (Arc::new(AtomicU8::new(HUNGRY)), Arc::new(AtomicU64::new(0)));
        let (socket, it, count) = (socket.to_owned(), Arc::clone(&how), Arc::clone(&bytes));
        let thread = thread::spawn(move || {
            let mut guest = MockGuest::new(1 << 20, 1, 64);
            guest.connect(socket.as_ref(), 0);
            read_disk(&mut guest, &it, &count);
        });
        Self { how, bytes, thread: Some(thread) }
    }

    fn go_on(&self, how: u8) {
        self.how.store(how, Ordering::Relaxed);
    }

    fn check(&self) {
        assert!(!self.thread.as_ref().unwrap().is_finished(), "a guest has given up");
    }

    fn stop(mut self) {
        self.go_on(STOP);
        self.thread.take().unwrap().join().expect("a guest that ends in order");
    }
}

fn read_disk(guest: &mut MockGuest, how: &AtomicU8, count: &AtomicU64) {
    let began = Instant::now();
    let mut places: Vec<u64> = (0..DEPTH).collect();
    let mut in_flight: Vec<(u16, u64)> = Vec::new();
    let mut sector = 0;
    loop {
        let wanted = match how.load(Ordering::Relaxed) {
            HUNGRY => DEPTH,
            MODEST => 1,
            // Just as long as a window of bytes, and then as long nothing.
            BURSTS if (began.elapsed().as_millis() / 10).is_multiple_of(2) => DEPTH,
            BURSTS => 0,
            _ if in_flight.is_empty() => return,
            _ => 0,
        };
        while (in_flight.len() as u64) < wanted {
            let place = places.pop().expect("as many as requests");
            in_flight.push((offer(guest, place, sector), place));
            sector = (sector + u64::from(REQUEST_BYTES) / 512) % (16 << 11);
        }
        let patience = if in_flight.is_empty() { Duration::ZERO } else { Duration::from_secs(20) };
        let patience = if wanted == 0 { patience.min(Duration::from_millis(5)) } else { patience };
        let used = if patience.is_zero() { guest.used(0) } else { guest.wait_used(0, patience) };
        let Some(used) = used else {
            assert!(patience < Duration::from_secs(20), "a request is not answered");
            thread::sleep(Duration::from_millis(1));
            continue;
        };
        let found = in_flight.iter().position(|(head, _)| *head == used.head).expect("each is answered once");
        let (_, place) = in_flight.swap_remove(found);
        let mut status = [9];
        guest.memory().read_slice(&mut status, GuestAddress(start(guest, place) + 17 * 1024)).unwrap();
        assert_eq!(status, [0], "an I/O error");
        places.push(place);
        count.fetch_add(REQUEST_BYTES.into(), Ordering::Relaxed);
        if wanted == 1 {
            thread::sleep(Duration::from_millis(8));
        }
    }
}

fn start(guest: &MockGuest, place: u64) -> u64 {
    guest.data_start() + place * PLACE_BYTES
}

/// A read as virtio-blk has it.
fn offer(guest: &mut MockGuest, place: u64, sector: u64) -> u16 {
    let data = start(guest, place);
    let (header, status) = (data + 16 * 1024, data + 17 * 1024);
    let mut words = [0; 16];
    words[8..].copy_from_slice(&sector.to_le_bytes());
    guest.memory().write_slice(&words, GuestAddress(header)).unwrap();
    let piece = |address, bytes, writable| Piece { address, bytes, writable };
    let pieces = [piece(header, 16, false), piece(data, REQUEST_BYTES, true), piece(status, 1, true)];
    guest.offer(0, &pieces, None)
}

/// What each guest moved in a while, in bytes/s.
fn rates(loads: &[Load]) -> Vec<f64> {
    let counts = || loads.iter().map(|load| load.bytes.load(Ordering::Relaxed)).collect::<Vec<_>>();
    let (before, began) = (counts(), Instant::now());
    thread::sleep(WINDOW);
    let (after, seconds) = (counts(), began.elapsed().as_secs_f64());
    loads.iter().for_each(Load::check);
    #[allow(clippy::cast_precision_loss)]
    let rate = |(before, after): (&u64, &u64)| (after - before) as f64 / seconds;
    before.iter().zip(&after).map(rate).collect()
}

/// Waits until what guests move is as it should be. It soon is, unless the machine keeps them from moving what they may.
fn until(what: &str, loads: &[Load], is_so: impl Fn(&[f64]) -> bool) {
    let began = Instant::now();
    loop {
        let rates = rates(loads);
        eprintln!("{what}: {:.2?} MB/s", rates.iter().map(|rate| rate / 1e6).collect::<Vec<_>>());
        if is_so(&rates) {
            return;
        }
        assert!(began.elapsed() < PATIENCE, "never: {what}; last {rates:?}");
    }
}

fn near(rate: f64, expected: f64) -> bool {
    (rate - expected).abs() <= 0.05 * expected
}

fn share(pod: &Pod, instance: &str, weight: u32) {
    let spec = MchannelSpec { weight, tenant: "default".to_owned(), path: vec!["pool".to_owned()] };
    pod.api().set_mchannel(instance, &spec).unwrap();
}

fn held_ms(pod: &Pod, instance: &str) -> u64 {
    pod.api().mchannel(instance).unwrap().held_ms
}

#[test]
fn instances_share_a_path_by_weight_and_a_cheat_gains_nothing() {
    let pod = PodBuilder::new()
        .host(HostPlan::new("h1").vms())
        .host(HostPlan::new("h2").vms())
        .host(HostPlan::new("h3").ssd("ssd0", "256M"))
        .start()
        .unwrap();
    let vms = [("vm1", "h1", 1), ("vm2", "h2", 3), ("vm3", "h2", 1)];
    let elements = [("pool".to_owned(), CAPACITY)].into();
    let fabric = Fabric { window_us: 10_000, sample_us: 50_000, elements, ..Fabric::default() };
    pod.api().set_fabric(&fabric).unwrap();
    let loads = vms.map(|(name, host, weight)| {
        let volume = format!("{name}-disk");
        pod.api()
            .create_volume(
                &serde_json::from_value(serde_json::json!({
                    "name": volume, "size": 16 << 20
                }))
                .unwrap(),
            )
            .unwrap();
        let request = CreateInstance {
            name: name.into(),
            host: host.into(),
            volumes: vec![volume],
            ..Default::default()
        };
        let instance = pod.create_instance_as(&request).unwrap();
        share(&pod, name, weight);
        Load::start(&instance.disks[0].socket)
    });
    #[allow(clippy::cast_precision_loss)]
    let capacity = CAPACITY as f64;

    // One wants less than its share: it gets that and never waits. The others divide the rest by weight, over two hosts.
    loads[2].go_on(MODEST);
    until("the rest is divided 1:3", &loads, |rates| {
        let rest = capacity - rates[2];
        rates[2] > 0.0 && near(rates[0], rest / 4.0) && near(rates[1], rest * 3.0 / 4.0)
    });
    let before = held_ms(&pod, "vm3");
    until("it still is", &loads, |rates| near(rates[1], 3.0 * rates[0]));
    assert_eq!(held_ms(&pod, "vm3"), before, "below its share an instance is not held back");
    assert!(held_ms(&pod, "vm1") > 0 && held_ms(&pod, "vm2") > 0);

    // It moves in bursts as long as a window. One of the same weight that is always hungry has no less.
    loads[2].go_on(BURSTS);
    until("bursts gain nothing", &loads, |rates| {
        let sum: f64 = rates.iter().sum();
        rates[2] > 0.0 && rates[2] <= 1.05 * rates[0] && near(rates[1], 3.0 * rates[0]) && near(sum, capacity)
    });

    // What is said of weights and capacity holds at once, for guests that go on.
    loads[2].go_on(HUNGRY);
    pod.podctl(&["mchannel", "set", "vm1", "--weight", "3", "--path", "pool"]).unwrap();
    pod.podctl(&["mchannel", "fabric", "--element", "pool=16M"]).unwrap();
    let capacity = f64::from(16 << 20);
    until("3:3:1 of less", &loads, |rates| {
        let expected = [3.0, 3.0, 1.0].map(|weight| capacity * weight / 7.0);
        rates.iter().zip(expected).all(|(rate, expected)| near(*rate, expected))
    });

    // Throttling shows.
    let shown: Mchannel = pod.api().mchannel("vm3").unwrap();
    assert!(shown.share.is_some_and(|share| share < shown.demand) && shown.run_percent < 100, "{shown:?}");
    assert!(shown.bytes > 0 && shown.messages > 0 && shown.held_ms > 0, "{shown:?}");
    let list = pod.podctl(&["mchannel", "list"]).unwrap();
    assert!(vms.iter().all(|(name, ..)| list.contains(name)), "{list}");
    let top = pod.podctl(&["top", "--once"]).unwrap();
    assert!(top.contains("HELD BACK") && top.contains("vm3"), "{top}");
    let metrics = pod.api().metrics().unwrap();
    for name in ["mchannel_held_seconds_total", "mchannel_share_bytes_per_second", "mchannel_run_ratio"] {
        assert!(metrics.contains(&format!("wadi_{name}{{")), "{name}");
    }

    // Without shares nobody is held back any more.
    for (name, ..) in vms {
        pod.podctl(&["mchannel", "clear", name]).unwrap();
    }
    until("nobody is held back", &loads, |rates| rates.iter().sum::<f64>() > 1.5 * capacity);
    loads.into_iter().for_each(Load::stop);
}
