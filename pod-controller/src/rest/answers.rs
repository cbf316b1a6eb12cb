//! What operations may answer whatever they are about: refusals of connections, guards and bodies, and of changes that cannot be
//! kept. What an operation answers besides, it says itself.

use serde_json::json;
use utoipa::openapi::path::Operation;
use utoipa::openapi::{OpenApi, RefOr, Response};

/// Which operations may answer so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Of {
    All,
    /// Those that change something.
    Changes,
    /// Those that take a body.
    Bodies,
}

/// The status, who may answer so, and why.
const ANSWERS: [(u16, Of, &str); 13] = [
    (400, Of::All, "the request makes no sense"),
    (401, Of::All, "over TCP: there is no token and no certificate, or nobody knows them"),
    (403, Of::All, "whoever asks may not do this, or comes from another site's page or by another name"),
    (408, Of::All, "the request was not complete in time"),
    (409, Of::Changes, "what is changed has another resourceVersion than the body says"),
    (412, Of::Changes, "what is changed has another resourceVersion than If-Match says, or is not there"),
    // With an idempotency key, a body is read that the operation does not take.
    (413, Of::Changes, "the body is too large"),
    (414, Of::All, "the address is too long"),
    (415, Of::Bodies, "the body is not said to be JSON"),
    (422, Of::Changes, "the idempotency key belongs to another request"),
    (429, Of::All, "over TCP: there were too many requests; `Retry-After` says when to try again"),
    (431, Of::All, "there are too many headers, or they are too long"),
    (
        503,
        Of::Changes,
        "nothing can be kept now, and `type` says why: none of several controllers leads (`no-leader`), etcd does not answer \
         (`store-away`), the controller is stopping (`stopping`), or it is open whether it was done (`outcome-unknown`). Try again \
         soon, with the same idempotency key",
    ),
];

/// Adds to every operation what it does not say itself.
pub(super) fn describe(description: &mut OpenApi) {
    for path in description.paths.paths.values_mut() {
        let changes = [&mut path.post, &mut path.put, &mut path.patch, &mut path.delete];
        if let Some(operation) = &mut path.get {
            describe_operation(operation, false);
        }
        for operation in changes.into_iter().flatten() {
            describe_operation(operation, true);
        }
    }
}

fn describe_operation(operation: &mut Operation, changes: bool) {
    for (status, of, why) in ANSWERS {
        let may = match of {
            Of::All => true,
            Of::Changes => changes,
            Of::Bodies => operation.request_body.is_some(),
        };
        let problem = json!({
            "description": why,
            "content": { "application/problem+json": { "schema": { "$ref": "#/components/schemas/Problem" } } }
        });
        if may && let Ok(described) = serde_json::from_value::<Response>(problem) {
            operation.responses.responses.entry(status.to_string()).or_insert(RefOr::T(described));
        }
    }
}

#[cfg(test)]
mod tests {
    use axum::response::IntoResponse;

    use super::super::Failure;
    use super::*;
    use crate::controller::SubmitError;

    #[test]
    fn what_cannot_be_kept_is_among_them() {
        let away = SubmitError::StoreAway("etcd does not answer".to_owned());
        for error in [SubmitError::NoLeader, SubmitError::Unknown, SubmitError::Stopping, away] {
            let status = Failure::from(error.clone()).into_response().status().as_u16();
            assert!(
                ANSWERS.iter().any(|(it, of, _)| (*it, *of) == (status, Of::Changes)),
                "{error}: {status}"
            );
        }
    }
}
