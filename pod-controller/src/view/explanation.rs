use cxl_pool::HostId;
use pod_api::{self as api, ByteSize, CandidatePart};
use pod_state::{
    Device, DeviceId, Filling, Health, Instance, Kind, Lease, LeaseKind, Loads, REPLACED, Rates, SsdLoad,
    Volume,
};

use super::View;

impl View {
    fn nic_rule(&self) -> String {
        let last = match self.state.nic_filling() {
            Filling::Spread => {
                "the least loaded one for its speed, among equals one to whose host there is a channel already"
            }
            Filling::Pack => "the most loaded one for its speed that is not asked for all of it",
        };
        format!(
            "one with room for what is reserved, and a backup on another host that could carry it too; an ordinary NIC before one \
             that is kept for failover; one that serves others of its group; one of the instance's own host; then {last}"
        )
    }

    fn ssd_rule(&self) -> String {
        let share = match self.state.ssd_filling() {
            Filling::Spread => "largest share free",
            Filling::Pack => "smallest share free where there is room",
        };
        format!(
            "the SSD that was named when it was made (`device`), or one of the host that was (`near`); otherwise replicas on different hosts, none where another volume of its `apart` group lies; first an SSD on which others of its \
             `together` group lie, then one of their hosts, then the SSD with the {share}, of bytes and of requests/s"
        )
    }

    /// Why the devices of an instance are where they are.
    pub fn explanation(&self, name: &str) -> Option<api::Explanation> {
        let instance = self.state.instance_named(name)?;
        let leases = instance.nics.iter().chain(&instance.disks).filter_map(|id| self.state.leases.get(id));
        let devices = leases.filter_map(|lease| self.explain(instance, lease)).collect();
        Some(api::Explanation { instance: name.to_owned(), devices })
    }

    fn explain(&self, instance: &Instance, lease: &Lease) -> Option<api::DeviceExplanation> {
        let (rule, on_failure, mut candidates) = match &lease.kind {
            LeaseKind::Nic { .. } => {
                let loads = self.state.loads();
                let nics = self.state.devices.iter().filter(|(_, device)| device.is_nic());
                let candidates = nics.map(|(id, nic)| self.nic(instance.host, lease, &loads, id, nic));
                (self.nic_rule(), self.without_nic(lease, &loads), candidates.collect::<Vec<_>>())
            }
            LeaseKind::Disk { volume, .. } => {
                let volume = self.state.volumes.get(volume)?;
                let ssds = self.state.devices.iter().filter(|(_, device)| !device.is_nic());
                let loads = self.state.ssd_loads();
                let candidates =
                    ssds.map(|(id, ssd)| self.ssd(instance.host, volume, loads.get(id), (id, ssd)));
                (self.ssd_rule(), self.without_ssd(volume), candidates.collect())
            }
        };
        candidates.sort_by(|a, b| (a.part, &a.name).cmp(&(b.part, &b.name)));
        Some(api::DeviceExplanation { device: lease.device.clone(), rule, on_failure, candidates })
    }

    fn without_nic(&self, lease: &Lease, loads: &Loads) -> String {
        let others = lease.active_nic().map_or_else(Vec::new, |active| self.state.other_rails(active));
        let others: Vec<String> = {
            let works = others.iter().filter(|nic| self.state.is_usable(nic));
            works.map(|nic| self.state.device_name(nic)).collect()
        };
        if !others.is_empty() {
            return format!("its flows go over {} at once", others.join(", "));
        }
        if let LeaseKind::Nic { reserved_mbps: mbps @ 1.., .. } = lease.kind
            && let Some(standby) = lease.standby_nic().filter(|standby| self.state.is_up(standby))
        {
            let standby = self.state.device_name(standby);
            return if loads.is_failover_proven(lease) {
                format!(
                    "it moves to {standby} at once, which has the {mbps} Mbit/s to spare that it reserves"
                )
            } else {
                format!(
                    "it moves to {standby} at once, where the {mbps} Mbit/s that it reserves are not sure"
                )
            };
        }
        match lease.standby_nic() {
            Some(standby) if self.state.is_up(standby) => {
                format!("it moves to {} at once", self.state.device_name(standby))
            }
            Some(standby) => format!(
                "it moves to whatever NIC works then: its backup {} does not work now",
                self.state.device_name(standby)
            ),
            None => "it moves to whatever NIC works then: it has no backup".to_owned(),
        }
    }

    fn without_ssd(&self, volume: &Volume) -> String {
        let good = volume.replicas.iter().filter(|it| !it.stale && self.state.is_up(&it.device)).count();
        match good {
            0 | 1 => "its guest waits for the SSD, and gets I/O errors if it does not come back".to_owned(),
            _ => format!("it goes on with the other {}", good - 1),
        }
    }

    fn nic(&self, host: HostId, lease: &Lease, loads: &Loads, id: &DeviceId, nic: &Device) -> api::Candidate {
        let mut notes = self.common_notes(host, id, nic);
        let mut usable = self.state.is_usable(id);
        if let (LeaseKind::Nic { mtu: needed, reserved_mbps, apart, .. }, Some(load)) =
            (&lease.kind, loads.get(id))
        {
            let (leases, standby, speed) = (load.leases, load.standby_leases, load.speed_mbps);
            notes.push(format!("{leases} leases and {standby} that would come, for {speed} Mbit/s"));
            let (reserved, incoming) = (load.reserved_mbps, load.worst_incoming_mbps());
            if reserved + incoming > 0 {
                let of = load.capacity_mbps;
                notes.push(format!(
                    "{reserved} Mbit/s of {of} reserved, {incoming} more if the worst host failed"
                ));
            }
            if load.backup {
                notes.push("kept for failover".to_owned());
            }
            if load.mtu < *needed {
                notes.push(format!("its MTU of {} is less than {needed}", load.mtu));
                usable = false;
            }
            if !load.has_room(*reserved_mbps) && lease.active_nic() != Some(id) {
                notes.push(format!("no room for {reserved_mbps} Mbit/s"));
                usable = false;
            }
            let own = lease.active_nic().map(|nic| nic.host);
            if apart.is_some() && own != Some(id.host) && self.state.serves_apart(id.host, apart.as_deref()) {
                notes.push("its host serves another one of the group".to_owned());
                usable = false;
            }
        }
        let part = match id {
            _ if lease.active_nic().is_some_and(|active| self.state.are_rails(active, id)) => {
                CandidatePart::Active
            }
            _ if lease.standby_nic() == Some(id) => CandidatePart::Standby,
            _ if usable => CandidatePart::Possible,
            _ => CandidatePart::Excluded,
        };
        if lease.draining_nic() == Some(id) {
            notes.push("it was left in order, and is still received from".to_owned());
        }
        api::Candidate { name: self.state.device_name(id), part, notes }
    }

    fn ssd(
        &self,
        host: HostId,
        volume: &Volume,
        load: Option<&SsdLoad>,
        (id, ssd): (&DeviceId, &Device),
    ) -> api::Candidate {
        let mut notes = self.common_notes(host, id, ssd);
        let mut usable = self.state.is_usable(id);
        if let Kind::Ssd { size_bytes, strangers, .. } = &ssd.kind {
            let free = size_bytes.saturating_sub(load.map_or(0, SsdLoad::occupied_bytes));
            notes.push(format!("{} of {} free", ByteSize::new(free), ByteSize::new(*size_bytes)));
            let needed = volume.rates_of_place();
            let capacity = self.state.rate_capacity(ssd);
            let reserved = load.map_or_else(Rates::default, SsdLoad::rates);
            notes.extend(capacity.told(reserved));
            if volume.replica_on(id).is_none() && !capacity.left(reserved).has(needed) {
                notes.push(format!("no room for {needed}"));
                usable = false;
            }
            if !strangers.is_empty() {
                notes.push("holds volumes that nobody has adopted".to_owned());
                usable = false;
            }
            if free < volume.size_bytes {
                usable = false;
            }
        }
        if let (Some(group), Some(other)) = (&volume.groups.apart, self.state.apart_at(volume, id.host)) {
            notes
                .push(format!("{} of the group {group}, which is to be apart, lies on its host", other.name));
            usable = false;
        }
        if let (Some(group), Some(other)) = (&volume.groups.together, self.state.together_at(volume, id.host))
        {
            notes.push(format!(
                "{} of the group {group}, which is to be together, lies on its host",
                other.name
            ));
        }
        let part = match volume.replica_on(id) {
            Some(replica) if replica.stale => {
                notes.push("does not have everything yet".to_owned());
                CandidatePart::Standby
            }
            Some(_) => CandidatePart::Active,
            None if !self.state.may_move_to(volume, id) => {
                notes.push("another SSD of its host has the volume".to_owned());
                CandidatePart::Excluded
            }
            None if usable => CandidatePart::Possible,
            None => CandidatePart::Excluded,
        };
        api::Candidate { name: self.state.device_name(id), part, notes }
    }

    fn common_notes(&self, host: HostId, id: &DeviceId, device: &Device) -> Vec<String> {
        let mut notes = Vec::new();
        if id.host == host {
            notes.push("on the instance's own host".to_owned());
        }
        match &device.health {
            Health::Up if self.state.is_up(id) => {}
            Health::Up => notes.push("its host's daemon is not there".to_owned()),
            Health::Down(reason) => notes.push(format!("no link: {reason}")),
            Health::Failed(reason) => notes.push(format!("failed: {reason}")),
            Health::Absent if device.is_replaced() => notes.push(REPLACED.to_owned()),
            Health::Absent => notes.push("its host does not have it any more".to_owned()),
        }
        if let Some(reason) = &device.held {
            notes.push(format!("not trusted: {reason}"));
        }
        if self.state.is_drained(id) {
            notes.push("it is to be empty".to_owned());
        }
        notes
    }
}
