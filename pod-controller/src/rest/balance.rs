use axum::Json;
use axum::extract::State;
use pod_api::Balance;

use crate::controller::Handle;

/// What passes through NICs and what SSDs do, and which leases and volumes would move off those that carry too much: a dry run of the
/// balancer.
#[utoipa::path(get, path = "/v1/balance", operation_id = "get_balance", tag = "devices", responses((status = 200, body = Balance)))]
pub(super) async fn get(State(handle): State<Handle>) -> Json<Balance> {
    Json(Balance { unknown_here: handle.measures_nothing(), ..handle.view().balance(&handle.load()) })
}
