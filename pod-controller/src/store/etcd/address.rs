//! Where in which etcd a controller keeps its state.

use std::fmt;
use std::str::FromStr;

use reqwest::Url;
use serde::Deserialize;

/// Members of one etcd, and the prefix of the keys: `etcd://h1:2379,h2:2379/wadi/pod1`, or `etcds://…` over TLS.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct EtcdAddress {
    text: String,
    members: Vec<Url>,
    prefix: String,
    tls: bool,
}

/// Text that names no place in an etcd.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{text:?} is no place in an etcd ({reason}): write etcd://HOST:2379,HOST:2379/PREFIX, or etcds:// for TLS, with a \
     prefix that only this pod uses"
)]
pub struct ParseEtcdAddressError {
    text: String,
    reason: &'static str,
}

impl EtcdAddress {
    /// The members' URLs.
    pub(super) fn members(&self) -> &[Url] {
        &self.members
    }

    /// What all keys begin with; begins with a slash and does not end in one.
    pub(super) fn prefix(&self) -> &str {
        &self.prefix
    }

    /// Whether members are spoken to over TLS.
    pub fn tls(&self) -> bool {
        self.tls
    }
}

impl FromStr for EtcdAddress {
    type Err = ParseEtcdAddressError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let refuse = |reason| ParseEtcdAddressError { text: text.chars().take(200).collect(), reason };
        let (scheme, rest) =
            text.split_once("://").ok_or_else(|| refuse("it does not begin with etcd://"))?;
        let (http, tls) = match scheme {
            "etcd" => ("http", false),
            "etcds" => ("https", true),
            _ => return Err(refuse("it does not begin with etcd://")),
        };
        let (hosts, prefix) = rest.split_once('/').ok_or_else(|| refuse("it has no prefix"))?;
        let prefix = prefix.trim_end_matches('/');
        if prefix.is_empty() || prefix.len() > 200 || !prefix.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(refuse("its prefix is empty, longer than 200 bytes, or has odd characters"));
        }
        let member = |host: &str| {
            let url: Url = format!("{http}://{host}/").parse().ok()?;
            let plain = url.username().is_empty() && url.path() == "/" && url.query().is_none();
            (plain && url.has_host() && url.port().is_some()).then_some(url)
        };
        let members: Option<Vec<Url>> = hosts.split(',').map(member).collect();
        let members = members.ok_or_else(|| refuse("each member needs a host and a port"))?;
        Ok(Self { text: text.to_owned(), members, prefix: format!("/{prefix}"), tls })
    }
}

impl TryFrom<String> for EtcdAddress {
    type Error = ParseEtcdAddressError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl fmt::Display for EtcdAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_and_prefix_are_told_apart() {
        let address: EtcdAddress = "etcds://a:1,[::1]:2379/wadi/pod1/".parse().expect("an address");
        let members: Vec<&str> = address.members().iter().map(Url::as_str).collect();
        assert_eq!(members, ["https://a:1/", "https://[::1]:2379/"]);
        assert_eq!((address.prefix(), address.tls()), ("/wadi/pod1", true));
    }

    #[test]
    fn what_is_no_address_is_refused() {
        for (text, word) in [
            ("http://a:1/x", "etcd://"),
            ("a:1/x", "etcd://"),
            ("etcd://a:1", "prefix"),
            ("etcd://a:1//", "prefix"),
            ("etcd://a:1/a b", "odd"),
            ("etcd://a/x", "port"),
            ("etcd://a:1,/x", "port"),
            ("etcd://u@a:1/x", "port"),
        ] {
            let error = text.parse::<EtcdAddress>().expect_err(text).to_string();
            assert!(error.contains(word), "{text}: {error}");
        }
    }
}
