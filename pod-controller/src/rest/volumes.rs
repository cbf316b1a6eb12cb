use axum::Json;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use cxl_pool::HostId;
use pod_api::{ChangeVolume, CreateVolume, Problem, Stripes, Volume, VolumeGroups, VolumeList};
use pod_protocol::objects::Qos;
use pod_state::{Command, DeviceId, Groups};
use serde::Deserialize;
use utoipa::IntoParams;

use super::Failure;
use super::body::{Asked, Body, Names, device_named, host_named};
use super::change::Change;
use super::list::{Page, Selector};
use super::version::{Shown, Versioned};
use crate::controller::Handle;

/// Which volumes.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(super) struct ListQuery {
    /// Only those with these labels: `name=value`, or several with commas between them.
    label: Option<String>,
    /// Only those that lie on this SSD, as `h2/ssd0`.
    device: Option<String>,
    /// Only those that this instance has leased.
    instance: Option<String>,
    /// At most this many, 1 to 10000; all unless given.
    limit: Option<usize>,
    /// Go on after the page that said this.
    r#continue: Option<String>,
}

/// All volumes, or those that are asked for, by name.
#[utoipa::path(
    get, path = "/v1/volumes", operation_id = "list_volumes", tag = "volumes", params(ListQuery),
    responses((status = 200, body = VolumeList), (status = 400, body = Problem, content_type = "application/problem+json"))
)]
pub(super) async fn list(
    State(handle): State<Handle>,
    Asked(query): Asked<ListQuery>,
) -> Result<Json<VolumeList>, Failure> {
    let labels = Selector::parse(query.label.as_deref())?;
    let view = handle.view();
    let leased = query.instance.as_ref().map(|instance| view.volumes_of(instance));
    let volumes = view.volumes_there().filter(|it| {
        labels.matches(&it.labels)
            && query.device.as_ref().is_none_or(|device| view.lies_on(it, device))
            && leased.as_ref().is_none_or(|leased| leased.contains(&it.id))
    });
    let page = Page { limit: query.limit, token: query.r#continue.as_deref() };
    let (volumes, next) = page.of(volumes.collect(), |it| it.name.clone())?;
    let volumes = view.show_volumes(&volumes, &handle.telemetry());
    Ok(Json(VolumeList { volumes, resource_version: view.version(), next }))
}

/// One volume.
#[utoipa::path(
    get, path = "/v1/volumes/{name}", operation_id = "get_volume", tag = "volumes",
    params(("name" = String, Path, description = "the volume's name")),
    responses((status = 200, body = Volume), (status = 404, body = Problem, content_type = "application/problem+json"))
)]
pub(super) async fn get(
    State(handle): State<Handle>,
    Names(name): Names<String>,
) -> Result<Shown<Volume>, Failure> {
    handle
        .view()
        .volume(&name, &handle.telemetry())
        .map(Shown)
        .ok_or_else(|| Failure::not_found("volume", &name))
}

/// Creates a volume: a contiguous range of an SSD, or of several SSDs of different hosts that mirror each other or have a
/// share each.
#[utoipa::path(
    post, path = "/v1/volumes", operation_id = "create_volume", tag = "volumes", request_body = CreateVolume,
    responses(
        (status = 200, description = "a dry run: what would be made", body = Volume),
        (status = 201, body = Volume),
        (status = 400, description = "the request makes no sense", body = Problem, content_type = "application/problem+json"),
        (status = 404, description = "there is no such SSD", body = Problem, content_type = "application/problem+json"),
        (status = 409, description = "the name is taken, or there is no room", body = Problem, content_type = "application/problem+json"),
    )
)]
pub(super) async fn create(change: Change, Body(request): Body<CreateVolume>) -> Result<Response, Failure> {
    let labels = request.labels.clone();
    let made =
        change.submit_labelled(labels.clone(), || creation(&change.handle, &request, Near::There)).await;
    let view = match made {
        // The SSD was chosen by what is known here: it may have filled or failed since.
        Err(failure)
            if request.near.is_some()
                && matches!(failure.status(), StatusCode::CONFLICT | StatusCode::NOT_FOUND) =>
        {
            let elsewhere = || creation(&change.handle, &request, Near::Anywhere);
            change.submit_labelled(labels, elsewhere).await?
        }
        made => made?,
    };
    let volume = view
        .volume(&request.name, &change.handle.telemetry())
        .ok_or_else(|| Failure::not_found("volume", &request.name))?;
    if change.is_dry_run {
        return Ok(Shown(volume).into_response());
    }
    let location = format!("/v1/volumes/{}", volume.name);
    Ok((StatusCode::CREATED, [(header::LOCATION, location)], Shown(volume)).into_response())
}

/// Where a volume comes that is to be near a host.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Near {
    /// On an SSD of it, if one has room.
    There,
    /// None has.
    Anywhere,
}

/// What carries out a request, once what it names is found.
fn creation(handle: &Handle, request: &CreateVolume, where_near: Near) -> Result<Command, Failure> {
    if request.near.is_some() && (request.device.is_some() || request.stripes.is_some()) {
        let detail = "near is for volumes whose SSD the controller chooses, and that have one for themselves: leave it out, or device and \
                      stripes";
        return Err(Failure::new(StatusCode::BAD_REQUEST, "invalid-value", detail));
    }
    let named = request.device.as_deref().map(|name| device_named(handle, name)).transpose()?;
    let near = request.near.as_deref().map(|name| host_named(handle, name)).transpose()?;
    let near = near.filter(|_| where_near == Near::There);
    let device = named.or_else(|| ssd_near(handle, near?, request));
    let (name, size_bytes) = (request.name.clone(), request.size.get());
    let (replicas, groups) = (request.replicas, groups_of(request));
    Ok(match request.stripes {
        None => Command::CreateVolume {
            name,
            size_bytes,
            device,
            replicas,
            minimum_iops: request.minimum_iops,
            minimum_bytes_per_second: request.minimum_bytes_per_second,
            groups,
        },
        Some(_) if replicas != 1 || device.is_some() => {
            let detail =
                "a striped volume has no replicas, and its SSDs are chosen: leave out replicas and device";
            return Err(Failure::new(StatusCode::BAD_REQUEST, "invalid-value", detail));
        }
        Some(Stripes { columns, size }) => Command::CreateStriped {
            name,
            size_bytes,
            columns,
            stripe_bytes: size.get(),
            minimum_iops: request.minimum_iops,
            minimum_bytes_per_second: request.minimum_bytes_per_second,
            groups,
        },
    })
}

fn groups_of(request: &CreateVolume) -> Groups {
    Groups { apart: request.apart.clone(), together: request.together.clone() }
}

/// An SSD of this host that has what a new volume asks for.
fn ssd_near(handle: &Handle, host: HostId, request: &CreateVolume) -> Option<DeviceId> {
    let (minimum_iops, minimum_bytes_per_second) = (request.minimum_iops, request.minimum_bytes_per_second);
    let qos = Qos { minimum_iops, minimum_bytes_per_second, ..Qos::default() };
    handle.view().state.ssd_near(host, request.size.get(), (&qos, &groups_of(request)))
}

/// Changes a volume: it grows, gets another share of its SSD, is in other groups, or guests only read it. The guest sees its new size
/// while it runs.
#[utoipa::path(
    patch, path = "/v1/volumes/{name}", operation_id = "change_volume", tag = "volumes", request_body = ChangeVolume,
    params(("name" = String, Path, description = "the volume's name")),
    responses(
        (status = 200, body = Volume),
        (status = 400, description = "the request makes no sense", body = Problem, content_type = "application/problem+json"),
        (status = 404, body = Problem, content_type = "application/problem+json"),
        (status = 409, description = "there is no room behind it, or an instance uses it", body = Problem, content_type = "application/problem+json"),
    )
)]
pub(super) async fn change(
    change: Change,
    Names(name): Names<String>,
    Versioned(request, version): Versioned<ChangeVolume>,
) -> Result<Shown<Volume>, Failure> {
    let (size_bytes, qos) = (request.size.map(pod_api::ByteSize::get), request.qos.map(Into::into));
    let groups = request.groups.map(|VolumeGroups { apart, together }| Groups { apart, together });
    let command =
        Command::ChangeVolume { name: name.clone(), size_bytes, qos, groups, read_only: request.read_only };
    let view = change.submit_at(version, command).await?;
    view.volume(&name, &change.handle.telemetry())
        .map(Shown)
        .ok_or_else(|| Failure::not_found("volume", &name))
}

/// Deletes a volume and its data.
#[utoipa::path(
    delete, path = "/v1/volumes/{name}", operation_id = "delete_volume", tag = "volumes",
    params(("name" = String, Path, description = "the volume's name")),
    responses(
        (status = 204),
        (status = 404, body = Problem, content_type = "application/problem+json"),
        (status = 409, description = "an instance has leased it", body = Problem, content_type = "application/problem+json"),
    )
)]
pub(super) async fn delete(change: Change, Names(name): Names<String>) -> Result<StatusCode, Failure> {
    change.submit(Command::DeleteVolume { name }).await?;
    Ok(StatusCode::NO_CONTENT)
}

#[cfg(test)]
mod tests {
    use pod_state::State;
    use pod_state::model::{pod_with_ssds, ssd_of, volume};

    use super::super::change::tests::behind;
    use super::*;

    #[tokio::test]
    async fn a_volume_lies_elsewhere_when_the_ssd_near_its_host_has_filled_meanwhile() {
        let before = pod_with_ssds(&[(None, None); 2]);
        let mut now: State = before.clone();
        let mut number = 0;
        // Until it is full.
        while now.apply(&volume(&format!("other{number}"), (Some(2), 1), Groups::default())).is_ok() {
            number += 1;
        }
        assert!(number > 0);
        let (handle, _directory) = behind(&before, now);
        let request = serde_json::json!({ "name": "vol0", "size": "8M", "near": "h2" });
        let request = serde_json::from_value(request).expect("a request");
        let answer = create(Change::of(&handle, None), Body(request)).await.expect("there is room on h3");
        assert_eq!(answer.status(), StatusCode::CREATED);
        let view = handle.view();
        let made = view.state.volume_named("vol0").expect("made");
        assert!(made.replicas.iter().all(|place| place.device == ssd_of(3)), "{made:?}");
    }
}
