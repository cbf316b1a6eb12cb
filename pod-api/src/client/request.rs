//! How a request is made, and what becomes of the answer.

use std::time::{Duration, Instant};

use reqwest::header::IF_MATCH;
use reqwest::{Method, StatusCode, Url};
use serde::Serialize;
use serde::de::DeserializeOwned;
use uuid::Uuid;

use super::{Client, ClientError, tls};
use crate::Problem;

/// Longer than the controller takes for anything but an event stream; it gives up by itself before.
pub(super) const REQUEST_TIMEOUT: Duration = Duration::from_mins(1);

/// The header with a name for a request.
const IDEMPOTENCY_KEY: &str = "idempotency-key";
/// How long it is waited before a change is asked for again; then twice as long each time, up to a limit.
const AGAIN_AFTER: Duration = Duration::from_millis(50);
const AGAIN_AFTER_MAX: Duration = Duration::from_millis(800);
/// How long it is asked for again: a controller that has died starts again, or others elect a leader, in less.
const AGAIN_WITHIN: Duration = Duration::from_secs(5);

/// Whether asking again may help, of a change that may have been made.
fn is_open(problem: &Problem) -> bool {
    matches!(problem.kind.as_str(), "outcome-unknown" | "no-leader")
}

impl Client {
    pub(super) fn get<Answer: DeserializeOwned>(&self, path: &[&str]) -> Result<Answer, ClientError> {
        self.call::<(), _>(Method::GET, path, &[], None)
    }

    pub(super) fn end(
        &self,
        method: Method,
        path: &[&str],
        query: &[(&str, &str)],
    ) -> Result<(), ClientError> {
        self.runtime.block_on(async {
            let response = self.send::<()>(method, path, query, None).await?;
            self.refusal(response).await.map(drop)
        })
    }

    /// Says something to which there is no answer but yes or no.
    pub(super) fn tell<Body: Serialize>(
        &self,
        method: Method,
        path: &[&str],
        body: &Body,
    ) -> Result<(), ClientError> {
        self.runtime.block_on(async {
            let response = self.send(method, path, &[], Some(body)).await?;
            self.refusal(response).await.map(drop)
        })
    }

    pub(super) fn call<Body: Serialize, Answer: DeserializeOwned>(
        &self,
        method: Method,
        path: &[&str],
        query: &[(&str, &str)],
        body: Option<&Body>,
    ) -> Result<Answer, ClientError> {
        self.runtime.block_on(async {
            let response = self.send(method, path, query, body).await?;
            let response = self.refusal(response).await?;
            response.json().await.map_err(|error| self.garbled(&error))
        })
    }

    pub(super) async fn send<Body: Serialize>(
        &self,
        method: Method,
        path: &[&str],
        query: &[(&str, &str)],
        body: Option<&Body>,
    ) -> Result<reqwest::Response, ClientError> {
        let mut query = query.to_vec();
        if self.dry_run && method != Method::GET {
            query.push(("dry-run", "true"));
        }
        self.send_at(self.version.as_deref(), method, path, &query, body).await
    }

    /// As [`Client::call`], for this version of the resource.
    pub(super) fn call_at<Body: Serialize, Answer: DeserializeOwned>(
        &self,
        version: &str,
        method: Method,
        path: &[&str],
        body: &Body,
    ) -> Result<Answer, ClientError> {
        let query: &[_] = if self.dry_run { &[("dry-run", "true")] } else { &[] };
        self.runtime.block_on(async {
            let response = self.send_at(Some(version), method, path, query, Some(body)).await?;
            let response = self.refusal(response).await?;
            response.json().await.map_err(|error| self.garbled(&error))
        })
    }

    /// A change has a name of its own, and is asked for again under that as long as it is open whether it was made: it is made once.
    async fn send_at<Body: Serialize>(
        &self,
        version: Option<&str>,
        method: Method,
        path: &[&str],
        query: &[(&str, &str)],
        body: Option<&Body>,
    ) -> Result<reqwest::Response, ClientError> {
        let changes = method != Method::GET;
        let request = self.request(method, self.url(path, query)).timeout(REQUEST_TIMEOUT);
        let request = match version.filter(|_| changes) {
            Some(version) => request.header(IF_MATCH, format!("\"{version}\"")),
            None => request,
        };
        let request = match body {
            Some(body) => request.json(body),
            None => request,
        };
        if !changes {
            return request.send().await.map_err(|error| self.unreachable(&error));
        }
        let request = request.header(IDEMPOTENCY_KEY, Uuid::new_v4().to_string());
        let began = Instant::now();
        let mut pause = AGAIN_AFTER;
        // What was said first, when it became open what had become of the change.
        let mut open: Option<ClientError> = None;
        loop {
            // A body of JSON can be sent any number of times.
            let Some(attempt) = request.try_clone() else {
                return request.send().await.map_err(|error| self.unreachable(&error));
            };
            let last = began.elapsed() + pause > AGAIN_WITHIN;
            match attempt.send().await {
                Ok(response) if response.status() == StatusCode::SERVICE_UNAVAILABLE => {
                    match self.refusal(response).await {
                        Err(ClientError::Refused(problem)) if !last && is_open(&problem) => {
                            open.get_or_insert(ClientError::Refused(problem));
                        }
                        // While it starts again, what it refuses says nothing about what it was asked before.
                        outcome => return outcome.map_err(|error| open.unwrap_or(error)),
                    }
                }
                Ok(response) => return Ok(response),
                // Nobody heard it, unless somebody heard it before.
                Err(error)
                    if last
                        || error.is_timeout()
                        || tls::explain(&error).is_some()
                        || (error.is_connect() && open.is_none()) =>
                {
                    return Err(open.unwrap_or_else(|| self.unreachable(&error)));
                }
                Err(error) => {
                    open.get_or_insert_with(|| self.unreachable(&error));
                }
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(AGAIN_AFTER_MAX);
        }
    }

    pub(super) fn request(&self, method: Method, url: Url) -> reqwest::RequestBuilder {
        let request = self.http.request(method, url);
        match &self.token {
            Some(token) => request.bearer_auth(token),
            None => request,
        }
    }

    /// The address of a resource; names are escaped, so that no name reaches another resource.
    pub(super) fn url(&self, path: &[&str], query: &[(&str, &str)]) -> Url {
        let mut url = self.base.clone();
        if let Ok(mut segments) = url.path_segments_mut() {
            segments.pop_if_empty().extend(path);
        }
        if !query.is_empty() {
            url.query_pairs_mut().extend_pairs(query);
        }
        url
    }

    pub(super) async fn refusal(
        &self,
        response: reqwest::Response,
    ) -> Result<reqwest::Response, ClientError> {
        let status = response.status();
        if status.is_success() {
            self.note_unmeasured(&response);
            return Ok(response);
        }
        let text = response.text().await.unwrap_or_default();
        match serde_json::from_str(&text) {
            Ok(problem) => Err(ClientError::Refused(problem)),
            Err(_) => Err(ClientError::Garbled {
                server: self.server.clone(),
                reason: format!("status {status} without a problem description"),
            }),
        }
    }

    pub(super) fn unreachable(&self, error: &reqwest::Error) -> ClientError {
        ClientError::Unreachable {
            server: self.server.clone(),
            reason: tls::explain(error).unwrap_or_else(|| innermost(error)),
        }
    }

    pub(super) fn silent(&self, limit: Duration) -> ClientError {
        let reason = format!("nothing was heard of it for {} s", limit.as_secs());
        ClientError::Unreachable { server: self.server.clone(), reason }
    }

    pub(super) fn garbled(&self, error: &reqwest::Error) -> ClientError {
        ClientError::Garbled { server: self.server.clone(), reason: innermost(error) }
    }
}

/// The cause of an error that says most: the layers above repeat the address.
pub fn innermost(error: &dyn std::error::Error) -> String {
    let mut error = error;
    while let Some(source) = error.source() {
        error = source;
    }
    error.to_string()
}
