//! How programs ask the controller: blocking calls over its UNIX socket or over HTTP.

use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use reqwest::{Method, Url};

use crate::{
    AddReplica, ChangeVolume, Controller, ControllerList, CreateInstance, CreateVolume, Device, DeviceList,
    Explanation, FailedBack, Host, HostList, Instance, InstanceList, InstancePriority, InstanceType,
    InstanceTypeList, InstanceTypeSpec, MigrateInstance, MigrateNic, NicPolicy, Pool, Problem, Volume,
    VolumeList,
};

mod credentials;
mod devices;
mod events;
mod mchannels;
mod measured;
mod relabel;
mod request;
mod tls;

pub use credentials::{CONTROLLER, Credentials};
pub use events::EventStream;
pub use relabel::LabelChanges;
pub use request::innermost;
pub use tls::ClientTls;

/// Where a controller listens: `unix:/path/to/socket`, `http://127.0.0.1:8480` or `https://controller.pod:8480`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Server {
    /// A UNIX socket.
    Unix(PathBuf),
    /// HTTP over TCP, with TLS or in clear.
    Http(Url),
}

/// Text that names no server.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not a server: write unix:/run/wadi/controller.sock, http://127.0.0.1:PORT, or https://HOST:PORT"
)]
pub struct ParseServerError(String);

impl FromStr for Server {
    type Err = ParseServerError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let refuse = || ParseServerError(text.chars().take(80).collect());
        if let Some(path) = text.strip_prefix("unix:").or_else(|| text.starts_with('/').then_some(text)) {
            return if path.is_empty() { Err(refuse()) } else { Ok(Self::Unix(path.into())) };
        }
        let url: Url = text.parse().map_err(|_| refuse())?;
        if matches!(url.scheme(), "http" | "https") && url.has_host() {
            Ok(Self::Http(url))
        } else {
            Err(refuse())
        }
    }
}

impl std::fmt::Display for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Http(url) => write!(f, "{url}"),
        }
    }
}

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The client itself could not be set up.
    #[error("cannot set up a connection: {0}")]
    SetUp(#[source] io::Error),
    /// Nobody answered.
    #[error("no answer from the controller at {server}: {reason}; is pod-controller running there?")]
    Unreachable {
        /// Where it was expected.
        server: Server,
        /// What happened.
        reason: String,
    },
    /// The controller refused.
    #[error("{0}")]
    Refused(Problem),
    /// The answer makes no sense.
    #[error("the answer of {server} is not what a controller says: {reason}")]
    Garbled {
        /// Who answered.
        server: Server,
        /// What is wrong with it.
        reason: String,
    },
}

impl ClientError {
    /// The HTTP status with which the controller refused.
    pub fn status(&self) -> Option<u16> {
        match self {
            Self::Refused(problem) => Some(problem.status),
            _ => None,
        }
    }
}

/// A connection to a controller. Calls block; do not call from inside an async runtime. A change whose answer is lost, or of which the
/// controller does not know what became, is asked for again for 5 s, under an `Idempotency-Key` of its own: it is made once. A
/// clone is the same client, which may be told to ask otherwise.
#[derive(Clone, Debug)]
pub struct Client {
    server: Server,
    base: Url,
    http: reqwest::Client,
    runtime: Arc<tokio::runtime::Runtime>,
    dry_run: bool,
    version: Option<String>,
    token: Option<String>,
    /// What is missing in answers since somebody asked.
    unmeasured: Arc<Mutex<Option<String>>>,
}

impl Client {
    /// Prepares to talk to a server; connects with the first call.
    pub fn new(server: Server) -> Result<Self, ClientError> {
        Self::with_tls(server, &ClientTls::default())
    }

    /// As [`Client::new`], and says over `https` whom it trusts and who it is.
    pub fn with_tls(server: Server, tls: &ClientTls) -> Result<Self, ClientError> {
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(ClientError::SetUp)?;
        // A proxy from the environment has no business between a host and its own controller. And no connection is kept: between
        // requests nobody would notice that the controller has closed it, or was started anew, and the next one would fail.
        let builder = reqwest::Client::builder()
            .no_proxy()
            .pool_max_idle_per_host(0)
            .connect_timeout(Duration::from_secs(5));
        let (base, builder) = match &server {
            Server::Unix(path) => {
                let builder = builder.tls_backend_preconfigured(ClientTls::trusting_nobody()?);
                ("http://controller/".parse().ok(), builder.unix_socket(path.as_path()))
            }
            Server::Http(url) if url.scheme() == "https" => {
                (Some(url.clone()), builder.tls_backend_preconfigured(tls.config()?))
            }
            // What is not encrypted needs nobody's trust; the library would look for the system's authorities all the same.
            Server::Http(url) => {
                (Some(url.clone()), builder.tls_backend_preconfigured(ClientTls::trusting_nobody()?))
            }
        };
        let http = builder.build().map_err(|error| ClientError::SetUp(io::Error::other(error)))?;
        let base =
            base.ok_or_else(|| ClientError::SetUp(io::Error::other("the base address does not parse")))?;
        let runtime = Arc::new(runtime);
        Ok(Self {
            server,
            base,
            http,
            runtime,
            dry_run: false,
            version: None,
            token: None,
            unmeasured: Arc::default(),
        })
    }

    /// Prepares to talk to a controller's UNIX socket.
    pub fn unix(path: &Path) -> Result<Self, ClientError> {
        Self::new(Server::Unix(path.to_path_buf()))
    }

    /// Only tries what it is asked for: changes are refused as they would be, and otherwise nothing happens.
    #[must_use]
    pub fn trying_only(self, dry_run: bool) -> Self {
        Self { dry_run, ..self }
    }

    /// Whether it only tries.
    pub fn is_trying_only(&self) -> bool {
        self.dry_run
    }

    /// Changes only what has this `resourceVersion`; what somebody else has changed meanwhile is refused with status 412.
    #[must_use]
    pub fn expecting(self, version: Option<String>) -> Self {
        Self { version, ..self }
    }

    /// Says with each request whose it is.
    #[must_use]
    pub fn with_token(self, token: Option<String>) -> Self {
        Self { token, ..self }
    }

    /// Whom it talks to.
    pub fn server(&self) -> &Server {
        &self.server
    }

    /// Whether the controller is up and has its pool.
    pub fn ready(&self) -> Result<(), ClientError> {
        self.runtime.block_on(async {
            let response = self.send::<()>(Method::GET, &["readyz"], &[], None).await?;
            self.refusal(response).await.map(drop)
        })
    }

    /// All hosts.
    pub fn hosts(&self) -> Result<Vec<Host>, ClientError> {
        self.hosts_with(&[])
    }

    /// Hosts with all of these fields and labels, such as `("label", "rack=a")`.
    pub fn hosts_with(&self, fields: &[(&str, &str)]) -> Result<Vec<Host>, ClientError> {
        self.call::<(), HostList>(Method::GET, &["v1", "hosts"], fields, None).map(|list| list.hosts)
    }

    /// One host.
    pub fn host(&self, name: &str) -> Result<Host, ClientError> {
        self.get(&["v1", "hosts", name])
    }

    /// Says that a host was reset or taken away: frees what waits for it. Refused while one of its daemons beats.
    pub fn reset_host(&self, name: &str) -> Result<(), ClientError> {
        self.end(Method::POST, &["v1", "hosts", name, "reset"], &[])
    }

    /// Has all devices of a host be empty, or used again.
    pub fn drain_host(&self, name: &str, on: bool) -> Result<(), ClientError> {
        let method = if on { Method::PUT } else { Method::DELETE };
        self.end(method, &["v1", "hosts", name, "drain"], &[])
    }

    /// Has a device be empty, or used again.
    pub fn drain_device(&self, host: &str, name: &str, on: bool) -> Result<(), ClientError> {
        let method = if on { Method::PUT } else { Method::DELETE };
        self.end(method, &["v1", "devices", host, name, "drain"], &[])
    }

    /// Deletes a host that is gone for good.
    pub fn delete_host(&self, name: &str) -> Result<(), ClientError> {
        self.end(Method::DELETE, &["v1", "hosts", name], &[])
    }

    /// Deletes a device that its host does not have any more, with the data that nobody else has only if `lose_data` says so.
    pub fn delete_device(&self, host: &str, name: &str, lose_data: bool) -> Result<(), ClientError> {
        let lose_data = if lose_data { "true" } else { "false" };
        self.end(Method::DELETE, &["v1", "devices", host, name], &[("lose-data", lose_data)])
    }

    /// All devices.
    pub fn devices(&self) -> Result<Vec<Device>, ClientError> {
        self.devices_with(&[])
    }

    /// Devices with all of these fields and labels, such as `("type", "ssd")` and `("label", "tier=fast")`.
    pub fn devices_with(&self, fields: &[(&str, &str)]) -> Result<Vec<Device>, ClientError> {
        self.call::<(), DeviceList>(Method::GET, &["v1", "devices"], fields, None).map(|list| list.devices)
    }

    /// One device, by host and name.
    pub fn device(&self, host: &str, name: &str) -> Result<Device, ClientError> {
        self.get(&["v1", "devices", host, name])
    }

    /// Takes over the volumes that were found on an SSD.
    pub fn adopt_volumes(&self, host: &str, name: &str) -> Result<Device, ClientError> {
        self.call::<(), _>(Method::POST, &["v1", "devices", host, name, "adopt"], &[], None)
    }

    /// All volumes.
    pub fn volumes(&self) -> Result<Vec<Volume>, ClientError> {
        self.volumes_with(&[])
    }

    /// Volumes with all of these fields and labels, such as `("device", "h2/ssd0")` and `("label", "tier=web")`.
    pub fn volumes_with(&self, fields: &[(&str, &str)]) -> Result<Vec<Volume>, ClientError> {
        self.call::<(), VolumeList>(Method::GET, &["v1", "volumes"], fields, None).map(|list| list.volumes)
    }

    /// One volume.
    pub fn volume(&self, name: &str) -> Result<Volume, ClientError> {
        self.get(&["v1", "volumes", name])
    }

    /// All instance types.
    pub fn instance_types(&self) -> Result<Vec<InstanceType>, ClientError> {
        self.instance_types_with(&[])
    }

    /// Instance types with all of these labels, as `("label", "tier=web")`.
    pub fn instance_types_with(&self, fields: &[(&str, &str)]) -> Result<Vec<InstanceType>, ClientError> {
        let list: InstanceTypeList =
            self.call::<(), _>(Method::GET, &["v1", "instance-types"], fields, None)?;
        Ok(list.types)
    }

    /// One instance type.
    pub fn instance_type(&self, name: &str) -> Result<InstanceType, ClientError> {
        self.get(&["v1", "instance-types", name])
    }

    /// Describes an instance type.
    pub fn set_instance_type(&self, name: &str, spec: &InstanceTypeSpec) -> Result<(), ClientError> {
        self.tell(Method::PUT, &["v1", "instance-types", name], spec)
    }

    /// Deletes an instance type.
    pub fn delete_instance_type(&self, name: &str) -> Result<(), ClientError> {
        self.end(Method::DELETE, &["v1", "instance-types", name], &[])
    }

    /// Creates a volume.
    pub fn create_volume(&self, request: &CreateVolume) -> Result<Volume, ClientError> {
        self.call(Method::POST, &["v1", "volumes"], &[], Some(request))
    }

    /// Changes a volume, which may be in use.
    pub fn change_volume(&self, name: &str, request: &ChangeVolume) -> Result<Volume, ClientError> {
        self.call(Method::PATCH, &["v1", "volumes", name], &[], Some(request))
    }

    /// Has a volume lie on one more SSD, or move there.
    pub fn add_replica(&self, name: &str, request: &AddReplica) -> Result<Volume, ClientError> {
        self.call(Method::POST, &["v1", "volumes", name, "replicas"], &[], Some(request))
    }

    /// Has a volume not lie on this host's SSD any more.
    pub fn remove_replica(&self, name: &str, host: &str, ssd: &str) -> Result<Volume, ClientError> {
        self.call(Method::DELETE, &["v1", "volumes", name, "replicas", host, ssd], &[], None::<&()>)
    }

    /// Deletes a volume and its data. Refused while it is leased.
    pub fn delete_volume(&self, name: &str) -> Result<(), ClientError> {
        self.end(Method::DELETE, &["v1", "volumes", name], &[])
    }

    /// All instances.
    pub fn instances(&self) -> Result<Vec<Instance>, ClientError> {
        self.instances_with(&[])
    }

    /// Instances with all of these fields and labels, such as `("host", "h1")` and `("label", "tier=web")`.
    pub fn instances_with(&self, fields: &[(&str, &str)]) -> Result<Vec<Instance>, ClientError> {
        let list = self.call::<(), InstanceList>(Method::GET, &["v1", "instances"], fields, None)?;
        Ok(list.instances)
    }

    /// Gives an instance another priority.
    pub fn prioritize_instance(&self, name: &str, priority: u16) -> Result<Instance, ClientError> {
        let request = InstancePriority { priority };
        self.call(Method::PUT, &["v1", "instances", name, "priority"], &[], Some(&request))
    }

    /// One instance.
    pub fn instance(&self, name: &str) -> Result<Instance, ClientError> {
        self.get(&["v1", "instances", name])
    }

    /// The controllers of the pod.
    pub fn controllers(&self) -> Result<Vec<Controller>, ClientError> {
        self.get::<ControllerList>(&["v1", "controllers"]).map(|list| list.controllers)
    }

    /// Has a controller replica not be a member any more.
    pub fn remove_controller(&self, replica: u16) -> Result<(), ClientError> {
        self.end(Method::DELETE, &["v1", "controllers", &replica.to_string()], &[])
    }

    /// Why the devices of an instance are where they are.
    pub fn explain_instance(&self, name: &str) -> Result<Explanation, ClientError> {
        self.get(&["v1", "instances", name, "explanation"])
    }

    /// What creating an instance would make. Nothing is made.
    pub fn try_instance(&self, request: &CreateInstance) -> Result<Instance, ClientError> {
        self.call(Method::POST, &["v1", "instances"], &[("dry-run", "true")], Some(request))
    }

    /// Creates an instance, and waits up to `wait` until a VMM can be started for it; [`Instance::ready`] says whether
    /// it got that far.
    pub fn create_instance(&self, request: &CreateInstance, wait: Duration) -> Result<Instance, ClientError> {
        let wait = wait.as_millis().to_string();
        self.call(Method::POST, &["v1", "instances"], &[("wait", &wait)], Some(request))
    }

    /// Moves a NIC of an instance to another device, such as `h3/nic1`, while both work; to the least loaded one
    /// unless told.
    pub fn migrate_nic(&self, instance: &str, nic: &str, to: Option<&str>) -> Result<(), ClientError> {
        let request = MigrateNic { to: to.map(str::to_owned) };
        let path = ["v1", "instances", instance, "nics", nic, "migrate"];
        self.runtime.block_on(async {
            let response = self.send(Method::POST, &path, &[], Some(&request)).await?;
            self.refusal(response).await.map(drop)
        })
    }

    /// Lets another host get ready for an instance, which goes on running where it is; [`Instance::migration`] says where
    /// its devices will be.
    pub fn migrate_instance(&self, instance: &str, to: &str) -> Result<Instance, ClientError> {
        let request = MigrateInstance { to: to.to_owned() };
        self.call(Method::POST, &["v1", "instances", instance, "migration"], &[], Some(&request))
    }

    /// Gives up the move of an instance.
    pub fn abort_migration(&self, instance: &str) -> Result<(), ClientError> {
        self.end(Method::DELETE, &["v1", "instances", instance, "migration"], &[])
    }

    /// Hands the leases of an instance to the host to which it moves; by force, although the host that it leaves has not
    /// let go.
    pub fn activate_migration(&self, instance: &str, force: bool) -> Result<(), ClientError> {
        let force = if force { "true" } else { "false" };
        self.end(Method::POST, &["v1", "instances", instance, "migration", "activate"], &[("force", force)])
    }

    /// Says anew what an instance may do with one of its NICs.
    pub fn change_nic(&self, instance: &str, nic: &str, policy: &NicPolicy) -> Result<(), ClientError> {
        let path = ["v1", "instances", instance, "nics", nic, "policy"];
        self.tell(Method::PUT, &path, policy)
    }

    /// Brings back every lease that belongs on a NIC, has moved away from it and can go there. Says which ones stay, and why.
    pub fn fail_back(&self, host: &str, nic: &str) -> Result<FailedBack, ClientError> {
        self.call::<(), _>(Method::POST, &["v1", "devices", host, nic, "fail-back"], &[], None)
    }

    /// Trusts a NIC again whose link flapped.
    pub fn release_link(&self, host: &str, nic: &str) -> Result<(), ClientError> {
        self.end(Method::POST, &["v1", "devices", host, nic, "release"], &[])
    }

    /// Deletes an instance: its leases end. Refused while a VMM is connected.
    pub fn delete_instance(&self, name: &str) -> Result<(), ClientError> {
        self.end(Method::DELETE, &["v1", "instances", name], &[])
    }

    /// Deletes an instance, also while a VMM is connected.
    pub fn delete_instance_by_force(&self, name: &str) -> Result<(), ClientError> {
        self.end(Method::DELETE, &["v1", "instances", name], &[("force", "true")])
    }

    /// The pool and its regions.
    pub fn pool(&self) -> Result<Pool, ClientError> {
        self.pool_with(&[])
    }

    /// The pool, and those of its regions with all of these fields, such as `("state", "quarantined")`.
    pub fn pool_with(&self, fields: &[(&str, &str)]) -> Result<Pool, ClientError> {
        self.call::<(), _>(Method::GET, &["v1", "pool"], fields, None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_are_sockets_or_http() {
        assert_eq!("unix:/run/x.sock".parse(), Ok(Server::Unix("/run/x.sock".into())));
        assert_eq!("/run/x.sock".parse(), Ok(Server::Unix("/run/x.sock".into())));
        assert!(matches!("http://127.0.0.1:80".parse(), Ok(Server::Http(_))));
        assert!(matches!("https://controller.pod:80".parse(), Ok(Server::Http(_))));
        for text in ["", "unix:", "ftp://x", "run/x.sock", "https:", "http:"] {
            assert!(text.parse::<Server>().is_err(), "{text}");
        }
    }

    #[test]
    fn absent_controller_is_named() {
        let client = Client::unix(Path::new("/nonexistent/controller.sock")).expect("set up");
        let error = client.hosts().expect_err("nobody there");
        assert!(error.to_string().contains("unix:/nonexistent/controller.sock"), "{error}");
        assert_eq!(error.status(), None);
    }

    #[test]
    fn names_do_not_reach_other_resources() {
        let client = Client::unix(Path::new("/x")).expect("set up");
        assert_eq!(client.url(&["v1", "hosts", "../a?b/c"], &[]).path(), "/v1/hosts/..%2Fa%3Fb%2Fc");
    }
}
