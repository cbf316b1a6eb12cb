//! Kinds of instances.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;

use super::Failure;
use super::body::{Body, Names};
use crate::api::{InstanceType, InstanceTypeList, InstanceTypeSpec, Problem};
use crate::controller::Handle;
use crate::state::{self, Command};

/// All instance types.
#[utoipa::path(get, path = "/v1/instance-types", operation_id = "list_instance_types", tag = "instances", responses((status = 200, body = InstanceTypeList)))]
pub(super) async fn list(State(handle): State<Handle>) -> Json<InstanceTypeList> {
    Json(InstanceTypeList { types: handle.view().instance_types() })
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
) -> Result<Json<InstanceType>, Failure> {
    handle.view().instance_type(&name).map(Json).ok_or_else(|| Failure::not_found("instance type", &name))
}

/// Describes an instance type, as a whole; it may be known already. Instances that are there stay as they are.
#[utoipa::path(
    put, path = "/v1/instance-types/{name}", operation_id = "set_instance_type", tag = "instances",
    params(("name" = String, Path, description = "the instance type's name")), request_body = InstanceTypeSpec,
    responses(
        (status = 204),
        (status = 400, description = "the description makes no sense", body = Problem, content_type = "application/problem+json"),
        (status = 409, description = "there are too many", body = Problem, content_type = "application/problem+json"),
    )
)]
pub(super) async fn set(
    State(handle): State<Handle>,
    Names(name): Names<String>,
    Body(spec): Body<InstanceTypeSpec>,
) -> Result<StatusCode, Failure> {
    let InstanceTypeSpec { nics, reserved_mbps, queue_pairs, volume_iops } = spec;
    let instance_type = state::InstanceType { nics, reserved_mbps, queue_pairs, volume_iops };
    handle.submit(Command::SetInstanceType { name, instance_type }).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Deletes an instance type. Instances that were made of it stay as they are.
#[utoipa::path(
    delete, path = "/v1/instance-types/{name}", operation_id = "delete_instance_type", tag = "instances",
    params(("name" = String, Path, description = "the instance type's name")),
    responses((status = 204), (status = 404, body = Problem, content_type = "application/problem+json"))
)]
pub(super) async fn delete(
    State(handle): State<Handle>,
    Names(name): Names<String>,
) -> Result<StatusCode, Failure> {
    handle.submit(Command::DeleteInstanceType { name }).await?;
    Ok(StatusCode::NO_CONTENT)
}
