use std::time::Instant;

use axum::Json;
use axum::extract::State;

use super::Failure;
use super::body::Names;
use crate::api::{Host, HostList, Problem};
use crate::controller::Handle;

/// All hosts that have ever joined.
#[utoipa::path(get, path = "/v1/hosts", operation_id = "list_hosts", tag = "hosts", responses((status = 200, body = HostList)))]
pub(super) async fn list(State(handle): State<Handle>) -> Json<HostList> {
    Json(HostList { hosts: handle.view().hosts(&handle.telemetry(), Instant::now()) })
}

/// One host.
#[utoipa::path(
    get, path = "/v1/hosts/{name}", operation_id = "get_host", tag = "hosts",
    params(("name" = String, Path, description = "the host's name")),
    responses((status = 200, body = Host), (status = 404, body = Problem, content_type = "application/problem+json"))
)]
pub(super) async fn get(
    State(handle): State<Handle>,
    Names(name): Names<String>,
) -> Result<Json<Host>, Failure> {
    let host = handle.view().host(&name, &handle.telemetry(), Instant::now());
    host.map(Json).ok_or_else(|| Failure::not_found("host", &name))
}
