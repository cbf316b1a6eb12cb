use pod_state::{DeviceId, Rates, Relief, State, share};

/// How much a device carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Load {
    /// Too much.
    High,
    /// Neither too much nor little enough.
    Between,
    /// Little enough.
    Low,
}

impl Load {
    /// Of a NIC through which so much passes; nothing if there is no such NIC.
    pub(super) fn of_nic(state: &State, nic: &DeviceId, mbps: u64, relief: Relief) -> Option<Self> {
        let speed_mbps = state.speed_mbps(nic)?;
        Some(if mbps >= share(speed_mbps, relief.high_percent).max(1) {
            Self::High
        } else if mbps > share(speed_mbps, relief.low_percent) {
            Self::Between
        } else {
            Self::Low
        })
    }

    /// Of an SSD that does so much; nothing if there is no such SSD. One that does not say what it can do has little to carry.
    pub(super) fn of_ssd(state: &State, ssd: &DeviceId, does: Rates, relief: Relief) -> Option<Self> {
        let can_do = state.devices.get(ssd)?.can_do();
        Some(if can_do.part(relief.high_percent).is_used_up(does) {
            Self::High
        } else if can_do.part(relief.low_percent).has(does) {
            Self::Low
        } else {
            Self::Between
        })
    }
}
