//! How a receiver uses its cache on a ring that other hosts write without telling it.

/// How many lines ahead a receiver prefetches (Oasis §3.2.2 found 16 to be best).
pub const PREFETCH_LINES: u64 = 16;

/// What a receiver prefetches and invalidates. All of them deliver the same messages; they differ in speed. The
/// first four are the steps of Oasis, Figure 6, kept for the benchmark. On coherent memory they are all the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ReceivePolicy {
    /// Invalidates the line before every look, and prefetches nothing.
    Bypass,
    /// Invalidates the line only after it found nothing new there. Where it finds something, it prefetches as many lines
    /// as [`PREFETCH_LINES`] says, and the next ones once these are used up. Consumed lines stay in the cache, where they
    /// keep the next lap's prefetches from doing anything.
    NaivePrefetch,
    /// Also invalidates a line once all its messages are consumed. Lines that were prefetched too early, before
    /// the sender wrote to them, still stay stale.
    InvalidateConsumed,
    /// Also invalidates, after it found nothing new, the lines that it prefetched.
    InvalidatePrefetched,
    /// As the one before, but prefetches only as far ahead as messages have lately come without a pause: one line
    /// further with each whole line consumed, and none after it found nothing new. At moderate rates
    /// prefetching all the way would bring in mostly stale lines, only to invalidate them. A consumed line is invalidated once
    /// the next one is consumed or a look found nothing, for who answers a message would wait for that.
    #[default]
    Adaptive,
}

impl ReceivePolicy {
    pub(crate) const fn prefetches(self) -> bool {
        !matches!(self, Self::Bypass)
    }

    pub(crate) const fn invalidates_before(self) -> bool {
        matches!(self, Self::Bypass)
    }

    pub(crate) const fn invalidates_consumed(self) -> bool {
        matches!(self, Self::InvalidateConsumed | Self::InvalidatePrefetched | Self::Adaptive)
    }

    pub(crate) const fn invalidates_prefetched(self) -> bool {
        matches!(self, Self::InvalidatePrefetched | Self::Adaptive)
    }

    pub(crate) const fn adapts(self) -> bool {
        matches!(self, Self::Adaptive)
    }
}
