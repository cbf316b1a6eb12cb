use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::IntoResponse;
use pod_api::Problem;
use serde::Deserialize;
use utoipa::IntoParams;

use super::Failure;
use super::body::Asked;
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
    if let Some(why) = handle.store_away() {
        return Err(SubmitError::StoreAway(why).into());
    }
    if handle.office().has_leader { Ok("ready\n") } else { Err(SubmitError::NoLeader.into()) }
}

/// How metrics are asked for.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(super) struct MetricsQuery {
    /// Those of the controller that leads, whichever replica is asked, as far as it answers: what daemons count only that one knows.
    #[serde(default)]
    leader: bool,
}

/// Metrics for Prometheus: as OpenMetrics for who accepts that, as Prometheus itself does; in Prometheus' older format otherwise.
#[utoipa::path(
    get, path = "/metrics", operation_id = "metrics", tag = "health", params(MetricsQuery),
    responses(
        (status = 200, content((String = "text/plain"), (String = "application/openmetrics-text"))),
        (status = 400, body = Problem, content_type = "application/problem+json"),
    )
)]
pub(super) async fn metrics(
    State(handle): State<Handle>,
    // Whom it concerns was asked before.
    Asked(MetricsQuery { leader: _leader }): Asked<MetricsQuery>,
    headers: HeaderMap,
) -> impl IntoResponse {
    let accepted = headers.get_all(header::ACCEPT).iter().filter_map(|accepted| accepted.to_str().ok());
    let open = accepted.into_iter().any(|accepted| accepted.contains("application/openmetrics-text"));
    let (content_type, text) = if open {
        ("application/openmetrics-text; version=1.0.0; charset=utf-8", metrics::text(&handle))
    } else {
        ("text/plain; version=0.0.4; charset=utf-8", metrics::plain_text(&handle))
    };
    ([(header::CONTENT_TYPE, content_type), (header::VARY, "accept")], text)
}
