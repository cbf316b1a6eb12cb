//! `podctl instances` and `podctl types`.

use std::time::Duration;

use clap::{Args, Subcommand};
use pod_api::{ByteSize, NicRequest};

use super::{InstancesAsked, Label, TypesAsked, nic, parse_label};
use crate::said::Said;

#[derive(Subcommand)]
pub(crate) enum Instances {
    /// Show all, or those that are asked for
    #[command(visible_alias = "ls")]
    List(InstancesAsked),
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
    ///     podctl instances create vm3 --host h1 --nic --volume vol3 --ram 2G
    #[command(verbatim_doc_comment)]
    Create(CreateInstance),
    /// Change what an instance may do with its NIC; what is not said stays as it is
    ///
    /// With `none` in place of a value there is no such limit, minimum, address or VLAN any more.
    ///
    /// Examples:
    ///     podctl instances nic-policy vm1 --send 125M --receive 125M --address 10.0.0.2
    ///     podctl instances nic-policy vm1 --send-minimum 50M --receive-minimum 50M
    ///     podctl instances nic-policy vm1 --send none --vlan none
    ///     podctl instances nic-policy vm1 --anew
    #[command(verbatim_doc_comment)]
    NicPolicy(NicChanges),
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
    /// Lease one NIC or one volume more to an instance; if its VM runs, it is plugged in
    ///
    /// The `vmm run` or `vmm follow` of the VM plugs it in. If that fails, or nobody does it in time, the lease is given back. With
    /// --wait 0 it is leased and nothing else, for somebody else to plug in, such as `virsh attach-device`.
    ///
    /// Examples:
    ///     podctl instances attach vm1 --volume vol1
    ///     podctl instances attach vm1 --nic reserve=1G
    #[command(verbatim_doc_comment)]
    Attach(AttachDevice),
    /// Take a NIC or a volume from an instance; if its VM runs, the guest is asked to let go of it first
    ///
    /// A guest that is asked may take its time, and lets go of a disk that it has mounted as well: unmount it first. If it does not
    /// let go in time, that is said, and the device leaves whenever it does; to ask again asks the guest again. The data of a
    /// volume stays.
    ///
    /// Example: podctl instances detach vm1 vol1
    #[command(verbatim_doc_comment)]
    Detach {
        /// The instance's name
        name: String,
        /// The device's name within it: the volume's, or such as net1
        device: String,
        /// At once, whatever the guest does with it: its I/O fails or hangs
        #[arg(long)]
        force: bool,
        /// How many seconds to wait until the guest has let go of it, 30 at most
        #[arg(long, value_name = "SECONDS", default_value = "20", value_parser = parse_seconds)]
        wait: Duration,
    },
    /// Say for the VMM of an instance whether its guest has a device that was attached or is to leave
    ///
    /// `vmm` does it by itself. It is for whoever plugs devices into a VM of another VMM.
    ///
    /// Examples:
    ///     podctl instances answer vm1 vol1 --plugged
    ///     podctl instances answer vm1 vol1 --unplugged
    ///     podctl instances answer vm1 vol1 --unplugged --refused "no free port on the bus"
    #[command(verbatim_doc_comment)]
    Answer {
        /// The instance's name
        name: String,
        /// The device's name within it: the volume's, or such as net1
        device: String,
        /// The guest has it
        #[arg(long, conflicts_with = "unplugged", required_unless_present = "unplugged")]
        plugged: bool,
        /// The guest does not have it
        #[arg(long)]
        unplugged: bool,
        /// Why that is not what was asked for
        #[arg(long, value_name = "REASON")]
        refused: Option<String>,
    },
    /// Give an instance another share of devices that are short, at once
    ///
    /// Where a NIC or an SSD cannot do all that its instances want, each gets its part by priority: one with 300 three times what
    /// one with 100 gets. Whoever is alone has all of it. What is promised (nic-policy, volumes qos) comes first. Instances of a
    /// higher priority also leave a drained device before others do, and are moved last to balance the load.
    ///
    /// Example: podctl instances priority vm1 300
    #[command(verbatim_doc_comment)]
    Priority {
        /// The instance's name
        name: String,
        /// 1 to 1000; 100 is usual
        priority: u16,
    },
    /// Label an instance anew, as a whole; without labels, it has none any more
    Label(Label),
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
    List {
        /// Which ones
        #[command(flatten)]
        asked: TypesAsked,
    },
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
        /// How many requests per second each volume is sure of, at least, while the instance has it
        #[arg(long, value_name = "COUNT")]
        volume_iops: Option<u64>,
        /// What they get of devices that are short, next to others: 1 to 1000; 100 is usual
        #[arg(long, value_name = "NUMBER")]
        priority: Option<u16>,
        /// A word to find it by; again for more. What is left out, it does not bear any more. Its instances have labels of their own
        #[arg(long = "label", value_name = "NAME=VALUE", value_parser = parse_label)]
        labels: Vec<(String, String)>,
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
    /// A NIC; again for more. With any of device=…, mac=…, mtu=…, queue-pairs=…, reserve=…, apart=…, together=…, rails=…, and of what
    /// nic-policy changes later
    ///
    /// vlan=…, address=… (again for more), send=…, send-packets=…, send-minimum=…, receive=…, receive-packets=…, receive-minimum=… and
    /// burst-ms=… hold from its first packet on. reserve=5G makes sure of 5 Gbit/s, also after the failure of a host; NICs with the same apart=NAME are served by
    /// different hosts, those with the same together=NAME by one host where that can be; rails=2 uses two NICs or more of a link
    /// aggregation group at the same time.
    #[arg(long = "nic", value_name = "OPTIONS", num_args = 0..=1, default_missing_value = "", value_parser = nic::parse)]
    pub(crate) nics: Vec<NicRequest>,
    /// A volume by name; again for more
    #[arg(long = "volume", value_name = "NAME")]
    pub(crate) volumes: Vec<String>,
    /// The VMM listens on the sockets of the devices and the frontends connect to it, instead of the other way round
    #[arg(long)]
    pub(crate) vmm_listens: bool,
    /// Lease so much of the pool as the guest's RAM, such as 512M: then the engines copy less [default: RAM outside of the pool]
    ///
    /// `vmm run` uses it, with a QEMU that knows memory-backend-file's `offset` (8.1 and later). A multiple of 2 MiB.
    #[arg(long, value_name = "SIZE")]
    pub(crate) ram: Option<ByteSize>,
    /// What it gets of devices that are short, next to others: 1 to 1000, in proportion [default: what its type says, or 100]
    #[arg(long, value_name = "NUMBER")]
    pub(crate) priority: Option<u16>,
    /// How many seconds to wait until a VM can be started, 30 at most
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = parse_seconds)]
    pub(crate) wait: Duration,
    /// A label to find it by; again for more
    #[arg(long = "label", value_name = "NAME=VALUE", value_parser = parse_label)]
    pub(crate) labels: Vec<(String, String)>,
}

/// What changes of what an instance may do with its NIC.
#[derive(Args)]
pub(crate) struct NicChanges {
    /// The instance's name
    pub(crate) name: String,
    /// Which NIC of it
    #[arg(long, value_name = "NAME", default_value = "net0")]
    pub(crate) nic: String,
    /// Bytes that it may send per second, such as 125M
    #[arg(long, value_name = "BYTES")]
    pub(crate) send: Option<Said<ByteSize>>,
    /// Packets that it may send per second
    #[arg(long, value_name = "COUNT")]
    pub(crate) send_packets: Option<Said<u64>>,
    /// Bytes that it may receive per second
    #[arg(long, value_name = "BYTES")]
    pub(crate) receive: Option<Said<ByteSize>>,
    /// Packets that it may receive per second
    #[arg(long, value_name = "COUNT")]
    pub(crate) receive_packets: Option<Said<u64>>,
    /// Bytes that it sends per second before others do, where the NIC is the bottleneck
    #[arg(long, value_name = "BYTES")]
    pub(crate) send_minimum: Option<Said<ByteSize>>,
    /// Bytes that it receives per second before others do, where the way to it is the bottleneck
    #[arg(long, value_name = "BYTES")]
    pub(crate) receive_minimum: Option<Said<ByteSize>>,
    /// Of how many milliseconds the share may be saved up, each way; 100 unless said
    #[arg(long, value_name = "MS")]
    pub(crate) burst_ms: Option<u32>,
    /// An IPv4 or IPv6 address that it may use, and no others than are said now; again for more
    ///
    /// With none, it may use all.
    #[arg(long = "address", value_name = "ADDRESS")]
    pub(crate) addresses: Vec<Said<std::net::IpAddr>>,
    /// The VLAN that it is in, 1 to 4094: it sends and receives without tags, its NIC with them
    #[arg(long, value_name = "NUMBER")]
    pub(crate) vlan: Option<Said<u16>>,
    /// Only what is said now counts, and the rest is without limit
    #[arg(long)]
    pub(crate) anew: bool,
}

#[derive(Args)]
pub(crate) struct AttachDevice {
    /// The instance's name
    pub(crate) name: String,
    /// A NIC, with the options that `create` has for it
    #[arg(long, value_name = "OPTIONS", num_args = 0..=1, default_missing_value = "", value_parser = nic::parse)]
    pub(crate) nic: Option<NicRequest>,
    /// A volume by name
    #[arg(long, value_name = "NAME", conflicts_with = "nic", required_unless_present = "nic")]
    pub(crate) volume: Option<String>,
    /// How many seconds to wait until it is plugged in, 30 at most
    #[arg(long, value_name = "SECONDS", default_value = "20", value_parser = parse_seconds)]
    pub(crate) wait: Duration,
}

/// A bit rate in Mbit/s: `500M`, `5G`, or a number of Mbit/s.
pub(super) fn parse_mbps(text: &str) -> Result<u64, String> {
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
