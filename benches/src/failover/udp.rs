//! UDP round trips at a fixed rate, and what a failure costs them.

use std::io;
use std::net::UdpSocket;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use wadi_tests::namespace::Namespace;
use wadi_tests::pod::{CLIENT_ADDRESS, GUEST_ADDRESS};

const PORT: u16 = 9;
const PAYLOAD_BYTES: usize = 64;
/// How long after the last datagram an answer still counts.
const LAST_ANSWERS: Duration = Duration::from_millis(500);

/// What one round saw. Times are since its begin.
#[derive(Clone, Debug, Default)]
pub(super) struct Round {
    /// Datagrams that were sent.
    pub(super) sent: usize,
    /// Of them, those that did not come back.
    pub(super) lost: usize,
    /// Answers that came twice.
    pub(super) doubled: usize,
    /// Answers that came behind one that was sent later.
    pub(super) reordered: usize,
    /// The longest time from a datagram that was lost to the next one that was not.
    pub(super) interruption: Duration,
    /// When that next one was sent.
    pub(super) recovered: Option<Instant>,
    /// How long after the cable was pulled its host could know that, if that was watched.
    pub(super) visible_after: Option<Duration>,
    /// How long the interruption lasted from then on.
    pub(super) since_visible: Option<Duration>,
    /// How much later than asked for the sender was woken, at worst: what the machine alone costs.
    pub(super) held_up: Duration,
    /// The median round trip.
    pub(super) median_round_trip: Duration,
    /// The longest one.
    pub(super) longest_round_trip: Duration,
}

struct Sent {
    at: Vec<Instant>,
    held_up: Duration,
}

/// Sends for `length` from the client's namespace, a datagram every `interval`; `event` happens halfway.
pub(super) fn round(
    client: &Namespace,
    length: Duration,
    interval: Duration,
    event: impl FnOnce() -> Result<()>,
) -> Result<Round> {
    let socket = client.inside(|| {
        let socket = UdpSocket::bind((CLIENT_ADDRESS, 0))?;
        socket.connect((GUEST_ADDRESS, PORT))?;
        socket.set_read_timeout(Some(Duration::from_millis(50)))?;
        Ok(socket)
    })?;
    let socket = Arc::new(socket);
    let done = Arc::new(AtomicBool::new(false));
    let receiver = {
        let (socket, done) = (Arc::clone(&socket), Arc::clone(&done));
        thread::spawn(move || receive(&socket, &done))
    };
    let sender = thread::spawn(move || send(&socket, length, interval));
    thread::sleep(length / 2);
    let outcome = event();
    let sent = sender.join();
    thread::sleep(LAST_ANSWERS);
    done.store(true, Ordering::Relaxed);
    let answers = receiver.join();
    outcome?;
    let (Ok(sent), Ok(answers)) = (sent, answers) else { bail!("a thread of the client panicked") };
    Round::of(&sent, &answers).context("nothing came back at all")
}

fn send(socket: &UdpSocket, length: Duration, interval: Duration) -> Sent {
    // Its sleeps are to end when they say.
    let _ = rustix::thread::set_current_timer_slack(Some(std::num::NonZero::<u64>::MIN));
    let begin = Instant::now();
    let mut sent = Sent { at: Vec::new(), held_up: Duration::ZERO };
    let mut next = begin;
    let mut payload = [0; PAYLOAD_BYTES];
    while begin.elapsed() < length {
        let number = u32::try_from(sent.at.len()).unwrap_or(u32::MAX);
        payload[..4].copy_from_slice(&number.to_le_bytes());
        sent.at.push(Instant::now());
        // One that cannot be sent is lost like any other.
        let _ = socket.send(&payload);
        next += interval;
        match next.checked_duration_since(Instant::now()) {
            Some(pause) => thread::sleep(pause),
            None => next = Instant::now(),
        }
        sent.held_up = sent.held_up.max(Instant::now().saturating_duration_since(next));
    }
    sent
}

fn receive(socket: &UdpSocket, done: &AtomicBool) -> Vec<(u32, Instant)> {
    let mut answers = Vec::new();
    let mut payload = [0; PAYLOAD_BYTES];
    while !done.load(Ordering::Relaxed) {
        match socket.recv(&mut payload) {
            Ok(bytes) if bytes >= 4 => {
                let number = u32::from_le_bytes([payload[0], payload[1], payload[2], payload[3]]);
                answers.push((number, Instant::now()));
            }
            Ok(_) => {}
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {}
            // Refused, while the cable is out.
            Err(_) => thread::sleep(Duration::from_micros(100)),
        }
    }
    answers
}

impl Round {
    fn of(sent: &Sent, answers: &[(u32, Instant)]) -> Option<Self> {
        let mut round = Self { sent: sent.at.len(), held_up: sent.held_up, ..Self::default() };
        let mut round_trips: Vec<Option<Duration>> = vec![None; sent.at.len()];
        let mut newest = None;
        for (number, at) in answers {
            let Some(place) = round_trips.get_mut(*number as usize) else { continue };
            if place.is_some() {
                round.doubled += 1;
                continue;
            }
            *place = Some(at.saturating_duration_since(sent.at[*number as usize]));
            round.reordered += usize::from(newest.is_some_and(|newest| *number < newest));
            newest = newest.max(Some(*number));
        }
        let mut lost_since = None;
        for (at, round_trip) in sent.at.iter().zip(&round_trips) {
            if round_trip.is_none() {
                round.lost += 1;
                lost_since.get_or_insert(*at);
            } else if let Some(since) = lost_since.take() {
                round.interrupted(since, *at);
            }
        }
        if let (Some(since), Some(last)) = (lost_since, sent.at.last()) {
            round.interrupted(since, *last);
        }
        let mut answered: Vec<Duration> = round_trips.into_iter().flatten().collect();
        answered.sort_unstable();
        round.median_round_trip = *answered.get(answered.len() / 2)?;
        round.longest_round_trip = *answered.last()?;
        Some(round)
    }

    fn interrupted(&mut self, since: Instant, until: Instant) {
        let length = until.saturating_duration_since(since);
        if length > self.interruption {
            (self.interruption, self.recovered) = (length, Some(until));
        }
    }

    /// The cable was pulled then, and its host could know it from there on.
    pub(super) fn became_visible(&mut self, pulled: Instant, visible: Instant) {
        self.visible_after = Some(visible.saturating_duration_since(pulled));
        let until = self.recovered.map_or(Duration::ZERO, |at| at.saturating_duration_since(visible));
        self.since_visible = Some(until);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn losses_interruptions_doubles_and_disorder_are_told_apart() {
        let begin = Instant::now();
        let ms = Duration::from_millis;
        let sent = Sent { at: (0..100).map(|number| begin + ms(number)).collect(), held_up: ms(3) };
        let answer = |number: u32| (number, begin + ms(u64::from(number)) + Duration::from_micros(300));
        let mut answers: Vec<_> = (0..100).filter(|number| !(40..60).contains(number)).map(answer).collect();
        answers.swap(5, 6);
        answers.push(answer(7));
        let round = Round::of(&sent, &answers).expect("answers");
        assert_eq!((round.sent, round.lost, round.doubled, round.reordered), (100, 20, 1, 1));
        assert_eq!((round.interruption, round.held_up), (ms(20), ms(3)));
        let mut seen = round.clone();
        seen.became_visible(begin + ms(39), begin + ms(45));
        assert_eq!((seen.visible_after, seen.since_visible), (Some(ms(6)), Some(ms(15))));
        seen.became_visible(begin + ms(39), begin + ms(70));
        assert_eq!(seen.since_visible, Some(ms(0)), "it was over before its host could know");
        assert_eq!(round.median_round_trip, Duration::from_micros(300));
        let none = Round::of(&sent, &answers[..50]).expect("answers");
        assert_eq!(none.interruption, ms(29), "from the 70th up to the end");
        assert!(Round::of(&sent, &[]).is_none());
    }
}
