//! Places that come to a volume, and go from it.

use pod_api::{AddReplica, Problem, Volume};
use pod_state::Command;

use super::Failure;
use super::body::{Names, device_named};
use super::change::Change;
use super::version::{Shown, Versioned};
use crate::view::View;

fn shown(change: &Change, view: &View, name: &str) -> Result<Shown<Volume>, Failure> {
    view.volume(name, &change.handle.telemetry()).map(Shown).ok_or_else(|| Failure::not_found("volume", name))
}

/// Has a volume lie on one more SSD, or move there; of a striped volume, a column. A guest that uses it goes on, and what is
/// there is copied meanwhile; of a volume that nobody uses, when an instance uses it.
#[utoipa::path(
    post, path = "/v1/volumes/{name}/replicas", operation_id = "add_replica", tag = "volumes", request_body = AddReplica,
    params(("name" = String, Path, description = "the volume's name")),
    responses(
        (status = 200, body = Volume),
        (status = 400, description = "it lies there already, or does not fit there", body = Problem, content_type = "application/problem+json"),
        (status = 404, body = Problem, content_type = "application/problem+json"),
        (status = 409, description = "there is no room, or it is moving already", body = Problem, content_type = "application/problem+json"),
    )
)]
pub(super) async fn add(
    change: Change,
    Names(name): Names<String>,
    Versioned(request, version): Versioned<AddReplica>,
) -> Result<Shown<Volume>, Failure> {
    let named = |device: Option<&str>| device.map(|name| device_named(&change.handle, name)).transpose();
    let find = || {
        let (device, replaces) = (named(request.device.as_deref())?, named(request.replaces.as_deref())?);
        Ok(Command::AddReplica { name: name.clone(), device, replaces })
    };
    let view = change.submit_found_at(version, find).await?;
    shown(&change, &view, &name)
}

/// Has a volume not lie on an SSD any more. Its place is wiped.
#[utoipa::path(
    delete, path = "/v1/volumes/{name}/replicas/{host}/{ssd}", operation_id = "remove_replica", tag = "volumes",
    params(
        ("name" = String, Path, description = "the volume's name"),
        ("host" = String, Path, description = "the name of the host that owns the SSD"),
        ("ssd" = String, Path, description = "the SSD's name on that host"),
    ),
    responses(
        (status = 200, body = Volume),
        (status = 400, description = "nobody else has what it has", body = Problem, content_type = "application/problem+json"),
        (status = 404, body = Problem, content_type = "application/problem+json"),
    )
)]
pub(super) async fn remove(
    change: Change,
    Names((name, host, ssd_name)): Names<(String, String, String)>,
) -> Result<Shown<Volume>, Failure> {
    let find = || {
        let device = device_named(&change.handle, &format!("{host}/{ssd_name}"))?;
        Ok(Command::RemoveReplica { name: name.clone(), device })
    };
    let view = change.submit_found(find).await?;
    shown(&change, &view, &name)
}
