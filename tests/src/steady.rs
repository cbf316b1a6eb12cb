//! Whether guests move what they should, over several windows in a row.
//!
//! One window that happens to be right says little. So what is judged begins when shares have come about, in two windows in a row, and is the mean
//! over windows that follow each other, each guest by what it should move itself. That is measured again, a few times, only where the machine has spoilt it:
//! where the path was not full, for then something else kept guests from moving what they may, or where a wrong mean comes of windows that differ, for a
//! host that stands still for a while is not counted by the others. Windows that are wrong alike are wrong.

use std::time::{Duration, Instant};

/// What is judged together.
pub const WINDOWS: usize = 6;
/// How often in a row windows must be right before they are judged.
const ONCE_MORE: usize = 2;
/// How often windows that the machine has spoilt are measured again.
const SPOILT_MOST: usize = 5;

/// Whether a rate is within 5 % of another.
pub fn near(rate: f64, expected: f64) -> bool {
    (rate - expected).abs() <= 0.05 * expected
}

/// What windows in a row say.
#[derive(Debug, Clone, PartialEq)]
enum Verdict {
    Right,
    /// Less was moved than there is, or windows differ and their mean is wrong.
    Spoilt,
    /// The first guest that moved something else than it should, and what that is.
    Wrong(usize, f64),
}

/// Waits until what guests move, in bytes/s, is as it should be in two windows in a row. It soon is, unless the machine keeps them from moving what
/// they may.
///
/// # Panics
/// If that takes longer than `patience`.
pub fn converge(
    what: &str,
    patience: Duration,
    mut look: impl FnMut() -> Vec<f64>,
    is_so: impl Fn(&[f64]) -> bool,
) {
    let (began, mut right) = (Instant::now(), 0);
    loop {
        let rates = look();
        eprintln!("{what}: {} MB/s", megabytes(&rates));
        right = if is_so(&rates) { right + 1 } else { 0 };
        if right == ONCE_MORE {
            return;
        }
        assert!(began.elapsed() < patience, "never: {what}; last {rates:?}");
    }
}

/// Waits until each guest moves what it should, and judges the mean of [`WINDOWS`] windows in a row after that. `expected` says what each should move,
/// given what it moves: one that wants less than its share moves what it wants. Together it is what the path carries, which is `capacity`. Returns
/// the mean of each.
///
/// # Panics
/// If a guest moves something else, or the machine never lets them fill the path.
pub fn judge(
    what: &str,
    patience: Duration,
    capacity: f64,
    mut look: impl FnMut() -> Vec<f64>,
    expected: impl Fn(&[f64]) -> Vec<f64>,
) -> Vec<f64> {
    for _ in 0..SPOILT_MOST {
        converge(what, patience, &mut look, |rates| {
            verdict(&[rates.to_vec()], capacity, &expected) == Verdict::Right
        });
        let windows: Vec<Vec<f64>> = (0..WINDOWS).map(|_| look()).collect();
        let mean = mean(&windows);
        eprintln!(
            "{what}, {WINDOWS} windows: {} ± {} MB/s",
            megabytes(&mean),
            megabytes(&spread(&windows, &mean))
        );
        match verdict(&windows, capacity, &expected) {
            Verdict::Right => return mean,
            Verdict::Spoilt => eprintln!("{what}: the machine has spoilt that: once more"),
            Verdict::Wrong(guest, expected) => {
                panic!("{what}: guest {guest} moves {}, and should {expected}: {windows:?}", mean[guest])
            }
        }
    }
    panic!("{what}: the path is not full, or shares swing, {SPOILT_MOST} times");
}

/// Measures until more of what was measured is as it should be than is not, a few times at most, and returns the last of it. What a host that stood still
/// for a while has spoilt is right the next times, and what is wrong by itself is wrong again; what goes wrong in fewer than half of all times only is not seen by
/// this.
///
/// # Panics
/// If most of it is not.
pub fn undisturbed<T: std::fmt::Debug>(
    what: &str,
    mut measure: impl FnMut() -> T,
    is_so: impl Fn(&T) -> bool,
) -> T {
    let (mut right, mut wrong) = (0, Vec::new());
    // More than half of so many.
    while wrong.len() <= SPOILT_MOST / 2 {
        let measured = measure();
        if is_so(&measured) {
            right += 1;
            if right > wrong.len() {
                return measured;
            }
        } else {
            eprintln!("not so: {what}: {measured:.0?}");
            wrong.push(measured);
        }
    }
    panic!("not so, {} times of {}: {what}: {wrong:.0?}", wrong.len(), wrong.len() + right);
}

fn verdict(windows: &[Vec<f64>], capacity: f64, expected: impl Fn(&[f64]) -> Vec<f64>) -> Verdict {
    let mean = mean(windows);
    if mean.iter().sum::<f64>() < 0.95 * capacity {
        return Verdict::Spoilt;
    }
    let should = expected(&mean);
    let wrong = mean.iter().zip(&should).position(|(is, should)| *is <= 0.0 || !near(*is, *should));
    match wrong {
        None => Verdict::Right,
        Some(guest) if spread(windows, &mean)[guest] > 0.05 * should[guest] => Verdict::Spoilt,
        Some(guest) => Verdict::Wrong(guest, should[guest]),
    }
}

#[expect(clippy::cast_precision_loss, reason = "few windows")]
fn mean(windows: &[Vec<f64>]) -> Vec<f64> {
    let guests = windows.first().map_or(0, Vec::len);
    (0..guests)
        .map(|guest| windows.iter().map(|window| window[guest]).sum::<f64>() / windows.len() as f64)
        .collect()
}

/// The standard deviation of a window.
fn spread(windows: &[Vec<f64>], mean: &[f64]) -> Vec<f64> {
    let squares: Vec<Vec<f64>> = windows
        .iter()
        .map(|window| window.iter().zip(mean).map(|(rate, mean)| (rate - mean).powi(2)).collect())
        .collect();
    self::mean(&squares).into_iter().map(f64::sqrt).collect()
}

fn megabytes(rates: &[f64]) -> String {
    let each: Vec<String> = rates.iter().map(|rate| format!("{:.2}", rate / 1e6)).collect();
    each.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 1:3 of what a third one leaves.
    fn expected(rates: &[f64]) -> Vec<f64> {
        let rest = 100.0 - rates[2];
        vec![rest / 4.0, rest * 3.0 / 4.0, rates[2]]
    }

    fn of(windows: &[[f64; 3]]) -> Verdict {
        verdict(&windows.iter().map(|window| window.to_vec()).collect::<Vec<_>>(), 100.0, expected)
    }

    #[test]
    fn the_mean_of_windows_is_judged_and_each_guest_by_its_own_share() {
        assert_eq!(of(&[[20.0, 60.0, 20.0]]), Verdict::Right);
        assert_eq!(of(&[[19.0, 61.0, 20.0], [21.0, 59.0, 20.0], [20.5, 59.5, 20.0]]), Verdict::Right);
        // One window is right, and the mean is not; the largest is within 5 %, and the smallest is not.
        assert_eq!(
            of(&[[20.0, 60.0, 20.0], [21.9, 58.1, 20.0], [21.9, 58.1, 20.0]]),
            Verdict::Wrong(0, 20.0)
        );
        assert_eq!(of(&[[20.0, 60.0, 20.0], [24.0, 56.0, 20.0]]), Verdict::Spoilt);
        assert_eq!(of(&[[18.0, 62.0, 20.0]]), Verdict::Wrong(0, 20.0));
        assert_eq!(of(&[[25.0, 75.0, 0.0]]), Verdict::Wrong(2, 0.0), "one does nothing");
        // More than there is.
        assert_eq!(of(&[[22.0, 66.0, 20.0]]), Verdict::Wrong(0, 20.0));
        assert_eq!(of(&[[18.0, 54.0, 20.0]]), Verdict::Spoilt);
    }

    #[test]
    fn windows_that_the_machine_has_spoilt_are_measured_again() {
        let mut seen = 0;
        let mut look = || {
            seen += 1;
            // Unfair at first, then right, then nobody gets on for a while.
            match seen {
                1 => vec![50.0, 50.0],
                4..=9 => vec![10.0, 30.0],
                _ => vec![25.0, 75.0],
            }
        };
        let mean = judge("1:3", Duration::from_mins(1), 100.0, &mut look, |_| vec![25.0, 75.0]);
        assert_eq!((mean, seen), (vec![25.0, 75.0], 3 + WINDOWS + 2 + WINDOWS));
    }

    #[test]
    fn what_was_spoilt_is_measured_again() {
        let mut measured = 0;
        let mut measure = || {
            measured += 1;
            measured
        };
        assert_eq!(undisturbed("all but the second are right", &mut measure, |it| *it != 2), 1);
        assert_eq!(undisturbed("all but the second are right", &mut measure, |it| *it != 2), 4);
    }

    #[test]
    #[should_panic(expected = "not so, 3 times of 4: the second is right: [1, 3, 4]")]
    fn what_is_right_once_is_wrong() {
        let mut measured = 0;
        let measure = || {
            measured += 1;
            measured
        };
        undisturbed("the second is right", measure, |it| *it == 2);
    }

    #[test]
    #[should_panic(expected = "guest 0 moves")]
    fn windows_in_which_guests_have_something_else_are_wrong() {
        let mut seen = 0;
        let look = || {
            seen += 1;
            if seen < 3 { vec![25.0, 75.0] } else { vec![30.0, 70.0] }
        };
        judge("1:3", Duration::from_mins(1), 100.0, look, |_| vec![25.0, 75.0]);
    }
}
