//! VMMs that listen: the device connects, and connects again.

use std::os::unix::net::UnixListener;

use super::*;

/// What its own end leaves behind is the VMM's socket.
fn device() -> Device {
    Device::start_by(Server::connect)
}

/// QEMU replaces what it finds at its path.
fn listen(device: &Device) -> UnixListener {
    let _ = std::fs::remove_file(device.socket());
    UnixListener::bind(device.socket()).unwrap()
}

fn accepted(listener: &UnixListener) -> MockGuest {
    let mut guest = MockGuest::new(1 << 20, QUEUES, 64);
    guest.accept(listener, u64::MAX);
    guest
}

#[test]
fn a_device_finds_the_vmm_that_listens_and_its_successors() {
    let device = device();
    for life in 1..4 {
        let listener = listen(&device);
        let mut guest = accepted(&listener);
        works(&mut guest);
        device.eventually(|state| state.connected == life);
        drop((guest, listener));
        // It leaves its socket behind, as a VMM does that was killed.
        device.eventually(|state| state.disconnected == life);
    }
    std::fs::remove_file(device.socket()).unwrap();
}

#[test]
fn a_vmm_that_listens_meets_the_successor_of_its_device() {
    let directory = tempfile::tempdir().unwrap();
    let vmm = directory.path().join("vmm.sock");
    let listener = UnixListener::bind(&vmm).unwrap();
    let mut guest = MockGuest::new(1 << 20, QUEUES, 64);
    for _ in 0..3 {
        let device = Device::start_by(|_, spec, sink| Server::connect(&vmm, spec, sink));
        // It goes on where its predecessor was.
        guest.accept(&listener, u64::MAX);
        works(&mut guest);
        drop(device);
    }
    assert!(vmm.exists(), "the VMM's socket is the VMM's");
}

#[test]
fn a_device_is_connected_once_its_vmm_asks() {
    let device = device();
    let listener = listen(&device);
    // The kernel has connected it, and nobody has accepted it yet.
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(device.state.lock().connected, 0);
    // One that accepts and says nothing was not there.
    drop(listener);
    let listener = listen(&device);
    works(&mut accepted(&listener));
    device.eventually(|state| (state.connected, state.disconnected) == (1, 1));
    std::fs::remove_file(device.socket()).unwrap();
}

#[test]
fn a_device_that_waits_for_its_vmm_can_be_removed() {
    let device = device();
    drop(device);
    let device = self::device();
    let listener = listen(&device);
    let began = Instant::now();
    listener.set_nonblocking(true).unwrap();
    let stream = loop {
        match listener.accept() {
            Ok((stream, _)) => break stream,
            Err(error) => assert!(began.elapsed() < PATIENCE, "it never connected: {error}"),
        }
    };
    std::fs::remove_file(device.socket()).unwrap();
    drop(device);
    drop(stream);
}

#[test]
fn a_vmm_that_hands_over_its_own_end_is_seen_to_die() {
    use std::io::Write as _;
    use vmm_sys_util::sock_ctrl_msg::ScmSocket as _;
    let device = device();
    let listener = listen(&device);
    let mut stream = {
        let began = Instant::now();
        listener.set_nonblocking(true).unwrap();
        loop {
            match listener.accept() {
                Ok((stream, _)) => break stream,
                Err(error) => assert!(began.elapsed() < PATIENCE, "it never connected: {error}"),
            }
        }
    };
    // SET_OWNER, and then SET_BACKEND_REQ_FD.
    let message =
        |request: u32| [request, 1, 0].iter().flat_map(|word| word.to_ne_bytes()).collect::<Vec<u8>>();
    stream.write_all(&message(3)).unwrap();
    stream.send_with_fd(&message(21)[..], stream.as_raw_fd()).unwrap();
    drop(stream);
    device.eventually(|state| (state.connected, state.disconnected) == (1, 1));
    works(&mut accepted(&listener));
    std::fs::remove_file(device.socket()).unwrap();
}

#[test]
fn a_vmm_whose_guest_has_arrived_and_that_runs_no_ring_is_to_connect_again() {
    let device = Device::start();
    let mut guest = MockGuest::new(1 << 20, QUEUES, 64);
    guest.negotiate(&device.socket(), u64::MAX);
    device.eventually(|state| state.connected == 1);
    device.server.as_ref().unwrap().expect_rings(Duration::from_millis(1));
    device.eventually(|state| state.disconnected == 1);
    // One that comes afterwards was not meant.
    guest.negotiate(&device.socket(), u64::MAX);
    std::thread::sleep(Duration::from_millis(20));
    guest.start_rings();
    works(&mut guest);
    // Nor is one whose rings run.
    device.server.as_ref().unwrap().expect_rings(Duration::from_millis(1));
    std::thread::sleep(Duration::from_millis(20));
    works(&mut guest);
    assert_eq!(device.state.lock().disconnected, 1);
}

#[test]
fn rings_that_were_expected_of_nobody_are_not_expected_of_who_connects_then() {
    let device = Device::start();
    device.server.as_ref().unwrap().expect_rings(Duration::from_millis(1));
    std::thread::sleep(Duration::from_millis(20));
    let mut guest = MockGuest::new(1 << 20, QUEUES, 64);
    guest.negotiate(&device.socket(), u64::MAX);
    guest.start_rings();
    works(&mut guest);
    assert_eq!(device.state.lock().disconnected, 0);
}

#[test]
fn a_device_says_once_that_nobody_came() {
    let soon = |spec| DeviceSpec { vmm_patience: Duration::from_millis(20), ..spec };
    let listening = Device::start_by(|path, spec, sink| Server::listen(path, soon(spec), sink));
    listening.eventually(|state| state.unmet == 1);
    works(&mut connected(&listening.socket()));
    listening.eventually(|state| state.disconnected == 1);
    works(&mut connected(&listening.socket()));
    assert_eq!(listening.state.lock().unmet, 1);

    let calling = Device::start_by(|path, spec, sink| Server::connect(path, soon(spec), sink));
    calling.eventually(|state| state.unmet == 1);
    let listener = listen(&calling);
    works(&mut accepted(&listener));
    assert_eq!(calling.state.lock().unmet, 1);
    drop(listener);
    std::fs::remove_file(calling.socket()).unwrap();
}
