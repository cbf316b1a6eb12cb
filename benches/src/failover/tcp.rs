//! Requests over TCP to memcached in a real guest, and how their latency recovers from a failure.

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use wadi_tests::namespace::Namespace;
use wadi_tests::pod::{GUEST_ADDRESS, PodVm};

/// memcached's.
const PORT: u16 = 11211;
const REQUEST: &[u8] = b"get key\r\n";
const VALUE_BYTES: usize = 64;
/// How long a request may take; far longer than any retransmission here.
const PATIENCE: Duration = Duration::from_secs(5);
/// Where P99 is looked at.
pub(super) const BIN: Duration = Duration::from_millis(20);
/// How long after the failure P99 is shown.
const AFTERMATH: Duration = Duration::from_secs(3);
/// A request is slow that takes more than this many times the P99 before the failure.
const SLOW_FACTOR: u32 = 2;
/// A connection has noticed the failure by then: it is busy all the time.
const NOTICED: Duration = Duration::from_millis(100);
/// The timers that fire because of it have fired by then: the first one after 200 ms, a second one 400 ms later.
const TIMERS_FIRED: Duration = Duration::from_secs(1);

/// One request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Request {
    /// When it was sent, since the round began.
    sent: Duration,
    /// How long it took.
    took: Duration,
    connection: u16,
}

/// What one round saw.
#[derive(Clone, Debug)]
pub(super) struct Round {
    /// All requests, by the time at which they were sent.
    pub(super) requests: Vec<Request>,
    /// When the cable was pulled.
    pub(super) event: Duration,
    /// Retransmission timers that fired because of that, in the guest and in the client.
    pub(super) timers: u64,
}

/// Starts memcached in the guest, with one value in it.
pub(super) fn serve(vm: &PodVm) -> Result<()> {
    let value = "v".repeat(VALUE_BYTES);
    vm.exec(&format!(
        "memcached -d -u root -l 0.0.0.0 -p {PORT} -t 2; \
         (for try in $(seq 100); do \
            printf 'set key 0 0 {VALUE_BYTES}\\r\\n{value}\\r\\nquit\\r\\n' | nc 127.0.0.1 {PORT} | grep -q STORED && exit 0; \
            sleep 0.1; \
          done; exit 1)"
    ))
    .context("memcached does not start in the guest")?;
    Ok(())
}

/// Sends requests over each connection, one at a time, `interval` apart; `event` happens halfway.
pub(super) fn round(
    client: &Namespace,
    vm: &PodVm,
    (connections, length, interval): (u16, Duration, Duration),
    event: impl FnOnce() -> Result<()>,
) -> Result<Round> {
    let streams = client.inside(|| {
        (0..connections)
            .map(|_| {
                let stream = TcpStream::connect((GUEST_ADDRESS, PORT))?;
                stream.set_nodelay(true)?;
                stream.set_read_timeout(Some(PATIENCE))?;
                Ok(stream)
            })
            .collect::<std::io::Result<Vec<_>>>()
    })?;
    let begin = Instant::now();
    let clients: Vec<_> = (0..)
        .zip(streams)
        .map(|(number, stream)| thread::spawn(move || exchange((number, stream), begin, length, interval)))
        .collect();
    thread::sleep(length / 2);
    // Right before, and soon after: in ten seconds a timer fires now and then for another reason.
    let timers_before = timers(client, vm);
    let event_at = begin.elapsed();
    let outcome = event();
    thread::sleep((event_at + TIMERS_FIRED).saturating_sub(begin.elapsed()));
    let timers_after = timers(client, vm);
    let mut requests = Vec::new();
    for client in clients {
        match client.join() {
            Ok(done) => requests.extend(done?),
            Err(_) => bail!("a client panicked"),
        }
    }
    outcome?;
    requests.sort_unstable();
    Ok(Round { requests, event: event_at, timers: timers_after?.saturating_sub(timers_before?) })
}

fn exchange(
    (connection, mut stream): (u16, TcpStream),
    begin: Instant,
    length: Duration,
    interval: Duration,
) -> Result<Vec<Request>> {
    let mut requests = Vec::new();
    let mut response = vec![0; format!("VALUE key 0 {VALUE_BYTES}\r\n\r\nEND\r\n").len() + VALUE_BYTES];
    let mut next = begin;
    while begin.elapsed() < length {
        let sent = begin.elapsed();
        stream.write_all(REQUEST).context("cannot send a request")?;
        stream.read_exact(&mut response).context("no response")?;
        ensure!(
            response.ends_with(b"\r\nEND\r\n"),
            "memcached answers {:?}",
            String::from_utf8_lossy(&response)
        );
        requests.push(Request { sent, took: begin.elapsed().saturating_sub(sent), connection });
        next += interval;
        match next.checked_duration_since(Instant::now()) {
            Some(pause) => thread::sleep(pause),
            None => next = Instant::now(),
        }
    }
    Ok(requests)
}

/// How many retransmission timers have fired in the guest and in the client.
fn timers(client: &Namespace, vm: &PodVm) -> Result<u64> {
    let output = client.command("cat".as_ref()).arg("/proc/net/netstat").output()?;
    let own = timeouts(&String::from_utf8_lossy(&output.stdout)).context("the client counts no timers")?;
    let guests = timeouts(&vm.exec("cat /proc/net/netstat")?).context("the guest counts no timers")?;
    Ok(own + guests)
}

/// Of `/proc/net/netstat`: the timers after which a segment is sent again. For the only one under way, the probe for a lost
/// tail comes first, and as late as the timeout would.
fn timeouts(netstat: &str) -> Option<u64> {
    let mut lines = netstat.lines().filter(|line| line.starts_with("TcpExt:"));
    let (names, values) = (lines.next()?, lines.next()?);
    let value = |wanted: &str| {
        let place = names.split_whitespace().position(|name| name == wanted)?;
        values.split_whitespace().nth(place)?.parse::<u64>().ok()
    };
    Some(value("TCPTimeouts")? + value("TCPLossProbes")?)
}

/// The 99th percentile of what took so long.
pub(super) fn p99(latencies: impl Iterator<Item = Duration>) -> Option<Duration> {
    let mut latencies: Vec<Duration> = latencies.collect();
    latencies.sort_unstable();
    latencies.get((latencies.len() * 99).div_ceil(100).checked_sub(1)?).copied()
}

impl Round {
    /// P99 before the failure.
    pub(super) fn before(&self) -> Option<Duration> {
        p99(self.requests.iter().filter(|it| it.sent < self.event).map(|it| it.took))
    }

    /// P99 in each bin of time from the failure on, by when the requests were sent.
    pub(super) fn after(&self) -> impl Iterator<Item = (Duration, Duration)> + '_ {
        let bins = u32::try_from(AFTERMATH.as_millis() / BIN.as_millis()).unwrap_or(0);
        (0..bins).filter_map(move |bin| {
            let (start, end) = (self.event + BIN * bin, self.event + BIN * (bin + 1));
            let within = self.requests.iter().filter(|it| (start..end).contains(&it.sent));
            Some((BIN * (bin + 1), p99(within.map(|it| it.took))?))
        })
    }

    /// How long after the failure the last connection was served again. A connection has one request under way at a
    /// time, so it is one request that the failure stalls.
    pub(super) fn back_after(&self) -> Option<Duration> {
        let limit = self.before()? * SLOW_FACTOR;
        let stalled = self
            .requests
            .iter()
            .filter(|it| it.took > limit && it.sent + it.took > self.event && it.sent < self.event + NOTICED);
        let mut first = BTreeMap::new();
        for request in stalled {
            first.entry(request.connection).or_insert(request.sent + request.took);
        }
        Some(first.into_values().max().map_or(Duration::ZERO, |answered| answered.saturating_sub(self.event)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timers_are_found_by_name() {
        let text = "TcpExt: SyncookiesSent TCPTimeouts TCPLossProbes\nTcpExt: 1 42 3\nIpExt: A\nIpExt: 1\n";
        assert_eq!(timeouts(text), Some(45));
        assert_eq!(timeouts("nothing"), None);
    }

    #[test]
    fn a_round_is_back_when_its_slow_requests_are_answered() {
        let ms = Duration::from_millis;
        let request = |sent, took, connection| Request { sent: ms(sent), took: ms(took), connection };
        let mut requests: Vec<Request> = (0..2000).map(|at| request(at, 1, 0)).collect();
        // Sent just before the failure and answered 30 ms later; another one much later has other reasons.
        requests[999].took = ms(31);
        requests[1900].took = ms(9);
        requests.drain(1000..1030);
        let mut round = Round { requests, event: ms(1000), timers: 0 };
        assert_eq!(round.before(), Some(ms(1)));
        assert_eq!(round.back_after(), Some(ms(30)));
        round.requests.push(request(1005, 200, 1));
        assert_eq!(round.back_after(), Some(ms(205)), "the last connection counts");
        assert_eq!(round.after().next(), Some((BIN, ms(200))));
        assert_eq!(p99((1..=100).map(ms)), Some(ms(99)));
        assert_eq!(p99(std::iter::empty()), None);
    }
}
