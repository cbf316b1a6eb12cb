//! The fluid model (§4.2, Eqs. 1 and 2): what shares ought to be, if all demands at an element were known at one place.
//!
//! Hosts do not know them all, so [`Host`](crate::Host) goes by rates ([`fair_share`](crate::fair_share)). This is for
//! planning, and to judge what hosts arrive at.

/// What flows into an element from one of its predecessors.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Flow {
    /// D_uv in bytes/s.
    pub demand: f64,
    /// w, a positive number.
    pub weight: f64,
}

/// Solves Eq. 2, C_v = Σ min(w·α_v, D_uv), for α_v; nothing if the demands fit (D_v ≤ C_v).
pub fn solve(capacity: f64, flows: &[Flow]) -> Option<f64> {
    let mut sorted: Vec<Flow> = flows.to_vec();
    sorted.sort_by(|a, b| (a.demand / a.weight).total_cmp(&(b.demand / b.weight)));
    let mut weights: f64 = sorted.iter().map(|flow| flow.weight).sum();
    let mut left = capacity;
    for flow in sorted {
        let alpha = left / weights;
        if flow.demand / flow.weight >= alpha {
            return (flow.demand / flow.weight > alpha).then_some(alpha);
        }
        left -= flow.demand;
        weights -= flow.weight;
    }
    None
}

/// Eq. 1: what an element passes on of what flows into it, in bytes/s.
pub fn passed_on(alpha: Option<f64>, flows: &[Flow]) -> f64 {
    let share = |flow: &Flow| alpha.map_or(flow.demand, |alpha| flow.demand.min(flow.weight * alpha));
    flows.iter().map(share).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flow(demand: f64, weight: f64) -> Flow {
        Flow { demand, weight }
    }

    #[test]
    fn small_demands_are_met_and_the_rest_is_shared() {
        let flows = [flow(1.0, 1.0), flow(10.0, 1.0), flow(10.0, 1.0)];
        assert_eq!(solve(9.0, &flows), Some(4.0));
        assert!((passed_on(Some(4.0), &flows) - 9.0).abs() < 1e-12);
        assert_eq!(solve(21.0, &flows), None);
        assert!((passed_on(None, &flows) - 21.0).abs() < 1e-12);
        assert_eq!(solve(5.0, &[]), None);
    }

    #[test]
    fn weights_count() {
        assert_eq!(solve(8.0, &[flow(10.0, 1.0), flow(10.0, 3.0)]), Some(2.0));
        assert_eq!(solve(8.0, &[flow(10.0, 0.1), flow(2.0, 0.1)]), Some(60.0));
    }
}
