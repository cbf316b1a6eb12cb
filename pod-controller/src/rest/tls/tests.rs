use std::fs;
use std::os::unix::fs::PermissionsExt;

use rcgen::{CertificateParams, KeyPair};
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
    let tls = Tls::open(policy(&directory)).expect("TLS");
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
    let tls = Tls::open(policy(&directory)).expect("TLS");
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
