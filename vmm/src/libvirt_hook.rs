//! `vmm libvirt-hook`, which libvirt runs when domains start and end.

use std::ffi::OsString;
use std::fs::{self, OpenOptions};
use std::io::Read as _;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail};
use clap::Args;
use pod_api::client::{CONTROLLER, Credentials, Server};
use pod_protocol::config::HostConfig;
use vmm::hook::{Domain, Hook, RELEASE, VMM_GONE};
use vmm::{Registry, VmmError};

use crate::following;

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
    /// libvirt's URI, by which the domain is followed while it runs.
    #[arg(long, value_name = "URI", default_value = "qemu:///system")]
    connect: String,
    /// Where machines are noted.
    #[arg(long, default_value = "/run/wadi/vm")]
    directory: PathBuf,
    /// The domain's name.
    #[arg(allow_hyphen_values = true)]
    domain: String,
    /// What happens to it: prepare, started, reconnect and release mean something here.
    #[arg(allow_hyphen_values = true)]
    operation: String,
    /// What else libvirt says.
    #[arg(allow_hyphen_values = true)]
    more: Vec<String>,
}

/// What the hook itself starts once a domain has: following that, by the name of its instance.
const FOLLOW: &str = "follow";

pub(crate) fn libvirt_hook(asked: &LibvirtHook) -> Result<()> {
    if let (FOLLOW, [instance]) = (asked.operation.as_str(), &asked.more[..]) {
        let host = HostConfig::load(&asked.config)?.host.name;
        let client = asked.credentials.client(&asked.server)?;
        let (domain, uri) = (&asked.domain, &asked.connect);
        return following::follow_domain(client, &asked.directory, domain, uri, instance, host);
    }
    let mut input = Vec::new();
    // Read in any case: libvirt is writing it.
    std::io::stdin().read_to_end(&mut input).context("cannot read the domain from the standard input")?;
    act(asked, &String::from_utf8_lossy(&input))
}

/// What an operation of libvirt's means here.
enum Step {
    Lease,
    Follow,
    GiveBack,
}

fn act(asked: &LibvirtHook, xml: &str) -> Result<()> {
    // Other operations are allowed, whatever the pod is like: that is what saying nothing means.
    let step = match asked.operation.as_str() {
        "prepare" => Step::Lease,
        "started" | "reconnect" => Step::Follow,
        "release" => Step::GiveBack,
        _ => return Ok(()),
    };
    let refuse = |reason| VmmError::Domain { domain: asked.domain.clone(), reason };
    let domain = Domain::parse(xml).map_err(refuse);
    let prepares = match step {
        Step::Lease => true,
        Step::GiveBack => false,
        Step::Follow => {
            // It runs, and libvirt would end it if this failed.
            if let Err(error) = domain.map_err(Into::into).and_then(|it| begin_following(asked, it.as_ref()))
            {
                eprintln!("warning: the domain {} is not followed: {error:#}", asked.domain);
            }
            return Ok(());
        }
    };
    let Some(domain) = domain? else { return Ok(()) };
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

/// Has a domain followed, by a process that outlives the hook: libvirt waits for this one, and answers nobody meanwhile. When libvirt's daemon
/// was started anew, the domain may be followed still, which that process finds out.
fn begin_following(asked: &LibvirtHook, domain: Option<&Domain>) -> Result<()> {
    let Some(domain) = domain else { return Ok(()) };
    let instance = domain.instance();
    fs::create_dir_all(&asked.directory)?;
    let path = Registry::new(&asked.directory).log_of_following(instance);
    if asked.operation == "started" {
        fs::write(&path, "")?;
    }
    // libvirt waits also for whoever has what the hook writes to.
    let log = OpenOptions::new().create(true).append(true).open(&path)?;
    // What the hook was told beside the domain and what happens to it.
    let mut words: Vec<OsString> = std::env::args_os().skip(1).collect();
    words.truncate(words.len().saturating_sub(2 + asked.more.len()));
    words.extend([asked.domain.as_str(), FOLLOW, instance].map(OsString::from));
    let mut follow = Command::new(std::env::current_exe()?);
    follow.args(words).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
    // What is told to the hook's group is not for it.
    follow.process_group(0).spawn()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Hooked {
        #[command(flatten)]
        asked: LibvirtHook,
    }

    #[test]
    fn a_domain_that_runs_goes_on_whatever_it_says() {
        let xml = "<domain><name>vm1</name><metadata><wadi:instance xmlns:wadi='urn:wadi:domain:1' priority='high'/></metadata></domain>";
        let act = |operation| act(&Hooked::parse_from(["hook", "vm1", operation, "begin", "-"]).asked, xml);
        for operation in ["started", "reconnect", "stopped", "attach"] {
            act(operation).unwrap();
        }
        for operation in ["prepare", "release"] {
            assert!(act(operation).unwrap_err().to_string().contains("<metadata>"));
        }
    }
}
