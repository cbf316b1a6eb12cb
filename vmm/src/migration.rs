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
/// How long QEMU may not answer while it moves a guest: with a large one it is busy when that stops.
const PATIENCE: Duration = Duration::from_mins(1);

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
/// `unix:/run/vm1.sock`, and waits until the guest runs there. On failure it goes on here, unless nobody knows
/// ([`VmmError::Undecided`]).
pub fn migrate(monitor: &Path, uri: &str, speed: MigrationSpeed) -> Result<Migrated, VmmError> {
    let path = monitor;
    let mut monitor = connect(path, || false)?;
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
    match monitor.execute(&command).map_err(failed) {
        // It may have begun.
        Ok(_) | Err(VmmError::Silent { .. }) => wait_for_the_end(monitor, path, uri, PATIENCE),
        Err(error) => Err(error),
    }
}

/// Waits for what becomes of a move, in other sessions where QEMU does not answer in one. Whoever says too early that the guest stays takes
/// its devices away from it where it runs.
fn wait_for_the_end(
    mut monitor: Monitor,
    path: &Path,
    uri: &str,
    patience: Duration,
) -> Result<Migrated, VmmError> {
    let mut answered = Instant::now();
    loop {
        let silent = match monitor.execute(&qmp::query_migrate {}) {
            Ok(info) => {
                if let Some(end) = end(info, uri) {
                    return end;
                }
                answered = Instant::now();
                thread::sleep(POLL);
                continue;
            }
            Err(error) => failed(error),
        };
        let unknown =
            |error: VmmError| VmmError::Undecided { uri: uri.to_owned(), reason: error.to_string() };
        let over = || answered.elapsed() >= patience;
        if over() {
            return Err(unknown(silent));
        }
        // QEMU has one session at a time.
        drop(monitor);
        monitor = loop {
            match connect(path, || true) {
                Ok(monitor) => break monitor,
                Err(VmmError::Silent { .. }) if !over() => {}
                // Nobody is there any more who could say it.
                Err(error) => return Err(unknown(error)),
            }
        };
    }
}

/// How a move has ended, if it has.
fn end(info: qmp::MigrationInfo, uri: &str) -> Option<Result<Migrated, VmmError>> {
    match info.status {
        Some(qmp::MigrationStatus::completed) => {
            let number = |value: Option<i64>| u64::try_from(value.unwrap_or(0)).unwrap_or(0);
            let bytes = number(info.ram.map(|ram| ram.transferred));
            let (downtime_ms, total_ms) = (number(info.downtime), number(info.total_time));
            Some(Ok(Migrated { downtime_ms, total_ms, bytes }))
        }
        Some(qmp::MigrationStatus::failed | qmp::MigrationStatus::cancelled) => {
            let reason = info.error_desc.unwrap_or_else(|| {
                "the other QEMU went away, or does not know a device of the guest".to_owned()
            });
            Some(Err(VmmError::Migration { uri: uri.to_owned(), reason }))
        }
        // It was not heard, and will not be: what a session has left to say goes with it.
        None => {
            let reason = "QEMU has not begun".to_owned();
            Some(Err(VmmError::Migration { uri: uri.to_owned(), reason }))
        }
        _ => None,
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
/// followed. On failure the controller hears that the instance stays; not where nobody knows.
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
        Err(VmmError::Undecided { uri, reason }) => {
            let what = format!(
                "{reason}; see where it runs, then `podctl instances activate-migration {instance}` if it is there, or \
                 `podctl instances abort-migration {instance}` if it is here"
            );
            return Err(VmmError::Undecided { uri, reason: what });
        }
        Err(error) => {
            // What failed first is what is told; a move that is left behind is seen and ended with podctl.
            let _ = client.abort_migration(instance);
            return Err(error);
        }
    };
    // A guest whose drivers use a device takes the leases along; one that uses none has to be helped.
    let begun = Instant::now();
    loop {
        let late = begun.elapsed() > FOLLOW_DEADLINE;
        let followed = match client.instance(instance) {
            Ok(there) if there.migration.is_none() => return Ok(moved),
            Ok(_) if late => client.activate_migration(instance, false).map(drop),
            Ok(_) => Ok(()),
            Err(error) => Err(error),
        };
        match followed {
            // Another controller may take over meanwhile.
            Err(error) if late => {
                let reason = format!(
                    "the guest of {instance} runs at {uri}, but its leases have not followed: {error}"
                );
                return Err(VmmError::Machine { reason });
            }
            _ => thread::sleep(POLL),
        }
    }
}

/// Ends the QEMU whose monitor this is: its guest runs elsewhere.
pub fn quit(monitor: &Path) -> Result<(), VmmError> {
    let mut monitor = connect(monitor, || false)?;
    // The answer may be cut off: it is leaving.
    let _ = monitor.execute(&qmp::quit {});
    Ok(())
}

#[cfg(test)]
mod tests;
