//! `vmm list`, `vmm stop` and `vmm attach`: machines that run on this host.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, bail};
use clap::Args;
use serde_json::json;
use vmm::{Origin, Registry, Stopped, VcpuThread};

use crate::print;

#[derive(Args)]
pub(crate) struct List {
    /// Where machines are noted.
    #[arg(long, default_value = "/run/wadi/vm")]
    directory: PathBuf,
    /// For programs.
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
pub(crate) struct Stop {
    /// The machine, as `vmm list` names it.
    name: String,
    /// For how many seconds the guest may shut down after its power button was pressed; 0 does not press it.
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    grace: u64,
    /// Where machines are noted.
    #[arg(long, default_value = "/run/wadi/vm")]
    directory: PathBuf,
}

#[derive(Args)]
pub(crate) struct Attach {
    /// The process id of a QEMU with a monitor socket (`-qmp unix:…`).
    #[arg(long, required_unless_present = "domain", conflicts_with = "domain")]
    pid: Option<u32>,
    /// A libvirt domain that runs on this host.
    #[arg(long)]
    domain: Option<String>,
    /// libvirt's URI, such as qemu:///system.
    #[arg(long, value_name = "URI", requires = "domain", conflicts_with = "pid")]
    connect: Option<String>,
    /// What to call it, instead of the name that it has.
    #[arg(long)]
    name: Option<String>,
    /// Where to note it.
    #[arg(long, default_value = "/run/wadi/vm")]
    directory: PathBuf,
}

pub(crate) fn list(asked: &List) -> Result<()> {
    let running = Registry::new(&asked.directory).running()?;
    for name in &running.ended {
        eprintln!("{name} has ended; what it left is removed");
    }
    for reason in &running.unreadable {
        eprintln!("not read: {reason}");
    }
    let mut rows = vec![["NAME", "PID", "FROM", "STATE", "VCPU THREADS", "MONITOR"].map(str::to_owned)];
    let mut entries = Vec::new();
    for machine in &running.machines {
        // One that does not answer is not asked twice.
        let asked = machine.monitor.status().and_then(|state| Ok((state, machine.vcpus()?)));
        let (state, vcpus, error) = match asked {
            Ok((state, vcpus)) => (state, vcpus, None),
            Err(error) => ("silent".to_owned(), Vec::new(), Some(error.to_string())),
        };
        if let Some(error) = &error {
            eprintln!("{}: {error}", machine.name);
        }
        rows.push([
            machine.name.clone(),
            machine.process.pid.to_string(),
            match machine.origin {
                Origin::Run => "run".to_owned(),
                Origin::Attached => "attach".to_owned(),
            },
            state.clone(),
            threads(&vcpus),
            machine.monitor.to_string(),
        ]);
        entries.push(json!({"machine": machine, "state": state, "vcpus": vcpus, "error": error}));
    }
    if asked.json {
        return print(&format!("{}\n", serde_json::to_string_pretty(&entries)?));
    }
    print(&table(&rows))
}

pub(crate) fn stop(asked: &Stop) -> Result<()> {
    let registry = Registry::new(&asked.directory);
    let machine = registry.find(&asked.name)?;
    let how = match vmm::stop(&registry, &machine, Duration::from_secs(asked.grace))? {
        Stopped::ByGuest => "its guest has shut down",
        Stopped::ByQemu => "QEMU has ended it",
        Stopped::Killed => "QEMU did not listen and was killed",
    };
    print(&format!("{}: {how}\n", asked.name))
}

pub(crate) fn attach(asked: &Attach) -> Result<()> {
    let name = asked.name.as_deref();
    let (machine, vcpus) = match (asked.pid, &asked.domain) {
        (Some(pid), _) => vmm::attach_process(pid, name)?,
        (None, Some(domain)) => vmm::attach_domain(domain, asked.connect.as_deref(), name)?,
        (None, None) => bail!("say which: --pid or --domain"),
    };
    Registry::new(&asked.directory).add(&machine)?;
    print(&format!(
        "{}: process {}, vCPU threads {}, monitor {}\n",
        machine.name,
        machine.process.pid,
        threads(&vcpus),
        machine.monitor
    ))
}

fn threads(vcpus: &[VcpuThread]) -> String {
    if vcpus.is_empty() {
        return "-".to_owned();
    }
    vcpus.iter().map(|vcpu| vcpu.thread_id.to_string()).collect::<Vec<_>>().join(" ")
}

/// Columns as wide as what is in them.
fn table<const N: usize>(rows: &[[String; N]]) -> String {
    let mut text = String::new();
    for row in rows {
        let mut line = String::new();
        for (column, cell) in row.iter().enumerate() {
            let width = rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
            // Writing to a string cannot fail.
            let _ = write!(line, "{cell:width$}  ");
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::table;

    #[test]
    fn columns_line_up() {
        let rows = [["a", "b"], ["long", "c"]].map(|row| row.map(str::to_owned));
        assert_eq!(table(&rows), "a     b\nlong  c\n");
    }
}
