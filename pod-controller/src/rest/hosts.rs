use std::time::Instant;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;

use super::Failure;
use super::body::Names;
use crate::api::{Host, HostList, Problem};
use crate::controller::Handle;
use crate::state::Command;

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

/// Says that a host is known to have been reset or taken away, so that nothing of it is left in a cache or a device:
/// frees what waits for it.
#[utoipa::path(
    post, path = "/v1/hosts/{name}/reset", operation_id = "reset_host", tag = "hosts",
    params(("name" = String, Path, description = "the host's name")),
    responses(
        (status = 204),
        (status = 404, body = Problem, content_type = "application/problem+json"),
        (status = 409, description = "one of its daemons beats", body = Problem, content_type = "application/problem+json"),
    )
)]
pub(super) async fn reset(
    State(handle): State<Handle>,
    Names(name): Names<String>,
) -> Result<StatusCode, Failure> {
    handle.submit(Command::ResetHost { name }).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Deletes a host that is gone for good.
#[utoipa::path(
    delete, path = "/v1/hosts/{name}", operation_id = "delete_host", tag = "hosts",
    params(("name" = String, Path, description = "the host's name")),
    responses(
        (status = 204),
        (status = 404, body = Problem, content_type = "application/problem+json"),
        (status = 409, description = "it beats, it was not reset, or something depends on it", body = Problem, content_type = "application/problem+json"),
    )
)]
pub(super) async fn delete(
    State(handle): State<Handle>,
    Names(name): Names<String>,
) -> Result<StatusCode, Failure> {
    handle.submit(Command::DeleteHost { name }).await?;
    Ok(StatusCode::NO_CONTENT)
}
