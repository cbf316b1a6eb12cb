//! iperf3 between the guest and the client.

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use serde::Deserialize;

use crate::pod::{CLIENT_ADDRESS, GuestJob, Pod, PodVm};
use crate::process::Daemon;

/// More than anything but a stream moves. A busy machine moves a few times as much in a second.
const STREAM_BYTES: u64 = 1 << 20;

/// How long the server, or a stream, may take to begin: even to load a program takes ten seconds when the disk stalls.
const BEGIN_DEADLINE: Duration = Duration::from_mins(1);

/// How long a stream may take to end, beyond the time for which it runs: what was lost meanwhile is sent again.
const END_DEADLINE: Duration = Duration::from_secs(40);

/// Which way the data goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// From the guest to the client.
    Out,
    /// From the client to the guest.
    In,
}

/// What iperf3 measured.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Report {
    /// Bytes that arrived.
    pub bytes: u64,
    /// Bits per second, at the receiver.
    pub bits_per_second: f64,
    /// Segments sent again.
    pub retransmits: u64,
}

#[derive(Deserialize)]
struct Output {
    #[serde(default)]
    error: Option<String>,
    #[serde(default)]
    end: End,
}

#[derive(Deserialize, Default)]
struct End {
    #[serde(default)]
    sum_sent: Sum,
    #[serde(default)]
    sum_received: Sum,
}

#[derive(Deserialize, Default)]
struct Sum {
    #[serde(default)]
    bytes: u64,
    #[serde(default)]
    bits_per_second: f64,
    #[serde(default)]
    retransmits: u64,
}

/// iperf3's server on the client.
#[derive(Debug)]
pub struct Server {
    daemon: Daemon,
}

impl Server {
    /// Starts it and waits until it listens.
    pub fn start(pod: &Pod) -> Result<Self> {
        let mut command = pod.client_namespace().command(Path::new("iperf3"));
        command.args(["--server", "--forceflush"]);
        let log = pod.directory().join("log").join("iperf3.log");
        let mut daemon = Daemon::start("iperf3", command, &log)?;
        let started = Instant::now();
        while !daemon.said().contains("listening") {
            daemon.check()?;
            if started.elapsed() > BEGIN_DEADLINE {
                bail!("iperf3's server does not listen: {}", daemon.said());
            }
            thread::sleep(Duration::from_millis(5));
        }
        Ok(Self { daemon })
    }

    /// The server's process.
    pub fn daemon(&mut self) -> &mut Daemon {
        &mut self.daemon
    }
}

/// A command line for the guest.
pub fn command(way: Way, seconds: u32) -> String {
    command_to(CLIENT_ADDRESS, way, seconds)
}

/// As [`command`], with another server than the client's.
pub fn command_to(server: &str, way: Way, seconds: u32) -> String {
    let reverse = if way == Way::In { " --reverse" } else { "" };
    format!("iperf3 --client {server} --time {seconds} --json{reverse}")
}

/// Runs it for some seconds.
pub fn run(vm: &PodVm, way: Way, seconds: u32) -> Result<Report> {
    let deadline = Duration::from_secs(u64::from(seconds) + 30);
    Report::parse(&vm.exec_within(&command(way, seconds), deadline)?)
}

/// A stream that runs in a guest while something else goes on.
#[derive(Debug)]
pub struct Stream<'a> {
    job: GuestJob<'a>,
    seconds: u32,
}

impl<'a> Stream<'a> {
    /// Starts it for some seconds and waits until it passes the guest's first NIC.
    pub fn begin(vm: &'a PodVm, way: Way, seconds: u32) -> Result<Self> {
        Self::begin_parallel(vm, way, seconds, 1)
    }

    /// As [`Stream::begin`], with as many connections.
    pub fn begin_parallel(vm: &'a PodVm, way: Way, seconds: u32, connections: u32) -> Result<Self> {
        let passed = || -> Result<u64> {
            let counters = vm.exec("cat /sys/class/net/eth0/statistics/[rt]x_bytes")?;
            counters.split_whitespace().map(|count| Ok(count.parse::<u64>()?)).sum()
        };
        // Counted before it starts: all of a stream may have passed before a busy guest answers again.
        let before = passed()?;
        let job = vm.start(&format!("{} --parallel {connections}", command(way, seconds)))?;
        let began = Instant::now();
        while passed()? < before + STREAM_BYTES {
            if let Some(outcome) = job.outcome() {
                bail!("iperf3 ended before a stream had passed the guest's NIC: {}", outcome.text());
            }
            // Each look is a command in the guest, which takes its time.
            if began.elapsed() > BEGIN_DEADLINE {
                bail!("no stream passes the guest's NIC after {} s", BEGIN_DEADLINE.as_secs());
            }
        }
        Ok(Self { job, seconds })
    }

    /// Waits until it ends; fails if it failed or nothing arrived.
    pub fn finish(self) -> Result<Report> {
        let deadline = Duration::from_secs(u64::from(self.seconds)) + END_DEADLINE;
        Report::parse(&self.job.finish(deadline)?)
    }
}

impl Report {
    /// Reads iperf3's JSON; fails if it reports an error or nothing arrived.
    pub fn parse(output: &str) -> Result<Self> {
        let output: Output = serde_json::from_str(output)
            .with_context(|| format!("iperf3's output is not what it should be: {output}"))?;
        if let Some(error) = output.error {
            bail!("iperf3 failed: {error}");
        }
        if output.end.sum_received.bytes == 0 {
            bail!("iperf3 moved nothing");
        }
        Ok(Self {
            bytes: output.end.sum_received.bytes,
            bits_per_second: output.end.sum_received.bits_per_second,
            retransmits: output.end.sum_sent.retransmits,
        })
    }

    /// Gigabits per second.
    pub fn gigabits(&self) -> f64 {
        self.bits_per_second / 1e9
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_read() {
        let report = Report::parse(
            r#"{"start": {}, "end": {"sum_sent": {"bytes": 12, "bits_per_second": 9.0, "retransmits": 3},
                "sum_received": {"bytes": 11, "bits_per_second": 1.5e9}}}"#,
        )
        .unwrap();
        assert_eq!((report.bytes, report.retransmits), (11, 3));
        assert!((report.gigabits() - 1.5).abs() < 1e-9);
    }

    #[test]
    fn errors_fail() {
        assert!(Report::parse(r#"{"error": "unable to connect"}"#).is_err());
        assert!(Report::parse(r#"{"end": {}}"#).is_err());
    }
}
