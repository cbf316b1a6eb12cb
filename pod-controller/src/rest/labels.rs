//! Labels of what is there already.

use std::time::Instant;

use pod_api::{Device, Host, Instance, Labels, Problem, Volume};
use pod_state::{Command, Labelled};

use super::Failure;
use super::body::{DevicePath, Names};
use super::change::Change;
use super::version::{Shown, Versioned};

/// Labels an instance anew, as a whole.
#[utoipa::path(
    put, path = "/v1/instances/{name}/labels", operation_id = "label_instance", tag = "instances", request_body = Labels,
    params(("name" = String, Path, description = "the instance's name")),
    responses(
        (status = 200, body = Instance),
        (status = 400, description = "no such label can be", body = Problem, content_type = "application/problem+json"),
        (status = 404, body = Problem, content_type = "application/problem+json"),
    )
)]
pub(super) async fn instance(
    change: Change,
    Names(name): Names<String>,
    Versioned(request, version): Versioned<Labels>,
) -> Result<Shown<Instance>, Failure> {
    let command = Command::SetLabels { of: Labelled::Instance, name: name.clone(), labels: request.labels };
    let view = change.submit_at(version, command).await?;
    view.instance(&name).map(Shown).ok_or_else(|| Failure::not_found("instance", &name))
}

/// Labels a volume anew, as a whole.
#[utoipa::path(
    put, path = "/v1/volumes/{name}/labels", operation_id = "label_volume", tag = "volumes", request_body = Labels,
    params(("name" = String, Path, description = "the volume's name")),
    responses(
        (status = 200, body = Volume),
        (status = 400, description = "no such label can be", body = Problem, content_type = "application/problem+json"),
        (status = 404, body = Problem, content_type = "application/problem+json"),
    )
)]
pub(super) async fn volume(
    change: Change,
    Names(name): Names<String>,
    Versioned(request, version): Versioned<Labels>,
) -> Result<Shown<Volume>, Failure> {
    let command = Command::SetLabels { of: Labelled::Volume, name: name.clone(), labels: request.labels };
    let view = change.submit_at(version, command).await?;
    view.volume(&name, &change.handle.telemetry())
        .map(Shown)
        .ok_or_else(|| Failure::not_found("volume", &name))
}

/// Labels a host anew, as a whole. It keeps its labels as long as the pod knows it, whether or not it is there.
#[utoipa::path(
    put, path = "/v1/hosts/{name}/labels", operation_id = "label_host", tag = "hosts", request_body = Labels,
    params(("name" = String, Path, description = "the host's name")),
    responses(
        (status = 200, body = Host),
        (status = 400, description = "no such label can be", body = Problem, content_type = "application/problem+json"),
        (status = 404, body = Problem, content_type = "application/problem+json"),
        (status = 409, description = "not all of the pod knows of such labels yet", body = Problem, content_type = "application/problem+json"),
    )
)]
pub(super) async fn host(
    change: Change,
    Names(name): Names<String>,
    Versioned(request, version): Versioned<Labels>,
) -> Result<Shown<Host>, Failure> {
    let command = Command::SetLabels { of: Labelled::Host, name: name.clone(), labels: request.labels };
    let view = change.submit_at(version, command).await?;
    let members = (&change.handle.telemetry(), change.handle.spoken());
    view.host(&name, members, Instant::now()).map(Shown).ok_or_else(|| Failure::not_found("host", &name))
}

/// Labels a NIC or an SSD anew, as a whole. It keeps its labels as long as the pod knows it, whether or not it is there.
#[utoipa::path(
    put, path = "/v1/devices/{host}/{name}/labels", operation_id = "label_device", tag = "devices", request_body = Labels,
    params(DevicePath),
    responses(
        (status = 200, body = Device),
        (status = 400, description = "no such label can be", body = Problem, content_type = "application/problem+json"),
        (status = 404, body = Problem, content_type = "application/problem+json"),
        (status = 409, description = "not all of the pod knows of such labels yet", body = Problem, content_type = "application/problem+json"),
    )
)]
pub(super) async fn device(
    change: Change,
    Names(path): Names<DevicePath>,
    Versioned(request, version): Versioned<Labels>,
) -> Result<Shown<Device>, Failure> {
    let name = path.shown();
    let command = Command::SetLabels { of: Labelled::Device, name: name.clone(), labels: request.labels };
    let view = change.submit_at(version, command).await?;
    view.device(&name, &change.handle.telemetry())
        .map(Shown)
        .ok_or_else(|| Failure::not_found("device", &name))
}
