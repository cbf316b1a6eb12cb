//! The thread that listens to the agents of vCPUs.
//!
//! Agents run as root or as the daemon's own user, and are believed as little as possible all the same: what they say is bounded in
//! length, in number and in value, and one that breaks the rules is sent away. It costs its own VM the control of its vCPUs, and no more.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use pod_protocol::daemon::StopSignal;
use pod_protocol::ids::InstanceId;
use pod_protocol::vcpus::{FromAgent, Hello, Link, LinkError, LinkListener, Report, ToAgent};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// A host has no more VMs whose vCPUs are held.
const AGENTS_MAX: usize = 256;
/// Who connects says within this who it is.
const HELLO_WITHIN: Duration = Duration::from_secs(2);
/// How long nobody is let in after that was not possible, as when there are no descriptors left.
const PAUSE: Duration = Duration::from_millis(200);

/// Who takes what agents say.
pub(super) trait Host: Send + 'static {
    /// An agent has come. It is welcomed, or the reason why not is returned.
    fn enter(&self, hello: &Hello, number: u64, link: &Arc<Link>) -> Result<InstanceId, String>;

    /// It reports. If it should not have, the reason is returned, and it has left.
    fn report(&self, vm: InstanceId, number: u64, report: &Report) -> Result<(), String>;

    /// It has left.
    fn leave(&self, vm: InstanceId, number: u64);
}

/// Listens until it is dropped.
#[derive(Debug)]
pub(super) struct Agents {
    stop: StopSignal,
    thread: Option<JoinHandle<()>>,
}

impl Agents {
    pub(super) fn listen(path: &Path, host: impl Host) -> io::Result<Self> {
        let (listener, stop) = (LinkListener::bind(path)?, StopSignal::manual()?);
        let told = stop.clone();
        let thread = thread::Builder::new()
            .name("vcpu-agents".to_owned())
            .spawn(move || run(&listener, &host, &told))?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for Agents {
    fn drop(&mut self) {
        self.stop.stop();
        if let Some(thread) = self.thread.take() {
            // It has nothing to tell.
            let _ = thread.join();
        }
    }
}

/// Somebody who is connected.
struct Connected {
    link: Arc<Link>,
    number: u64,
    since: Instant,
    /// Whose vCPUs it holds, once it has said so.
    vm: Option<InstanceId>,
}

fn run<H: Host>(listener: &LinkListener, host: &H, stop: &StopSignal) {
    let mut all: Vec<Connected> = Vec::new();
    let mut number = 0;
    let mut paused: Option<Instant> = None;
    while !stop.is_set() {
        paused = paused.filter(|since| since.elapsed() < PAUSE);
        let strangers = all.iter().filter(|it| it.vm.is_none());
        let until_hello = strangers.map(|it| HELLO_WITHIN.saturating_sub(it.since.elapsed())).min();
        let until_open = paused.map(|since| PAUSE.saturating_sub(since.elapsed()));
        let (open, ready) =
            wait(listener, paused.is_none(), &all, stop, until_hello.into_iter().chain(until_open).min());
        let mut ready = ready.into_iter();
        all.retain_mut(|it| {
            let is_late = it.vm.is_none() && it.since.elapsed() >= HELLO_WITHIN;
            let stays = if ready.next().unwrap_or(false) { it.serve(host) } else { !is_late };
            if !stays && let Some(vm) = it.vm {
                host.leave(vm, it.number);
            }
            stays
        });
        if open {
            match listener.accept() {
                Ok(Some(link)) if all.len() >= AGENTS_MAX => refuse(&link, "this host has too many agents"),
                Ok(Some(link)) => {
                    number += 1;
                    let link = Arc::new(link);
                    all.push(Connected { link, number, since: Instant::now(), vm: None });
                }
                Ok(None) => {}
                Err(error) => {
                    tracing::warn!(%error, "no agent of vCPUs can connect");
                    paused = Some(Instant::now());
                }
            }
        }
    }
    for it in &all {
        if let Some(vm) = it.vm {
            host.leave(vm, it.number);
        }
    }
}

/// Waits until something happens: whether somebody wants in, and who of those who are in has something to say.
fn wait(
    listener: &LinkListener,
    listens: bool,
    all: &[Connected],
    stop: &StopSignal,
    at_most: Option<Duration>,
) -> (bool, Vec<bool>) {
    let wanted = if listens { PollFlags::IN } else { PollFlags::empty() };
    let mut watched = vec![PollFd::new(stop, PollFlags::IN), PollFd::new(listener, wanted)];
    watched.extend(all.iter().map(|it| PollFd::new(&*it.link, PollFlags::IN)));
    let timeout = at_most.and_then(|at_most| Timespec::try_from(at_most).ok());
    // An interruption leads to another look; nothing else can go wrong with descriptors of our own.
    if poll(&mut watched, timeout.as_ref()).is_err() {
        return (false, Vec::new());
    }
    let ready = |it: &PollFd<'_>| !it.revents().is_empty();
    (listens && ready(&watched[1]), watched[2..].iter().map(ready).collect())
}

fn refuse(link: &Link, reason: &str) {
    // Who does not listen is not told.
    let _ = link.send(&ToAgent::Refused { reason: reason.to_owned() });
    link.close();
}

impl Connected {
    /// Takes one message: one who says much does not keep others waiting. Returns whether it stays.
    fn serve<H: Host>(&mut self, host: &H) -> bool {
        let refused = match (self.link.receive::<FromAgent>(), self.vm) {
            (Ok(None), _) => return true,
            (Ok(Some(FromAgent::Hello(hello))), None) => match host.enter(&hello, self.number, &self.link) {
                Ok(vm) => {
                    self.vm = Some(vm);
                    return true;
                }
                Err(reason) => reason,
            },
            (Ok(Some(FromAgent::Report(report))), Some(vm)) => match host.report(vm, self.number, &report) {
                Ok(()) => return true,
                Err(reason) => reason,
            },
            (Ok(Some(FromAgent::Hello(_))), Some(_)) => "a second hello".to_owned(),
            (Ok(Some(FromAgent::Report(_))), None) => "a report before the hello".to_owned(),
            (Err(LinkError::Malformed(what)), _) => format!("a message that cannot be read: {what}"),
            (Err(LinkError::Closed | LinkError::Io(_)), _) => return false,
        };
        refuse(&self.link, &refused);
        false
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::Mutex;

    use super::*;

    /// One VM, `vm1`.
    #[derive(Clone, Default)]
    struct Seen(Arc<Mutex<BTreeMap<u64, Vec<u64>>>>);

    impl Host for Seen {
        fn enter(&self, hello: &Hello, number: u64, link: &Arc<Link>) -> Result<InstanceId, String> {
            if hello.instance != "vm1" {
                return Err(format!("no instance {}", hello.instance));
            }
            self.0.lock().unwrap().insert(number, Vec::new());
            link.send(&ToAgent::Welcome).map_err(|error| error.to_string())?;
            Ok(InstanceId::new(1))
        }

        fn report(&self, _: InstanceId, number: u64, report: &Report) -> Result<(), String> {
            let mut seen = self.0.lock().unwrap();
            let reports = seen.get_mut(&number).ok_or("gone")?;
            reports.push(report.bytes);
            if reports.len() > 64 { Err("too many reports".to_owned()) } else { Ok(()) }
        }

        fn leave(&self, _: InstanceId, number: u64) {
            self.0.lock().unwrap().remove(&number);
        }
    }

    fn said(link: &Link) -> Result<ToAgent, LinkError> {
        let began = Instant::now();
        loop {
            if let Some(said) = link.receive()? {
                return Ok(said);
            }
            assert!(began.elapsed() < Duration::from_secs(20), "nothing is said");
            thread::sleep(Duration::from_millis(1));
        }
    }

    fn hello(instance: &str) -> FromAgent {
        FromAgent::Hello(Hello { version: 1, instance: instance.to_owned(), process: 1, holds: true })
    }

    fn report(bytes: u64) -> FromAgent {
        FromAgent::Report(Report { elapsed_us: 1, bytes, ..Report::default() })
    }

    fn connect(path: &Path) -> Link {
        let began = Instant::now();
        loop {
            match Link::connect(path) {
                Ok(link) => return link,
                Err(error) => assert!(began.elapsed() < Duration::from_secs(20), "{error}"),
            }
            thread::sleep(Duration::from_millis(1));
        }
    }

    fn welcomed(path: &Path) -> Link {
        let link = connect(path);
        link.send(&hello("vm1")).unwrap();
        assert_eq!(said(&link).unwrap(), ToAgent::Welcome);
        link
    }

    fn until(what: &str, done: impl Fn() -> bool) {
        let began = Instant::now();
        while !done() {
            assert!(began.elapsed() < Duration::from_secs(20), "{what}");
            thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn who_breaks_the_rules_is_sent_away_and_others_stay() {
        let directory = tempfile::tempdir().unwrap();
        let (path, seen) = (directory.path().join("s"), Seen::default());
        let agents = Agents::listen(&path, seen.clone()).unwrap();
        let good = welcomed(&path);
        for messages in [
            vec![report(1)],
            vec![hello("vm2")],
            vec![hello("vm1"), hello("vm1")],
            [vec![hello("vm1")], (0..100).map(report).collect()].concat(),
        ] {
            let link = connect(&path);
            for message in &messages {
                // It may be sent away in between.
                let _ = link.send(message);
            }
            let refused = loop {
                match said(&link) {
                    Ok(ToAgent::Welcome) => {}
                    other => break other,
                }
            };
            assert!(matches!(refused, Ok(ToAgent::Refused { .. })), "{messages:?}: {refused:?}");
            until("the end", || matches!(link.receive::<ToAgent>(), Err(LinkError::Closed)));
        }
        // Garbage, and more than fits.
        for bytes in [0_usize, 3, 5000, 60_000] {
            let link = connect(&path);
            let _ = rustix::net::send(&link, &vec![b'!'; bytes], rustix::net::SendFlags::NOSIGNAL);
            until("the end", || matches!(link.receive::<ToAgent>(), Err(LinkError::Closed)));
        }
        good.send(&report(7)).unwrap();
        until("the report", || seen.0.lock().unwrap().values().any(|reports| reports == &[7]));
        drop(good);
        until("the others to be gone", || seen.0.lock().unwrap().is_empty());
        drop(agents);
        assert!(!path.exists());
    }

    #[test]
    fn thousands_of_connections_keep_nobody_out_for_long() {
        let directory = tempfile::tempdir().unwrap();
        let (path, seen) = (directory.path().join("s"), Seen::default());
        let _agents = Agents::listen(&path, seen.clone()).unwrap();
        let good = welcomed(&path);
        let mut strangers = Vec::new();
        for _ in 0..3000 {
            strangers.push(connect(&path));
            if strangers.len() > 300 {
                strangers.remove(0);
            }
        }
        good.send(&report(7)).unwrap();
        until("the report", || seen.0.lock().unwrap().values().any(|reports| reports == &[7]));
        // Those who say nothing are sent away.
        let began = Instant::now();
        loop {
            let link = connect(&path);
            let _ = link.send(&hello("vm1"));
            if matches!(said(&link), Ok(ToAgent::Welcome)) {
                break;
            }
            assert!(began.elapsed() < Duration::from_secs(20), "nobody gets in any more");
            thread::sleep(Duration::from_millis(20));
        }
    }
}
