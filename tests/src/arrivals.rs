//! The numbered frames of guests at work ([`Load::nic`](crate::loads::Load::nic)), as they come out behind the switch: all of them, once each and in order.

use std::collections::BTreeMap;
use std::num::NonZero;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Result, bail};
use rustix::io::Errno;
use rustix::net::{AddressFamily, Protocol, RecvFlags, SocketFlags, SocketType, recv, socket_with, sockopt};

use crate::loads::{FRAME_NUMBER_AT, FRAME_TYPE};
use crate::namespace::Namespace;

/// What the kernel keeps for a listener that does not get to run: seconds of what a test lets guests send.
const BUFFER_BYTES: usize = 64 << 20;
/// Longer than the last frames take; only a test that fails waits for it.
const PATIENCE: Duration = Duration::from_secs(10);

/// Hears the frames that reach the interfaces of a namespace, which is behind a switch that knows nobody with their destination.
#[derive(Debug)]
pub struct Arrivals {
    heard: Arc<Heard>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

/// What came so far, by the addresses of senders, and word of more.
#[derive(Debug, Default)]
struct Heard {
    /// The number that is to come first.
    first: u64,
    flows: Mutex<BTreeMap<[u8; 6], Flow>>,
    more: Condvar,
}

/// What came from one guest.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Flow {
    /// The number that is to come next.
    next: u64,
    /// What was out of place first: the number that was to come, and the one that came.
    misplaced: Option<(u64, u64)>,
}

impl Flow {
    fn from(next: u64) -> Self {
        Self { next, misplaced: None }
    }

    fn hear(&mut self, number: u64) {
        if number != self.next {
            self.misplaced.get_or_insert((self.next, number));
        }
        self.next = number + 1;
    }
}

impl Arrivals {
    /// Hears those from now on.
    pub fn listen(namespace: &Namespace) -> Result<Self> {
        Self::listen_from(namespace, 0)
    }

    /// The same where guests have sent frames before: this is the number that is to come next.
    pub fn listen_from(namespace: &Namespace, first: u64) -> Result<Self> {
        let protocol = NonZero::new(u32::from(FRAME_TYPE.to_be())).map(Protocol::from_raw);
        let socket = namespace.inside(move || {
            let socket = socket_with(AddressFamily::PACKET, SocketType::RAW, SocketFlags::CLOEXEC, protocol)?;
            sockopt::set_socket_recv_buffer_size_force(&socket, BUFFER_BYTES)?;
            sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, Some(Duration::from_millis(50)))?;
            Ok(socket)
        })?;
        let heard = Arc::new(Heard { first, ..Heard::default() });
        let stop = Arc::new(AtomicBool::new(false));
        let (noted, stopped) = (Arc::clone(&heard), Arc::clone(&stop));
        let thread = Some(thread::spawn(move || hear(&socket, &noted, &stopped)));
        Ok(Self { heard, stop, thread })
    }

    /// Waits until the last frame below number `count` of a guest has come, and fails unless all the others came before it, once each and in
    /// order.
    pub fn expect(&self, mac: [u8; 6], count: u64) -> Result<()> {
        let first = self.heard.first;
        let flow = |flows: &BTreeMap<_, Flow>| flows.get(&mac).cloned().unwrap_or(Flow::from(first));
        let is_awaited = |flows: &mut BTreeMap<_, Flow>| {
            let flow = flow(flows);
            flow.misplaced.is_none() && flow.next != count
        };
        // A flow is changed in whole, whoever panicked; here and below.
        let flows = self.heard.flows.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.heard.more.wait_timeout_while(flows, PATIENCE, is_awaited);
        let flow = flow(&waited.unwrap_or_else(PoisonError::into_inner).0);
        match flow.misplaced {
            Some((expected, came)) => {
                bail!("of the frames of {mac:02x?}, number {came} came where number {expected} was to come")
            }
            None if flow.next == count => Ok(()),
            None => bail!("of the frames of {mac:02x?}, number {} of {count} never came", flow.next),
        }
    }
}

impl Drop for Arrivals {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn hear(socket: &OwnedFd, heard: &Heard, stop: &AtomicBool) {
    // The rest of a frame is cut off.
    let mut front = [0; FRAME_NUMBER_AT + 8];
    while !stop.load(Ordering::Relaxed) {
        match recv(socket, &mut front[..], RecvFlags::empty()) {
            Ok((bytes, _)) if bytes == front.len() => {
                let mac = std::array::from_fn(|at| front[6 + at]);
                let number = u64::from_le_bytes(std::array::from_fn(|at| front[FRAME_NUMBER_AT + at]));
                let mut flows = heard.flows.lock().unwrap_or_else(PoisonError::into_inner);
                flows.entry(mac).or_insert(Flow::from(heard.first)).hear(number);
                drop(flows);
                heard.more.notify_all();
            }
            Ok(_) | Err(Errno::AGAIN | Errno::INTR) => {}
            // Whoever waits for frames sees that there are none.
            Err(_) => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_lost_doubled_or_out_of_order_is_seen() {
        let misplaced = |numbers: &[u64]| {
            let mut flow = Flow::from(0);
            for number in numbers {
                flow.hear(*number);
            }
            flow.misplaced
        };
        assert_eq!(misplaced(&[0, 1, 2, 3]), None);
        assert_eq!(misplaced(&[0, 2]), Some((1, 2)));
        assert_eq!(misplaced(&[0, 1, 1, 2]), Some((2, 1)));
        assert_eq!(misplaced(&[0, 2, 1, 3]), Some((1, 2)));
        assert_eq!(misplaced(&[1]), Some((0, 1)));
    }
}
