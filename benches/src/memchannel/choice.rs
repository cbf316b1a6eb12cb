//! What only matters to control, chosen on one program: so what all others do with control is predicted.

use anyhow::{Context, Result};

use super::control::Setting;
use super::experiments::{App, contended};
use super::parameters::Fabric;
use super::side_by_side;

/// A response says overload from this part of the egress port's buffers on. From more than four fifths of them on none could say severe overload, which
/// begins a quarter later.
const OVERLOADED_FROM: [f64; 3] = [0.25, 0.5, 0.75];
const DELTAS: [f64; 2] = [0.1, 0.5];
/// What control is told that a link carries, as a part of what it does.
const TOLD: [f64; 4] = [0.97, 0.98, 0.99, 1.0];
/// What has to be used of the link.
const USED: f64 = 0.96;

/// One choice, and what comes of it on the link that one program shares with the contending threads of its host (Figure 9).
#[derive(Clone, Copy, Debug)]
pub(super) struct Tried {
    pub(super) fabric: Fabric,
    pub(super) slowdown: f64,
    /// Of the link.
    pub(super) used: f64,
}

/// Tries all with this program.
pub(super) fn tried(fabric: &Fabric, app: &App) -> Result<Vec<Tried>> {
    let mut tried = Vec::new();
    for two in candidates(fabric).chunks(2) {
        tried.extend(side_by_side(two, |fabric| {
            let held = contended(fabric, app, false, 1.0, Setting::Paper)?;
            Ok(Tried { fabric: *fabric, slowdown: held.slowdown, used: held.used })
        })?);
    }
    Ok(tried)
}

fn candidates(fabric: &Fabric) -> Vec<Fabric> {
    let mut candidates = Vec::new();
    for part in OVERLOADED_FROM {
        for delta in DELTAS {
            for told in TOLD {
                let overload_lines = part * fabric.credits;
                candidates.push(Fabric { overload_lines, delta, told, ..*fabric });
            }
        }
    }
    candidates
}

/// The one with the least slowdown of those that use enough of the link. The paper's figure has no part in that.
pub(super) fn chosen(tried: &[Tried]) -> Result<Fabric> {
    let enough = tried.iter().filter(|it| it.used >= USED);
    let least = enough.min_by(|a, b| a.slowdown.total_cmp(&b.slowdown));
    Ok(least.context("nothing that was tried uses enough of the link")?.fabric)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_in_use_can_be_chosen_and_can_say_severe_overload() {
        let all = candidates(&Fabric::PAPER);
        let is_in_use = |it: &Fabric| {
            let parts = |it: &Fabric| [it.overload_lines, it.delta, it.told];
            parts(it).iter().zip(parts(&Fabric::PAPER)).all(|(one, other)| (one - other).abs() < 1e-9)
        };
        assert_eq!(all.iter().filter(|it| is_in_use(it)).count(), 1);
        assert!(all.iter().all(|it| it.overload_lines * 1.25 < it.credits));
    }

    #[test]
    fn the_least_slowdown_is_chosen_where_enough_is_used() {
        let of = |told, slowdown, used| Tried { fabric: Fabric { told, ..Fabric::PAPER }, slowdown, used };
        let tried = [of(0.1, 2.0, 0.95), of(0.2, 2.7, 0.96), of(0.3, 2.6, 0.97), of(0.4, 2.9, 1.0)];
        assert!((chosen(&tried).unwrap().told - 0.3).abs() < 1e-9);
        assert!(chosen(&tried[..1]).is_err());
    }
}
