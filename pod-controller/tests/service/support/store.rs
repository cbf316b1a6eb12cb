//! Where the pods of a test keep their state: in a file, or in an etcd that the pods of this process share.
//!
//! With `WADI_STORE=etcd` that is etcd for all of them but those that are about files. Without, tests that are named in
//! [`on_etcd`](crate::support::on_etcd) run once with each.

use std::cell::Cell;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use super::etcd_server::Etcd;

/// The etcd, for as long as a pod uses it: a process that a static had would outlive this one.
static SHARED: Mutex<(Weak<Etcd>, u64)> = Mutex::new((Weak::new(), 0));

thread_local! {
    /// Whether the pods of this thread's test keep their state in etcd.
    static IN_ETCD: Cell<bool> = const { Cell::new(false) };
}

/// Runs a test whose pods keep their state in etcd.
pub(crate) fn in_etcd(test: fn()) {
    /// Whatever becomes of it, the next test of the thread has its own choice.
    struct Done;
    impl Drop for Done {
        fn drop(&mut self) {
            IN_ETCD.set(false);
        }
    }
    let _done = Done;
    IN_ETCD.set(true);
    test();
}

/// One pod's part of the etcd.
pub(crate) struct Place {
    etcd: Arc<Etcd>,
    prefix: String,
}

impl Place {
    /// For another pod of the test that runs, unless its state is in a file.
    pub(crate) fn of_this_test() -> Option<Self> {
        let always = std::env::var("WADI_STORE").is_ok_and(|store| store == "etcd");
        (always || IN_ETCD.get()).then(Self::new)
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

/// The same tests once more, with the state in etcd.
macro_rules! on_etcd {
    ($($test:ident),* $(,)?) => {
        mod on_etcd {
            $(
                #[test]
                fn $test() {
                    $crate::support::store::in_etcd(super::$test);
                }
            )*
        }
    };
}
pub(crate) use on_etcd;
