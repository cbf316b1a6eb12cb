//! The fair share of an element (§4.3, Eq. 4).

use crate::{ElementId, TenantId};

/// How much a share may grow in one K. If nothing moved for a moment, C/F says nothing about the share.
const MOST_GROWTH: f64 = 4.0;

/// What the children of a node (the mchannels of a tenant, or the tenants at an element) do on one host.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sums {
    /// F, in bytes/s: what they moved in the last K. Summed as it was, without Eq. 3, since nothing is lost on the way (§4.3).
    pub rate: f64,
    /// ΣD, in bytes/s.
    pub demand: f64,
    /// max(D / w), in bytes/s. Eq. 4 as printed takes max(D), which keeps a lone mchannel with w < 1 below what is free.
    pub max_demand: f64,
    /// α in force while `rate` was measured, in bytes/s.
    pub alpha: f64,
    /// Σw of those that want anything.
    pub weight: f64,
}

/// Sums of a node on one host, as published for the others.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Record {
    /// At which element.
    pub element: ElementId,
    /// Of which node of its tree.
    pub node: Node,
    /// The sums.
    pub sums: Sums,
}

/// A node of the tree VM → tenant → root that each element has.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Node {
    /// All of the element.
    Root {
        /// C_v as the host estimates it, in bytes/s.
        capacity: f32,
        /// l as the host sees it, from 0 to 1.
        load: f32,
    },
    /// One tenant.
    Tenant {
        /// Which.
        tenant: TenantId,
        /// Its weight, as the host knows it. Others go by what they know themselves; earlier versions do not.
        weight: f32,
    },
}

/// The sums of a node over all hosts.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Totals {
    pub(crate) rate: f64,
    pub(crate) demand: f64,
    pub(crate) max_demand: f64,
    pub(crate) weight: f64,
    alpha: f64,
    alpha_by_rate: f64,
    rate_of_alpha: f64,
    hosts: f64,
}

impl Totals {
    pub(crate) fn add(&mut self, sums: &Sums) {
        self.rate += sums.rate;
        self.demand += sums.demand;
        self.max_demand = self.max_demand.max(sums.max_demand);
        self.weight += sums.weight;
        self.add_alpha(sums);
    }

    pub(crate) fn add_alpha(&mut self, sums: &Sums) {
        self.alpha += sums.alpha;
        self.alpha_by_rate += sums.alpha * sums.rate;
        self.rate_of_alpha += sums.rate;
        self.hosts += 1.0;
    }

    /// α_old: the share under which F came about, as the hosts say, by how much each of them moved. Line 17 of the listing has
    /// one host compute α and shares only F and D, so that the others never learn it. If every host went on from its own α,
    /// those that began apart would stay apart for ever: all are multiplied by the same C/F.
    fn old_alpha(&self) -> f64 {
        if self.rate_of_alpha > 0.0 {
            self.alpha_by_rate / self.rate_of_alpha
        } else if self.hosts > 0.0 {
            self.alpha / self.hosts
        } else {
            0.0
        }
    }

    pub(crate) fn share(&self, capacity: f64) -> Share {
        let sums = Sums {
            rate: self.rate,
            demand: self.demand,
            max_demand: self.max_demand,
            alpha: self.old_alpha(),
            weight: self.weight,
        };
        fair_share(capacity, &sums)
    }
}

/// The share of a child of weight 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Share {
    /// α, in bytes/s.
    pub alpha: f64,
    /// Whether anybody has to be held back. If not, nobody is, whatever he wants by now.
    pub congested: bool,
}

impl Share {
    /// Nobody is held back.
    pub const FREE: Self = Self { alpha: 0.0, congested: false };

    /// α under which the last K passed, in bytes/s, where max(D/w) on this host is `max_demand`. If nobody was held back, it is what the
    /// hungriest of all hosts wanted (Eq. 4), and not of this one: α_old is a mean over the hosts, and those whose mchannels
    /// want little would drag it far below what was in force. Everybody would be held back too much at first, and let go again.
    pub(crate) fn in_force(&self, max_demand: f64) -> f64 {
        if self.congested { self.alpha } else { self.alpha.max(max_demand) }
    }

    /// w·α, or no limit, in bytes/s.
    pub fn of(&self, weight: f64) -> f64 {
        if self.congested { weight * self.alpha } else { f64::INFINITY }
    }
}

/// Eq. 4: α_new = min(α_old·C/F, max(D/w)), from the sums over all hosts.
///
/// If all demands fit, α is max(D/w) at once (§4.2). The fair share of max-min fairness is never below C/Σw, so neither is
/// this: it keeps α, F and C/F of zero from being traps.
pub fn fair_share(capacity: f64, sums: &Sums) -> Share {
    if sums.demand <= capacity || sums.max_demand <= 0.0 {
        return Share { alpha: sums.max_demand, congested: false };
    }
    let growth = if sums.rate > 0.0 { (capacity / sums.rate).min(MOST_GROWTH) } else { MOST_GROWTH };
    let least = if sums.weight > 0.0 { capacity / sums.weight } else { 0.0 };
    let alpha = (sums.alpha * growth).max(least);
    if alpha < sums.max_demand {
        Share { alpha, congested: true }
    } else {
        Share { alpha: sums.max_demand, congested: false }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sums(rate: f64, demand: f64, max_demand: f64, alpha: f64, weight: f64) -> Sums {
        Sums { rate, demand, max_demand, alpha, weight }
    }

    #[test]
    fn a_share_follows_c_over_f_up_to_the_largest_demand() {
        let share = fair_share(10.0, &sums(20.0, 40.0, 20.0, 10.0, 2.0));
        assert_eq!(share, Share { alpha: 5.0, congested: true });
        let share = fair_share(10.0, &sums(5.0, 11.0, 6.0, 5.0, 2.0));
        assert_eq!(share, Share { alpha: 6.0, congested: false }, "the cap is picked: nobody is held back");
        assert!(share.of(1.0).is_infinite());
    }

    #[test]
    fn what_fits_is_free_at_once() {
        assert!(!fair_share(10.0, &sums(1.0, 9.0, 9.0, 0.001, 1.0)).congested);
    }

    #[test]
    fn zeros_are_no_trap() {
        // α = 0 would stay 0 for ever; F = 0 would divide by nothing.
        let share = fair_share(10.0, &sums(20.0, 40.0, 20.0, 0.0, 4.0));
        assert_eq!(share, Share { alpha: 2.5, congested: true });
        let share = fair_share(10.0, &sums(0.0, 40.0, 20.0, 0.0, 4.0));
        assert_eq!(share, Share { alpha: 2.5, congested: true });
        assert_eq!(fair_share(10.0, &Sums::default()), Share::FREE);
        assert!(fair_share(10.0, &sums(f64::MIN_POSITIVE, 40.0, 20.0, 1.0, 4.0)).alpha.is_finite());
    }

    #[test]
    fn one_host_alone_does_not_keep_its_own_share() {
        // Both move what their α lets them; after one exchange they compute the same.
        let mut totals = Totals::default();
        totals.add(&sums(8.0, 20.0, 20.0, 8.0, 1.0));
        totals.add(&sums(2.0, 20.0, 20.0, 2.0, 1.0));
        let share = totals.share(10.0);
        assert!((share.alpha - 6.8).abs() < 1e-9, "{share:?}");
    }
}
