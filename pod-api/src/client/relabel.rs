use std::collections::BTreeMap;

use reqwest::Method;
use serde::de::DeserializeOwned;

use super::{Client, ClientError};
use crate::Labels;

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
    /// Looks, changes what it saw, and looks again if that was not there any more. A version that the [client
    /// expects](Client::expecting) is the only one that is changed.
    pub(super) fn relabel<Answer: DeserializeOwned>(
        &self,
        kind: &str,
        name: &str,
        changes: &LabelChanges,
        look: impl Fn() -> Result<(String, BTreeMap<String, String>), ClientError>,
    ) -> Result<Answer, ClientError> {
        let mut attempt = 0;
        loop {
            attempt += 1;
            let (seen, labels) = look()?;
            let version = self.version.as_ref().unwrap_or(&seen);
            let path = ["v1", kind, name, "labels"];
            match self.call_at(version, Method::PUT, &path, &changes.of(labels)) {
                Err(error)
                    if error.status() == Some(PRECONDITION_FAILED)
                        && self.version.is_none()
                        && attempt < ATTEMPTS => {}
                other => return other,
            }
        }
    }
}
