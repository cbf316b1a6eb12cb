//! Kinds of instances.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use pod_api::{InstanceType, InstanceTypeList, InstanceTypeSpec, Problem};
use pod_state::{self as state, Command};
use serde::Deserialize;
use utoipa::IntoParams;

use super::Failure;
use super::body::{Asked, Names};
use super::change::Change;
use super::list::{Page, Selector};
use super::priorities::priority_of;
use super::version::{Shown, Versioned};
use crate::controller::Handle;

/// Which instance types.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(super) struct ListQuery {
    /// Only those with these labels: `name=value`, or several with commas between them.
    label: Option<String>,
    /// At most this many, 1 to 10000; all unless given.
    limit: Option<usize>,
    /// Go on after the page that said this.
    r#continue: Option<String>,
}

/// All instance types, by name.
#[utoipa::path(
    get, path = "/v1/instance-types", operation_id = "list_instance_types", tag = "instances", params(ListQuery),
    responses((status = 200, body = InstanceTypeList), (status = 400, body = Problem, content_type = "application/problem+json"))
)]
pub(super) async fn list(
    State(handle): State<Handle>,
    Asked(query): Asked<ListQuery>,
) -> Result<Json<InstanceTypeList>, Failure> {
    let labels = Selector::parse(query.label.as_deref())?;
    let view = handle.view();
    let page = Page { limit: query.limit, token: query.r#continue.as_deref() };
    let mut types = view.instance_types();
    types.retain(|it| labels.matches(&it.spec.labels));
    let (types, next) = page.of(types, |it| it.name.clone())?;
    Ok(Json(InstanceTypeList { types, resource_version: view.version(), next }))
}

/// One instance type.
#[utoipa::path(
    get, path = "/v1/instance-types/{name}", operation_id = "get_instance_type", tag = "instances",
    params(("name" = String, Path, description = "the instance type's name")),
    responses((status = 200, body = InstanceType), (status = 404, body = Problem, content_type = "application/problem+json"))
)]
pub(super) async fn get(
    State(handle): State<Handle>,
    Names(name): Names<String>,
) -> Result<Shown<InstanceType>, Failure> {
    handle.view().instance_type(&name).map(Shown).ok_or_else(|| Failure::not_found("instance type", &name))
}

/// Describes an instance type, as a whole; it may be known already. Instances that are there stay as they are.
#[utoipa::path(
    put, path = "/v1/instance-types/{name}", operation_id = "set_instance_type", tag = "instances",
    params(("name" = String, Path, description = "the instance type's name")), request_body = InstanceTypeSpec,
    responses(
        (status = 204),
        (status = 400, description = "the description makes no sense", body = Problem, content_type = "application/problem+json"),
        (status = 404, description = "there is none to be changed, as If-Match asks", body = Problem, content_type = "application/problem+json"),
        (status = 409, description = "there are too many", body = Problem, content_type = "application/problem+json"),
    )
)]
pub(super) async fn set(
    change: Change,
    Names(name): Names<String>,
    Versioned(spec, version): Versioned<InstanceTypeSpec>,
) -> Result<StatusCode, Failure> {
    let InstanceTypeSpec { nics, reserved_mbps, queue_pairs, volume_iops, priority, labels } = spec;
    let priority = priority.map(priority_of).transpose()?;
    let instance_type =
        state::InstanceType { nics, reserved_mbps, queue_pairs, volume_iops, priority, labels };
    change.submit_at(version, Command::SetInstanceType { name, instance_type }).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Deletes an instance type. Instances that were made of it stay as they are.
#[utoipa::path(
    delete, path = "/v1/instance-types/{name}", operation_id = "delete_instance_type", tag = "instances",
    params(("name" = String, Path, description = "the instance type's name")),
    responses((status = 204), (status = 404, body = Problem, content_type = "application/problem+json"))
)]
pub(super) async fn delete(change: Change, Names(name): Names<String>) -> Result<StatusCode, Failure> {
    change.submit(Command::DeleteInstanceType { name }).await?;
    Ok(StatusCode::NO_CONTENT)
}
