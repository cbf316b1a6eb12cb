//! The device's configuration space.

use std::sync::atomic::{AtomicBool, Ordering};
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
    /// It has changed since the VMM came, which may not have passed that on: VMMs heed no notice of a device that they have not started.
    changed: Arc<AtomicBool>,
}

impl ConfigSpace {
    /// A configuration space with these bytes.
    pub fn new(bytes: Vec<u8>) -> Self {
        Self { bytes: Arc::new(Mutex::new(bytes)), ..Self::default() }
    }

    /// Replaces the bytes; a VMM that asks from now on sees the new ones.
    pub fn set(&self, bytes: Vec<u8>) {
        *self.bytes.lock().unwrap_or_else(PoisonError::into_inner) = bytes;
        self.changed.store(true, Ordering::Release);
    }

    /// Replaces the bytes, and tells the VMM, which tells the guest's driver.
    pub fn change(&self, bytes: Vec<u8>) {
        self.set(bytes);
        self.notices.config_changed();
    }

    /// The VMM has started the device. It hears once more of what has changed since it came.
    pub(crate) fn tell_again(&self) {
        if self.changed.swap(false, Ordering::AcqRel) {
            self.notices.config_changed();
        }
    }

    /// The VMM went away; the next one looks for itself.
    pub(crate) fn vmm_left(&self) {
        self.notices.close();
        self.changed.store(false, Ordering::Release);
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
