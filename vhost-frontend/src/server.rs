//! One guest device's socket, served on a thread of its own.

use std::convert::Infallible;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};
use thiserror::Error;
use tracing::{debug, info, warn};
use vhost::vhost_user::{BackendReqHandler, Error as VhostError};

use crate::additional::Additional;
use crate::config::ConfigSpace;
use crate::connection::Connection;
use crate::connector::Connector;
use crate::early::EarlyEnable;
use crate::expected_rings::ExpectedRings;
use crate::memory::GuestMemory;
use crate::pool_ram::PoolRam;
use crate::request::is_partial;
use crate::ring::Ring;
use crate::socket::{ListenError, Socket};

/// What a device offers.
#[derive(Debug, Clone)]
pub struct DeviceSpec {
    /// For logs and thread names.
    pub name: String,
    /// Virtio feature bits; VIRTIO_F_VERSION_1 and vhost-user's own bit are added.
    pub virtio_features: u64,
    /// What may be assumed of any driver of today's virtio if the VMM forgets which features it has acknowledged. 0 where VMMs do not.
    pub assumed_features: u64,
    /// The configuration space.
    pub config: ConfigSpace,
    /// Number of vrings.
    pub queues: u16,
    /// What to give a VMM so that it asks for no more than this number of vrings.
    pub queues_hint: fn(u16) -> String,
    /// The longest vring, a power of two.
    pub queue_size_max: u16,
    /// It completes requests in the order of their ring: a restarted engine resumes them whether the VMM has them recorded or not.
    pub in_order: bool,
    /// The VMM may ask that the guest's network address be announced.
    pub announces: bool,
    /// Of a ring's index: whether what the driver offers there is thrown away while the VMM has the ring disabled, as a NIC does with
    /// what it was to send. It is handed over as one that is [not enabled](Ring::is_enabled) then.
    pub discards: fn(u16) -> bool,
    /// What of the pool may be the guest's memory. Without it the pool is not known, and a file like any other.
    pub pool_ram: Option<PoolRam>,
    /// How long a VMM that used the device's predecessor may take to come to this one: [`VMM_PATIENCE`], but in tests.
    pub vmm_patience: Duration,
}

/// VMMs that go on after their frontend has started anew connect within a second or a few (QEMU's `reconnect`); a device tries every
/// half a second to reach one that listens. Whoever waits until it is sure that a VMM has gone waits longer: libvirt's hook does (`VMM_GONE` of `vmm`).
pub const VMM_PATIENCE: Duration = Duration::from_secs(10);

/// Why a ring is taken back from the engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopReason {
    /// The VMM asked for it: the guest still expects its answers, so complete what is in flight first.
    Requested,
    /// The VMM went away. What is in flight is left as it is for the in-flight region, unless it completes soon.
    Disconnected,
}

/// The driver wrote something to the configuration space that it may not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("the driver may not write this part of the configuration space")]
pub struct ConfigRefused;

/// The engine's side of a device. Called on the device's thread, one call at a time.
pub trait DeviceSink: Send + 'static {
    /// A VMM connected.
    fn connected(&mut self) {}

    /// No VMM has connected since the device began, for [as long as one may take](DeviceSpec::vmm_patience). Told once; one may come yet.
    fn nobody_came(&mut self) {}

    /// The driver acknowledged these virtio features.
    fn features(&mut self, _acknowledged: u64) {}

    /// A ring is started and enabled, or it was until the VMM disabled it, and the device [discards](DeviceSpec::discards): pass it to
    /// the worker and look at it at once, a kick may have come before.
    fn ring_started(&mut self, ring: Ring);

    /// Takes ring `index` back from the worker. Returns when the worker has let go of it, with
    /// [`Ring::next_available`].
    fn ring_stopped(&mut self, index: u16, reason: StopReason) -> u16;

    /// The guest's memory changed while rings run: returns when every ring uses the new one.
    fn memory_changed(&mut self, memory: &GuestMemory);

    /// Announce the guest's network address: it has moved, and its driver does not do so itself. Asked of devices with
    /// [`DeviceSpec::announces`] only.
    fn announce(&mut self, _address: [u8; 6]) {}

    /// The driver wrote to the configuration space.
    fn config_written(&mut self, _offset: usize, _bytes: &[u8]) -> Result<(), ConfigRefused> {
        Err(ConfigRefused)
    }

    /// The VMM went away; all rings were stopped.
    fn disconnected(&mut self) {}
}

/// A device's socket and thread. Dropping it stops the rings, disconnects the VMM and removes the socket if it is ours.
#[derive(Debug)]
pub struct Server {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    /// Closed when the thread ends.
    ended: Receiver<Infallible>,
}

#[derive(Debug)]
struct Shared {
    stop: rustix::fd::OwnedFd,
    expected: ExpectedRings,
    /// The VMM's connection while requests are served, to cut it where one is stuck.
    connection: Mutex<Option<UnixStream>>,
}

impl Server {
    /// Opens the socket and serves it, one VMM after the other.
    pub fn listen(path: &Path, spec: DeviceSpec, sink: impl DeviceSink) -> Result<Self, ListenError> {
        let door = Door::Open(Socket::bind(path)?);
        Self::start(path, door, spec, sink)
    }

    /// Connects to a VMM that listens at `path`, as soon as it does and whenever it does again, and serves it.
    pub fn connect(path: &Path, spec: DeviceSpec, sink: impl DeviceSink) -> Result<Self, ListenError> {
        let door = Door::Calling(Connector::new(path, &spec.name)?);
        Self::start(path, door, spec, sink)
    }

    fn start(path: &Path, door: Door, spec: DeviceSpec, sink: impl DeviceSink) -> Result<Self, ListenError> {
        let error = |what| move |source: io::Error| ListenError::Io { what, path: path.to_owned(), source };
        let stop = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|errno| error("make an event descriptor for")(errno.into()))?;
        let expected = ExpectedRings::new().map_err(error("make a timer for"))?;
        let shared = Arc::new(Shared { stop, expected, connection: Mutex::new(None) });
        let (name, vmm_due) = (spec.name.clone(), Instant::now() + spec.vmm_patience);
        let (ends, ended) = mpsc::channel();
        let connection = Connection::new(spec, Box::new(sink));
        let service = Service { door, shared: Arc::clone(&shared), connection, vmm_due, _ends: ends };
        let thread = std::thread::Builder::new()
            .name(name)
            .spawn(move || service.run())
            .map_err(error("start a thread for"))?;
        Ok(Self { shared, thread: Some(thread), ended })
    }

    /// Disconnects a VMM that is connected now and runs no ring when this time has passed, so that it connects again. To be
    /// called when a guest has come from another host: its VMM may hold the device for one without a link until then.
    pub fn expect_rings(&self, within: Duration) {
        if let Err(error) = self.shared.expected.within(within) {
            warn!(%error, "cannot set a timer: a guest that arrived without a link may stay without");
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = rustix::io::write(&self.shared.stop, &1u64.to_ne_bytes());
        // The thread stops the rings before the VMM may see the connection end: QEMU notes at that moment how far a used ring is,
        // and tells our successor to go on there. Only a VMM that does not read its answers is cut off at once.
        let _ = self.ended.recv_timeout(STOP_PATIENCE);
        if let Some(connection) =
            self.shared.connection.lock().unwrap_or_else(PoisonError::into_inner).as_ref()
        {
            let _ = connection.shutdown(std::net::Shutdown::Both);
        }
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            warn!("a device's thread panicked");
        }
    }
}

/// How VMM and device come together.
enum Door {
    /// VMMs connect here.
    Open(Socket),
    /// The VMM listens.
    Calling(Connector),
}

impl Door {
    /// Where VMMs knock.
    fn socket(&self) -> Option<&Socket> {
        match self {
            Self::Open(socket) => Some(socket),
            Self::Calling(_) => None,
        }
    }
}

/// What the thread owns.
struct Service {
    door: Door,
    shared: Arc<Shared>,
    connection: Connection,
    /// When a VMM should have come.
    vmm_due: Instant,
    /// Dropped when the thread ends.
    _ends: Sender<Infallible>,
}

enum Event {
    Stop,
    /// There is something to read, or the VMM is gone.
    Connection {
        gone: bool,
    },
    Listener,
    /// Rings were to run by now.
    RingsExpected,
    /// It is time to look again.
    Pause,
}

/// What of a VMM's connection is waited for.
#[derive(Clone, Copy)]
enum Awaited<'a> {
    /// There is none. By this time one should have come.
    Vmm(Option<Instant>),
    Request(BorrowedFd<'a>),
    /// A part of a request is there already, and says so all the time. Who comes next waits until it is known whether this
    /// VMM is alive.
    Rest(BorrowedFd<'a>),
}

/// How long a request that is being served may take when the device is to stop.
const STOP_PATIENCE: Duration = Duration::from_secs(1);
/// How long the rest of a request may take. VMMs send requests whole.
const REST_PATIENCE: Duration = Duration::from_secs(1);
/// Between two looks for it.
const REST_PAUSE: Timespec = Timespec { tv_sec: 0, tv_nsec: 5_000_000 };

impl Service {
    fn run(self) {
        let Self { mut door, shared, connection, vmm_due, _ends } = self;
        let mut vmm_due = Some(vmm_due);
        let name = connection.name().to_owned();
        let connection = Arc::new(Mutex::new(connection));
        loop {
            let stream = match &mut door {
                Door::Open(socket) => match wait(&shared, Awaited::Vmm(vmm_due), Some(socket)) {
                    Event::Stop => return,
                    Event::Connection { .. } | Event::RingsExpected | Event::Pause => None,
                    Event::Listener => accept(socket, &name),
                },
                Door::Calling(connector) => connector.attempt(),
            };
            let began = Instant::now();
            let connected = stream.is_some() && door.socket().is_some();
            let served =
                stream.is_some_and(|stream| serve(&shared, door.socket(), stream, &connection, &name));
            if connected || served {
                vmm_due = None;
            } else if vmm_due.is_some_and(|due| due <= Instant::now()) {
                vmm_due = None;
                connection.lock().unwrap_or_else(PoisonError::into_inner).nobody_came();
            }
            if let Door::Calling(connector) = &mut door {
                if served {
                    connector.parted_after(began.elapsed());
                }
                // Also after a VMM that went away at once: it may do so again.
                if pauses(&shared, connector.pause()) {
                    return;
                }
            }
        }
    }
}

/// Serves one VMM until it goes away. Returns whether it asked for anything.
fn serve(
    shared: &Shared,
    socket: Option<&Socket>,
    stream: UnixStream,
    connection: &Arc<Mutex<Connection>>,
    name: &str,
) -> bool {
    let (Ok(cut), Ok(watched)) = (stream.try_clone(), stream.try_clone()) else {
        warn!(device = name, "out of file descriptors: VMM turned away");
        return false;
    };
    *shared.connection.lock().unwrap_or_else(PoisonError::into_inner) = Some(cut);
    // Who connects takes the link up, whatever was expected of its predecessor.
    if let Err(error) = shared.expected.cancel() {
        warn!(device = name, %error, "cannot reset a timer");
    }
    let lock = || connection.lock().unwrap_or_else(PoisonError::into_inner);
    let mut handler = BackendReqHandler::from_stream(stream, Arc::clone(connection));
    let mut begun: Option<Instant> = None;
    // Who connected is there. Who listens may have left us in its queue, behind another device's daemon.
    let mut met = socket.is_some();
    if met {
        lock().connected();
        info!(device = name, "VMM connected");
    }
    let mut asked = false;
    loop {
        let vmm = watched.as_fd();
        let awaited = if begun.is_some() { Awaited::Rest(vmm) } else { Awaited::Request(vmm) };
        let gone = match wait(shared, awaited, socket) {
            Event::Stop => break,
            Event::Listener => {
                // A device has one VMM. Left in the queue it would wait for ever.
                if socket.and_then(|socket| accept(socket, name)).is_some() {
                    warn!(device = name, "a second VMM connected and was turned away");
                }
                continue;
            }
            Event::RingsExpected => {
                let _ = shared.expected.cancel();
                if !met || lock().serves_rings() {
                    continue;
                }
                info!(
                    device = name,
                    "VMM disconnected: its guest has arrived, and no ring runs; it is to connect again"
                );
                break;
            }
            Event::Connection { gone: true } if !met => break,
            Event::Connection { gone } => gone,
            Event::Pause => false,
        };
        if !gone && is_partial(&watched).unwrap_or(false) {
            if begun.get_or_insert_with(Instant::now).elapsed() < REST_PATIENCE {
                continue;
            }
            warn!(device = name, "VMM disconnected: the rest of its request did not come");
            break;
        }
        begun = None;
        if !met {
            met = true;
            lock().connected();
            info!(device = name, "VMM answered");
        }
        match serve_request(&mut handler, &lock, &watched) {
            Ok(()) => asked = true,
            Err(VhostError::Disconnected | VhostError::PartialMessage) => {
                info!(device = name, "VMM disconnected");
                break;
            }
            Err(error) => {
                warn!(device = name, %error, "VMM disconnected: it sent a request that cannot be served");
                break;
            }
        }
    }
    *shared.connection.lock().unwrap_or_else(PoisonError::into_inner) = None;
    if met {
        lock().disconnected();
        debug!(device = name, "rings stopped");
    }
    asked
}

fn pause_of(time: Duration) -> Timespec {
    Timespec {
        tv_sec: i64::try_from(time.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(time.subsec_nanos()),
    }
}

/// Waits so long, or until told to stop. Returns whether it was.
fn pauses(shared: &Shared, pause: Duration) -> bool {
    let began = Instant::now();
    loop {
        let left = pause.saturating_sub(began.elapsed());
        let mut fds = [PollFd::new(&shared.stop, PollFlags::IN)];
        let timeout = pause_of(left);
        // Interrupted: look again.
        let _ = rustix::event::poll(&mut fds, Some(&timeout));
        if !fds[0].revents().is_empty() {
            return true;
        }
        if left.is_zero() {
            return false;
        }
    }
}

/// Serves the next request, which is there as a whole.
fn serve_request<'a>(
    handler: &mut BackendReqHandler<Mutex<Connection>>,
    lock: &impl Fn() -> MutexGuard<'a, Connection>,
    stream: &UnixStream,
) -> Result<(), VhostError> {
    if lock().takes_notices(stream).map_err(VhostError::ReqHandlerError)? || serve_early(&mut lock(), stream)
    {
        return Ok(());
    }
    match Additional::take(stream) {
        Ok(Some(additional)) => serve_additional(&mut lock(), additional, stream),
        // An error of the socket is the crate's, too.
        _ => handler.handle_request(),
    }
}

/// Serves a request that the crate does not know. Who is refused is disconnected, as by the crate.
fn serve_additional(
    connection: &mut Connection,
    additional: Additional,
    stream: &UnixStream,
) -> Result<(), VhostError> {
    let outcome = connection.serve_additional(additional.asked);
    let told = outcome.as_ref().map(|status| *status).map_err(|_| ());
    additional.answer(stream, told).map_err(VhostError::ReqHandlerError)?;
    outcome.map(drop)
}

/// Serves a ring's enabling that comes before the features, which the crate would refuse. Whatever else there is, also an
/// error, is the crate's.
fn serve_early(connection: &mut Connection, stream: &UnixStream) -> bool {
    if connection.rings_can_be_enabled() {
        return false;
    }
    let Ok(Some(early)) = EarlyEnable::take(stream) else { return false };
    let served = connection.enable_early(early.index, early.enable);
    if let Err(error) = early.answer(stream, served) {
        debug!(device = connection.name(), %error, "an answer did not reach the VMM");
    }
    true
}

fn accept(socket: &Socket, name: &str) -> Option<UnixStream> {
    let (stream, _) = match socket.listener.accept() {
        Ok(accepted) => accepted,
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => return None,
        Err(error) => {
            warn!(device = name, %error, "cannot accept a VMM");
            // Most likely out of descriptors: the connection stays queued, do not spin on it.
            std::thread::sleep(std::time::Duration::from_millis(100));
            return None;
        }
    };
    stream.set_nonblocking(false).ok()?;
    Some(stream)
}

/// Waits for something to do. The connection comes before the listener, so that a VMM that went away is noticed
/// before its successor is looked at.
fn wait(shared: &Shared, awaited: Awaited<'_>, socket: Option<&Socket>) -> Event {
    let listener = socket.map(|socket| socket.listener.as_fd());
    // What hangs up is told of without being asked for.
    let (connection, events, next_vmm) = match awaited {
        Awaited::Vmm(_) => (None, PollFlags::empty(), PollFlags::IN),
        Awaited::Request(connection) => (Some(connection), PollFlags::IN, PollFlags::IN),
        Awaited::Rest(connection) => (Some(connection), PollFlags::empty(), PollFlags::empty()),
    };
    let pause = match awaited {
        Awaited::Vmm(due) => due.map(|due| pause_of(due.saturating_duration_since(Instant::now()))),
        Awaited::Request(_) => None,
        Awaited::Rest(_) => Some(REST_PAUSE),
    };
    loop {
        // What is not there is not looked at.
        let (stop, expected) = (shared.stop.as_fd(), shared.expected.as_fd());
        let expects = if connection.is_some() { PollFlags::IN } else { PollFlags::empty() };
        let mut fds = [
            PollFd::from_borrowed_fd(stop, PollFlags::IN),
            PollFd::from_borrowed_fd(listener.unwrap_or(stop), next_vmm),
            PollFd::from_borrowed_fd(connection.unwrap_or(stop), events),
            PollFd::from_borrowed_fd(expected, expects),
        ];
        // Interrupted: look again.
        let ready = rustix::event::poll(&mut fds, pause.as_ref());
        if !fds[0].revents().is_empty() {
            return Event::Stop;
        }
        let told = fds[2].revents();
        if connection.is_some() && !told.is_empty() {
            return Event::Connection { gone: told.intersects(PollFlags::HUP | PollFlags::ERR) };
        }
        if fds[3].revents().contains(PollFlags::IN) {
            return Event::RingsExpected;
        }
        if listener.is_some() && !fds[1].revents().is_empty() {
            return Event::Listener;
        }
        if ready == Ok(0) {
            return Event::Pause;
        }
    }
}
