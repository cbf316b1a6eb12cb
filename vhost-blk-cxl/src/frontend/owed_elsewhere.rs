//! Rings of which a predecessor owes requests, and that have yet to start.
//!
//! What is owed comes before anything new, on whichever ring. What it says is known when the ring starts.

use std::time::{Duration, Instant};

use vhost_frontend::OthersOwe;

/// How long a ring that the VMM has not described is waited for: longer than any VMM takes that sets up its rings one by one, and not
/// for ever, since a guest that has begun anew may use fewer than the one before.
const PATIENCE: Duration = Duration::from_secs(1);

/// Whether new requests wait for rings that are not here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum OwedElsewhere {
    /// They do not.
    #[default]
    Nothing,
    /// The VMM is about to start one.
    Starting,
    /// There may be one, which is waited for until then.
    Until(Instant),
}

impl OwedElsewhere {
    /// What holds once a ring has started that says this.
    pub(super) fn beside(others: OthersOwe, now: Instant) -> Self {
        match others {
            OthersOwe::Nothing => Self::Nothing,
            OthersOwe::Starting => Self::Starting,
            OthersOwe::Undescribed => Self::Until(now + PATIENCE),
        }
    }

    /// Whether they wait.
    pub(super) fn any(self) -> bool {
        self != Self::Nothing
    }

    /// When to look again whether they still do, if the clock says that.
    pub(super) fn wait(self, now: impl FnOnce() -> Instant) -> Option<Duration> {
        if let Self::Until(until) = self { Some(until.saturating_duration_since(now())) } else { None }
    }

    /// Looks whether they have waited long enough. True if that is so now.
    pub(super) fn is_over(&mut self, now: impl FnOnce() -> Instant) -> bool {
        let over = matches!(*self, Self::Until(until) if until <= now());
        if over {
            *self = Self::Nothing;
        }
        over
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_rings_that_may_never_come_are_waited_for_by_the_clock() {
        let began = Instant::now();
        for (others, any) in [(OthersOwe::Nothing, false), (OthersOwe::Starting, true)] {
            let mut owed = OwedElsewhere::beside(others, began);
            assert!(owed.wait(|| began).is_none() && !owed.is_over(|| began + 2 * PATIENCE));
            assert_eq!(owed.any(), any);
        }
        let mut owed = OwedElsewhere::beside(OthersOwe::Undescribed, began);
        assert_eq!(owed.wait(|| began), Some(PATIENCE));
        let almost = began + PATIENCE.saturating_sub(Duration::from_nanos(1));
        assert!(!owed.is_over(|| almost) && owed.any());
        assert!(owed.is_over(|| began + PATIENCE) && !owed.any());
        assert!(!owed.is_over(|| began + PATIENCE), "it is said once");
    }
}
