//! Priorities of instances.

use pod_api::{Instance, InstancePriority, Problem};
use pod_protocol::objects::{NoPriority, Priority};
use pod_state::Command;

use super::Failure;
use super::body::Names;
use super::change::Change;
use super::version::{Shown, Versioned};

/// Gives an instance another priority. It holds at once for all its devices, which may be in use.
#[utoipa::path(
    put, path = "/v1/instances/{name}/priority", operation_id = "prioritize_instance", tag = "instances",
    request_body = InstancePriority,
    params(("name" = String, Path, description = "the instance's name")),
    responses(
        (status = 200, body = Instance),
        (status = 400, description = "there is no such priority", body = Problem, content_type = "application/problem+json"),
        (status = 404, body = Problem, content_type = "application/problem+json"),
    )
)]
pub(super) async fn set(
    change: Change,
    Names(name): Names<String>,
    Versioned(request, version): Versioned<InstancePriority>,
) -> Result<Shown<Instance>, Failure> {
    let command = Command::SetPriority { name: name.clone(), priority: priority_of(request.priority)? };
    let view = change.submit_at(version, command).await?;
    view.instance(&name).map(Shown).ok_or_else(|| Failure::not_found("instance", &name))
}

/// A priority that somebody asks for.
pub(super) fn priority_of(priority: u16) -> Result<Priority, Failure> {
    Priority::try_from(priority).map_err(|error: NoPriority| Failure::invalid(error.to_string()))
}
