//! What daemons measure, which only the controller that leads hears.

use std::sync::PoisonError;

use reqwest::Method;

use super::{Client, ClientError};
use crate::{Balance, UNMEASURED};

impl Client {
    /// What passes through NICs, and what would be done about those that carry too much.
    pub fn balance(&self) -> Result<Balance, ClientError> {
        self.get(&["v1", "balance"])
    }

    /// Metrics in the text format of Prometheus.
    pub fn metrics(&self) -> Result<String, ClientError> {
        self.metrics_with(&[])
    }

    /// The same of the controller that leads, whichever replica is asked, as far as it answers: what daemons count only that one knows.
    pub fn metrics_of_leader(&self) -> Result<String, ClientError> {
        self.metrics_with(&[("leader", "true")])
    }

    fn metrics_with(&self, query: &[(&str, &str)]) -> Result<String, ClientError> {
        self.runtime.block_on(async {
            let response = self.send::<()>(Method::GET, &["metrics"], query, None).await?;
            let response = self.refusal(response).await?;
            response.text().await.map_err(|error| self.garbled(&error))
        })
    }

    /// Why what daemons measure is missing in answers since this was asked last; nothing where it is not. See [`UNMEASURED`].
    pub fn take_unmeasured(&self) -> Option<String> {
        self.unmeasured.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Notes whether it is missing in an answer.
    pub(super) fn note_unmeasured(&self, response: &reqwest::Response) {
        if let Some(why) = response.headers().get(UNMEASURED).and_then(|why| why.to_str().ok()) {
            let mut unmeasured = self.unmeasured.lock().unwrap_or_else(PoisonError::into_inner);
            *unmeasured = Some(why.to_owned());
        }
    }
}
