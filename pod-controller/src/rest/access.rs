//! Who may do what. On the UNIX socket that is a matter of the socket's permissions; over TCP a bearer token or a certificate says who
//! somebody is, and a role what that one may do. Changes are written down, whoever makes them, and who is not let in.

mod audit;
mod origin;
mod pending;
mod rate;
mod refusals;
mod tokens;

use std::fmt;
use std::net::IpAddr;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::Router;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use utoipa::openapi::OpenApi;
use utoipa::openapi::security::{Http, HttpAuthScheme, SecurityRequirement, SecurityScheme};

use self::audit::{AuditLog, Entry, now_ms};
use self::pending::Pending;
use self::rate::Rates;
use self::refusals::origin as origin_of;
use self::tokens::TokenFile;
pub(super) use self::tokens::is_about_own_instance;
pub use self::tokens::{Role, TokenError};
use super::Failure;
use super::own_host::BoundTo;
use super::page;
use super::places::{self, Place};
use super::tls::{Certificate, Identity};

/// Who is at the other end of a connection.
#[derive(Clone, Debug)]
pub(super) enum Caller {
    /// A process of this host, that the socket's permissions let in.
    Local {
        /// Its user, if the kernel says so.
        user: Option<u32>,
    },
    /// Somebody over TCP.
    Remote {
        /// Where from.
        address: IpAddr,
        /// His certificate, over TLS, if he has one.
        certificate: Option<Arc<Certificate>>,
        /// His connection's.
        place: Arc<Place>,
    },
}

impl Caller {
    /// Ends when his connection has to.
    pub(super) async fn has_to_leave(&self) {
        match self {
            Self::Local { .. } => std::future::pending().await,
            Self::Remote { place, .. } => place.has_to_end().await,
        }
    }
}

impl fmt::Display for Caller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Local { user: Some(user) } => write!(f, "uid:{user}"),
            Self::Local { user: None } => f.write_str("local"),
            Self::Remote { address, .. } => write!(f, "{address}"),
        }
    }
}

/// What is configured of access to the API.
#[derive(Debug, Default)]
pub struct AccessPolicy<'a> {
    /// The file with tokens.
    pub tokens: Option<&'a Path>,
    /// Certificates say who somebody is.
    pub certificates: bool,
    /// Without them and without tokens, whoever reaches the TCP address may only look, and not do everything.
    pub looks_only: bool,
    /// The file to which changes are appended, and refusals.
    pub audit_log: Option<&'a Path>,
    /// How many requests per second somebody may send over TCP, and as many at once; 0 for any number.
    pub requests_per_second: u32,
}

/// Guards the API.
#[derive(Clone)]
pub struct Access(Arc<Guard>);

struct Guard {
    tokens: Option<TokenFile>,
    certificates: bool,
    looks_only: bool,
    audit: Option<Arc<AuditLog>>,
    rates: Option<Mutex<Rates>>,
}

impl fmt::Debug for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Access").finish_non_exhaustive()
    }
}

/// That of somebody who was let in, for answers that go on for longer than he may be known.
#[derive(Clone)]
pub(super) struct Standing {
    guard: Arc<Guard>,
    known: Identity,
    headers: HeaderMap,
    caller: Option<Caller>,
}

impl Standing {
    /// Whether he would be let in still, as the same.
    pub(super) fn holds(&self) -> bool {
        let certificate = match &self.caller {
            Some(Caller::Remote { certificate, .. }) => certificate.as_deref(),
            _ => None,
        };
        self.guard.identify(certificate, &self.headers).as_ref() == Some(&self.known)
    }
}

impl Access {
    /// Reads the tokens, and opens the log.
    pub fn open(policy: &AccessPolicy<'_>) -> Result<Self, TokenError> {
        let tokens = policy.tokens.map(TokenFile::open).transpose()?;
        let audit = policy.audit_log.map(AuditLog::open).transpose()?.map(Arc::new);
        let rates =
            (policy.requests_per_second > 0).then(|| Mutex::new(Rates::new(policy.requests_per_second)));
        let &AccessPolicy { certificates, looks_only, .. } = policy;
        Ok(Self(Arc::new(Guard { tokens, certificates, looks_only, audit, rates })))
    }

    /// Reads the tokens, whether their file changed or not, and opens the log anew. A file that makes no sense leaves what was known.
    pub fn reload(&self) {
        if let Some(audit) = &self.0.audit {
            audit.reopen();
        }
        if let Some(tokens) = &self.0.tokens {
            tokens.reload();
        }
    }

    /// Has every request be checked.
    pub fn guard(&self, router: Router) -> Router {
        router.layer(middleware::from_fn_with_state(self.clone(), check))
    }
}

async fn check(State(Access(guard)): State<Access>, mut request: Request, next: Next) -> Response {
    let caller = request.extensions().get::<Caller>().cloned();
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let anybody = || caller.as_ref().map_or_else(|| "nobody".to_owned(), ToString::to_string);
    let admitted = guard.admit(caller.as_ref(), (&method, &path), request.headers());
    if let Some(Caller::Remote { place, .. }) = &caller {
        match &admitted {
            Ok(known) if known.is_some() || !guard.asks() => {
                place.is_known(known.as_ref().map(|known| known.name.as_str()));
            }
            Err(Refused::Unknown { .. } | Refused::Stranger(_) | Refused::Lapsed(_)) => place.is_unknown(),
            // What is for everybody, what came too often, or from a page of others.
            Ok(_) | Err(_) => {}
        }
    }
    let from = caller.as_ref().map(ToString::to_string);
    let origin = origin_of(caller.as_ref());
    let known = match admitted {
        Err(refused) => {
            let who = refused.who().unwrap_or_else(anybody);
            let response = refused.into_response();
            guard.note_refusal((&who, None, from, &origin), &request, response.status());
            return response;
        }
        Ok(known) => known,
    };
    let role = known.as_ref().map(|known| known.role);
    if let Some(host) = known.as_ref().and_then(|known| known.host.clone()) {
        request.extensions_mut().insert(BoundTo(host));
    }
    if let Some(known) = known.clone().filter(|_| method == Method::GET) {
        let standing = Standing {
            guard: Arc::clone(&guard),
            known,
            headers: request.headers().clone(),
            caller: caller.clone(),
        };
        request.extensions_mut().insert(standing);
    }
    let forbidden = match &known {
        Some(known) if !known.may(&method, &path) => Some(forbidden(known.role, &method, &path)),
        None if guard.only_lets_look(caller.as_ref()) && !Role::Viewer.may(&method, &path) => {
            Some(looks_only())
        }
        _ => None,
    };
    let who = known.map_or_else(anybody, |known| known.name);
    if let Some(failure) = forbidden {
        let response = failure.into_response();
        guard.note_refusal((&who, role, from, &origin), &request, response.status());
        return response;
    }
    if let Some(audit) = &guard.audit {
        let pending = Pending::new(audit, (&who, role, from, origin), &request);
        let response = next.run(pending.listen_to(request)).await;
        pending.answered(response.status());
        return response;
    }
    next.run(request).await
}

/// Whether somebody was not let in, or may not do what he asked for.
fn is_refusal(status: StatusCode) -> bool {
    matches!(status, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN | StatusCode::TOO_MANY_REQUESTS)
}

impl Guard {
    /// Has it be known that somebody was not let in, or may not do what he asked for.
    fn note_refusal(
        &self,
        (who, role, from, origin): (&str, Option<Role>, Option<String>, &str),
        request: &Request,
        status: StatusCode,
    ) {
        let entry = Entry {
            time_ms: now_ms(),
            who,
            role,
            from,
            method: request.method().as_str(),
            path: request.uri().path(),
            query: request.uri().query().unwrap_or_default(),
            asked: None,
            status: Some(status.as_u16()),
        };
        if let Some(audit) = &self.audit {
            audit.note_refusal(origin, &entry);
        }
    }

    /// Whether whoever comes has to say who he is.
    const fn asks(&self) -> bool {
        self.tokens.is_some() || self.certificates
    }

    /// Whether somebody whom nobody knows may only look.
    fn only_lets_look(&self, caller: Option<&Caller>) -> bool {
        self.looks_only && !matches!(caller, Some(Caller::Local { .. }))
    }

    /// Who it is that comes with these.
    fn identify(&self, certificate: Option<&Certificate>, headers: &HeaderMap) -> Option<Identity> {
        let token = bearer(headers).and_then(|token| self.tokens.as_ref()?.find(token));
        let known = token.map(|token| Identity { name: token.name, role: token.role, host: token.host });
        let certificate = || self.certificate_that_counts(certificate, headers).filter(|it| it.holds());
        known.or_else(|| certificate()?.identity())
    }

    /// Somebody who says a token means that one, and not his certificate.
    fn certificate_that_counts<'a>(
        &self,
        certificate: Option<&'a Certificate>,
        headers: &HeaderMap,
    ) -> Option<&'a Certificate> {
        let says_token = self.tokens.is_some() && bearer(headers).is_some();
        certificate.filter(|_| self.certificates && !says_token)
    }

    /// Whose request it is; nobody's in particular on the UNIX socket, or where nobody is asked who he is.
    fn admit(
        &self,
        caller: Option<&Caller>,
        (method, path): (&Method, &str),
        headers: &HeaderMap,
    ) -> Result<Option<Identity>, Refused> {
        let (address, certificate) = match caller {
            // No browser reaches it.
            Some(Caller::Local { .. }) => return Ok(None),
            Some(Caller::Remote { address, certificate, .. }) => (Some(*address), certificate.as_deref()),
            None => (None, None),
        };
        let by_certificate = self.certificate_that_counts(certificate, headers);
        let lapsed = by_certificate.filter(|it| !it.holds());
        let known = self.identify(certificate, headers);
        // Somebody who is known has the rate to himself; all others of an address, or of the network that one customer has, share one, so
        // that guessing is slow.
        let key = match (&known, address) {
            (Some(known), _) => format!("known {}", known.name),
            (None, Some(address)) => format!("address {}", places::origin(address)),
            (None, None) => "nobody".to_owned(),
        };
        if let Some(rates) = &self.rates {
            let mut rates = rates.lock().unwrap_or_else(PoisonError::into_inner);
            let taken = rates.take(&key, Instant::now());
            let who = known.as_ref().map(|known| known.name.clone());
            taken.map_err(|wait| Refused::TooMany { wait, who })?;
        }
        let asks = self.asks();
        origin::check(method, headers, !asks).map_err(Refused::Foreign)?;
        match (known, by_certificate) {
            // A browser cannot say who asks for the page; the page can. Only to look at it: whatever else is sent there is a stranger's.
            (None, _) if matches!(*method, Method::GET | Method::HEAD) && page::is_part(path) => Ok(None),
            (None, Some(certificate)) if lapsed.is_some() => Err(Refused::Lapsed(certificate.to_string())),
            (None, Some(certificate)) => Err(Refused::Stranger(certificate.to_string())),
            (None, None) if asks => Err(Refused::Unknown { certificates: self.certificates }),
            (known, _) => Ok(known),
        }
    }
}

fn bearer(headers: &HeaderMap) -> Option<&str> {
    let value = headers.get(header::AUTHORIZATION)?.to_str().ok()?;
    let (scheme, token) = value.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
}

/// Why somebody is not let in.
enum Refused {
    /// He says nothing, or something that nobody knows.
    Unknown { certificates: bool },
    /// His certificate is good, and has these names, and nobody knows them.
    Stranger(String),
    /// His certificate, which has these names, was good when he came.
    Lapsed(String),
    /// There were too many of his requests, whoever he is.
    TooMany { wait: Duration, who: Option<String> },
    /// A page of another site sent it.
    Foreign(Failure),
}

impl Refused {
    /// Who it is, if that is known.
    fn who(&self) -> Option<String> {
        match self {
            Self::Stranger(names) | Self::Lapsed(names) => Some(names.clone()),
            Self::TooMany { who, .. } => who.clone(),
            Self::Unknown { .. } | Self::Foreign(_) => None,
        }
    }
}

impl IntoResponse for Refused {
    fn into_response(self) -> Response {
        match self {
            Self::Stranger(names) => {
                let detail = format!(
                    "your certificate is of an authority that is known, but {names} has no role here: have a [[controller.tls.client]] \
                     with one of these names added to the controller's configuration, or send a token"
                );
                Failure::new(StatusCode::UNAUTHORIZED, "unknown-certificate", detail).into_response()
            }
            Self::Lapsed(names) => {
                let detail = format!(
                    "the certificate with which you came, {names}, has expired since, or its authority is in controller.tls.client-ca no \
                     more: connect anew, with one that holds"
                );
                let mut response =
                    Failure::new(StatusCode::UNAUTHORIZED, "unknown-certificate", detail).into_response();
                response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
                response
            }
            Self::Unknown { certificates } => {
                let other = if certificates { ", come with a certificate (podctl --cert-file)" } else { "" };
                let detail = format!(
                    "the API needs a token here: send authorization: Bearer TOKEN{other}, or use the UNIX socket"
                );
                let mut response = Failure::new(StatusCode::UNAUTHORIZED, "no-token", detail).into_response();
                response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
                response
            }
            Self::Foreign(failure) => failure.into_response(),
            Self::TooMany { wait, .. } => {
                let seconds = wait.as_secs() + 1;
                let detail = format!("there were too many requests: try again in {seconds} s");
                let failure = Failure::new(StatusCode::TOO_MANY_REQUESTS, "too-many-requests", detail);
                let mut response = failure.into_response();
                response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
                response
            }
        }
    }
}

/// Says how to say who one is.
pub(super) fn describe(description: &mut OpenApi) {
    let scheme = SecurityScheme::Http(Http::new(HttpAuthScheme::Bearer));
    description.components.get_or_insert_default().add_security_scheme("token", scheme);
    let certificate = SecurityScheme::MutualTls { description: None, deprecated: None, extensions: None };
    description.components.get_or_insert_default().add_security_scheme("certificate", certificate);
    // With a token or a certificate and, on the UNIX socket, without.
    description.security = Some(vec![
        SecurityRequirement::new::<_, [&str; 0], &str>("token", []),
        SecurityRequirement::new::<_, [&str; 0], &str>("certificate", []),
        SecurityRequirement::default(),
    ]);
}

fn looks_only() -> Failure {
    Failure::new(
        StatusCode::FORBIDDEN,
        "forbidden",
        "over TCP nobody may change anything here without a token: use the UNIX socket, as podctl does, or have controller.tokens \
         set in the controller's configuration (podctl token makes them)",
    )
}

fn forbidden(role: Role, method: &Method, path: &str) -> Failure {
    let path: String = path.chars().take(200).collect();
    let detail =
        format!("{method} {path} is not for the role {}: ask for a token with another one", role.word());
    Failure::new(StatusCode::FORBIDDEN, "forbidden", detail)
}

#[cfg(test)]
mod tests;
