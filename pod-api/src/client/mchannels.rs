//! The fabric, and what instances get of it.

use reqwest::Method;

use super::{Client, ClientError};
use crate::{Fabric, Mchannel, MchannelList, MchannelSpec};

impl Client {
    /// What the fabric consists of, and who shares it.
    pub fn fabric(&self) -> Result<Fabric, ClientError> {
        self.get(&["v1", "fabric"])
    }

    /// Says that anew, as a whole.
    pub fn set_fabric(&self, fabric: &Fabric) -> Result<(), ClientError> {
        self.tell(Method::PUT, &["v1", "fabric"], fabric)
    }

    /// All instances that have a share of the fabric.
    pub fn mchannels(&self) -> Result<Vec<Mchannel>, ClientError> {
        self.mchannels_with(&[])
    }

    /// Those of them with all of these fields, such as `("tenant", "red")`.
    pub fn mchannels_with(&self, fields: &[(&str, &str)]) -> Result<Vec<Mchannel>, ClientError> {
        let list: MchannelList = self.call::<(), _>(Method::GET, &["v1", "mchannels"], fields, None)?;
        Ok(list.mchannels)
    }

    /// The share of one instance.
    pub fn mchannel(&self, instance: &str) -> Result<Mchannel, ClientError> {
        self.get(&["v1", "mchannels", instance])
    }

    /// Gives an instance a share of the fabric, or another one.
    pub fn set_mchannel(&self, instance: &str, spec: &MchannelSpec) -> Result<(), ClientError> {
        self.tell(Method::PUT, &["v1", "mchannels", instance], spec)
    }

    /// Lets an instance use the fabric as it likes.
    pub fn clear_mchannel(&self, instance: &str) -> Result<(), ClientError> {
        self.end(Method::DELETE, &["v1", "mchannels", instance], &[])
    }
}
