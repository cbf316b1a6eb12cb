//! Who somebody is by the names in a certificate.

use std::fmt;
use std::str::FromStr;
use std::sync::{Arc, Mutex, PoisonError};

use axum::http::Method;
use rustls::pki_types::{CertificateDer, UnixTime};
use serde::{Deserialize, Deserializer};
use x509_parser::certificate::X509Certificate;
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::FromDer;

use super::super::access::{Role, is_about_own_instance};
use super::{Known, Tls};

/// More names than any certificate needs are not looked at.
const NAMES_MAX: usize = 64;

/// A name in a certificate: `dns:h1.pod.example`, `uri:spiffe://pod/h1` or `email:alice@pod.example` of its alternative names, or
/// `cn:alice`, its subject's common name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CertificateName {
    kind: Kind,
    name: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Dns,
    Uri,
    Email,
    CommonName,
}

/// Text that is no name in a certificate.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no name in a certificate: write dns:NAME, uri:URI, email:ADDRESS or cn:NAME")]
pub struct ParseCertificateNameError(String);

impl CertificateName {
    fn new(kind: Kind, name: &str) -> Self {
        // DNS does not tell capitals from small letters.
        let name = if kind == Kind::Dns { name.to_ascii_lowercase() } else { name.to_owned() };
        Self { kind, name }
    }
}

impl FromStr for CertificateName {
    type Err = ParseCertificateNameError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let refuse = || ParseCertificateNameError(text.chars().take(80).collect());
        let (kind, name) = text.split_once(':').filter(|(_, name)| !name.is_empty()).ok_or_else(refuse)?;
        let kind = match kind {
            "dns" => Kind::Dns,
            "uri" => Kind::Uri,
            "email" => Kind::Email,
            "cn" => Kind::CommonName,
            _ => return Err(refuse()),
        };
        Ok(Self::new(kind, name))
    }
}

impl fmt::Display for CertificateName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            Kind::Dns => "dns",
            Kind::Uri => "uri",
            Kind::Email => "email",
            Kind::CommonName => "cn",
        };
        // It comes from outside, and goes to logs.
        let name: String =
            self.name.chars().take(200).map(|it| if it.is_control() { '?' } else { it }).collect();
        write!(f, "{kind}:{name}")
    }
}

impl<'de> Deserialize<'de> for CertificateName {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        String::deserialize(from)?.parse().map_err(serde::de::Error::custom)
    }
}

/// Somebody whom a certificate says who he is.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct KnownClient {
    /// A name that his certificate has.
    #[serde(rename = "match")]
    pub by: CertificateName,
    /// What he may do.
    pub role: Role,
    /// Only what concerns this host.
    #[serde(default)]
    pub host: Option<String>,
}

/// Who somebody is, and what he may do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in super::super) struct Identity {
    pub(in super::super) name: String,
    pub(in super::super) role: Role,
    /// The host that he is bound to.
    pub(in super::super) host: Option<String>,
}

impl Identity {
    /// Whether he may send such a request. Of which host what it is about has to be is seen when that is looked up.
    pub(in super::super) fn may(&self, method: &Method, path: &str) -> bool {
        self.role.may(method, path) || self.host.is_some() && is_about_own_instance(method, path)
    }
}

/// A client's certificate, that the handshake has verified. The connection may last longer than it holds.
pub(in super::super) struct Certificate {
    names: Vec<CertificateName>,
    /// It, and what leads from it to its authority.
    chain: Vec<CertificateDer<'static>>,
    /// When it ceases to hold, in s since 1970.
    not_after: i64,
    tls: Arc<Tls>,
    /// With what it was verified last.
    verified_with: Mutex<Arc<Known>>,
}

impl Certificate {
    /// What a certificate says that was verified with this.
    pub(super) fn read(chain: &[CertificateDer<'_>], tls: &Arc<Tls>, with: Arc<Known>) -> Option<Self> {
        let (names, not_after) = names(chain.first()?);
        let chain = chain.iter().map(|der| der.clone().into_owned()).collect();
        Some(Self { names, chain, not_after, tls: Arc::clone(tls), verified_with: Mutex::new(with) })
    }

    /// Whether it would still be verified: it has not expired, and the authority is one of those of now.
    pub(in super::super) fn holds(&self) -> bool {
        self.holds_at(UnixTime::now())
    }

    pub(super) fn holds_at(&self, now: UnixTime) -> bool {
        if i64::try_from(now.as_secs()).is_ok_and(|now| now > self.not_after) {
            return false;
        }
        let current = self.tls.known.current();
        let mut verified_with = self.verified_with.lock().unwrap_or_else(PoisonError::into_inner);
        if Arc::ptr_eq(&verified_with, &current) {
            return true;
        }
        let (Some(verifier), [certificate, between @ ..]) = (&current.verifier, self.chain.as_slice()) else {
            return false;
        };
        let holds = verifier.verify_client_cert(certificate, between, now).is_ok();
        if holds {
            *verified_with = current;
        }
        holds
    }

    /// Who that is now, if anybody. The first client that has one of its names is meant.
    pub(in super::super) fn identity(&self) -> Option<Identity> {
        let clients = self.tls.clients();
        let known = clients.iter().find(|client| self.names.contains(&client.by));
        known.map(|it| Identity { name: it.by.to_string(), role: it.role, host: it.host.clone() })
    }
}

impl fmt::Debug for Certificate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Certificate").field("names", &self.names).finish_non_exhaustive()
    }
}

impl fmt::Display for Certificate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<String> = self.names.iter().take(8).map(ToString::to_string).collect();
        f.write_str(if names.is_empty() { "no name at all" } else { "" })?;
        f.write_str(&names.join(", "))
    }
}

/// The names in a certificate, and when it ceases to hold.
fn names(der: &CertificateDer<'_>) -> (Vec<CertificateName>, i64) {
    let Ok((_, certificate)) = X509Certificate::from_der(der) else { return (Vec::new(), i64::MAX) };
    let mut names = Vec::new();
    let alternatives = certificate.subject_alternative_name().ok().flatten();
    for name in alternatives.iter().flat_map(|it| &it.value.general_names) {
        names.push(match name {
            GeneralName::DNSName(name) => CertificateName::new(Kind::Dns, name),
            GeneralName::URI(uri) => CertificateName::new(Kind::Uri, uri),
            GeneralName::RFC822Name(address) => CertificateName::new(Kind::Email, address),
            _ => continue,
        });
    }
    let common = certificate.subject().iter_common_name().filter_map(|it| it.as_str().ok());
    names.extend(common.map(|name| CertificateName::new(Kind::CommonName, name)));
    names.truncate(NAMES_MAX);
    (names, certificate.validity().not_after.timestamp())
}
