//! The device's configuration space.

use std::sync::{Arc, Mutex, PoisonError};

use crate::notice::Notices;

/// The bytes a guest sees as its device's configuration; clones share them.
///
/// Reads beyond its end give zeros: VMMs ask for the largest structure that they know.
#[derive(Debug, Clone, Default)]
pub struct ConfigSpace {
    bytes: Arc<Mutex<Vec<u8>>>,
    /// The way to the VMM that uses the device.
    pub(crate) notices: Notices,
}

impl ConfigSpace {
    /// A configuration space with these bytes.
    pub fn new(bytes: Vec<u8>) -> Self {
        Self { bytes: Arc::new(Mutex::new(bytes)), notices: Notices::default() }
    }

    /// Replaces the bytes; a VMM that asks from now on sees the new ones.
    pub fn set(&self, bytes: Vec<u8>) {
        *self.bytes.lock().unwrap_or_else(PoisonError::into_inner) = bytes;
    }

    /// Replaces the bytes, and tells the VMM, which tells the guest's driver.
    pub fn change(&self, bytes: Vec<u8>) {
        self.set(bytes);
        self.notices.config_changed();
    }

    /// `size` bytes from `offset`.
    pub fn read(&self, offset: usize, size: usize) -> Vec<u8> {
        let bytes = self.bytes.lock().unwrap_or_else(PoisonError::into_inner);
        let mut read: Vec<u8> = bytes.iter().skip(offset).take(size).copied().collect();
        read.resize(size, 0);
        read
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_beyond_the_end_give_zeros() {
        let config = ConfigSpace::new(vec![1, 2, 3]);
        assert_eq!(config.read(0, 5), [1, 2, 3, 0, 0]);
        assert_eq!(config.read(2, 2), [3, 0]);
        assert_eq!(config.read(100, 2), [0, 0]);
        assert_eq!(config.read(usize::MAX, 1), [0]);
    }
}
