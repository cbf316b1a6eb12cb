use std::collections::BTreeMap;

use reqwest::Method;
use serde::de::DeserializeOwned;

use super::{Client, ClientError};
use crate::{Device, Host, Instance, Labels, Volume};

/// How often others may come in between until we give up.
const ATTEMPTS: u32 = 16;
/// The status of a change of what somebody else has changed meanwhile.
const PRECONDITION_FAILED: u16 = 412;

/// Labels that come, or get another value, and labels that go.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LabelChanges {
    /// Their values from now on.
    pub set: BTreeMap<String, String>,
    /// Names that are there no more; they need not be there.
    pub removed: Vec<String>,
}

impl LabelChanges {
    fn of(&self, mut labels: BTreeMap<String, String>) -> Labels {
        labels.retain(|name, _| !self.removed.contains(name));
        labels.extend(self.set.clone());
        Labels { labels }
    }
}

impl Client {
    /// Labels an instance anew, as a whole.
    pub fn label_instance(&self, name: &str, labels: &Labels) -> Result<Instance, ClientError> {
        self.label(&["instances", name], labels)
    }

    /// Labels a volume anew, as a whole.
    pub fn label_volume(&self, name: &str, labels: &Labels) -> Result<Volume, ClientError> {
        self.label(&["volumes", name], labels)
    }

    /// Labels a host anew, as a whole.
    pub fn label_host(&self, name: &str, labels: &Labels) -> Result<Host, ClientError> {
        self.label(&["hosts", name], labels)
    }

    /// Labels a device anew, as a whole.
    pub fn label_device(&self, host: &str, name: &str, labels: &Labels) -> Result<Device, ClientError> {
        self.label(&["devices", host, name], labels)
    }

    /// Changes some labels of an instance, and leaves those that others change at the same time as they make them.
    pub fn relabel_instance(&self, name: &str, changes: &LabelChanges) -> Result<Instance, ClientError> {
        let look = || self.instance(name).map(|it| (it.resource_version, it.labels));
        self.relabel(&["instances", name], changes, look)
    }

    /// Changes some labels of a volume, as of an instance.
    pub fn relabel_volume(&self, name: &str, changes: &LabelChanges) -> Result<Volume, ClientError> {
        let look = || self.volume(name).map(|it| (it.resource_version, it.labels));
        self.relabel(&["volumes", name], changes, look)
    }

    /// Changes some labels of a host, as of an instance.
    pub fn relabel_host(&self, name: &str, changes: &LabelChanges) -> Result<Host, ClientError> {
        let look = || self.host(name).map(|it| (it.resource_version, it.labels));
        self.relabel(&["hosts", name], changes, look)
    }

    /// Changes some labels of a device, as of an instance.
    pub fn relabel_device(
        &self,
        host: &str,
        name: &str,
        changes: &LabelChanges,
    ) -> Result<Device, ClientError> {
        let look = || self.device(host, name).map(|it| (it.resource_version, it.labels));
        self.relabel(&["devices", host, name], changes, look)
    }

    fn label<Answer: DeserializeOwned>(
        &self,
        whose: &[&str],
        labels: &Labels,
    ) -> Result<Answer, ClientError> {
        self.call(Method::PUT, &path(whose), &[], Some(labels))
    }

    /// Looks, changes what it saw, and looks again if that was not there any more. A version that the [client
    /// expects](Client::expecting) is the only one that is changed.
    fn relabel<Answer: DeserializeOwned>(
        &self,
        whose: &[&str],
        changes: &LabelChanges,
        look: impl Fn() -> Result<(String, BTreeMap<String, String>), ClientError>,
    ) -> Result<Answer, ClientError> {
        let mut attempt = 0;
        loop {
            attempt += 1;
            let (seen, labels) = look()?;
            let version = self.version.as_ref().unwrap_or(&seen);
            match self.call_at(version, Method::PUT, &path(whose), &changes.of(labels)) {
                Err(error)
                    if error.status() == Some(PRECONDITION_FAILED)
                        && self.version.is_none()
                        && attempt < ATTEMPTS => {}
                other => return other,
            }
        }
    }
}

/// The path of the labels of something.
fn path<'a>(whose: &[&'a str]) -> Vec<&'a str> {
    [&["v1"], whose, &["labels"]].concat()
}
