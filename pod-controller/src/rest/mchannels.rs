//! How the bandwidth of the fabric is shared.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use pod_api::{Fabric, FabricSignal, Mchannel, MchannelList, MchannelSpec, Problem};
use pod_protocol::objects::Signal;
use pod_state::{self as state, Command, FabricWish};
use serde::Deserialize;
use utoipa::IntoParams;

use super::Failure;
use super::body::{Asked, Names};
use super::change::Change;
use super::list::{Page, is};
use super::version::{Shown, Versioned};
use crate::controller::Handle;

/// Which mchannels.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(super) struct ListQuery {
    /// Only those of this tenant.
    tenant: Option<String>,
    /// Only those of instances on this host.
    host: Option<String>,
    /// At most this many, 1 to 10000; all unless given.
    limit: Option<usize>,
    /// Go on after the page that said this.
    r#continue: Option<String>,
}

/// What the fabric consists of, and who shares it.
#[utoipa::path(get, path = "/v1/fabric", operation_id = "get_fabric", tag = "fabric", responses((status = 200, body = Fabric)))]
pub(super) async fn fabric(State(handle): State<Handle>) -> Shown<Fabric> {
    Shown(handle.view().fabric(&handle.telemetry()))
}

/// Says anew what the fabric consists of and who shares it, as a whole. It holds at once.
#[utoipa::path(
    put, path = "/v1/fabric", operation_id = "set_fabric", tag = "fabric", request_body = Fabric,
    responses(
        (status = 204),
        (status = 400, description = "the fabric makes no sense", body = Problem, content_type = "application/problem+json"),
        (status = 409, description = "an instance needs what would be gone", body = Problem, content_type = "application/problem+json"),
    )
)]
pub(super) async fn set_fabric(
    change: Change,
    Versioned(fabric, version): Versioned<Fabric>,
) -> Result<StatusCode, Failure> {
    let Fabric { window_us, sample_us, elements, tenants, signals, .. } = fabric;
    let signal = |(name, signal)| {
        let signal = match signal {
            FabricSignal::Off => return None,
            FabricSignal::Probe => Signal::Probe,
            FabricSignal::Device => Signal::Device,
        };
        Some((name, signal))
    };
    let signals = signals.into_iter().filter_map(signal).collect();
    let fabric = FabricWish { window_us, sample_us, elements, tenants, signals };
    change.submit_at(version, Command::SetFabric { fabric }).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// All instances that have a share of the fabric, what they move and what they may move.
#[utoipa::path(
    get, path = "/v1/mchannels", operation_id = "list_mchannels", tag = "fabric", params(ListQuery),
    responses((status = 200, body = MchannelList), (status = 400, body = Problem, content_type = "application/problem+json"))
)]
pub(super) async fn list(
    State(handle): State<Handle>,
    Asked(query): Asked<ListQuery>,
) -> Result<Json<MchannelList>, Failure> {
    let page = Page { limit: query.limit, token: query.r#continue.as_deref() };
    let view = handle.view();
    let mut mchannels = view.mchannels(&handle.telemetry());
    mchannels.retain(|it| is(query.tenant.as_ref(), &it.tenant) && is(query.host.as_ref(), &it.host));
    let (mchannels, next) = page.of(mchannels, |it| it.instance.clone())?;
    Ok(Json(MchannelList { mchannels, resource_version: view.version(), next }))
}

/// The share of one instance.
#[utoipa::path(
    get, path = "/v1/mchannels/{instance}", operation_id = "get_mchannel", tag = "fabric",
    params(("instance" = String, Path, description = "the instance's name")),
    responses((status = 200, body = Mchannel), (status = 404, body = Problem, content_type = "application/problem+json"))
)]
pub(super) async fn get(
    State(handle): State<Handle>,
    Names(instance): Names<String>,
) -> Result<Shown<Mchannel>, Failure> {
    let found = handle.view().mchannel(&instance, &handle.telemetry());
    found.map(Shown).ok_or_else(|| Failure::not_found("mchannel of an instance", &instance))
}

/// Gives an instance a share of the fabric, or another one. It holds at once for all its devices together.
#[utoipa::path(
    put, path = "/v1/mchannels/{instance}", operation_id = "set_mchannel", tag = "fabric",
    params(("instance" = String, Path, description = "the instance's name")), request_body = MchannelSpec,
    responses(
        (status = 204),
        (status = 400, description = "the share makes no sense", body = Problem, content_type = "application/problem+json"),
        (status = 404, description = "there is no such instance, tenant or element", body = Problem, content_type = "application/problem+json"),
    )
)]
pub(super) async fn set(
    change: Change,
    Names(instance): Names<String>,
    Versioned(spec, version): Versioned<MchannelSpec>,
) -> Result<StatusCode, Failure> {
    let MchannelSpec { weight, tenant, path } = spec;
    let mchannel = state::Mchannel { weight, tenant, path };
    change.submit_at(version, Command::SetMchannel { instance, mchannel }).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Lets an instance use the fabric as it likes. What it moves is not measured any more.
#[utoipa::path(
    delete, path = "/v1/mchannels/{instance}", operation_id = "clear_mchannel", tag = "fabric",
    params(("instance" = String, Path, description = "the instance's name")),
    responses((status = 204), (status = 404, body = Problem, content_type = "application/problem+json"))
)]
pub(super) async fn clear(change: Change, Names(instance): Names<String>) -> Result<StatusCode, Failure> {
    change.submit(Command::ClearMchannel { instance }).await?;
    Ok(StatusCode::NO_CONTENT)
}
