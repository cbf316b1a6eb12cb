//! Who may write: one controller, for as long as nobody else has come.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use tokio::task::JoinHandle;

use super::EtcdError;
use super::gateway::{
    Compare, Gateway, Grant, Granted, KeptAlive, KeyValue, Number, Operation, Silence, TimeToLive,
    Transacted, Transaction,
};
use super::link::{Claim, EtcdLink, Place};

/// How long a controller counts as there after it was last heard of, in seconds.
const LEASE_SECONDS: u64 = 5;
/// How often it is heard of.
const KEEP_EVERY: Duration = Duration::from_millis(1500);
/// For how long a controller that is not heard of any more is waited for. An etcd whose disk is busy ends leases late.
const HOLDER_MAX: Duration = Duration::from_mins(1);
/// How often it is to be heard of to be alive. A new leader of etcd gives each lease all of its time once more.
const HEARD_MIN: u32 = 2;
/// How long etcd may take to say what is left of a lease.
const LEFT_MAX: Duration = Duration::from_millis(1500);
/// How often is looked whether it is gone.
const LOOK_EVERY: Duration = Duration::from_millis(200);
/// How long the end of a lease may take.
const REVOKE_MAX: Duration = Duration::from_millis(500);

/// Whether somebody else has come.
pub(crate) struct Loss {
    by: OnceLock<EtcdError>,
    /// Who wants to know.
    tell: Mutex<Option<Box<dyn Fn() + Send>>>,
    /// Who wants to know whether etcd answers.
    tell_silence: Mutex<Option<TellSilence>>,
}

type TellSilence = Box<dyn Fn(Option<String>) + Send>;

impl Loss {
    /// Somebody has.
    pub(crate) fn seen(&self) -> Option<&EtcdError> {
        self.by.get()
    }

    /// Has something done once somebody has.
    pub(crate) fn on_loss(&self, tell: impl Fn() + Send + 'static) {
        *self.tell.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(tell));
    }

    /// Has something done whenever etcd does not answer any more, with what to do about it, and when it answers again, for as long as this
    /// term of office lasts.
    pub(crate) fn on_silence(&self, tell: impl Fn(Option<String>) + Send + 'static) {
        *self.tell_silence.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(tell));
    }

    fn note_silence(&self, silent: Option<String>) {
        if let Some(tell) = &*self.tell_silence.lock().unwrap_or_else(PoisonError::into_inner) {
            tell(silent);
        }
    }

    fn note(&self, error: EtcdError) {
        // Only the first one counts.
        let _ = self.by.set(error);
        if let Some(tell) = &*self.tell.lock().unwrap_or_else(PoisonError::into_inner) {
            tell();
        }
    }
}

impl std::fmt::Debug for Loss {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Loss").field("by", &self.by).finish_non_exhaustive()
    }
}

/// A term of office.
#[derive(Debug)]
pub(super) struct Office {
    link: Arc<EtcdLink>,
    term: u64,
    /// Of the key `term`: whoever comes next changes it.
    revision: i64,
    lease: Arc<Mutex<i64>>,
    loss: Arc<Loss>,
    keeping: JoinHandle<()>,
}

impl Office {
    /// Waits until nobody else has it, and takes it, in a term that is larger than all before and than `earlier`. `last` says
    /// in which one the head was written, or refuses it. `pause` passes some time while somebody else counts as there, and says whether
    /// to go on waiting.
    pub(super) fn take(
        link: &Arc<EtcdLink>,
        earlier: u64,
        last: impl Fn(&Place, Option<&KeyValue>) -> Result<u64, EtcdError>,
        mut pause: impl FnMut(Duration, &str) -> bool,
    ) -> Result<Self, EtcdError> {
        let (place, claim) = (&link.place, &link.claim);
        let keys = [&place.leader, &place.term, &place.head];
        let look = Transaction {
            compare: Vec::new(),
            success: keys.iter().map(|key| Operation::get(key)).collect(),
            failure: Vec::new(),
        };
        let mut predecessor = Predecessor::default();
        loop {
            let found = link.transact(&look)?;
            let written = last(place, found.found(&place.head))?;
            let leader = found.found(&place.leader);
            let holder = leader.and_then(Claim::of);
            if let Some(leader) =
                leader.filter(|_| holder.as_ref().is_none_or(|holder| holder.id != claim.id))
            {
                let holder = holder.map_or_else(
                    || String::from_utf8_lossy(&leader.value.0).into_owned(),
                    |holder| holder.to_string(),
                );
                if predecessor.is_there(link, leader) {
                    return Err(EtcdError::InUse { place: place.to_string(), holder });
                }
                let waiting = format!("waiting until {holder} counts as gone from {place}");
                if predecessor.looks == 1 {
                    tracing::info!("{waiting}");
                }
                if pause(LOOK_EVERY, &waiting) {
                    continue;
                }
                return Err(EtcdError::GivenUp { place: place.to_string(), holder });
            }
            let term_found = found.found(&place.term);
            let before = match term_found {
                Some(found) => std::str::from_utf8(&found.value.0)
                    .ok()
                    .and_then(|text| text.parse::<u64>().ok())
                    .ok_or_else(|| link.damaged("its term is no number"))?,
                None => 0,
            };
            let term = before.max(written).max(earlier) + 1;
            let lease = link
                .runtime
                .block_on(grant(&link.gateway))
                .map_err(|silence| super::link::away(place, silence))?;
            let revision_of = |found: Option<&KeyValue>| found.map_or(0, |found| found.mod_revision.0);
            let taking = Transaction {
                compare: vec![
                    Compare::unchanged(&place.leader, revision_of(leader)),
                    Compare::unchanged(&place.term, revision_of(term_found)),
                ],
                success: vec![
                    Operation::put_for(&place.leader, &claim.to_json(), lease),
                    Operation::put(&place.term, term.to_string().as_bytes()),
                ],
                failure: Vec::new(),
            };
            // If it was made by an attempt whose answer was lost, the next round finds our own claim, and takes one term more.
            let taken = link.transact(&taking)?;
            if taken.succeeded {
                return Ok(Self::hold(link, (term, taken.header.revision.0), lease));
            }
        }
    }

    fn hold(link: &Arc<EtcdLink>, (term, revision): (u64, i64), lease: i64) -> Self {
        let loss =
            Arc::new(Loss { by: OnceLock::new(), tell: Mutex::new(None), tell_silence: Mutex::new(None) });
        let lease = Arc::new(Mutex::new(lease));
        let keeper = Keeper {
            gateway: Arc::clone(&link.gateway),
            place: Arc::clone(&link.place),
            claim: link.claim.clone(),
            revision,
            lease: Arc::clone(&lease),
            loss: Arc::clone(&loss),
        };
        let keeping = link.runtime.spawn(keeper.keep());
        Self { link: Arc::clone(link), term, revision, lease, loss, keeping }
    }

    pub(super) fn term(&self) -> u64 {
        self.term
    }

    pub(super) fn loss(&self) -> Arc<Loss> {
        Arc::clone(&self.loss)
    }

    /// On condition that nobody else has come.
    pub(super) fn held(&self) -> Compare {
        Compare::unchanged(&self.link.place.term, self.revision)
    }

    /// What the log's end is, as nobody else changes it.
    pub(super) fn head<T>(
        &self,
        read: impl Fn(Option<&KeyValue>) -> Result<T, EtcdError>,
    ) -> Result<T, EtcdError> {
        let place = &self.link.place;
        let answer = self.link.transact(&Transaction {
            compare: vec![self.held()],
            success: vec![Operation::get(&place.head)],
            failure: vec![Operation::get(&place.leader)],
        })?;
        if answer.succeeded {
            read(answer.found(&place.head))
        } else {
            Err(self.taken_over(answer.found(&place.leader)))
        }
    }

    /// As if it had run out.
    #[cfg(test)]
    pub(super) fn end_lease(&self) {
        let question = Granted { lease: Number(*self.lease.lock().unwrap_or_else(PoisonError::into_inner)) };
        let _: Result<serde_json::Value, EtcdError> = self.link.ask("v3/lease/revoke", &question, REVOKE_MAX);
    }

    pub(super) fn taken_over(&self, leader: Option<&KeyValue>) -> EtcdError {
        taken_over(&self.link.place, leader)
    }
}

impl Drop for Office {
    /// Whoever comes next need not wait until the lease has run out.
    fn drop(&mut self) {
        self.keeping.abort();
        let lease = *self.lease.lock().unwrap_or_else(PoisonError::into_inner);
        let question = Granted { lease: Number(lease) };
        // Otherwise it runs out.
        let _: Result<serde_json::Value, EtcdError> = self.link.ask("v3/lease/revoke", &question, REVOKE_MAX);
    }
}

fn taken_over(place: &Place, leader: Option<&KeyValue>) -> EtcdError {
    let by = leader.and_then(Claim::of).map_or_else(|| "somebody".to_owned(), |claim| claim.to_string());
    EtcdError::TakenOver { place: place.to_string(), by }
}

async fn grant(gateway: &Gateway) -> Result<i64, Silence> {
    let seconds = Number(LEASE_SECONDS.cast_signed());
    let granted: Granted = gateway.ask("v3/lease/grant", &Grant { seconds }, KEEP_EVERY).await?;
    Ok(granted.lease.0)
}

/// Whoever has the office while somebody else waits for it.
#[derive(Default)]
struct Predecessor {
    /// With which its claim goes.
    lease: i64,
    /// The least of it that was seen to be left, in seconds.
    least: i64,
    /// How often it was renewed meanwhile.
    heard: u32,
    looks: u32,
    since: Option<Instant>,
}

impl Predecessor {
    /// Whether it is heard of, or has been there for too long for anybody who is dead.
    fn is_there(&mut self, link: &EtcdLink, claim: &KeyValue) -> bool {
        self.looks = self.looks.saturating_add(1);
        if claim.lease.0 != self.lease {
            // It came back, or somebody else was sooner.
            self.heard += u32::from(self.looks > 1);
            (self.lease, self.least) = (claim.lease.0, i64::MAX);
        }
        // Whoever may not ask that goes by the time.
        let question = Granted { lease: claim.lease };
        let left: Result<TimeToLive, _> = link.ask("v3/lease/timetolive", &question, LEFT_MAX);
        if let Ok(left) = left {
            self.heard += u32::from(left.seconds.0 > self.least);
            self.least = left.seconds.0;
        }
        self.heard >= HEARD_MIN || self.since.get_or_insert_with(Instant::now).elapsed() > HOLDER_MAX
    }
}

/// Has a controller be heard of.
struct Keeper {
    gateway: Arc<Gateway>,
    place: Arc<Place>,
    claim: Claim,
    revision: i64,
    lease: Arc<Mutex<i64>>,
    loss: Arc<Loss>,
}

impl Keeper {
    async fn keep(self) {
        let mut away = false;
        loop {
            tokio::time::sleep(KEEP_EVERY).await;
            match self.keep_once().await {
                Ok(true) => {
                    if std::mem::replace(&mut away, false) {
                        self.loss.note_silence(None);
                        tracing::info!("{} answers again", self.place);
                    }
                }
                Ok(false) => return,
                Err(silence) => {
                    if !std::mem::replace(&mut away, true) {
                        let what = super::link::away(&self.place, silence).to_string();
                        tracing::warn!("{what}");
                        self.loss.note_silence(Some(what));
                    }
                }
            }
        }
    }

    /// Says whether this one is in office still.
    async fn keep_once(&self) -> Result<bool, Silence> {
        let lease = *self.lease.lock().unwrap_or_else(PoisonError::into_inner);
        let question = Granted { lease: Number(lease) };
        let kept: KeptAlive = self.gateway.ask("v3/lease/keepalive", &question, KEEP_EVERY).await?;
        if kept.result.seconds.0 > 0 {
            return Ok(true);
        }
        // It could not be heard of for too long. Unless somebody has come meanwhile, it is the one still.
        let lease = grant(&self.gateway).await?;
        let again = Transaction {
            compare: vec![Compare::unchanged(&self.place.term, self.revision)],
            success: vec![Operation::put_for(&self.place.leader, &self.claim.to_json(), lease)],
            failure: vec![Operation::get(&self.place.leader)],
        };
        let answer: Transacted = self.gateway.ask("v3/kv/txn", &again, KEEP_EVERY).await?;
        if answer.succeeded {
            *self.lease.lock().unwrap_or_else(PoisonError::into_inner) = lease;
        } else {
            self.loss.note(taken_over(&self.place, answer.found(&self.place.leader)));
        }
        Ok(answer.succeeded)
    }
}
