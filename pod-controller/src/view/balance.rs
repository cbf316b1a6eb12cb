use pod_api as api;
use pod_state::{Move, Rates, VolumeMove};

use super::View;
use crate::balance::{BalanceMode, LoadPicture};

impl View {
    /// What passes through NICs and what SSDs do, and what would be done about it.
    pub fn balance(&self, picture: &LoadPicture) -> api::Balance {
        let measured = picture.measured();
        let nics = measured.nics.iter().filter_map(|(id, mbps)| {
            Some(api::NicLoad {
                name: self.state.device_name(id),
                carries_mbps: *mbps,
                speed_mbps: self.state.speed_mbps(id)?,
                overloaded: picture.overloaded.contains(id),
            })
        });
        let moves = picture.plan(&self.state, &measured);
        let policy = &picture.policy.nics;
        api::Balance {
            mode: shown(policy.mode),
            high_percent: policy.relief.high_percent,
            low_percent: policy.relief.low_percent,
            nics: nics.collect(),
            moves: moves.iter().filter_map(|it| self.planned(it)).collect(),
            volumes: Some(self.volume_balance(picture)),
            unknown_here: None,
        }
    }

    fn volume_balance(&self, picture: &LoadPicture) -> api::VolumeBalance {
        let disks = picture.disks();
        let copying = self.state.copying_ssds();
        let ssds = disks.ssds.iter().filter_map(|(id, does)| {
            let used_permille = self.state.devices.get(id)?.can_do().used_permille(*does);
            Some(api::SsdLoad {
                name: self.state.device_name(id),
                iops: does.iops,
                bytes_per_second: does.bytes_per_second,
                used_percent: used_permille.map(|used| used / 10),
                overloaded: picture.overloaded_ssds.contains(id),
                copying: copying.contains(id),
            })
        });
        let moves = picture.plan_volumes(&self.state, &disks);
        let policy = &picture.policy.ssds;
        api::VolumeBalance {
            mode: shown(policy.mode),
            high_percent: policy.relief.high_percent,
            low_percent: policy.relief.low_percent,
            bytes_max: picture.policy.volume_bytes_max,
            ssds: ssds.collect(),
            moves: moves.iter().filter_map(|it| self.planned_volume(it)).collect(),
        }
    }

    fn planned(&self, it: &Move) -> Option<api::PlannedMove> {
        let lease = self.state.leases.get(&it.lease)?;
        Some(api::PlannedMove {
            instance: self.state.instances.get(&lease.instance)?.name.clone(),
            device: lease.device.clone(),
            from: self.state.device_name(&it.from),
            to: self.state.device_name(&it.to),
            mbps: it.mbps,
        })
    }

    fn planned_volume(&self, it: &VolumeMove) -> Option<api::PlannedVolumeMove> {
        let lease = self.state.lease_of_volume(it.volume)?;
        Some(api::PlannedVolumeMove {
            volume: self.state.volumes.get(&it.volume)?.name.clone(),
            instance: self.state.instances.get(&lease.instance)?.name.clone(),
            device: lease.device.clone(),
            from: self.state.device_name(&it.from),
            to: self.state.device_name(&it.to),
            iops: it.rates.iops,
            bytes_per_second: it.rates.bytes_per_second,
        })
    }

    /// The explanation of an instance, with what is measured now.
    pub fn explanation_with(&self, name: &str, picture: &LoadPicture) -> Option<api::Explanation> {
        let mut explanation = self.explanation(name)?;
        let balance = self.balance(picture);
        for device in &mut explanation.devices {
            for candidate in &mut device.candidates {
                candidate.notes.extend(nic_notes(&balance, name, &device.device, &candidate.name));
                if let Some(volumes) = &balance.volumes {
                    candidate.notes.extend(ssd_notes(volumes, name, &device.device, &candidate.name));
                }
            }
        }
        Some(explanation)
    }
}

const fn shown(mode: BalanceMode) -> api::BalanceMode {
    match mode {
        BalanceMode::Off => api::BalanceMode::Off,
        BalanceMode::Advise => api::BalanceMode::Advise,
        BalanceMode::Move => api::BalanceMode::Move,
    }
}

/// What there is to say of a NIC that a device of an instance could have.
fn nic_notes(balance: &api::Balance, instance: &str, device: &str, nic: &str) -> Vec<String> {
    let Some(load) = balance.nics.iter().find(|it| it.name == nic) else { return Vec::new() };
    let percent = load.carries_mbps.saturating_mul(100) / load.speed_mbps.max(1);
    let mut notes = vec![format!("carries {} Mbit/s now, {percent} %", load.carries_mbps)];
    if load.overloaded {
        notes.push(format!("overloaded: {} % for a while", balance.high_percent));
    }
    match balance.moves.iter().find(|it| it.instance == instance && it.device == device) {
        Some(it) if it.from == nic => {
            notes.push(format!("{} Mbit/s of that would move to {}", it.mbps, it.to));
        }
        Some(it) if it.to == nic => notes.push(format!("{} Mbit/s would come from {}", it.mbps, it.from)),
        _ => {}
    }
    notes
}

/// What there is to say of an SSD that a disk of an instance could have.
fn ssd_notes(balance: &api::VolumeBalance, instance: &str, device: &str, ssd: &str) -> Vec<String> {
    let Some(load) = balance.ssds.iter().find(|it| it.name == ssd) else { return Vec::new() };
    let does = Rates { iops: load.iops, bytes_per_second: load.bytes_per_second };
    let used = load.used_percent.map_or_else(String::new, |percent| format!(", {percent} %"));
    let mut notes = vec![format!("does {does} now{used}")];
    if load.overloaded {
        notes.push(format!("overloaded: {} % for a while", balance.high_percent));
    }
    match balance.moves.iter().find(|it| it.instance == instance && it.device == device) {
        Some(it) if it.from == ssd || it.to == ssd => {
            let brings = Rates { iops: it.iops, bytes_per_second: it.bytes_per_second };
            notes.push(if it.from == ssd {
                format!("{brings} of that would move to {}", it.to)
            } else {
                format!("{brings} would come from {}", it.from)
            });
        }
        _ => {}
    }
    notes
}
