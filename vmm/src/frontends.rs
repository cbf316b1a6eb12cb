//! The frontends of this host, one of which measures a VM and says for how long its vCPUs may run.

use std::ops::Range;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use pod_protocol::vcpus::{FromAgent, Hello, Link, ToAgent, VERSION};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// How long a frontend may take to say whether it knows the VM.
const ANSWER_WITHIN: Duration = Duration::from_secs(2);

/// Where they listen, and who comes.
#[derive(Debug)]
pub(crate) struct Frontends {
    sockets: Vec<PathBuf>,
    instance: String,
    holds: bool,
}

/// Asks one after another. Nothing of it waits: its agent has an order to renew meanwhile.
#[derive(Debug)]
pub(crate) struct Search {
    /// Those that are still to be asked.
    places: Range<usize>,
    asked: Option<Asked>,
    /// Why the others are not it.
    reasons: Vec<String>,
}

/// One that has yet to answer.
#[derive(Debug)]
struct Asked {
    place: usize,
    link: Link,
    until: Instant,
}

impl Frontends {
    /// An agent comes to them for the VM with this name; whether it holds its vCPUs.
    pub(crate) fn new(sockets: Vec<PathBuf>, instance: &str, holds: bool) -> Self {
        Self { sockets, instance: instance.to_owned(), holds }
    }

    /// Waits for the one that measures the VM; which it is.
    pub(crate) fn connect(&self) -> Result<(usize, Link)> {
        let mut search = self.search();
        loop {
            if let Some(found) = self.go_on(&mut search)? {
                return Ok(found);
            }
            if let Some((link, until)) = search.waits_for() {
                let timeout = Timespec::try_from(until.saturating_duration_since(Instant::now())).ok();
                // An interruption leads to another look.
                let _ = poll(&mut [PollFd::new(link, PollFlags::IN)], timeout.as_ref());
            }
        }
    }

    /// A search for it among all of them.
    pub(crate) fn search(&self) -> Search {
        Search { places: 0..self.sockets.len(), asked: None, reasons: Vec::new() }
    }

    /// Asks that one only.
    pub(crate) fn search_at(&self, place: usize) -> Search {
        Search { places: place..place + 1, ..self.search() }
    }

    /// The one that measures the VM, once it has said so; nothing as long as one has yet to answer.
    pub(crate) fn go_on(&self, search: &mut Search) -> Result<Option<(usize, Link)>> {
        loop {
            let asked = match search.asked.take() {
                Some(asked) => Ok(asked),
                None => match search.places.next() {
                    Some(place) => self.ask(place).map_err(|reason| (place, reason)),
                    None => bail!(
                        "no frontend of this host holds {} to a share of the fabric. {}",
                        self.instance,
                        search.reasons.join(". ")
                    ),
                },
            };
            match asked.and_then(|asked| match asked.has_answered() {
                Ok(answered) => Ok((answered, asked)),
                Err(reason) => Err((asked.place, reason)),
            }) {
                Ok((true, Asked { place, link, .. })) => return Ok(Some((place, link))),
                Ok((false, asked)) => {
                    search.asked = Some(asked);
                    return Ok(None);
                }
                Err((place, reason)) => {
                    let name = self.sockets[place].file_stem().unwrap_or_default().to_string_lossy();
                    search.reasons.push(format!("{name}: {reason:#}"));
                }
            }
        }
    }

    fn ask(&self, place: usize) -> Result<Asked> {
        let socket = &self.sockets[place];
        let link =
            Link::connect(socket).with_context(|| format!("nobody listens at {}", socket.display()))?;
        let hello = Hello {
            version: VERSION,
            instance: self.instance.clone(),
            process: std::process::id(),
            holds: self.holds,
        };
        link.send(&FromAgent::Hello(hello))?;
        Ok(Asked { place, link, until: Instant::now() + ANSWER_WITHIN })
    }
}

impl Search {
    /// Who has yet to answer, and until when.
    pub(crate) fn waits_for(&self) -> Option<(&Link, Instant)> {
        self.asked.as_ref().map(|asked| (&asked.link, asked.until))
    }
}

impl Asked {
    /// Whether it knows the VM; false as long as that is open.
    fn has_answered(&self) -> Result<bool> {
        match self.link.receive::<ToAgent>()? {
            Some(ToAgent::Refused { reason }) => bail!("{reason}"),
            Some(ToAgent::Welcome | ToAgent::Order(_)) => Ok(true),
            None if Instant::now() >= self.until => bail!("it does not answer"),
            None => Ok(false),
        }
    }
}
