//! A request that was let in, until it is written down if it would change something.

use std::sync::{Arc, Mutex, PoisonError};

use axum::body::Body;
use axum::extract::Request;
use axum::http::{Method, StatusCode};
use http_body_util::BodyExt as _;
use serde_json::Value;

use super::Role;
use super::audit::{AuditLog, Entry, now_ms};
use super::is_refusal;

/// How much of what was sent is written down, in bytes: what people ask for is shorter.
const HEARD_BYTES_MAX: usize = 1000;

/// See the [module](self). A line is written when this ends: also where nobody waits for the answer any more, since the connection has ended or
/// was ended, for the change may have been made by then.
pub(super) struct Pending {
    log: Arc<AuditLog>,
    origin: String,
    who: String,
    role: Option<Role>,
    from: Option<String>,
    method: String,
    path: String,
    query: String,
    /// Whether it would only look.
    looks: bool,
    heard: Arc<Mutex<Vec<u8>>>,
    status: Option<StatusCode>,
}

impl Pending {
    /// By whom: his name, his role if he is known, where he came from, and the origin that refusals of it count for.
    pub(super) fn new(
        log: &Arc<AuditLog>,
        (who, role, from, origin): (&str, Option<Role>, Option<String>, String),
        request: &Request,
    ) -> Self {
        Self {
            log: Arc::clone(log),
            origin,
            who: who.to_owned(),
            role,
            from,
            method: request.method().as_str().to_owned(),
            path: request.uri().path().to_owned(),
            query: request.uri().query().unwrap_or_default().to_owned(),
            looks: matches!(*request.method(), Method::GET | Method::HEAD),
            heard: Arc::default(),
            status: None,
        }
    }

    /// The same request, of whose body the beginning is remembered as it is read.
    pub(super) fn listen_to(&self, request: Request) -> Request {
        if self.looks {
            return request;
        }
        let heard = Arc::clone(&self.heard);
        request.map(|body| {
            Body::new(body.map_frame(move |frame| {
                if let Some(data) = frame.data_ref() {
                    let mut heard = heard.lock().unwrap_or_else(PoisonError::into_inner);
                    let room = HEARD_BYTES_MAX.saturating_sub(heard.len());
                    heard.extend(data.iter().take(room));
                }
                frame
            }))
        })
    }

    /// It was answered.
    pub(super) fn answered(mut self, status: StatusCode) {
        self.status = Some(status);
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        let heard = std::mem::take(&mut *self.heard.lock().unwrap_or_else(PoisonError::into_inner));
        let text = || Value::String(String::from_utf8_lossy(&heard).into_owned());
        let asked = (!heard.is_empty()).then(|| serde_json::from_slice(&heard).unwrap_or_else(|_| text()));
        let entry = Entry {
            time_ms: now_ms(),
            who: &self.who,
            role: self.role,
            from: self.from.clone(),
            method: &self.method,
            path: &self.path,
            query: &self.query,
            asked: asked.as_ref(),
            status: self.status.map(|status| status.as_u16()),
        };
        if self.status.is_some_and(is_refusal) {
            self.log.note_refusal(&self.origin, &Entry { asked: None, ..entry });
        } else if !self.looks {
            self.log.note(&entry);
        }
    }
}
