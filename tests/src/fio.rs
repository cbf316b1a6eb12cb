//! fio in the guest: jobs with verification, and what they measured.

use std::fmt;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use serde::Deserialize;

use crate::pod::PodVm;

/// A job's pattern.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pattern {
    /// 4 KiB at random places.
    Random4K,
    /// 128 KiB one after another.
    Sequential128K,
}

impl Pattern {
    fn options(self) -> &'static str {
        match self {
            Self::Random4K => "--rw=randwrite --bs=4k --iodepth=16",
            Self::Sequential128K => "--rw=write --bs=128k --iodepth=4",
        }
    }
}

/// What a job writes and reads back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Job {
    /// The guest's block device, such as `vda`.
    pub disk: String,
    /// Where on it, in MiB.
    pub offset_mib: u32,
    /// How much, in MiB.
    pub size_mib: u32,
    /// In which order.
    pub pattern: Pattern,
    /// A flush after so many writes; 0 for none.
    pub flush_every: u32,
}

/// What one direction of a job did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Deserialize)]
pub struct Direction {
    /// Requests.
    pub total_ios: u64,
    /// Bytes.
    pub io_bytes: u64,
    /// Requests per second.
    pub iops: f64,
    /// Bytes per second.
    pub bw_bytes: u64,
}

/// What a job did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Deserialize)]
pub struct Report {
    /// The first error, 0 for none.
    pub error: i32,
    /// Reads.
    pub read: Direction,
    /// Writes.
    pub write: Direction,
}

#[derive(Deserialize)]
struct Output {
    jobs: Vec<Report>,
}

impl Job {
    /// A command line for the guest that writes everything, reads it back and compares checksums and places.
    pub fn command(&self) -> String {
        let mut line = format!(
            "fio --name=verify --filename=/dev/{} --direct=1 --ioengine=libaio --offset={}m --size={}m {} \
             --verify=crc32c --verify_fatal=1 --do_verify=1 --randrepeat=0 --output-format=json",
            self.disk,
            self.offset_mib,
            self.size_mib,
            self.pattern.options()
        );
        if self.flush_every > 0 {
            line.push_str(" --fsync=");
            line.push_str(&self.flush_every.to_string());
        }
        line
    }

    /// The same of so many processes, each with as much of the disk for itself, and with a vCPU and so, where the disk has as many, a queue.
    pub fn command_of(&self, processes: u16) -> String {
        format!(
            "{} --numjobs={processes} --offset_increment={}m --group_reporting --cpus_allowed=0-{} \
             --cpus_allowed_policy=split",
            self.command(),
            self.size_mib,
            processes.saturating_sub(1)
        )
    }

    /// Runs it; fails if a single byte is wrong.
    pub fn run(&self, vm: &PodVm, deadline: Duration) -> Result<Report> {
        Report::parse(&vm.exec_within(&self.command(), deadline)?)
    }
}

impl Report {
    /// Reads fio's JSON; fails if fio reports an error, or verified less than it wrote.
    pub fn parse(output: &str) -> Result<Self> {
        // fio says things before the JSON at times.
        let start = output.find('{').context("fio printed no JSON")?;
        let output: Output = serde_json::from_str(&output[start..])
            .with_context(|| format!("fio's output is not what it should be: {output}"))?;
        let [report] = output.jobs[..] else { bail!("fio ran {} jobs instead of one", output.jobs.len()) };
        if report.error != 0 {
            bail!("fio failed with error {}", report.error);
        }
        if report.write.total_ios == 0 || report.read.io_bytes < report.write.io_bytes {
            bail!("fio read back {} of {} bytes", report.read.io_bytes, report.write.io_bytes);
        }
        Ok(report)
    }
}

impl fmt::Display for Direction {
    #[allow(clippy::cast_precision_loss)] // a figure for people
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.0} IOPS, {:.0} MB/s", self.iops, self.bw_bytes as f64 / 1e6)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = r#"note: something
{"jobs": [{"jobname": "verify", "error": 0,
  "read": {"total_ios": 4, "io_bytes": 16384, "iops": 2.5, "bw_bytes": 9000, "lat": {}},
  "write": {"total_ios": 4, "io_bytes": 16384, "iops": 1.5, "bw_bytes": 8000}}]}"#;

    #[test]
    fn a_good_run_is_read() {
        let report = Report::parse(GOOD).unwrap();
        assert_eq!(report.read.total_ios, 4);
        assert_eq!(report.write.bw_bytes, 8000);
    }

    #[test]
    fn errors_and_missing_reads_fail() {
        assert!(Report::parse(&GOOD.replace("\"error\": 0", "\"error\": 84")).is_err());
        assert!(Report::parse(&GOOD.replacen("16384", "4096", 1)).is_err());
        assert!(Report::parse("fio: cannot open").is_err());
    }
}
