//! Devices and hosts that are to be empty.

use axum::http::StatusCode;
use cxl_pool::HostId;
use pod_api::Problem;
use pod_state::Command;

use super::Failure;
use super::body::{DevicePath, Names, host_named};
use super::change::Change;

async fn drain(
    change: &Change,
    host: HostId,
    device: Option<String>,
    on: bool,
) -> Result<StatusCode, Failure> {
    change.submit(Command::Drain { host, device, on }).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// A device is to be empty: nothing new is placed on it, and what is there moves elsewhere in order, as far as there is
/// somewhere to go. It is empty when it has no leases and no volumes.
#[utoipa::path(
    put, path = "/v1/devices/{host}/{name}/drain", operation_id = "drain_device", tag = "devices",
    params(DevicePath),
    responses((status = 204), (status = 404, body = Problem, content_type = "application/problem+json"))
)]
pub(super) async fn begin_device(
    change: Change,
    Names(path): Names<DevicePath>,
) -> Result<StatusCode, Failure> {
    let device = path.find(&change.handle)?;
    drain(&change, device.host, Some(device.name.to_string()), true).await
}

/// A device may be used again.
#[utoipa::path(
    delete, path = "/v1/devices/{host}/{name}/drain", operation_id = "undrain_device", tag = "devices",
    params(DevicePath),
    responses((status = 204), (status = 404, body = Problem, content_type = "application/problem+json"))
)]
pub(super) async fn end_device(
    change: Change,
    Names(path): Names<DevicePath>,
) -> Result<StatusCode, Failure> {
    let device = path.find(&change.handle)?;
    drain(&change, device.host, Some(device.name.to_string()), false).await
}

/// All devices of a host are to be empty, also those that it gets later. Its instances stay: move them with their VMMs.
#[utoipa::path(
    put, path = "/v1/hosts/{name}/drain", operation_id = "drain_host", tag = "hosts",
    params(("name" = String, Path, description = "the host's name")),
    responses((status = 204), (status = 404, body = Problem, content_type = "application/problem+json"))
)]
pub(super) async fn begin_host(change: Change, Names(name): Names<String>) -> Result<StatusCode, Failure> {
    drain(&change, host_named(&change.handle, &name)?, None, true).await
}

/// The devices of a host may be used again.
#[utoipa::path(
    delete, path = "/v1/hosts/{name}/drain", operation_id = "undrain_host", tag = "hosts",
    params(("name" = String, Path, description = "the host's name")),
    responses((status = 204), (status = 404, body = Problem, content_type = "application/problem+json"))
)]
pub(super) async fn end_host(change: Change, Names(name): Names<String>) -> Result<StatusCode, Failure> {
    drain(&change, host_named(&change.handle, &name)?, None, false).await
}
