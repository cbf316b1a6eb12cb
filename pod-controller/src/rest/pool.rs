use axum::Json;
use axum::extract::State;
use pod_api::{Pool, Problem, RegionState};
use serde::Deserialize;
use utoipa::IntoParams;

use super::Failure;
use super::body::Asked;
use super::list::{Page, is};
use crate::controller::Handle;
use crate::view::{purpose, region_state};

/// Which regions.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(super) struct PoolQuery {
    /// Only regions that are in this state.
    state: Option<RegionState>,
    /// Only regions for this: `rings`, `transmit`, `receive`, `data`, `ram`, `board` or `none`.
    purpose: Option<String>,
    /// At most this many, 1 to 10000; all unless given.
    limit: Option<usize>,
    /// Go on after the page that said this.
    r#continue: Option<String>,
}

/// The pool and its regions.
#[utoipa::path(
    get, path = "/v1/pool", operation_id = "get_pool", tag = "pool", params(PoolQuery),
    responses((status = 200, body = Pool), (status = 400, body = Problem, content_type = "application/problem+json"))
)]
pub(super) async fn get(
    State(handle): State<Handle>,
    Asked(query): Asked<PoolQuery>,
) -> Result<Json<Pool>, Failure> {
    let page = Page { limit: query.limit, token: query.r#continue.as_deref() };
    let view = handle.view();
    let wanted = view.state.regions.by_place().filter(|region| {
        query.state.is_none_or(|state| state == region_state(region.usage))
            && is(query.purpose.as_ref(), purpose(&region.purpose))
    });
    // There may be a million of them: only those of the page are shown.
    let (wanted, next) = page.of(wanted.collect(), |region| format!("{:016x}", region.area.start.get()))?;
    let regions = wanted.into_iter().map(|region| view.region(region)).collect();
    Ok(Json(Pool { regions, next, ..view.pool() }))
}
