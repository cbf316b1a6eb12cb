//! Instances that move to another host while they run.

use std::time::Duration;

use axum::http::StatusCode;
use pod_api::{Instance, MigrateInstance, Problem};
use pod_state::Command;
use serde::Deserialize;
use utoipa::IntoParams;

use super::Failure;
use super::body::{Names, host_named};
use super::change::{Change, ChangeWith};
use super::version::{Shown, Versioned};

/// How long the answer waits for the daemons of the other host.
const WAIT: Duration = Duration::from_secs(10);

/// Lets the frontends of another host get ready for an instance, which goes on running where it is. Start a VMM there, on
/// the sockets that the answer names, and let it receive the guest; when the guest runs there, the leases follow by
/// themselves. The answer comes when a VMM can be started, or after 10 s; `migration.ready` says which.
#[utoipa::path(
    post, path = "/v1/instances/{name}/migration", operation_id = "migrate_instance", tag = "instances",
    params(("name" = String, Path, description = "the instance's name")),
    request_body = MigrateInstance,
    responses(
        (status = 200, body = Instance),
        (status = 400, description = "it is there already", body = Problem, content_type = "application/problem+json"),
        (status = 404, body = Problem, content_type = "application/problem+json"),
        (status = 409, description = "it is moving already, that host is not ready, or there is no room", body = Problem, content_type = "application/problem+json"),
    )
)]
pub(super) async fn prepare(
    change: Change,
    Names(name): Names<String>,
    Versioned(request, version): Versioned<MigrateInstance>,
) -> Result<Shown<Instance>, Failure> {
    let find = || {
        let to = host_named(&change.handle, &request.to)?;
        Ok(Command::PrepareMigration { name: name.clone(), to })
    };
    let tried = change.submit_found_at(version, find).await?;
    let found =
        |instance: Option<Instance>| instance.map(Shown).ok_or_else(|| Failure::not_found("instance", &name));
    if change.is_dry_run {
        return found(tried.instance(&name));
    }
    if let Some(id) = change.handle.view().state.instance_named(&name).map(|instance| instance.id) {
        let mut views = change.handle.views();
        let ready = views.wait_for(|view| view.is_migration_ready(id) != Some(false));
        // Both a time that is over and a controller that stops leave what is known now.
        let _ = tokio::time::timeout(WAIT, ready).await;
    }
    found(change.handle.view().instance(&name))
}

/// Gives up the move of an instance, which stays where it is. A VMM on the other host loses its devices.
#[utoipa::path(
    delete, path = "/v1/instances/{name}/migration", operation_id = "abort_migration", tag = "instances",
    params(("name" = String, Path, description = "the instance's name")),
    responses(
        (status = 204),
        (status = 404, description = "there is no such instance, or it is not moving", body = Problem, content_type = "application/problem+json"),
    )
)]
pub(super) async fn abort(change: Change, Names(name): Names<String>) -> Result<StatusCode, Failure> {
    change.submit(Command::AbortMigration { name }).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// How an activation is meant.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(super) struct ActivateQuery {
    /// Although the host that the instance leaves has not released its queues: it is dead.
    #[serde(default)]
    force: bool,
}

/// Hands the leases of an instance to the host to which it moves. They follow by themselves as soon as the guest uses a
/// device there; this is for a guest that uses none, and, by force, for when the host that it leaves has died.
#[utoipa::path(
    post, path = "/v1/instances/{name}/migration/activate", operation_id = "activate_migration", tag = "instances",
    params(("name" = String, Path, description = "the instance's name"), ActivateQuery),
    responses(
        (status = 204),
        (status = 404, description = "there is no such instance, or it is not moving", body = Problem, content_type = "application/problem+json"),
        (status = 409, description = "the guest still runs where it was, or the other host is not ready", body = Problem, content_type = "application/problem+json"),
    )
)]
pub(super) async fn activate(
    ChangeWith(change, query): ChangeWith<ActivateQuery>,
    Names(name): Names<String>,
) -> Result<StatusCode, Failure> {
    change.submit(Command::ActivateMigration { name, force: query.force }).await?;
    Ok(StatusCode::NO_CONTENT)
}
