//! Watching the carrier of an interface.
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
    /// Begins to watch `interface` on behalf of `nic`. `link` follows its carrier; each change is told to
    /// `on_change` with the reason. An interface that is removed and made again is watched again.
    pub fn begin(
        nic: &str,
        interface: &str,
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
        let now = find(&mut questions, nic, interface)?;
        // The NIC was opened some time ago, and whoever asked then has an old answer.
        if link.set(now.up) {
            on_change(now.up, &reason(now.up, interface));
        }
        let stop =
            eventfd(0, EventfdFlags::CLOEXEC).map_err(|error| failed("create an event")(error.into()))?;
        let stopping = stop.try_clone().map_err(failed("clone an event"))?;
        let name = interface.to_owned();
        let thread = std::thread::Builder::new()
            .name(format!("link-{nic}"))
            .spawn(move || {
                let tell = |up: bool, reason: &str| {
                    if link.set(up) {
                        on_change(up, reason);
                    }
                };
                let (gained, lost) = (reason(true, &name), reason(false, &name));
                let removed = format!("interface {name} was removed");
                let mut index = Some(now.index);
                while waits(&events, &stopping) {
                    let mut look = false;
                    let heard = events.next_events(|event| match event {
                        Event::Changed(it) if Some(it.index) == index => {
                            tell(it.up, if it.up { &gained } else { &lost });
                        }
                        Event::Removed { index: gone } if Some(gone) == index => {
                            index = None;
                            link.set_removed();
                            tell(false, &removed);
                        }
                        // Perhaps a new one of that name.
                        Event::Changed(_) => look |= index.is_none(),
                        Event::Removed { .. } => {}
                    });
                    // After an overrun, what was missed is found by looking.
                    if look || heard.is_err() {
                        if let Ok(it) = questions.by_name(&name) {
                            if index.is_some_and(|known| known != it.index) {
                                link.set_removed();
                            }
                            index = Some(it.index);
                            tell(it.up, if it.up { &gained } else { &lost });
                        } else {
                            index = None;
                            link.set_removed();
                            tell(false, &removed);
                        }
                    }
                }
            })
            .map_err(failed("start a thread"))?;
        Ok(Self { stop, thread: Some(thread) })
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

fn reason(up: bool, interface: &str) -> String {
    if up { format!("carrier of {interface}") } else { format!("no carrier on {interface}") }
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
