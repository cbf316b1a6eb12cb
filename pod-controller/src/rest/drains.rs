//! Devices and hosts that are to be empty.

use axum::http::StatusCode;
use cxl_pool::HostId;
use pod_api::Problem;
use pod_state::{Command, DeviceId};

use super::Failure;
use super::body::{DevicePath, Names, host_named};
use super::change::Change;
use crate::controller::Handle;

async fn drain(
    change: &Change,
    on: bool,
    find: impl FnOnce(&Handle) -> Result<(HostId, Option<String>), Failure>,
) -> Result<StatusCode, Failure> {
    let find = || {
        let (host, device) = find(&change.handle)?;
        Ok(Command::Drain { host, device, on })
    };
    change.submit_found(find).await?;
    Ok(StatusCode::NO_CONTENT)
}

fn device(handle: &Handle, path: &DevicePath) -> Result<(HostId, Option<String>), Failure> {
    let DeviceId { host, name } = path.find(handle)?;
    Ok((host, Some(name.to_string())))
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
    drain(&change, true, |handle| device(handle, &path)).await
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
    drain(&change, false, |handle| device(handle, &path)).await
}

/// All devices of a host are to be empty, also those that it gets later. Its instances stay: move them with their VMMs.
#[utoipa::path(
    put, path = "/v1/hosts/{name}/drain", operation_id = "drain_host", tag = "hosts",
    params(("name" = String, Path, description = "the host's name")),
    responses((status = 204), (status = 404, body = Problem, content_type = "application/problem+json"))
)]
pub(super) async fn begin_host(change: Change, Names(name): Names<String>) -> Result<StatusCode, Failure> {
    drain(&change, true, |handle| Ok((host_named(handle, &name)?, None))).await
}

/// The devices of a host may be used again.
#[utoipa::path(
    delete, path = "/v1/hosts/{name}/drain", operation_id = "undrain_host", tag = "hosts",
    params(("name" = String, Path, description = "the host's name")),
    responses((status = 204), (status = 404, body = Problem, content_type = "application/problem+json"))
)]
pub(super) async fn end_host(change: Change, Names(name): Names<String>) -> Result<StatusCode, Failure> {
    drain(&change, false, |handle| Ok((host_named(handle, &name)?, None))).await
}
