//! The controllers themselves.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use pod_api::{ControllerList, Problem};

use super::Failure;
use super::body::Names;
use super::change::Change;
use crate::controller::Handle;

/// The controllers of the pod, and which of them leads. There is one unless it is replicated.
#[utoipa::path(get, path = "/v1/controllers", operation_id = "list_controllers", tag = "controllers", responses((status = 200, body = ControllerList)))]
pub(super) async fn list(State(handle): State<Handle>) -> Json<ControllerList> {
    Json(ControllerList { controllers: handle.controllers() })
}

/// A controller replica is a member no longer: the others do not count on it. Stop it first; started again, it becomes a
/// member again. It is refused while without it no majority would be left that answers. A controller has no `resourceVersion`:
/// a request with `If-Match` is refused with 400.
#[utoipa::path(
    delete, path = "/v1/controllers/{replica}", operation_id = "remove_controller", tag = "controllers",
    params(("replica" = u16, Path, description = "its number")),
    responses(
        (status = 204),
        (status = 400, description = "it makes no sense, or has an If-Match", body = Problem, content_type = "application/problem+json"),
        (status = 404, body = Problem, content_type = "application/problem+json"),
        (status = 409, description = "it is the only one, or too few of the others answer", body = Problem, content_type = "application/problem+json"),
    )
)]
pub(super) async fn remove(change: Change, Names(replica): Names<u16>) -> Result<StatusCode, Failure> {
    change.without_version("a controller")?;
    let allowed = change.handle.try_removing_controller(replica);
    if change.is_dry_run {
        allowed.await?;
    } else {
        change.once(allowed, change.handle.remove_controller(replica)).await?;
    }
    Ok(StatusCode::NO_CONTENT)
}
