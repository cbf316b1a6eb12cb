//! A pod with one virtual machine that works through it: what most tests begin with.

use anyhow::Result;
use guest_images::{Guest, Silent};
use pod_api::Instance;

use crate::iperf;
use crate::pod::{Pod, PodBuilder, PodVm, VmShape};

/// The size of the volume that the virtual machine gets.
pub const VOLUME_BYTES: u64 = 1 << 30;

/// A pod, an instance with a NIC and a volume of other hosts, and its booted virtual machine.
#[derive(Debug)]
pub struct Stage {
    // The virtual machine goes before the pod that it works through.
    /// The virtual machine.
    pub vm: PodVm,
    /// iperf3's server on the client.
    pub server: iperf::Server,
    /// The pod.
    pub pod: Pod,
    /// The instance as it was created.
    pub instance: Instance,
}

impl Stage {
    /// Sets it up with three hosts, the VM on `h1`, NIC and SSD on `h2`, the backup NIC on `h3`.
    pub fn set_up() -> Result<Self> {
        Self::set_up_in(PodBuilder::three_hosts())
    }

    /// As [`Stage::set_up`], in a pod with hosts of these names and devices.
    pub fn set_up_in(pod: PodBuilder) -> Result<Self> {
        Self::set_up_as(pod, VmShape::default())
    }

    /// The same with such a virtual machine.
    pub fn set_up_as(pod: PodBuilder, shape: VmShape) -> Result<Self> {
        let guest = Guest::ensure(&mut Silent)?;
        let pod = pod.start()?;
        let instance = pod.create_instance("vm1", "h1", &[("vol0", VOLUME_BYTES, Some("h2/ssd0"))])?;
        let vm = pod.boot(&instance, &guest, shape)?;
        let server = iperf::Server::start(&pod)?;
        Ok(Self { vm, server, pod, instance })
    }
}

/// How often a test goes round: `WADI_ROUNDS`, 1 if that is not set.
pub fn rounds() -> u32 {
    std::env::var("WADI_ROUNDS").ok().and_then(|text| text.parse().ok()).unwrap_or(1)
}
