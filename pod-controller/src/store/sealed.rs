//! Values that say by a checksum whether they are whole.

use serde::Serialize;
use serde::de::DeserializeOwned;

/// A value is not what was written, or cannot be written.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct Damage(String);

impl Damage {
    pub(super) fn new(what: impl Into<String>) -> Self {
        Self(what.into())
    }
}

/// Checksum, then JSON.
pub(crate) fn seal<T: Serialize>(value: &T) -> Result<Vec<u8>, Damage> {
    let mut sealed = vec![0; 4];
    serde_json::to_writer(&mut sealed, value).map_err(|error| Damage(error.to_string()))?;
    let checksum = crc32fast::hash(&sealed[4..]).to_le_bytes();
    sealed[..4].copy_from_slice(&checksum);
    Ok(sealed)
}

pub(crate) fn unseal<T: DeserializeOwned>(sealed: &[u8]) -> Result<T, Damage> {
    let damaged = || Damage("a checksum is wrong".to_owned());
    let (checksum, json) = sealed.split_first_chunk::<4>().ok_or_else(damaged)?;
    if crc32fast::hash(json) != u32::from_le_bytes(*checksum) {
        return Err(damaged());
    }
    serde_json::from_slice(json).map_err(|error| Damage(error.to_string()))
}
