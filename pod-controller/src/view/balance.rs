use super::View;
use crate::api;
use crate::balance::{BalanceMode, LoadPicture};
use crate::state::Move;

impl View {
    /// What passes through NICs, and what would be done about it.
    pub fn balance(&self, picture: &LoadPicture) -> api::Balance {
        let nics = picture.measured.nics.iter().filter_map(|(id, mbps)| {
            Some(api::NicLoad {
                name: self.state.device_name(id),
                carries_mbps: *mbps,
                speed_mbps: self.state.speed_mbps(id)?,
                overloaded: picture.overloaded.contains(id),
            })
        });
        let moves = picture.plan(&self.state);
        api::Balance {
            mode: match picture.policy.mode {
                BalanceMode::Off => api::BalanceMode::Off,
                BalanceMode::Advise => api::BalanceMode::Advise,
                BalanceMode::Move => api::BalanceMode::Move,
            },
            high_percent: picture.policy.relief.high_percent,
            low_percent: picture.policy.relief.low_percent,
            nics: nics.collect(),
            moves: moves.iter().filter_map(|it| self.planned(it)).collect(),
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

    /// The explanation of an instance, with what is measured now.
    pub fn explanation_with(&self, name: &str, picture: &LoadPicture) -> Option<api::Explanation> {
        let mut explanation = self.explanation(name)?;
        let balance = self.balance(picture);
        for device in &mut explanation.devices {
            let planned = |it: &&api::PlannedMove| it.instance == name && it.device == device.device;
            let planned = balance.moves.iter().find(planned);
            for candidate in &mut device.candidates {
                let Some(nic) = balance.nics.iter().find(|nic| nic.name == candidate.name) else { continue };
                let percent = nic.carries_mbps.saturating_mul(100) / nic.speed_mbps.max(1);
                candidate.notes.push(format!("carries {} Mbit/s now, {percent} %", nic.carries_mbps));
                if nic.overloaded {
                    candidate.notes.push(format!("overloaded: {} % for a while", balance.high_percent));
                }
                match planned {
                    Some(it) if it.from == candidate.name => {
                        candidate.notes.push(format!("{} Mbit/s of that would move to {}", it.mbps, it.to));
                    }
                    Some(it) if it.to == candidate.name => {
                        candidate.notes.push(format!("{} Mbit/s would come from {}", it.mbps, it.from));
                    }
                    _ => {}
                }
            }
        }
        Some(explanation)
    }
}
