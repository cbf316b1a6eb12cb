//! Moving leases between NICs.

use axum::Json;
use axum::http::StatusCode;
use pod_api::{FailedBack, MigrateNic, NicPolicy, Problem, StaysAway};
use pod_state::{Command, DeviceId, Lease, State};

use super::Failure;
use super::body::{DevicePath, Names, device_named};
use super::change::Change;
use super::version::Versioned;

/// Moves a NIC of an instance to another device while both work. Packets are neither lost nor reordered; for a few
/// seconds the instance still receives from the device that it left.
#[utoipa::path(
    post, path = "/v1/instances/{name}/nics/{device}/migrate", operation_id = "migrate_nic", tag = "instances",
    params(
        ("name" = String, Path, description = "the instance's name"),
        ("device" = String, Path, description = "the NIC's name within the instance, such as net0"),
    ),
    request_body = MigrateNic,
    responses(
        (status = 204),
        (status = 400, description = "it is there already, or does not fit there", body = Problem, content_type = "application/problem+json"),
        (status = 404, body = Problem, content_type = "application/problem+json"),
        (status = 409, description = "that device does not work, or the last move is still under way", body = Problem, content_type = "application/problem+json"),
    )
)]
pub(super) async fn migrate(
    change: Change,
    Names((instance, nic)): Names<(String, String)>,
    Versioned(request, version): Versioned<MigrateNic>,
) -> Result<StatusCode, Failure> {
    let find = || {
        let to = request.to.as_deref().map(|to| device_named(&change.handle, to)).transpose()?;
        Ok(Command::MigrateNic { instance, device: nic, to })
    };
    change.submit_found_at(version, find).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Says anew what an instance may do with its NIC, as a whole. It may be in use, and obeys at once.
#[utoipa::path(
    put, path = "/v1/instances/{name}/nics/{device}/policy", operation_id = "change_nic", tag = "instances",
    params(
        ("name" = String, Path, description = "the instance's name"),
        ("device" = String, Path, description = "the NIC's name within the instance, such as net0"),
    ),
    request_body = NicPolicy,
    responses(
        (status = 204),
        (status = 400, description = "a limit makes no sense", body = Problem, content_type = "application/problem+json"),
        (status = 404, body = Problem, content_type = "application/problem+json"),
    )
)]
pub(super) async fn change(
    change: Change,
    Names((instance, device)): Names<(String, String)>,
    Versioned(policy, version): Versioned<NicPolicy>,
) -> Result<StatusCode, Failure> {
    change.submit_at(version, Command::ChangeNic { instance, device, policy: policy.into() }).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Brings back every lease that belongs on a NIC, has moved away from it and can go there. Says which ones stay, and why.
#[utoipa::path(
    post, path = "/v1/devices/{host}/{name}/fail-back", operation_id = "fail_back", tag = "devices",
    params(DevicePath),
    responses(
        (status = 200, body = FailedBack),
        (status = 404, body = Problem, content_type = "application/problem+json"),
        (status = 409, description = "it does not work", body = Problem, content_type = "application/problem+json"),
    )
)]
pub(super) async fn fail_back(
    change: Change,
    Names(path): Names<DevicePath>,
) -> Result<Json<FailedBack>, Failure> {
    let find = || path.find(&change.handle);
    let view = change.submit_found(|| Ok(Command::FailBack { device: find()? })).await?;
    // It may be gone since it was carried out.
    let Ok(device) = find() else { return Ok(Json(FailedBack::default())) };
    let stay = view.state.that_stay_away(&device).filter_map(|lease| stays_away(&view.state, lease, &device));
    Ok(Json(FailedBack { stay: stay.collect() }))
}

fn stays_away(state: &State, lease: &Lease, home: &DeviceId) -> Option<StaysAway> {
    let instance = state.instances.get(&lease.instance)?.name.clone();
    let reason = if lease.draining_nic().is_some() {
        "it has just been moved: ask again in a few seconds".to_owned()
    } else {
        format!(
            "{} has no room for what it reserves, or another NIC of its group is there: podctl explain instance {instance}",
            state.device_name(home)
        )
    };
    let nic = state.device_name(lease.active_nic()?);
    Some(StaysAway { instance, device: lease.device.clone(), nic, reason })
}

/// Trusts a NIC again whose link flapped.
#[utoipa::path(
    post, path = "/v1/devices/{host}/{name}/release", operation_id = "release_link", tag = "devices",
    params(DevicePath),
    responses(
        (status = 204),
        (status = 404, body = Problem, content_type = "application/problem+json"),
    )
)]
pub(super) async fn release(change: Change, Names(path): Names<DevicePath>) -> Result<StatusCode, Failure> {
    let reason = "on demand".to_owned();
    change.submit_found(|| Ok(Command::ReleaseLink { device: path.find(&change.handle)?, reason })).await?;
    Ok(StatusCode::NO_CONTENT)
}
