//! Where the API listens over TCP.

use std::net::{Ipv4Addr, SocketAddr};

use serde::Deserialize;

/// Where it does when nobody says where.
pub(super) const BY_DEFAULT: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 8480);
const NOWHERE: &str = "none";

/// What `listen-tcp` says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub enum ListenTcp {
    /// Nothing: on the loopback interface if that can be had, and only for looking where nobody is asked who he is.
    #[default]
    ByDefault,
    /// `none`: on the UNIX socket only.
    Nowhere,
    /// An address.
    At(SocketAddr),
}

impl ListenTcp {
    /// The address that somebody wrote down.
    pub const fn given(self) -> Option<SocketAddr> {
        match self {
            Self::At(address) => Some(address),
            Self::ByDefault | Self::Nowhere => None,
        }
    }
}

impl TryFrom<String> for ListenTcp {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        if text == NOWHERE {
            return Ok(Self::Nowhere);
        }
        text.parse().map(Self::At).map_err(|_| {
            format!("{text:?} is no address: use one with a port, such as {BY_DEFAULT}, or {NOWHERE:?}")
        })
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::Config;

    fn parse(lines: &str) -> Result<Config, String> {
        let text = format!(
            "[controller]\nstate = '/s'\n{lines}\n[pool]\npath = '/p'\n[run]\ndirectory = '/run/wadi'\n"
        );
        Config::parse(&text, Path::new("controller.toml")).map_err(|error| error.to_string())
    }

    #[test]
    fn loopback_is_for_looking_unless_somebody_says_where() {
        for (lines, address, required, looks_only) in [
            ("", Some("127.0.0.1:8480"), false, true),
            ("tokens = '/t'", Some("127.0.0.1:8480"), false, true),
            ("listen-tcp = '127.0.0.1:8480'", Some("127.0.0.1:8480"), true, false),
            ("listen-tcp = '[::1]:80'", Some("[::1]:80"), true, false),
            ("listen-tcp = 'none'", None, false, false),
        ] {
            let config = parse(lines).unwrap_or_else(|error| panic!("{lines}: {error}"));
            let tcp = config.listen_tcp();
            assert_eq!(tcp.as_ref().map(|tcp| tcp.address.to_string()).as_deref(), address, "{lines}");
            assert_eq!(tcp.is_some_and(|tcp| tcp.is_required), required, "{lines}");
            assert_eq!(config.access_policy().looks_only, looks_only, "{lines}");
        }
    }

    #[test]
    fn what_is_no_address_is_named() {
        for wrong in ["127.0.0.1", "localhost:8480", "None", "", "8480"] {
            let error = parse(&format!("listen-tcp = '{wrong}'")).expect_err(wrong);
            assert!(error.contains("127.0.0.1:8480") && error.contains("none"), "{wrong}: {error}");
        }
    }
}
