//! Moving a running virtual machine to a QEMU on another host.
//!
//! QEMU copies the guest's memory while the guest runs, again and again what changed, and the rest with the guest stopped. With
//! KVM the processor tells what changed. QEMU's translator (TCG) notes a page when it is written to first, and has to be told when
//! the page was copied. Before 9.0 QEMU forgets that where it looks at 64 pages at a time, which it does for memory whose
//! size is a multiple of that: what the guest writes to such a page afterwards never gets to the other side, and breaks it.
//! So the machines that we describe have a little more memory, and others are refused.

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use pod_api::client::Client;
use qapi::qmp;

use crate::VmmError;
use crate::monitor::{Monitor, connect, failed};

/// How often QEMU is asked how far it is.
const POLL: Duration = Duration::from_millis(10);
/// What QEMU looks at together: as many pages as a word has bits.
const PAGES_AT_ONCE_BYTES: u64 = 64 * 4096;
/// How long the leases of a guest that has moved may take to follow by themselves.
const FOLLOW_DEADLINE: Duration = Duration::from_secs(10);

/// How a virtual machine is moved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MigrationSpeed {
    /// For how many milliseconds QEMU may plan to stop the guest; what is left to copy must fit into that.
    pub downtime_ms: u64,
    /// Bytes of memory that QEMU copies per second at most.
    pub bytes_per_second: u64,
}

impl Default for MigrationSpeed {
    fn default() -> Self {
        Self { downtime_ms: 50, bytes_per_second: 4 << 30 }
    }
}

/// What QEMU says of a move that came to an end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Migrated {
    /// For how long the guest did not run, in milliseconds, without what the leases took.
    pub downtime_ms: u64,
    /// How long all of it took, in milliseconds.
    pub total_ms: u64,
    /// How much was copied, in bytes; more than the guest's memory where that changed meanwhile.
    pub bytes: u64,
}

/// Lets the QEMU whose monitor this is copy its guest to the QEMU that listens at `uri`, such as `tcp:h3:4444` or
/// `unix:/run/vm1.sock`, and waits until the guest runs there. On failure it goes on here.
pub fn migrate(monitor: &Path, uri: &str, speed: MigrationSpeed) -> Result<Migrated, VmmError> {
    let mut monitor = connect(monitor, || false)?;
    let command = qmp::migrate { channels: None, detach: None, resume: None, uri: Some(uri.to_owned()) };
    refuse_to_lose_stores(&mut monitor)?;
    let parameters = qmp::MigrateSetParameters {
        downtime_limit: Some(speed.downtime_ms),
        max_bandwidth: Some(speed.bytes_per_second),
        ..Default::default()
    };
    monitor.execute(&qmp::migrate_set_parameters(parameters)).map_err(failed)?;
    // A guest that writes faster than its memory is copied is slowed down, or it would never get there.
    let capability = qmp::MigrationCapability::auto_converge;
    let converge = qmp::MigrationCapabilityStatus { capability, state: true };
    let capabilities = qmp::migrate_set_capabilities { capabilities: vec![converge] };
    monitor.execute(&capabilities).map_err(failed)?;
    monitor.execute(&command).map_err(failed)?;
    loop {
        let info = monitor.execute(&qmp::query_migrate {}).map_err(failed)?;
        match info.status {
            Some(qmp::MigrationStatus::completed) => {
                let number = |value: Option<i64>| u64::try_from(value.unwrap_or(0)).unwrap_or(0);
                let bytes = number(info.ram.map(|ram| ram.transferred));
                return Ok(Migrated {
                    downtime_ms: number(info.downtime),
                    total_ms: number(info.total_time),
                    bytes,
                });
            }
            Some(qmp::MigrationStatus::failed | qmp::MigrationStatus::cancelled) => {
                let reason = info.error_desc.unwrap_or_else(|| {
                    "the other QEMU went away, or does not know a device of the guest".to_owned()
                });
                return Err(VmmError::Migration { uri: uri.to_owned(), reason });
            }
            _ => thread::sleep(POLL),
        }
    }
}

/// Refuses an emulated guest that would be broken on the way.
fn refuse_to_lose_stores(monitor: &mut Monitor) -> Result<(), VmmError> {
    if monitor.execute(&qmp::query_kvm {}).map_err(failed)?.enabled {
        return Ok(());
    }
    let version = monitor.execute(&qmp::query_version {}).map_err(failed)?.qemu;
    let memory = monitor.execute(&qmp::query_memory_size_summary {}).map_err(failed)?;
    if version.major >= 9 || keeps_stores(memory.base_memory, memory.plugged_memory.unwrap_or(0)) {
        return Ok(());
    }
    Err(VmmError::Machine {
        reason: format!(
            "QEMU {}.{} would break this emulated guest on the way: it forgets what is written to memory whose size is a multiple \
             of 256 KiB ({} bytes, {} plugged in). Use QEMU 9.0 or later, or KVM, or start the guest with 8 KiB more, as \
             `vmm run` and `vmm xml` do it, and without plugging memory in",
            version.major,
            version.minor,
            memory.base_memory,
            memory.plugged_memory.unwrap_or(0),
        ),
    })
}

/// Whether QEMU before 9.0 notes all that an emulated guest writes to so many bytes of memory, and to so many that were plugged in,
/// whose sizes we do not know one by one.
fn keeps_stores(base: u64, plugged: u64) -> bool {
    !base.is_multiple_of(PAGES_AT_ONCE_BYTES) && plugged == 0
}

/// Moves an instance's guest as [`migrate`] does, after the controller was told where to, and waits until its leases have
/// followed. On failure the controller hears that the instance stays.
pub fn move_away(
    client: &Client,
    instance: &str,
    monitor: &Path,
    uri: &str,
    speed: MigrationSpeed,
) -> Result<Migrated, VmmError> {
    if client.instance(instance)?.migration.is_none() {
        let reason = format!(
            "{instance} is not moving anywhere: say where with `podctl instances migrate {instance}`"
        );
        return Err(VmmError::Machine { reason });
    }
    let moved = match migrate(monitor, uri, speed) {
        Ok(moved) => moved,
        Err(error) => {
            // What failed first is what is told; a move that is left behind is seen and ended with podctl.
            let _ = client.abort_migration(instance);
            return Err(error);
        }
    };
    // A guest whose drivers use a device takes the leases along; one that uses none has to be helped.
    let begun = Instant::now();
    while client.instance(instance)?.migration.is_some() {
        if begun.elapsed() > FOLLOW_DEADLINE {
            client.activate_migration(instance, false)?;
        }
        thread::sleep(POLL);
    }
    Ok(moved)
}

/// Ends the QEMU whose monitor this is: its guest runs elsewhere.
pub fn quit(monitor: &Path) -> Result<(), VmmError> {
    let mut monitor = connect(monitor, || false)?;
    // The answer may be cut off: it is leaving.
    let _ = monitor.execute(&qmp::quit {});
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::tests::spec;

    #[test]
    fn an_emulated_machine_that_we_describe_can_be_moved_and_others_are_refused() {
        let line = spec().arguments(crate::QemuVersion { major: 7, minor: 2 });
        let size = &line[line.iter().position(|word| word == "-m").unwrap() + 1];
        let bytes = size.strip_suffix('k').unwrap().parse::<u64>().unwrap() << 10;
        assert!(keeps_stores(bytes, 0), "{size}");
        assert!(!keeps_stores(512 << 20, 0));
        assert!(!keeps_stores(bytes, 128 << 20));
    }
}
