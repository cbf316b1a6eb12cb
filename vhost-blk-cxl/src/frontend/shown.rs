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
    said: Arc<Mutex<Said>>,
}

/// What the controller may change.
#[derive(Clone, Copy)]
struct Said {
    size_bytes: u64,
    discard_granularity_bytes: Option<u32>,
}

impl Said {
    const fn by(object: &DiskObject) -> Self {
        Self { size_bytes: object.size_bytes, discard_granularity_bytes: object.discard_granularity_bytes }
    }
}

impl Shown {
    /// Of a new disk.
    pub(crate) fn new(object: &DiskObject) -> Self {
        let writeback = !object.write_through;
        Self {
            config: ConfigSpace::new(config_space(object, writeback)),
            writeback: Arc::new(AtomicBool::new(writeback)),
            said: Arc::new(Mutex::new(Said::by(object))),
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
        let said = self.said();
        self.writeback.store(writeback, Ordering::Relaxed);
        let Said { size_bytes, discard_granularity_bytes } = *said;
        let object = DiskObject { size_bytes, discard_granularity_bytes, ..object.clone() };
        self.config.set(config_space(&object, writeback));
    }

    /// The controller says something else of the disk. The driver is told of a new size. Of anything else it has no use before it begins
    /// anew, and then it looks.
    pub(crate) fn update(&self, object: &DiskObject) {
        let mut said = self.said();
        let grew = said.size_bytes != object.size_bytes;
        *said = Said::by(object);
        let config = config_space(object, self.writeback.load(Ordering::Relaxed));
        if grew {
            self.config.change(config);
        } else {
            self.config.set(config);
        }
    }

    fn said(&self) -> MutexGuard<'_, Said> {
        self.said.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
