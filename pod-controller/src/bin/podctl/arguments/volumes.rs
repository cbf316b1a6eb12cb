//! `podctl volumes`.

use clap::{Args, Subcommand};
use pod_api::ByteSize;

use super::{Label, VolumesAsked, parse_label};
use crate::said::Said;

#[derive(Subcommand)]
pub(crate) enum Volumes {
    /// Show all, or those that are asked for
    #[command(visible_alias = "ls")]
    List(VolumesAsked),
    /// Show one in full
    Get {
        /// Its name
        name: String,
    },
    /// Create a volume
    ///
    /// Examples:
    ///     podctl volumes create vol0 --size 8G --device h2/ssd0
    ///     podctl volumes create log-copy --size 8G --apart db
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
        /// The host that will use it, as h1: an SSD of its own if one has room, else as without this
        #[arg(long, value_name = "HOST", conflicts_with_all = ["device", "stripes"])]
        near: Option<String>,
        /// How many hosts keep it on their SSDs: 1 to 3
        #[arg(long, default_value_t = 1)]
        replicas: u8,
        /// How many requests per second it is sure of: on each of its SSDs, or with --stripes in all
        #[arg(long, value_name = "COUNT")]
        minimum_iops: Option<u64>,
        /// How many bytes per second it is sure of, in the same way: a number, or with K, M, G or T
        #[arg(long, value_name = "BYTES")]
        minimum_bandwidth: Option<ByteSize>,
        /// Over the SSDs of how many hosts it is laid out, a share on each: 2 to 4
        #[arg(long, conflicts_with_all = ["replicas", "device"])]
        stripes: Option<u8>,
        /// How much lies on one before the next has its turn
        #[arg(long, requires = "stripes", default_value = "64K")]
        stripe_size: ByteSize,
        /// Volumes with the same name here lie on SSDs of different hosts, wherever they move: a database and a copy of its log
        #[arg(long, value_name = "GROUP")]
        apart: Option<String>,
        /// Volumes with the same name here lie on one SSD where that can be, else on SSDs of one host, else anywhere
        #[arg(long, value_name = "GROUP")]
        together: Option<String>,
        /// A label to find it by; again for more
        #[arg(long = "label", value_name = "NAME=VALUE", value_parser = parse_label)]
        labels: Vec<(String, String)>,
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
    /// Examples:
    ///     podctl volumes move vol0 --to h3/ssd0
    ///     podctl volumes move vol0 --to h2/ssd1
    ///     podctl volumes move wide --from h2/ssd0 --to h4/ssd0
    #[command(verbatim_doc_comment)]
    Move {
        /// Its name
        name: String,
        /// To which SSD, of its own host or another one [default: the one with the largest share free]
        #[arg(long, value_name = "HOST/NAME")]
        to: Option<String>,
        /// Of a mirrored volume: which replica moves; of a striped one, which column
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
    /// Change how much of its SSD a volume may use; what is not said stays as it is
    ///
    /// With `none` in place of a number there is no such limit or minimum any more.
    ///
    /// Examples:
    ///     podctl volumes qos vol0 --iops 5000 --bandwidth 200M --burst-ms 500
    ///     podctl volumes qos vol0 --minimum-iops 1000 --minimum-bandwidth 50M
    ///     podctl volumes qos vol0 --iops none
    ///     podctl volumes qos vol0 --anew
    #[command(verbatim_doc_comment)]
    Qos(QosChanges),
    /// Say anew in which groups a volume is; what is left out, it is in none of. It stays where it lies
    ///
    /// Examples:
    ///     podctl volumes group log-copy --apart db
    ///     podctl volumes group log-copy
    #[command(verbatim_doc_comment)]
    Group {
        /// Its name
        name: String,
        /// Volumes with the same name here are placed on SSDs of different hosts
        #[arg(long, value_name = "GROUP")]
        apart: Option<String>,
        /// Volumes with the same name here are placed on one SSD where that can be, else on SSDs of one host, else anywhere
        #[arg(long, value_name = "GROUP")]
        together: Option<String>,
    },
    /// Have guests only read a volume, or with --off, write to it again. No instance may use it meanwhile
    ///
    /// Examples:
    ///     podctl volumes read-only golden
    ///     podctl volumes read-only golden --off
    #[command(verbatim_doc_comment)]
    ReadOnly {
        /// Its name
        name: String,
        /// Have guests write to it again
        #[arg(long)]
        off: bool,
    },
    /// Label a volume anew, as a whole; without labels, it has none any more
    Label(Label),
    /// Delete a volume and its data
    #[command(visible_alias = "rm")]
    Delete {
        /// Its name
        name: String,
    },
}

/// What changes of how much of its SSD a volume may use.
#[derive(Args)]
pub(crate) struct QosChanges {
    /// Its name
    pub(crate) name: String,
    /// Requests per second at most
    #[arg(long, value_name = "COUNT")]
    pub(crate) iops: Option<Said<u64>>,
    /// Bytes per second at most: a number, or with K, M, G or T
    #[arg(long, value_name = "BYTES")]
    pub(crate) bandwidth: Option<Said<ByteSize>>,
    /// Of how many milliseconds the share may be saved up and used at once; 100 unless said
    #[arg(long, value_name = "MS")]
    pub(crate) burst_ms: Option<u32>,
    /// Requests per second for which it comes before others, where the SSD is the bottleneck
    #[arg(long, value_name = "COUNT")]
    pub(crate) minimum_iops: Option<Said<u64>>,
    /// Bytes per second for which it comes before others, where the SSD is the bottleneck
    #[arg(long, value_name = "BYTES")]
    pub(crate) minimum_bandwidth: Option<Said<ByteSize>>,
    /// Only what is said now counts, and the rest has no limit and no minimum
    #[arg(long)]
    pub(crate) anew: bool,
}
