//! VMMs that come and go.

use super::Connection;
use crate::server::StopReason;

impl Connection {
    pub(crate) fn connected(&mut self) {
        self.sink.connected();
    }

    /// The time is over in which a VMM would have come that used the device before.
    pub(crate) fn nobody_came(&mut self) {
        self.sink.nobody_came();
    }

    pub(crate) fn disconnected(&mut self) {
        self.stop_all(StopReason::Disconnected);
        self.forget();
        self.spec.config.vmm_left();
        self.sink.disconnected();
    }
}
