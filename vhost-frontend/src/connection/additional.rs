//! Requests that crate `vhost` does not serve.

use vhost::vhost_user::Result;
use vhost::vhost_user::message::VhostUserProtocolFeatures;

use super::{Connection, refused};
use crate::additional::Asked;

impl Connection {
    /// Does what the VMM asks, and says the device's status.
    pub(crate) fn serve_additional(&mut self, asked: Asked) -> Result<u64> {
        let needed = match asked {
            Asked::Announce(_) => VhostUserProtocolFeatures::RARP,
            Asked::SetStatus(_) | Asked::Status => VhostUserProtocolFeatures::STATUS,
        };
        if self.protocol_features & needed.bits() == 0 {
            return Err(refused(format!("{needed:?} was not agreed on")));
        }
        match asked {
            Asked::Announce(address) => self.sink.announce(address),
            Asked::SetStatus(status) => self.set_status(status)?,
            Asked::Status => {}
        }
        Ok(u64::from(self.status))
    }

    /// The driver, or the VMM for it, says how far it is. Rings run when they are enabled and kicked, whatever it says; but 0
    /// resets the device. QEMU before 8.0 resets it first and then asks where the rings stopped.
    fn set_status(&mut self, status: u64) -> Result<()> {
        let status = u8::try_from(status).map_err(|_| refused(format!("a device status of {status:#x}")))?;
        if status == 0 {
            self.reset();
        }
        self.status = status;
        Ok(())
    }
}
