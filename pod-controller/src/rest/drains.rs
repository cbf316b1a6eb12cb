//! Devices and hosts that are to be empty.

use axum::extract::State;
use axum::http::StatusCode;

use super::Failure;
use super::body::Names;
use super::nics::device;
use crate::api::Problem;
use crate::controller::Handle;
use crate::state::Command;

async fn drain_device(handle: &Handle, host: &str, name: &str, on: bool) -> Result<StatusCode, Failure> {
    let id = device(handle, host, name)?;
    handle.submit(Command::Drain { host: id.host, device: Some(id.name), on }).await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn drain_host(handle: &Handle, name: &str, on: bool) -> Result<StatusCode, Failure> {
    let host = handle.view().state.host_named(name).ok_or_else(|| Failure::not_found("host", name))?;
    handle.submit(Command::Drain { host, device: None, on }).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// A device is to be empty: nothing new is placed on it, and what is there moves elsewhere in order, as far as there is
/// somewhere to go. It is empty when it has no leases and no volumes.
#[utoipa::path(
    put, path = "/v1/devices/{host}/{name}/drain", operation_id = "drain_device", tag = "devices",
    params(
        ("host" = String, Path, description = "the name of the host that owns it"),
        ("name" = String, Path, description = "its name on that host"),
    ),
    responses((status = 204), (status = 404, body = Problem, content_type = "application/problem+json"))
)]
pub(super) async fn begin_device(
    State(handle): State<Handle>,
    Names((host, name)): Names<(String, String)>,
) -> Result<StatusCode, Failure> {
    drain_device(&handle, &host, &name, true).await
}

/// A device may be used again.
#[utoipa::path(
    delete, path = "/v1/devices/{host}/{name}/drain", operation_id = "undrain_device", tag = "devices",
    params(
        ("host" = String, Path, description = "the name of the host that owns it"),
        ("name" = String, Path, description = "its name on that host"),
    ),
    responses((status = 204), (status = 404, body = Problem, content_type = "application/problem+json"))
)]
pub(super) async fn end_device(
    State(handle): State<Handle>,
    Names((host, name)): Names<(String, String)>,
) -> Result<StatusCode, Failure> {
    drain_device(&handle, &host, &name, false).await
}

/// All devices of a host are to be empty, also those that it gets later. Its instances stay: move them with their VMMs.
#[utoipa::path(
    put, path = "/v1/hosts/{name}/drain", operation_id = "drain_host", tag = "hosts",
    params(("name" = String, Path, description = "the host's name")),
    responses((status = 204), (status = 404, body = Problem, content_type = "application/problem+json"))
)]
pub(super) async fn begin_host(
    State(handle): State<Handle>,
    Names(name): Names<String>,
) -> Result<StatusCode, Failure> {
    drain_host(&handle, &name, true).await
}

/// The devices of a host may be used again.
#[utoipa::path(
    delete, path = "/v1/hosts/{name}/drain", operation_id = "undrain_host", tag = "hosts",
    params(("name" = String, Path, description = "the host's name")),
    responses((status = 204), (status = 404, body = Problem, content_type = "application/problem+json"))
)]
pub(super) async fn end_host(
    State(handle): State<Handle>,
    Names(name): Names<String>,
) -> Result<StatusCode, Failure> {
    drain_host(&handle, &name, false).await
}
