//! The API over HTTP: JSON under `/v1`, problems as RFC 9457 says, an OpenAPI description, metrics.

mod access;
mod answers;
mod balance;
mod body;
mod change;
mod connection;
mod controllers;
mod devices;
mod drains;
mod elsewhere;
mod events;
mod health;
mod hex;
mod hosts;
mod instance_devices;
mod instance_types;
mod instances;
mod labels;
mod list;
mod listen;
mod mchannels;
mod migrations;
mod nics;
mod own_host;
mod page;
mod places;
mod pool;
mod priorities;
mod problem;
mod replicas;
mod tls;
mod version;
mod volumes;

use std::time::Duration;

use axum::Router;
use axum::extract::{DefaultBodyLimit, Request};
use axum::http::{StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use utoipa::OpenApi;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::controller::Handle;
use crate::replication::FORWARDED_MAX;

pub use access::{Access, AccessPolicy, Role, TokenError};
pub(crate) use elsewhere::{Looks, Seen};
pub use listen::{ListenError, Listeners, TcpPolicy};
pub use problem::Failure;
pub use tls::{CertificateName, KnownClient, ParseCertificateNameError, TlsError, TlsPolicy};

/// More than any request needs: a fabric of 1024 elements with long names, each with its signal and its load, comes to 200 KiB.
const BODY_BYTES_MAX: usize = 256 * 1024;
/// How long a request may take until its answer begins: longer than the longest wait that can be asked for, and what may pass before it
/// until a leader has been found that carries the change out, and the change is known here. Clients wait for a minute, so they hear
/// which of it was too long.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(50);
const _: () =
    assert!(REQUEST_TIMEOUT.as_secs() * 1000 > FORWARDED_MAX.as_secs() * 1000 + instances::WAIT_MAX_MS);

#[derive(OpenApi)]
#[openapi(info(
    title = "Wadi pod controller",
    description = "Hosts, devices, volumes and instances of a pod. Every refusal is an application/problem+json.",
    license(name = "Apache-2.0", identifier = "Apache-2.0")
))]
struct Description;

/// The whole API.
pub fn router(handle: Handle) -> Router {
    let elsewhere = middleware::from_fn_with_state(handle.clone(), elsewhere::of_leader);
    router_here(handle).layer(elsewhere).layer(middleware::from_fn(limit_time))
}

/// The same, of what is known here.
fn router_here(handle: Handle) -> Router {
    let (router, mut description) = OpenApiRouter::with_openapi(Description::openapi())
        .routes(routes!(hosts::list))
        .routes(routes!(hosts::get, hosts::delete))
        .routes(routes!(hosts::reset))
        .routes(routes!(drains::begin_host, drains::end_host))
        .routes(routes!(drains::begin_device, drains::end_device))
        .routes(routes!(devices::list))
        .routes(routes!(devices::get))
        .routes(routes!(devices::delete))
        .routes(routes!(balance::get))
        .routes(routes!(nics::fail_back))
        .routes(routes!(nics::release))
        .routes(routes!(devices::adopt))
        .routes(routes!(volumes::list, volumes::create))
        .routes(routes!(volumes::get, volumes::change, volumes::delete))
        .routes(routes!(replicas::add))
        .routes(routes!(replicas::remove))
        .routes(routes!(instances::list, instances::create))
        .routes(routes!(instances::get, instances::delete))
        .routes(routes!(instances::explain))
        .routes(routes!(instance_devices::attach))
        .routes(routes!(instance_devices::detach))
        .routes(routes!(instance_devices::answer))
        .routes(routes!(labels::instance))
        .routes(routes!(priorities::set))
        .routes(routes!(labels::volume))
        .routes(routes!(labels::host))
        .routes(routes!(labels::device))
        .routes(routes!(instance_types::list))
        .routes(routes!(instance_types::get, instance_types::set, instance_types::delete))
        .routes(routes!(migrations::prepare, migrations::abort))
        .routes(routes!(migrations::activate))
        .routes(routes!(nics::migrate))
        .routes(routes!(nics::change))
        .routes(routes!(events::list))
        .routes(routes!(events::stream))
        .routes(routes!(pool::get))
        .routes(routes!(controllers::list))
        .routes(routes!(controllers::remove))
        .routes(routes!(mchannels::fabric, mchannels::set_fabric))
        .routes(routes!(mchannels::list))
        .routes(routes!(mchannels::get, mchannels::set, mchannels::clear))
        .routes(routes!(health::healthz))
        .routes(routes!(health::readyz))
        .routes(routes!(health::metrics))
        .split_for_parts();
    change::describe(&mut description);
    access::describe(&mut description);
    answers::describe(&mut description);
    version::describe(&mut description);
    elsewhere::describe(&mut description);
    // It does not change while we run; a description that cannot be written is empty rather than fatal.
    let description = description.to_json().unwrap_or_default();
    let describe = move || {
        let description = description.clone();
        async move { ([(header::CONTENT_TYPE, "application/json")], description) }
    };
    router
        .route("/openapi.json", get(describe))
        .merge(page::routes())
        .fallback(nothing_here)
        .method_not_allowed_fallback(wrong_method)
        .layer(middleware::from_fn(change::note_key))
        .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
        .with_state(handle)
}

async fn nothing_here(request: Request) -> Failure {
    let path: String = request.uri().path().chars().take(200).collect();
    Failure::new(
        StatusCode::NOT_FOUND,
        "no-such-path",
        format!("there is nothing at {path}: /openapi.json lists what there is"),
    )
}

async fn wrong_method(request: Request) -> Failure {
    Failure::new(
        StatusCode::METHOD_NOT_ALLOWED,
        "wrong-method",
        format!("{} cannot be used here: /openapi.json lists what can", request.method()),
    )
}

/// A client that sends half a request does not keep us waiting.
async fn limit_time(request: Request, next: Next) -> Response {
    match tokio::time::timeout(REQUEST_TIMEOUT, next.run(request)).await {
        Ok(response) => response,
        Err(_) => Failure::new(
            StatusCode::REQUEST_TIMEOUT,
            "timeout",
            format!("the request was not complete after {} s", REQUEST_TIMEOUT.as_secs()),
        )
        .into_response(),
    }
}
