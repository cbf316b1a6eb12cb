//! How long a guest that moves to another host is out of reach.

mod summary;

use std::path::Path;
use std::time::Duration;

use anyhow::{Result, ensure};
use clap::Args;
use guest_images::{Guest, Silent};
use wadi_tests::pod::{GUEST_ADDRESS, HostPlan, Pod, PodBuilder, VmShape};
use wadi_tests::probe::{Echo, INTERVAL, Loss, Probe};

/// A guest that a machine with two cores translates quickly enough.
const SHAPE: VmShape = VmShape { memory_mib: 256, cpus: 1 };
/// Before and after a move, so that what was the matter without it is known.
const CALM: Duration = Duration::from_secs(1);

/// Live migration: for how long a real guest does not answer while it moves to another host.
///
/// It is asked for an echo every millisecond, over its NIC on a third host. What is lost includes the time for which QEMU stops it,
/// the hand-over of its leases, and the first frame from where it is now. How long the sender of the echo requests was itself
/// held up stands beside that.
#[derive(Args, Clone, Debug)]
pub(crate) struct Options {
    /// Moves to be measured.
    #[arg(long, default_value_t = 10)]
    moves: u32,
}

impl Default for Options {
    fn default() -> Self {
        Self { moves: 10 }
    }
}

/// What one move took.
#[derive(Clone, Copy, Debug)]
struct Move {
    /// For how long nothing was answered.
    gap: Duration,
    lost: usize,
    sent: usize,
    /// For how long QEMU had the guest stand still, by its own account.
    stopped: Duration,
    /// The longest that the sender of echo requests was late.
    held_up: Duration,
}

/// Runs it.
pub(crate) fn run(options: &Options, output: &Path) -> Result<()> {
    ensure!(options.moves > 0, "measure at least one move");
    let guest = Guest::ensure(&mut Silent)?;
    let pod = PodBuilder::new()
        .coherence("hardware")
        .silent_guests()
        .host(HostPlan::new("h1").vms())
        .host(HostPlan::new("h2").nic("nic0"))
        .host(HostPlan::new("h3").vms())
        .start()?;
    let moves = moves(&pod, &guest, options.moves)?;
    summary::show(&moves, output)
}

fn moves(pod: &Pod, guest: &Guest, count: u32) -> Result<Vec<Move>> {
    let instance = pod.create_instance("vm1", "h1", &[])?;
    let mut vm = pod.boot(&instance, guest, SHAPE)?;
    let mut moves = Vec::new();
    for host in ["h3", "h1"].into_iter().cycle().take(usize::try_from(count)?) {
        let probe = Probe::start(pod.client_namespace(), GUEST_ADDRESS)?;
        std::thread::sleep(CALM);
        let (arrived, migrated) = pod.move_to(vm, guest, SHAPE, host)?;
        vm = arrived;
        std::thread::sleep(CALM);
        let echoes = probe.echoes()?;
        let Loss { sent, lost, longest_gap, .. } = Loss::of(&echoes)?;
        let found = Move {
            gap: longest_gap,
            lost,
            sent,
            stopped: Duration::from_millis(migrated.downtime_ms),
            held_up: held_up(&echoes),
        };
        eprintln!("to {host}: {found:?}");
        moves.push(found);
    }
    Ok(moves)
}

/// By how much a request went out too late after the one before, at worst.
fn held_up(echoes: &[Echo]) -> Duration {
    let pauses = echoes.windows(2).map(|pair| pair[1].sent.saturating_sub(pair[0].sent));
    pauses.max().unwrap_or_default().saturating_sub(INTERVAL)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_late_request_is_noticed() {
        let at = |ms| Echo { sent: Duration::from_millis(ms), round_trip: None };
        assert_eq!(held_up(&[at(0), at(1), at(5), at(6)]), Duration::from_millis(3));
        assert_eq!(held_up(&[at(0)]), Duration::ZERO);
    }
}
