//! etcd's API as its members offer it in JSON, beside gRPC: `/v3/…`, since etcd 3.4.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use pod_api::client::innermost;
use reqwest::Url;
use reqwest::header::AUTHORIZATION;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use tokio::time::Instant;

use super::login::{self, Authenticated, EtcdUser, Login};
use crate::tls::Watched;

/// How long a member may take before another one is asked.
const ATTEMPT_MAX: Duration = Duration::from_secs(2);
/// How long until they are asked again after all have failed.
const AGAIN_AFTER: Duration = Duration::from_millis(100);

/// The members, one of which is asked until it fails.
pub(super) struct Gateway {
    http: Watched<reqwest::Client>,
    members: Vec<Url>,
    current: AtomicUsize,
    login: Option<Login>,
}

/// Why there is no answer.
#[derive(Clone, Debug)]
pub(super) struct Silence {
    /// What happened.
    pub(super) reason: String,
    /// Whether what was asked for may have been done all the same.
    pub(super) open: bool,
    /// Whether another member, or the same one soon, might answer.
    again: bool,
    /// Whether nothing came at all in the time that there was.
    timed_out: bool,
    /// What etcd says to that, if it is something that it says.
    pub(super) complaint: Option<Complaint>,
}

/// What etcd says, as far as it makes a difference for what has to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Complaint {
    /// It does not know who is asking, or not any more.
    WhoIsIt,
    /// Name and password do not belong together.
    WrongPassword,
    /// Whoever is asking may not do that.
    NotAllowed,
    /// It has no room.
    NoRoom,
    /// The request makes no sense to it; it may be too large.
    Invalid,
    /// Something else.
    Other,
}

impl Complaint {
    /// Of a code of gRPC, and the words that come with it: some of what concerns users has the code of invalid arguments.
    fn of(code: u32, message: &str) -> Self {
        match code {
            16 => Self::WhoIsIt,
            3 if message.contains("user name is empty") || message.contains("auth store is old") => {
                Self::WhoIsIt
            }
            3 if message.contains("authentication failed") => Self::WrongPassword,
            3 => Self::Invalid,
            7 => Self::NotAllowed,
            8 => Self::NoRoom,
            _ => Self::Other,
        }
    }
}

impl Silence {
    /// Nothing was asked, and asking again would be no use.
    pub(super) fn for_good(reason: String) -> Self {
        Self { reason, open: false, again: false, timed_out: false, complaint: None }
    }
}

/// How etcd says no.
#[derive(Deserialize)]
struct Problem {
    message: String,
    code: u32,
}

impl Gateway {
    pub(super) fn new(http: Watched<reqwest::Client>, members: &[Url], user: Option<EtcdUser>) -> Self {
        Self { http, members: members.to_vec(), current: AtomicUsize::new(0), login: user.map(Login::new) }
    }

    /// Asks until somebody answers, or until patience ends. What is asked may be carried out more than once: it has to be such
    /// that this does no harm.
    pub(super) async fn ask<Answer: DeserializeOwned>(
        &self,
        path: &str,
        question: &impl Serialize,
        patience: Duration,
    ) -> Result<Answer, Silence> {
        let deadline = Instant::now() + patience;
        let body = written(question)?;
        let mut open = false;
        let mut failure: Option<Silence> = None;
        loop {
            for _ in &self.members {
                let left = deadline.saturating_duration_since(Instant::now());
                let current = self.current.load(Ordering::Relaxed) % self.members.len();
                let attempt = left.min(ATTEMPT_MAX);
                match self.ask_member(&self.members[current], path, body.clone(), attempt).await {
                    Ok(answer) => return Ok(answer),
                    Err(silence) => {
                        open |= silence.open;
                        if !silence.again {
                            return Err(Silence { open, ..silence });
                        }
                        self.current.store(current + 1, Ordering::Relaxed);
                        // Whoever had less time than an answer may take says nothing by its silence: the reason is what was
                        // seen before.
                        failure = match failure.take() {
                            Some(before) if silence.timed_out && attempt < ATTEMPT_MAX => {
                                Some(Silence { open, ..before })
                            }
                            _ => Some(Silence { open, ..silence }),
                        };
                    }
                }
            }
            if Instant::now() + AGAIN_AFTER >= deadline
                && let Some(silence) = failure.take()
            {
                return Err(silence);
            }
            tokio::time::sleep(AGAIN_AFTER).await;
        }
    }

    /// Asks one of them, and says who is asking if it wants to know.
    async fn ask_member<Answer: DeserializeOwned>(
        &self,
        member: &Url,
        path: &str,
        body: Vec<u8>,
        patience: Duration,
    ) -> Result<Answer, Silence> {
        let token = self.login.as_ref().and_then(Login::token);
        let refused = match self.post(member, path, body.clone(), token.as_deref(), patience).await {
            Err(silence) if silence.complaint == Some(Complaint::WhoIsIt) => silence,
            answer => return answer,
        };
        let Some(login) = &self.login else { return Err(refused) };
        let question = written(&login.question()?)?;
        let answer = self.post(member, login::PATH, question, None, patience).await;
        // What was wanted was refused, whatever became of this.
        let Authenticated { token } = answer.map_err(|silence| Silence { open: false, ..silence })?;
        login.learn(&token);
        self.post(member, path, body, Some(&token), patience).await
    }

    async fn post<Answer: DeserializeOwned>(
        &self,
        member: &Url,
        path: &str,
        body: Vec<u8>,
        token: Option<&str>,
        patience: Duration,
    ) -> Result<Answer, Silence> {
        let host = || format!("{}:{}", member.host_str().unwrap_or("?"), member.port().unwrap_or(0));
        let lost = |error: reqwest::Error| {
            let open = !error.is_connect() && !error.is_builder();
            Silence {
                reason: format!("{}: {}", host(), innermost(&error)),
                open,
                again: true,
                timed_out: error.is_timeout(),
                complaint: None,
            }
        };
        let mut url = member.clone();
        url.set_path(path);
        let mut request = self.http.current().post(url).timeout(patience).body(body);
        if let Some(token) = token {
            request = request.header(AUTHORIZATION, token);
        }
        let response = request.send().await.map_err(lost)?;
        let status = response.status();
        let text = response.bytes().await.map_err(lost)?;
        if status.is_success() {
            return serde_json::from_slice(&text).map_err(|error| Silence {
                reason: format!("{} answers what etcd does not: {error}", host()),
                open: true,
                again: false,
                timed_out: false,
                complaint: None,
            });
        }
        match serde_json::from_slice::<Problem>(&text) {
            // Unavailable, DeadlineExceeded, Canceled, Aborted, Unknown, Internal: as etcd says while it has no leader, and what was
            // proposed before may be carried out.
            Ok(Problem { message, code: 1 | 2 | 4 | 10 | 13 | 14 }) => Err(Silence {
                reason: format!("{}: {message}", host()),
                open: true,
                again: true,
                timed_out: false,
                complaint: Some(Complaint::Other),
            }),
            Ok(Problem { message, code }) => Err(Silence {
                reason: format!("{}: {message}", host()),
                open: false,
                again: false,
                timed_out: false,
                complaint: Some(Complaint::of(code, &message)),
            }),
            Err(_) => Err(Silence {
                reason: format!("{} answers {status}: it is no etcd, or older than 3.4", host()),
                open: false,
                again: true,
                timed_out: false,
                complaint: None,
            }),
        }
    }
}

fn written(question: &impl Serialize) -> Result<Vec<u8>, Silence> {
    serde_json::to_vec(question)
        .map_err(|error| Silence::for_good(format!("the request cannot be written: {error}")))
}

impl fmt::Debug for Gateway {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gateway").field("members", &self.members).finish_non_exhaustive()
    }
}

/// Bytes, as JSON of protocol buffers writes them.
#[derive(Clone, Default, PartialEq, Eq)]
pub(super) struct Bytes(pub(super) Vec<u8>);

impl fmt::Debug for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", String::from_utf8_lossy(&self.0))
    }
}

impl Serialize for Bytes {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&BASE64.encode(&self.0))
    }
}

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        BASE64.decode(text).map(Self).map_err(serde::de::Error::custom)
    }
}

/// A 64-bit number, which JSON of protocol buffers writes as text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Number(pub(super) i64);

impl Serialize for Number {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for Number {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map(Self).map_err(serde::de::Error::custom)
    }
}

/// What is done at once, or not at all, if nothing has changed that is compared.
#[derive(Debug, Serialize)]
pub(super) struct Transaction {
    pub(super) compare: Vec<Compare>,
    pub(super) success: Vec<Operation>,
    pub(super) failure: Vec<Operation>,
}

/// A key has this revision still; 0: there is no such key.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Compare {
    key: Bytes,
    target: &'static str,
    result: &'static str,
    mod_revision: Number,
}

impl Compare {
    pub(super) fn unchanged(key: &str, revision: i64) -> Self {
        let key = Bytes(key.as_bytes().to_vec());
        Self { key, target: "MOD", result: "EQUAL", mod_revision: Number(revision) }
    }
}

/// A part of a transaction.
#[derive(Clone, Debug, Serialize)]
pub(super) enum Operation {
    #[serde(rename = "request_put")]
    Put { key: Bytes, value: Bytes, lease: Number },
    #[serde(rename = "request_range")]
    Range(Range),
    #[serde(rename = "request_delete_range")]
    Delete { key: Bytes, range_end: Bytes },
}

impl Operation {
    pub(super) fn put(key: &str, value: &[u8]) -> Self {
        Self::put_for(key, value, 0)
    }

    /// For as long as the lease lives.
    pub(super) fn put_for(key: &str, value: &[u8], lease: i64) -> Self {
        let (key, value) = (Bytes(key.as_bytes().to_vec()), Bytes(value.to_vec()));
        Self::Put { key, value, lease: Number(lease) }
    }

    pub(super) fn get(key: &str) -> Self {
        Self::Range(Range { key: Bytes(key.as_bytes().to_vec()), end: Bytes::default(), limit: Number(1) })
    }

    /// Keys from one up to another, which stays.
    pub(super) fn delete(from: &str, to: &str) -> Self {
        Self::Delete { key: Bytes(from.as_bytes().to_vec()), range_end: Bytes(to.as_bytes().to_vec()) }
    }
}

/// Keys from one up to another, which is not among them.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Range {
    pub(super) key: Bytes,
    #[serde(rename = "range_end")]
    pub(super) end: Bytes,
    pub(super) limit: Number,
}

#[derive(Debug, Default, Deserialize)]
pub(super) struct Header {
    #[serde(default)]
    pub(super) revision: Number,
}

#[derive(Debug, Deserialize)]
pub(super) struct Transacted {
    pub(super) header: Header,
    #[serde(default)]
    pub(super) succeeded: bool,
    #[serde(default)]
    responses: Vec<Response>,
}

#[derive(Debug, Deserialize)]
struct Response {
    #[serde(default)]
    response_range: Option<Ranged>,
}

impl Transacted {
    /// A key that was asked for.
    pub(super) fn found(&self, key: &str) -> Option<&KeyValue> {
        let ranges = self.responses.iter().filter_map(|response| response.response_range.as_ref());
        ranges.flat_map(|range| &range.kvs).find(|found| found.key.0 == key.as_bytes())
    }
}

#[derive(Debug, Deserialize)]
pub(super) struct Ranged {
    #[serde(default)]
    pub(super) kvs: Vec<KeyValue>,
    #[serde(default)]
    pub(super) more: bool,
}

#[derive(Debug, Deserialize)]
pub(super) struct KeyValue {
    pub(super) key: Bytes,
    #[serde(default)]
    pub(super) value: Bytes,
    #[serde(default)]
    pub(super) mod_revision: Number,
    /// With which it goes; 0 for none.
    #[serde(default)]
    pub(super) lease: Number,
}

#[derive(Debug, Serialize)]
pub(super) struct Grant {
    #[serde(rename = "TTL")]
    pub(super) seconds: Number,
}

/// Of a lease that was granted, or ended.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Granted {
    #[serde(rename = "ID")]
    pub(super) lease: Number,
}

/// What is left of a lease.
#[derive(Debug, Deserialize)]
pub(super) struct TimeToLive {
    /// In seconds; negative where it is gone.
    #[serde(rename = "TTL", default)]
    pub(super) seconds: Number,
}

/// What a stream that ends after one answer looks like.
#[derive(Debug, Deserialize)]
pub(super) struct KeptAlive {
    pub(super) result: KeptAliveResult,
}

#[derive(Debug, Deserialize)]
pub(super) struct KeptAliveResult {
    /// Seconds that are left; none where the lease is gone.
    #[serde(rename = "TTL", default)]
    pub(super) seconds: Number,
}
