use std::io::Write as _;

use hyper::service::Service as _;
use hyper_util::service::TowerToHyperService;

use super::super::places::Places;
use super::*;

/// What becomes of a request from there, by nobody in particular.
fn admit(access: &Access, places: &Arc<Places>, address: &str) -> Result<Option<Identity>, Refused> {
    let address: IpAddr = address.parse().expect("an address");
    let caller = Caller::Remote { address, certificate: None, place: places.take(address) };
    let headers = HeaderMap::from_iter([(header::HOST, HeaderValue::from_static("localhost"))]);
    access.0.admit(Some(&caller), (&Method::GET, "/v1/hosts"), &headers)
}

#[test]
fn all_addresses_of_one_customer_share_a_rate() {
    let access = Access::open(&AccessPolicy { requests_per_second: 1, ..AccessPolicy::default() });
    let (access, places) = (access.expect("nothing to read"), Arc::default());
    let too_many = |result: &Result<_, Refused>| matches!(result, Err(Refused::TooMany { .. }));
    let refused =
        (0..1000).filter(|number| too_many(&admit(&access, &places, &format!("2001:db8:1:2::{number:x}"))));
    assert!(refused.count() > 0, "1000 requests take no 1000 seconds");
    assert!(!too_many(&admit(&access, &places, "2001:db8:1:3::1")), "others have their own");
}

#[test]
fn what_strangers_send_is_cut_whichever_part_of_a_request_it_is() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("audit.jsonl");
    let log = Arc::new(AuditLog::open(&path).expect("a log"));
    let endless = "A".repeat(100_000);
    let entry = Entry {
        time_ms: 0,
        who: "192.0.2.1",
        role: None,
        from: None,
        method: &endless,
        path: &endless,
        query: &endless,
        asked: None,
        status: Some(401),
    };
    log.note_refusal("192.0.2.1", &entry);
    let written = std::fs::read_to_string(&path).expect("the log");
    assert!(written.contains("AAA") && written.len() < 1024, "{} bytes", written.len());
}

/// What an audit log says of requests that were let in and sent this.
async fn written_of(body: &'static str, handler: axum::routing::MethodRouter) -> serde_json::Value {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("audit.jsonl");
    let access = Access::open(&AccessPolicy { audit_log: Some(&path), ..AccessPolicy::default() });
    let router = access.expect("a log").guard(Router::new().route("/v1/volumes", handler));
    let request = Request::post("/v1/volumes?wait=30000").header(header::HOST, "localhost");
    let request = request.body(axum::body::Body::from(body)).expect("a request");
    // Whoever asks is gone before there is an answer that takes longer.
    let answer = TowerToHyperService::new(router).call(request);
    let _ = tokio::time::timeout(Duration::from_millis(50), answer).await;
    let written = std::fs::read_to_string(&path).expect("the log");
    serde_json::from_str(written.trim_end()).unwrap_or_else(|error| panic!("{error}: {written}"))
}

#[tokio::test]
async fn a_change_is_written_down_with_what_was_sent_whether_or_not_it_was_answered() {
    async fn makes(_: String) -> StatusCode {
        StatusCode::CREATED
    }
    async fn waits(_: String) -> StatusCode {
        std::future::pending().await
    }
    let line = written_of(r#"{"name": "vol0"}"#, axum::routing::post(makes)).await;
    assert_eq!(
        (line["status"].as_u64(), line["asked"]["name"].as_str()),
        (Some(201), Some("vol0")),
        "{line}"
    );
    let line = written_of(r#"{"name": "vol0"}"#, axum::routing::post(waits)).await;
    assert_eq!((line["status"].as_u64(), line["asked"]["name"].as_str()), (None, Some("vol0")), "{line}");
    assert_eq!((line["path"].as_str(), line["query"].as_str()), (Some("/v1/volumes"), Some("wait=30000")));

    // As text where it is no JSON, and not all of it.
    let long: &str = Box::leak("x".repeat(100_000).into_boxed_str());
    let line = written_of(long, axum::routing::post(makes)).await;
    assert_eq!(line["asked"].as_str().map(str::len), Some(1000), "{line}");
}

#[test]
fn half_a_line_does_not_take_the_next_one_with_it() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("audit.jsonl");
    let log = AuditLog::open(&path).expect("a log");
    let entry = |who| Entry {
        time_ms: 0,
        who,
        role: None,
        from: None,
        method: "POST",
        path: "/v1/volumes",
        query: "",
        asked: None,
        status: Some(201),
    };
    log.note(&entry("before"));
    std::fs::OpenOptions::new()
        .append(true)
        .open(&path)
        .expect("the log")
        .write_all(b"{\"half")
        .expect("written");
    log.tear();
    log.note(&entry("after"));
    log.note(&entry("later"));
    let written = std::fs::read_to_string(&path).expect("the log");
    let whole = written.lines().filter(|line| serde_json::from_str::<serde_json::Value>(line).is_ok());
    assert_eq!((whole.count(), written.lines().count()), (3, 4), "{written}");
}
