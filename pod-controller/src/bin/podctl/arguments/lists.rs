//! Which ones of a list: by labels, and by what each kind of list can be asked for besides.

use clap::Args;

use super::Which;

/// What the API is asked, as names and values.
pub(crate) type Fields = Vec<(&'static str, String)>;

/// Which hosts.
#[derive(Args)]
pub(crate) struct HostsAsked {
    #[command(flatten)]
    which: Which,
    /// Only those that are to be empty; with =false, only the others
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    drained: Option<bool>,
}

impl HostsAsked {
    pub(crate) fn fields(&self) -> Fields {
        asked([self.which.field(), ("drained", self.drained.map(|it| it.to_string()))])
    }
}

/// Which devices.
#[derive(Args)]
pub(crate) struct DevicesAsked {
    #[command(flatten)]
    which: Which,
    /// Only those of this host
    #[arg(long, value_name = "NAME")]
    host: Option<String>,
    /// Only NICs, or only SSDs
    #[arg(long = "type", value_name = "TYPE", value_parser = ["nic", "ssd"])]
    kind: Option<String>,
    /// Only those that are in this health
    #[arg(long, value_name = "HEALTH", value_parser = ["up", "held", "down", "failed", "away"])]
    health: Option<String>,
}

impl DevicesAsked {
    pub(crate) fn fields(&self) -> Fields {
        let health = ("health", self.health.clone());
        asked([self.which.field(), ("host", self.host.clone()), ("type", self.kind.clone()), health])
    }
}

/// Which volumes.
#[derive(Args)]
pub(crate) struct VolumesAsked {
    #[command(flatten)]
    which: Which,
    /// Only those that lie on this SSD
    #[arg(long, value_name = "HOST/NAME")]
    device: Option<String>,
    /// Only those that this instance has leased
    #[arg(long, value_name = "NAME")]
    instance: Option<String>,
}

impl VolumesAsked {
    pub(crate) fn fields(&self) -> Fields {
        asked([self.which.field(), ("device", self.device.clone()), ("instance", self.instance.clone())])
    }
}

/// Which instances.
#[derive(Args)]
pub(crate) struct InstancesAsked {
    #[command(flatten)]
    which: Which,
    /// Only those that run on this host
    #[arg(long, value_name = "NAME")]
    host: Option<String>,
    /// Only those that use this NIC or SSD
    #[arg(long, value_name = "HOST/NAME")]
    device: Option<String>,
    /// Only those for which a VM can be started; with =false, only the others
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    ready: Option<bool>,
}

impl InstancesAsked {
    pub(crate) fn fields(&self) -> Fields {
        let ready = ("ready", self.ready.map(|it| it.to_string()));
        asked([self.which.field(), ("host", self.host.clone()), ("device", self.device.clone()), ready])
    }
}

/// Which types of instances.
#[derive(Args)]
pub(crate) struct TypesAsked {
    #[command(flatten)]
    which: Which,
}

impl TypesAsked {
    pub(crate) fn fields(&self) -> Fields {
        asked([self.which.field()])
    }
}

/// Which regions.
#[derive(Args)]
pub(crate) struct RegionsAsked {
    /// Only those that are in this state
    #[arg(long, value_name = "STATE", value_parser = ["in-use", "quarantined", "failed"])]
    state: Option<String>,
    /// Only those that are for this
    #[arg(long, value_name = "PURPOSE", value_parser = ["rings", "transmit", "receive", "data", "ram", "board", "none"])]
    purpose: Option<String>,
}

impl RegionsAsked {
    pub(crate) fn fields(&self) -> Fields {
        asked([("state", self.state.clone()), ("purpose", self.purpose.clone())])
    }
}

fn asked<const N: usize>(fields: [(&'static str, Option<String>); N]) -> Fields {
    fields.into_iter().filter_map(|(name, value)| Some((name, value?))).collect()
}
