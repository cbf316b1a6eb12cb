//! `[balance]`: when NICs are relieved.

use std::time::Duration;

use serde::Deserialize;

use crate::balance::{BalanceMode, BalancePolicy};
use crate::state::Relief;

/// What is done about NICs that carry too much.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub struct BalanceSection {
    /// Whether leases move, or it is only told.
    pub mode: BalanceMode,
    /// A NIC that carries so much of its speed is overloaded, in percent.
    pub high_percent: u32,
    /// Leases leave it until it carries no more than this, and none fills another beyond this, in percent.
    pub low_percent: u32,
    /// Over which time rates are taken.
    pub window_ms: u64,
    /// For how many such times in a row a NIC must carry too much.
    pub windows: u32,
    /// How many leases move within `period-ms` at most.
    pub moves_max: u32,
    /// The time for which moves are counted.
    pub period_ms: u64,
    /// For how long a lease that was moved stays where it is.
    pub rest_ms: u64,
}

impl Default for BalanceSection {
    fn default() -> Self {
        let BalancePolicy { mode, relief, window, windows, rest, period } = BalancePolicy::default();
        let ms = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        Self {
            mode,
            high_percent: relief.high_percent,
            low_percent: relief.low_percent,
            window_ms: ms(window),
            windows,
            moves_max: relief.moves_max,
            period_ms: ms(period),
            rest_ms: ms(rest),
        }
    }
}

impl BalanceSection {
    pub(super) fn check(&self) -> Result<(), String> {
        let (high, low) = (self.high_percent, self.low_percent);
        if !(1..=100).contains(&high) || !(1..high).contains(&low) {
            return Err(format!(
                "balance.high-percent = {high}, low-percent = {low}: use 1 to 100, and less for the lower one"
            ));
        }
        for (name, ms) in
            [("window-ms", self.window_ms), ("period-ms", self.period_ms), ("rest-ms", self.rest_ms)]
        {
            if !(100..=86_400_000).contains(&ms) {
                return Err(format!("balance.{name} = {ms}: use 100 to 86400000"));
            }
        }
        if !(1..=1000).contains(&self.windows) || !(1..=1000).contains(&self.moves_max) {
            let (windows, moves) = (self.windows, self.moves_max);
            return Err(format!("balance.windows = {windows}, moves-max = {moves}: use 1 to 1000"));
        }
        Ok(())
    }

    pub(super) fn policy(&self) -> BalancePolicy {
        let (high_percent, low_percent, moves_max) = (self.high_percent, self.low_percent, self.moves_max);
        BalancePolicy {
            mode: self.mode,
            relief: Relief { high_percent, low_percent, moves_max },
            window: Duration::from_millis(self.window_ms),
            windows: self.windows,
            rest: Duration::from_millis(self.rest_ms),
            period: Duration::from_millis(self.period_ms),
        }
    }
}
