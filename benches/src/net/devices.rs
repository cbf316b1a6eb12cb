//! NIC drivers of the kernel: what the pod's path adds to a device that a guest's driver could have used directly.

use std::fs;
use std::io::{self, Write};
use std::process;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use anyhow::{Context, Result, anyhow, ensure};
use comfy_table::{CellAlignment, Table, presets};
use vhost_net_cxl::nic::tap;
use wadi_tests::namespace::Namespace;

use super::flood::{Flood, Frame, GuestMemory, SEGMENT_BYTES, Stream, memory_bytes};
use super::ours::{Spread, mac};
use super::testpmd::{Forwarding, Side, Testpmd};
use super::{Bench, Driver, OURS, SOFTWARE, Server, WARM_UP, as_f64, seen_often};
use crate::cores::{self, Distance};
use crate::plot::{Panel, Series};
use crate::report::{Figure, Goal, median};

/// The device, and the other end of its cable.
const INTERFACE: &str = "wadi0";
const PEER: &str = "wadi1";
const SMALL_BYTES: u32 = 64;
/// The part of the device's own rate that ours shall reach.
const SHARE: f64 = 0.9;
/// What software coherence may cost.
const SOFTWARE_SHARE: f64 = 0.7;
/// As many frames as a ring has go round, so that their places are not in the cache for one user only.
const FRAMES: usize = 256;

/// Which device, and by which driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Device {
    Tap,
    AfXdp,
}

/// What goes out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Frames {
    /// 64 B.
    Small,
    /// TCP of 64 KiB, which somebody is still to segment.
    Unsegmented,
    /// The same, from a guest whose memory lies in the pool.
    UnsegmentedLent,
}

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Job {
    device: Device,
    frames: Frames,
    /// Of our two sides; apart, the driver is ours and runs in the frontend's thread.
    spread: Spread,
}

impl Job {
    pub(super) const ALL: [Self; 7] = [
        Self { device: Device::Tap, frames: Frames::Small, spread: Spread::ByTurns },
        Self { device: Device::Tap, frames: Frames::Unsegmented, spread: Spread::ByTurns },
        Self { device: Device::Tap, frames: Frames::Unsegmented, spread: Spread::Apart },
        Self { device: Device::Tap, frames: Frames::UnsegmentedLent, spread: Spread::ByTurns },
        Self { device: Device::AfXdp, frames: Frames::Small, spread: Spread::ByTurns },
        Self { device: Device::AfXdp, frames: Frames::Unsegmented, spread: Spread::ByTurns },
        Self { device: Device::AfXdp, frames: Frames::Unsegmented, spread: Spread::Apart },
    ];

    pub(super) fn name(self) -> String {
        let device = match self.device {
            Device::Tap => "tap",
            Device::AfXdp => "af-xdp",
        };
        let frames = match self.frames {
            Frames::Small => "64B",
            Frames::Unsegmented => "64KiB",
            Frames::UnsegmentedLent => "64KiB-in-pool",
        };
        let spread = match self.spread {
            Spread::ByTurns => "",
            Spread::Apart => "-apart",
        };
        format!("{device}/{frames}{spread}")
    }

    fn nic(self) -> String {
        let driver = match self.device {
            Device::Tap => "tap",
            Device::AfXdp => "af-xdp",
        };
        format!("driver = '{driver}'\ninterface = '{INTERFACE}'")
    }

    /// Where the kernel counts what it gets: from a TAP device itself, or at the other end of the cable.
    fn counted(self) -> &'static str {
        match self.device {
            Device::Tap => INTERFACE,
            Device::AfXdp => PEER,
        }
    }

    fn frame(self) -> Frame {
        match self.frames {
            Frames::Small => Frame::datagram(mac(0), SMALL_BYTES),
            Frames::Unsegmented | Frames::UnsegmentedLent => Frame::unsegmented(mac(0)),
        }
    }
}

/// What came out of one run.
#[derive(Clone, Debug)]
pub(super) struct Sample {
    server: Server,
    job: Job,
    distance: Distance,
    packets_per_second: f64,
    bits_per_second: f64,
}

/// Whether this machine lets devices be made; says why not.
pub(super) fn can_be_made(testpmd_is_there: bool) -> bool {
    if !testpmd_is_there {
        return false;
    }
    match namespace() {
        Ok(_) => true,
        Err(error) => {
            println!("No devices can be made, so none is measured ({error:#}).");
            false
        }
    }
}

fn namespace() -> Result<Namespace> {
    Namespace::create(&format!("wadi-bench-{}", process::id()))
}

/// Frames that the kernel got.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Count {
    packets: u64,
    bytes: u64,
}

impl Count {
    /// In this thread's namespace.
    fn read(interface: &str) -> Result<Self> {
        let table = fs::read_to_string("/proc/thread-self/net/dev")?;
        Self::parse(&table, interface).with_context(|| format!("the kernel does not count for {interface}"))
    }

    fn parse(table: &str, interface: &str) -> Option<Self> {
        let counts =
            table.lines().filter_map(|line| line.split_once(':')).find(|it| it.0.trim() == interface)?.1;
        let mut counts = counts.split_whitespace().map(str::parse);
        Some(Self { bytes: counts.next()?.ok()?, packets: counts.next()?.ok()? })
    }
}

/// Writes frames to a TAP device, as fast as the kernel takes them.
struct Writer {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<io::Result<()>>>,
}

impl Writer {
    fn start(namespace: &Namespace, frame: &Frame, core: usize) -> Result<Self> {
        let mut file = tap::attach("direct", INTERFACE)?;
        namespace.ip(&["link", "set", INTERFACE, "up"])?;
        let frames = vec![frame.whole(); FRAMES];
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = thread::spawn(move || {
            cores::pin(core).map_err(io::Error::other)?;
            for frame in frames.iter().cycle() {
                if stopped.load(Ordering::Relaxed) {
                    break;
                }
                match file.write(frame) {
                    Ok(_) => {}
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    Err(error) => return Err(error),
                }
            }
            Ok(())
        });
        Ok(Self { stop, thread: Some(thread) })
    }

    fn end(mut self) -> Result<()> {
        self.stop.store(true, Ordering::Relaxed);
        let thread = self.thread.take().context("it ends once")?;
        Ok(thread.join().map_err(|_| anyhow!("the writer panicked"))??)
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // Whoever drops it has another error to report.
            let _ = thread.join();
        }
    }
}

impl Bench<'_> {
    pub(super) fn device(&self, server: Server, job: Job) -> Result<Sample> {
        let namespace = namespace()?;
        if job.device == Device::AfXdp {
            namespace.ip(&["link", "add", INTERFACE, "type", "veth", "peer", "name", PEER])?;
            namespace.ip(&["link", "set", INTERFACE, "up"])?;
            namespace.ip(&["link", "set", PEER, "up"])?;
        }
        // What it starts stays in the namespace.
        namespace.inside(|| Ok(self.device_in(&namespace, server, job)))?
    }

    fn device_in(&self, namespace: &Namespace, server: Server, job: Job) -> Result<Sample> {
        cores::unpin(self.cores)?;
        let before_ns = self.cores.line_transfer_ns()?;
        cores::unpin(self.cores)?;
        let (packets_per_second, bits_per_second) = match (server, job.frames) {
            (Server::Ours(mode), frames) => {
                let (frame, lent) = (job.frame(), frames == Frames::UnsegmentedLent);
                let ram = if lent { memory_bytes(frame.bytes()) } else { 0 };
                let ours = self.ours(mode, &job.nic(), job.spread, 1, ram)?;
                cores::unpin(self.cores)?;
                let mut driver = if frames == Frames::Small {
                    self.driver(ours.sockets())?
                } else {
                    let memory = if lent {
                        let (pool, ram) = ours.ram()?;
                        GuestMemory::Pool(pool, ram)
                    } else {
                        GuestMemory::Own
                    };
                    let stream = Stream::connect(ours.socket(), memory, frame)?;
                    match job.spread {
                        Spread::ByTurns => Driver::Flood(Flood::start(stream, self.cores.sender)),
                        Spread::Apart => Driver::InFrontend(ours.stream(stream)?),
                    }
                };
                driver.begin(Forwarding::Transmit { frame_bytes: SMALL_BYTES })?;
                let rates = self.kernel_gets(job)?;
                driver.end()?;
                rates
            }
            (Server::Testpmd, Frames::Unsegmented | Frames::UnsegmentedLent) if job.device == Device::Tap => {
                let writer = Writer::start(namespace, &job.frame(), self.cores.sender)?;
                let rates = self.kernel_gets(job)?;
                writer.end()?;
                rates
            }
            (Server::Testpmd, frames) => {
                let side = match job.device {
                    Device::Tap => Side::Tap,
                    Device::AfXdp => Side::AfXdp,
                };
                let mut direct =
                    Testpmd::start(side, &[INTERFACE], self.directory, self.cores, self.huge_pages)?;
                direct.forward(Forwarding::Transmit {
                    frame_bytes: match frames {
                        Frames::Small => SMALL_BYTES,
                        // It has to be segmented already.
                        _ => u32::from(SEGMENT_BYTES) + 54,
                    },
                })?;
                let rates = self.kernel_gets(job)?;
                direct.stop()?;
                rates
            }
        };
        let distance = Distance::of(before_ns, self.cores.line_transfer_ns()?);
        Ok(Sample { server, job, distance, packets_per_second, bits_per_second })
    }

    /// Packets and bits per second that the kernel gets from the device.
    fn kernel_gets(&self, job: Job) -> Result<(f64, f64)> {
        thread::sleep(WARM_UP);
        let (before, began) = (Count::read(job.counted())?, Instant::now());
        thread::sleep(self.run);
        let (after, took) = (Count::read(job.counted())?, began.elapsed().as_secs_f64());
        ensure!(after.packets > before.packets, "the kernel did not get a single frame");
        let per_second = |after: u64, before: u64| as_f64(after - before) / took;
        Ok((per_second(after.packets, before.packets), 8.0 * per_second(after.bytes, before.bytes)))
    }
}

/// The medians of all runs of one kind: packets and bits per second.
fn cell(samples: &[Sample], server: Server, job: Job, distance: Distance) -> Option<(f64, f64)> {
    let matching = || {
        let same = move |it: &&Sample| (it.server, it.job, it.distance) == (server, job, distance);
        samples.iter().filter(same)
    };
    Some((
        median(matching().map(|it| it.packets_per_second))?,
        median(matching().map(|it| it.bits_per_second))?,
    ))
}

fn name(server: Server) -> &'static str {
    if server == Server::Testpmd { "directly" } else { server.name() }
}

/// Prints the tables.
pub(super) fn print(samples: &[Sample]) {
    if samples.is_empty() {
        return;
    }
    println!("\nTo devices of the kernel: what it gets per second");
    for distance in seen_often(samples, |it| it.distance) {
        let mut table = Table::new();
        table.load_style(presets::NOTHING);
        let names = Server::ALL.map(|server| name(server).to_owned());
        table.set_header([distance.to_string()].into_iter().chain(names));
        for job in Job::ALL {
            let cells = Server::ALL.map(|server| {
                cell(samples, server, job, distance).map_or("n/a".to_owned(), |(packets, bits)| {
                    format!("{:.3} M/s, {:.2} Gbit/s", packets / 1e6, bits / 1e9)
                })
            });
            table.add_row([job.name()].into_iter().chain(cells));
        }
        for column in table.column_iter_mut().skip(1) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        println!("{table}");
    }
}

/// What they say, for machines: bits per second, since not all cut frames alike.
pub(super) fn figures(samples: &[Sample]) -> Vec<Figure> {
    let mut figures = Vec::new();
    for distance in seen_often(samples, |it| it.distance) {
        for job in Job::ALL {
            let bits = |server| cell(samples, server, job, distance).map(|(_, bits)| bits);
            for (server, rival, share) in [(OURS, Server::Testpmd, SHARE), (SOFTWARE, OURS, SOFTWARE_SHARE)] {
                let (Some(ours), theirs) = (bits(server), bits(rival)) else { continue };
                let title = format!("net/{}/{}/{distance}/rate", job.name(), name(server));
                let figure = Figure::new(title, ours, "bit/s").against(name(rival), theirs);
                figures.push(match theirs {
                    Some(theirs) => figure.with_goal(Goal::AtLeast((theirs * share).round())),
                    None => figure,
                });
            }
        }
    }
    figures
}

/// The rates, to be drawn.
pub(super) fn panels(samples: &[Sample]) -> Vec<Panel> {
    let panel = |distance: Distance, device: Device, title: &str| Panel {
        title: format!("To a device of the kernel by {title}, cores {distance}"),
        x_label: "bytes of a frame",
        y_label: "bits per second",
        series: Server::ALL
            .map(|server| Series {
                dashed: false,
                name: name(server).to_owned(),
                points: Job::ALL
                    .into_iter()
                    .filter(|job| job.device == device && job.frames != Frames::UnsegmentedLent)
                    .filter(|job| job.spread == Spread::ByTurns)
                    .filter_map(|job| {
                        let (_, bits) = cell(samples, server, job, distance)?;
                        Some((f64::from(job.frame().bytes()), bits))
                    })
                    .collect(),
            })
            .into(),
    };
    let both =
        |distance| [(Device::Tap, "tap"), (Device::AfXdp, "af-xdp")].map(|it| panel(distance, it.0, it.1));
    seen_often(samples, |it| it.distance).into_iter().flat_map(both).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_counts_are_read() {
        let table = "Inter-|   Receive  |  Transmit\n face |bytes packets\n    lo:       1       2    0\n wadi0: 640 10 0 0\n";
        assert_eq!(Count::parse(table, "wadi0"), Some(Count { bytes: 640, packets: 10 }));
        assert_eq!(Count::parse(table, "lo"), Some(Count { bytes: 1, packets: 2 }));
        assert_eq!(Count::parse(table, "wadi"), None);
    }

    #[test]
    fn an_unsegmented_frame_is_one_that_the_engine_accepts() {
        use vhost_net_cxl::offloads::Offloads;
        use vhost_net_cxl::vnet_header::{HEADER_BYTES, VnetHeader};
        let frame = Frame::unsegmented(mac(0));
        let whole = frame.whole();
        assert_eq!(whole.len(), HEADER_BYTES + frame.bytes() as usize);
        let header = VnetHeader::parse(whole[..HEADER_BYTES].try_into().unwrap());
        assert!(header.check(frame.bytes(), 1500, Offloads::ALL).unwrap().is_large());
        let total = u16::from_be_bytes([whole[HEADER_BYTES + 16], whole[HEADER_BYTES + 17]]);
        assert_eq!(u32::from(total) + 14, frame.bytes());
    }
}
