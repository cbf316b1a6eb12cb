use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use pod_api::{PROBLEM_JSON, Problem};
use pod_state::{Refusal, RefusalKind};

use crate::controller::SubmitError;

/// An answer that is not a success.
#[derive(Clone, Debug)]
pub struct Failure(Problem);

impl Failure {
    pub(super) fn new(status: StatusCode, kind: &str, detail: impl Into<String>) -> Self {
        Self(Problem {
            kind: kind.to_owned(),
            title: status.canonical_reason().unwrap_or("Error").to_owned(),
            status: status.as_u16(),
            detail: detail.into(),
        })
    }

    /// The status of the answer.
    pub(super) fn status(&self) -> StatusCode {
        StatusCode::from_u16(self.0.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR)
    }

    /// The body of the answer.
    pub(super) fn to_json(&self) -> Vec<u8> {
        // A structure of strings and a number can always be written.
        serde_json::to_vec(&self.0).unwrap_or_default()
    }

    pub(super) fn not_found(what: &str, name: &str) -> Self {
        let name: String = name.chars().take(100).collect();
        Self::new(StatusCode::NOT_FOUND, "not-found", format!("there is no {what} named {name:?}"))
    }

    pub(super) fn invalid(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, RefusalKind::InvalidValue.word(), detail)
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let mut response = (self.status(), axum::Json(self.0)).into_response();
        response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(PROBLEM_JSON));
        response
    }
}

impl From<Refusal> for Failure {
    fn from(refusal: Refusal) -> Self {
        let status = match refusal.kind {
            RefusalKind::InvalidName | RefusalKind::InvalidValue => StatusCode::BAD_REQUEST,
            RefusalKind::NotFound => StatusCode::NOT_FOUND,
            RefusalKind::KeyReused => StatusCode::UNPROCESSABLE_ENTITY,
            RefusalKind::Exists
            | RefusalKind::Changed
            | RefusalKind::Leased
            | RefusalKind::Connected
            | RefusalKind::HostAlive
            | RefusalKind::NotReset
            | RefusalKind::HostNotReady
            | RefusalKind::Busy
            | RefusalKind::NoDevice
            | RefusalKind::NoRoom
            | RefusalKind::JoinConflict => StatusCode::CONFLICT,
        };
        Self::new(status, refusal.kind.word(), refusal.detail)
    }
}

impl From<SubmitError> for Failure {
    fn from(error: SubmitError) -> Self {
        match error {
            SubmitError::Refused(refusal) => refusal.into(),
            SubmitError::NoLeader | SubmitError::NoLeaderOutside(_) | SubmitError::Unknown => {
                let word = if error == SubmitError::Unknown { "outcome-unknown" } else { "no-leader" };
                Self::new(StatusCode::SERVICE_UNAVAILABLE, word, error.to_string())
            }
            SubmitError::StoreAway(detail) => {
                Self::new(StatusCode::SERVICE_UNAVAILABLE, "store-away", detail)
            }
            SubmitError::Stopping => Self::new(
                StatusCode::SERVICE_UNAVAILABLE,
                "stopping",
                "the controller is stopping: try again soon",
            ),
        }
    }
}
