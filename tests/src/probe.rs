//! How long packets are lost: echo requests at a steady rate, and which of them come back.

use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, bail};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketType, connect, ipproto, recv, send, socket, sockopt,
};

use crate::namespace::Namespace;

const ECHO_REQUEST: u8 = 8;
const ECHO_REPLY: u8 = 0;
/// The IPv4 header that a raw socket leaves before the message; the kernel sends none with options here.
const IP_HEADER_BYTES: usize = 20;

/// An echo request goes out this often.
pub const INTERVAL: Duration = Duration::from_millis(1);

/// How long after the last request an answer still counts.
const PATIENCE: Duration = Duration::from_secs(1);

/// Sends an echo request every millisecond until it is stopped.
#[derive(Debug)]
pub struct Probe {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Vec<Echo>>,
}

/// One echo request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Echo {
    /// When it went out, since the first one did.
    pub sent: Duration,
    /// How long its answer took, if one came.
    pub round_trip: Option<Duration>,
}

/// What a [`Probe`] saw.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Loss {
    /// Requests sent.
    pub sent: usize,
    /// Requests that were not answered.
    pub lost: usize,
    /// The longest time between two answered requests, one interval off: how long packets were lost.
    pub longest_gap: Duration,
    /// The median round trip of those that were answered.
    pub median_round_trip: Duration,
}

impl Probe {
    /// Starts in `namespace`, towards the IPv4 address `to`.
    pub fn start(namespace: &Namespace, to: &str) -> Result<Self> {
        let to = format!("{to}:0").parse().map_err(|_| anyhow!("{to} is no IPv4 address"))?;
        let socket = namespace.inside(move || {
            let socket = socket(AddressFamily::INET, SocketType::RAW, Some(ipproto::ICMP))?;
            let to: std::net::SocketAddrV4 = to;
            connect(&socket, &to)?;
            sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, Some(Duration::from_millis(50)))?;
            Ok(socket)
        })?;
        let stop = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&stop);
        Ok(Self { stop, thread: thread::spawn(move || run(&Arc::new(socket), &flag)) })
    }

    /// Stops and says what was lost.
    pub fn finish(self) -> Result<Loss> {
        Loss::of(&self.echoes()?)
    }

    /// Stops and says what became of each request.
    pub fn echoes(self) -> Result<Vec<Echo>> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().map_err(|_| anyhow!("the probe panicked"))
    }
}

impl Loss {
    /// Of requests in the order in which they were sent; an error if none was answered.
    pub fn of(echoes: &[Echo]) -> Result<Self> {
        let mut round_trips: Vec<Duration> = echoes.iter().filter_map(|echo| echo.round_trip).collect();
        round_trips.sort();
        let Some(median) = round_trips.get(round_trips.len() / 2) else {
            bail!("none of {} echo requests was answered", echoes.len())
        };
        let answered: Vec<Duration> =
            echoes.iter().filter(|echo| echo.round_trip.is_some()).map(|echo| echo.sent).collect();
        // Before the first answer and after the last one packets may be lost, too.
        let ends = [echoes.first().map(|echo| echo.sent), echoes.last().map(|echo| echo.sent + INTERVAL)];
        let mut times = answered.clone();
        times.extend(ends.into_iter().flatten());
        times.sort();
        let gap = times.windows(2).map(|pair| pair[1].saturating_sub(pair[0])).max().unwrap_or_default();
        Ok(Self {
            sent: echoes.len(),
            lost: echoes.len() - round_trips.len(),
            longest_gap: gap.saturating_sub(INTERVAL),
            median_round_trip: *median,
        })
    }
}

fn run(socket: &Arc<OwnedFd>, stop: &Arc<AtomicBool>) -> Vec<Echo> {
    // Unlikely to be another prober's on this machine.
    let identity = (std::process::id() & 0xffff) as u16;
    let begun = Instant::now();
    let done = Arc::new(AtomicBool::new(false));
    let receiver = {
        let (socket, done) = (Arc::clone(socket), Arc::clone(&done));
        thread::spawn(move || receive(&socket, identity, begun, &done))
    };
    let mut sent = Vec::new();
    let mut next = begun;
    while !stop.load(Ordering::Relaxed) {
        let number = u32::try_from(sent.len()).unwrap_or(u32::MAX);
        sent.push(begun.elapsed());
        // A full queue or a route that is gone for a moment is a lost packet like any other.
        let _ = send(socket.as_fd(), &request(identity, number), SendFlags::empty());
        next += INTERVAL;
        match next.checked_duration_since(Instant::now()) {
            Some(pause) => thread::sleep(pause),
            // This thread was held up: what it did not send, it cannot have lost.
            None => next = Instant::now(),
        }
    }
    thread::sleep(PATIENCE.min(begun.elapsed()));
    done.store(true, Ordering::Relaxed);
    let answers = receiver.join().unwrap_or_default();
    let mut echoes: Vec<Echo> = sent.iter().map(|sent| Echo { sent: *sent, round_trip: None }).collect();
    for (number, at) in answers {
        if let Some(echo) = echoes.get_mut(number as usize)
            && echo.round_trip.is_none()
        {
            echo.round_trip = Some(at.saturating_sub(echo.sent));
        }
    }
    echoes
}

fn receive(socket: &OwnedFd, identity: u16, begun: Instant, done: &AtomicBool) -> Vec<(u32, Duration)> {
    let mut answers = Vec::new();
    let mut buffer = [0_u8; 256];
    while !done.load(Ordering::Relaxed) {
        // Silence and refusals are what this is here to see.
        let Ok((bytes, _)) = recv(socket.as_fd(), &mut buffer[..], RecvFlags::empty()) else { continue };
        if let Some(number) = buffer.get(IP_HEADER_BYTES..bytes).and_then(|message| answer(identity, message))
        {
            answers.push((number, begun.elapsed()));
        }
    }
    answers
}

/// An echo request whose payload is its number.
fn request(identity: u16, number: u32) -> [u8; 12] {
    let mut message = [0; 12];
    message[0] = ECHO_REQUEST;
    message[4..6].copy_from_slice(&identity.to_be_bytes());
    message[6..8].copy_from_slice(&number.to_be_bytes()[2..]);
    message[8..12].copy_from_slice(&number.to_be_bytes());
    let sum = checksum(&message);
    message[2..4].copy_from_slice(&sum.to_be_bytes());
    message
}

/// The number in an answer to one of our requests.
fn answer(identity: u16, message: &[u8]) -> Option<u32> {
    let ours = message.first() == Some(&ECHO_REPLY) && message.get(4..6)? == identity.to_be_bytes();
    if ours { Some(u32::from_be_bytes(message.get(8..12)?.try_into().ok()?)) } else { None }
}

/// The checksum of RFC 1071.
fn checksum(message: &[u8]) -> u16 {
    let mut sum: u32 = message
        .chunks(2)
        .map(|pair| u32::from(u16::from_be_bytes([pair[0], pair.get(1).copied().unwrap_or(0)])))
        .sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !u16::try_from(sum).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn echo(sent_ms: u64, answered: bool) -> Echo {
        Echo {
            sent: Duration::from_millis(sent_ms),
            round_trip: answered.then_some(Duration::from_micros(300)),
        }
    }

    #[test]
    fn a_gap_is_as_long_as_packets_were_lost() {
        let echoes: Vec<Echo> = (0..100).map(|ms| echo(ms, !(40..60).contains(&ms))).collect();
        let loss = Loss::of(&echoes).unwrap();
        assert_eq!(loss.lost, 20);
        assert_eq!(loss.longest_gap, Duration::from_millis(20));
    }

    #[test]
    fn loss_up_to_the_end_counts() {
        let echoes: Vec<Echo> = (0..100).map(|ms| echo(ms, ms < 50)).collect();
        assert_eq!(Loss::of(&echoes).unwrap().longest_gap, Duration::from_millis(50));
    }

    #[test]
    fn nothing_lost_is_no_gap() {
        let echoes: Vec<Echo> = (0..100).map(|ms| echo(ms, true)).collect();
        let loss = Loss::of(&echoes).unwrap();
        assert_eq!((loss.lost, loss.longest_gap), (0, Duration::ZERO));
    }

    #[test]
    fn an_answer_is_told_from_a_request_and_from_others() {
        let mut message = request(7, 66000);
        assert_eq!(checksum(&message), 0);
        assert_eq!(answer(7, &message), None);
        message[0] = ECHO_REPLY;
        assert_eq!(answer(7, &message), Some(66000));
        assert_eq!(answer(8, &message), None);
    }
}
