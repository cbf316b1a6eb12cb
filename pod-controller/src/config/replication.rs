//! Where a controller is one of several.

use std::collections::BTreeSet;
use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

use rustls::pki_types::ServerName;
use serde::{Deserialize, Deserializer};

/// What only one of several controllers has.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct ReplicationSection {
    /// Which one this is, from 0; the pool has a slot for each.
    pub replica: u16,
    /// The file with its log; beside the state file, and named like it with `.replica`, unless given.
    #[serde(default)]
    pub log: Option<PathBuf>,
    /// Whether it runs outside of the pod, on a machine that does not reach the pool: it votes and never leads.
    #[serde(default)]
    pub outside: bool,
    /// How often the leader tells the others that it lives.
    #[serde(default = "default_heartbeat_ms")]
    pub heartbeat_ms: u64,
    /// How long it is waited for before another one is elected; three heartbeats longer with each number of a replica.
    #[serde(default = "default_election_ms")]
    pub election_ms: u64,
    /// How replicas reach each other over the network, in place of the pool.
    #[serde(default)]
    pub tcp: Option<TcpSection>,
}

/// How replicas reach each other over the network: TCP, with TLS on both sides.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct TcpSection {
    /// Where this replica listens for the others.
    pub listen: SocketAddr,
    /// Where each replica is reached, in the order of their numbers, this one included; the same everywhere.
    pub addresses: Vec<ReplicaAddress>,
    /// This replica's certificate, for the host in its address, and what leads from it to the authority, as PEM.
    pub certificate: PathBuf,
    /// Its key, as PEM.
    pub key: PathBuf,
    /// The authority that issues the replicas' certificates, as PEM. Whomever it issues one for such a host is a replica.
    pub ca: PathBuf,
}

/// Where a replica is reached: `c1.pod.example:8490`, `10.0.0.1:8490` or `[fd00::1]:8490`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ReplicaAddress {
    host: String,
    port: u16,
}

/// Text that is no replica's address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no replica's address: write HOST:PORT, such as c1.pod.example:8490")]
pub struct ParseReplicaAddressError(String);

impl ReplicaAddress {
    /// A name, or an IP address without brackets; the certificate has to be for it.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// The port.
    pub const fn port(&self) -> u16 {
        self.port
    }
}

impl FromStr for ReplicaAddress {
    type Err = ParseReplicaAddressError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let refuse = || ParseReplicaAddressError(text.chars().take(300).collect());
        let (host, port) = text.rsplit_once(':').ok_or_else(refuse)?;
        let host = match host.strip_prefix('[').map(|rest| rest.strip_suffix(']')) {
            Some(inner) => inner.filter(|inner| inner.contains(':')).ok_or_else(refuse)?,
            None if host.contains(':') => return Err(refuse()),
            None => host,
        };
        let port = port.parse().ok().filter(|port| *port != 0).ok_or_else(refuse)?;
        ServerName::try_from(host).map_err(|_| refuse())?;
        Ok(Self { host: host.to_ascii_lowercase(), port })
    }
}

impl fmt::Display for ReplicaAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, port } = self;
        if host.contains(':') { write!(f, "[{host}]:{port}") } else { write!(f, "{host}:{port}") }
    }
}

impl<'de> Deserialize<'de> for ReplicaAddress {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        String::deserialize(from)?.parse().map_err(serde::de::Error::custom)
    }
}

impl ReplicationSection {
    pub(super) fn check(&self) -> Result<(), String> {
        let (heartbeat, election) = (self.heartbeat_ms, self.election_ms);
        if !(10..=10_000).contains(&heartbeat) || !(4 * heartbeat..=60_000).contains(&election) {
            return Err(format!(
                "replication.heartbeat-ms = {heartbeat}, election-ms = {election}: use 10 to 10000, and at least four \
                 times as much for the other"
            ));
        }
        if self.outside && self.tcp.is_none() {
            return Err(
                "replication.outside = true: without the pool there is only the network, so add [replication.tcp], here and to all \
                 other replicas"
                    .to_owned(),
            );
        }
        self.tcp.as_ref().map_or(Ok(()), |tcp| tcp.check(self.replica))
    }
}

impl TcpSection {
    fn check(&self, replica: u16) -> Result<(), String> {
        let addresses = self.addresses.len();
        if usize::from(replica) >= addresses {
            return Err(format!(
                "replication.tcp.addresses has {addresses} entries, and this is replica {replica}: write down where each one is \
                 reached, from 0 on, this one included"
            ));
        }
        let mut seen = BTreeSet::new();
        for address in &self.addresses {
            if !seen.insert(address) {
                return Err(format!(
                    "replication.tcp.addresses has {address} twice: each replica needs one of its own"
                ));
            }
        }
        Ok(())
    }
}

const fn default_heartbeat_ms() -> u64 {
    25
}

const fn default_election_ms() -> u64 {
    120
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::Config;
    use super::ReplicaAddress;

    #[test]
    fn addresses_are_hosts_with_ports() {
        for (text, host, port) in [
            ("c1.pod.example:8490", "c1.pod.example", 8490),
            ("C1:1", "c1", 1),
            ("10.0.0.1:8490", "10.0.0.1", 8490),
            ("[fd00::1]:8490", "fd00::1", 8490),
        ] {
            let address: ReplicaAddress = text.parse().expect(text);
            assert_eq!((address.host(), address.port()), (host, port));
            assert_eq!(address.to_string(), text.to_ascii_lowercase());
        }
        for text in
            ["", "c1", "c1:", ":1", "c1:0", "c1:70000", "fd00::1:8490", "[c1]:1", "[fd00::1:1", "a b:1"]
        {
            text.parse::<ReplicaAddress>().expect_err(text);
        }
    }

    #[test]
    fn mistakes_are_named() {
        let parse = |replica: &str, tcp: &str| {
            let text = format!(
                "[controller]\nstate = '/s'\n[pool]\npath = '/p'\n[run]\ndirectory = '/r'\n[replication]\n{replica}\n{tcp}"
            );
            Config::parse(&text, Path::new("controller.toml")).map_err(|error| error.to_string())
        };
        let tcp = |addresses: &str| {
            format!(
                "[replication.tcp]\nlisten = '0.0.0.0:8490'\naddresses = [{addresses}]\ncertificate = '/c'\nkey = '/k'\nca = '/a'\n"
            )
        };
        parse("replica = 1", &tcp("'a:1', 'b:1', 'c:1'")).expect("good");
        for (replica, tcp, word) in [
            ("replica = 0\nheartbeat-ms = 1", String::new(), "heartbeat-ms"),
            ("replica = 0\nheartbeat-ms = 50", String::new(), "election-ms"),
            ("replica = 0\noutside = true", String::new(), "[replication.tcp]"),
            ("replica = 3", tcp("'a:1', 'b:1', 'c:1'"), "this one included"),
            ("replica = 0", tcp("'a:1', 'b:1', 'a:1'"), "twice"),
            ("replica = 0", tcp("'a:1', 'b'"), "HOST:PORT"),
            ("replica = 0", tcp("'a:1'").replace("ca = '/a'\n", ""), "ca"),
            ("replica = 0", tcp("'a:1'").replace("0.0.0.0:8490", "here"), "socket address"),
        ] {
            let error = parse(replica, &tcp).expect_err(word);
            assert!(error.contains(word), "{word}: {error}");
        }
    }
}
