use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The pool and what lies where in it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Pool {
    /// Its path on the controller's host.
    pub path: String,
    /// The pod's name for good.
    pub uuid: String,
    /// Grows with every change of anything in the pod but what is measured.
    #[serde(default, rename = "resourceVersion")]
    pub resource_version: String,
    /// The version of the protocol that the whole pod speaks: the lowest of all its members.
    #[serde(default)]
    pub protocol: String,
    /// `software` or `hardware`.
    pub coherence: String,
    /// The whole of it.
    pub size_bytes: u64,
    /// Where regions may lie.
    pub data_start_bytes: u64,
    /// How much there is for regions.
    pub data_bytes: u64,
    /// Of it, what is neither in use nor quarantined.
    pub free_bytes: u64,
    /// Of it, what is quarantined.
    pub quarantined_bytes: u64,
    /// Of it, what failed.
    #[serde(default)]
    pub failed_bytes: u64,
    /// The longest free range: the largest region that can be had.
    pub largest_free_bytes: u64,
    /// Its regions, or those that were asked for, sorted by place.
    pub regions: Vec<Region>,
    /// There are more: ask again, and `continue` with this.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
}

/// A leased range of the pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Region {
    /// Its number.
    pub id: u32,
    /// Where it begins.
    pub start_bytes: u64,
    /// How long it is.
    pub size_bytes: u64,
    /// `rings`, `transmit`, `receive`, `data`, `ram` or `board`; `none` for memory that was free when it failed.
    pub purpose: String,
    /// What it belongs to, in words.
    pub owner: String,
    /// Whether it is in use.
    pub state: RegionState,
    /// The endpoints that hold it, or that must confirm that they have let go, as `h1/net-frontend`.
    pub holders: Vec<String>,
}

/// Whether a region is in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum RegionState {
    /// Somebody uses it.
    InUse,
    /// Given up, and not confirmed yet by all that held it.
    Quarantined,
    /// Some of its memory cannot be read: given to nobody any more.
    Failed,
}
