use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::IntoResponse;
use pod_api::Problem;

use super::Failure;
use crate::controller::{Handle, SubmitError};
use crate::metrics;

/// Whether the process lives.
#[utoipa::path(get, path = "/healthz", operation_id = "healthz", tag = "health", responses((status = 200, body = String, content_type = "text/plain")))]
pub(super) async fn healthz() -> &'static str {
    "ok\n"
}

/// Whether the controller serves: it has its state and its pool, its thread runs, and what is changed can be kept: one of several
/// controllers leads (`no-leader`), and etcd answers (`store-away`), where there are such.
#[utoipa::path(
    get, path = "/readyz", operation_id = "readyz", tag = "health",
    responses(
        (status = 200, body = String, content_type = "text/plain"),
        (status = 503, body = Problem, content_type = "application/problem+json"),
    )
)]
pub(super) async fn readyz(State(handle): State<Handle>) -> Result<&'static str, Failure> {
    if !handle.is_running() {
        return Err(Failure::new(StatusCode::SERVICE_UNAVAILABLE, "stopping", "the controller is stopping"));
    }
    if !handle.is_store_available() {
        let detail = "etcd does not answer: what there is is shown, and nothing can be changed";
        return Err(SubmitError::StoreAway(detail.to_owned()).into());
    }
    if handle.office().has_leader { Ok("ready\n") } else { Err(SubmitError::NoLeader.into()) }
}

/// Metrics for Prometheus: as OpenMetrics for who accepts that, as Prometheus itself does; in Prometheus' older format otherwise.
#[utoipa::path(
    get, path = "/metrics", operation_id = "metrics", tag = "health",
    responses((status = 200, content((String = "text/plain"), (String = "application/openmetrics-text"))))
)]
pub(super) async fn metrics(State(handle): State<Handle>, headers: HeaderMap) -> impl IntoResponse {
    let accepted = headers.get_all(header::ACCEPT).iter().filter_map(|accepted| accepted.to_str().ok());
    let open = accepted.into_iter().any(|accepted| accepted.contains("application/openmetrics-text"));
    let (content_type, text) = if open {
        ("application/openmetrics-text; version=1.0.0; charset=utf-8", metrics::text(&handle))
    } else {
        ("text/plain; version=0.0.4; charset=utf-8", metrics::plain_text(&handle))
    };
    ([(header::CONTENT_TYPE, content_type), (header::VARY, "accept")], text)
}
