//! What a disk's driver finds in its configuration space.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pod_protocol::objects::DiskObject;
use vhost_frontend::ConfigSpace;

use super::device::config_space;

/// The configuration space, of which the driver changes one part and the controller another, in threads of their own.
#[derive(Clone)]
pub(crate) struct Shown {
    config: ConfigSpace,
    /// The worker looks at it with every write.
    writeback: Arc<AtomicBool>,
    /// What is shown now. Held until it is, so that nobody shows what another one has changed meanwhile.
    size_bytes: Arc<Mutex<u64>>,
}

impl Shown {
    /// Of a new disk.
    pub(crate) fn new(object: &DiskObject) -> Self {
        let writeback = !object.write_through;
        Self {
            config: ConfigSpace::new(config_space(object, writeback)),
            writeback: Arc::new(AtomicBool::new(writeback)),
            size_bytes: Arc::new(Mutex::new(object.size_bytes)),
        }
    }

    /// What the VMM reads.
    pub(crate) fn config(&self) -> ConfigSpace {
        self.config.clone()
    }

    /// Whether completed writes may still be in a cache: the driver's wish.
    pub(crate) fn writeback(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.writeback)
    }

    /// The same, as it is now.
    pub(crate) fn writes_back(&self) -> bool {
        self.writeback.load(Ordering::Relaxed)
    }

    /// The driver switches the write cache.
    pub(crate) fn set_writeback(&self, object: &DiskObject, writeback: bool) {
        let size_bytes = self.size_bytes();
        self.writeback.store(writeback, Ordering::Relaxed);
        let object = DiskObject { size_bytes: *size_bytes, ..object.clone() };
        self.config.set(config_space(&object, writeback));
    }

    /// The disk is larger than its object said so far. The driver is told.
    pub(crate) fn grow(&self, object: &DiskObject) {
        let mut size_bytes = self.size_bytes();
        *size_bytes = object.size_bytes;
        self.config.change(config_space(object, self.writeback.load(Ordering::Relaxed)));
    }

    fn size_bytes(&self) -> MutexGuard<'_, u64> {
        self.size_bytes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
