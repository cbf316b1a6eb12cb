use std::time::Instant;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use pod_api::{Host, HostList, Problem};
use pod_state::Command;
use serde::Deserialize;
use utoipa::IntoParams;

use super::Failure;
use super::body::{Asked, Names};
use super::change::Change;
use super::list::{Page, Selector};
use super::version::Shown;
use crate::controller::Handle;

/// Which hosts.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(super) struct ListQuery {
    /// Only those with these labels: `name=value`, or several with commas between them.
    label: Option<String>,
    /// Only those that are to be empty, or are not.
    drained: Option<bool>,
    /// At most this many, 1 to 10000; all unless given.
    limit: Option<usize>,
    /// Go on after the page that said this.
    r#continue: Option<String>,
}

/// All hosts that have ever joined, or those that are asked for, by number.
#[utoipa::path(
    get, path = "/v1/hosts", operation_id = "list_hosts", tag = "hosts", params(ListQuery),
    responses((status = 200, body = HostList), (status = 400, body = Problem, content_type = "application/problem+json"))
)]
pub(super) async fn list(
    State(handle): State<Handle>,
    Asked(query): Asked<ListQuery>,
) -> Result<Json<HostList>, Failure> {
    let labels = Selector::parse(query.label.as_deref())?;
    let view = handle.view();
    let mut hosts = view.hosts((&handle.telemetry(), handle.spoken()), Instant::now());
    hosts
        .retain(|it| labels.matches(&it.labels) && query.drained.is_none_or(|drained| it.drained == drained));
    let page = Page { limit: query.limit, token: query.r#continue.as_deref() };
    let (hosts, next) = page.of(hosts, |it| format!("{:05}", it.id))?;
    Ok(Json(HostList { hosts, resource_version: view.version(), next }))
}

/// One host.
#[utoipa::path(
    get, path = "/v1/hosts/{name}", operation_id = "get_host", tag = "hosts",
    params(("name" = String, Path, description = "the host's name")),
    responses((status = 200, body = Host), (status = 404, body = Problem, content_type = "application/problem+json"))
)]
pub(super) async fn get(
    State(handle): State<Handle>,
    Names(name): Names<String>,
) -> Result<Shown<Host>, Failure> {
    let host = handle.view().host(&name, (&handle.telemetry(), handle.spoken()), Instant::now());
    host.map(Shown).ok_or_else(|| Failure::not_found("host", &name))
}

/// Says that a host is known to have been reset or taken away, so that nothing of it is left in a cache or a device:
/// frees what waits for it.
#[utoipa::path(
    post, path = "/v1/hosts/{name}/reset", operation_id = "reset_host", tag = "hosts",
    params(("name" = String, Path, description = "the host's name")),
    responses(
        (status = 204),
        (status = 404, body = Problem, content_type = "application/problem+json"),
        (status = 409, description = "one of its daemons beats", body = Problem, content_type = "application/problem+json"),
    )
)]
pub(super) async fn reset(change: Change, Names(name): Names<String>) -> Result<StatusCode, Failure> {
    change.submit(Command::ResetHost { name }).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Deletes a host that is gone for good.
#[utoipa::path(
    delete, path = "/v1/hosts/{name}", operation_id = "delete_host", tag = "hosts",
    params(("name" = String, Path, description = "the host's name")),
    responses(
        (status = 204),
        (status = 404, body = Problem, content_type = "application/problem+json"),
        (status = 409, description = "it beats, it was not reset, or something depends on it", body = Problem, content_type = "application/problem+json"),
    )
)]
pub(super) async fn delete(change: Change, Names(name): Names<String>) -> Result<StatusCode, Failure> {
    change.submit(Command::DeleteHost { name }).await?;
    Ok(StatusCode::NO_CONTENT)
}
