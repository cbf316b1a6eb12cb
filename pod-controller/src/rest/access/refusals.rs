//! How many refusals are written down: whoever is not let in must not be able to fill the disk with it.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::super::places;
use super::Caller;

/// Over what time refusals of an origin are counted.
const WINDOW: Duration = Duration::from_mins(1);
/// How many refusals of an origin are told of in that time.
const TOLD_MAX: u32 = 20;
/// How many origins are told of at the same time. All others are one more.
const ORIGINS_MAX: usize = 64;
/// The name of all others.
const OTHERS: &str = "others";

/// What is done about a refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// It is told of.
    Tell,
    /// It is only counted. The first one of its origin says when the count is to be told of.
    Count(Option<Instant>),
}

/// Refusals by whom they concern.
#[derive(Debug, Default)]
pub(super) struct Refusals {
    windows: BTreeMap<String, Window>,
}

#[derive(Debug)]
struct Window {
    ends: Instant,
    told: u32,
    untold: u64,
}

impl Refusals {
    /// One more of an origin.
    pub(super) fn take(&mut self, origin: &str, now: Instant) -> Verdict {
        // What is over and left nothing to tell is forgotten. What there is to tell, somebody was told to ask for.
        self.windows.retain(|_, window| window.ends > now || window.untold > 0);
        let is_known = self.windows.contains_key(origin);
        let origin = if is_known || self.windows.len() < ORIGINS_MAX { origin } else { OTHERS };
        let window = self.windows.entry(origin.to_owned());
        let window = window.or_insert_with(|| Window { ends: now + WINDOW, told: 0, untold: 0 });
        if window.told < TOLD_MAX && window.ends > now {
            window.told += 1;
            return Verdict::Tell;
        }
        window.untold += 1;
        Verdict::Count((window.untold == 1).then_some(window.ends))
    }

    /// Those of whom not everything was told and whose time is over, and how much was not. They begin anew.
    pub(super) fn over(&mut self, now: Instant) -> Vec<(String, u64)> {
        let over = self.windows.extract_if(.., |_, window| window.ends <= now && window.untold > 0);
        over.map(|(origin, window)| (origin, window.untold)).collect()
    }

    /// The same of all, whether or not their time is over.
    pub(super) fn all(&mut self) -> Vec<(String, u64)> {
        let all = std::mem::take(&mut self.windows).into_iter();
        all.filter(|(_, window)| window.untold > 0).map(|(origin, window)| (origin, window.untold)).collect()
    }
}

/// Whom refusals are counted for.
pub(super) fn origin(caller: Option<&Caller>) -> String {
    match caller {
        Some(Caller::Remote { address, .. }) => places::origin(*address),
        Some(local @ Caller::Local { .. }) => local.to_string(),
        None => "nobody".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(refusals: &mut Refusals, origin: &str, at: Instant, times: u32) -> (u32, Vec<Instant>) {
        let mut told = 0;
        let mut dues = Vec::new();
        for _ in 0..times {
            match refusals.take(origin, at) {
                Verdict::Tell => told += 1,
                Verdict::Count(due) => dues.extend(due),
            }
        }
        (told, dues)
    }

    #[test]
    fn few_are_told_of_and_the_rest_is_counted() {
        let (mut refusals, began) = (Refusals::default(), Instant::now());
        let (nearly, ends) = (began + WINDOW.mul_f64(0.9), began + WINDOW);
        assert_eq!(told(&mut refusals, "a", began, 1000), (TOLD_MAX, vec![ends]));
        assert_eq!(told(&mut refusals, "b", began, 3), (3, vec![]), "others have their own");
        assert_eq!(refusals.over(nearly), []);
        assert_eq!(refusals.over(ends), [("a".to_owned(), 1000 - u64::from(TOLD_MAX))]);
        assert_eq!(refusals.over(ends), [], "it is told of once");
        assert_eq!(told(&mut refusals, "a", ends, 2), (2, vec![]), "and begins anew");
    }

    #[test]
    fn what_comes_before_the_count_is_told_of_is_counted_too() {
        let (mut refusals, began) = (Refusals::default(), Instant::now());
        told(&mut refusals, "a", began, TOLD_MAX + 1);
        // Whoever was to tell of it is late.
        let late = began + WINDOW * 3;
        assert_eq!(told(&mut refusals, "a", late, 5), (0, vec![]));
        assert_eq!(refusals.over(late), [("a".to_owned(), 6)]);
    }

    #[test]
    fn many_origins_are_as_few_as_some() {
        let (mut refusals, began) = (Refusals::default(), Instant::now());
        let all = (0..10_000).map(|number| told(&mut refusals, &number.to_string(), began, 100).0);
        let most = (u32::try_from(ORIGINS_MAX).expect("few") + 1) * TOLD_MAX;
        assert_eq!(all.sum::<u32>(), most);
        assert_eq!(refusals.windows.len(), ORIGINS_MAX + 1);
        let untold: u64 = refusals.all().iter().map(|(_, untold)| untold).sum();
        assert_eq!(untold + u64::from(most), 1_000_000, "none is lost");
        assert_eq!(told(&mut refusals, "new", began, 1).0, 1);
    }
}
