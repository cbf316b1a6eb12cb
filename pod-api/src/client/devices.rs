//! Devices that come to an instance, or leave it, while it runs.

use std::time::Duration;

use reqwest::Method;

use super::{Client, ClientError};
use crate::{AttachDevice, DeviceAnswer, Instance};

impl Client {
    /// Leases one device more to an instance, and waits up to `wait` until the frontend serves it. A VMM that runs plugs it in by
    /// itself.
    pub fn attach_device(
        &self,
        instance: &str,
        request: &AttachDevice,
        wait: Duration,
    ) -> Result<Instance, ClientError> {
        let wait = wait.as_millis().to_string();
        self.call(Method::POST, &["v1", "instances", instance, "devices"], &[("wait", &wait)], Some(request))
    }

    /// Has a device leave its instance: at once if no VMM uses it or by force, else when the VMM has unplugged it.
    pub fn detach_device(&self, instance: &str, device: &str, force: bool) -> Result<Instance, ClientError> {
        let force = if force { "true" } else { "false" };
        let path = ["v1", "instances", instance, "devices", device];
        self.call::<(), _>(Method::DELETE, &path, &[("force", force)], None)
    }

    /// Says for a VMM whether its guest has a device.
    pub fn answer_device(
        &self,
        instance: &str,
        device: &str,
        answer: &DeviceAnswer,
    ) -> Result<(), ClientError> {
        self.tell(Method::PUT, &["v1", "instances", instance, "devices", device, "vmm"], answer)
    }
}
