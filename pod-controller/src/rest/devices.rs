use std::collections::BTreeMap;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use pod_api::{Device, DeviceHealth, DeviceKind, DeviceList, Problem};
use pod_state::Command;
use serde::Deserialize;
use utoipa::{IntoParams, ToSchema};

use super::Failure;
use super::body::{Asked, DevicePath, Names};
use super::change::{Change, ChangeWith};
use super::list::{Page, Selector, is};
use super::version::Shown;
use crate::controller::Handle;

/// Which devices.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(super) struct ListQuery {
    /// Only those with these labels: `name=value`, or several with commas between them.
    label: Option<String>,
    /// Only those of this host.
    host: Option<String>,
    /// Only NICs, or only SSDs.
    #[param(inline)]
    r#type: Option<Type>,
    /// Only those that are in this health.
    health: Option<DeviceHealth>,
    /// At most this many, 1 to 10000; all unless given.
    limit: Option<usize>,
    /// Go on after the page that said this.
    r#continue: Option<String>,
}

/// What a device is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Type {
    Nic,
    Ssd,
}

/// All devices, or those that are asked for, by host and name.
#[utoipa::path(
    get, path = "/v1/devices", operation_id = "list_devices", tag = "devices", params(ListQuery),
    responses((status = 200, body = DeviceList), (status = 400, body = Problem, content_type = "application/problem+json"))
)]
pub(super) async fn list(
    State(handle): State<Handle>,
    Asked(query): Asked<ListQuery>,
) -> Result<Json<DeviceList>, Failure> {
    let labels = Selector::parse(query.label.as_deref())?;
    let view = handle.view();
    let mut devices = view.devices(&handle.telemetry());
    devices.retain(|it| {
        let is_nic = matches!(it.kind, DeviceKind::Nic { .. });
        labels.matches(&it.labels)
            && is(query.host.as_ref(), &it.host)
            && query.r#type.is_none_or(|wanted| is_nic == (wanted == Type::Nic))
            && query.health.is_none_or(|health| it.health == health)
    });
    let numbers: BTreeMap<&String, u16> =
        view.state.hosts.iter().map(|(id, name)| (name, id.get())).collect();
    let page = Page { limit: query.limit, token: query.r#continue.as_deref() };
    let key = |it: &Device| format!("{:05}/{}", numbers.get(&it.host).copied().unwrap_or(u16::MAX), it.name);
    let (devices, next) = page.of(devices, key)?;
    Ok(Json(DeviceList { devices, resource_version: view.version(), next }))
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
) -> Result<Shown<Device>, Failure> {
    let name = path.shown();
    let device = handle.view().device(&name, &handle.telemetry());
    device.map(Shown).ok_or_else(|| Failure::not_found("device", &name))
}

/// How a device is deleted.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(super) struct DeleteQuery {
    /// Volumes of which nobody else has the data are deleted with it, and mirrored ones lose the replica that it had.
    #[serde(default, rename = "lose-data")]
    lose_data: bool,
}

/// Deletes a device that its host does not have any more and that will not come back. Should it come back, it is a new one.
#[utoipa::path(
    delete, path = "/v1/devices/{host}/{name}", operation_id = "delete_device", tag = "devices",
    params(DevicePath, DeleteQuery),
    responses(
        (status = 204),
        (status = 404, body = Problem, content_type = "application/problem+json"),
        (status = 409, description = "its host has it, or something depends on it", body = Problem, content_type = "application/problem+json"),
    )
)]
pub(super) async fn delete(
    ChangeWith(change, query): ChangeWith<DeleteQuery>,
    Names(path): Names<DevicePath>,
) -> Result<StatusCode, Failure> {
    let find = || {
        let device = path.named(&change.handle)?;
        Ok(Command::DeleteDevice { device, lose_data: query.lose_data })
    };
    change.submit_found(find).await?;
    Ok(StatusCode::NO_CONTENT)
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
pub(super) async fn adopt(change: Change, Names(path): Names<DevicePath>) -> Result<Shown<Device>, Failure> {
    let name = path.shown();
    let find = || Ok(Command::AdoptVolumes { device: path.find(&change.handle)? });
    let view = change.submit_found(find).await?;
    let device = view.device(&name, &change.handle.telemetry());
    device.map(Shown).ok_or_else(|| Failure::not_found("device", &name))
}
