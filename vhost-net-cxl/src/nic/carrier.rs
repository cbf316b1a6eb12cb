//! Watching the carrier of a NIC's interfaces.
//!
//! A thread of its own waits for rtnetlink's notifications, so that a lost carrier is seen at once however busy the
//! packet worker is.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::thread::JoinHandle;

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};

use super::netlink::{Event, Interface, Netlink};
use super::{LinkState, NicError};

/// Watches until it is dropped.
#[derive(Debug)]
pub struct CarrierWatch {
    stop: OwnedFd,
    thread: Option<JoinHandle<()>>,
}

impl CarrierWatch {
    /// Begins to watch `interfaces` on behalf of `nic`: those that a frame passes, none of which it passes while that is down or without
    /// a carrier. `link` is up while all of them are; each change is told to `on_change` with the reason. An interface that is removed and
    /// made again is watched again.
    pub fn begin(
        nic: &str,
        interfaces: &[&str],
        link: LinkState,
        on_change: impl Fn(bool, &str) + Send + 'static,
    ) -> Result<Self, NicError> {
        let failed = |doing: &'static str| {
            let nic = nic.to_owned();
            move |source: io::Error| NicError::System { nic, doing, hint: "", source }
        };
        // Listen first, then look: a change in between is heard.
        let mut events = Netlink::subscribe().map_err(failed("listen to rtnetlink"))?;
        let mut questions = Netlink::open().map_err(failed("open rtnetlink"))?;
        let mut watched = Vec::with_capacity(interfaces.len());
        for name in interfaces {
            let now = find(&mut questions, nic, name)?;
            watched.push(Watched { name: (*name).to_owned(), index: Some(now.index), up: now.up });
        }
        let mut all = Interfaces { watched, link, on_change };
        // The NIC was opened some time ago, and whoever asked then has an old answer.
        all.tell(0);
        let stop =
            eventfd(0, EventfdFlags::CLOEXEC).map_err(|error| failed("create an event")(error.into()))?;
        let stopping = stop.try_clone().map_err(failed("clone an event"))?;
        let thread = std::thread::Builder::new()
            .name(format!("link-{nic}"))
            .spawn(move || {
                while waits(&events, &stopping) {
                    let mut look = false;
                    let heard = events.next_events(|event| match event {
                        Event::Changed(now) => match all.place_of(now.index) {
                            Some(place) => all.changed(place, Some(now)),
                            // Perhaps a new one of the name of one that is gone.
                            None => look |= all.is_incomplete(),
                        },
                        Event::Removed { index } => {
                            if let Some(place) = all.place_of(index) {
                                all.changed(place, None);
                            }
                        }
                    });
                    // After an overrun, what was missed is found by looking.
                    if look || heard.is_err() {
                        for place in 0..all.watched.len() {
                            let now = questions.by_name(&all.watched[place].name).ok();
                            all.changed(place, now);
                        }
                    }
                }
            })
            .map_err(failed("start a thread"))?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

/// An interface as it was when it was looked at last.
struct Watched {
    name: String,
    /// Nothing if it was removed.
    index: Option<u32>,
    up: bool,
}

impl Watched {
    fn reason(&self) -> String {
        match self {
            Self { name, index: None, .. } => format!("interface {name} was removed"),
            Self { name, up: false, .. } => format!("no carrier on {name}"),
            Self { name, up: true, .. } => format!("carrier of {name}"),
        }
    }
}

/// All interfaces of a NIC, and who is to know of them.
struct Interfaces<F> {
    watched: Vec<Watched>,
    link: LinkState,
    on_change: F,
}

impl<F: Fn(bool, &str)> Interfaces<F> {
    fn place_of(&self, index: u32) -> Option<usize> {
        self.watched.iter().position(|it| it.index == Some(index))
    }

    /// Whether one of them was removed.
    fn is_incomplete(&self) -> bool {
        self.watched.iter().any(|it| it.index.is_none())
    }

    /// Notes what has become of one; nothing if it is not there any more.
    fn changed(&mut self, place: usize, now: Option<Interface>) {
        let interface = &mut self.watched[place];
        let index = now.map(|it| it.index);
        if interface.index.is_some() && interface.index != index {
            self.link.set_removed();
        }
        interface.index = index;
        interface.up = now.is_some_and(|it| it.up);
        self.tell(place);
    }

    /// Tells of a change of the link, for which the one in this place is the reason unless another one keeps it down.
    fn tell(&self, place: usize) {
        let down = self.watched.iter().find(|it| !it.up);
        if self.link.set(down.is_none()) {
            (self.on_change)(down.is_none(), &down.unwrap_or(&self.watched[place]).reason());
        }
    }
}

impl Drop for CarrierWatch {
    fn drop(&mut self) {
        // An event that cannot be written is one that is signalled already.
        let _ = rustix::io::write(&self.stop, &1u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Waits for news; false when it is time to stop.
fn waits(events: &Netlink, stopping: &OwnedFd) -> bool {
    loop {
        let mut watched =
            [PollFd::new(events, PollFlags::IN), PollFd::from_borrowed_fd(stopping.as_fd(), PollFlags::IN)];
        match poll(&mut watched, None) {
            Ok(_) => return watched[1].revents().is_empty(),
            Err(rustix::io::Errno::INTR) => {}
            Err(_) => return false,
        }
    }
}

/// Looks an interface up for `nic`.
pub(super) fn find(netlink: &mut Netlink, nic: &str, interface: &str) -> Result<Interface, NicError> {
    netlink.by_name(interface).map_err(|source| {
        if source.kind() == io::ErrorKind::NotFound {
            NicError::NoInterface { nic: nic.to_owned(), interface: interface.to_owned() }
        } else {
            NicError::System { nic: nic.to_owned(), doing: "look at its interface", hint: "", source }
        }
    })
}
