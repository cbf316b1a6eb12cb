//! The way to a place in etcd, for a controller's whole life.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use pod_api::client::ClientTls;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::gateway::{
    Bytes, Complaint, Gateway, KeyValue, Number, Range, Ranged, Silence, Transacted, Transaction,
};
use super::{EtcdAddress, EtcdError, EtcdUser, PARTS_PER_ANSWER};
use crate::tls::Watched;

/// How long etcd may take. An etcd that elects a leader of its own takes some of it.
const ANSWER_MAX: Duration = Duration::from_secs(5);
/// How long it may take where it is only seen whether it is there.
const REACH_MAX: Duration = Duration::from_millis(500);
/// How long a connection may take.
const CONNECT_MAX: Duration = Duration::from_secs(1);

/// The names of keys.
#[derive(Debug)]
pub(super) struct Place {
    address: EtcdAddress,
    pub(super) leader: String,
    pub(super) term: String,
    pub(super) head: String,
}

impl Place {
    fn new(address: EtcdAddress) -> Self {
        let key = |name: &str| format!("{}/{name}", address.prefix());
        Self { leader: key("leader"), term: key("term"), head: key("head"), address }
    }

    /// What the keys of a change begin with.
    pub(super) fn log_of(&self, sequence: u64) -> String {
        format!("{}/log/{sequence:016x}/", self.address.prefix())
    }

    pub(super) fn log(&self, sequence: u64, part: usize) -> String {
        format!("{}{part:08x}", self.log_of(sequence))
    }

    pub(super) fn snapshot(&self, number: u64, part: usize) -> String {
        format!("{}/snapshot/{number:016x}/{part:08x}", self.address.prefix())
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.address.fmt(f)
    }
}

/// Who a controller is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Claim {
    pub(super) id: Uuid,
    host: String,
    pid: u32,
}

impl Claim {
    fn new() -> Self {
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        let host = host.trim();
        let host = if host.is_empty() { "?" } else { host };
        Self { id: Uuid::new_v4(), host: host.to_owned(), pid: std::process::id() }
    }

    /// Whoever says so.
    pub(super) fn of(found: &KeyValue) -> Option<Self> {
        serde_json::from_slice(&found.value.0).ok()
    }

    pub(super) fn to_json(&self) -> Vec<u8> {
        // A structure of strings and numbers can always be written.
        serde_json::to_vec(self).unwrap_or_default()
    }
}

impl fmt::Display for Claim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process {} on {}", self.pid, self.host)
    }
}

/// What the controller shows to an etcd.
#[derive(Clone, Debug, Default)]
pub struct EtcdCredentials {
    /// Whom it trusts, and who it is by certificate.
    pub tls: ClientTls,
    /// Who it is by name and password.
    pub user: Option<EtcdUser>,
}

/// The connection, and who uses it.
#[derive(Debug)]
pub(crate) struct EtcdLink {
    pub(super) place: Arc<Place>,
    pub(super) gateway: Arc<Gateway>,
    pub(super) claim: Claim,
    pub(super) runtime: tokio::runtime::Runtime,
}

impl EtcdLink {
    /// Prepares it; connects with the first question.
    pub(crate) fn new(address: &EtcdAddress, credentials: &EtcdCredentials) -> Result<Self, EtcdError> {
        let place = Arc::new(Place::new(address.clone()));
        let failed = |reason: String| EtcdError::SetUp { place: place.to_string(), reason };
        let EtcdCredentials { tls, user } = credentials.clone();
        let files = [&tls.ca_file, &tls.cert_file, &tls.key_file].into_iter().flatten().cloned().collect();
        let is_tls = address.tls();
        let http = Watched::open(files, move || client(is_tls.then_some(&tls))).map_err(failed)?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("etcd")
            .enable_all()
            .build()
            .map_err(|error: io::Error| failed(error.to_string()))?;
        let gateway = Arc::new(Gateway::new(http, address.members(), user));
        Ok(Self { place, gateway, claim: Claim::new(), runtime })
    }

    /// Whether etcd is there.
    pub(crate) fn reach(&self) -> Result<(), EtcdError> {
        let key = Bytes(self.place.term.as_bytes().to_vec());
        let range = Range { key, end: Bytes::default(), limit: Number(1) };
        self.ask::<Ranged>("v3/kv/range", &range, REACH_MAX).map(drop)
    }

    /// Has a transaction made. It may be made more than once.
    pub(super) fn transact(&self, transaction: &Transaction) -> Result<Transacted, EtcdError> {
        self.ask("v3/kv/txn", transaction, ANSWER_MAX)
    }

    /// All keys from one up to another, in their order.
    pub(super) fn range(&self, from: &str, to: &str) -> Result<Vec<KeyValue>, EtcdError> {
        let mut found: Vec<KeyValue> = Vec::new();
        loop {
            let mut key = found.last().map_or_else(|| from.as_bytes().to_vec(), |last| last.key.0.clone());
            if !found.is_empty() {
                key.push(0);
            }
            let end = Bytes(to.as_bytes().to_vec());
            let range = Range { key: Bytes(key), end, limit: Number(PARTS_PER_ANSWER) };
            let answer: Ranged = self.ask("v3/kv/range", &range, ANSWER_MAX)?;
            let none = answer.kvs.is_empty();
            found.extend(answer.kvs);
            if none || !answer.more {
                return Ok(found);
            }
        }
    }

    pub(super) fn ask<Answer: serde::de::DeserializeOwned>(
        &self,
        path: &str,
        question: &impl Serialize,
        patience: Duration,
    ) -> Result<Answer, EtcdError> {
        let answer = self.runtime.block_on(self.gateway.ask(path, question, patience));
        answer.map_err(|silence| away(&self.place, silence))
    }

    pub(super) fn damaged(&self, reason: impl Into<String>) -> EtcdError {
        EtcdError::Damaged { place: self.place.to_string(), reason: reason.into() }
    }
}

/// What speaks HTTP, with the certificates that there are now.
fn client(tls: Option<&ClientTls>) -> Result<reqwest::Client, String> {
    let trusted = tls.map_or_else(ClientTls::trusting_nobody, ClientTls::config);
    reqwest::Client::builder()
        .no_proxy()
        .connect_timeout(CONNECT_MAX)
        .tls_backend_preconfigured(trusted.map_err(|error| error.to_string())?)
        .build()
        .map_err(|error| error.to_string())
}

/// What to do about it.
pub(super) fn away(place: &Place, silence: Silence) -> EtcdError {
    let advice = match silence.complaint {
        Some(Complaint::WhoIsIt) => {
            "this etcd has users: say which one this is, with etcd.user and etcd.password-file"
        }
        Some(Complaint::WrongPassword) => {
            "see that etcd has the user of etcd.user, with the password in etcd.password-file"
        }
        Some(Complaint::NotAllowed) => {
            "let the user read and write below that prefix (etcdctl role grant-permission ROLE readwrite --prefix PREFIX/)"
        }
        Some(Complaint::NoRoom) => {
            "make room in etcd: compact it (etcdctl compact REVISION), defragment its members (etcdctl defrag), and disarm the alarm \
             (etcdctl alarm disarm)"
        }
        Some(Complaint::Invalid) => "see that its members take requests of 1.5 MB (--max-request-bytes)",
        _ => "see that a majority of its members runs and can be reached from here",
    };
    EtcdError::Away { place: place.to_string(), reason: silence.reason, advice, open: silence.open }
}
