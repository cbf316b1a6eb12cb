use std::fs;
use std::time::Duration;

/// What the kernel's scheduler says of a thread.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Times {
    /// Processor time.
    pub(super) ran: Duration,
    /// For how long it wanted to run, and others did.
    pub(super) waited: Duration,
}

/// Of the thread with this id, until it ends. The kernel notes what a thread that runs has run at its ticks.
pub(super) fn times(thread: u32) -> Option<Times> {
    parse(&fs::read_to_string(format!("/proc/{thread}/schedstat")).ok()?)
}

fn parse(text: &str) -> Option<Times> {
    let mut numbers = text.split_whitespace().map(|number| number.parse().map(Duration::from_nanos));
    Some(Times { ran: numbers.next()?.ok()?, waited: numbers.next()?.ok()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_times_are_there() {
        let ns = Duration::from_nanos;
        assert_eq!(parse("17 4 3\n"), Some(Times { ran: ns(17), waited: ns(4) }));
        assert_eq!(parse("17"), None);
        assert_eq!(parse("-1 0 0"), None);
        assert!(times(std::process::id()).is_some());
        assert_eq!(times(u32::MAX), None);
    }
}
