use axum::Json;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;

use super::Failure;
use super::body::{Body, Names, device_named};
use crate::api::{ChangeVolume, CreateVolume, Problem, Stripes, Volume, VolumeList};
use crate::controller::Handle;
use crate::state::Command;

/// All volumes.
#[utoipa::path(get, path = "/v1/volumes", operation_id = "list_volumes", tag = "volumes", responses((status = 200, body = VolumeList)))]
pub(super) async fn list(State(handle): State<Handle>) -> Json<VolumeList> {
    Json(VolumeList { volumes: handle.view().volumes() })
}

/// One volume.
#[utoipa::path(
    get, path = "/v1/volumes/{name}", operation_id = "get_volume", tag = "volumes",
    params(("name" = String, Path, description = "the volume's name")),
    responses((status = 200, body = Volume), (status = 404, body = Problem, content_type = "application/problem+json"))
)]
pub(super) async fn get(
    State(handle): State<Handle>,
    Names(name): Names<String>,
) -> Result<Json<Volume>, Failure> {
    handle.view().volume(&name).map(Json).ok_or_else(|| Failure::not_found("volume", &name))
}

/// Creates a volume: a contiguous range of an SSD, or of several SSDs of different hosts that mirror each other or have a
/// share each.
#[utoipa::path(
    post, path = "/v1/volumes", operation_id = "create_volume", tag = "volumes", request_body = CreateVolume,
    responses(
        (status = 201, body = Volume),
        (status = 400, description = "the request makes no sense", body = Problem, content_type = "application/problem+json"),
        (status = 404, description = "there is no such SSD", body = Problem, content_type = "application/problem+json"),
        (status = 409, description = "the name is taken, or there is no room", body = Problem, content_type = "application/problem+json"),
    )
)]
pub(super) async fn create(
    State(handle): State<Handle>,
    Body(request): Body<CreateVolume>,
) -> Result<impl IntoResponse, Failure> {
    let device = request.device.as_deref().map(|name| device_named(&handle, name)).transpose()?;
    let (name, size_bytes) = (request.name.clone(), request.size.get());
    let replicas = request.replicas;
    let command = match request.stripes {
        None => {
            Command::CreateVolume { name, size_bytes, device, replicas, minimum_iops: request.minimum_iops }
        }
        Some(_) if replicas != 1 || device.is_some() || request.minimum_iops.is_some() => {
            let detail = "a striped volume has no replicas, and its SSDs are chosen: leave out replicas and device, and reserve requests \
                 once it is there";
            return Err(Failure::new(StatusCode::BAD_REQUEST, "invalid-value", detail));
        }
        Some(Stripes { columns, size }) => {
            Command::CreateStriped { name, size_bytes, columns, stripe_bytes: size.get() }
        }
    };
    handle.submit(command).await?;
    let volume =
        handle.view().volume(&request.name).ok_or_else(|| Failure::not_found("volume", &request.name))?;
    Ok((StatusCode::CREATED, [(header::LOCATION, format!("/v1/volumes/{}", volume.name))], Json(volume)))
}

/// Changes a volume: it grows, or gets another share of its SSD. The guest sees its new size while it runs.
#[utoipa::path(
    patch, path = "/v1/volumes/{name}", operation_id = "change_volume", tag = "volumes", request_body = ChangeVolume,
    params(("name" = String, Path, description = "the volume's name")),
    responses(
        (status = 200, body = Volume),
        (status = 400, description = "the request makes no sense", body = Problem, content_type = "application/problem+json"),
        (status = 404, body = Problem, content_type = "application/problem+json"),
        (status = 409, description = "there is no room behind it", body = Problem, content_type = "application/problem+json"),
    )
)]
pub(super) async fn change(
    State(handle): State<Handle>,
    Names(name): Names<String>,
    Body(request): Body<ChangeVolume>,
) -> Result<Json<Volume>, Failure> {
    let (size_bytes, qos) = (request.size.map(crate::api::ByteSize::get), request.qos.map(Into::into));
    handle.submit(Command::ChangeVolume { name: name.clone(), size_bytes, qos }).await?;
    handle.view().volume(&name).map(Json).ok_or_else(|| Failure::not_found("volume", &name))
}

/// Deletes a volume and its data.
#[utoipa::path(
    delete, path = "/v1/volumes/{name}", operation_id = "delete_volume", tag = "volumes",
    params(("name" = String, Path, description = "the volume's name")),
    responses(
        (status = 204),
        (status = 404, body = Problem, content_type = "application/problem+json"),
        (status = 409, description = "an instance has leased it", body = Problem, content_type = "application/problem+json"),
    )
)]
pub(super) async fn delete(
    State(handle): State<Handle>,
    Names(name): Names<String>,
) -> Result<StatusCode, Failure> {
    handle.submit(Command::DeleteVolume { name }).await?;
    Ok(StatusCode::NO_CONTENT)
}
