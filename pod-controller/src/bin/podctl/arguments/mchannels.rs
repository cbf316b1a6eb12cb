//! `podctl mchannel`

use clap::Subcommand;
use pod_api::{ByteSize, FabricSignal};

#[derive(Subcommand)]
pub(crate) enum Mchannels {
    /// Show all instances that have a share: what they move and what they may move
    #[command(visible_alias = "ls")]
    List {
        /// Only those of this tenant
        #[arg(long, value_name = "NAME")]
        tenant: Option<String>,
        /// Only those of instances on this host
        #[arg(long, value_name = "HOST")]
        host: Option<String>,
    },
    /// Show the share of one instance
    #[command(visible_alias = "get")]
    Show {
        /// The instance's name
        instance: String,
    },
    /// Give an instance a share, or another one; it holds at once, for all its devices together
    ///
    /// Example: podctl mchannel set vm1 --weight 3 --tenant red --path port1,pool
    #[command(verbatim_doc_comment)]
    Set {
        /// The instance's name
        instance: String,
        /// Its part among the instances of its tenant, 1 to 1000
        #[arg(long, default_value_t = 1)]
        weight: u32,
        /// Whose it is
        #[arg(long, default_value = "default")]
        tenant: String,
        /// The elements of the fabric that it passes through
        #[arg(long, value_name = "ELEMENT", value_delimiter = ',', required = true)]
        path: Vec<String>,
    },
    /// Let an instance use the fabric as it likes
    Clear {
        /// The instance's name
        instance: String,
    },
    /// Show what the fabric consists of and who shares it, or change that
    ///
    /// Example: podctl mchannel fabric --element pool=20G --tenant red=2
    #[command(verbatim_doc_comment)]
    Fabric {
        /// An element and what it carries at most per second, such as 20G; again for more
        #[arg(long = "element", value_name = "NAME=BYTES", value_parser = parse_element)]
        elements: Vec<(String, u64)>,
        /// What tells hosts how congested an element is: off, probe (how long they take to load lines of the pool) or device (what CXL memory devices
        /// answer); again for more
        #[arg(long = "signal", value_name = "NAME=SIGNAL", value_parser = parse_signal)]
        signals: Vec<(String, FabricSignal)>,
        /// A tenant and its weight, 1 to 1000; again for more
        #[arg(long = "tenant", value_name = "NAME=WEIGHT", value_parser = parse_tenant)]
        tenants: Vec<(String, u32)>,
        /// An element or a tenant that is there no more; again for more
        #[arg(long, value_name = "NAME")]
        remove: Vec<String>,
        /// Of how many µs bytes may be saved up and moved at once
        #[arg(long, value_name = "MICROSECONDS")]
        window_us: Option<u32>,
        /// How often shares are computed anew, in µs
        #[arg(long, value_name = "MICROSECONDS")]
        sample_us: Option<u32>,
    },
}

impl Mchannels {
    /// Whether it only looks.
    pub(crate) const fn looks(&self) -> bool {
        matches!(self, Self::List { .. } | Self::Show { .. })
    }
}

fn parse_element(text: &str) -> Result<(String, u64), String> {
    let (name, rate) = text.split_once('=').ok_or("write NAME=BYTES, such as pool=20G")?;
    let rate: ByteSize = rate.parse().map_err(|error| format!("{error}"))?;
    Ok((name.to_owned(), rate.get()))
}

fn parse_signal(text: &str) -> Result<(String, FabricSignal), String> {
    let (name, signal) = text.split_once('=').ok_or("write NAME=SIGNAL, such as pool=probe")?;
    Ok((name.to_owned(), signal.parse()?))
}

fn parse_tenant(text: &str) -> Result<(String, u32), String> {
    let (name, weight) = text.split_once('=').ok_or("write NAME=WEIGHT, such as red=2")?;
    Ok((name.to_owned(), weight.parse().map_err(|_| format!("{weight:?} is no weight: write 1 to 1000"))?))
}
