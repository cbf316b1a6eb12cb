use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use pod_controller::api::{ByteSize, NicRequest};
use pod_controller::client::Server;

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
#[command(version, verbatim_doc_comment, subcommand_required = true, arg_required_else_help = true)]
pub(crate) struct Arguments {
    /// Where the controller listens: unix:PATH or http://HOST:PORT
    #[arg(
        long,
        short,
        global = true,
        env = "WADI_CONTROLLER",
        default_value = "unix:/run/wadi/controller.sock"
    )]
    pub(crate) server: Server,
    /// How to show the answer
    #[arg(long, short, global = true, value_enum, default_value_t = Output::Table)]
    pub(crate) output: Output,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// How to show an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Output {
    /// Lines for people
    Table,
    /// What the API says, for programs
    Json,
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
    /// Look at this host, without a controller: what its daemons need, what is missing, how to mend it
    ///
    /// Fails if something is broken; what is only poor works, but slower or with less than it could.
    Doctor {
        /// The configuration of the host's daemons
        #[arg(long, value_name = "FILE", default_value = "/etc/wadi/host.toml")]
        config: PathBuf,
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

#[derive(Clone, Copy, Subcommand)]
pub(crate) enum PoolPart {
    /// Its use, drawn to scale
    Map,
    /// Its regions, and who holds them
    Regions,
}

#[derive(Subcommand)]
pub(crate) enum Devices {
    /// Show all
    #[command(visible_alias = "ls")]
    List,
    /// Show one in full
    Get {
        /// Its name with its host, as h2/nic0
        name: String,
    },
    /// Bring back every lease that belongs on a NIC and has moved away from it
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
}

#[derive(Subcommand)]
pub(crate) enum Hosts {
    /// Show all
    #[command(visible_alias = "ls")]
    List,
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

#[derive(Subcommand)]
pub(crate) enum Volumes {
    /// Show all
    #[command(visible_alias = "ls")]
    List,
    /// Show one in full
    Get {
        /// Its name
        name: String,
    },
    /// Create a volume
    ///
    /// Example: podctl volumes create vol0 --size 8G --device h2/ssd0
    #[command(verbatim_doc_comment)]
    Create {
        /// Its name: lower-case letters, digits and dashes
        name: String,
        /// Its size: a number of bytes, or with K, M, G or T
        #[arg(long)]
        size: ByteSize,
        /// On which SSD, as h2/ssd0 [default: the one with the largest share free]
        #[arg(long, value_name = "HOST/NAME")]
        device: Option<String>,
        /// How many hosts keep it on their SSDs: 1 to 3
        #[arg(long, default_value_t = 1)]
        replicas: u8,
        /// How many requests per second it is sure of on each SSD
        #[arg(long, value_name = "COUNT", conflicts_with = "stripes")]
        minimum_iops: Option<u64>,
        /// Over the SSDs of how many hosts it is laid out, a share on each: 2 to 4
        #[arg(long, conflicts_with_all = ["replicas", "device"])]
        stripes: Option<u8>,
        /// How much lies on one before the next has its turn
        #[arg(long, requires = "stripes", default_value = "64K")]
        stripe_size: ByteSize,
    },
    /// Make a volume larger; the guest sees it while it runs
    ///
    /// Example: podctl volumes grow vol0 16G
    #[command(verbatim_doc_comment)]
    Grow {
        /// Its name
        name: String,
        /// Its new size: a number of bytes, or with K, M, G or T
        size: ByteSize,
    },
    /// Move a volume to another SSD while its guest goes on
    ///
    /// Example: podctl volumes move vol0 --to h3/ssd0
    #[command(verbatim_doc_comment)]
    Move {
        /// Its name
        name: String,
        /// To which SSD [default: the one of another host with the largest share free]
        #[arg(long, value_name = "HOST/NAME")]
        to: Option<String>,
        /// Of a mirrored volume: which replica moves
        #[arg(long, value_name = "HOST/NAME")]
        from: Option<String>,
    },
    /// Keep a volume on one more SSD
    ///
    /// Example: podctl volumes add-replica vol0 --device h3/ssd0
    #[command(verbatim_doc_comment)]
    AddReplica {
        /// Its name
        name: String,
        /// On which SSD [default: the one of another host with the largest share free]
        #[arg(long, value_name = "HOST/NAME")]
        device: Option<String>,
    },
    /// Keep a volume on one SSD less; this also ends a move, if it is where the volume would move to
    ///
    /// Example: podctl volumes remove-replica vol0 --device h3/ssd0
    #[command(verbatim_doc_comment)]
    RemoveReplica {
        /// Its name
        name: String,
        /// On which SSD
        #[arg(long, value_name = "HOST/NAME")]
        device: String,
    },
    /// Say how much of its SSD a volume may use; what is left out has no limit
    ///
    /// Examples:
    ///     podctl volumes qos vol0 --iops 5000 --bandwidth 200M --burst-ms 500
    ///     podctl volumes qos vol0 --minimum-iops 1000
    ///     podctl volumes qos vol0
    #[command(verbatim_doc_comment)]
    Qos {
        /// Its name
        name: String,
        /// Requests per second at most
        #[arg(long)]
        iops: Option<u64>,
        /// Bytes per second at most: a number, or with K, M, G or T
        #[arg(long)]
        bandwidth: Option<ByteSize>,
        /// Of how many milliseconds the share may be saved up and used at once
        #[arg(long, default_value = "100")]
        burst_ms: u32,
        /// Requests per second for which it comes before others, where the SSD is the bottleneck
        #[arg(long)]
        minimum_iops: Option<u64>,
    },
    /// Delete a volume and its data
    #[command(visible_alias = "rm")]
    Delete {
        /// Its name
        name: String,
    },
}

#[derive(Subcommand)]
pub(crate) enum Instances {
    /// Show all
    #[command(visible_alias = "ls")]
    List,
    /// Show one in full
    Get {
        /// Its name
        name: String,
    },
    /// Create an instance: lease NICs and volumes for a VM, and print the sockets to give to it
    ///
    /// Examples:
    ///     podctl instances create vm1 --host h1 --nic --volume vol0
    ///     podctl instances create vm2 --host h1 --nic mac=02:00:00:00:00:02,mtu=1500,queue-pairs=2
    #[command(verbatim_doc_comment)]
    Create(CreateInstance),
    /// Say anew what an instance may do with its NIC; what is left out is without limit
    ///
    /// Examples:
    ///     podctl instances nic-policy vm1 --send 125M --receive 125M --address 10.0.0.2
    ///     podctl instances nic-policy vm1 --send-minimum 50M --receive-minimum 50M
    #[command(verbatim_doc_comment)]
    NicPolicy {
        /// The instance's name
        name: String,
        /// Which NIC of it
        #[arg(long, value_name = "NAME", default_value = "net0")]
        nic: String,
        /// Bytes that it may send per second, such as 125M
        #[arg(long, value_name = "BYTES")]
        send: Option<ByteSize>,
        /// Packets that it may send per second
        #[arg(long, value_name = "COUNT")]
        send_packets: Option<u64>,
        /// Bytes that it may receive per second
        #[arg(long, value_name = "BYTES")]
        receive: Option<ByteSize>,
        /// Packets that it may receive per second
        #[arg(long, value_name = "COUNT")]
        receive_packets: Option<u64>,
        /// Bytes that it sends per second before others do, where the NIC is the bottleneck
        #[arg(long, value_name = "BYTES")]
        send_minimum: Option<ByteSize>,
        /// Bytes that it receives per second before others do, where the way to it is the bottleneck
        #[arg(long, value_name = "BYTES")]
        receive_minimum: Option<ByteSize>,
        /// Of how many milliseconds the share may be saved up
        #[arg(long, value_name = "MS", default_value_t = 100)]
        burst_ms: u32,
        /// An IPv4 or IPv6 address that it may use; again for more, and without any, it may use all
        #[arg(long = "address", value_name = "ADDRESS")]
        addresses: Vec<std::net::IpAddr>,
        /// The VLAN that it is in, 1 to 4094: it sends and receives without tags, its NIC with them
        #[arg(long, value_name = "NUMBER")]
        vlan: Option<u16>,
    },
    /// Move a NIC of an instance to another device while both work: nothing is lost
    ///
    /// Example: podctl instances migrate-nic vm1 --to h3/nic1
    #[command(verbatim_doc_comment)]
    MigrateNic {
        /// The instance's name
        name: String,
        /// Which NIC of it
        #[arg(long, value_name = "NAME", default_value = "net0")]
        nic: String,
        /// Where to [default: the least loaded other NIC]
        #[arg(long, value_name = "HOST/NAME")]
        to: Option<String>,
    },
    /// Let another host get ready for an instance that is to move there while it runs, and print the sockets there
    ///
    /// The instance goes on where it is. `vmm migrate` does this and the rest; with another VMM, start that on the
    /// sockets, let it receive the guest, and the leases follow.
    ///
    /// Example: podctl instances migrate vm1 --to h3
    #[command(verbatim_doc_comment)]
    Migrate {
        /// The instance's name
        name: String,
        /// The host
        #[arg(long, value_name = "HOST")]
        to: String,
    },
    /// Give up the move of an instance, which stays where it is
    AbortMigration {
        /// The instance's name
        name: String,
    },
    /// Hand an instance's leases to the host to which it moves, although its guest has not used them there
    ActivateMigration {
        /// The instance's name
        name: String,
        /// Although the host that it leaves has not let go: that host is dead
        #[arg(long)]
        force: bool,
    },
    /// Delete an instance: its leases end, its volumes stay
    #[command(visible_alias = "rm")]
    Delete {
        /// Its name
        name: String,
        /// Also while a VMM is connected, which then loses its devices
        #[arg(long)]
        force: bool,
    },
}

#[derive(Subcommand)]
pub(crate) enum Types {
    /// Show all
    #[command(visible_alias = "ls")]
    List,
    /// Show one
    Get {
        /// Its name
        name: String,
    },
    /// Describe one, as a whole; instances that are there stay as they are
    ///
    /// Example: podctl types set small --nics 1 --reserve 2G --volume-iops 5000
    #[command(verbatim_doc_comment)]
    Set {
        /// Its name
        name: String,
        /// How many NICs an instance gets, if none is asked for
        #[arg(long, value_name = "COUNT", default_value_t = 1)]
        nics: u8,
        /// How much of a NIC each is sure of, such as 500M or 5G, in bit/s
        #[arg(long, value_name = "RATE", default_value = "0", value_parser = parse_mbps)]
        reserve: u64,
        /// Pairs of queues of each NIC
        #[arg(long, value_name = "COUNT")]
        queue_pairs: Option<u16>,
        /// How many requests per second each volume is sure of, at least
        #[arg(long, value_name = "COUNT")]
        volume_iops: Option<u64>,
    },
    /// Delete one; instances that were made of it stay as they are
    #[command(visible_alias = "rm")]
    Delete {
        /// Its name
        name: String,
    },
}

#[derive(Args)]
pub(crate) struct CreateInstance {
    /// Its name: lower-case letters, digits and dashes
    pub(crate) name: String,
    /// The host it runs on
    #[arg(long)]
    pub(crate) host: String,
    /// What kind of instance it is; what is not said otherwise follows from that
    #[arg(long = "type", value_name = "NAME")]
    pub(crate) instance_type: Option<String>,
    /// A NIC; again for more. With any of mac=…, mtu=…, queue-pairs=…, reserve=…, apart=…, together=…
    ///
    /// reserve=5G makes sure of 5 Gbit/s, also after the failure of a host; NICs with the same apart=NAME are served by
    /// different hosts, those with the same together=NAME by one host where that can be.
    #[arg(long = "nic", value_name = "OPTIONS", num_args = 0..=1, default_missing_value = "", value_parser = parse_nic)]
    pub(crate) nics: Vec<NicRequest>,
    /// A volume by name; again for more
    #[arg(long = "volume", value_name = "NAME")]
    pub(crate) volumes: Vec<String>,
    /// How many seconds to wait until a VM can be started, 30 at most
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = parse_seconds)]
    pub(crate) wait: Duration,
    /// Only show what would be made, and on which devices; nothing is
    #[arg(long)]
    pub(crate) dry_run: bool,
}

#[derive(Args)]
pub(crate) struct Events {
    /// Go on with new events as they happen
    #[arg(long, short)]
    pub(crate) follow: bool,
    /// Only events after this number
    #[arg(long, value_name = "NUMBER")]
    pub(crate) after: Option<u64>,
    /// At most this many of those that happened already, the newest
    #[arg(long, short = 'n', value_name = "COUNT", default_value_t = 50)]
    pub(crate) last: usize,
}

fn parse_nic(text: &str) -> Result<NicRequest, String> {
    let mut nic = NicRequest::default();
    for option in text.split(',').filter(|option| !option.is_empty()) {
        let number =
            |value: &str| value.parse::<u16>().map_err(|_| format!("{option:?} needs a number up to 65535"));
        match option.split_once('=') {
            Some(("mac", value)) => nic.mac = Some(value.to_owned()),
            Some(("mtu", value)) => nic.mtu = Some(number(value)?),
            Some(("queue-pairs", value)) => nic.queue_pairs = Some(number(value)?),
            Some(("reserve", value)) => nic.reserved_mbps = parse_mbps(value)?,
            Some(("apart", value)) => nic.apart = Some(value.to_owned()),
            Some(("together", value)) => nic.together = Some(value.to_owned()),
            _ => {
                return Err(format!(
                    "{option:?} is none of mac=…, mtu=…, queue-pairs=…, reserve=…, apart=…, together=…"
                ));
            }
        }
    }
    Ok(nic)
}

/// A bit rate in Mbit/s: `500M`, `5G`, or a number of Mbit/s.
fn parse_mbps(text: &str) -> Result<u64, String> {
    let (digits, unit) = match text.strip_suffix(['G', 'g']) {
        Some(digits) => (digits, 1000),
        None => (text.strip_suffix(['M', 'm']).unwrap_or(text), 1),
    };
    let mbps = digits.parse::<u64>().ok().and_then(|number| number.checked_mul(unit));
    mbps.ok_or_else(|| format!("{text:?} is no bit rate: write 500M or 5G"))
}

fn parse_seconds(text: &str) -> Result<Duration, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.0..=30.0).contains(&seconds) => Ok(Duration::from_secs_f64(seconds)),
        _ => Err("use a number of seconds from 0 to 30".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

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
        ] {
            assert!(Arguments::try_parse_from(line.split(' ')).is_err(), "{line}");
        }
    }
}
