//! What is believed of what other hosts say.
//!
//! A host that is wrong may say anything, and others have to go on all the same. So nobody is taken to want, move or weigh more than a host can have.
//! Shares that are computed from that have a floor ([`fair_share`](crate::fair_share): C/Σw), and no number of it is infinite.

use crate::Sums;

/// A board has room for no more VMs.
const VMS_MAX: f64 = 512.0;
/// No more devices of a VM are counted, its vCPUs included.
const DEVICES_MAX: f64 = 64.0;
/// No VM weighs more.
const WEIGHT_MAX: f64 = 1000.0;

/// The most that a host is believed to weigh among the hosts of a tenant: Σw of its VMs.
///
/// It is what a share is sure of beside a host that says anything whatever: w/(Σw + `MOST_WEIGHT`) of what its tenant may have, where Σw is that of all others.
pub const MOST_WEIGHT: f64 = VMS_MAX * WEIGHT_MAX;

/// What is believed of the sums of a node at an element that carries `highest` bytes/s at most. Each device by itself may want that much, and
/// may move it for a moment.
pub(crate) fn believed(sums: &Sums, highest: f64) -> Sums {
    let most = VMS_MAX * DEVICES_MAX * highest;
    let Sums { rate, demand, max_demand, alpha, weight } = *sums;
    let weight = at_most(weight, MOST_WEIGHT);
    // Whoever wants anything weighs something: else it could have others wait for what nobody weighs.
    let wants = if weight > 0.0 { most } else { 0.0 };
    Sums {
        rate: at_most(rate, most),
        demand: at_most(demand, wants),
        max_demand: at_most(max_demand, wants),
        alpha: at_most(alpha, most),
        weight,
    }
}

/// A number from 0 on; what is none is 0.
pub(crate) fn at_most(number: f64, most: f64) -> f64 {
    if number.is_nan() { 0.0 } else { number.clamp(0.0, most) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_host_can_have_is_believed_and_no_more() {
        let sums = Sums { rate: 300.0, demand: 5000.0, max_demand: 900.0, alpha: 7.0, weight: 511_000.0 };
        assert_eq!(believed(&sums, 10.0), sums);
        let all =
            |number| Sums { rate: number, demand: number, max_demand: number, alpha: number, weight: number };
        for number in [1e300, f64::INFINITY] {
            let most = 327_680.0;
            assert_eq!(believed(&all(number), 10.0), Sums { weight: MOST_WEIGHT, ..all(most) });
        }
        for number in [f64::NAN, -1.0, f64::NEG_INFINITY] {
            assert_eq!(believed(&all(number), 10.0), Sums::default());
        }
    }

    #[test]
    fn what_weighs_nothing_wants_nothing() {
        let sums = Sums { rate: 3.0, demand: 50.0, max_demand: 50.0, alpha: 7.0, weight: 0.0 };
        assert_eq!(believed(&sums, 10.0), Sums { demand: 0.0, max_demand: 0.0, ..sums });
    }
}
