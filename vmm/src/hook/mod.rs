//! What libvirt's hook does: a domain gets its devices from the pod before its QEMU is started, and gives them back when that has
//! ended.
//!
//! The hook runs while libvirt waits for it, so it never asks libvirt anything: all that it knows of the domain is in the XML that it
//! is given. It notes nothing either. What it leased bears a label with the domain's uuid, from the very request that makes it; so
//! whoever finds it later, also after the hook was killed, knows whose it is.

mod domain;
mod metadata;
mod place;

use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use pod_api::Instance;
use pod_api::client::{Client, ClientError};

pub use domain::Domain;
pub(crate) use domain::{child, vhost_user};
pub use metadata::{Metadata, NAMESPACE};

use self::place::Place;
use crate::VmmError;

/// The label of instances that were made for a domain: its uuid.
pub const LABEL: &str = "wadi/libvirt-domain";

/// How often is looked whether something has come about.
const POLL: Duration = Duration::from_millis(20);
/// For how long the end of a domain waits for a controller that is away.
pub const RELEASE: Duration = Duration::from_secs(5);
/// How long it may take until frontends have seen that a VMM is gone. One that was started anew waits for the VMM of its life before, for
/// as long as its `VMM_PATIENCE` says, and has to say so afterwards: this is longer.
pub const VMM_GONE: Duration = Duration::from_secs(15);

/// Leases devices for the domains of one host.
#[derive(Debug)]
pub struct Hook {
    /// Whom to ask.
    pub client: Client,
    /// This host, by the controller's name.
    pub host: String,
    /// Where its frontends serve sockets.
    pub sockets: PathBuf,
    /// How long something may take to come about.
    pub wait: Duration,
    /// How long frontends may take beyond that to see that a VMM is gone: [`VMM_GONE`], but in tests.
    pub gone: Duration,
}

impl Hook {
    /// Leases the devices of a domain that is about to start, or sees that its instance is there, and waits until the frontends serve
    /// them. Done twice, or after it was killed half-way, it comes to the same.
    pub fn prepare(&self, domain: &Domain) -> Result<(), VmmError> {
        let mut until = Instant::now() + self.wait;
        // A host that has just come up starts its domains while its daemons, or the controller, still do.
        patiently(&mut until, |until| {
            let instance = self.lease(domain, until)?;
            self.await_frontends(domain, instance, *until)
        })
        .map_err(|error| of_domain(domain, error))
    }

    /// Ends the leases of a domain that has ended, if the hook had made them on this host. If that cannot be, the domain's next start
    /// sees to it.
    pub fn release(&self, domain: &Domain) -> Result<(), VmmError> {
        let mut until = Instant::now() + self.wait.min(RELEASE);
        let ended = patiently(&mut until, |_| match self.find(domain.instance())? {
            Some(_) => self.give_back(domain),
            None => Ok(()),
        });
        ended.map_err(|error| of_domain(domain, error))
    }

    /// The domain's instance: the one that was made by hand, or one that is made now. What an earlier start has left may take its time to be
    /// given back: `until` is put off by that.
    fn lease(&self, domain: &Domain, until: &mut Instant) -> Result<Instance, VmmError> {
        let name = domain.instance();
        let found = match self.find(name)? {
            Some(found) if found.labels.contains_key(LABEL) => found,
            // The operator's.
            Some(found) => return Ok(found),
            None => return self.create(domain, *until),
        };
        if !domain.owns(&found) {
            let reason = format!(
                "the instance {name} was made for another libvirt domain, on {}: end that one, or give this one another name \
                 (name='…' of <wadi:instance>, and in the names of its sockets)",
                found.host
            );
            return Err(domain.refusal(reason));
        }
        // It is on its way here, or it runs elsewhere.
        if found.host != self.host {
            return Ok(found);
        }
        // Nobody has given it back: the hook was killed, or the host lost its power. The domain may have changed since.
        let began = Instant::now();
        self.give_back(domain)?;
        *until += began.elapsed();
        self.create(domain, *until)
    }

    fn create(&self, domain: &Domain, until: Instant) -> Result<Instance, VmmError> {
        let request = domain.request(&self.host, &self.sockets);
        let mut request = request.map_err(|reason| domain.refusal(reason))?;
        request.labels.insert(LABEL.to_owned(), domain.uuid.clone());
        let made = self.client.create_instance(&request, until.saturating_duration_since(Instant::now()))?;
        // If that fails, the instance is the domain's all the same, and is given back.
        if let Some(share) = &domain.metadata.mchannel {
            self.client.set_mchannel(&made.name, share)?;
        }
        Ok(made)
    }

    fn await_frontends(
        &self,
        domain: &Domain,
        mut instance: Instance,
        until: Instant,
    ) -> Result<(), VmmError> {
        let refuse = |reason| domain.refusal(reason);
        loop {
            let place = Place::of(&instance, &self.host).map_err(refuse)?;
            place.check(domain, &self.sockets).map_err(refuse)?;
            let Some(lacking) = place.lacking() else { return Ok(()) };
            if Instant::now() >= until {
                return Err(refuse(format!("after {} s, {lacking}", self.wait.as_secs())));
            }
            thread::sleep(POLL);
            instance = self.client.instance(domain.instance())?;
        }
    }

    fn find(&self, name: &str) -> Result<Option<Instance>, VmmError> {
        match self.client.instance(name) {
            Ok(found) => Ok(Some(found)),
            Err(error) if error.status() == Some(404) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Deletes the instance that was made for the domain, if it is on this host: after a move it is the other one's. It may take a
    /// moment until the frontends have seen that QEMU has ended, or until a move has come to its end.
    fn give_back(&self, domain: &Domain) -> Result<(), VmmError> {
        let mut until = Instant::now() + self.gone;
        patiently(&mut until, |until| self.give_back_until(domain, *until))
    }

    fn give_back_until(&self, domain: &Domain, until: Instant) -> Result<(), VmmError> {
        loop {
            let refused = match self.find(domain.instance())? {
                Some(found) if !domain.owns(&found) || found.host != self.host => return Ok(()),
                None => return Ok(()),
                Some(Instance { name, migration: Some(migration), .. }) => domain.refusal(format!(
                    "the instance {name} is about to move to {}: wait, or podctl instances abort-migration {name}",
                    migration.to
                )),
                Some(found) => match self.client.delete_instance(&found.name) {
                    Err(error) if error.status() == Some(409) => error.into(),
                    Err(error) if error.status() != Some(404) => return Err(error.into()),
                    _ => return Ok(()),
                },
            };
            if Instant::now() >= until {
                return Err(refused);
            }
            thread::sleep(POLL);
        }
    }
}

/// Says which domain it was that the controller refused something to.
fn of_domain(domain: &Domain, error: VmmError) -> VmmError {
    match error {
        VmmError::Controller(ClientError::Refused(problem)) => domain.refusal(problem.to_string()),
        error => error,
    }
}

/// Does something again while what hinders it may pass by itself. An attempt can put off when that has to end.
fn patiently(
    until: &mut Instant,
    mut attempt: impl FnMut(&mut Instant) -> Result<(), VmmError>,
) -> Result<(), VmmError> {
    let passes = |error: &VmmError| match error {
        VmmError::Controller(ClientError::Unreachable { .. }) => true,
        VmmError::Controller(ClientError::Refused(problem)) => {
            problem.status == 503 || problem.kind == "host-not-ready"
        }
        _ => false,
    };
    loop {
        match attempt(until) {
            Err(error) if passes(&error) && Instant::now() < *until => thread::sleep(POLL),
            outcome => return outcome,
        }
    }
}

#[cfg(test)]
mod tests;
