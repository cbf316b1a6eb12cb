//! `dpdk-testpmd`, as a guest's driver (virtio-user) and as the rival (its own vhost port), told what to do by its prompt.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::ours::mac;
use crate::cores::Cores;

const PROGRAM: &str = "dpdk-testpmd";
const PROMPT: &str = "testpmd> ";
const PATIENCE: Duration = Duration::from_secs(20);
/// The address of the driver's first port: what it sends comes from there.
pub(super) const DRIVER_MAC: &str = "02:00:00:00:01:01";
/// Memory of each of the two processes. Their buffers fit twice.
pub(super) const MEMORY_MIB: u64 = 128;

pub(super) fn is_installed() -> bool {
    // It has no option that only prints something and succeeds.
    Command::new(PROGRAM).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok()
}

/// Which port it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    /// A guest's driver, on the sender's core.
    Driver,
    /// The other end of that driver's queues, on the receiver's core.
    Vhost,
    /// TAP devices that it makes, by name in place of a socket, on the sender's core.
    Tap,
    /// Interfaces that there are, by AF_XDP, likewise.
    AfXdp,
}

/// What its forwarding core does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Forwarding {
    /// Sends as fast as it can.
    Transmit { frame_bytes: u32 },
    /// Takes what comes.
    Receive,
    /// Sends back what comes, addresses exchanged.
    Echo,
}

/// Packets that it has received and sent so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Totals {
    pub(super) received: u64,
    pub(super) sent: u64,
}

/// A process with one port.
pub(super) struct Testpmd {
    process: Child,
    stdin: ChildStdin,
    stdout: ChildStdout,
    /// What it said on standard error, for when it fails.
    errors: PathBuf,
}

impl Testpmd {
    /// Starts it with a port on each of these sockets; its forwarding does not run yet.
    pub(super) fn start(
        side: Side,
        sockets: &[impl AsRef<Path>],
        directory: &Path,
        cores: Cores,
        huge_pages: bool,
    ) -> Result<Self> {
        let (name, core, idle) = match side {
            Side::Driver => ("driver", cores.sender, cores.receiver),
            Side::Vhost => ("vhost", cores.receiver, cores.sender),
            Side::Tap => ("tap", cores.sender, cores.receiver),
            Side::AfXdp => ("af-xdp", cores.sender, cores.receiver),
        };
        let device = |number: usize, socket: &Path| match side {
            Side::Driver => {
                let [b0, b1, b2, b3, b4, b5] = mac(number);
                let mac = format!("{b0:02x}:{b1:02x}:{b2:02x}:{b3:02x}:{b4:02x}:{b5:02x}");
                let path = socket.display();
                format!("net_virtio_user{number},path={path},queues=1,queue_size=256,mac={mac}")
            }
            Side::Vhost => format!("net_vhost{number},iface={},queues=1", socket.display()),
            Side::Tap => format!("net_tap{number},iface={}", socket.display()),
            Side::AfXdp => format!("net_af_xdp{number},iface={}", socket.display()),
        };
        let errors = directory.join(format!("testpmd-{name}.log"));
        // It prints its answers through a buffer and its prompt past it: line by line, they come in order.
        let mut command = Command::new("stdbuf");
        command
            .args(["-oL", PROGRAM])
            // The main core sleeps at the prompt, the other one forwards.
            .args(["-l", &format!("{core},{idle}"), "--main-lcore", &idle.to_string()])
            .args(["--no-pci", "--no-telemetry", "--single-file-segments", "-m", &MEMORY_MIB.to_string()])
            .arg(format!("--file-prefix=wadi-{}-{name}", std::process::id()));
        for (number, socket) in sockets.iter().enumerate() {
            command.args(["--vdev", &device(number, socket.as_ref())]);
        }
        // In memory: it leaves no files behind, wherever huge pages are mounted or not.
        command.arg(if huge_pages { "--in-memory" } else { "--no-huge" });
        let mut process = command
            // Without a topology between the ports, each one sends by itself.
            .args(["--", "-i", "--nb-cores=1", "--total-num-mbufs=16384", "--no-lsc-interrupt"])
            .arg("--port-topology=loop")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(File::create(&errors).context("cannot make a log")?)
            .spawn()
            .with_context(|| format!("cannot start {PROGRAM} (Debian: dpdk-dev)"))?;
        let (stdin, stdout) = (process.stdin.take(), process.stdout.take());
        let mut testpmd =
            Self { process, stdin: stdin.context("a pipe")?, stdout: stdout.context("a pipe")?, errors };
        testpmd.until_prompt()?;
        Ok(testpmd)
    }

    /// Begins to forward.
    pub(super) fn forward(&mut self, forwarding: Forwarding) -> Result<()> {
        let mode = match forwarding {
            Forwarding::Transmit { frame_bytes } => {
                self.command(&format!("set txpkts {frame_bytes}"))?;
                "txonly"
            }
            Forwarding::Receive => "rxonly",
            Forwarding::Echo => "macswap",
        };
        self.command(&format!("set fwd {mode}"))?;
        self.command("start")?;
        Ok(())
    }

    /// Ends forwarding.
    pub(super) fn stop(&mut self) -> Result<()> {
        self.command("stop").map(drop)
    }

    /// Packets so far.
    pub(super) fn totals(&mut self) -> Result<Totals> {
        let each = self.totals_of_each()?.into_iter();
        Ok(each.fold(Totals::default(), |sum, it| Totals {
            received: sum.received + it.received,
            sent: sum.sent + it.sent,
        }))
    }

    /// Packets of each port so far.
    pub(super) fn totals_of_each(&mut self) -> Result<Vec<Totals>> {
        let text = self.command("show port stats all")?;
        let numbers = |name: &str| -> Result<Vec<u64>> {
            let digits =
                text.split(name).skip(1).map(|rest| rest.split_whitespace().next().unwrap_or_default());
            digits.map(|digits| digits.parse().with_context(|| format!("{digits:?} is no number"))).collect()
        };
        let (received, sent) = (numbers("RX-packets:")?, numbers("TX-packets:")?);
        ensure!(!received.is_empty() && received.len() == sent.len(), "no ports in: {text}");
        Ok(received.into_iter().zip(sent).map(|(received, sent)| Totals { received, sent }).collect())
    }

    fn command(&mut self, line: &str) -> Result<String> {
        self.stdin.write_all(line.as_bytes()).and_then(|()| self.stdin.write_all(b"\n"))?;
        self.until_prompt().with_context(|| format!("{PROGRAM}: {line:?}"))
    }

    /// What it says until it waits for the next command.
    fn until_prompt(&mut self) -> Result<String> {
        let began = Instant::now();
        let mut said = Vec::new();
        while !said.ends_with(PROMPT.as_bytes()) {
            let mut fds = [PollFd::from_borrowed_fd(self.stdout.as_fd(), PollFlags::IN)];
            let patience = Timespec { tv_sec: 1, tv_nsec: 0 };
            let mut piece = [0; 4096];
            let bytes = if poll(&mut fds, Some(&patience))? == 0 {
                None
            } else {
                Some(self.stdout.read(&mut piece)?)
            };
            match bytes {
                Some(0) => bail!("it ended: {}", self.last_words(&said)),
                Some(bytes) => said.extend_from_slice(&piece[..bytes]),
                None => ensure!(began.elapsed() < PATIENCE, "no prompt: {}", self.last_words(&said)),
            }
        }
        Ok(String::from_utf8_lossy(&said).into_owned())
    }

    fn last_words(&self, said: &[u8]) -> String {
        let errors = fs::read_to_string(&self.errors).unwrap_or_default();
        let said = String::from_utf8_lossy(said);
        let tail = |text: &str| text.lines().rev().take(5).collect::<Vec<_>>().join(" / ");
        format!("{} / {}", tail(&errors), tail(&said))
    }
}

impl Drop for Testpmd {
    fn drop(&mut self) {
        // Asked first, so that it gives back what it can.
        let _ = self.stdin.write_all(b"quit\n");
        let began = Instant::now();
        while began.elapsed() < Duration::from_secs(3) {
            if matches!(self.process.try_wait(), Ok(Some(_))) {
                return;
            }
            thread::sleep(Duration::from_millis(10));
        }
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
