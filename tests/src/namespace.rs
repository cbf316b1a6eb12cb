//! Network namespaces, and the links between them.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;

use anyhow::{Context as _, Result, anyhow, bail};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::runner;

/// A named network namespace; dropping it removes it with every link in it.
#[derive(Debug)]
pub struct Namespace {
    name: String,
}

impl Namespace {
    /// Makes a namespace, with its loopback up and without IPv6, whose autoconfiguration would be traffic that no test
    /// asked for.
    pub fn create(name: &str) -> Result<Self> {
        ip(&["netns", "add", name])?;
        let namespace = Self { name: name.to_owned() };
        namespace.ip(&["link", "set", "lo", "up"])?;
        namespace.inside(|| {
            for what in ["all", "default"] {
                let path = format!("/proc/sys/net/ipv6/conf/{what}/disable_ipv6");
                // A kernel without IPv6 has nothing to turn off.
                if Path::new(&path).exists() {
                    fs::write(path, "1")?;
                }
            }
            Ok(())
        })?;
        Ok(namespace)
    }

    /// Its name, as `ip netns` knows it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Runs `ip` with these arguments inside it.
    pub fn ip(&self, arguments: &[&str]) -> Result<()> {
        let mut words = vec!["-n", &self.name];
        words.extend_from_slice(arguments);
        ip(&words)
    }

    /// A command that runs inside it and dies with this process.
    pub fn command(&self, program: &Path) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.name]).args(runner::tether()).arg(program);
        command
    }

    /// A command that runs inside it and may outlive this process.
    pub fn untethered_command(&self, program: &Path) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.name]).arg(program);
        command
    }

    /// Runs `work` on a thread of its own inside it: sockets that it makes belong to the namespace for good.
    pub fn inside<T: Send>(&self, work: impl FnOnce() -> io::Result<T> + Send) -> Result<T> {
        let file = self.file()?;
        let outcome = thread::scope(|scope| {
            scope
                .spawn(move || {
                    enter(&file)?;
                    work()
                })
                .join()
        });
        match outcome {
            Ok(result) => result.with_context(|| format!("in the namespace {}", self.name)),
            Err(_) => Err(anyhow!("a thread in the namespace {} panicked", self.name)),
        }
    }

    fn file(&self) -> Result<File> {
        let path = PathBuf::from("/run/netns").join(&self.name);
        File::open(&path).with_context(|| format!("cannot open {}", path.display()))
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        // Nothing to do about a failure here: the janitor tries again.
        let _ = ip(&["netns", "del", &self.name]);
    }
}

fn enter(file: &File) -> io::Result<()> {
    Ok(move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network))?)
}

/// A cable between two namespaces.
pub(crate) fn connect(one: (&Namespace, &str), other: (&Namespace, &str)) -> Result<()> {
    let (one_namespace, one_name) = one;
    let (other_namespace, other_name) = other;
    one_namespace.ip(&[
        "link",
        "add",
        one_name,
        "type",
        "veth",
        "peer",
        "name",
        other_name,
        "netns",
        &other_namespace.name,
    ])?;
    one_namespace.ip(&["link", "set", one_name, "up"])?;
    other_namespace.ip(&["link", "set", other_name, "up"])
}

/// Lets only complete frames leave through an interface, as on a real cable: segmented, with their checksums.
pub(crate) fn complete_frames(namespace: &Namespace, interface: &str) -> Result<()> {
    let output = namespace
        .command(Path::new("ethtool"))
        .args(["-K", interface, "tx", "off", "tso", "off", "gso", "off"])
        .output()
        .context("cannot run ethtool: apt-get install ethtool")?;
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr);
        bail!("`ethtool -K {interface}` failed: {}", text.trim());
    }
    Ok(())
}

/// A bridge that forwards at once and floods multicast.
pub(crate) fn bridge(namespace: &Namespace, name: &str) -> Result<()> {
    namespace.ip(&[
        "link",
        "add",
        name,
        "type",
        "bridge",
        "stp_state",
        "0",
        "forward_delay",
        "0",
        "mcast_snooping",
        "0",
    ])?;
    namespace.ip(&["link", "set", name, "up"])
}

/// Runs `ip`.
pub(crate) fn ip(arguments: &[&str]) -> Result<()> {
    let output =
        Command::new("ip").args(arguments).output().context("cannot run ip: apt-get install iproute2")?;
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr);
        bail!("`ip {}` failed: {}", arguments.join(" "), text.trim());
    }
    Ok(())
}
