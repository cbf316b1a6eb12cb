//! The command line.

mod instances;
mod lists;
mod mchannels;
mod nic;
mod volumes;

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use pod_api::client::{CONTROLLER, Credentials, LabelChanges, Server};

pub(crate) use self::instances::{AttachDevice, Instances, NicChanges, Types};
pub(crate) use self::lists::{
    DevicesAsked, Fields, HostsAsked, InstancesAsked, RegionsAsked, TypesAsked, VolumesAsked,
};
pub(crate) use self::mchannels::Mchannels;
pub(crate) use self::volumes::{QosChanges, Volumes};

/// Under which heading of the help there is what every command takes.
const EVERY_COMMAND: &str = "Options of every command";

/// Looks at a pod and changes it, through its controller.
///
/// Examples:
///
///     podctl hosts list
///     podctl volumes create vol0 --size 8G
///     podctl instances create vm1 --host h1 --nic --volume vol0
///     podctl instances get vm1 -o json
///     podctl events --follow
///     podctl pool
#[derive(Parser)]
#[command(
    name = "podctl",
    version,
    verbatim_doc_comment,
    subcommand_required = true,
    arg_required_else_help = true
)]
pub(crate) struct Arguments {
    /// Where the controller listens: unix:PATH or http://HOST:PORT
    #[arg(
        long,
        short,
        global = true,
        env = "WADI_CONTROLLER",
        help_heading = CONTROLLER,
        default_value = "unix:/run/wadi/controller.sock"
    )]
    pub(crate) server: Server,
    #[command(flatten)]
    pub(crate) credentials: Credentials,
    /// How to show the answer
    #[arg(long, short, global = true, help_heading = EVERY_COMMAND, value_enum, default_value_t = Output::Table)]
    pub(crate) output: Output,
    /// Show it anew whenever it changes, looking every so many seconds
    #[arg(
        long,
        short,
        global = true,
        help_heading = EVERY_COMMAND,
        value_name = "SECONDS",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "2",
        value_parser = parse_interval
    )]
    pub(crate) watch: Option<f64>,
    /// Only try what would be changed: it is refused as it would be, and otherwise nothing happens
    #[arg(long, global = true, help_heading = EVERY_COMMAND)]
    pub(crate) dry_run: bool,
    /// Change it only if it has this resourceVersion (see -o json): nobody has changed it since you looked
    #[arg(long, global = true, help_heading = EVERY_COMMAND, value_name = "VERSION")]
    pub(crate) if_version: Option<String>,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// Which ones of a list.
#[derive(Args)]
pub(crate) struct Which {
    /// Only those with this label, as NAME=VALUE or NAME; again for more, which must hold too
    #[arg(long = "label", short = 'l', value_name = "NAME=VALUE")]
    labels: Vec<String>,
}

impl Which {
    /// What the API is asked: they hold together.
    fn field(&self) -> (&'static str, Option<String>) {
        ("label", (!self.labels.is_empty()).then(|| self.labels.join(",")))
    }
}

/// Which labels something gets.
#[derive(Args)]
pub(crate) struct Label {
    /// What to label
    pub(crate) name: String,
    /// All that it bears from now on, as NAME=VALUE
    #[arg(value_name = "NAME=VALUE", value_parser = parse_label)]
    pub(crate) labels: Vec<(String, String)>,
    /// Leave other labels as they are, whoever changes them at the same time
    #[arg(long)]
    pub(crate) merge: bool,
    /// Take this label away and leave others as they are; again for more
    #[arg(long, value_name = "NAME")]
    pub(crate) remove: Vec<String>,
}

impl Label {
    /// What changes of the labels, if not all of them.
    pub(crate) fn changes(&self) -> Option<LabelChanges> {
        let set = self.labels.iter().cloned().collect();
        (self.merge || !self.remove.is_empty()).then(|| LabelChanges { set, removed: self.remove.clone() })
    }
}

/// A label as `name=value`.
pub(crate) fn parse_label(text: &str) -> Result<(String, String), String> {
    let label = text.split_once('=').map(|(name, value)| (name.to_owned(), value.to_owned()));
    label.ok_or_else(|| format!("{text:?} is no label: write NAME=VALUE"))
}

/// How to show an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Output {
    /// Lines for people
    Table,
    /// Lines with more columns
    Wide,
    /// What the API says, for programs
    Json,
    /// The same as YAML
    Yaml,
}

#[derive(Subcommand)]
pub(crate) enum Command {
    /// Hosts and the daemons on them
    #[command(subcommand, visible_alias = "host")]
    Hosts(Hosts),
    /// NICs and SSDs
    #[command(subcommand, visible_alias = "device")]
    Devices(Devices),
    /// Volumes: ranges of SSDs that instances lease
    #[command(subcommand, visible_alias = "volume")]
    Volumes(Volumes),
    /// Instances: VMs and what they have leased
    #[command(subcommand, visible_alias = "instance")]
    Instances(Instances),
    /// Kinds of instances: what they get, so that not everybody has to know
    #[command(subcommand, visible_alias = "type")]
    Types(Types),
    /// Mchannels: instances' shares of the bandwidth of the CXL fabric
    #[command(subcommand, name = "mchannel", visible_alias = "mchannels")]
    Mchannels(Mchannels),
    /// Why something is where it is, and where else it could be
    #[command(subcommand)]
    Explain(Explain),
    /// What happened in the pod
    Events(Events),
    /// The pool: a map drawn to scale, and its regions
    Pool {
        /// Only this of it
        #[command(subcommand)]
        part: Option<PoolPart>,
    },
    /// What passes through NICs and what SSDs do, and what would move off those that carry too much
    Balance,
    /// The controllers of the pod: which of them leads, and members that are gone
    #[command(subcommand, visible_alias = "controller")]
    Controllers(Controllers),
    /// Who is there, and what passes through it per second
    ///
    /// On a terminal it fills the screen: n orders by name, b by what passes through, the busiest first; q quits, as Ctrl-C does.
    /// While the controller is away the last that was seen stays, and the line at the bottom says so.
    #[command(verbatim_doc_comment)]
    Top(Top),
    /// Make a token, and the lines for the controller's file of tokens
    ///
    /// Example: podctl token alice --role operator
    #[command(verbatim_doc_comment)]
    Token {
        /// Whose it is
        name: String,
        /// What it is for: viewer, host, operator or admin
        #[arg(long, default_value = "viewer", value_parser = ["viewer", "host", "operator", "admin"])]
        role: String,
        /// Of the role host: which host it is bound to, so that it changes only what concerns that one
        #[arg(long, value_name = "NAME")]
        host: Option<String>,
    },
    /// What a shell needs to complete our commands, and the names of what is in the pod
    ///
    /// Examples:
    ///     source <(podctl completion bash)                        # or in ~/.bashrc
    ///     podctl completion zsh >/usr/local/share/zsh/site-functions/_podctl
    ///     podctl completion fish >~/.config/fish/completions/podctl.fish
    #[command(verbatim_doc_comment)]
    Completion {
        /// Which shell
        shell: clap_complete::Shell,
    },
    /// Look at this host, without a controller: what its daemons need, what is missing, how to mend it
    ///
    /// Fails if something is broken; what is only poor works, but slower or with less than it could.
    Doctor {
        /// The configuration of the host's daemons
        #[arg(long, value_name = "FILE", default_value = "/etc/wadi/host.toml")]
        config: PathBuf,
    },
}

impl Command {
    /// Whether it only looks, so that it can be done again and again.
    pub(crate) const fn looks(&self) -> bool {
        match self {
            Self::Hosts(command) => matches!(command, Hosts::List(_) | Hosts::Get { .. }),
            Self::Devices(command) => matches!(command, Devices::List(_) | Devices::Get { .. }),
            Self::Volumes(command) => matches!(command, Volumes::List(_) | Volumes::Get { .. }),
            Self::Instances(command) => matches!(command, Instances::List(_) | Instances::Get { .. }),
            Self::Types(command) => matches!(command, Types::List { .. } | Types::Get { .. }),
            Self::Controllers(command) => matches!(command, Controllers::List),
            Self::Mchannels(command) => command.looks(),
            Self::Explain(_) | Self::Balance | Self::Pool { .. } | Self::Doctor { .. } => true,
            Self::Events(_) | Self::Top(_) | Self::Completion { .. } | Self::Token { .. } => false,
        }
    }
}

#[derive(Args)]
pub(crate) struct Top {
    /// Show it once, and end
    #[arg(long)]
    pub(crate) once: bool,
    /// Over how many seconds rates are taken
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = parse_interval)]
    pub(crate) interval: f64,
    /// How many devices and how many instances to show, the busiest first
    #[arg(long, short = 'n', value_name = "COUNT", default_value_t = 15)]
    pub(crate) lines: usize,
}

fn parse_interval(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.1..=3600.0).contains(&seconds) => Ok(seconds),
        _ => Err("use a number of seconds from 0.1 to 3600".to_owned()),
    }
}

#[derive(Subcommand)]
pub(crate) enum Controllers {
    /// List them
    List,
    /// Do not count on one any more that is gone for good; stop it first
    #[command(alias = "rm")]
    Remove {
        /// Its number
        replica: u16,
    },
}

#[derive(Subcommand)]
pub(crate) enum Explain {
    /// The devices of an instance
    Instance {
        /// The instance's name
        name: String,
    },
}

#[derive(Subcommand)]
pub(crate) enum PoolPart {
    /// Its use, drawn to scale
    Map,
    /// Its regions, and who holds them
    ///
    /// Example: podctl pool regions --state quarantined
    #[command(verbatim_doc_comment)]
    Regions(RegionsAsked),
}

#[derive(Subcommand)]
pub(crate) enum Devices {
    /// Show all, or those that are asked for
    ///
    /// Example: podctl devices list --host h2 --type ssd
    #[command(visible_alias = "ls", verbatim_doc_comment)]
    List(DevicesAsked),
    /// Show one in full
    Get {
        /// Its name with its host, as h2/nic0
        name: String,
    },
    /// Bring back every lease that belongs on a NIC, has moved away from it and can go there
    FailBack {
        /// The NIC, as h2/nic0
        name: String,
    },
    /// Have a device be empty: nothing new comes to it, and what is there leaves in order, as far as it can
    ///
    /// NICs of instances move at once. Volumes in use are copied while their guests go on; others stay.
    #[command(verbatim_doc_comment)]
    Drain {
        /// Its name with its host, as h2/ssd0
        name: String,
    },
    /// Have a device be used again
    Undrain {
        /// Its name with its host, as h2/ssd0
        name: String,
    },
    /// Label a device anew, as a whole; without labels, it has none any more
    ///
    /// Example: podctl devices label h2/ssd0 tier=fast
    #[command(verbatim_doc_comment)]
    Label(Label),
    /// Trust a NIC again whose link came and went too often
    Release {
        /// The NIC, as h2/nic0
        name: String,
    },
    /// Take over the volumes found on an SSD, such as those of a controller whose state is lost
    Adopt {
        /// Its name with its host, as h2/ssd0
        name: String,
    },
    /// Delete a device that its host does not have any more and that will not come back
    ///
    /// Example: podctl devices delete h2/ssd1 --lose-data
    #[command(visible_alias = "rm", verbatim_doc_comment)]
    Delete {
        /// Its name with its host, as h2/ssd1
        name: String,
        /// Also volumes of which nobody else has the data, and replicas that others have
        #[arg(long)]
        lose_data: bool,
    },
}

#[derive(Subcommand)]
pub(crate) enum Hosts {
    /// Show all, or those that are asked for
    #[command(visible_alias = "ls")]
    List(HostsAsked),
    /// Show one in full
    Get {
        /// Its name
        name: String,
    },
    /// Have all devices of a host be empty, for maintenance; its instances stay until they are moved
    Drain {
        /// Its name
        name: String,
    },
    /// Have the devices of a host be used again
    Undrain {
        /// Its name
        name: String,
    },
    /// Label a host anew, as a whole; without labels, it has none any more
    ///
    /// Example: podctl hosts label h2 rack=a --merge
    #[command(verbatim_doc_comment)]
    Label(Label),
    /// Say that a host was reset or taken away: frees the parts of the pool that wait for it
    ///
    /// Only for a host that lost power or was reset: what its caches and devices still write would hit whoever gets
    /// those parts next. Refused while one of its daemons beats.
    Reset {
        /// Its name
        name: String,
    },
    /// Delete a host that is gone for good and that nothing depends on
    #[command(visible_alias = "rm")]
    Delete {
        /// Its name
        name: String,
    },
}

#[derive(Args)]
pub(crate) struct Events {
    /// Go on with new events as they happen
    #[arg(long, short)]
    pub(crate) follow: bool,
    /// Only events after this number
    #[arg(long, value_name = "NUMBER")]
    pub(crate) after: Option<u64>,
    /// At most this many of those that happened already, the newest; 50 unless given, or all with --after
    #[arg(long, short = 'n', value_name = "COUNT")]
    pub(crate) last: Option<usize>,
    /// Only events of this kind, such as failover
    #[arg(long, value_name = "KIND")]
    pub(crate) kind: Option<String>,
    /// Only what happened to this: h2, h2/nic0, the name of an instance or volume
    #[arg(long, value_name = "NAME")]
    pub(crate) subject: Option<String>,
}

impl Events {
    /// What the API is asked besides.
    pub(crate) fn fields(&self) -> Vec<(&str, &str)> {
        let kind = self.kind.iter().map(|kind| ("kind", kind.as_str()));
        kind.chain(self.subject.iter().map(|subject| ("subject", subject.as_str()))).collect()
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;
    use pod_api::NicRequest;

    use super::*;

    #[test]
    fn every_command_is_well_formed() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn instances_take_nics_with_and_without_options() {
        let line = "podctl instances create vm1 --host h1 --nic --nic mac=02:00:00:00:00:01,mtu=9000,reserve=5G,apart=db --volume vol0";
        let parsed = Arguments::try_parse_from(line.split(' ')).map(|arguments| arguments.command);
        let Ok(Command::Instances(Instances::Create(create))) = parsed else { panic!("another command") };
        assert_eq!(create.nics.len(), 2);
        assert_eq!(create.nics[0], NicRequest::default());
        assert_eq!(create.nics[1].mtu, Some(9000));
        assert_eq!((create.nics[1].reserved_mbps, create.nics[1].apart.as_deref()), (5000, Some("db")));
        assert_eq!(create.volumes, ["vol0"]);
    }

    #[test]
    fn mistakes_are_refused() {
        for line in [
            "podctl",
            "podctl volumes create vol0",
            "podctl volumes create vol0 --size big",
            "podctl instances create vm1 --nic",
            "podctl instances create vm1 --host h1 --nic speed=9",
            "podctl instances create vm1 --host h1 --nic reserve=fast",
            "podctl types set small --reserve 5T",
            "podctl instances create vm1 --host h1 --wait 31",
            "podctl --server nowhere pool",
            "podctl --watch=0 hosts list",
            "podctl top --interval often",
            "podctl completion cmd.exe",
            "podctl mchannel set vm1 --weight 3",
            "podctl mchannel set vm1 --weight many --path pool",
            "podctl mchannel fabric --element pool",
            "podctl mchannel fabric --element pool=fast",
            "podctl mchannel fabric --tenant red=heavy",
            "podctl volumes create vol0 --size 4K --label tier",
        ] {
            assert!(Arguments::try_parse_from(line.split(' ')).is_err(), "{line}");
        }
    }
}
