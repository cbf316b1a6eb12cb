//! What the VMM says about a device: memory, features, vrings.

mod additional;
mod coming;
mod forgotten;
mod inflight;
mod logging;
#[cfg(test)]
mod tests;
mod vring;

use std::fs::File;
use std::io;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use tracing::debug;
use vhost::VhostUserMemoryRegionBase;
use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserInflight,
    VhostUserLog, VhostUserMemoryRegion, VhostUserProtocolFeatures, VhostUserShMemConfig, VhostUserSharedMsg,
    VhostUserSingleMemoryRegion, VhostUserVirtioFeatures, VhostUserVringAddrFlags, VhostUserVringState,
};
use vhost::vhost_user::{Error, GpuBackend, Result, VhostUserBackendReqHandlerMut};
use virtio_bindings::bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_queue::{Queue, QueueT};

use self::inflight::Inflight;
use self::logging::LOG_ALL;
use self::vring::{Vring, VringAddresses};
use crate::dirty_log::DirtyLog;
use crate::event;
use crate::memory::{MAX_SLOTS, MemoryTable, RegionSpec};
use crate::ring::{Ring, RingParts};
use crate::server::{DeviceSink, DeviceSpec, StopReason};

const PROTOCOL_FEATURES: u64 = VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits();
/// Bits that are between the VMM and us: the driver knows nothing of them.
const VHOST_FEATURES: u64 = PROTOCOL_FEATURES | LOG_ALL;

/// One device's vhost-user state. Its socket comes and goes; this is reset when it goes.
pub(crate) struct Connection {
    spec: DeviceSpec,
    sink: Box<dyn DeviceSink>,
    memory: MemoryTable,
    features: u64,
    protocol_features: u64,
    /// The device's status (virtio 1.2, 2.1), for a VMM that tells it.
    status: u8,
    vrings: Vec<Vring>,
    inflight: Option<Inflight>,
    log: Option<DirtyLog>,
}

impl Connection {
    pub(crate) fn new(spec: DeviceSpec, sink: Box<dyn DeviceSink>) -> Self {
        let mut connection = Self {
            spec,
            sink,
            memory: MemoryTable::default(),
            features: 0,
            protocol_features: 0,
            status: 0,
            vrings: Vec::new(),
            inflight: None,
            log: None,
        };
        connection.forget();
        connection
    }

    pub(crate) fn name(&self) -> &str {
        &self.spec.name
    }

    fn forget(&mut self) {
        self.memory = MemoryTable::default();
        self.features = 0;
        self.protocol_features = 0;
        self.status = 0;
        self.inflight = None;
        self.log = None;
        self.vrings = (0..self.spec.queues)
            .map(|_| Vring { size: self.spec.queue_size_max, ..Vring::default() })
            .collect();
    }

    /// Takes the channel for notices off the socket, if the VMM hands it over now. Returns whether it did.
    pub(crate) fn takes_notices(&self, stream: &UnixStream) -> io::Result<bool> {
        self.spec.config.notices.take(stream)
    }

    /// Whether the VMM has acknowledged the feature by which rings are enabled.
    pub(crate) fn rings_can_be_enabled(&self) -> bool {
        self.features & PROTOCOL_FEATURES != 0
    }

    /// Whether the engine has any ring.
    pub(crate) fn runs_rings(&self) -> bool {
        self.vrings.iter().any(|vring| vring.running)
    }

    /// Whether it serves any.
    pub(crate) fn serves_rings(&self) -> bool {
        let always_enabled = self.rings_are_always_enabled();
        self.vrings.iter().any(|vring| vring.running && (vring.enabled || always_enabled))
    }

    /// Without protocol features there is no enabling: a ring that starts is enabled.
    fn rings_are_always_enabled(&self) -> bool {
        self.features & PROTOCOL_FEATURES == 0
    }

    /// Notes that a ring is enabled before the features say that it can be. Returns whether there is such a ring.
    pub(crate) fn enable_early(&mut self, index: u32, enable: bool) -> bool {
        self.set_vring_enable(index, enable).is_ok()
    }

    fn offered(&self) -> u64 {
        self.spec.virtio_features | 1 << VIRTIO_F_VERSION_1 | VHOST_FEATURES
    }

    fn vring(&mut self, index: u32) -> Result<&mut Vring> {
        let (count, hint) = (self.spec.queues, self.spec.queues_hint);
        usize::try_from(index)
            .ok()
            .and_then(|index| self.vrings.get_mut(index))
            .ok_or_else(|| refused(format!("vring {index} of {count} (counted from 0): {}", hint(count))))
    }

    /// Starts the ring if all is known that it needs.
    fn start(&mut self, index: u32) -> Result<()> {
        let always_enabled = self.rings_are_always_enabled();
        let (lacks_log, discards) = (self.lacks_log(), self.spec.discards);
        let vring = self.vring(index)?;
        let enabled = vring.enabled || always_enabled;
        // One that is not enabled yet waits. With one that is disabled while it runs, a part of the driver may wait for ever for what it
        // has offered there.
        let discards = || vring.was_enabled && u16::try_from(index).is_ok_and(discards);
        if vring.running || !vring.kick_known || !(enabled || discards()) || lacks_log {
            return Ok(());
        }
        let Some(addresses) = vring.addresses else { return Ok(()) };
        let (size, base) = (vring.size, vring.base);
        // A VMM that sends no descriptor wants the ring polled.
        let kick = vring.kick.as_ref().map_or_else(event::ticking, File::try_clone);
        let kick = Some(kick.map_err(Error::ReqHandlerError)?);
        let error = vring.error.as_ref().map(File::try_clone).transpose().map_err(Error::ReqHandlerError)?;
        let call = Arc::clone(&vring.call);
        let queue = self.queue(index, size, addresses, base)?;
        let index = narrow(index)?;
        let inflight = self.inflight_queue(index, size)?;
        let (features, event_index_unknown) = self.features_of_driver(index, size, addresses);
        let ring = Ring::new(RingParts {
            index,
            queue,
            memory: self.guest_memory(),
            kick,
            call,
            error,
            features,
            event_index_unknown,
            inflight,
            in_order: self.spec.in_order,
        });
        let next = ring.next_available();
        debug!(device = self.spec.name, ring = index, size, next, enabled, "ring started");
        let starts_device = !self.runs_rings();
        let ring = ring.beside(self.others_owe(index)?).with_notes(self.notes());
        self.sink.ring_started(if enabled { ring } else { ring.disabled() });
        if starts_device {
            self.spec.config.tell_again();
        }
        let vring = self.vring(u32::from(index))?;
        vring.running = true;
        vring.was_enabled = true;
        Ok(())
    }

    fn queue(&self, index: u32, size: u16, addresses: VringAddresses, base: u16) -> Result<Queue> {
        let bad = |what: &str| refused(format!("vring {index}: {what}"));
        let guest = |what: &str, vmm_address| {
            self.memory
                .to_guest(vmm_address)
                .ok_or_else(|| bad(&format!("its {what} is not in shared memory")))
        };
        let invalid = |error: virtio_queue::Error| bad(&error.to_string());
        let mut queue = Queue::new(self.spec.queue_size_max).map_err(invalid)?;
        queue.try_set_size(size).map_err(invalid)?;
        queue
            .try_set_desc_table_address(guest("descriptor table", addresses.descriptors)?)
            .map_err(invalid)?;
        queue.try_set_avail_ring_address(guest("available ring", addresses.available)?).map_err(invalid)?;
        queue.try_set_used_ring_address(guest("used ring", addresses.used)?).map_err(invalid)?;
        queue.set_ready(true);
        let memory = self.memory.snapshot();
        if !queue.is_valid(&*memory) {
            return Err(bad("it does not lie in shared memory"));
        }
        // The guest's memory, not the VMM, knows how far the used ring is after a predecessor died.
        let used = queue.used_idx(&*memory, Ordering::Acquire).map_err(invalid)?;
        queue.set_next_used(used.0);
        // Of a device that completes in order this is also how far it has come: what a predecessor took and did not complete is taken
        // again, and nothing twice, whenever the VMM looked for the base that it gives. Of another one, if requests in flight are recorded,
        // the record says it.
        queue.set_next_avail(if self.spec.in_order { used.0 } else { base });
        Ok(queue)
    }

    fn stop(&mut self, index: u16, reason: StopReason) {
        let Some(vring) = self.vrings.get_mut(usize::from(index)) else { return };
        if std::mem::take(&mut vring.running) {
            vring.base = self.sink.ring_stopped(index, reason);
            debug!(device = self.spec.name, ring = index, next = vring.base, "ring stopped");
        }
    }

    fn stop_all(&mut self, reason: StopReason) {
        for index in 0..self.spec.queues {
            self.stop(index, reason);
        }
    }

    /// Stops all rings; they are to be described anew. Where they stopped can still be asked.
    fn reset(&mut self) {
        self.status = 0;
        self.stop_all(StopReason::Requested);
        for vring in &mut self.vrings {
            // VMMs hand these over once per connection.
            let (call, error) = (Arc::clone(&vring.call), vring.error.take());
            *vring =
                Vring { size: self.spec.queue_size_max, call, error, base: vring.base, ..Vring::default() };
        }
    }

    fn memory_changed(&mut self) {
        if self.runs_rings() {
            self.sink.memory_changed(&self.guest_memory());
        }
    }
}

impl VhostUserBackendReqHandlerMut for Connection {
    fn set_owner(&mut self) -> Result<()> {
        Ok(())
    }

    fn reset_owner(&mut self) -> Result<()> {
        self.reset_device()
    }

    fn reset_device(&mut self) -> Result<()> {
        self.reset();
        self.vrings.iter_mut().for_each(|vring| vring.base = 0);
        Ok(())
    }

    fn get_features(&mut self) -> Result<u64> {
        Ok(self.offered())
    }

    fn set_features(&mut self, features: u64) -> Result<()> {
        let unknown = features & !self.offered();
        if unknown != 0 {
            return Err(refused(format!("feature bits {unknown:#x} were not offered")));
        }
        let before = self.features & !VHOST_FEATURES;
        self.changing_log(|connection| {
            connection.features = features;
            Ok(())
        })?;
        // The VMM switches logging by saying all of them again.
        let driver = features & !VHOST_FEATURES;
        if driver != before || !self.runs_rings() {
            self.sink.features(driver);
        }
        Ok(())
    }

    fn set_mem_table(
        &mut self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _postcopy: Option<bool>,
    ) -> Result<Option<Vec<VhostUserMemoryRegionBase>>> {
        let mut table = MemoryTable::default();
        for (region, file) in regions.iter().zip(files) {
            table.add(spec_of(region), file, self.spec.pool_ram.as_ref()).map_err(refused)?;
        }
        self.memory = table;
        self.log_covers_memory()?;
        self.memory_changed();
        Ok(None)
    }

    fn set_vring_num(&mut self, index: u32, num: u32) -> Result<()> {
        let max = self.spec.queue_size_max;
        let size = u16::try_from(num).ok().filter(|size| size.is_power_of_two() && *size <= max);
        let size = size
            .ok_or_else(|| refused(format!("vring {index}: {num} entries, at most {max}, a power of two")))?;
        self.vring(index)?.size = size;
        Ok(())
    }

    fn set_vring_addr(
        &mut self,
        index: u32,
        flags: VhostUserVringAddrFlags,
        descriptors: u64,
        used: u64,
        available: u64,
        // Where the used ring is logged as being: with no IOMMU between, where it is.
        _log: u64,
    ) -> Result<()> {
        let logged = flags.contains(VhostUserVringAddrFlags::VHOST_VRING_F_LOG);
        let addresses = VringAddresses { descriptors, available, used, logged };
        self.changing_log(|connection| connection.vring(index).map(|vring| vring.addresses = Some(addresses)))
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> Result<()> {
        let base = u16::try_from(base)
            .map_err(|_| refused(format!("vring {index}: base {base} of a packed ring")))?;
        self.vring(index)?.base = base;
        Ok(())
    }

    fn get_vring_base(&mut self, index: u32) -> Result<VhostUserVringState> {
        self.vring(index)?;
        self.stop(narrow(index)?, StopReason::Requested);
        let vring = self.vring(index)?;
        // Only a new kick starts it again.
        vring.kick = None;
        vring.kick_known = false;
        vring.was_enabled = false;
        Ok(VhostUserVringState::new(index, u32::from(vring.base)))
    }

    fn set_vring_kick(&mut self, index: u8, kick: Option<File>) -> Result<()> {
        self.stop(u16::from(index), StopReason::Requested);
        let kick = accepted(kick)?;
        let vring = self.vring(u32::from(index))?;
        vring.kick = kick;
        vring.kick_known = true;
        self.start(u32::from(index))
    }

    fn set_vring_call(&mut self, index: u8, call: Option<File>) -> Result<()> {
        let call = accepted(call)?;
        self.vring(u32::from(index))?.replace_call(call);
        Ok(())
    }

    fn set_vring_err(&mut self, index: u8, error: Option<File>) -> Result<()> {
        self.vring(u32::from(index))?.error = accepted(error)?;
        Ok(())
    }

    fn get_protocol_features(&mut self) -> Result<VhostUserProtocolFeatures> {
        let mut features = VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS
            | VhostUserProtocolFeatures::BACKEND_REQ
            | VhostUserProtocolFeatures::LOG_SHMFD
            | VhostUserProtocolFeatures::STATUS
            | VhostUserProtocolFeatures::RESET_DEVICE
            | VhostUserProtocolFeatures::INFLIGHT_SHMFD;
        if self.spec.announces {
            features |= VhostUserProtocolFeatures::RARP;
        }
        Ok(features)
    }

    fn set_protocol_features(&mut self, features: u64) -> Result<()> {
        let unknown = features & !self.get_protocol_features()?.bits();
        if unknown != 0 {
            return Err(refused(format!("protocol feature bits {unknown:#x} were not offered")));
        }
        self.protocol_features = features;
        Ok(())
    }

    fn get_queue_num(&mut self) -> Result<u64> {
        Ok(u64::from(self.spec.queues))
    }

    fn set_vring_enable(&mut self, index: u32, enable: bool) -> Result<()> {
        let before = std::mem::replace(&mut self.vring(index)?.enabled, enable);
        let enabled_anyway = enable && self.rings_are_always_enabled();
        if before != enable && !enabled_anyway {
            self.stop(narrow(index)?, StopReason::Requested);
        }
        self.start(index)
    }

    fn get_config(&mut self, offset: u32, size: u32, _flags: VhostUserConfigFlags) -> Result<Vec<u8>> {
        let (offset, size) = (offset as usize, size as usize);
        Ok(self.spec.config.read(offset, size))
    }

    fn set_config(&mut self, offset: u32, bytes: &[u8], _flags: VhostUserConfigFlags) -> Result<()> {
        if self.sink.config_written(offset as usize, bytes).is_err() {
            // A guest may try this as often as it likes; it must not cost it the connection.
            debug!(device = self.spec.name, offset, "a write to the configuration space was ignored");
        }
        Ok(())
    }

    fn set_gpu_socket(&mut self, _backend: GpuBackend) -> Result<()> {
        Err(Error::InvalidOperation("this is no GPU"))
    }

    fn get_shared_object(&mut self, _uuid: VhostUserSharedMsg) -> Result<File> {
        Err(Error::InvalidOperation("no shared objects are offered"))
    }

    fn get_inflight_fd(&mut self, wanted: &VhostUserInflight) -> Result<(VhostUserInflight, File)> {
        self.make_inflight(wanted)
    }

    fn set_inflight_fd(&mut self, described: &VhostUserInflight, file: File) -> Result<()> {
        self.map_inflight(described, file)
    }

    fn get_max_mem_slots(&mut self) -> Result<u64> {
        Ok(MAX_SLOTS as u64)
    }

    fn add_mem_region(
        &mut self,
        region: &VhostUserSingleMemoryRegion,
        file: File,
        _postcopy: Option<bool>,
    ) -> Result<Option<VhostUserMemoryRegionBase>> {
        self.memory.add(spec_of(region), file, self.spec.pool_ram.as_ref()).map_err(refused)?;
        self.log_covers_memory()?;
        self.memory_changed();
        Ok(None)
    }

    fn remove_mem_region(&mut self, region: &VhostUserSingleMemoryRegion) -> Result<()> {
        self.memory.remove(region.guest_phys_addr, region.memory_size, region.user_addr).map_err(refused)?;
        self.memory_changed();
        Ok(())
    }

    fn set_device_state_fd(
        &mut self,
        _direction: VhostTransferStateDirection,
        _phase: VhostTransferStatePhase,
        _fd: File,
    ) -> Result<Option<File>> {
        Err(Error::InvalidOperation("device state is not offered"))
    }

    fn check_device_state(&mut self) -> Result<()> {
        Err(Error::InvalidOperation("device state is not offered"))
    }

    fn get_shmem_config(&mut self) -> Result<VhostUserShMemConfig> {
        Err(Error::InvalidOperation("shared memory regions are not offered"))
    }

    fn set_log_base(&mut self, log: &VhostUserLog, file: File) -> Result<()> {
        let log = DirtyLog::map(file, log.mmap_offset, log.mmap_size).map_err(refused)?;
        self.log_to(log)
    }
}

fn spec_of(region: &VhostUserMemoryRegion) -> RegionSpec {
    RegionSpec {
        guest_address: region.guest_phys_addr,
        bytes: region.memory_size,
        vmm_address: region.user_addr,
        file_offset: region.mmap_offset,
    }
}

/// A request that is answered with an error, and with disconnection.
fn refused(why: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Error {
    Error::ReqHandlerError(io::Error::new(io::ErrorKind::InvalidInput, why))
}

/// Whoever waits for it, or signals it, must not block.
fn accepted(file: Option<File>) -> Result<Option<File>> {
    file.as_ref().map_or(Ok(()), event::accept).map_err(refused)?;
    Ok(file)
}

fn narrow(index: u32) -> Result<u16> {
    u16::try_from(index).map_err(refused)
}
