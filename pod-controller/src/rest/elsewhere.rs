//! What daemons measure only whoever leads knows. One of several controllers that does not lead asks it, for whoever asks here.

use std::sync::{Arc, OnceLock};

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::{Request, State};
use axum::http::{HeaderName, HeaderValue, Method, StatusCode, Uri, header};
use axum::middleware::Next;
use axum::response::Response;
use hyper::service::Service;
use hyper_util::service::TowerToHyperService;
use serde::{Deserialize, Serialize};
use tokio::sync::Semaphore;

use crate::controller::Handle;

/// What is longer is not sent from one controller to another: between its parts nothing of Raft comes through.
const BODY_BYTES_MAX: usize = 4 << 20;
/// What the answer says besides its body.
const HEADERS: [HeaderName; 2] = [header::CONTENT_TYPE, header::ETAG];

/// What whoever leads answers to a look.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Seen {
    status: u16,
    headers: Vec<(String, String)>,
    body: String,
}

impl Seen {
    fn into_response(self) -> Option<Response> {
        let mut response = Response::new(Body::from(self.body));
        *response.status_mut() = StatusCode::from_u16(self.status).ok()?;
        for (name, value) in self.headers {
            let (name, value) = (name.parse::<HeaderName>().ok()?, value.parse::<HeaderValue>().ok()?);
            response.headers_mut().insert(name, value);
        }
        Some(response)
    }
}

/// Answers other controllers that ask whoever leads.
///
/// In a large pod such an answer takes longer than followers wait for whoever leads. So it is made on a thread of its own, beside those that do Raft's work, and
/// one at a time, however many ask.
#[derive(Clone, Debug)]
pub(crate) struct Looks {
    router: Arc<OnceLock<Router>>,
    turn: Arc<Semaphore>,
}

impl Default for Looks {
    fn default() -> Self {
        Self { router: Arc::default(), turn: Arc::new(Semaphore::new(1)) }
    }
}

impl Looks {
    /// The answer to a `GET` of this path; none where there is no such thing, or too much of it.
    pub(crate) async fn answer(&self, handle: &Handle, path: &str) -> Option<Seen> {
        let uri: Uri = path.parse().ok()?;
        if !is_measured(&uri) {
            return None;
        }
        let router = self.router.get_or_init(|| super::router_here(handle.clone())).clone();
        self.take_turn(router, uri).await
    }

    async fn take_turn(&self, router: Router, uri: Uri) -> Option<Seen> {
        let _turn = self.turn.acquire().await.ok()?;
        let runtime = tokio::runtime::Handle::current();
        tokio::task::spawn_blocking(move || runtime.block_on(look(router, uri))).await.ok()?
    }
}

async fn look(router: Router, uri: Uri) -> Option<Seen> {
    let request = Request::builder().uri(uri).body(Body::empty()).ok()?;
    let Ok(response) = TowerToHyperService::new(router).call(request).await;
    let (head, body) = response.into_parts();
    let text =
        |name: &HeaderName| Some((name.to_string(), head.headers.get(name)?.to_str().ok()?.to_owned()));
    let headers = HEADERS.iter().filter_map(text).collect();
    let body = String::from_utf8(to_bytes(body, BODY_BYTES_MAX).await.ok()?.into()).ok()?;
    Some(Seen { status: head.status.as_u16(), headers, body })
}

/// Whether the answer depends on what daemons measure.
fn is_measured(uri: &Uri) -> bool {
    let path: Vec<&str> = uri.path().split('/').skip(1).collect();
    match path.as_slice() {
        ["v1", "balance" | "devices" | "hosts" | "mchannels" | "volumes", ..]
        | ["v1", "instances", _, "explanation"] => true,
        ["metrics"] => uri.query().is_some_and(|query| query.split('&').any(|it| it == "leader=true")),
        _ => false,
    }
}

/// Asks whoever leads for what is measured. Where nobody answers for it, what is known here has to do.
pub(super) async fn of_leader(State(handle): State<Handle>, request: Request, next: Next) -> Response {
    if request.method() == Method::GET && is_measured(request.uri()) {
        let path = request.uri().path_and_query().map_or("", |path| path.as_str());
        if let Some(response) = handle.look_at_leader(path).await.and_then(Seen::into_response) {
            return response;
        }
    }
    next.run(request).await
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Mutex, mpsc};
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn looks_are_made_one_by_one_and_others_go_on_meanwhile() {
        static AT_ONCE: AtomicUsize = AtomicUsize::new(0);
        let (begins, mut begun) = tokio::sync::mpsc::unbounded_channel();
        let (ends, until) = mpsc::channel();
        let until = Arc::new(Mutex::new(until));
        // Its thread does nothing else until somebody else says that it may end.
        let look = move || {
            let (begins, until) = (begins.clone(), Arc::clone(&until));
            async move {
                let before = AT_ONCE.fetch_add(1, Ordering::SeqCst);
                begins.send(()).expect("somebody waits");
                let ended = until.lock().expect("no panic").recv_timeout(Duration::from_secs(20));
                AT_ONCE.fetch_sub(1, Ordering::SeqCst);
                format!("{before} {}", ended.is_ok())
            }
        };
        let router = Router::new().route("/v1/hosts", axum::routing::get(look));
        let (looks, uri) = (Looks::default(), Uri::from_static("/v1/hosts"));
        let asked: Vec<_> = (0..3)
            .map(|_| {
                let (looks, router, uri) = (looks.clone(), router.clone(), uri.clone());
                tokio::spawn(async move { looks.take_turn(router, uri).await })
            })
            .collect();
        for _ in &asked {
            begun.recv().await.expect("a look");
            ends.send(()).expect("it waits");
        }
        for answer in asked {
            let seen = answer.await.expect("no panic").expect("an answer");
            assert_eq!((seen.status, seen.body.as_str()), (200, "0 true"));
        }
    }

    #[test]
    fn what_is_measured_is_asked_for_elsewhere_and_nothing_else() {
        for (path, is) in [
            ("/v1/balance", true),
            ("/v1/devices?host=h1", true),
            ("/v1/volumes/vol0", true),
            ("/v1/instances/vm1/explanation", true),
            ("/metrics?leader=true", true),
            ("/metrics?x=1&leader=true", true),
            ("/metrics", false),
            ("/metrics?leader=false", false),
            ("/v1/instances", false),
            ("/v1/instances/vm1", false),
            ("/v1/events", false),
            ("/v1/controllers", false),
            ("/", false),
        ] {
            assert_eq!(is_measured(&path.parse().expect(path)), is, "{path}");
        }
    }
}
