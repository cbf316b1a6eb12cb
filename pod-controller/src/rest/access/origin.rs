//! Where a browser's request comes from. Pages of others must not have a browser change the pod for whoever happens to look at
//! them: it sends their requests with whatever rights it has, such as reaching the loopback address.

use std::net::IpAddr;

use axum::http::{HeaderMap, Method, StatusCode, header};

use super::super::Failure;

/// Refuses what another site's page sends, and, where nobody is asked who he is, a name that anybody may have pointed here.
pub(super) fn check(method: &Method, headers: &HeaderMap, trusts_reach: bool) -> Result<(), Failure> {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let host = text(header::HOST.as_str()).unwrap_or_default();
    let changes = !matches!(*method, Method::GET | Method::HEAD | Method::OPTIONS);
    let foreign = match text(header::ORIGIN.as_str()) {
        Some(origin) => origin.split_once("://").is_none_or(|(_, authority)| authority != host),
        None => text("sec-fetch-site").is_some_and(|site| matches!(site, "cross-site" | "same-site")),
    };
    if changes && foreign {
        let detail =
            "another site's page sent this: change the pod from the controller's own page, or with podctl";
        return Err(Failure::new(StatusCode::FORBIDDEN, "foreign-origin", detail));
    }
    if trusts_reach && !host.is_empty() && !is_loopback(host) {
        let detail =
            "without tokens, only this host's own names lead here: use http://127.0.0.1 or http://localhost";
        return Err(Failure::new(StatusCode::FORBIDDEN, "foreign-host", detail));
    }
    Ok(())
}

fn is_loopback(host: &str) -> bool {
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    };
    let address = name.trim_start_matches('[').trim_end_matches(']').parse();
    name.eq_ignore_ascii_case("localhost") || address.is_ok_and(|it: IpAddr| it.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_sites_change_nothing() {
        let check = |method: Method, headers: &[(&'static str, &'static str)], trusts_reach| {
            let headers = headers.iter().map(|(name, value)| {
                (header::HeaderName::from_static(name), header::HeaderValue::from_static(value))
            });
            check(&method, &headers.collect(), trusts_reach).is_ok()
        };
        let host = ("host", "127.0.0.1:8480");
        for (method, headers, trusts_reach, expected) in [
            (Method::POST, &[host][..], true, true),
            (Method::POST, &[host, ("origin", "http://127.0.0.1:8480")], true, true),
            (Method::POST, &[host, ("origin", "http://evil.example")], true, false),
            (Method::POST, &[host, ("origin", "null")], true, false),
            (Method::DELETE, &[host, ("sec-fetch-site", "cross-site")], true, false),
            (Method::DELETE, &[host, ("sec-fetch-site", "same-origin")], true, true),
            (Method::GET, &[host, ("origin", "http://evil.example")], true, true),
            // A name of somebody else's that leads here.
            (Method::GET, &[("host", "evil.example:8480")], true, false),
            (Method::GET, &[("host", "127.0.0.1.evil.example")], true, false),
            (Method::GET, &[("host", "pod.example")], false, true),
            (Method::GET, &[("host", "[::1]:8480")], true, true),
            (Method::GET, &[("host", "LocalHost")], true, true),
            (Method::GET, &[], true, true),
        ] {
            assert_eq!(check(method.clone(), headers, trusts_reach), expected, "{method} {headers:?}");
        }
    }
}
