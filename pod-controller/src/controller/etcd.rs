//! The only controller of a pod whose state an etcd keeps.

use std::sync::Arc;
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

use cxl_pool::{Pool, ReplicaId};
use pod_state::State;

use super::{AnyTenure, ControllerError, Desk, End, Handle, Keeper, Request, SeenTerms, SubmitError};
use crate::config::Config;
use crate::replication::Sight;
use crate::store::etcd::{EtcdAddress, EtcdCredentials, EtcdError, EtcdLink, EtcdStore, Loss};
use crate::store::{Recovered, Store, StoreError};

/// How often is tried whether etcd is there again.
const TRY_EVERY: Duration = Duration::from_millis(500);

/// It is in office until another controller comes, and waits while etcd is away.
pub struct EtcdController {
    pool: Arc<Pool>,
    config: Config,
    link: Arc<EtcdLink>,
    desk: Desk,
    handle: Handle,
    office: Option<InOffice>,
}

/// One term of office.
struct InOffice {
    tenure: AnyTenure,
    loss: Arc<Loss>,
}

impl EtcdController {
    /// Takes the controller's place in etcd and in the pool. With `bootstrap` it begins a pod where etcd has none, with the
    /// state file of a controller without etcd if there is one.
    pub fn open(
        pool: &Arc<Pool>,
        config: &Config,
        (address, credentials): (&EtcdAddress, &EtcdCredentials),
        bootstrap: bool,
    ) -> Result<(Self, Handle), ControllerError> {
        let link = Arc::new(EtcdLink::new(address, credentials).map_err(StoreError::from)?);
        let path = &config.controller.state;
        let left = if path.exists() { Store::open(path).map(Some) } else { Ok(None) };
        let (left, handed_over) = match left {
            Err(error @ StoreError::HandedOver { .. }) => (None, Some(error)),
            left => (left?, None),
        };
        // What etcd has may be older than what the pool has seen, as after a restore from a backup.
        let earlier = left.as_ref().map_or(0, |(_, before)| before.term).max(seen(pool));
        let (mut store, mut recovered) = EtcdStore::open(&link, earlier)?;
        let (file, before) = left.unzip();
        let state = if let Some(state) = &recovered.state {
            state.clone()
        } else if !bootstrap {
            return Err(StoreError::from(EtcdError::Empty { place: address.to_string() }).into());
        } else if let Some(error) = handed_over {
            return Err(error.into());
        } else {
            let (state, events) = before.map_or((None, Vec::new()), |before| (before.state, before.events));
            let state = state.unwrap_or_else(|| State::new(config.options(Some(pool))));
            store.begin(&state, events.clone())?;
            recovered.state = Some(state.clone());
            recovered.events = events;
            state
        };
        let (desk, handle) = Desk::new(pool, config, &state, std::mem::take(&mut recovered.events))?;
        let mut controller = Self {
            pool: Arc::clone(pool),
            config: config.clone(),
            link,
            desk,
            handle: handle.clone(),
            office: None,
        };
        controller.office = Some(controller.enter(store, recovered)?);
        // From now on etcd has the state: a controller without it would go on from an old one.
        if let Some(file) = file {
            file.hand_over()?;
        }
        Ok((controller, handle))
    }

    /// Runs until it is [told to stop](Handle::stop), or until another controller has taken its place.
    pub fn run(mut self) -> Result<(), ControllerError> {
        let outcome = self.serve();
        self.desk.note_end();
        outcome
    }

    fn serve(&mut self) -> Result<(), ControllerError> {
        loop {
            let Some(InOffice { mut tenure, loss }) = self.office.take() else {
                let Some(office) = self.wait_for_etcd()? else { return Ok(()) };
                self.office = Some(office);
                continue;
            };
            match tenure.serve(self.desk.requests(), || loss.seen().is_none()) {
                Ok(End::Stopped) => return Ok(()),
                Ok(End::Deposed) => {
                    if let Some(error) = loss.seen() {
                        return Err(StoreError::from(error.clone()).into());
                    }
                }
                Err(error) if is_away(&error) => {
                    self.handle.set_store_away(Some(error.to_string()));
                    self.handle.forget_measured();
                    tracing::warn!("{error}");
                }
                Err(error) => return Err(error),
            }
        }
    }

    fn enter(&self, store: EtcdStore, recovered: Recovered) -> Result<InOffice, ControllerError> {
        let loss = store.loss();
        let handle = self.handle.clone();
        loss.on_loss(move || handle.look());
        let handle = self.handle.clone();
        loss.on_silence(move |silent| handle.set_store_away(silent));
        self.handle.set_store_away(None);
        let kept = (Keeper::Etcd(Box::new(store)), recovered);
        let tenure = AnyTenure::open(&self.pool, &self.config, kept, (ReplicaId::default(), &self.desk))?;
        Ok(InOffice { tenure, loss })
    }

    /// Refuses changes until etcd is there again, and begins anew from what it has. Returns none if it is to stop.
    fn wait_for_etcd(&self) -> Result<Option<InOffice>, ControllerError> {
        loop {
            let away = match self.enter_again() {
                Ok(office) => {
                    tracing::info!("etcd is there again: changes are made");
                    return Ok(Some(office));
                }
                Err(ControllerError::Store(StoreError::Etcd(EtcdError::GivenUp { .. }))) => return Ok(None),
                Err(error) if is_away(&error) => error.to_string(),
                Err(error) => return Err(error),
            };
            if !self.refuse(TRY_EVERY, &away) {
                return Ok(None);
            }
        }
    }

    /// Refuses changes for so long, and says whether to go on: not if it is to stop.
    fn refuse(&self, time: Duration, away: &str) -> bool {
        self.handle.set_store_away(Some(away.to_owned()));
        let until = Instant::now() + time;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            match self.desk.requests().recv_timeout(left) {
                Ok(Request::Apply { reply, .. }) => {
                    // A client that went away needs no answer.
                    let _ = reply.send(Err(SubmitError::StoreAway(away.to_owned())));
                }
                Ok(Request::Look) => {}
                Ok(Request::Stop) | Err(RecvTimeoutError::Disconnected) => return false,
                Err(RecvTimeoutError::Timeout) => return true,
            }
        }
    }

    fn enter_again(&self) -> Result<InOffice, ControllerError> {
        self.link.reach().map_err(StoreError::from)?;
        // Somebody who took over and died counts as there for as long as its lease lasts, and longer where etcd is busy.
        let pause = |time: Duration, waiting: &str| self.refuse(time, waiting);
        let (store, mut recovered) = EtcdStore::open_beside(&self.link, seen(&self.pool), pause)?;
        if recovered.state.is_none() {
            return Err(store.gone().into());
        }
        // What was open is made, or is not: from now on everybody sees which.
        let events = std::mem::take(&mut recovered.events);
        let state = recovered.state.clone().map(Arc::new);
        self.handle.catch_up(Sight { state, leases: None, events }, || true);
        self.enter(store, recovered)
    }
}

/// Above which term of office daemons obey.
fn seen(pool: &Pool) -> u64 {
    SeenTerms::of_pool(pool, ReplicaId::default()).highest()
}

fn is_away(error: &ControllerError) -> bool {
    matches!(error, ControllerError::Store(StoreError::Etcd(EtcdError::Away { .. })))
}
