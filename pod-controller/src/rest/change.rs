//! Requests that change something. Each can be tried without being carried out (`dry-run=true`), and each can be sent again
//! under the same `Idempotency-Key` without being carried out twice.

use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, to_bytes};
use axum::extract::{FromRequestParts, Query, Request};
use axum::http::request::Parts;
use axum::http::uri::InvalidUri;
use axum::http::{HeaderMap, Method, StatusCode, Uri};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use pod_state::{Command, Expected, IdempotencyKey, KEYS_MAX, Labels, Refusal, RefusalKind, Resource};
use serde::de::DeserializeOwned;
use serde_json::json;
use sha2::{Digest, Sha256};
use utoipa::openapi::path::{Operation, Parameter};
use utoipa::openapi::{OpenApi, RefOr};

use super::Failure;
use super::hex::hex;
use super::own_host::BoundTo;
use super::version::Precondition;
use crate::controller::{Handle, SubmitError};
use crate::view::View;

const KEY_HEADER: &str = "idempotency-key";
const KEY_BYTES_MAX: usize = 128;
const DRY_RUN: &str = "dry-run";

/// How often it is looked anew whether somebody may do what he asks, since what he asks about has changed meanwhile, and how long it may
/// take until that is seen here.
const LOOKS_MAX: u32 = 5;
const LOOK_WAITS: Duration = Duration::from_secs(1);

/// How a request wants its change.
pub(super) struct Change {
    pub(super) handle: Handle,
    key: Option<IdempotencyKey>,
    precondition: Precondition,
    /// The host that whoever asks is bound to.
    bound_to: Option<BoundTo>,
    /// Nothing is to be changed, only said what would be.
    pub(super) is_dry_run: bool,
}

impl Change {
    /// Carries a command out, or tries it. What is shown is what is there after that.
    pub(super) async fn submit(&self, command: Command) -> Result<Arc<View>, Failure> {
        self.submit_found(|| Ok(command)).await
    }

    /// As [`Change::submit`], of a command that takes finding first what the request names: that may be gone since it was carried out.
    pub(super) async fn submit_found(
        &self,
        find: impl FnOnce() -> Result<Command, Failure>,
    ) -> Result<Arc<View>, Failure> {
        self.submit_whole(find, Labels::new(), None).await
    }

    /// As [`Change::submit_found`], and what is made bears these labels.
    pub(super) async fn submit_labelled(
        &self,
        labels: Labels,
        find: impl FnOnce() -> Result<Command, Failure>,
    ) -> Result<Arc<View>, Failure> {
        self.submit_whole(find, labels, None).await
    }

    /// As [`Change::submit`], for the version of the resource that the body says.
    pub(super) async fn submit_at(
        &self,
        version: Option<String>,
        command: Command,
    ) -> Result<Arc<View>, Failure> {
        self.submit_found_at(version, || Ok(command)).await
    }

    /// As [`Change::submit_found`], for the version of the resource that the body says.
    pub(super) async fn submit_found_at(
        &self,
        version: Option<String>,
        find: impl FnOnce() -> Result<Command, Failure>,
    ) -> Result<Arc<View>, Failure> {
        self.submit_whole(find, Labels::new(), version).await
    }

    /// Does what is no command to the state, unless it was done under this request's key already, or would be refused. It has no
    /// version.
    ///
    /// It cannot be noted in one step with the deed that it was done. So it is noted first that it was begun: whoever is asked again
    /// after that, and finds nothing left to do, knows that it was done.
    pub(super) async fn once(
        &self,
        allowed: impl Future<Output = Result<(), SubmitError>>,
        deed: impl Future<Output = Result<(), SubmitError>>,
    ) -> Result<(), Failure> {
        let Some(key) = &self.key else { return Ok(deed.await?) };
        let (view, begun) = (self.handle.view(), key.begun());
        if view.state.was_done(key)? {
            return Ok(());
        }
        let again = view.state.was_done(&begun)?;
        if !again {
            allowed.await?;
            self.note(begun).await?;
        }
        match deed.await {
            Err(SubmitError::Refused(refusal)) if again && refusal.kind == RefusalKind::NotFound => {}
            outcome => outcome?,
        }
        // It is done, and whoever asked is told so.
        if let Err(error) = self.note(key.clone()).await {
            tracing::warn!(
                "the idempotency key of a request that was carried out is not remembered: {error}"
            );
        }
        Ok(())
    }

    async fn note(&self, key: IdempotencyKey) -> Result<(), SubmitError> {
        let asked = Box::new(Command::nothing());
        let noted = Command::Request { key: Some(key), labels: Labels::new(), expected: None, asked };
        self.handle.submit(noted).await
    }

    /// Refuses a request that says which version it changes, of something that has none.
    pub(super) fn without_version(&self, what: &str) -> Result<(), Failure> {
        if self.precondition == Precondition::None {
            return Ok(());
        }
        Err(Failure::invalid(format!("{what} has no resourceVersion: leave If-Match out")))
    }

    async fn submit_whole(
        &self,
        find: impl FnOnce() -> Result<Command, Failure>,
        labels: Labels,
        version: Option<String>,
    ) -> Result<Arc<View>, Failure> {
        let key = self.key.clone().filter(|_| !self.is_dry_run);
        let view = self.handle.view();
        // What it is about may have been there for the last time then, or be another by now.
        if let Some(key) = &key
            && view.state.was_done(key)?
        {
            return Ok(view);
        }
        let asked = find()?;
        let expected = self.expected(&asked, version)?;
        let mut views = self.handle.views();
        for look in 1.. {
            let view = Arc::clone(&views.borrow_and_update());
            let expected = self.allow(&view, &asked, expected.clone())?;
            // Whoever leads may be of a version that would not know what it is asked.
            view.state.check_spoken(&asked)?;
            let command = match (key.clone(), expected) {
                (None, None) if labels.is_empty() => asked.clone(),
                (key, expected) => {
                    let (labels, asked) = (labels.clone(), Box::new(asked.clone()));
                    Command::Request { key, labels, expected, asked }
                }
            };
            if self.is_dry_run {
                let view = view.after(&command).map_err(|refusal| self.refused(refusal))?;
                return Ok(Arc::new(view));
            }
            let refusal = match self.handle.submit(command).await {
                Ok(()) => break,
                Err(SubmitError::Refused(refusal)) => refusal,
                Err(stopping) => return Err(stopping.into()),
            };
            // Of whoever is bound to a host it is said here which version he means.
            let is_ours = self.bound_to.is_some() && refusal.kind == RefusalKind::Changed;
            let seen = is_ours
                && look < LOOKS_MAX
                && tokio::time::timeout(LOOK_WAITS, views.changed()).await.is_ok();
            if !seen {
                return Err(self.refused(refusal));
            }
        }
        Ok(self.handle.view())
    }

    /// Refuses what whoever is bound to a host may not ask for. He is judged by what is shown here, which may be older than what the
    /// leader knows: so what he may do is done only to what is shown.
    fn allow(
        &self,
        view: &View,
        command: &Command,
        expected: Option<Expected>,
    ) -> Result<Option<Expected>, Failure> {
        let Some(host) = &self.bound_to else { return Ok(expected) };
        host.allow(&view.state, command)?;
        let Some(resource @ Resource::Instance(_)) = command.changes(&view.state) else {
            return Ok(expected);
        };
        let Some(version) = view.state.version(&resource) else {
            let Resource::Instance(name) = resource else { return Ok(expected) };
            return Err(Failure::not_found("instance", &name));
        };
        if expected.is_some_and(|it| !it.versions.is_empty() && !it.versions.contains(&version)) {
            let detail = format!(
                "what you want to change has not the version that you say: its resourceVersion here is {version}"
            );
            return Err(self.refused(Refusal { kind: RefusalKind::Changed, detail }));
        }
        Ok(Some(Expected { resource, versions: vec![version] }))
    }

    fn expected(&self, command: &Command, version: Option<String>) -> Result<Option<Expected>, Failure> {
        let versions = match self.precondition.clone().and(version)? {
            Precondition::None => return Ok(None),
            Precondition::Any => Vec::new(),
            Precondition::OneOf(versions) => versions,
        };
        match command.changes(&self.handle.view().state) {
            Some(resource) => Ok(Some(Expected { resource, versions })),
            None => Err(Failure::new(
                StatusCode::PRECONDITION_FAILED,
                RefusalKind::Changed.word(),
                "If-Match is for changes of what is there already, and this is not there: leave it out",
            )),
        }
    }

    /// What somebody changed meanwhile has a status of its own where the request said so in its own way.
    fn refused(&self, refusal: Refusal) -> Failure {
        if refusal.kind == RefusalKind::Changed && self.precondition != Precondition::None {
            return Failure::new(StatusCode::PRECONDITION_FAILED, refusal.kind.word(), refusal.detail);
        }
        refusal.into()
    }
}

#[cfg(test)]
impl Change {
    /// What somebody asks who is bound to this host, or to none.
    pub(super) fn of(handle: &Handle, bound_to: Option<&str>) -> Self {
        let bound_to = bound_to.map(|host| BoundTo(host.to_owned()));
        let precondition = Precondition::None;
        Self { handle: handle.clone(), key: None, precondition, bound_to, is_dry_run: false }
    }
}

impl Change {
    /// How a request wants its change, and what else it asks behind the question mark, as it stands there.
    fn take(parts: &Parts, handle: &Handle) -> Result<(Self, Vec<(String, String)>), Failure> {
        let key = parts.extensions.get::<IdempotencyKey>().cloned();
        let precondition = Precondition::of(&parts.headers)?;
        let bound_to = parts.extensions.get::<BoundTo>().cloned();
        let Query(known): Query<Vec<(String, String)>> = Query::try_from_uri(&parts.uri)?;
        let pairs = parts.uri.query().unwrap_or_default().split('&').filter(|pair| !pair.is_empty());
        let mut dry_run = None;
        let mut rest = Vec::new();
        for ((name, value), pair) in known.into_iter().zip(pairs) {
            if name != DRY_RUN {
                rest.push((name, pair.to_owned()));
                continue;
            }
            let before = dry_run.replace(match value.as_str() {
                "true" => true,
                "false" => false,
                _ => return Err(invalid_query("dry-run must be true or false")),
            });
            if before.is_some() {
                return Err(invalid_query("dry-run is said twice"));
            }
        }
        let is_dry_run = dry_run.unwrap_or_default();
        Ok((Self { handle: handle.clone(), key, precondition, bound_to, is_dry_run }, rest))
    }
}

fn invalid_query(detail: impl Into<String>) -> Failure {
    Failure::new(StatusCode::BAD_REQUEST, "invalid-query", detail)
}

impl FromRequestParts<Handle> for Change {
    type Rejection = Failure;

    /// Of a request that asks nothing else: whoever misspells `dry-run` does not want what he asks for to be done.
    async fn from_request_parts(parts: &mut Parts, handle: &Handle) -> Result<Self, Failure> {
        let (change, rest) = Self::take(parts, handle)?;
        let Some((name, _)) = rest.first() else { return Ok(change) };
        let name: String = name.chars().take(100).collect();
        Err(invalid_query(format!("unknown field `{name}`, expected `{DRY_RUN}`")))
    }
}

/// A change, and what else its request asks behind the question mark.
pub(super) struct ChangeWith<Q>(pub(super) Change, pub(super) Q);

impl<Q: DeserializeOwned> FromRequestParts<Handle> for ChangeWith<Q> {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, handle: &Handle) -> Result<Self, Failure> {
        let (change, rest) = Change::take(parts, handle)?;
        let rest: Vec<String> = rest.into_iter().map(|(_, pair)| pair).collect();
        let uri: Result<Uri, InvalidUri> = format!("/?{}", rest.join("&")).parse();
        let uri = uri.map_err(|error| invalid_query(error.to_string()))?;
        Ok(Self(change, Query::try_from_uri(&uri)?.0))
    }
}

/// Notes the key of a request that has one, with a digest of all that the request says.
pub(super) async fn note_key(request: Request, next: Next) -> Response {
    match with_key(request).await {
        Ok(request) => next.run(request).await,
        Err(failure) => failure.into_response(),
    }
}

async fn with_key(request: Request) -> Result<Request, Failure> {
    let key = match key_of(request.headers())? {
        Some(key) if changes(request.method()) => key,
        _ => return Ok(request),
    };
    let (mut parts, body) = request.into_parts();
    let body = to_bytes(body, super::BODY_BYTES_MAX).await.map_err(|_| super::body::too_large())?;
    let mut digest = Sha256::new();
    for part in [parts.method.as_str().as_bytes(), parts.uri.to_string().as_bytes(), &body] {
        digest.update((part.len() as u64).to_le_bytes());
        digest.update(part);
    }
    let digest = hex(digest.finalize());
    parts.extensions.insert(IdempotencyKey { key, digest });
    Ok(Request::from_parts(parts, Body::from(body)))
}

fn key_of(headers: &HeaderMap) -> Result<Option<String>, Failure> {
    let Some(value) = headers.get(KEY_HEADER) else { return Ok(None) };
    let good = |key: &&str| {
        (1..=KEY_BYTES_MAX).contains(&key.len()) && key.bytes().all(|byte| byte.is_ascii_graphic())
    };
    let key = value.to_str().ok().filter(good);
    let key = key.ok_or_else(|| {
        Failure::invalid(format!(
            "Idempotency-Key must have 1 to {KEY_BYTES_MAX} letters, digits and signs, and no spaces"
        ))
    })?;
    Ok(Some(key.to_owned()))
}

fn changes(method: &Method) -> bool {
    !matches!(*method, Method::GET | Method::HEAD | Method::OPTIONS)
}

/// Says of every request that changes something how it can be tried and sent again.
pub(super) fn describe(description: &mut OpenApi) {
    for path in description.paths.paths.values_mut() {
        for operation in [&mut path.post, &mut path.put, &mut path.patch, &mut path.delete] {
            operation.iter_mut().for_each(describe_operation);
        }
    }
}

fn describe_operation(operation: &mut Operation) {
    let dry_run = json!({
        "name": DRY_RUN, "in": "query", "required": false,
        "description": "Only say what would be, or why it would be refused; nothing is changed.",
        "schema": { "type": "boolean" }
    });
    let key = json!({
        "name": "Idempotency-Key", "in": "header", "required": false,
        "description": format!(
            "A name for this request. A request that was carried out is not carried out again when it is sent again with the \
             same name; the answer shows what is there then. Another request with that name is refused. The last {KEYS_MAX} \
             names are remembered; those of refused requests are not."
        ),
        "schema": { "type": "string", "minLength": 1, "maxLength": KEY_BYTES_MAX }
    });
    let precondition = json!({
        "name": "If-Match", "in": "header", "required": false,
        "description": "The change is carried out only if what it changes has this ETag: its resourceVersion in quotes, or `*` for \
                        any. Otherwise it is refused with 412, and the problem says which version there is.",
        "schema": { "type": "string", "pattern": "^(\\*|\"[0-9a-f]{16}\"(, *\"[0-9a-f]{16}\"){0,15})$" }
    });
    // A controller has no version.
    let versioned = operation.operation_id.as_deref() != Some("remove_controller");
    let described = [Some(dry_run), Some(key), versioned.then_some(precondition)]
        .into_iter()
        .flatten()
        .filter_map(|it| serde_json::from_value::<Parameter>(it).ok().map(RefOr::T));
    operation.parameters.get_or_insert_default().extend(described);
}

#[cfg(test)]
pub(super) mod tests;
