use axum::Json;
use axum::extract::State;

use super::Failure;
use super::body::{DevicePath, Names};
use crate::api::{Device, DeviceList, Problem};
use crate::controller::Handle;
use crate::state::Command;

/// All devices.
#[utoipa::path(get, path = "/v1/devices", operation_id = "list_devices", tag = "devices", responses((status = 200, body = DeviceList)))]
pub(super) async fn list(State(handle): State<Handle>) -> Json<DeviceList> {
    Json(DeviceList { devices: handle.view().devices(&handle.telemetry()) })
}

/// One device.
#[utoipa::path(
    get, path = "/v1/devices/{host}/{name}", operation_id = "get_device", tag = "devices",
    params(DevicePath),
    responses((status = 200, body = Device), (status = 404, body = Problem, content_type = "application/problem+json"))
)]
pub(super) async fn get(
    State(handle): State<Handle>,
    Names(path): Names<DevicePath>,
) -> Result<Json<Device>, Failure> {
    let name = path.shown();
    let device = handle.view().device(&name, &handle.telemetry());
    device.map(Json).ok_or_else(|| Failure::not_found("device", &name))
}

/// Takes over the volumes that were found on an SSD, such as those of a controller whose state is lost.
#[utoipa::path(
    post, path = "/v1/devices/{host}/{name}/adopt", operation_id = "adopt_volumes", tag = "devices",
    params(DevicePath),
    responses(
        (status = 200, body = Device),
        (status = 404, body = Problem, content_type = "application/problem+json"),
        (status = 409, description = "a name is taken", body = Problem, content_type = "application/problem+json"),
    )
)]
pub(super) async fn adopt(
    State(handle): State<Handle>,
    Names(path): Names<DevicePath>,
) -> Result<Json<Device>, Failure> {
    let name = path.shown();
    let device = path.find(&handle)?;
    handle.submit(Command::AdoptVolumes { device }).await?;
    let device = handle.view().device(&name, &handle.telemetry());
    device.map(Json).ok_or_else(|| Failure::not_found("device", &name))
}
