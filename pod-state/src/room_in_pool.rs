//! Whether the pool had room for what was made.

use pod_api::ByteSize;
use pod_protocol::ids::InstanceId;

use super::{Lease, Refusal, RefusalKind, State};

impl State {
    /// Whether the pool had room for everything. What waits for a daemon that is away may come later.
    pub(super) fn check_made(&self, id: InstanceId) -> Result<(), Refusal> {
        self.check_ram_made(id, false)?;
        self.check_leases_made(self.instances.get(&id).into_iter().flat_map(|it| self.leases_of(it)))
    }

    /// Whether the pool had room for what these leases need.
    pub(super) fn check_leases_made<'a>(
        &self,
        mut leases: impl Iterator<Item = &'a Lease>,
    ) -> Result<(), Refusal> {
        let made = leases.all(|lease| {
            let channels = self.frontend_of(lease).is_some_and(|frontend| {
                self.backends_of(lease).all(|backend| {
                    self.channel_between(frontend, backend).is_some_and(|channel| channel.rings.is_some())
                        || self.life_of(backend).is_none()
                        || !self.scrubs(backend).is_empty()
                })
            });
            lease.area.is_some() && channels
        });
        if made {
            return Ok(());
        }
        Err(self.no_room("what the instance needs"))
    }

    /// The pool has no room for something, since it is too large or since there are too many regions already.
    pub(super) fn no_room(&self, what: &str) -> Refusal {
        let why = if self.regions.is_full() {
            format!("its table has room for {} regions, and is full", self.options.regions_max)
        } else {
            let largest = self.regions.gaps().into_iter().map(|gap| gap.lines.bytes()).max().unwrap_or(0);
            format!("its largest free range is {}", ByteSize::new(largest))
        };
        let detail = format!(
            "the pool has no room for {what} ({why}): delete instances, or look at `podctl pool` for quarantined regions"
        );
        Refusal::new(RefusalKind::NoRoom, detail)
    }
}
