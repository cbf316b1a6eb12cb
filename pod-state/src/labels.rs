//! Words that operators put on instances and their types, volumes, hosts and devices, to find them again. The controller does nothing by them.

use std::collections::BTreeMap;

use cxl_pool::HostId;
use serde::{Deserialize, Serialize};

use super::{DeviceId, Refusal, RefusalKind, State};

/// Names and values, sorted by name.
pub type Labels = BTreeMap<String, String>;

/// The most labels of one thing.
const LABELS_MAX: usize = 32;
/// The longest name, and the longest value.
const BYTES_MAX: usize = 63;

/// What can bear labels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Labelled {
    /// An instance.
    Instance,
    /// A volume.
    Volume,
    /// A host.
    Host,
    /// A NIC or an SSD, named with its host as `h2/nic0`.
    Device,
}

/// Refuses labels that could not be asked for as `name=value,name=value`.
pub(super) fn check_labels(labels: &Labels) -> Result<(), Refusal> {
    let invalid = |detail: String| Err(Refusal::new(RefusalKind::InvalidValue, detail));
    if labels.len() > LABELS_MAX {
        return invalid(format!("there can be {LABELS_MAX} labels at most, not {}", labels.len()));
    }
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    for (name, value) in labels {
        let begins = name.bytes().next().is_some_and(|byte| byte.is_ascii_alphanumeric());
        if !begins || name.len() > BYTES_MAX || !name.bytes().all(|byte| plain(byte) || byte == b'/') {
            let shown: String = name.chars().take(BYTES_MAX).collect();
            return invalid(format!(
                "{shown:?} cannot be the name of a label: use 1 to {BYTES_MAX} letters, digits, '-', '_', '.' or '/', a \
                 letter or digit first"
            ));
        }
        if value.len() > BYTES_MAX || !value.bytes().all(plain) {
            let shown: String = value.chars().take(BYTES_MAX).collect();
            return invalid(format!(
                "{shown:?} cannot be the value of the label {name}: use {BYTES_MAX} letters, digits, '-', '_' or '.' at most"
            ));
        }
    }
    Ok(())
}

impl State {
    pub(super) fn set_labels(&mut self, of: Labelled, name: &str, labels: &Labels) -> Result<(), Refusal> {
        check_labels(labels)?;
        let (what, known) = match of {
            Labelled::Instance => {
                let id = self.instance_named(name).map(|it| it.id);
                ("instance", id.and_then(|id| self.instances.get_mut(&id)).map(|it| &mut it.labels))
            }
            Labelled::Volume => {
                let id = self.volume_named(name).map(|it| it.id);
                ("volume", id.and_then(|id| self.volumes.get_mut(&id)).map(|it| &mut it.labels))
            }
            Labelled::Host => {
                let id = self.host_named(name).ok_or_else(|| Refusal::not_found("host", name))?;
                if labels.is_empty() {
                    self.host_labels.remove(&id);
                } else {
                    self.host_labels.insert(id, labels.clone());
                }
                return Ok(());
            }
            Labelled::Device => {
                let id = self.device_named(name);
                ("device", id.and_then(|id| self.devices.get_mut(&id)).map(|it| &mut it.labels))
            }
        };
        let known = known.ok_or_else(|| Refusal::not_found(what, name))?;
        known.clone_from(labels);
        Ok(())
    }

    /// The labels of a host.
    pub fn labels_of_host(&self, host: HostId) -> Labels {
        self.host_labels.get(&host).cloned().unwrap_or_default()
    }

    /// Not all of the pod knows of labels of hosts, devices and types of instances any more.
    pub(super) fn forget_labels(&mut self) {
        self.host_labels.clear();
        self.types.values_mut().for_each(|it| it.labels.clear());
        let labelled = self.devices.iter().filter(|(_, device)| !device.labels.is_empty());
        let labelled: Vec<DeviceId> = labelled.map(|(id, _)| id.clone()).collect();
        for device in &labelled {
            if let Some(device) = self.devices.get_mut(device) {
                device.labels.clear();
            }
        }
    }
}
