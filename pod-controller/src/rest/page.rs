//! The page for people: the pod as a picture, in any browser, without a word from elsewhere. What it shows and does, it asks
//! the API for; only its own parts are for anybody, since a browser cannot say who asks for a page.

use axum::Router;
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;

/// Nothing comes from elsewhere, nothing goes elsewhere, nobody puts it into a frame, and no text becomes a script.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'";

const SCRIPT: &str = "text/javascript; charset=utf-8";

/// A part of the page: where, what kind, and all of it.
const PARTS: [(&str, &str, &str); 10] = [
    ("/", "text/html; charset=utf-8", include_str!("page/index.html")),
    ("/page/style.css", "text/css; charset=utf-8", include_str!("page/style.css")),
    ("/page/icon.svg", "image/svg+xml", include_str!("page/icon.svg")),
    ("/page/main.js", SCRIPT, include_str!("page/main.js")),
    ("/page/api.js", SCRIPT, include_str!("page/api.js")),
    ("/page/confirm.js", SCRIPT, include_str!("page/confirm.js")),
    ("/page/details.js", SCRIPT, include_str!("page/details.js")),
    ("/page/picture.js", SCRIPT, include_str!("page/picture.js")),
    ("/page/rates.js", SCRIPT, include_str!("page/rates.js")),
    ("/page/timeline.js", SCRIPT, include_str!("page/timeline.js")),
];

/// Whether this is a part of the page.
pub(super) fn is_part(path: &str) -> bool {
    PARTS.iter().any(|(part, ..)| *part == path)
}

/// The page and its parts.
pub(super) fn routes<S: Clone + Send + Sync + 'static>() -> Router<S> {
    PARTS
        .iter()
        .fold(Router::new(), |router, (path, kind, text)| router.route(path, get(async || part(kind, text))))
}

fn part(kind: &'static str, text: &'static str) -> Response {
    let headers = [
        (header::CONTENT_TYPE, kind),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        // Another version of the controller has another page.
        (header::CACHE_CONTROL, "no-cache"),
    ];
    let mut response = text.into_response();
    for (name, value) in headers {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    response
}
