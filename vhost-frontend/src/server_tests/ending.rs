//! Devices that end in order, and what their successors find.

use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};

use super::*;

/// Whether a VMM can see that its connection has ended. Who is about to end it gets the time to do so.
pub(super) fn has_ended(vmm: &UnixStream) -> bool {
    std::thread::sleep(Duration::from_millis(20));
    let mut byte = [0_u8; 1];
    !matches!(recv(vmm, &mut byte[..], RecvFlags::PEEK | RecvFlags::DONTWAIT), Err(Errno::AGAIN))
}

#[test]
fn a_vmm_sees_the_end_when_nothing_moves_any_more() {
    let mut device = Device::start();
    let mut guest = connected(&device.socket());
    works(&mut guest);
    device.state.lock().vmm = Some(guest.stream());
    device.server = None;
    let state = device.state.lock();
    assert_eq!((state.disconnected, state.stopped_late), (1, 0));
    assert!(has_ended(state.vmm.as_ref().unwrap()));
}

#[test]
fn a_vmm_that_reads_no_answers_does_not_keep_a_device_from_ending() {
    let mut device = Device::start();
    let mut guest = connected(&device.socket());
    works(&mut guest);
    // More than a socket holds, of requests of 12 bytes that are answered by 20.
    let stream = guest.stream();
    stream.set_nonblocking(true).unwrap();
    let request: Vec<u8> = [1_u32, 1, 0].into_iter().flat_map(u32::to_ne_bytes).collect();
    let mut silent_since = Instant::now();
    while silent_since.elapsed() < Duration::from_millis(100) {
        if rustix::io::write(&stream, &request).is_ok() {
            silent_since = Instant::now();
        }
    }
    device.server = None;
    assert_eq!(device.state.lock().disconnected, 1);
}

#[test]
fn a_device_that_completes_in_order_goes_on_where_it_was_whatever_the_vmm_says() {
    let device = Device::start_by(|path, spec, sink| {
        Server::listen(path, DeviceSpec { in_order: true, ..spec }, sink)
    });
    let mut guest = connected(&device.socket());
    works(&mut guest);
    let base = u16::try_from(guest.stop_ring(0)).unwrap();
    for wrong in [base - 1, base + 1, 0] {
        guest.frontend().set_vring_base(0, wrong).unwrap();
        guest.frontend().set_vring_kick(0, &EventFd::new(EFD_NONBLOCK).unwrap()).unwrap();
        for _ in 0..3 {
            // Each of them is given back once, and nothing else.
            let address = guest.data_start();
            assert_eq!(request(&mut guest, 0, address), 512);
        }
        assert_eq!(guest.wait_used(0, Duration::from_millis(20)), None);
        guest.stop_ring(0);
    }
}
