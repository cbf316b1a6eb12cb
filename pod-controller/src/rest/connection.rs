//! One client's connection. What the HTTP library refuses by itself (bytes that are no HTTP, heads that are too large) it
//! answers with an empty body, or not at all; clients are promised a problem description with every refusal.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::Router;
use axum::http::StatusCode;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use pod_api::PROBLEM_JSON;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::time::Sleep;

use super::access::Caller;
use super::problem::Failure;

/// How long a client may take for the head of a request, and stay connected between two.
const HEAD_TIMEOUT: Duration = Duration::from_secs(30);
/// How long a client may read nothing of an answer that waits for it.
const WRITE_TIMEOUT: Duration = Duration::from_secs(30);
/// How long a client may take to read why it was refused.
const REFUSAL_TIMEOUT: Duration = Duration::from_secs(5);

/// Serves a client until it leaves, has to leave, or is refused.
pub(super) async fn serve<S: AsyncRead + AsyncWrite + Unpin>(stream: S, router: Router, caller: Caller) {
    let mut client = Client { stream, owed: false, refusal: Vec::new(), refusal_sent: 0, stalls: None };
    let router = TowerToHyperService::new(router);
    let leaves = caller.clone();
    let service = service_fn(move |mut request: hyper::Request<Incoming>| {
        request.extensions_mut().insert(caller.clone());
        router.call(request)
    });
    let serving = http1::Builder::new()
        .half_close(true)
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .serve_connection(TokioIo::new(&mut client), service);
    let served = tokio::select! {
        served = serving => served.map_err(Some),
        () = leaves.has_to_leave() => Err(None),
    };
    let Err(error) = served else { return };
    if !client.owed {
        return;
    }
    let Some(error) = error else {
        let detail =
            "whoever does not say who he is may not stay so long where many come: connect again".to_owned();
        return client.refuse(&refusal(StatusCode::REQUEST_TIMEOUT, detail)).await;
    };
    let refusal = if error.is_timeout() {
        let waited = HEAD_TIMEOUT.as_secs();
        refusal(StatusCode::REQUEST_TIMEOUT, format!("no whole request came within {waited} s"))
    } else {
        refusal(StatusCode::BAD_REQUEST, format!("this is no HTTP/1.1 request: {error}"))
    };
    client.refuse(&refusal).await;
}

/// A whole response that refuses what the client sent and ends the connection.
pub(super) fn refusal(status: StatusCode, detail: String) -> Vec<u8> {
    let body = Failure::new(status, "no-request", detail).to_json();
    let mut response = format!(
        "HTTP/1.1 {} {}\r\ncontent-type: {PROBLEM_JSON}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
        status.as_u16(),
        status.canonical_reason().unwrap_or("Error"),
        body.len()
    )
    .into_bytes();
    response.extend_from_slice(&body);
    response
}

/// The status of a refusal without a body. Ours have one, so it is the library's.
fn bare_refusal(response: &[u8]) -> Option<StatusCode> {
    let response = response.strip_prefix(b"HTTP/1.1 ").or_else(|| response.strip_prefix(b"HTTP/1.0 "))?;
    let status = StatusCode::from_bytes(response.get(..3)?).ok()?;
    let head = std::str::from_utf8(response).ok()?.strip_suffix("\r\n\r\n")?;
    let empty = head.lines().any(|line| line.eq_ignore_ascii_case("content-length: 0"));
    (status.is_client_error() && empty).then_some(status)
}

/// The client's stream, as the HTTP library sees it.
struct Client<S> {
    stream: S,
    /// The client sent something after the last answer.
    owed: bool,
    /// What is sent in place of a refusal without a body.
    refusal: Vec<u8>,
    refusal_sent: usize,
    /// How long it may go on reading nothing, if it does not read what waits for it.
    stalls: Option<Pin<Box<Sleep>>>,
}

impl<S: AsyncWrite + Unpin> Client<S> {
    /// Sends a whole refusal, and ends.
    async fn refuse(&mut self, refusal: &[u8]) {
        // A client that is gone has no use for it.
        let _ = tokio::time::timeout(REFUSAL_TIMEOUT, async {
            self.stream.write_all(refusal).await?;
            self.stream.shutdown().await
        })
        .await;
    }

    /// What became of a write, which fails once it has waited for too long.
    fn within_time<T>(
        &mut self,
        context: &mut Context<'_>,
        written: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.stalls = None;
            return written;
        }
        let stalls = self.stalls.get_or_insert_with(|| Box::pin(tokio::time::sleep(WRITE_TIMEOUT)));
        ready!(stalls.as_mut().poll(context));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Client<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = into.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(context, into))?;
        self.owed |= into.filled().len() > before;
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Client<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        from: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.owed = false;
        if self.refusal.is_empty() {
            let Some(status) = bare_refusal(from) else {
                let written = Pin::new(&mut self.stream).poll_write(context, from);
                return self.within_time(context, written);
            };
            let why = match status {
                StatusCode::URI_TOO_LONG => "the path is too long",
                StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE => {
                    "there are too many headers, or they are too long"
                }
                _ => "this is no HTTP/1.1 request",
            };
            self.refusal = refusal(status, why.to_owned());
        }
        let client = &mut *self;
        while client.refusal_sent < client.refusal.len() {
            let rest = &client.refusal[client.refusal_sent..];
            let written = Pin::new(&mut client.stream).poll_write(context, rest);
            let sent = ready!(client.within_time(context, written))?;
            if sent == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            client.refusal_sent += sent;
        }
        // It stands for the whole of what the library wrote; nothing follows it.
        Poll::Ready(Ok(from.len()))
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(context);
        self.within_time(context, flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use axum::routing::get;
    use tokio::io::AsyncReadExt;

    use std::sync::Arc;

    use super::*;
    use crate::rest::places::Places;

    fn router() -> Router {
        Router::new().route("/", get(|| async { "here" }))
    }

    /// What a client reads that sends this and then nothing more.
    async fn answer(request: &[u8]) -> String {
        let (mut client, server) = tokio::io::duplex(64);
        let serving = tokio::spawn(serve(server, router(), Caller::Local { user: None }));
        let (mut from, mut to) = tokio::io::split(&mut client);
        let sent = async {
            // A server may refuse before it has read everything.
            let _ = to.write_all(request).await;
            let _ = to.shutdown().await;
        };
        let mut answer = Vec::new();
        let ((), read) = tokio::join!(sent, from.read_to_end(&mut answer));
        read.unwrap();
        serving.await.unwrap();
        String::from_utf8(answer).unwrap()
    }

    fn assert_refused(answer: &str, status: &str) {
        let (head, body) = answer.split_once("\r\n\r\n").expect(answer);
        assert!(head.starts_with(&format!("HTTP/1.1 {status} ")), "{answer}");
        assert!(head.contains("application/problem+json"), "{answer}");
        assert!(head.contains(&format!("content-length: {}", body.len())), "{answer}");
        assert!(body.contains(&format!("\"status\":{status}")), "{answer}");
    }

    #[tokio::test]
    async fn what_is_no_http_is_refused_with_a_reason() {
        for garbage in [
            &b"\0\x01\x02\r\n\r\n"[..],
            b"GET\r\n\r\n",
            b"GET / HTTP/9.9\r\n\r\n",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"GET / HTTP/1.1\r\nhost",
            b"\x16\x03\x01\x02\x00\x01\x00",
            b"G",
        ] {
            assert_refused(&answer(garbage).await, "400");
        }
    }

    #[tokio::test]
    async fn heads_that_are_too_large_are_refused_with_a_reason() {
        let path = format!("GET /{} HTTP/1.1\r\n\r\n", "x".repeat(100_000));
        assert_refused(&answer(path.as_bytes()).await, "414");
        let header = format!("GET / HTTP/1.1\r\nx: {}\r\n\r\n", "x".repeat(1_000_000));
        assert_refused(&answer(header.as_bytes()).await, "431");
    }

    #[tokio::test]
    async fn garbage_after_a_request_is_refused_too() {
        let both = answer(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n\0\0\r\n\r\n").await;
        let (first, second) = both.split_once("here").expect(&both);
        assert!(first.starts_with("HTTP/1.1 200 "), "{both}");
        assert_refused(second, "400");
    }

    #[tokio::test(start_paused = true)]
    async fn who_reads_nothing_is_not_waited_for() {
        let (mut client, server) = tokio::io::duplex(64);
        let router = Router::new().route("/", get(|| async { "x".repeat(100_000) }));
        let serving = tokio::spawn(serve(server, router, Caller::Local { user: None }));
        client.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
        let ended = tokio::time::timeout(Duration::from_hours(1), serving).await;
        ended.expect("it ends").unwrap();
        drop(client);
    }

    #[tokio::test(start_paused = true)]
    async fn a_stranger_who_goes_on_asking_is_sent_away_in_the_end() {
        let places = Arc::new(Places::default());
        let place = places.take([127, 0, 0, 1].into());
        let caller = Caller::Remote { address: [127, 0, 0, 1].into(), certificate: None, place };
        let (mut client, server) = tokio::io::duplex(1024);
        let serving = tokio::spawn(serve(server, router(), caller));
        let began = tokio::time::Instant::now();
        while client.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").await.is_ok() {
            assert!(began.elapsed() < Duration::from_mins(2), "he is still there");
            tokio::time::sleep(HEAD_TIMEOUT / 2).await;
        }
        serving.await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn half_a_request_is_refused_in_time_and_silence_ends_quietly() {
        for (sent, status) in [(&b"GET /v1/hosts HT"[..], Some("408")), (b"", None)] {
            let (mut client, server) = tokio::io::duplex(1024);
            let serving = tokio::spawn(serve(server, router(), Caller::Local { user: None }));
            client.write_all(sent).await.unwrap();
            let mut answer = String::new();
            client.read_to_string(&mut answer).await.unwrap();
            serving.await.unwrap();
            match status {
                Some(status) => assert_refused(&answer, status),
                None => assert_eq!(answer, ""),
            }
        }
    }
}
