//! Labels of what is there already.

use pod_api::{Instance, Labels, Problem, Volume};
use pod_state::{Command, Labelled};

use super::Failure;
use super::body::Names;
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
