use std::fs;
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use axum::Router;
use axum::serve::Listener;
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::Semaphore;

use super::access::Caller;
use super::connection;
use super::places::Places;
use super::tls::{KnownClient, Tls, TlsError, TlsPolicy};

/// Who may use the socket: root and its group.
const SOCKET_MODE: u32 = 0o660;
/// How many clients are served over TCP at a time, those in their handshake included.
const CONNECTIONS_MAX: usize = 1024;

/// Why the API cannot listen.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// Another program answers there.
    #[error("{} is in use by another program: stop it, or set another controller.listen", path.display())]
    InUse {
        /// Which socket.
        path: PathBuf,
    },
    /// Something else is there.
    #[error("{} exists and is no socket: move it away, or set another controller.listen", path.display())]
    NoSocket {
        /// What.
        path: PathBuf,
    },
    /// The socket cannot be made.
    #[error("cannot listen on {}: {source}", path.display())]
    Unix {
        /// Which socket.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// TLS cannot be spoken.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The address cannot be had.
    #[error("cannot listen on {address}: {source}; set another controller.listen-tcp")]
    Tcp {
        /// Which address.
        address: SocketAddr,
        /// Why.
        source: io::Error,
    },
}

/// Where and how the API listens over TCP.
#[derive(Clone, Debug)]
pub struct TcpPolicy {
    /// The address.
    pub address: SocketAddr,
    /// How it is encrypted, if it is.
    pub tls: Option<TlsPolicy>,
    /// Somebody counts on it: if it cannot be had, nothing is served at all.
    pub is_required: bool,
}

/// A TCP address, with TLS or in clear.
type Tcp = (TcpListener, Option<Arc<Tls>>);

/// Where the API listens. The socket's file goes away with it.
#[derive(Debug)]
pub struct Listeners {
    guard: RemoveOnDrop,
    unix: UnixListener,
    tcp: Option<Tcp>,
}

impl Listeners {
    /// Binds a UNIX socket and, if wanted, a TCP address, with TLS or in clear. Needs a tokio runtime.
    pub async fn bind(path: &Path, tcp: Option<TcpPolicy>) -> Result<Self, ListenError> {
        let failed = |source| ListenError::Unix { path: path.to_owned(), source };
        remove_stale(path)?;
        let unix = UnixListener::bind(path).map_err(failed)?;
        let guard = RemoveOnDrop(path.to_owned());
        fs::set_permissions(path, fs::Permissions::from_mode(SOCKET_MODE)).map_err(failed)?;
        let tcp = match tcp {
            Some(policy) => bind_tcp(policy).await?,
            None => None,
        };
        Ok(Self { guard, unix, tcp })
    }

    /// The TCP address in use.
    pub fn tcp_address(&self) -> Option<SocketAddr> {
        self.tcp.as_ref().and_then(|(listener, _)| listener.local_addr().ok())
    }

    /// What reads certificates anew, if there are any.
    pub(crate) fn reload_certificates(&self) -> Option<impl Fn(&[KnownClient]) + Send + Sync + use<>> {
        let tls = self.tcp.as_ref()?.1.clone()?;
        Some(move |clients: &[KnownClient]| tls.reload(clients))
    }

    /// Serves until the future is dropped.
    pub async fn serve(self, router: Router) {
        let _guard = self.guard;
        let unix = accept_local(self.unix, router.clone());
        match self.tcp {
            Some((tcp, tls)) => {
                tokio::join!(unix, accept_remote(tcp, tls, router));
            }
            None => unix.await,
        }
    }
}

/// Binds a TCP address. One that nobody counts on may be somebody else's.
async fn bind_tcp(policy: TcpPolicy) -> Result<Option<Tcp>, ListenError> {
    let TcpPolicy { address, tls, is_required } = policy;
    let tls = tls.map(Tls::open).transpose()?.map(Arc::new);
    match TcpListener::bind(address).await {
        Ok(listener) => Ok(Some((listener, tls))),
        Err(source) if is_required => Err(ListenError::Tcp { address, source }),
        Err(error) => {
            tracing::warn!(
                "there is no page for browsers and no API over TCP: cannot listen on {address}: {error}; set \
                 controller.listen-tcp to another address, or to \"none\""
            );
            Ok(None)
        }
    }
}

/// Serves each client in a task of its own.
async fn accept_local(mut listener: UnixListener, router: Router) {
    loop {
        let (stream, _) = Listener::accept(&mut listener).await;
        let caller = Caller::Local { user: stream.peer_cred().ok().map(|peer| peer.uid()) };
        tokio::spawn(connection::serve(stream, router.clone(), caller));
    }
}

/// As [`accept_local`], of so many at a time: others wait until one of them leaves, of whom only some are strangers.
async fn accept_remote(mut listener: TcpListener, tls: Option<Arc<Tls>>, router: Router) {
    let (room, places) = (Arc::new(Semaphore::new(CONNECTIONS_MAX)), Arc::new(Places::default()));
    loop {
        // Nobody closes it.
        let Ok(permit) = Arc::clone(&room).acquire_owned().await else { return };
        let (stream, address) = Listener::accept(&mut listener).await;
        let (router, tls) = (router.clone(), tls.clone());
        let address = address.ip();
        let place = places.take(address);
        tokio::spawn(async move {
            let _permit = permit;
            match tls {
                None => {
                    let caller = Caller::Remote { address, certificate: None, place };
                    connection::serve(stream, router, caller).await;
                }
                Some(tls) => {
                    let greeted = tokio::select! {
                        greeted = tls.greet(stream) => greeted,
                        () = place.has_to_end() => None,
                    };
                    let Some((stream, certificate)) = greeted else { return };
                    connection::serve(stream, router, Caller::Remote { address, certificate, place }).await;
                }
            }
        });
    }
}

#[derive(Debug)]
struct RemoveOnDrop(PathBuf);

impl Drop for RemoveOnDrop {
    fn drop(&mut self) {
        // What cannot be removed is stale to the next one.
        let _ = fs::remove_file(&self.0);
    }
}

/// Removes a socket that nobody listens on; leaves everything else alone.
fn remove_stale(path: &Path) -> Result<(), ListenError> {
    let failed = |source| ListenError::Unix { path: path.to_owned(), source };
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(failed(error)),
        Ok(metadata) if !metadata.file_type().is_socket() => {
            Err(ListenError::NoSocket { path: path.to_owned() })
        }
        Ok(_) => match std::os::unix::net::UnixStream::connect(path) {
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                fs::remove_file(path).map_err(failed)
            }
            Err(error) => Err(failed(error)),
            Ok(_) => Err(ListenError::InUse { path: path.to_owned() }),
        },
    }
}
