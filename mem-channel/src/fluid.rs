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

/// What somebody would move over a network of elements.
#[derive(Clone, Debug, PartialEq)]
pub struct User {
    /// Whose it is: an index among the tenants.
    pub tenant: usize,
    /// w, a positive number: its part among its tenant's.
    pub weight: f64,
    /// D in bytes/s.
    pub demand: f64,
    /// What it passes through, each element once: indices among the capacities.
    pub path: Vec<usize>,
}

/// Where a user's path meets an element: (user, place in its path).
type Meeting = (usize, usize);

/// What each user gets, in bytes/s, where every element is divided among tenants of these weights, and each tenant's part among its users,
/// by max-min fairness (§4.4). What users leave at one element because others hold them back changes shares there: that is gone
/// through in turns until nothing changes any more.
///
/// Of a tenant or an element that there is none of, a user gets nothing.
pub fn rates(capacities: &[f64], tenants: &[f64], users: &[User]) -> Vec<f64> {
    const TURNS_MAX: usize = 400;
    let is_known =
        |user: &User| user.tenant < tenants.len() && user.path.iter().all(|it| *it < capacities.len());
    let mut meetings: Vec<Vec<Vec<Meeting>>> = vec![vec![Vec::new(); tenants.len()]; capacities.len()];
    let wanting = |user: &User| is_known(user) && user.demand > 0.0;
    for (index, user) in users.iter().enumerate().filter(|(_, user)| wanting(user)) {
        for (place, element) in user.path.iter().enumerate() {
            meetings[*element][user.tenant].push((index, place));
        }
    }
    let mut shares: Vec<Vec<f64>> = users.iter().map(|user| vec![user.demand; user.path.len()]).collect();
    for _ in 0..TURNS_MAX {
        let mut has_changed = false;
        for (capacity, of_tenants) in capacities.iter().zip(&meetings) {
            has_changed |= divide(*capacity, tenants, users, of_tenants, &mut shares);
        }
        if !has_changed {
            break;
        }
    }
    let least = |(user, shares): (&User, &Vec<f64>)| {
        if is_known(user) { shares.iter().copied().fold(user.demand, f64::min) } else { 0.0 }
    };
    users.iter().zip(&shares).map(least).collect()
}

/// Divides an element anew. Returns whether that changed anything.
fn divide(
    capacity: f64,
    weights: &[f64],
    users: &[User],
    of_tenants: &[Vec<Meeting>],
    shares: &mut [Vec<f64>],
) -> bool {
    let arrives = |shares: &[Vec<f64>], (user, here): Meeting| {
        let others = shares[user].iter().enumerate().filter(|(place, _)| *place != here);
        let demand = others.fold(users[user].demand, |least, (_, share)| least.min(*share));
        Flow { demand, weight: users[user].weight }
    };
    let flows: Vec<Vec<Flow>> =
        of_tenants.iter().map(|these| these.iter().map(|it| arrives(shares, *it)).collect()).collect();
    let of_tenant = |(flows, weight): (&Vec<Flow>, &f64)| Flow {
        demand: flows.iter().map(|flow| flow.demand).sum(),
        weight: *weight,
    };
    let tenants: Vec<Flow> =
        flows.iter().zip(weights).filter(|(flows, _)| !flows.is_empty()).map(of_tenant).collect();
    let alpha = solve(capacity, &tenants);
    let mut has_changed = false;
    for ((these, flows), weight) in of_tenants.iter().zip(&flows).zip(weights) {
        let alpha = alpha.and_then(|alpha| solve(weight * alpha, flows));
        for (user, place) in these {
            let User { weight, demand, .. } = users[*user];
            let share = alpha.map_or(demand, |alpha| demand.min(weight * alpha));
            let before = std::mem::replace(&mut shares[*user][*place], share);
            has_changed |= (share - before).abs() > 1e-9 * demand;
        }
    }
    has_changed
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
    fn user(tenant: usize, weight: f64, demand: f64, path: &[usize]) -> User {
        User { tenant, weight, demand, path: path.to_vec() }
    }

    #[test]
    fn what_one_leaves_at_an_element_others_get_there() {
        // The first is held to 2 at the second element, which leaves 8 of the first one.
        let users = [user(0, 1.0, 20.0, &[0, 1]), user(0, 1.0, 20.0, &[0]), user(0, 1.0, 20.0, &[1])];
        assert_eq!(rates(&[10.0, 4.0], &[1.0], &users), [2.0, 8.0, 2.0]);
    }

    #[test]
    fn tenants_divide_an_element_before_their_users_do() {
        let users = [
            user(0, 1.0, 20.0, &[0]),
            user(1, 1.0, 20.0, &[0]),
            user(1, 3.0, 20.0, &[0]),
            user(2, 1.0, 0.5, &[0]),
            user(3, 1.0, 9.0, &[0]),
            user(0, 1.0, 9.0, &[1]),
        ];
        assert_eq!(rates(&[12.5], &[1.0, 2.0, 1.0], &users), [4.0, 2.0, 6.0, 0.5, 0.0, 0.0]);
    }
}
