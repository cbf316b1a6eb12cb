//! `podctl instances attach` and `detach`: a device comes or goes, whether its VM runs or not.

use std::thread;
use std::time::{Duration, Instant};

use pod_api::client::Client;
use pod_api::{self as api, Instance};

use crate::Failure;
use crate::arguments::AttachDevice;

/// How often the controller is asked what became of a device.
const POLL: Duration = Duration::from_millis(50);

/// What matters here of a device, NIC or disk.
struct Device<'a> {
    name: &'a str,
    /// A VMM has it.
    in_use: bool,
    plugged: bool,
    refused: Option<&'a str>,
}

fn devices(instance: &Instance) -> Vec<Device<'_>> {
    let nics = instance.nics.iter().map(|it| Device {
        name: &it.device,
        in_use: it.connected || it.plugged,
        plugged: it.plugged,
        refused: it.refused.as_deref(),
    });
    let disks = instance.disks.iter().map(|it| Device {
        name: &it.device,
        in_use: it.connected || it.plugged,
        plugged: it.plugged,
        refused: it.refused.as_deref(),
    });
    nics.chain(disks).collect()
}

fn device<'a>(instance: &'a Instance, name: &str) -> Option<Device<'a>> {
    devices(instance).into_iter().find(|it| it.name == name)
}

/// Whoever would plug or unplug is not there.
fn nobody(instance: &Instance) -> String {
    let Instance { name, host, .. } = instance;
    format!(
        "nobody has answered for its VM yet: does `vmm run` of {name}, or `vmm follow {name}`, run on {host}?"
    )
}

/// Leases a device, and waits until it is plugged in if the instance's VM runs. What does not work is undone.
pub(crate) fn attach(client: &Client, asked: &AttachDevice) -> Result<Instance, Failure> {
    let AttachDevice { name, nic, volume, wait } = asked;
    let before = client.instance(name)?;
    let running = devices(&before).iter().any(|it| it.in_use);
    let mut nic = nic.clone();
    // Named here, so that it is known whatever else comes at the same time.
    let new = match &mut nic {
        None => volume.clone().unwrap_or_default(),
        Some(nic) => nic.device.get_or_insert_with(|| free_nic_name(&before)).clone(),
    };
    let began = Instant::now();
    let request = api::AttachDevice { nic, volume: volume.clone() };
    let mut instance = client.attach_device(name, &request, *wait)?;
    if !running || client.is_trying_only() || wait.is_zero() {
        return Ok(instance);
    }
    loop {
        let why = match device(&instance, &new) {
            None => "somebody has detached it again".to_owned(),
            Some(it) if it.plugged => return Ok(instance),
            Some(Device { refused: Some(reason), .. }) => reason.to_owned(),
            Some(_) if began.elapsed() < *wait => {
                thread::sleep(POLL);
                instance = client.instance(name)?;
                continue;
            }
            Some(_) if !instance.ready => format!("it waits for {}", instance.waiting_for.join(", ")),
            Some(_) => nobody(&instance),
        };
        if device(&instance, &new).is_some() {
            // It has another version by now, which our own lease gave it.
            client.clone().expecting(None).detach_device(name, &new, false)?;
        }
        return Err(Failure::Usage(format!(
            "{new} was not plugged into {name}, and its lease is given back: {why}"
        )));
    }
}

fn free_nic_name(instance: &Instance) -> String {
    let mut names = (0_usize..).map(|number| format!("net{number}"));
    names.find(|name| device(instance, name).is_none()).unwrap_or_default()
}

/// Takes a device from an instance, and waits until the guest has let go of it.
pub(crate) fn detach(
    client: &Client,
    name: &str,
    leaving: &str,
    force: bool,
    wait: Duration,
) -> Result<(), Failure> {
    let began = Instant::now();
    let mut instance = client.detach_device(name, leaving, force)?;
    if client.is_trying_only() {
        return Ok(());
    }
    loop {
        let why = match device(&instance, leaving) {
            None => return Ok(()),
            Some(_) if began.elapsed() < wait => {
                thread::sleep(POLL);
                instance = client.instance(name)?;
                continue;
            }
            Some(Device { refused: Some(reason), .. }) => reason.to_owned(),
            Some(_) => nobody(&instance),
        };
        return Err(Failure::Usage(format!(
            "{leaving} is still in {name}, and leaves once its guest has let go of it: {why}. Ask again to have the guest asked \
             again; --force takes it at once, and I/O under way fails"
        )));
    }
}
