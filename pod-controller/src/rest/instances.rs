use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use pod_api::{CreateInstance, Explanation, Instance, InstanceList, NicRequest, Problem};
use pod_state::{Command, NicWish};
use serde::Deserialize;
use utoipa::IntoParams;

use super::Failure;
use super::body::{Asked, Body, Names, host_named};
use super::change::ChangeWith;
use super::list::{Page, Selector};
use super::priorities::priority_of;
use super::version::Shown;
use crate::controller::Handle;

/// How long the creation of an instance waits for its daemons unless told.
const WAIT_DEFAULT_MS: u64 = 10_000;
/// How long it waits at most.
pub(super) const WAIT_MAX_MS: u64 = 30_000;

/// How a creation is to be answered.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(super) struct CreateQuery {
    /// How long to wait, in ms, until a VMM can be started; 10000 unless given, 30000 at most, 0 to answer at once.
    #[serde(default)]
    wait: Option<u64>,
}

impl CreateQuery {
    pub(super) fn wait_ms(&self) -> Result<u64, Failure> {
        let wait_ms = self.wait.unwrap_or(WAIT_DEFAULT_MS);
        if wait_ms > WAIT_MAX_MS {
            return Err(Failure::invalid(format!(
                "wait={wait_ms} is too long: use {WAIT_MAX_MS} ms at most"
            )));
        }
        Ok(wait_ms)
    }
}

/// Which instances.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(super) struct ListQuery {
    /// Only those with these labels: `name=value`, or several with commas between them.
    label: Option<String>,
    /// Only those that run on this host.
    host: Option<String>,
    /// Only those that use this NIC or SSD, as `h2/nic0`.
    device: Option<String>,
    /// Only those for which a VMM can be started, or cannot.
    ready: Option<bool>,
    /// At most this many, 1 to 10000; all unless given.
    limit: Option<usize>,
    /// Go on after the page that said this.
    r#continue: Option<String>,
}

/// All instances, or those that are asked for, by name.
#[utoipa::path(
    get, path = "/v1/instances", operation_id = "list_instances", tag = "instances", params(ListQuery),
    responses((status = 200, body = InstanceList), (status = 400, body = Problem, content_type = "application/problem+json"))
)]
pub(super) async fn list(
    State(handle): State<Handle>,
    Asked(query): Asked<ListQuery>,
) -> Result<Json<InstanceList>, Failure> {
    let labels = Selector::parse(query.label.as_deref())?;
    let view = handle.view();
    let instances = view.state.instances.values().filter(|it| {
        labels.matches(&it.labels)
            && query.host.as_ref().is_none_or(|host| view.state.host_name(it.host) == *host)
            && query.device.as_ref().is_none_or(|device| view.uses(it, device))
            && query.ready.is_none_or(|ready| view.is_ready(it.id) == Some(ready))
    });
    let page = Page { limit: query.limit, token: query.r#continue.as_deref() };
    let (instances, next) = page.of(instances.collect(), |it| it.name.clone())?;
    let instances = view.show_instances(&instances);
    Ok(Json(InstanceList { instances, resource_version: view.version(), next }))
}

/// One instance.
#[utoipa::path(
    get, path = "/v1/instances/{name}", operation_id = "get_instance", tag = "instances",
    params(("name" = String, Path, description = "the instance's name")),
    responses((status = 200, body = Instance), (status = 404, body = Problem, content_type = "application/problem+json"))
)]
pub(super) async fn get(
    State(handle): State<Handle>,
    Names(name): Names<String>,
) -> Result<Shown<Instance>, Failure> {
    handle.view().instance(&name).map(Shown).ok_or_else(|| Failure::not_found("instance", &name))
}

/// Why the devices of an instance are where they are, and where else they could be.
#[utoipa::path(
    get, path = "/v1/instances/{name}/explanation", operation_id = "explain_instance", tag = "instances",
    params(("name" = String, Path, description = "the instance's name")),
    responses((status = 200, body = Explanation), (status = 404, body = Problem, content_type = "application/problem+json"))
)]
pub(super) async fn explain(
    State(handle): State<Handle>,
    Names(name): Names<String>,
) -> Result<Json<Explanation>, Failure> {
    handle
        .view()
        .explanation_with(&name, &handle.load())
        .map(Json)
        .ok_or_else(|| Failure::not_found("instance", &name))
}

/// Creates an instance and leases its devices. The answer comes when a VMM can be started, or when the time to wait is
/// over; `ready` says which.
#[utoipa::path(
    post, path = "/v1/instances", operation_id = "create_instance", tag = "instances",
    params(CreateQuery), request_body = CreateInstance,
    responses(
        (status = 200, description = "a dry run: what would be made", body = Instance),
        (status = 201, body = Instance),
        (status = 400, description = "the request makes no sense", body = Problem, content_type = "application/problem+json"),
        (status = 404, description = "there is no such host, volume or instance type", body = Problem, content_type = "application/problem+json"),
        (status = 409, description = "a name is taken, a volume is leased, or there is no NIC or no room", body = Problem, content_type = "application/problem+json"),
    )
)]
pub(super) async fn create(
    ChangeWith(change, query): ChangeWith<CreateQuery>,
    Body(request): Body<CreateInstance>,
) -> Result<Response, Failure> {
    let wait_ms = query.wait_ms()?;
    let nics = request.nics.iter().map(wish).collect::<Result<Vec<NicWish>, Failure>>()?;
    let priority = request.priority.map(priority_of).transpose()?;
    let find = || {
        Ok(Command::CreateInstance {
            name: request.name.clone(),
            host: host_named(&change.handle, &request.host)?,
            nics,
            volumes: request.volumes,
            instance_type: request.instance_type,
            vmm_listens: request.vmm_listens,
            ram_bytes: request.ram_bytes,
            priority,
        })
    };
    let tried = change.submit_labelled(request.labels, find).await?;
    let gone = || Failure::not_found("instance", &request.name);
    if change.is_dry_run {
        return Ok(Shown(tried.instance(&request.name).ok_or_else(gone)?).into_response());
    }
    let instance = wait_until_ready(&change.handle, &request.name, Duration::from_millis(wait_ms)).await;
    let instance = instance.ok_or_else(gone)?;
    let location = format!("/v1/instances/{}", instance.name);
    Ok((StatusCode::CREATED, [(header::LOCATION, location)], Shown(instance)).into_response())
}

pub(super) fn wish(request: &NicRequest) -> Result<NicWish, Failure> {
    let mac = request.mac.as_ref().map(|mac| mac.parse()).transpose();
    let mac = mac.map_err(|error: pod_protocol::ids::NotAMacAddress| Failure::invalid(error.to_string()))?;
    let policy = request.policy.clone().into();
    Ok(NicWish {
        device: request.device.clone(),
        mac,
        mtu: request.mtu,
        queue_pairs: request.queue_pairs,
        policy,
        reserved_mbps: request.reserved_mbps,
        apart: request.apart.clone(),
        together: request.together.clone(),
        rails: request.rails,
    })
}

/// The instance once it is ready, or as it is when the time is over; nothing if it was deleted meanwhile.
pub(super) async fn wait_until_ready(handle: &Handle, name: &str, at_most: Duration) -> Option<Instance> {
    let id = handle.view().state.instance_named(name)?.id;
    let mut views = handle.views();
    let ready = views.wait_for(|view| view.is_ready(id) != Some(false));
    // Both a time that is over and a controller that stops leave what is known now.
    let _ = tokio::time::timeout(at_most, ready).await;
    handle.view().instance(name)
}

/// How a deletion is meant.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(super) struct DeleteQuery {
    /// Also while a VMM is connected, which then loses its devices.
    #[serde(default)]
    force: bool,
}

/// Deletes an instance: its leases end.
#[utoipa::path(
    delete, path = "/v1/instances/{name}", operation_id = "delete_instance", tag = "instances",
    params(("name" = String, Path, description = "the instance's name"), DeleteQuery),
    responses(
        (status = 204),
        (status = 404, body = Problem, content_type = "application/problem+json"),
        (status = 409, description = "a VMM is connected", body = Problem, content_type = "application/problem+json"),
    )
)]
pub(super) async fn delete(
    ChangeWith(change, query): ChangeWith<DeleteQuery>,
    Names(name): Names<String>,
) -> Result<StatusCode, Failure> {
    change.submit(Command::DeleteInstance { name, force: query.force }).await?;
    Ok(StatusCode::NO_CONTENT)
}
