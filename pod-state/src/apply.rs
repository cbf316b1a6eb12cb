use cxl_pool::{EndpointId, Role};
use pod_api::EventKind;
use pod_protocol::ids::RegionId;

use super::attachment::Attached;
use super::change_volume::VolumeChange;
use super::create::{VolumeWish, Wanted};
use super::rates::guarantee;
use super::stripe::StripedWish;
use super::{
    Command, DeviceId, Effect, Health, Lease, LeaseKind, Options, Presence, Purpose, Refusal, RefusalKind,
    State,
};

impl State {
    /// Carries out a command, or refuses it and changes nothing.
    pub fn apply(&mut self, command: &Command) -> Result<Vec<Effect>, Refusal> {
        if let Command::Request { key, labels, expected, asked } = command {
            return self.request((key.as_ref(), expected.as_ref()), labels, asked);
        }
        self.begin();
        let mut effects = Vec::new();
        self.change(command, &mut effects)?;
        self.touch_unbacked();
        self.settle(&mut effects);
        self.conclude(&mut effects);
        self.index += 1;
        Ok(effects)
    }

    #[expect(clippy::too_many_lines, reason = "a line or a few for each of many commands")]
    fn change(&mut self, command: &Command, effects: &mut Vec<Effect>) -> Result<(), Refusal> {
        self.check_spoken(command)?;
        match command {
            Command::Configure { options } => self.configure(options, effects)?,
            Command::AdoptPool { options } => self.adopt_pool(options, effects),
            Command::Join { endpoint, incarnation, join } => {
                self.join(*endpoint, *incarnation, join, effects)?;
            }
            Command::Silent { endpoint } => self.silent(*endpoint, effects),
            Command::Back { endpoint } => self.back(*endpoint, effects),
            Command::Gone { endpoint } => self.gone(*endpoint, effects),
            Command::FenceExpired { endpoint, incarnation } => self.fence_expired(*endpoint, *incarnation),
            Command::GraceExpired { endpoint, incarnation } => {
                self.grace_expired(*endpoint, *incarnation, effects);
            }
            Command::Link { device, up, reason } => self.link(device, *up, reason, effects),
            Command::DeviceFailed { device, reason } => self.device_failed(device, reason, effects),
            Command::DeviceBack { device, report } => self.device_back(device, report, effects),
            Command::MigrateNic { instance, device, to } => {
                self.migrate(instance, device, to.as_ref(), effects)?;
            }
            Command::ChangeNic { instance, device, policy } => {
                self.change_nic(instance, device, policy, effects)?;
            }
            Command::DrainExpired { lease, generation } => self.drain_expired(*lease, *generation),
            Command::FailBack { device } => self.fail_back(device, effects)?,
            Command::HoldLink { device, reason } => self.hold(device, reason, effects),
            Command::ReleaseLink { device, reason } => self.release(device, reason, effects),
            &Command::Attachment { endpoint, lease, connected, running, write_through, untold } => {
                let attached = Attached { connected, running, write_through, untold };
                self.attachment(endpoint, lease, attached, effects);
            }
            Command::Scrubbed { endpoint, incarnation, region } => {
                self.scrubbed(*endpoint, *incarnation, *region);
            }
            Command::CreateVolume {
                name,
                size_bytes,
                device,
                replicas,
                minimum_iops,
                minimum_bytes_per_second,
                groups,
            } => {
                let qos = guarantee(*minimum_iops, *minimum_bytes_per_second);
                let wanted = VolumeWish { size_bytes: *size_bytes, replicas: *replicas, qos, groups };
                self.create_volume(name, device.as_ref(), &wanted, effects)?;
            }
            Command::CreateStriped {
                name,
                size_bytes,
                columns,
                stripe_bytes,
                minimum_iops,
                minimum_bytes_per_second,
                groups,
            } => {
                let qos = guarantee(*minimum_iops, *minimum_bytes_per_second);
                let (size_bytes, columns, stripe_bytes) = (*size_bytes, *columns, *stripe_bytes);
                let wanted = StripedWish { size_bytes, columns, stripe_bytes, qos, groups };
                self.create_striped(name, &wanted, effects)?;
            }
            Command::ReplicaFailed { endpoint, lease, replica, epoch, reason } => {
                self.replica_failed(*endpoint, *lease, *replica, *epoch, reason, effects);
            }
            Command::AddReplica { name, device, replaces } => {
                self.add_replica(name, device.as_ref(), replaces.as_ref(), effects)?;
            }
            Command::RemoveReplica { name, device } => self.remove_replica(name, device, effects)?,
            Command::ReplicaLeft { endpoint, lease, replica, epoch } => {
                self.replica_left(*endpoint, *lease, *replica, *epoch, effects);
            }
            Command::ReplicaSynced { endpoint, lease, replica, epoch } => {
                self.replica_synced(*endpoint, *lease, *replica, *epoch, effects);
            }
            Command::ChangeVolume { name, size_bytes, qos, groups, read_only } => {
                let wanted = VolumeChange {
                    size_bytes: *size_bytes,
                    qos: *qos,
                    groups: groups.as_ref(),
                    read_only: *read_only,
                };
                self.change_volume(name, wanted, effects)?;
            }
            Command::DeleteDevice { device, lose_data } => self.delete_device(device, *lose_data, effects)?,
            Command::DeleteVolume { name } => self.delete_volume(name, effects)?,
            Command::VolumeWiped { device, volume } => self.volume_wiped(device, *volume),
            Command::AdoptVolumes { device } => self.adopt_volumes(device, effects)?,
            Command::CreateInstance { .. } => {
                if let Some(wanted) = Wanted::of(command) {
                    self.create_instance(&wanted, effects)?;
                }
            }
            Command::CreateCopier { volume, host } => self.create_copier(*volume, *host, effects)?,
            Command::EndCopier { instance } => self.end_copier(*instance, effects)?,
            // It is taken apart before it gets here.
            Command::Request { .. } => {}
            Command::Relieve { nics, measured, resting, relief } => {
                self.relieve(nics, measured, resting, *relief, effects);
            }
            Command::SetPriority { name, priority } => self.set_priority(name, *priority, effects)?,
            Command::SetLabels { of, name, labels } => self.set_labels(*of, name, labels)?,
            Command::SetInstanceType { name, instance_type } => {
                self.set_type(name, instance_type, effects)?;
            }
            Command::DeleteInstanceType { name } => self.delete_type(name, effects)?,
            Command::PrepareMigration { name, to } => self.prepare_migration(name, *to, effects)?,
            Command::AbortMigration { name } => self.abort_migration(name, effects)?,
            Command::ActivateMigration { name, force } => {
                self.activate_migration(name, *force, effects)?;
            }
            Command::DeleteInstance { name, force } => self.delete_instance(name, *force, effects)?,
            Command::AttachDevice { instance, nic, volume } => {
                self.attach_device(instance, nic.as_deref(), volume.as_ref(), effects)?;
            }
            Command::DetachDevice { instance, device, force } => {
                self.detach_device(instance, device, *force, effects)?;
            }
            Command::DeviceAnswered { instance, device, plugged, refused } => {
                self.device_answered(instance, device, (*plugged, refused.as_deref()), effects)?;
            }
            Command::Drain { host, device, on } => self.drain(*host, device.as_deref(), *on, effects)?,
            Command::ResetHost { name } => self.reset_host(name, effects)?,
            Command::SetFabric { fabric } => self.set_fabric(fabric, effects)?,
            Command::SetMchannel { instance, mchannel } => {
                self.set_mchannel(instance, mchannel, effects)?;
            }
            Command::ClearMchannel { instance } => self.clear_mchannel(instance, effects)?,
            Command::DeleteHost { name } => self.delete_host(name, effects)?,
        }
        Ok(())
    }

    fn configure(&mut self, options: &Options, effects: &mut Vec<Effect>) -> Result<(), Refusal> {
        if options.pool != self.options.pool {
            return Err(Refusal::new(
                RefusalKind::InvalidValue,
                format!(
                    "the state is about the pool {}, but this pool is {new}: open the pool that it belongs to; if that \
                     one is gone for good, for example with the power, start once with --adopt-pool {new}, which keeps \
                     volumes and instances; to begin a new pod, move the state file away",
                    self.options.pool,
                    new = options.pool
                ),
            ));
        }
        if !self.regions.move_to(options.data) {
            return Err(Refusal::new(
                RefusalKind::InvalidValue,
                "the pool's data area does not cover all regions of the state any more: open the pool that the \
                 state belongs to",
            ));
        }
        self.regions.limit(options.regions_max);
        self.options = options.clone();
        self.forget_newer(effects);
        self.look_again();
        Ok(())
    }

    fn silent(&mut self, id: EndpointId, effects: &mut Vec<Effect>) {
        let subject = self.endpoint_name(id);
        if let Some(endpoint) = self.endpoints.get_mut(&id).filter(|it| it.presence == Presence::Joined) {
            endpoint.presence = Presence::Silent;
            effects.push(Effect::event(EventKind::EndpointSilent, subject, "its heartbeat stopped"));
        }
    }

    fn back(&mut self, id: EndpointId, effects: &mut Vec<Effect>) {
        let subject = self.endpoint_name(id);
        if let Some(endpoint) = self.endpoints.get_mut(&id).filter(|it| it.presence == Presence::Silent) {
            endpoint.presence = Presence::Joined;
            endpoint.given_up = false;
            effects.push(Effect::event(EventKind::EndpointBack, subject, "its heartbeat goes on"));
        }
    }

    fn gone(&mut self, id: EndpointId, effects: &mut Vec<Effect>) {
        let subject = self.endpoint_name(id);
        if let Some(endpoint) = self.endpoints.get_mut(&id).filter(|it| !it.presence.is_over()) {
            endpoint.presence = Presence::Gone;
            effects.push(Effect::event(EventKind::EndpointGone, subject, "it left"));
        }
    }

    fn fence_expired(&mut self, id: EndpointId, incarnation: u64) {
        let fencing = self
            .endpoints
            .get_mut(&id)
            .filter(|it| it.presence == Presence::Fencing && it.incarnation == incarnation);
        if let Some(endpoint) = fencing {
            endpoint.presence = Presence::Fenced;
        }
    }

    fn link(&mut self, id: &DeviceId, up: bool, reason: &str, effects: &mut Vec<Effect>) {
        let subject = self.device_name(id);
        let Some(device) = self.devices.get_mut(id).filter(|device| device.is_nic()) else { return };
        let health = match (&device.health, up) {
            (Health::Failed(_) | Health::Absent, _) | (Health::Up, true) | (Health::Down(_), false) => return,
            (_, true) => Health::Up,
            (_, false) => Health::Down(reason.to_owned()),
        };
        device.health = health;
        let kind = if up { EventKind::LinkUp } else { EventKind::LinkDown };
        effects.push(Effect::event(kind, subject, reason));
    }

    fn device_failed(&mut self, id: &DeviceId, reason: &str, effects: &mut Vec<Effect>) {
        let subject = self.device_name(id);
        let Some(device) = self.devices.get_mut(id) else { return };
        if matches!(device.health, Health::Up | Health::Down(_)) {
            device.health = Health::Failed(reason.to_owned());
            effects.push(Effect::event(EventKind::DeviceFailed, subject, reason));
        }
    }

    fn scrubbed(&mut self, id: EndpointId, incarnation: u64, region: RegionId) {
        if self.endpoints.get(&id).is_none_or(|endpoint| endpoint.incarnation != incarnation) {
            return;
        }
        let purpose = self.regions.get(region).map(|region| region.purpose.clone());
        if let Some(Purpose::Ram(instance)) = purpose
            && id.role == Role::BlkBackend
        {
            self.ram_flushed(instance, region, (id.host, incarnation));
        }
        if let Some(Purpose::Data(lease)) = purpose
            && let Some(lease) = self.leases.get_mut(&lease)
            && lease.area.is_some_and(|area| area.region == region)
            && let LeaseKind::Disk { clean_for, .. } = &mut lease.kind
            && id.role == Role::BlkBackend
        {
            clean_for.insert(id.host, incarnation);
        }
        self.regions.confirm(region, id);
    }

    /// Whether a lease is on a NIC that does not work.
    pub(super) fn is_degraded(&self, lease: &Lease) -> bool {
        lease.active_nic().is_some_and(|nic| self.is_lost(nic))
    }

    pub(super) fn tell_degraded(&self, lease: &Lease, effects: &mut Vec<Effect>) {
        if let Some(nic) = lease.active_nic()
            && let Some(instance) = self.instances.get(&lease.instance)
        {
            let message = format!(
                "{} is on {}, which does not work, and no backup does",
                lease.device,
                self.device_name(nic)
            );
            effects.push(Effect::event(EventKind::Degraded, instance.name.clone(), message));
        }
    }
}
