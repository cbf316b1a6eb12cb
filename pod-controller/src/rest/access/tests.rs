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
        status: 401,
    };
    log.note_refusal("192.0.2.1", &entry);
    let written = std::fs::read_to_string(&path).expect("the log");
    assert!(written.contains("AAA") && written.len() < 1024, "{} bytes", written.len());
}
