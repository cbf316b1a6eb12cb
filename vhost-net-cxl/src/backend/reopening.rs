//! NICs whose driver failed, and that were opened again.

use std::sync::atomic::Ordering;

use cxl_pool::Memory;
use pod_protocol::reports::Report;
use pod_protocol::worker::Sources;

use super::objects::watch_descriptors;
use super::port::Port;
use super::{Backend, Tell};
use crate::nic::failed::FailedNic;
use crate::nic::reopen::Reopening;
use crate::nic::{Nic, NicError};

impl Port {
    /// Notes an error of the driver. The NIC counts as failed from then on, its driver is closed, and the controller
    /// hears of it once.
    pub(super) fn check(&mut self, outcome: Result<(), NicError>, tell: &Tell) {
        let Err(error) = outcome else { return };
        self.counters.errors.add(1);
        if std::mem::replace(&mut self.failed, true) {
            return;
        }
        self.fails(error.to_string(), tell);
    }

    /// The same of the watch of its carrier, which has ended if that says so.
    pub(super) fn check_watch(&mut self, tell: &Tell) {
        if !self.failed
            && let Some(reason) = self.nic.link().unwatched()
        {
            let (nic, reason) = (self.nic.identity().name.clone(), reason.to_owned());
            self.check(Err(NicError::Unwatched { nic, reason }), tell);
        }
    }

    fn fails(&mut self, reason: String, tell: &Tell) {
        let device = self.nic.identity().name.clone();
        tracing::error!(nic = device, reason, "NIC failed");
        self.nic = Box::new(FailedNic::in_place_of(self.nic.as_ref()));
        if let Some(buffers) = &mut self.buffers {
            // The driver is closed: what it had to receive into is nobody's now.
            buffers.reclaim();
        }
        self.counters.up.store(false, Ordering::Relaxed);
        self.to_reopen = true;
        tell(Report::DeviceFailed { device, reason });
    }
}

impl<M: Memory> Backend<M> {
    /// NICs that fail are opened again by this from now on.
    pub fn set_reopening(&mut self, reopening: Reopening) {
        self.reopening = Some(reopening);
    }

    /// Asks for what failed to be opened again.
    pub(super) fn ask_for_reopening(&mut self) {
        for port in &mut self.ports {
            if std::mem::take(&mut port.to_reopen)
                && let Some(reopening) = &self.reopening
            {
                reopening.failed(&port.nic.identity().name);
            }
        }
    }

    /// Uses a NIC again that had failed and was opened anew.
    pub fn reopened(&mut self, mut nic: Box<dyn Nic>, sources: Option<&mut Sources>) {
        let name = nic.identity().name.clone();
        let Some(place) = self.ports.iter().position(|port| port.nic.identity().name == name) else { return };
        let port = &mut self.ports[place];
        if !port.failed {
            return;
        }
        // Leases rely on the MTU; offloads that are gone are done in software.
        let (mtu, needed) = (nic.identity().mtu, port.nic.identity().mtu);
        let usable = if mtu < needed {
            let problem = format!("its MTU is {mtu} now and was {needed}: set it back");
            Err(NicError::Config { nic: name.clone(), problem })
        } else if let Some(buffers) = &mut port.buffers {
            nic.start(buffers)
        } else {
            Ok(())
        };
        if let Err(error) = usable {
            tracing::warn!(%error, "the NIC cannot be used again yet");
            drop(nic);
            if let Some(buffers) = &mut port.buffers {
                buffers.reclaim();
            }
            port.to_reopen = true;
            self.ask_for_reopening();
            return;
        }
        if port.area.is_some()
            && let Some(sources) = sources
            && let Err(error) = watch_descriptors(nic.as_ref(), place, sources)
        {
            tracing::warn!(nic = name, %error, "its frames are only seen while others keep us awake");
        }
        port.replace(nic);
        port.tell_flows();
        port.failed = false;
        port.counters.reopened.add(1);
        // Its link is looked at anew: addresses are announced if it is up.
        port.was_up = false;
        self.agree_on_offloads();
        self.look_at_links();
        let port = &self.ports[place];
        let up = port.nic.link().is_up();
        tracing::info!(nic = name, up, "NIC opened again");
        (self.tell)(Report::DeviceBack { device: port.nic.identity().report(up) });
        // What changed meanwhile was told of a NIC that still counted as failed.
        let now_up = port.nic.link().is_up();
        if now_up != up {
            let reason = "seen when it was opened again".to_owned();
            (self.tell)(Report::Link { device: name, up: now_up, reason });
        }
    }
}
