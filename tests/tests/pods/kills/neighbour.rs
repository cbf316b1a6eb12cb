//! Another instance of the same host, whose every packet counts.

use std::collections::BTreeMap;
use std::net::UdpSocket;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use pod_api::Instance;
use vhost_frontend::mock::EchoGuest;
use wadi_tests::pod::{CLIENT_ADDRESS, Pod};

use super::scene::eventually;

/// Its own, and that of its NIC.
const HOSTS: [&str; 2] = ["h1", "h4"];
pub(crate) const ADDRESS: &str = "10.77.0.3";
const PORT: u16 = 9;
/// A datagram that was not answered by then is lost: so long nothing waits anywhere, however busy the machine is.
const LOST: Duration = Duration::from_secs(20);
/// No number of a datagram.
const CALL: u64 = u64::MAX;
/// Longer than anything takes; only a test that fails waits for it.
const PATIENCE: Duration = Duration::from_mins(1);

#[derive(Default)]
struct State {
    stop: AtomicBool,
    pause: AtomicBool,
    resting: AtomicBool,
    answered: AtomicU64,
    failure: Mutex<Option<String>>,
}

/// A guest that answers datagrams, and a client that has one under way at any time.
pub(crate) struct Neighbour {
    guest: EchoGuest,
    state: Arc<State>,
    client: Option<JoinHandle<()>>,
}

impl Neighbour {
    pub(crate) fn start(pod: &Pod, instance: &Instance) -> Self {
        let nic = &instance.nics[0];
        let guest = EchoGuest::start(Path::new(&nic.socket));
        // It answers datagrams and nothing else, so the client is told where it is.
        let client = pod.client_namespace();
        client
            .ip(&["neighbour", "add", ADDRESS, "lladdr", &nic.mac, "dev", "eth0", "nud", "permanent"])
            .unwrap();
        let socket = client
            .inside(|| {
                let socket = UdpSocket::bind((CLIENT_ADDRESS, 0))?;
                socket.connect((ADDRESS, PORT))?;
                socket.set_read_timeout(Some(Duration::from_millis(100)))?;
                Ok(socket)
            })
            .unwrap();
        let state = Arc::new(State::default());
        let shared = Arc::clone(&state);
        let client = thread::spawn(move || converse(&socket, &shared));
        let neighbour = Self { guest, state, client: Some(client) };
        neighbour.check("at first");
        neighbour
    }

    /// It has lost nothing so far, and goes on.
    pub(crate) fn check(&self, when: &str) {
        let before = self.state.answered.load(Ordering::Relaxed);
        let began = Instant::now();
        loop {
            if let Some(failure) = &*self.state.failure.lock().unwrap() {
                panic!("{when}, the neighbour's {failure}");
            }
            if self.state.answered.load(Ordering::Relaxed) >= before + 10 {
                return;
            }
            assert!(began.elapsed() < PATIENCE, "{when}, the neighbour does not go on");
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Has nothing under way until it is told to go on.
    pub(crate) fn rest(&self) {
        self.state.resting.store(false, Ordering::Relaxed);
        self.state.pause.store(true, Ordering::Relaxed);
        let began = Instant::now();
        while !self.state.resting.load(Ordering::Relaxed) {
            if let Some(failure) = &*self.state.failure.lock().unwrap() {
                panic!("the neighbour's {failure}");
            }
            assert!(began.elapsed() < PATIENCE, "the neighbour does not rest");
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Goes on with its device's successor.
    pub(crate) fn go_on(&self) {
        self.guest.reconnect();
        self.state.pause.store(false, Ordering::Relaxed);
    }
}

impl Drop for Neighbour {
    fn drop(&mut self) {
        self.state.stop.store(true, Ordering::Relaxed);
        if let Some(client) = self.client.take() {
            let _ = client.join();
        }
    }
}

/// What was dropped of it so far, by what metrics call it: all that was counted before this is asked. It has to converse.
pub(crate) fn dropped(pod: &Pod) -> BTreeMap<String, String> {
    // Everybody says at once all that it counts. What comes after something has changed was said after it was asked for here, or was
    // on its way; what comes after the next change was counted later.
    for _ in 0..2 {
        let before = counted(pod, "lease_packets");
        for host in HOSTS {
            eventually(&format!("{host} says what it counts"), || {
                let mut now = counted(pod, "lease_packets");
                now.retain(|series, count| series.contains(host) && before.get(series) != Some(count));
                if now.is_empty() { Err(format!("{before:?}")) } else { Ok(()) }
            });
        }
    }
    counted(pod, "lease_drops")
}

/// What is counted of it under this name, but for what has not happened.
fn counted(pod: &Pod, name: &str) -> BTreeMap<String, String> {
    let page =
        eventually("the controller has metrics", || pod.api().metrics().map_err(|error| error.to_string()));
    let lines = page.lines().filter(|line| line.contains(name) && line.contains("instance=\"vm2\""));
    let counts = lines.filter_map(|line| line.rsplit_once(' ')).filter(|(_, count)| *count != "0");
    counts.map(|(series, count)| (series.to_owned(), count.to_owned())).collect()
}

fn converse(socket: &UdpSocket, state: &State) {
    wake(socket, &state.stop);
    for number in 0_u64.. {
        if state.pause.load(Ordering::Relaxed) {
            while state.pause.load(Ordering::Relaxed) && !state.stop.load(Ordering::Relaxed) {
                state.resting.store(true, Ordering::Relaxed);
                thread::sleep(Duration::from_millis(1));
            }
            wake(socket, &state.stop);
        }
        if state.stop.load(Ordering::Relaxed) {
            return;
        }
        if let Err(failure) = exchange(socket, number, &state.stop) {
            *state.failure.lock().unwrap() = Some(failure);
            return;
        }
        state.answered.fetch_add(1, Ordering::Relaxed);
        thread::sleep(Duration::from_millis(1));
    }
}

/// Calls until the guest answers, to which frames may come only in a moment.
fn wake(socket: &UdpSocket, stop: &AtomicBool) {
    let mut answer = [0; 64];
    while !stop.load(Ordering::Relaxed) {
        let _ = socket.send(&CALL.to_le_bytes());
        if matches!(socket.recv(&mut answer), Ok(8)) && answer[..8] == CALL.to_le_bytes() {
            return;
        }
    }
}

fn exchange(socket: &UdpSocket, number: u64, stop: &AtomicBool) -> Result<(), String> {
    let sent = Instant::now();
    socket.send(&number.to_le_bytes()).map_err(|error| format!("client cannot send: {error}"))?;
    let mut answer = [0; 64];
    loop {
        match socket.recv(&mut answer) {
            Ok(8) if answer[..8] == number.to_le_bytes() => return Ok(()),
            // An earlier call was heard, too.
            Ok(8) if answer[..8] == CALL.to_le_bytes() => {}
            Ok(bytes) => return Err(format!("datagram {number} has another answer: {:?}", &answer[..bytes])),
            Err(_) if stop.load(Ordering::Relaxed) => return Ok(()),
            Err(_) if sent.elapsed() > LOST => return Err(format!("datagram {number} is lost")),
            Err(_) => {}
        }
    }
}
