//! What a daemon implements to take part in the pod.

use cxl_pool::Area;

use crate::ids::RegionId;
use crate::objects::{Object, ObjectId};
use crate::telemetry::Telemetry;

/// Called by the control thread, one call at a time. A call may wait for a worker (see
/// [`WorkerHandle::call`](crate::worker::WorkerHandle::call)), but not for long: while it waits the daemon neither
/// beats nor answers. An error is sent to the controller as it is, so it says what failed and on what.
pub trait Handler: Send {
    /// Have this object, in place of one of the same id. One equal to what is there must disturb nothing.
    fn apply(&mut self, object: Object) -> Result<(), String>;

    /// Have this object no longer. That it is not there is no error.
    fn remove(&mut self, id: ObjectId) -> Result<(), String>;

    /// Everything the controller wants here has been applied, and what it did not mention has been removed.
    fn synced(&mut self) {}

    /// Return once nothing of this endpoint, or of its dead predecessor on this host, is in flight on the area, and
    /// every line of it has left this host's cache.
    fn scrub(&mut self, region: RegionId, area: Area) -> Result<(), String>;

    /// A sample of all counters.
    fn telemetry(&mut self) -> Telemetry;

    /// The controller took away everything that is held here: stop using it, now. The daemon exits after this.
    fn fenced(&mut self);
}
