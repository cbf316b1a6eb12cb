//! Which volumes lie on an SSD: what the controller has a backend keep on the device itself, and finds there again.

use serde::{Deserialize, Serialize};

use crate::ids::VolumeId;

/// The volumes of one SSD, in the order of their places.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeTable {
    /// The volumes.
    pub volumes: Vec<VolumeEntry>,
}

/// A volume as its SSD knows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeEntry {
    /// Its number.
    pub id: VolumeId,
    /// Its name.
    pub name: String,
    /// Where it begins.
    pub start_bytes: u64,
    /// How long it is.
    pub size_bytes: u64,
    /// It was deleted: its place is given on when nothing of its data is left.
    #[serde(default)]
    pub deleted: bool,
}

impl VolumeEntry {
    /// Where it ends.
    pub fn end_bytes(&self) -> u64 {
        self.start_bytes.saturating_add(self.size_bytes)
    }
}
