//! What daemons measure only whoever leads knows. One of several controllers that does not lead asks it, for whoever asks here.

use std::io::{Read as _, Write as _};
use std::sync::{Arc, OnceLock};

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::{Request, State};
use axum::http::{HeaderName, HeaderValue, Method, StatusCode, Uri, header};
use axum::middleware::Next;
use axum::response::Response;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use flate2::Compression;
use flate2::read::DeflateDecoder;
use flate2::write::DeflateEncoder;
use hyper::service::Service;
use hyper_util::service::TowerToHyperService;
use serde::{Deserialize, Serialize};
use tokio::sync::Semaphore;
use utoipa::openapi::header::Header;
use utoipa::openapi::{OpenApi, RefOr};

use crate::controller::Handle;

/// What is longer, once it is packed, is not sent from one controller to another: between its parts nothing of Raft comes through. Lists
/// and metrics are packed to a tenth and less.
const PACKED_BYTES_MAX: usize = 4 << 20;
/// More than the metrics of a hundred thousand instances.
const BODY_BYTES_MAX: usize = 256 << 20;
/// What the answer says besides its body.
const HEADERS: [HeaderName; 2] = [header::CONTENT_TYPE, header::ETAG];
/// Says in an answer that what daemons measure is missing in it, and why.
const UNMEASURED: HeaderName = HeaderName::from_static(pod_api::UNMEASURED);

/// What whoever leads answers to a look.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Seen {
    status: u16,
    headers: Vec<(String, String)>,
    /// The body, deflated, in base64.
    packed: String,
}

impl Seen {
    fn new(status: StatusCode, headers: Vec<(String, String)>, body: &[u8]) -> Option<Self> {
        // The fastest way: it packs to a twentieth what the best one packs to a thirtieth.
        let mut encoder = DeflateEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(body).ok()?;
        let packed = STANDARD.encode(encoder.finish().ok()?);
        (packed.len() <= PACKED_BYTES_MAX).then(|| Self { status: status.as_u16(), headers, packed })
    }

    fn body(&self) -> Option<Vec<u8>> {
        let mut body = Vec::new();
        let packed = STANDARD.decode(&self.packed).ok()?;
        // However little was sent, it takes no more memory than any answer may.
        let most = u64::try_from(BODY_BYTES_MAX).ok()? + 1;
        DeflateDecoder::new(packed.as_slice()).take(most).read_to_end(&mut body).ok()?;
        (body.len() <= BODY_BYTES_MAX).then_some(body)
    }

    fn into_response(self) -> Option<Response> {
        let mut response = Response::new(Body::from(self.body()?));
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
    let body = to_bytes(body, BODY_BYTES_MAX).await.ok()?;
    Seen::new(head.status, headers, &body)
}

/// Whether the answer depends on what daemons measure.
fn is_measured(uri: &Uri) -> bool {
    let path: Vec<&str> = uri.path().split('/').skip(1).collect();
    match path.as_slice() {
        ["v1", "balance" | "devices" | "fabric" | "hosts" | "mchannels" | "volumes", ..]
        | ["v1", "instances", _, "explanation"] => true,
        ["metrics"] => uri.query().is_some_and(|query| query.split('&').any(|it| it == "leader=true")),
        _ => false,
    }
}

/// Asks whoever leads for what is measured. Where nobody answers for it, what is known here has to do, and the answer says what is
/// missing in it.
pub(super) async fn of_leader(State(handle): State<Handle>, request: Request, next: Next) -> Response {
    if request.method() != Method::GET || !is_measured(request.uri()) {
        return next.run(request).await;
    }
    let path = request.uri().path_and_query().map_or("", |path| path.as_str());
    // It unpacks what may be long, beside what others are answered.
    if let Some(seen) = handle.look_at_leader(path).await
        && let Ok(Some(response)) = tokio::task::spawn_blocking(|| seen.into_response()).await
    {
        return response;
    }
    let missing = handle.measures_nothing();
    let mut response = next.run(request).await;
    if let Some(Ok(why)) = missing.map(HeaderValue::try_from) {
        response.headers_mut().insert(UNMEASURED, why);
    }
    response
}

/// Says of what is measured that it may be missing.
pub(super) fn describe(description: &mut OpenApi) {
    for (path, item) in &mut description.paths.paths {
        let is_measured = path == "/metrics" || path.parse().is_ok_and(|uri| is_measured(&uri));
        let Some(operation) = item.get.as_mut().filter(|_| is_measured) else { continue };
        if let Some(RefOr::T(response)) = operation.responses.responses.get_mut("200") {
            let mut header = Header::default();
            header.description = Some(
                "There where what daemons measure is missing: which controller knows it. Only whoever leads hears daemons, and \
                 did not answer in time."
                    .to_owned(),
            );
            response.headers.insert(pod_api::UNMEASURED.to_owned(), RefOr::T(header));
        }
    }
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
            assert_eq!((seen.status, seen.body().expect("text")), (200, b"0 true".to_vec()));
        }
    }

    #[test]
    fn what_is_long_is_sent_packed_or_not_at_all() {
        let line = |lease: u32| {
            format!(
                "wadi_lease_bytes_total{{instance=\"vm{lease}\",direction=\"receive\"}} {}\n",
                lease * 7919
            )
        };
        let metrics: String = (0..200_000).map(line).collect();
        assert!(metrics.len() > 2 * PACKED_BYTES_MAX);
        let seen = Seen::new(StatusCode::OK, Vec::new(), metrics.as_bytes()).expect("it can be packed");
        assert!(seen.body().expect("what was packed") == metrics.as_bytes());
        let mut random = cxl_pool::simulated::Random::new(1);
        let noise: Vec<u8> = (0..PACKED_BYTES_MAX).map(|_| random.bits().to_le_bytes()[0]).collect();
        assert!(Seen::new(StatusCode::OK, Vec::new(), &noise).is_none());
        // Zeroes are packed to next to nothing: whoever sends that has nobody fill his memory.
        let zeroes = vec![0; BODY_BYTES_MAX + 1];
        let bomb = Seen::new(StatusCode::OK, Vec::new(), &zeroes).expect("it is short");
        assert_eq!(bomb.body(), None);
        for broken in ["", "?", "AAAA"] {
            let seen = Seen { status: 200, headers: Vec::new(), packed: broken.to_owned() };
            assert_eq!(seen.body(), None, "{broken}");
        }
    }

    #[test]
    fn what_is_measured_is_asked_for_elsewhere_and_nothing_else() {
        for (path, is) in [
            ("/v1/balance", true),
            ("/v1/devices?host=h1", true),
            ("/v1/volumes/vol0", true),
            ("/v1/fabric", true),
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
