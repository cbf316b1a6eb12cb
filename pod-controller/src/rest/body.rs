//! What comes in, with refusals in our own words and form.

use axum::Json;
use axum::extract::rejection::{JsonRejection, PathRejection, QueryRejection};
use axum::extract::{FromRequest, FromRequestParts, Path, Query, Request};
use axum::http::StatusCode;
use axum::http::request::Parts;
use cxl_pool::HostId;
use pod_state::DeviceId;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use utoipa::IntoParams;

use super::Failure;
use crate::controller::Handle;

/// A device in the path of a request.
#[derive(Clone, Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Path)]
pub(super) struct DevicePath {
    /// the name of the host that owns it
    host: String,
    /// its name on that host
    name: String,
}

impl DevicePath {
    /// As it is shown: `h2/nic0`.
    pub(super) fn shown(&self) -> String {
        format!("{}/{}", self.host, self.name)
    }

    /// The device, if there is one.
    pub(super) fn find(&self, handle: &Handle) -> Result<DeviceId, Failure> {
        device_named(handle, &self.shown())
    }

    /// What a device of that name is or was called, as long as there is its host.
    pub(super) fn named(&self, handle: &Handle) -> Result<DeviceId, Failure> {
        Ok(DeviceId { host: host_named(handle, &self.host)?, name: self.name.as_str().into() })
    }
}

/// The device with this name, as `h2/nic0`.
pub(super) fn device_named(handle: &Handle, name: &str) -> Result<DeviceId, Failure> {
    handle.view().state.device_named(name).ok_or_else(|| Failure::not_found("device", name))
}

/// The host with this name.
pub(super) fn host_named(handle: &Handle, name: &str) -> Result<HostId, Failure> {
    handle.view().state.host_named(name).ok_or_else(|| Failure::not_found("host", name))
}

/// That nobody sends so much, or sends it in order.
pub(super) fn too_large() -> Failure {
    let detail = format!("the body is broken, or larger than {} bytes", super::BODY_BYTES_MAX);
    Failure::new(StatusCode::PAYLOAD_TOO_LARGE, "body-too-large", detail)
}

/// A JSON body.
pub(super) struct Body<T>(pub(super) T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for Body<T> {
    type Rejection = Failure;

    async fn from_request(request: Request, state: &S) -> Result<Self, Failure> {
        Ok(Self(Json::from_request(request, state).await?.0))
    }
}

/// Names in the path.
pub(super) struct Names<T>(pub(super) T);

impl<T: DeserializeOwned + Send, S: Send + Sync> FromRequestParts<S> for Names<T> {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Failure> {
        Ok(Self(Path::from_request_parts(parts, state).await?.0))
    }
}

/// What follows the question mark.
pub(super) struct Asked<T>(pub(super) T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequestParts<S> for Asked<T> {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Failure> {
        Ok(Self(Query::from_request_parts(parts, state).await?.0))
    }
}

impl From<JsonRejection> for Failure {
    fn from(rejection: JsonRejection) -> Self {
        let status = rejection.status();
        let (kind, detail) = match &rejection {
            JsonRejection::MissingJsonContentType(_) => {
                ("wrong-content-type", "the body must be JSON: set content-type: application/json".to_owned())
            }
            _ if status == StatusCode::PAYLOAD_TOO_LARGE => {
                ("body-too-large", format!("the body is larger than {} bytes", super::BODY_BYTES_MAX))
            }
            other => ("invalid-body", other.body_text()),
        };
        // One status for every body that makes no sense, whether it is broken JSON or the wrong JSON.
        let status =
            if status == StatusCode::UNPROCESSABLE_ENTITY { StatusCode::BAD_REQUEST } else { status };
        Self::new(status, kind, detail)
    }
}

impl From<PathRejection> for Failure {
    fn from(rejection: PathRejection) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid-path", rejection.body_text())
    }
}

impl From<QueryRejection> for Failure {
    fn from(rejection: QueryRejection) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid-query", rejection.body_text())
    }
}
