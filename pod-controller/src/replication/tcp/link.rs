//! How connections are made, and what goes over them.

use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cxl_pool::ReplicaId;
use pod_protocol::controller::PortWaker;
use pod_protocol::protocol::Protocol;
use pod_protocol::replicas::MESSAGE_BYTES_LIMIT;
use rustls::{AlertDescription, CertificateError};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, BufReader, BufWriter};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc};
use tokio_rustls::{TlsAcceptor, TlsConnector, TlsStream};
use uuid::Uuid;

use super::frame::{self, SILENCE_MAX};
use super::greeting::{GREETING_BYTES_LIMIT, Hello, Reply};
use super::line::{Arrival, Line, Outgoing};
use super::trust::{Trust, check_name, name};

/// How long it may take to reach another one, and again how long until both know each other.
const GREETING_MAX: Duration = Duration::from_secs(5);
/// How soon it is tried again to reach one that was not there. Twice as long each time, up to [`RETRY_LATER`].
const RETRY_SOON: Duration = Duration::from_millis(50);
/// How soon it is tried again to reach one that refused us, or whom we refused.
const RETRY_LATER: Duration = Duration::from_secs(1);
/// How often it is told that another one is not reached for the same reason.
const SAY_AGAIN: Duration = Duration::from_mins(1);
/// How often it is told that strangers come.
const STRANGERS_EVERY: Duration = Duration::from_secs(10);
/// How many that are not known yet are dealt with at a time.
const GREETINGS_MAX: usize = 256;
/// How often something is said at least.
const SPEAK_EVERY: Duration = Duration::from_millis(500);
/// What is written at once.
const WRITE_BYTES: usize = 64 << 10;

/// What all connections of a replica share.
pub(super) struct Site {
    pub(super) me: ReplicaId,
    pub(super) protocol: Protocol,
    pub(super) pool: Uuid,
    pub(super) trust: Arc<Trust>,
    pub(super) waker: PortWaker,
    pub(super) arrivals: mpsc::Sender<Arrival>,
}

/// Why there is no connection.
#[derive(Debug, PartialEq, Eq)]
enum Trouble {
    /// It is not there, or not now.
    Away(String),
    /// Something is configured wrongly.
    Wrong(String),
}

/// Connects to a replica with a lower number, whenever it is not.
pub(super) async fn keep_connected(site: Arc<Site>, line: Arc<Line>) {
    let mut said: Option<(String, Instant)> = None;
    let mut pause = RETRY_SOON;
    loop {
        let reason = match dial(&site, &line).await {
            Ok(stream) => {
                let began = Instant::now();
                converse(&site, &line, stream).await;
                if began.elapsed() >= RETRY_LATER {
                    (said, pause) = (None, RETRY_SOON);
                    continue;
                }
                "the connection was lost at once".to_owned()
            }
            Err(Trouble::Away(reason)) => reason,
            Err(Trouble::Wrong(reason)) => {
                pause = RETRY_LATER;
                reason
            }
        };
        let heard = said.as_ref().is_some_and(|(before, at)| *before == reason && at.elapsed() < SAY_AGAIN);
        if !heard {
            tracing::warn!(replica = %line.replica, address = %line.address, reason, "is not connected");
            said = Some((reason, Instant::now()));
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(RETRY_LATER);
    }
}

async fn dial(site: &Site, line: &Line) -> Result<TlsStream<TcpStream>, Trouble> {
    let address = &line.address;
    let reaching = tokio::time::timeout(GREETING_MAX, TcpStream::connect((address.host(), address.port())));
    let stream = match reaching.await {
        Ok(Ok(stream)) => stream,
        Ok(Err(error)) => return Err(Trouble::Away(error.to_string())),
        Err(_) => return Err(Trouble::Away("nobody answers there".to_owned())),
    };
    let greeting = async {
        stream.set_nodelay(true)?;
        let connector = TlsConnector::from(site.trust.sides().client);
        let name = name(address).map_err(io::Error::other)?;
        let mut stream = TlsStream::from(connector.connect(name, stream).await?);
        let hello = Hello::new(site.protocol, site.pool, site.me, line.replica);
        // A number and text always become JSON.
        let hello = serde_json::to_vec(&hello).map_err(io::Error::other)?;
        frame::write(&mut stream, &hello).await?;
        stream.flush().await?;
        let reply = frame::read(&mut stream, GREETING_BYTES_LIMIT).await?;
        Ok((stream, serde_json::from_slice(&reply)?))
    };
    match tokio::time::timeout(GREETING_MAX, greeting).await {
        Ok(Ok((stream, Reply::Welcome { .. }))) => Ok(stream),
        Ok(Ok((_, Reply::Refused { reason }))) => Err(Trouble::Wrong(format!("it refuses us: {reason}"))),
        Ok(Err(error)) => Err(explain(&error)),
        Err(_) => Err(Trouble::Away("the greeting was not done in time".to_owned())),
    }
}

/// What went wrong, and what to do.
fn explain(error: &io::Error) -> Trouble {
    let tls = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
    let what_to_do = match tls {
        None => return Trouble::Away(error.to_string()),
        Some(rustls::Error::InvalidCertificate(error)) => match error {
            CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
                "its certificate has expired, or the clock here is wrong: renew it"
            }
            CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => {
                "its certificate is not for the host that replication.tcp.addresses says: have one issued with that name"
            }
            CertificateError::UnknownIssuer | CertificateError::BadSignature => {
                "its certificate is not of the authority in replication.tcp.ca: have one issued by it"
            }
            _ => "its certificate is refused",
        },
        Some(rustls::Error::AlertReceived(
            AlertDescription::UnknownCA | AlertDescription::DecryptError | AlertDescription::BadCertificate,
        )) => {
            "it refuses our certificate: replication.tcp.certificate must be of the authority in its replication.tcp.ca"
        }
        Some(rustls::Error::AlertReceived(AlertDescription::CertificateExpired)) => {
            "it refuses our certificate, which has expired: renew replication.tcp.certificate"
        }
        Some(_) => "TLS failed",
    };
    Trouble::Wrong(format!("{what_to_do} ({error})"))
}

/// Takes in those with higher numbers.
pub(super) async fn accept(site: Arc<Site>, lines: BTreeMap<ReplicaId, Arc<Line>>, listener: TcpListener) {
    let (lines, strangers) = (Arc::new(lines), Arc::new(std::sync::Mutex::new(Strangers::default())));
    let places = Arc::new(Semaphore::new(GREETINGS_MAX));
    loop {
        // Nobody closes it.
        let Ok(place) = Arc::clone(&places).acquire_owned().await else { return };
        let (stream, address) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                // Too many files are open, most likely.
                tracing::error!("cannot take in another replica: {error}");
                tokio::time::sleep(RETRY_LATER).await;
                continue;
            }
        };
        let (site, lines, strangers) = (Arc::clone(&site), Arc::clone(&lines), Arc::clone(&strangers));
        tokio::spawn(async move {
            let greeted = tokio::time::timeout(GREETING_MAX, greet(&site, &lines, stream)).await;
            drop(place);
            match greeted {
                Ok(Ok((line, stream))) => converse(&site, &line, stream).await,
                Ok(Err(reason)) => Strangers::tell(&strangers, address.ip(), &reason),
                Err(_) => Strangers::tell(&strangers, address.ip(), "the greeting was not done in time"),
            }
        });
    }
}

/// Finds out who somebody is.
async fn greet(
    site: &Site,
    lines: &BTreeMap<ReplicaId, Arc<Line>>,
    stream: TcpStream,
) -> Result<(Arc<Line>, TlsStream<TcpStream>), String> {
    let told = |error: io::Error| match explain(&error) {
        Trouble::Away(reason) | Trouble::Wrong(reason) => reason,
    };
    stream.set_nodelay(true).map_err(told)?;
    let accepting = TlsAcceptor::from(site.trust.sides().server).accept(stream);
    let mut stream = TlsStream::from(accepting.await.map_err(told)?);
    let hello = frame::read(&mut stream, GREETING_BYTES_LIMIT).await.map_err(told)?;
    let known = serde_json::from_slice(&hello).map_err(|error| format!("it says no hello: {error}"));
    let known = known.and_then(|hello| know(site, lines, &hello, &stream));
    let reply = match &known {
        Ok(_) => Reply::Welcome { protocol: site.protocol.into() },
        Err(reason) => Reply::Refused { reason: reason.clone() },
    };
    // Numbers and text always become JSON.
    let reply = serde_json::to_vec(&reply).unwrap_or_default();
    frame::write(&mut stream, &reply).await.map_err(told)?;
    stream.flush().await.map_err(told)?;
    match known {
        Ok(line) => Ok((line, stream)),
        Err(reason) => {
            // Closed with something unread, the reply would be lost on its way.
            let _ = stream.shutdown().await;
            Err(reason)
        }
    }
}

fn know(
    site: &Site,
    lines: &BTreeMap<ReplicaId, Arc<Line>>,
    hello: &Hello,
    stream: &TlsStream<TcpStream>,
) -> Result<Arc<Line>, String> {
    let from = hello.check(site.protocol, site.pool, site.me)?;
    let line = lines.get(&from).ok_or_else(|| {
        format!("it says that it is replica {from}, which replication.tcp.addresses does not have")
    })?;
    let shown = stream.get_ref().1.peer_certificates().and_then(<[_]>::first);
    let shown = shown.ok_or_else(|| "it has shown no certificate".to_owned())?;
    check_name(shown, &line.address).map_err(|reason| format!("replica {from}: {reason}"))?;
    Ok(Arc::clone(line))
}

/// Carries messages until the connection is lost, or another one has taken its place.
async fn converse(site: &Site, line: &Line, stream: impl AsyncRead + AsyncWrite) {
    let mut outgoing = line.connect();
    tracing::info!(replica = %line.replica, "is connected");
    let (reader, writer) = tokio::io::split(stream);
    let ended = tokio::select! {
        ended = take_in(site, line.replica, reader) => ended,
        ended = speak(&mut outgoing, writer) => ended,
    };
    if line.disconnect(outgoing.count) {
        let reason = ended.err().map_or_else(|| "it ended".to_owned(), |error| error.to_string());
        tracing::warn!(replica = %line.replica, reason, "is not connected any more");
    }
}

async fn take_in(site: &Site, from: ReplicaId, reader: impl AsyncRead + Unpin) -> io::Result<()> {
    let mut reader = BufReader::with_capacity(WRITE_BYTES, reader);
    loop {
        let message = frame::read(&mut reader, MESSAGE_BYTES_LIMIT).await?;
        if message.is_empty() {
            continue;
        }
        if site.arrivals.send((from, message)).await.is_err() {
            return Ok(());
        }
        site.waker.wake();
    }
}

async fn speak(outgoing: &mut Outgoing, writer: impl AsyncWrite + Unpin) -> io::Result<()> {
    let mut writer = BufWriter::with_capacity(WRITE_BYTES, writer);
    loop {
        match tokio::time::timeout(SPEAK_EVERY, outgoing.next()).await {
            Ok(None) => return Ok(()),
            Ok(Some(message)) => frame::write(&mut writer, &message).await?,
            Err(_) => frame::write(&mut writer, &[]).await?,
        }
        while let Some(message) = outgoing.next_now() {
            frame::write(&mut writer, &message).await?;
        }
        writer.flush().await?;
    }
}

/// Whoever reaches the port can have something told: not all of it is.
#[derive(Default)]
struct Strangers {
    told: Option<Instant>,
    untold: u64,
}

impl Strangers {
    fn tell(strangers: &std::sync::Mutex<Self>, address: IpAddr, reason: &str) {
        let mut it = strangers.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if it.told.is_some_and(|at| at.elapsed() < STRANGERS_EVERY) {
            it.untold += 1;
            return;
        }
        let untold = std::mem::take(&mut it.untold);
        it.told = Some(Instant::now());
        drop(it);
        tracing::warn!(%address, reason, untold, "somebody who is no replica of this pod is not let in");
    }
}

// A connection says something more often than it counts as lost.
const _: () = assert!(SPEAK_EVERY.as_millis() * 3 < SILENCE_MAX.as_millis());
