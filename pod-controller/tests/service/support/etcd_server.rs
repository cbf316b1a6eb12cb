//! A real etcd with one member, on the loopback interface.

use std::fs::File;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

/// Far longer than it takes; only a test that fails waits for it.
const PATIENCE: Duration = Duration::from_mins(1);
/// How often another port is tried where somebody was faster.
const ATTEMPTS: u32 = 5;

pub(crate) struct Etcd {
    pub(crate) directory: TempDir,
    port: u16,
    /// Where it says whether it has a leader, whatever clients have to show.
    health_port: u16,
    arguments: Vec<String>,
    pub(super) running: Option<Child>,
}

impl Etcd {
    pub(crate) fn start() -> Self {
        Self::start_with("http", &[])
    }

    /// Speaks `http` or `https`, with more arguments.
    pub(crate) fn start_with(scheme: &str, more: &[String]) -> Self {
        for _ in 0..ATTEMPTS {
            let peer = "http://127.0.0.1:0";
            let mut etcd = Self::member(scheme, "default", peer, &format!("default={peer}"));
            etcd.arguments.extend(more.iter().cloned());
            if etcd.go_on() {
                return etcd;
            }
        }
        panic!("etcd does not start");
    }

    /// A member of a cluster, which does not run yet: its name, where the other members reach it, and where all of them do.
    pub(super) fn member(scheme: &str, name: &str, peer: &str, cluster: &str) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let [port, health_port] = free_ports();
        let health = format!("http://127.0.0.1:{health_port}");
        let url = format!("{scheme}://127.0.0.1:{port}");
        let arguments = [
            ("--name", name),
            ("--data-dir", directory.path().join("data").display().to_string().as_str()),
            ("--listen-client-urls", &url),
            ("--advertise-client-urls", &url),
            ("--listen-metrics-urls", &health),
            ("--listen-peer-urls", peer),
            ("--initial-advertise-peer-urls", peer),
            ("--initial-cluster", cluster),
        ]
        .iter()
        .flat_map(|(name, value)| [(*name).to_owned(), (*value).to_owned()])
        .collect();
        Self { directory, port, health_port, arguments, running: None }
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    pub(crate) fn address(&self, prefix: &str) -> String {
        format!("etcd://127.0.0.1:{}/{prefix}", self.port)
    }

    /// As if its host had died.
    pub(crate) fn kill(&mut self) {
        let mut child = self.running.take().expect("it runs");
        child.kill().expect("it can be killed");
        child.wait().expect("it ends");
    }

    /// With what it had. Says whether it runs.
    pub(crate) fn go_on(&mut self) -> bool {
        self.begin();
        self.is_ready()
    }

    /// Starts, and does not wait until it is of use: members of a cluster wait for each other.
    pub(super) fn begin(&mut self) {
        let log = self.directory.path().join("log");
        let log = File::options().create(true).append(true).open(log).expect("a file");
        let child = Command::new("etcd")
            .args(&self.arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .expect("etcd is installed: run make setup");
        self.running = Some(child);
    }

    /// Waits until it is of use. Says whether it runs.
    pub(super) fn is_ready(&mut self) -> bool {
        let deadline = Instant::now() + PATIENCE;
        while Instant::now() < deadline {
            let child = self.running.as_mut().expect("it was started");
            if child.try_wait().expect("a child").is_some() {
                self.running = None;
                return false;
            }
            if has_leader(self.health_port) {
                return true;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("etcd does not get ready: {}", said(self.directory.path()));
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("--- etcd\n{}", said(self.directory.path()));
        }
        if let Some(child) = &mut self.running {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn said(directory: &Path) -> String {
    let log = std::fs::read_to_string(directory.join("log")).unwrap_or_default();
    let lines: Vec<&str> = log.lines().collect();
    lines[lines.len().saturating_sub(20)..].join("\n")
}

pub(super) fn free_ports<const COUNT: usize>() -> [u16; COUNT] {
    let listeners = [(); COUNT].map(|()| TcpListener::bind("127.0.0.1:0").expect("a port"));
    listeners.map(|listener| listener.local_addr().expect("its address").port())
}

fn has_leader(port: u16) -> bool {
    let Ok(mut stream) = TcpStream::connect(("127.0.0.1", port)) else { return false };
    let mut answer = String::new();
    let asked = stream
        .set_read_timeout(Some(Duration::from_secs(5)))
        .and_then(|()| stream.write_all(b"GET /health HTTP/1.0\r\n\r\n"))
        .and_then(|()| stream.read_to_string(&mut answer));
    asked.is_ok() && answer.contains("\"health\":\"true\"")
}
