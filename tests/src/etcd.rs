//! An etcd that keeps a pod's state in the place of a file.

use std::fs;
use std::net::TcpStream;
use std::path::Path;

use anyhow::Result;

use crate::pod::Pod;
use crate::process::Daemon;
use crate::waiting::until;

/// In a namespace of its own nobody else has it.
const PORT: u16 = 2379;

/// An etcd with one member, where the pod's controller runs.
#[derive(Debug)]
pub struct Etcd {
    _daemon: Daemon,
}

impl Etcd {
    /// Starts it, and has the pod's controller go on there with what its file had.
    pub fn instead_of_the_file(pod: &mut Pod) -> Result<Self> {
        let url = format!("http://127.0.0.1:{PORT}");
        let peer = "http://127.0.0.1:2380";
        let mut command = pod.control_namespace().command(Path::new("etcd"));
        command.arg("--data-dir").arg(pod.directory().join("etcd"));
        command.args(["--listen-client-urls", &url, "--advertise-client-urls", &url]);
        command.args(["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]);
        command.args(["--initial-cluster", &format!("default={peer}")]);
        let daemon = Daemon::start("etcd", command, &pod.directory().join("log/etcd.log"))?;
        // It listens once it has elected itself.
        until("etcd (make setup installs it)", || {
            pod.control_namespace().inside(|| TcpStream::connect(("127.0.0.1", PORT))).ok()
        });
        pod.controller()?.stop()?;
        let path = pod.controller_config_path();
        let store = format!("[controller]\nstore = \"etcd://127.0.0.1:{PORT}/wadi/pod1\"");
        fs::write(&path, fs::read_to_string(&path)?.replacen("[controller]", &store, 1))?;
        pod.start_controller_with(&["--bootstrap"])?;
        Ok(Self { _daemon: daemon })
    }
}
