//! Watching the carrier of a NIC's interfaces.
//!
//! A thread of its own waits for rtnetlink's notifications, so that a lost carrier is seen at once however busy the
//! packet worker is.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use tracing::warn;

use super::netlink::{Event, Interface, Netlink};
use super::{LinkState, NicError};

/// When the kernel is asked once more that had no answer to how an interface is.
const ASK_AGAIN: Duration = Duration::from_millis(100);

/// Watches until it is dropped, or cannot: then the link is down from there on, and [unwatched](LinkState::unwatched).
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
        let events = Netlink::subscribe().map_err(failed("listen to rtnetlink"))?;
        let mut questions = Netlink::open().map_err(failed("open rtnetlink"))?;
        let mut watched = Vec::with_capacity(interfaces.len());
        for name in interfaces {
            let now = find(&mut questions, nic, name)?;
            watched.push(Watched { name: (*name).to_owned(), index: Some(now.index), up: now.up });
        }
        let mut all = Interfaces { nic: nic.to_owned(), watched, link, on_change };
        // The NIC was opened some time ago, and whoever asked then has an old answer.
        all.tell(0);
        let stop =
            eventfd(0, EventfdFlags::CLOEXEC).map_err(|error| failed("create an event")(error.into()))?;
        let stopping = stop.try_clone().map_err(failed("clone an event"))?;
        let mut kernel = Rtnetlink { events, questions, stopping };
        let thread = std::thread::Builder::new()
            .name(format!("link-{nic}"))
            .spawn(move || {
                if let Err(error) = all.watch(&mut kernel) {
                    all.ends(&error);
                }
            })
            .map_err(failed("start a thread"))?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

/// Why the thread woke up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Woken {
    /// It is time to stop.
    Stop,
    /// There are events.
    Events,
    /// It has waited for long enough.
    Late,
}

/// Who tells of interfaces.
trait Kernel {
    /// Waits for events, no longer than so long if that is said.
    fn wait(&mut self, at_most: Option<Duration>) -> io::Result<Woken>;

    /// Hands over the next events.
    fn next_events(&mut self, on_event: &mut dyn FnMut(Event)) -> io::Result<()>;

    /// How an interface is now; an error of kind `NotFound` if there is none, and another one if nobody knows.
    fn by_name(&mut self, name: &str) -> io::Result<Interface>;
}

/// The real one.
struct Rtnetlink {
    events: Netlink,
    questions: Netlink,
    stopping: OwnedFd,
}

impl Kernel for Rtnetlink {
    fn wait(&mut self, at_most: Option<Duration>) -> io::Result<Woken> {
        let at_most = at_most.and_then(|at_most| Timespec::try_from(at_most).ok());
        let (events, stopping) = (&self.events, self.stopping.as_fd());
        let mut watched =
            [PollFd::new(events, PollFlags::IN), PollFd::from_borrowed_fd(stopping, PollFlags::IN)];
        loop {
            match poll(&mut watched, at_most.as_ref()) {
                Ok(_) if !watched[1].revents().is_empty() => return Ok(Woken::Stop),
                Ok(0) => return Ok(Woken::Late),
                Ok(_) => return Ok(Woken::Events),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn next_events(&mut self, on_event: &mut dyn FnMut(Event)) -> io::Result<()> {
        self.events.next_events(on_event)
    }

    fn by_name(&mut self, name: &str) -> io::Result<Interface> {
        let found = self.questions.by_name(name);
        if matches!(&found, Err(error) if error.kind() != io::ErrorKind::NotFound)
            && let Ok(anew) = Netlink::open()
        {
            // An answer that is late after all is not to be taken for that to the next question.
            self.questions = anew;
        }
        found
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
    nic: String,
    watched: Vec<Watched>,
    link: LinkState,
    on_change: F,
}

impl<F: Fn(bool, &str)> Interfaces<F> {
    /// Follows what becomes of them until it is time to stop.
    fn watch(&mut self, kernel: &mut impl Kernel) -> io::Result<()> {
        // When it was asked last, the kernel did not say of all how they are.
        let mut unanswered = false;
        loop {
            let mut look = unanswered;
            match kernel.wait(unanswered.then_some(ASK_AGAIN))? {
                Woken::Stop => return Ok(()),
                Woken::Late => {}
                Woken::Events => {
                    let heard = kernel.next_events(&mut |event| match event {
                        Event::Changed(now) => match self.place_of(now.index) {
                            Some(place) => self.changed(place, Some(now)),
                            // Perhaps a new one of the name of one that is gone.
                            None => look |= self.is_incomplete(),
                        },
                        Event::Removed { index } => {
                            if let Some(place) = self.place_of(index) {
                                self.changed(place, None);
                            }
                        }
                    });
                    match heard {
                        Ok(()) => {}
                        Err(error) if is_overrun(&error) => look = true,
                        Err(error) => return Err(error),
                    }
                }
            }
            if look {
                let answered = self.look(|name| kernel.by_name(name));
                if let Err(error) = &answered
                    && !unanswered
                {
                    warn!(nic = self.nic, %error, "the kernel does not say how its interfaces are: it is asked again and again");
                }
                unanswered = answered.is_err();
            }
        }
    }

    /// Looks at all of them. What nobody knows of stays as it was, and is returned.
    fn look(&mut self, mut ask: impl FnMut(&str) -> io::Result<Interface>) -> io::Result<()> {
        let mut answered = Ok(());
        for place in 0..self.watched.len() {
            match ask(&self.watched[place].name) {
                Ok(now) => self.changed(place, Some(now)),
                Err(error) if error.kind() == io::ErrorKind::NotFound => self.changed(place, None),
                Err(error) => answered = Err(error),
            }
        }
        answered
    }

    /// Nobody watches any more: who uses the NIC must not take its link for good.
    fn ends(&self, error: &io::Error) {
        let reason = format!("its carrier cannot be watched any more: {error}");
        self.link.set_unwatched(&reason);
        self.link.set(false);
        (self.on_change)(false, &reason);
    }

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

/// Whether there may have been events that nobody heard. What was missed is found by looking.
fn is_overrun(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::NOBUFS | Errno::INTR))
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

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::collections::VecDeque;

    use super::super::netlink::STATISTICS;
    use super::*;

    const NAME: &str = "eth7";

    /// What happens in one turn of the thread.
    enum Turn {
        /// These events.
        Heard(Vec<Event>),
        /// Waiting ends, or listening fails, with this error.
        WaitFails(Errno),
        HearingFails(Errno),
        /// Nothing does.
        Late,
    }

    /// One that does what it was told, and stops then.
    #[derive(Default)]
    struct Script {
        turns: VecDeque<Turn>,
        answers: VecDeque<io::Result<Interface>>,
        /// For how long it was waited, at most.
        waits: Vec<Option<Duration>>,
        heard: Option<io::Result<Vec<Event>>>,
    }

    impl Kernel for Script {
        fn wait(&mut self, at_most: Option<Duration>) -> io::Result<Woken> {
            self.waits.push(at_most);
            match self.turns.pop_front() {
                None => return Ok(Woken::Stop),
                Some(Turn::Late) => return Ok(Woken::Late),
                Some(Turn::WaitFails(error)) => return Err(error.into()),
                Some(Turn::Heard(events)) => self.heard = Some(Ok(events)),
                Some(Turn::HearingFails(error)) => self.heard = Some(Err(error.into())),
            }
            Ok(Woken::Events)
        }

        fn next_events(&mut self, on_event: &mut dyn FnMut(Event)) -> io::Result<()> {
            self.heard.take().unwrap().map(|events| events.into_iter().for_each(on_event))
        }

        fn by_name(&mut self, name: &str) -> io::Result<Interface> {
            assert_eq!(name, NAME);
            self.answers.pop_front().expect("nobody was to ask")
        }
    }

    fn interface(index: u32, up: bool) -> Interface {
        Interface { index, mac: None, mtu: 1500, up, carrier_changes: 0, statistics: [0; STATISTICS] }
    }

    fn failing<T>(error: Errno) -> io::Result<T> {
        Err(error.into())
    }

    /// What was told of an interface that was up, the link, and for how long was waited.
    fn watch(
        turns: Vec<Turn>,
        answers: Vec<io::Result<Interface>>,
    ) -> (Vec<(bool, String)>, LinkState, Vec<Option<Duration>>) {
        let (link, told) = (LinkState::new(true), RefCell::new(Vec::new()));
        let watched = vec![Watched { name: NAME.to_owned(), index: Some(7), up: true }];
        let on_change = |up, reason: &str| told.borrow_mut().push((up, reason.to_owned()));
        let mut all = Interfaces { nic: "nic0".to_owned(), watched, link: link.clone(), on_change };
        let mut script = Script { turns: turns.into(), answers: answers.into(), ..Script::default() };
        if let Err(error) = all.watch(&mut script) {
            all.ends(&error);
        }
        assert!(script.answers.is_empty(), "somebody was to ask");
        (told.into_inner(), link, script.waits)
    }

    #[test]
    fn an_overrun_after_which_the_kernel_has_no_answer_is_no_removal() {
        let overrun = || Turn::HearingFails(Errno::NOBUFS);
        let (told, link, waits) = watch(
            vec![overrun(), Turn::Late, Turn::Heard(Vec::new()), Turn::Late],
            vec![failing(Errno::NOBUFS), failing(Errno::NOMEM), Ok(interface(7, true))],
        );
        assert_eq!(told, []);
        assert!(link.is_up() && !link.is_removed() && link.unwatched().is_none());
        let again = Some(ASK_AGAIN);
        assert_eq!(waits, [None, again, again, None, None], "it is asked until it answers");
        // What it says then counts.
        let (told, link, _) =
            watch(vec![overrun(), Turn::Late], vec![failing(Errno::NOMEM), Ok(interface(7, false))]);
        assert_eq!(told, [(false, format!("no carrier on {NAME}"))]);
        assert!(!link.is_removed());
        let (told, link, _) = watch(vec![overrun()], vec![Err(io::ErrorKind::NotFound.into())]);
        assert_eq!(told, [(false, format!("interface {NAME} was removed"))]);
        assert!(link.is_removed());
    }

    #[test]
    fn a_watch_that_ends_says_so() {
        for ends in [Turn::WaitFails(Errno::NOMEM), Turn::HearingFails(Errno::BADF)] {
            let (told, link, _) = watch(vec![Turn::Heard(Vec::new()), ends, Turn::Late], Vec::new());
            let [(false, reason)] = &told[..] else { panic!("{told:?}") };
            assert!(reason.contains("cannot be watched any more: "), "{reason}");
            assert!(!link.is_up() && !link.is_removed());
            assert_eq!(link.unwatched(), Some(reason.as_str()));
        }
    }

    #[test]
    fn events_are_followed() {
        let removed = Event::Removed { index: 7 };
        let (told, link, _) = watch(
            vec![
                Turn::Heard(vec![Event::Changed(interface(8, false)), Event::Changed(interface(7, false))]),
                Turn::Heard(vec![Event::Changed(interface(7, true))]),
                Turn::Heard(vec![removed]),
                // Somebody makes another one, which is looked at.
                Turn::Heard(vec![Event::Changed(interface(9, true))]),
            ],
            vec![Ok(interface(9, true))],
        );
        assert_eq!(told.iter().map(|(up, _)| *up).collect::<Vec<_>>(), [false, true, false, true]);
        assert!(link.is_up() && link.is_removed() && link.unwatched().is_none());
    }
}
