//! `vmm libvirt-hook`, which libvirt runs when domains start and end.

use std::io::Read as _;
use std::path::PathBuf;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail};
use clap::Args;
use pod_api::client::{CONTROLLER, Credentials, Server};
use pod_protocol::config::HostConfig;
use vmm::VmmError;
use vmm::hook::{Domain, Hook, RELEASE, VMM_GONE};

/// For how long the controller may leave a request unanswered, beyond what is waited for anyway.
const ANSWER: Duration = Duration::from_secs(5);

#[derive(Args)]
pub(crate) struct LibvirtHook {
    /// Where the controller listens.
    #[arg(long, env = "WADI_CONTROLLER", help_heading = CONTROLLER, default_value = "unix:/run/wadi/controller.sock")]
    server: Server,
    #[command(flatten)]
    credentials: Credentials,
    /// The configuration of this host's daemons, which says who it is.
    #[arg(long, value_name = "FILE", default_value = "/etc/wadi/host.toml")]
    config: PathBuf,
    /// For how many seconds a domain may wait for its devices, beside what it takes to give back those of an earlier start.
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=30))]
    wait: u64,
    /// The domain's name.
    #[arg(allow_hyphen_values = true)]
    domain: String,
    /// What happens to it: prepare and release mean something here.
    #[arg(allow_hyphen_values = true)]
    operation: String,
    /// What else libvirt says.
    #[arg(allow_hyphen_values = true)]
    more: Vec<String>,
}

pub(crate) fn libvirt_hook(asked: &LibvirtHook) -> Result<()> {
    let mut input = Vec::new();
    // Read in any case: libvirt is writing it.
    std::io::stdin().read_to_end(&mut input).context("cannot read the domain from the standard input")?;
    // Other operations are allowed, whatever the pod is like: that is what saying nothing means.
    let prepares = match asked.operation.as_str() {
        "prepare" => true,
        "release" => false,
        _ => return Ok(()),
    };
    let refuse = |reason| VmmError::Domain { domain: asked.domain.clone(), reason };
    let Some(domain) = Domain::parse(&String::from_utf8_lossy(&input)).map_err(refuse)? else {
        return Ok(());
    };
    let config = HostConfig::load(&asked.config)
        .with_context(|| format!("the domain {} wants devices of the pod", asked.domain))?;
    let hook = Hook {
        client: asked.credentials.client(&asked.server)?,
        host: config.host.name.clone(),
        sockets: config.run_directory().sockets(),
        wait: Duration::from_secs(asked.wait),
        gone: VMM_GONE,
    };
    let patience = VMM_GONE + if prepares { hook.wait } else { RELEASE } + ANSWER;
    // libvirt waits for us, and whoever asked waits for libvirt: a controller that stands still must not hold them up.
    let (done, outcome) = mpsc::channel();
    thread::Builder::new().name("hook".to_owned()).spawn(move || {
        let outcome = if prepares { hook.prepare(&domain) } else { hook.release(&domain) };
        // Without that file the shim does nothing, and the VM runs all the same.
        let file = match (prepares, &outcome) {
            (true, Ok(())) => domain.make_vcpu_control(),
            (true, Err(_)) => Ok(()),
            (false, _) => domain.remove_vcpu_control(),
        };
        if let Err(error) = file {
            eprintln!("warning: the file for slicing the vCPUs of the domain {}: {error}", domain.name());
        }
        // Nobody waits any more if that took too long.
        let _ = done.send(outcome);
    })?;
    match outcome.recv_timeout(patience) {
        Ok(outcome) => Ok(outcome?),
        Err(mpsc::RecvTimeoutError::Timeout) => bail!(
            "the controller at {} has not answered for {} s: see what it says, and start the domain again",
            asked.server,
            patience.as_secs()
        ),
        Err(error) => Err(anyhow!("the hook itself has failed: {error}")),
    }
}
