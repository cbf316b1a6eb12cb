//! NICs and volumes that come to an instance, or leave it, while it runs.

use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use std::time::Duration;
use utoipa::IntoParams;

use pod_api::{AttachDevice, DeviceAnswer, Instance, Problem};
use pod_state::Command;

use super::Failure;
use super::body::Names;
use super::change::{Change, ChangeWith};
use super::instances::{CreateQuery, wait_until_ready, wish};
use super::version::{Shown, Versioned};

/// Leases one NIC or one volume more to an instance, whose VMM plugs it in if it runs. The answer comes when the host's frontend
/// serves the new device's socket, or when the time to wait is over; the device's `plugged` and `refused` say what became of it
/// since.
#[utoipa::path(
    post, path = "/v1/instances/{name}/devices", operation_id = "attach_device", tag = "instances",
    params(("name" = String, Path, description = "the instance's name"), CreateQuery),
    request_body = AttachDevice,
    responses(
        (status = 200, description = "a dry run: what would be", body = Instance),
        (status = 201, body = Instance),
        (status = 400, description = "the request makes no sense", body = Problem, content_type = "application/problem+json"),
        (status = 404, description = "there is no such instance or volume", body = Problem, content_type = "application/problem+json"),
        (status = 409, description = "the volume is leased, there is no NIC or no room, or the instance moves", body = Problem, content_type = "application/problem+json"),
    )
)]
pub(super) async fn attach(
    ChangeWith(change, query): ChangeWith<CreateQuery>,
    Names(name): Names<String>,
    Versioned(request, version): Versioned<AttachDevice>,
) -> Result<Response, Failure> {
    let wait_ms = query.wait_ms()?;
    let nic = request.nic.as_ref().map(wish).transpose()?.map(Box::new);
    let command = Command::AttachDevice { instance: name.clone(), nic, volume: request.volume };
    let tried = change.submit_at(version, command).await?;
    let gone = || Failure::not_found("instance", &name);
    if change.is_dry_run {
        return Ok(Shown(tried.instance(&name).ok_or_else(gone)?).into_response());
    }
    let instance = wait_until_ready(&change.handle, &name, Duration::from_millis(wait_ms)).await;
    Ok((StatusCode::CREATED, Shown(instance.ok_or_else(gone)?)).into_response())
}

/// How a device is to leave.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(super) struct DetachQuery {
    /// At once, although a VMM uses it, which then loses it.
    #[serde(default)]
    force: bool,
}

/// Has a device leave its instance: at once if no VMM uses it, else when the VMM has unplugged it; `leaving` says that it is to.
/// The volume itself stays. To ask again asks the guest again.
#[utoipa::path(
    delete, path = "/v1/instances/{name}/devices/{device}", operation_id = "detach_device", tag = "instances",
    params(
        ("name" = String, Path, description = "the instance's name"),
        ("device" = String, Path, description = "the device's name within the instance, such as net1"),
        DetachQuery,
    ),
    responses(
        (status = 200, body = Instance),
        (status = 404, body = Problem, content_type = "application/problem+json"),
        (status = 409, description = "the instance moves", body = Problem, content_type = "application/problem+json"),
    )
)]
pub(super) async fn detach(
    ChangeWith(change, query): ChangeWith<DetachQuery>,
    Names((instance, device)): Names<(String, String)>,
) -> Result<Shown<Instance>, Failure> {
    let command = Command::DetachDevice { instance: instance.clone(), device, force: query.force };
    let tried = change.submit(command).await?;
    let view = if change.is_dry_run { tried } else { change.handle.view() };
    view.instance(&instance).map(Shown).ok_or_else(|| Failure::not_found("instance", &instance))
}

/// The VMM of an instance says whether its guest has a device. One that is leaving and that the guest has not has left.
#[utoipa::path(
    put, path = "/v1/instances/{name}/devices/{device}/vmm", operation_id = "answer_device", tag = "instances",
    params(
        ("name" = String, Path, description = "the instance's name"),
        ("device" = String, Path, description = "the device's name within the instance, such as net1"),
    ),
    request_body = DeviceAnswer,
    responses(
        (status = 204),
        (status = 404, body = Problem, content_type = "application/problem+json"),
    )
)]
pub(super) async fn answer(
    change: Change,
    Names((instance, device)): Names<(String, String)>,
    Versioned(answer, version): Versioned<DeviceAnswer>,
) -> Result<StatusCode, Failure> {
    let DeviceAnswer { plugged, refused } = answer;
    change.submit_at(version, Command::DeviceAnswered { instance, device, plugged, refused }).await?;
    Ok(StatusCode::NO_CONTENT)
}
