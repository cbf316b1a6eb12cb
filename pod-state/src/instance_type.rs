//! Kinds of instances, so that not everybody has to know what a VM needs.

use pod_api::EventKind;
use pod_protocol::objects::Priority;
use serde::{Deserialize, Serialize};

use super::create::{NICS_MAX, QUEUE_PAIRS_MAX};
use super::labels::check_labels;
use super::nic_policy::with_reservation;
use super::{Effect, Labels, NicWish, Refusal, RefusalKind, State, check_name};

/// The most kinds of instances.
const TYPES_MAX: usize = 256;

/// What instances of a kind get, unless it is said otherwise.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct InstanceType {
    /// How many NICs, if none is asked for.
    #[serde(default)]
    pub nics: u8,
    /// How much of a NIC each is sure of, in Mbit/s; 0 for nothing.
    #[serde(default)]
    pub reserved_mbps: u64,
    /// Pairs of queues of each.
    #[serde(default)]
    pub queue_pairs: Option<u16>,
    /// How many requests per second each volume is sure of, at least, while the instance has it.
    #[serde(default)]
    pub volume_iops: Option<u64>,
    /// What they get of devices next to others where they are short.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub priority: Option<Priority>,
    /// Words to find it by. Its instances have others.
    #[serde(default, skip_serializing_if = "Labels::is_empty")]
    pub labels: Labels,
}

impl InstanceType {
    /// What is asked of NICs, completed; the engines are told of what is reserved.
    pub(super) fn complete(&self, wishes: &[NicWish]) -> Vec<NicWish> {
        let asked = match wishes {
            [] => vec![NicWish::default(); self.nics.into()],
            wishes => wishes.to_vec(),
        };
        let complete = |wish: NicWish| {
            let reserved_mbps = if wish.reserved_mbps == 0 { self.reserved_mbps } else { wish.reserved_mbps };
            let policy = with_reservation(&wish.policy, reserved_mbps);
            NicWish { reserved_mbps, policy, queue_pairs: wish.queue_pairs.or(self.queue_pairs), ..wish }
        };
        asked.into_iter().map(complete).collect()
    }
}

impl State {
    pub(super) fn set_type(
        &mut self,
        name: &str,
        wanted: &InstanceType,
        effects: &mut Vec<Effect>,
    ) -> Result<(), Refusal> {
        check_name("an instance type", name)?;
        check_labels(&wanted.labels)?;
        let invalid = |detail: String| Err(Refusal::new(RefusalKind::InvalidValue, detail));
        if usize::from(wanted.nics) > NICS_MAX {
            return invalid(format!("an instance can have {NICS_MAX} NICs at most, not {}", wanted.nics));
        }
        if wanted.queue_pairs.is_some_and(|pairs| pairs == 0 || pairs > QUEUE_PAIRS_MAX) {
            return invalid(format!("queue_pairs must be 1 to {QUEUE_PAIRS_MAX}"));
        }
        if wanted.volume_iops == Some(0) {
            return invalid("volume_iops must be 1 at least; leave it out to promise nothing".to_owned());
        }
        if self.types.len() >= TYPES_MAX && !self.types.contains_key(name) {
            let detail = format!("there are {TYPES_MAX} instance types already: delete some");
            return Err(Refusal::new(RefusalKind::NoRoom, detail));
        }
        if self.types.insert(name.to_owned(), wanted.clone()).as_ref() != Some(wanted) {
            let message = format!(
                "{} NICs of {} Mbit/s each, {} requests/s for each volume, priority {}",
                wanted.nics,
                wanted.reserved_mbps,
                wanted.volume_iops.unwrap_or(0),
                wanted.priority.unwrap_or_default()
            );
            effects.push(Effect::event(EventKind::InstanceTypeSet, name, message));
        }
        Ok(())
    }

    pub(super) fn delete_type(&mut self, name: &str, effects: &mut Vec<Effect>) -> Result<(), Refusal> {
        if self.types.remove(name).is_none() {
            return Err(Refusal::not_found("instance type", name));
        }
        let message = "instances that were made of it stay as they are";
        effects.push(Effect::event(EventKind::InstanceTypeDeleted, name, message));
        Ok(())
    }

    /// The kind of instance with this name.
    pub(super) fn type_named(&self, name: Option<&str>) -> Result<InstanceType, Refusal> {
        let Some(name) = name else { return Ok(InstanceType::default()) };
        self.types.get(name).cloned().ok_or_else(|| Refusal::not_found("instance type", name))
    }
}
