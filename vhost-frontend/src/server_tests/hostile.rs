//! VMMs that say anything at all, or half of it: a device is there for the next one.

use std::os::fd::RawFd;

use proptest::prelude::*;
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

use super::*;

/// What a hostile VMM passes along.
#[derive(Debug, Clone, Copy)]
enum Attachment {
    Memory,
    SmallFile,
    Event,
    Socket,
}

#[derive(Debug, Clone)]
struct Message {
    request: u32,
    flags: u32,
    /// What the header says; the body is as long as it is.
    size: Option<u32>,
    body: Vec<u64>,
    attachments: Vec<Attachment>,
}

fn word() -> impl Strategy<Value = u64> {
    prop_oneof![
        4 => 0u64..4,
        2 => Just(1 << 32 | 1 << 30 | 1 << 29 | 1 << 28),
        1 => Just(1 << 12 | 1 << 9 | 1 << 15 | 1 << 3 | 1),
        2 => Just(4096),
        2 => Just(PLUGGED),
        2 => Just(PLUGGED_VMM),
        1 => Just(PLUGGED_BYTES),
        1 => Just(64 << 32),
        1 => Just(64 << 32 | 1),
        1 => Just(u64::MAX),
        1 => any::<u64>(),
    ]
}

fn message() -> impl Strategy<Value = Message> {
    let attachment = prop::sample::select(vec![
        Attachment::Memory,
        Attachment::Memory,
        Attachment::SmallFile,
        Attachment::Event,
        Attachment::Event,
        Attachment::Socket,
    ]);
    (
        prop_oneof![9 => 1u32..45, 1 => any::<u32>()],
        prop_oneof![4 => Just(1u32), 4 => Just(9u32), 1 => any::<u32>()],
        prop_oneof![9 => Just(None), 1 => (0u32..5000).prop_map(Some), 1 => any::<u32>().prop_map(Some)],
        prop::collection::vec(word(), 0..6),
        prop::collection::vec(attachment, 0..3),
    )
        .prop_map(|(request, flags, size, body, attachments)| Message {
            request,
            flags,
            size,
            body,
            attachments,
        })
}

/// Messages that a device needs to hear before others make sense.
fn greeting() -> Vec<Message> {
    let plain =
        |request, body: Vec<u64>, attachments| Message { request, flags: 1, size: None, body, attachments };
    vec![
        plain(3, vec![], vec![]),
        plain(16, vec![1 << 12 | 1 << 9 | 1 << 15 | 1 << 3 | 1], vec![]),
        plain(2, vec![1 << 32 | 1 << 30 | 1 << 29], vec![]),
        plain(5, vec![1, PLUGGED, PLUGGED_BYTES, PLUGGED_VMM, 0], vec![Attachment::Memory]),
        plain(8, vec![64 << 32], vec![]),
        plain(9, vec![0, PLUGGED_VMM, PLUGGED_VMM + 8192, PLUGGED_VMM + 4096, 0], vec![]),
    ]
}

fn send(stream: &UnixStream, message: &Message) -> bool {
    let bytes: Vec<u8> = message.body.iter().flat_map(|word| word.to_ne_bytes()).collect();
    let size = message.size.unwrap_or(u32::try_from(bytes.len()).unwrap());
    let mut packet: Vec<u8> =
        [message.request, message.flags, size].into_iter().flat_map(u32::to_ne_bytes).collect();
    packet.extend(bytes);
    let event = EventFd::new(EFD_NONBLOCK).unwrap();
    let (memory, small) = (memory_file(PLUGGED_BYTES), memory_file(100));
    let attachments: Vec<RawFd> = message
        .attachments
        .iter()
        .map(|attachment| match attachment {
            Attachment::Memory => memory.as_raw_fd(),
            Attachment::SmallFile => small.as_raw_fd(),
            Attachment::Event => event.as_raw_fd(),
            Attachment::Socket => stream.as_raw_fd(),
        })
        .collect();
    stream.send_with_fds(&[&packet[..]], &attachments).is_ok()
}

/// Half of a header.
const HALF: [u8; 3] = [1, 0, 0];

/// A VMM that sent these requests, then half of one, and died.
fn died_after(device: &Device, requests: &[Message]) {
    let stream = UnixStream::connect(device.socket()).unwrap();
    stream.set_nonblocking(true).unwrap();
    for message in greeting().iter().chain(requests) {
        assert!(send(&stream, message));
    }
    // The device may have hung up already.
    let _ = rustix::io::write(&stream, &HALF);
}

#[test]
fn a_vmm_that_attaches_its_own_end_of_the_connection_is_seen_to_die() {
    let own_end = |request, body: Vec<u64>, size| Message {
        request,
        flags: 1,
        size,
        body,
        attachments: vec![Attachment::Socket],
    };
    let cases = [
        // A vring's kick, call and error descriptors, the channel for requests to the VMM, and the log.
        own_end(12, vec![0], None),
        own_end(13, vec![0], None),
        own_end(14, vec![0], None),
        own_end(21, vec![], None),
        own_end(6, vec![4096, 0], None),
        // Requests of which not all is sent: the descriptor goes with what is there.
        own_end(12, vec![0], Some(64)),
        own_end(5, vec![1, PLUGGED], Some(40)),
    ];
    for case in cases {
        let device = Device::start();
        died_after(&device, std::slice::from_ref(&case));
        device.eventually(|state| state.disconnected == 1);
        works(&mut connected(&device.socket()));
    }
}

#[test]
fn a_vmm_that_stays_away_with_half_a_request_does_not_keep_its_successor_out() {
    let device = Device::start();
    let stream = UnixStream::connect(device.socket()).unwrap();
    rustix::io::write(&stream, &HALF).unwrap();
    device.eventually(|state| state.disconnected == 1);
    works(&mut connected(&device.socket()));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, max_shrink_iters: 50, ..ProptestConfig::default() })]

    /// Whatever a VMM says, the device is there for the next one.
    #[test]
    fn any_messages_leave_a_device_that_works(greeted: bool, messages in prop::collection::vec(message(), 1..25)) {
        let device = Device::start();
        let stream = UnixStream::connect(device.socket()).unwrap();
        stream.set_nonblocking(true).unwrap();
        let greeting = if greeted { greeting() } else { Vec::new() };
        for message in greeting.iter().chain(&messages) {
            if !send(&stream, message) {
                break;
            }
        }
        // Half of a message, to end with.
        let _ = rustix::io::write(&stream, &HALF);
        let connected = device.state.lock().connected;
        drop(stream);
        works(&mut self::connected(&device.socket()));
        prop_assert!(device.state.lock().connected > connected || connected == 0);
    }
}
