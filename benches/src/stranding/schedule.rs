//! Which host a VM runs on, as a scheduler that knows nothing of pods decides.

use super::trace::{Parts, Request};

/// A VM on its host.
#[derive(Clone, Debug)]
pub(super) struct Placed {
    pub(super) host: usize,
    pub(super) start: f64,
    pub(super) end: f64,
    pub(super) parts: Parts,
}

/// What became of a trace.
pub(super) struct Schedule {
    pub(super) placed: Vec<Placed>,
    /// How many requests found no host.
    pub(super) refused: usize,
    /// What of the hosts was not used, on average while the second half of the trace passed.
    pub(super) unused: Parts,
}

/// Places each request on the host that it fits and that has least cores left (best fit), with all that it takes of that host.
pub(super) fn schedule(requests: &[Request], hosts: usize, days: f64) -> Schedule {
    let mut free = vec![Parts { cores: 1.0, memory: 1.0, ssd: 1.0, nic: 1.0 }; hosts];
    let mut ends: Vec<(f64, usize)> = Vec::new();
    let mut placed: Vec<Placed> = Vec::new();
    let mut refused = 0;
    for request in requests.iter().take_while(|it| it.start < days) {
        ends.retain(|(end, number)| {
            let over = *end <= request.start;
            if over {
                let it: &Placed = &placed[*number];
                change(&mut free[it.host], it.parts, 1.0);
            }
            !over
        });
        let fits = free.iter().enumerate().filter(|(_, free)| fits(free, request.parts));
        let Some((host, _)) = fits.min_by(|a, b| a.1.cores.total_cmp(&b.1.cores)) else {
            refused += 1;
            continue;
        };
        change(&mut free[host], request.parts, -1.0);
        ends.push((request.end, placed.len()));
        placed.push(Placed { host, start: request.start, end: request.end.min(days), parts: request.parts });
    }
    let unused = unused(&placed, hosts, days);
    Schedule { placed, refused, unused }
}

fn fits(free: &Parts, parts: Parts) -> bool {
    // What was given back is not exact to the last bit.
    let fits = |free: f64, part: f64| part <= free + 1e-9;
    fits(free.cores, parts.cores)
        && fits(free.memory, parts.memory)
        && fits(free.ssd, parts.ssd)
        && fits(free.nic, parts.nic)
}

fn change(free: &mut Parts, parts: Parts, sign: f64) {
    free.cores += sign * parts.cores;
    free.memory += sign * parts.memory;
    free.ssd += sign * parts.ssd;
    free.nic += sign * parts.nic;
}

fn unused(placed: &[Placed], hosts: usize, days: f64) -> Parts {
    let (from, to) = (days / 2.0, days);
    let mut used = Parts::default();
    for it in placed {
        let part = ((it.end.min(to) - it.start.max(from)).max(0.0)) / (to - from);
        change(&mut used, it.parts, part);
    }
    #[expect(clippy::cast_precision_loss, reason = "there are not that many hosts")]
    let hosts = hosts as f64;
    Parts {
        cores: 1.0 - used.cores / hosts,
        memory: 1.0 - used.memory / hosts,
        ssd: 1.0 - used.ssd / hosts,
        nic: 1.0 - used.nic / hosts,
    }
}
