//! Two virtual machines on two hosts that share the fabric by what their vCPUs load and store, as a [fake machine](FakeResctrl) counts it.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use guest_images::{Guest, Silent};
use pod_api::{Fabric, Mchannel, MchannelSpec, MchannelVcpus};
use vmm::VmSpec;
use vmm::slicing::Kind;

use crate::fake_resctrl::FakeResctrl;
use crate::pod::{HostPlan, Pod, PodBuilder, PodVm, VmShape};
use crate::process::Daemon;

/// What the path carries, in bytes/s.
pub const CAPACITY: u64 = 20_000_000;
/// Over how long rates are looked at.
pub const WINDOW: Duration = Duration::from_secs(4);
/// How long shares may take until they are as they should be, on a machine that does much else.
pub const PATIENCE: Duration = Duration::from_mins(2);
/// Always wants to run.
pub const HUNGRY: &str = "while :; do :; done";

/// Instance, host, weight.
const VMS: [(&str, &str, u32); 2] = [("vm1", "h1", 1), ("vm2", "h2", 3)];
const SMALL: VmShape = VmShape { memory_mib: 192, cpus: 1 };
/// How exact shares are, on a machine that does much else.
const NEAR: f64 = 0.15;

/// Whether a rate is as it should be, as far as such a machine can tell.
pub fn near(rate: f64, expected: f64) -> bool {
    (rate - expected).abs() <= NEAR * expected
}

/// Whether the path is divided by these weights.
#[expect(clippy::cast_precision_loss, reason = "a few MB")]
pub fn shares_are(rates: [f64; 2], weights: [f64; 2]) -> bool {
    let part = |weight: f64| CAPACITY as f64 * weight / (weights[0] + weights[1]);
    near(rates[0], part(weights[0])) && near(rates[1], part(weights[1]))
}

/// The pod and its machines: vm1 on h1, with weight 1, and vm2 on h2, with weight 3.
#[derive(Debug)]
pub struct FairVcpus {
    // Dropped in this order: what uses something goes before it.
    /// The machines.
    pub vms: [PodVm; 2],
    counts: FakeResctrl<2>,
    actuator: Kind,
    /// The pod.
    pub pod: Pod,
}

impl FairVcpus {
    /// Boots both. `more` changes what a machine consists of. Nothing is shared out yet.
    pub fn boot(actuator: Kind, more: impl Fn(&mut VmSpec)) -> Result<Self> {
        let pod = PodBuilder::new()
            .host(HostPlan::new("h1").vms())
            .host(HostPlan::new("h2").vms())
            .host(HostPlan::new("h3").nic("nic0").ssd("ssd0", "256M"))
            .start()?;
        let counts = FakeResctrl::start(&pod, VMS.map(|(name, ..)| name))?;
        let guest = Guest::ensure(&mut Silent)?;
        let begin = |(name, host, _): (&str, &str, u32)| {
            let disk = format!("{name}-disk");
            let instance = pod.create_instance(name, host, &[(&disk, 16 << 20, None)])?;
            let mut spec = pod.machine(&instance, &guest, SMALL);
            more(&mut spec);
            pod.begin_machine(&instance, spec)
        };
        let [first, second] = VMS.map(begin);
        let (first, second) = (first?, second?);
        let vms = [first.arrived()?, second.arrived()?];
        Ok(Self { vms, counts, actuator, pod })
    }

    /// Shares the path out by weight, with this K in ms, and a T_W of 10 ms.
    pub fn share_out(&self, sample_ms: u32) -> Result<()> {
        let elements = [("pool".to_owned(), CAPACITY)].into();
        let fabric = Fabric { window_us: 10_000, sample_us: sample_ms * 1000, elements, ..Fabric::default() };
        self.pod.api().set_fabric(&fabric)?;
        for (name, _, weight) in VMS {
            let spec = MchannelSpec { weight, tenant: "default".to_owned(), path: vec!["pool".to_owned()] };
            self.pod.api().set_mchannel(name, &spec)?;
        }
        Ok(())
    }

    /// Where the monitor of one of the machines is.
    pub fn monitor(&self, place: usize) -> PathBuf {
        self.pod.directory().join("vm").join(format!("{}-qmp.sock", VMS[place].0))
    }

    /// The command of an agent for it, which counts by what is in that directory.
    pub fn agent_command(&self, place: usize, resctrl: &Path) -> Command {
        self.command_of(self.actuator, place, resctrl)
    }

    fn command_of(&self, actuator: Kind, place: usize, resctrl: &Path) -> Command {
        let (name, host, _) = VMS[place];
        let mut command = Command::new(self.pod.binary("vmm"));
        command.args(["slice", name, "--share", "fair", "--actuator", &actuator.to_string()]);
        // What the fake machine counts does not lie in the pool.
        command.arg("--any-ram");
        command.arg("--resctrl").arg(resctrl).arg("--config").arg(self.pod.config_path(host));
        command.arg("--directory").arg(self.pod.directory().join("vm"));
        command
    }

    /// An agent for it, once a frontend knows it.
    pub fn start_agent(&self, place: usize) -> Result<Daemon> {
        self.start_agent_of(self.actuator, place)
    }

    /// The same with another actuator.
    pub fn start_agent_of(&self, actuator: Kind, place: usize) -> Result<Daemon> {
        let began = Instant::now();
        let log = self.pod.directory().join("log").join(format!("{}-slice.log", VMS[place].0));
        let start = || Daemon::start("vmm slice", self.command_of(actuator, place, self.counts.path()), &log);
        let mut agent = start()?;
        while self.shown(place)?.vcpus.is_none() {
            if !agent.running() {
                // The frontend may not have heard of the share yet.
                agent = start()?;
            }
            if began.elapsed() > PATIENCE {
                bail!("nobody knows the vCPUs: {}", agent.said());
            }
            thread::sleep(Duration::from_millis(50));
        }
        Ok(agent)
    }

    /// What the controller shows of it.
    pub fn shown(&self, place: usize) -> Result<Mchannel> {
        Ok(self.pod.api().mchannel(VMS[place].0)?)
    }

    /// What it shows of its vCPUs.
    pub fn vcpus(&self, place: usize) -> Result<MchannelVcpus> {
        match self.shown(place)?.vcpus {
            Some(vcpus) => Ok(vcpus),
            None => bail!("nobody knows the vCPUs of {}", VMS[place].0),
        }
    }

    /// What its vCPUs have loaded and stored, in bytes.
    pub fn bytes(&self, place: usize) -> u64 {
        self.counts.bytes(place)
    }

    /// Those of its threads that are counted.
    pub fn counted_threads(&self, place: usize) -> Vec<u32> {
        self.counts.threads(place)
    }

    /// Where its loads and stores are counted.
    pub fn resctrl(&self) -> &Path {
        self.counts.path()
    }

    /// Mean rates of both over so long, in bytes/s.
    #[expect(clippy::cast_precision_loss, reason = "a few MB")]
    pub fn rates(&self, over: Duration) -> [f64; 2] {
        let counts = || [0, 1].map(|place| self.bytes(place));
        let (before, began) = (counts(), Instant::now());
        thread::sleep(over);
        let (after, seconds) = (counts(), began.elapsed().as_secs_f64());
        std::array::from_fn(|place| (after[place] - before[place]) as f64 / seconds)
    }

    /// Waits until the rates are as they should be.
    pub fn until(&self, what: &str, over: Duration, is_so: impl Fn([f64; 2]) -> bool) -> Result<()> {
        let began = Instant::now();
        loop {
            let rates = self.rates(over);
            eprintln!("{what}: {:.2?} MB/s", rates.map(|rate| rate / 1e6));
            if is_so(rates) {
                return Ok(());
            }
            if began.elapsed() > PATIENCE {
                bail!("never: {what}; last {rates:?}");
            }
        }
    }
}
