//! Volumes that have to lie apart from others, or are to lie with them.
//!
//! Volumes with the same `apart` get no places on SSDs of one host, whatever becomes of them: not when they are made, and not where
//! they move by themselves or by hand. Only those that were put into a group while they lay otherwise do, until they move. Volumes with the same `together` lie on one SSD where that can be, else on SSDs of one
//! host, else anywhere; none of them moves by itself to relieve an SSD. The names are no others than volumes' own: NICs with the same one
//! are another group.

use std::collections::BTreeSet;
use std::fmt;

use cxl_pool::HostId;
use pod_api::EventKind;
use pod_protocol::ids::VolumeId;
use serde::{Deserialize, Serialize};

use super::{DeviceId, Effect, Refusal, RefusalKind, State, Volume};

/// The most that a group's name can be long.
const NAME_BYTES_MAX: usize = 63;

/// The groups that a volume belongs to.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Groups {
    /// It has no place on an SSD of a host where another volume with this name has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub apart: Option<String>,
    /// It lies where others with this name do, where that can be.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub together: Option<String>,
}

impl Groups {
    /// Whether it belongs to none.
    pub const fn is_empty(&self) -> bool {
        self.apart.is_none() && self.together.is_none()
    }

    /// Their names.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        [self.apart.as_deref(), self.together.as_deref()].into_iter().flatten()
    }

    /// Refuses names that no group can have.
    pub(super) fn check(&self) -> Result<(), Refusal> {
        self.names().try_for_each(check_group_name)
    }
}

impl fmt::Display for Groups {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.apart, &self.together) {
            (None, None) => f.write_str("it is in no group"),
            (Some(apart), None) => write!(f, "it is to be apart from others of the group {apart}"),
            (None, Some(together)) => write!(f, "it is to be together with others of the group {together}"),
            (Some(apart), Some(together)) => write!(
                f,
                "it is to be apart from others of the group {apart} and together with others of the group {together}"
            ),
        }
    }
}

/// Refuses what cannot be the name of a group, be it of volumes or of NICs.
pub(super) fn check_group_name(name: &str) -> Result<(), Refusal> {
    if name.is_empty() || name.len() > NAME_BYTES_MAX || name.chars().any(char::is_control) {
        let detail = format!("a group's name has 1 to {NAME_BYTES_MAX} bytes, and no control characters");
        return Err(Refusal::new(RefusalKind::InvalidValue, detail));
    }
    Ok(())
}

/// Where others of a volume's groups lie.
#[derive(Debug, Default)]
pub(super) struct Neighbours {
    /// It must not lie on SSDs of these hosts.
    apart: BTreeSet<HostId>,
    /// It should lie on one of these.
    ssds: BTreeSet<DeviceId>,
}

impl Neighbours {
    /// Whether a volume may lie on an SSD, as far as its groups say so.
    pub(super) fn allow(&self, ssd: &DeviceId) -> bool {
        !self.apart.contains(&ssd.host)
    }

    /// Whether a volume is to lie with others.
    pub(super) fn has_near(&self) -> bool {
        !self.ssds.is_empty()
    }

    /// Whether one with which it is to be lies on this SSD.
    pub(super) fn is_on(&self, ssd: &DeviceId) -> bool {
        self.ssds.contains(ssd)
    }

    /// Whether one with which it is to be lies on an SSD of this host.
    pub(super) fn is_at(&self, host: HostId) -> bool {
        self.ssds.iter().any(|ssd| ssd.host == host)
    }

    /// What to add where there is no room.
    pub(super) fn as_well(&self, groups: &Groups) -> String {
        match &groups.apart {
            Some(name) if !self.apart.is_empty() => format!(
                "; SSDs of {} that others of the group {name} lie on do not count: add an SSD on another one",
                if self.apart.len() == 1 {
                    "the host".to_owned()
                } else {
                    format!("the {} hosts", self.apart.len())
                }
            ),
            _ => String::new(),
        }
    }
}

impl State {
    /// Where others of these groups lie than one of them.
    pub(super) fn neighbours(&self, groups: &Groups, without: Option<VolumeId>) -> Neighbours {
        let apart = self.others(groups.apart.as_deref(), |it| it.apart.as_deref(), without);
        let together = self.others(groups.together.as_deref(), |it| it.together.as_deref(), without);
        Neighbours {
            apart: apart.flat_map(Volume::devices).map(|ssd| ssd.host).collect(),
            ssds: together.flat_map(Volume::devices).cloned().collect(),
        }
    }

    /// The volumes of a group, but for one of them.
    fn others<'a>(
        &'a self,
        name: Option<&'a str>,
        of: fn(&Groups) -> Option<&str>,
        without: Option<VolumeId>,
    ) -> impl Iterator<Item = &'a Volume> {
        let some = name.into_iter().flat_map(|name| self.volumes_of_group(name));
        some.filter(move |it| !it.deleted && Some(it.id) != without && of(&it.groups) == name)
    }

    /// A volume that has to lie apart from this one, with a place on an SSD of this host.
    pub fn apart_at<'a>(&'a self, volume: &'a Volume, host: HostId) -> Option<&'a Volume> {
        let mut others =
            self.others(volume.groups.apart.as_deref(), |it| it.apart.as_deref(), Some(volume.id));
        others.find(|it| it.devices().any(|ssd| ssd.host == host))
    }

    /// A volume that is to lie with this one, with a place on an SSD of this host.
    pub fn together_at<'a>(&'a self, volume: &'a Volume, host: HostId) -> Option<&'a Volume> {
        let mut others =
            self.others(volume.groups.together.as_deref(), |it| it.together.as_deref(), Some(volume.id));
        others.find(|it| it.devices().any(|ssd| ssd.host == host))
    }

    /// What of a volume's places is not as its groups want it, in words. Nothing moves by itself for that: it was so when the volume
    /// came into the group, or there was no room for it elsewhere.
    pub fn contrary(&self, volume: &Volume) -> Vec<String> {
        let hosts: BTreeSet<HostId> = volume.devices().map(|ssd| ssd.host).collect();
        let mut contrary = Vec::new();
        if let Some(group) = &volume.groups.apart {
            let others = hosts.iter().filter_map(|host| Some((host, self.apart_at(volume, *host)?)));
            contrary.extend(others.map(|(host, other)| {
                let host = self.host_name(*host);
                format!("{} of the group {group}, which is to be apart, lies on {host} as well", other.name)
            }));
        }
        let together = volume.groups.together.as_deref();
        let others = || self.others(together, |it| it.together.as_deref(), Some(volume.id));
        if let Some(group) = together
            && others().next().is_some()
            && hosts.iter().all(|host| self.together_at(volume, *host).is_none())
        {
            contrary.push(format!(
                "no other one of the group {group}, which is to be together, lies on its host"
            ));
        }
        contrary
    }

    /// Refuses an SSD that somebody names although others of the group lie on its host.
    pub(super) fn check_apart(
        &self,
        neighbours: &Neighbours,
        groups: &Groups,
        ssd: &DeviceId,
    ) -> Result<(), Refusal> {
        if neighbours.allow(ssd) {
            return Ok(());
        }
        let detail = format!(
            "another volume of the group {} lies on an SSD of {}: take another host's",
            groups.apart.as_deref().unwrap_or_default(),
            self.host_name(ssd.host)
        );
        Err(Refusal::new(RefusalKind::NoDevice, detail))
    }

    /// Not all of the pod knows of groups of volumes any more.
    pub(super) fn forget_groups(&mut self, effects: &mut Vec<Effect>) {
        let grouped = self.volumes.values().filter(|it| !it.groups.is_empty());
        let grouped: Vec<VolumeId> = grouped.map(|it| it.id).collect();
        for volume in grouped {
            let Some(volume) = self.volumes.get_mut(&volume) else { continue };
            volume.groups = Groups::default();
            if !volume.deleted {
                let message = "it is in no group any more, since not all of the pod knows of such groups";
                effects.push(Effect::event(EventKind::VolumeChanged, volume.name.clone(), message));
            }
        }
    }
}
