//! What is compared.

use clap::ValueEnum;
use cxl_channel::ReceivePolicy;

/// A way to pass messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(crate) enum Variant {
    Bypass,
    NaivePrefetch,
    InvalidateConsumed,
    InvalidatePrefetched,
    Adaptive,
    Coherent,
    Rtrb,
    Gil,
}

/// The variant that the software mode uses by itself.
pub(crate) const OURS: Variant = Variant::Adaptive;

impl Variant {
    pub(crate) const ALL: [Self; 8] = [
        Self::Bypass,
        Self::NaivePrefetch,
        Self::InvalidateConsumed,
        Self::InvalidatePrefetched,
        Self::Adaptive,
        Self::Coherent,
        Self::Rtrb,
        Self::Gil,
    ];

    /// Those of others.
    pub(crate) const RIVALS: [Self; 2] = [Self::Rtrb, Self::Gil];

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Bypass => "bypass cache",
            Self::NaivePrefetch => "naive prefetch",
            Self::InvalidateConsumed => "+ invalidate consumed",
            Self::InvalidatePrefetched => "+ invalidate prefetched",
            Self::Adaptive => "adaptive (software mode's default)",
            Self::Coherent => "hardware-coherent",
            Self::Rtrb => "rtrb, coherent",
            Self::Gil => "gil, coherent",
        }
    }

    /// In the name of a figure.
    pub(crate) const fn slug(self) -> &'static str {
        match self {
            Self::Bypass => "bypass",
            Self::NaivePrefetch => "naive-prefetch",
            Self::InvalidateConsumed => "invalidate-consumed",
            Self::InvalidatePrefetched => "invalidate-prefetched",
            Self::Adaptive => "adaptive",
            Self::Coherent => "coherent",
            Self::Rtrb => "rtrb",
            Self::Gil => "gil",
        }
    }

    /// How the receiver uses its cache; nothing if hardware keeps it coherent.
    pub(crate) const fn policy(self) -> Option<ReceivePolicy> {
        match self {
            Self::Bypass => Some(ReceivePolicy::Bypass),
            Self::NaivePrefetch => Some(ReceivePolicy::NaivePrefetch),
            Self::InvalidateConsumed => Some(ReceivePolicy::InvalidateConsumed),
            Self::InvalidatePrefetched => Some(ReceivePolicy::InvalidatePrefetched),
            Self::Adaptive => Some(ReceivePolicy::Adaptive),
            Self::Coherent | Self::Rtrb | Self::Gil => None,
        }
    }
}
