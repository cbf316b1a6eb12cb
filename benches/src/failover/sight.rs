//! When the host of a NIC can know that its cable is out: Linux tells who listens, but only once whoever takes a veth down lets go of its
//! network lock, which may be milliseconds after the last packet got through.

use std::io;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use anyhow::Result;
use vhost_net_cxl::nic::LinkState;
use vhost_net_cxl::nic::carrier::CarrierWatch;
use wadi_tests::pod::Pod;

/// The interface that the only NIC of a host has its cable on.
const INTERFACE: &str = "eth0";

/// Listens beside the backend, as that does.
pub(super) struct Sight {
    seen: Arc<OnceLock<Instant>>,
    _watch: CarrierWatch,
}

impl Sight {
    /// Begins to listen on a host, whose NIC has its cable.
    pub(super) fn begin(pod: &Pod, host: &str) -> Result<Self> {
        let seen = Arc::new(OnceLock::new());
        let first = Arc::clone(&seen);
        let on_change = move |up: bool, _: &str| {
            if !up {
                // What it loses later is another one.
                let _ = first.set(Instant::now());
            }
        };
        let watch = pod.host(host)?.inside(|| {
            CarrierWatch::begin("the benchmark", &[INTERFACE], LinkState::new(true), on_change)
                .map_err(io::Error::other)
        })?;
        Ok(Self { seen, _watch: watch })
    }

    /// When it could be known first, if it could.
    pub(super) fn seen(&self) -> Option<Instant> {
        self.seen.get().copied()
    }
}
