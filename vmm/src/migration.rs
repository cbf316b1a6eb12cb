//! Moving a running virtual machine to a QEMU on another host.
//!
//! QEMU copies the guest's memory while the guest runs, again and again what changed, and the rest with the guest stopped. With
//! KVM the processor tells what changed. QEMU's translator (TCG) can lose a store: a vCPU that loses its processor between
//! looking a page up and writing to it writes after the page was taken off the list of changed ones and copied. On a
//! busy machine that breaks guests, also ones without any device of ours. So an emulated guest stands still when the copying
//! begins, runs while its memory is copied once, and stands still for what changed meanwhile: at these moments no vCPU
//! is in the middle of a store.

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use pod_controller::client::Client;
use qapi::qmp;

use crate::VmmError;
use crate::monitor::{Monitor, connect, failed};

/// How often QEMU is asked how far it is.
const POLL: Duration = Duration::from_millis(10);
/// The longest that QEMU takes: any rest fits into it.
const DOWNTIME_MAX_MS: u64 = 2_000_000;
/// How fast an emulated guest's memory is copied while it runs: slowly enough to be watched.
const ONE_PASS_BYTES_PER_SECOND: u64 = 32 << 20;
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
    if monitor.execute(&qmp::query_kvm {}).map_err(failed)?.enabled {
        set_speed(&mut monitor, speed)?;
        // A guest that writes faster than its memory is copied is slowed down, or it would never get there.
        let capability = qmp::MigrationCapability::auto_converge;
        let converge = qmp::MigrationCapabilityStatus { capability, state: true };
        let capabilities = qmp::migrate_set_capabilities { capabilities: vec![converge] };
        monitor.execute(&capabilities).map_err(failed)?;
        monitor.execute(&command).map_err(failed)?;
    } else {
        copy_once(&mut monitor, &command, speed)?;
    }
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

/// Begins to move an emulated guest, and returns when its rest is copied with the guest stopped, or something failed.
fn copy_once(monitor: &mut Monitor, command: &qmp::migrate, speed: MigrationSpeed) -> Result<(), VmmError> {
    // So slow that it is not through before the guest goes on.
    set_speed(monitor, MigrationSpeed { downtime_ms: 1, bytes_per_second: 1 << 20 })?;
    let running = monitor.execute(&qmp::query_status {}).map_err(failed)?.running;
    if running {
        monitor.execute(&qmp::stop {}).map_err(failed)?;
    }
    let begun = monitor.execute(command).map_err(failed).and_then(|_| {
        while progress(monitor)?.0 == Some(qmp::MigrationStatus::setup) {
            thread::sleep(POLL);
        }
        Ok(())
    });
    if running {
        // Whether it has begun or not.
        monitor.execute(&qmp::cont {}).map_err(failed)?;
    }
    begun?;
    let slow = speed.bytes_per_second.min(ONE_PASS_BYTES_PER_SECOND);
    set_speed(monitor, MigrationSpeed { downtime_ms: 1, bytes_per_second: slow })?;
    // Were it to come to the end of the pass, QEMU would look for changes while the guest runs.
    while let (Some(qmp::MigrationStatus::active), left) = progress(monitor)? {
        if left < 0.5 {
            return set_speed(monitor, MigrationSpeed { downtime_ms: DOWNTIME_MAX_MS, ..speed });
        }
        thread::sleep(POLL);
    }
    Ok(())
}

/// How far it is, and which part of the guest's memory has not been copied once.
fn progress(monitor: &mut Monitor) -> Result<(Option<qmp::MigrationStatus>, f64), VmmError> {
    let info = monitor.execute(&qmp::query_migrate {}).map_err(failed)?;
    #[expect(clippy::cast_precision_loss, reason = "a part of a whole")]
    let left = info.ram.map_or(1.0, |ram| ram.remaining as f64 / (ram.total.max(1)) as f64);
    Ok((info.status, left))
}

fn set_speed(monitor: &mut Monitor, speed: MigrationSpeed) -> Result<(), VmmError> {
    let parameters = qmp::MigrateSetParameters {
        downtime_limit: Some(speed.downtime_ms),
        max_bandwidth: Some(speed.bytes_per_second),
        ..Default::default()
    };
    monitor.execute(&qmp::migrate_set_parameters(parameters)).map(drop).map_err(failed)
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
        return Err(VmmError::Spec { reason });
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
