//! `[balance]`: when NICs are relieved, and, in `[balance.volumes]`, SSDs.

use std::time::Duration;

use pod_api::ByteSize;
use pod_state::Relief;
use serde::Deserialize;

use crate::balance::{BalanceMode, BalancePolicy, ReliefPolicy};

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
    /// What is done about SSDs that do too much.
    pub volumes: VolumesSection,
}

/// What is done about SSDs that do too much.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub struct VolumesSection {
    /// Whether volumes move, or it is only told.
    pub mode: BalanceMode,
    /// An SSD that does so much of what it can is overloaded, in percent.
    pub high_percent: u32,
    /// It is relieved until it does no more than this, and no volume fills another beyond this, in percent.
    pub low_percent: u32,
    /// For how many windows in a row an SSD must do too much; they are as long as those of NICs.
    pub windows: u32,
    /// Volumes that are larger stay.
    pub bytes_max: ByteSize,
    /// How many volumes move within `period-ms` at most.
    pub moves_max: u32,
    /// The time for which moves are counted.
    pub period_ms: u64,
    /// For how long a volume that was moved stays where it is.
    pub rest_ms: u64,
}

impl Default for BalanceSection {
    fn default() -> Self {
        let BalancePolicy { window, nics, .. } = BalancePolicy::default();
        Self {
            mode: nics.mode,
            high_percent: nics.relief.high_percent,
            low_percent: nics.relief.low_percent,
            window_ms: ms(window),
            windows: nics.windows,
            moves_max: nics.relief.moves_max,
            period_ms: ms(nics.period),
            rest_ms: ms(nics.rest),
            volumes: VolumesSection::default(),
        }
    }
}

impl Default for VolumesSection {
    fn default() -> Self {
        let BalancePolicy { ssds, volume_bytes_max, .. } = BalancePolicy::default();
        Self {
            mode: ssds.mode,
            high_percent: ssds.relief.high_percent,
            low_percent: ssds.relief.low_percent,
            windows: ssds.windows,
            bytes_max: ByteSize::new(volume_bytes_max),
            moves_max: ssds.relief.moves_max,
            period_ms: ms(ssds.period),
            rest_ms: ms(ssds.rest),
        }
    }
}

impl BalanceSection {
    pub(super) fn check(&self) -> Result<(), String> {
        check_ms("balance.window-ms", self.window_ms)?;
        let BalancePolicy { nics, ssds, .. } = self.policy();
        check(&nics, "balance")?;
        check(&ssds, "balance.volumes")?;
        match self.volumes.bytes_max {
            size if size.get() < 4096 => Err(format!("balance.volumes.bytes-max = {size}: use 4K or more")),
            _ => Ok(()),
        }
    }

    pub(super) fn policy(&self) -> BalancePolicy {
        let volumes = &self.volumes;
        BalancePolicy {
            window: Duration::from_millis(self.window_ms),
            nics: ReliefPolicy {
                mode: self.mode,
                relief: Relief {
                    high_percent: self.high_percent,
                    low_percent: self.low_percent,
                    moves_max: self.moves_max,
                },
                windows: self.windows,
                rest: Duration::from_millis(self.rest_ms),
                period: Duration::from_millis(self.period_ms),
            },
            ssds: ReliefPolicy {
                mode: volumes.mode,
                relief: Relief {
                    high_percent: volumes.high_percent,
                    low_percent: volumes.low_percent,
                    moves_max: volumes.moves_max,
                },
                windows: volumes.windows,
                rest: Duration::from_millis(volumes.rest_ms),
                period: Duration::from_millis(volumes.period_ms),
            },
            volume_bytes_max: volumes.bytes_max.get(),
        }
    }
}

/// What holds for NICs and SSDs alike.
fn check(policy: &ReliefPolicy, section: &str) -> Result<(), String> {
    let Relief { high_percent: high, low_percent: low, moves_max } = policy.relief;
    if !(1..=100).contains(&high) || !(1..high).contains(&low) {
        return Err(format!(
            "{section}.high-percent = {high}, low-percent = {low}: use 1 to 100, and less for the lower one"
        ));
    }
    check_ms(&format!("{section}.period-ms"), ms(policy.period))?;
    check_ms(&format!("{section}.rest-ms"), ms(policy.rest))?;
    let windows = policy.windows;
    if !(1..=1000).contains(&windows) || !(1..=1000).contains(&moves_max) {
        return Err(format!("{section}.windows = {windows}, moves-max = {moves_max}: use 1 to 1000"));
    }
    Ok(())
}

fn check_ms(name: &str, ms: u64) -> Result<(), String> {
    if (100..=86_400_000).contains(&ms) {
        return Ok(());
    }
    Err(format!("{name} = {ms}: use 100 to 86400000"))
}

fn ms(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
