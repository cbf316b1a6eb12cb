use std::fs;
use std::os::unix::fs::PermissionsExt;

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use rustls::pki_types::UnixTime;
use tempfile::TempDir;
use tokio::io::AsyncReadExt;
use tokio::net::TcpListener;

use super::*;

fn policy(directory: &TempDir) -> TlsPolicy {
    let key = KeyPair::generate().expect("a key");
    let params = CertificateParams::new(vec!["localhost".to_owned()]).expect("parameters");
    let pair = (directory.path().join("c.pem"), directory.path().join("c.key"));
    fs::write(&pair.0, params.self_signed(&key).expect("a certificate").pem()).expect("written");
    fs::write(&pair.1, key.serialize_pem()).expect("written");
    fs::set_permissions(&pair.1, fs::Permissions::from_mode(0o600)).expect("a mode");
    TlsPolicy { certificate: pair.0, key: pair.1, client_ca: None, clients: Vec::new() }
}

#[tokio::test(start_paused = true)]
async fn whoever_does_not_finish_a_handshake_is_sent_away() {
    let directory = tempfile::tempdir().expect("a directory");
    let tls = Arc::new(Tls::open(policy(&directory)).expect("TLS"));
    for sent in [&b""[..], b"\x16", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"] {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let mut client = TcpStream::connect(listener.local_addr().expect("an address")).await.expect("it");
        let (stream, _) = listener.accept().await.expect("a client");
        client.write_all(sent).await.expect("sent");
        assert!(tls.greet(stream).await.is_none(), "{sent:?}");
        // Closed, whatever is said before.
        let _ = client.read_to_end(&mut Vec::new()).await;
    }
}

#[tokio::test]
async fn garbage_is_no_handshake_and_http_is_told_where_it_is() {
    let directory = tempfile::tempdir().expect("a directory");
    let tls = Arc::new(Tls::open(policy(&directory)).expect("TLS"));
    for (sent, told) in
        [(&b"\x16\0\0\0\0\0\0\0"[..], ""), (b"GET / HTTP/1.1\r\n\r\n", "https://"), (b"\0", "https://")]
    {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let mut client = TcpStream::connect(listener.local_addr().expect("an address")).await.expect("it");
        let (stream, _) = listener.accept().await.expect("a client");
        client.write_all(sent).await.expect("sent");
        client.shutdown().await.expect("half closed");
        assert!(tls.greet(stream).await.is_none(), "{sent:?}");
        let mut answer = Vec::new();
        let _ = client.read_to_end(&mut answer).await;
        assert!(String::from_utf8_lossy(&answer).contains(told), "{answer:?}");
    }
}

#[test]
fn files_that_are_no_use_are_named() {
    let directory = tempfile::tempdir().expect("a directory");
    let good = policy(&directory);
    let bad = directory.path().join("bad.pem");
    fs::write(&bad, "no certificate\n").expect("written");
    fs::set_permissions(&bad, fs::Permissions::from_mode(0o600)).expect("a mode");
    let elsewhere = tempfile::tempdir().expect("a directory");
    let other = policy(&elsewhere);
    let absent = directory.path().join("absent");
    for (policy, words) in [
        (TlsPolicy { certificate: absent.clone(), ..good.clone() }, ["absent", "in the configuration"]),
        (TlsPolicy { certificate: bad.clone(), ..good.clone() }, ["bad.pem", "BEGIN CERTIFICATE"]),
        (TlsPolicy { key: bad.clone(), ..good.clone() }, ["bad.pem", "no private key"]),
        (TlsPolicy { key: other.key.clone(), ..good.clone() }, ["c.pem", "the key of that certificate"]),
        (TlsPolicy { client_ca: Some(bad.clone()), ..good.clone() }, ["bad.pem", "BEGIN CERTIFICATE"]),
    ] {
        let error = Tls::open(policy).map(drop).expect_err("no use").to_string();
        assert!(words.iter().all(|word| error.contains(word)), "{error}");
    }
    fs::set_permissions(&good.key, fs::Permissions::from_mode(0o644)).expect("a mode");
    let error = Tls::open(good).map(drop).expect_err("open to all").to_string();
    assert!(error.contains("chmod 640"), "{error}");
}

#[test]
fn a_certificate_holds_until_it_expires_or_its_authority_is_taken_away() {
    let directory = tempfile::tempdir().expect("a directory");
    let authority = |name: &str| {
        let mut params = CertificateParams::new(Vec::new()).expect("parameters");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, name);
        let key = KeyPair::generate().expect("a key");
        let pem = params.self_signed(&key).expect("a certificate").pem();
        (pem, Issuer::new(params, key))
    };
    let ((ours, issuer), (others, _)) = (authority("ours"), authority("others"));
    let ca = directory.path().join("ca.pem");
    fs::write(&ca, &ours).expect("written");
    let alice = "cn:alice".parse().expect("a name");
    let alice = KnownClient { by: alice, role: crate::rest::Role::Viewer, host: None };
    let tls =
        Arc::new(Tls::open(TlsPolicy { client_ca: Some(ca.clone()), ..policy(&directory) }).expect("TLS"));
    let mut params = CertificateParams::new(Vec::new()).expect("parameters");
    params.distinguished_name.push(DnType::CommonName, "alice");
    params.not_before = rcgen::date_time_ymd(2020, 1, 1);
    params.not_after = rcgen::date_time_ymd(2030, 1, 1);
    let signed = params.signed_by(&KeyPair::generate().expect("a key"), &issuer).expect("a certificate");
    let certificate = Certificate::read(&[signed.der().clone()], &tls, tls.known.current()).expect("one");
    let at = |year| {
        let seconds = rcgen::date_time_ymd(year, 6, 1).unix_timestamp();
        UnixTime::since_unix_epoch(Duration::from_secs(seconds.try_into().expect("after 1970")))
    };
    assert_eq!((certificate.holds_at(at(2029)), certificate.holds_at(at(2030))), (true, false));
    assert_eq!(certificate.identity(), None);
    tls.reload(&[alice]);
    assert_eq!(certificate.identity().expect("she is known").name, "cn:alice");
    assert!(certificate.holds_at(at(2029)), "the same was read anew");

    fs::write(&ca, others).expect("written");
    tls.reload(&[]);
    assert!(!certificate.holds_at(at(2029)));
    assert_eq!(certificate.identity(), None);
    fs::write(&ca, ours).expect("written");
    tls.reload(&[]);
    assert!(certificate.holds_at(at(2029)));
}
