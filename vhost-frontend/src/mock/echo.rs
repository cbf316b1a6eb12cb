//! A guest without a VM that sends UDP datagrams back to where they came from.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use virtio_bindings::virtio_net::VIRTIO_NET_F_MRG_RXBUF;
use vm_memory::{Bytes, GuestAddress};

use super::{CONNECT_DEADLINE, MockGuest, Piece};

/// The virtio-net header.
const HEADER_BYTES: usize = 12;
const MEMORY_BYTES: u64 = 8 << 20;
const RING_SIZE: u16 = 512;
const BUFFER_BYTES: u32 = 2048;
/// Buffers to receive into; as many again to send from.
const BUFFERS: u64 = 256;
/// How long it waits at most until it looks whether to stop.
const PATIENCE: Duration = Duration::from_millis(20);
const FEATURES: u64 = 1 << VIRTIO_NET_F_MRG_RXBUF;
const ETHERNET_BYTES: usize = 14;
const IPV4_BYTES: usize = 20;
const UDP: u8 = 17;

/// Echoes until it is dropped.
#[derive(Debug)]
pub struct EchoGuest {
    stop: Arc<AtomicBool>,
    reconnect: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl EchoGuest {
    /// Connects to the socket of a device.
    pub fn start(socket: &Path) -> Self {
        let (stop, reconnect) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let (flag, again, socket) = (Arc::clone(&stop), Arc::clone(&reconnect), socket.to_owned());
        let thread = thread::spawn(move || {
            let mut guest = Echo::connect(&socket);
            while !flag.load(Ordering::Relaxed) {
                if again.load(Ordering::Relaxed) {
                    guest.mock.connect(&socket, FEATURES);
                    again.store(false, Ordering::Relaxed);
                }
                guest.turn();
            }
        });
        Self { stop, reconnect, thread: Some(thread) }
    }

    /// Connects again, to the device's successor, and goes on where it was. Returns once it is connected.
    pub fn reconnect(&self) {
        self.reconnect.store(true, Ordering::Relaxed);
        let began = Instant::now();
        while self.reconnect.load(Ordering::Relaxed) {
            assert!(began.elapsed() < CONNECT_DEADLINE, "the guest does not connect again");
            thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for EchoGuest {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // What it panicked about was printed.
            let _ = thread.join();
        }
    }
}

struct Echo {
    mock: MockGuest,
    /// Where the buffer of a chain that was offered lies.
    receiving: HashMap<u16, u64>,
    sending: HashMap<u16, u64>,
    free: Vec<u64>,
}

impl Echo {
    fn connect(socket: &Path) -> Self {
        let mut mock = MockGuest::new(MEMORY_BYTES, 2, RING_SIZE);
        mock.connect(socket, FEATURES);
        let start = mock.data_start();
        let address = |number: u64| start + number * u64::from(BUFFER_BYTES);
        let free = (BUFFERS..2 * BUFFERS).map(address).collect();
        let mut echo = Self { mock, receiving: HashMap::new(), sending: HashMap::new(), free };
        (0..BUFFERS).for_each(|number| echo.post(address(number)));
        echo
    }

    fn post(&mut self, address: u64) {
        let head = self.mock.offer(0, &[Piece { address, bytes: BUFFER_BYTES, writable: true }], None);
        self.receiving.insert(head, address);
    }

    /// Waits for packets and answers them.
    fn turn(&mut self) {
        let mut next = self.mock.wait_used(0, PATIENCE);
        while let Some(used) = next {
            if let Some(from) = self.receiving.remove(&used.head) {
                self.answer(from, used.written);
                self.post(from);
            }
            next = self.mock.used(0);
        }
        self.reclaim();
    }

    fn reclaim(&mut self) {
        while let Some(used) = self.mock.used(1) {
            self.free.extend(self.sending.remove(&used.head));
        }
    }

    fn answer(&mut self, from: u64, bytes: u32) {
        let mut packet = vec![0; bytes as usize];
        if self.mock.memory().read_slice(&mut packet, GuestAddress(from)).is_err()
            || !turn_round(&mut packet[HEADER_BYTES.min(bytes as usize)..])
        {
            return;
        }
        if self.free.is_empty() {
            self.reclaim();
        }
        // With none free, the packet is lost as it would be in any full queue; it is seen as lost.
        let Some(to) = self.free.pop() else { return };
        packet[..HEADER_BYTES].fill(0);
        if self.mock.memory().write_slice(&packet, GuestAddress(to)).is_ok() {
            let head = self.mock.offer(1, &[Piece { address: to, bytes, writable: false }], None);
            self.sending.insert(head, to);
        }
    }
}

/// Exchanges source and destination of a UDP datagram over IPv4, which leaves its checksums as they are. False for
/// anything else.
fn turn_round(frame: &mut [u8]) -> bool {
    if frame.len() < ETHERNET_BYTES + IPV4_BYTES + 8
        || frame[12..14] != [8, 0]
        || frame[ETHERNET_BYTES] != 0x45
        || frame[ETHERNET_BYTES + 9] != UDP
        || frame[0] & 1 != 0
    {
        return false;
    }
    let (ethernet, rest) = frame.split_at_mut(ETHERNET_BYTES);
    ethernet[..12].rotate_left(6);
    let (network, transport) = rest.split_at_mut(IPV4_BYTES);
    network[12..20].rotate_left(4);
    transport[..4].rotate_left(2);
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_datagram_is_turned_round_and_anything_else_is_not() {
        let mut frame: Vec<u8> = (0..60).collect();
        frame[12..15].copy_from_slice(&[8, 0, 0x45]);
        frame[23] = UDP;
        let before = frame.clone();
        assert!(turn_round(&mut frame));
        assert_eq!((&frame[..6], &frame[6..12]), (&before[6..12], &before[..6]));
        assert_eq!((&frame[26..30], &frame[30..34]), (&before[30..34], &before[26..30]));
        assert_eq!((&frame[34..36], &frame[36..38]), (&before[36..38], &before[34..36]));
        assert_eq!(frame[38..], before[38..]);
        for (at, value) in [(0, 0xff), (12, 0x86), (14, 0x46), (23, 6)] {
            let mut other = before.clone();
            other[at] = value;
            assert!(!turn_round(&mut other), "byte {at}");
        }
        assert!(!turn_round(&mut [0; 20]));
    }
}
