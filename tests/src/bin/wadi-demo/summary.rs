//! What the demo has measured, in one table.

use std::time::Duration;

use wadi_tests::{fio, iperf, probe};

/// Figures and where they come from.
pub(crate) struct Summary {
    pub(crate) host: String,
    pub(crate) nic: String,
    pub(crate) backup: String,
    pub(crate) ssd: String,
    pub(crate) executed_by: String,
    pub(crate) random: fio::Report,
    pub(crate) sequential: fio::Report,
    pub(crate) round_trip: Duration,
    pub(crate) sent: iperf::Report,
    pub(crate) received: iperf::Report,
    pub(crate) failover: probe::Loss,
}

impl Summary {
    /// What, through which device, result.
    fn rows(&self) -> Vec<[String; 3]> {
        let disk = format!("vda = {}", self.ssd);
        let net = format!("eth0 = {}", self.nic);
        let both = |report: &fio::Report| format!("write {}; verified {}", report.write, report.read);
        vec![
            ["VM".into(), format!("on {}", self.host), format!("Debian kernel, {}", self.executed_by)],
            ["4 KiB random, CRC checked".into(), disk.clone(), both(&self.random)],
            ["128 KiB sequential, CRC checked".into(), disk.clone(), both(&self.sequential)],
            ["mkfs, write, unmount, fsck".into(), disk, "clean, files unchanged".into()],
            ["ping from the client".into(), net.clone(), format!("{:.2} ms", milliseconds(self.round_trip))],
            ["TCP guest → client".into(), net.clone(), format!("{:.2} Gbit/s", self.sent.gigabits())],
            ["TCP client → guest".into(), net.clone(), format!("{:.2} Gbit/s", self.received.gigabits())],
            [
                "cable pulled under traffic".into(),
                format!("{} → {}", self.nic, self.backup),
                format!(
                    "packets lost for {:.0} ms ({} of {} at 1 kHz)",
                    milliseconds(self.failover.longest_gap),
                    self.failover.lost,
                    self.failover.sent
                ),
            ],
        ]
    }

    /// The table, ready to print.
    pub(crate) fn table(&self) -> String {
        let rows = self.rows();
        let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
        let widths = [width(0), width(1), width(2)];
        let rule = format!(" {}\n", "─".repeat(widths.iter().sum::<usize>() + 4));
        let mut table = rule.clone();
        for [what, device, result] in &rows {
            table.push(' ');
            for (cell, width) in [(what, widths[0]), (device, widths[1])] {
                table.push_str(cell);
                table.extend(std::iter::repeat_n(' ', width - cell.chars().count() + 2));
            }
            table.push_str(result);
            table.push('\n');
        }
        table + &rule
    }
}

pub(crate) fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
