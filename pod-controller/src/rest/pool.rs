use axum::Json;
use axum::extract::State;
use pod_api::Pool;

use crate::controller::Handle;

/// The pool and its regions.
#[utoipa::path(get, path = "/v1/pool", operation_id = "get_pool", tag = "pool", responses((status = 200, body = Pool)))]
pub(super) async fn get(State(handle): State<Handle>) -> Json<Pool> {
    Json(handle.view().pool())
}
