//! Where the pods of a test keep their state: in a file, or, with `WADI_STORE=etcd`, in an etcd that the pods of this process share. Those that
//! are about files stay with them.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use super::etcd_server::Etcd;

/// The etcd, for as long as a pod uses it: a process that a static had would outlive this one.
static SHARED: Mutex<(Weak<Etcd>, u64)> = Mutex::new((Weak::new(), 0));

/// One pod's part of the etcd.
pub(crate) struct Place {
    etcd: Arc<Etcd>,
    prefix: String,
}

impl Place {
    /// For another pod, unless its state is in a file.
    pub(crate) fn if_wanted() -> Option<Self> {
        std::env::var("WADI_STORE").is_ok_and(|store| store == "etcd").then(Self::new)
    }

    fn new() -> Self {
        let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
        let etcd = shared.0.upgrade().unwrap_or_else(|| Arc::new(Etcd::start()));
        shared.0 = Arc::downgrade(&etcd);
        shared.1 += 1;
        Self { etcd, prefix: format!("wadi/pod{}", shared.1) }
    }

    /// What the configuration says of it.
    pub(crate) fn line(&self) -> String {
        format!("store = '{}'\n", self.etcd.address(&self.prefix))
    }
}
