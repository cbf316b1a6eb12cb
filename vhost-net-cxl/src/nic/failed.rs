//! What takes the place of a NIC whose driver failed.

use std::os::fd::BorrowedFd;

use super::{Batch, Identity, LinkState, Nic, NicError, OnLinkChange, Taken};
use crate::backend::receive_buffers::ReceiveBuffers;
use crate::offloads::Offloads;

/// Moves nothing and has nothing to wait for. The driver that failed is closed by then, with its descriptors: a
/// broken device that stays readable would keep the worker awake for nothing.
pub struct FailedNic {
    identity: Identity,
    link: LinkState,
    errors: u64,
}

impl FailedNic {
    /// In the place of `nic`, whose link is down from now on for everybody who looks at it.
    pub fn in_place_of(nic: &dyn Nic) -> Self {
        nic.link().set(false);
        Self { identity: nic.identity().clone(), link: nic.link().clone(), errors: nic.errors() }
    }
}

impl Nic for FailedNic {
    fn identity(&self) -> &Identity {
        &self.identity
    }

    fn link(&self) -> &LinkState {
        &self.link
    }

    fn watch_link(&mut self, _on_change: OnLinkChange) -> Result<(), NicError> {
        Ok(())
    }

    fn start(&mut self, _buffers: &mut ReceiveBuffers) -> Result<(), NicError> {
        let problem = "its driver has failed, and it does not work again yet".to_owned();
        Err(NicError::Config { nic: self.identity.name.clone(), problem })
    }

    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        Vec::new()
    }

    fn set_receiver_offloads(&mut self, _offloads: Offloads) -> Result<(), NicError> {
        Ok(())
    }

    fn receive(&mut self, _buffers: &mut ReceiveBuffers, _batch: &mut Batch) -> Result<(), NicError> {
        Ok(())
    }

    fn transmit(&mut self, _packets: &Batch) -> Result<usize, NicError> {
        Ok(0)
    }

    fn transmit_frame(&mut self, _frame: &[u8]) -> Result<Taken, NicError> {
        Ok(Taken::NoRoom)
    }

    fn errors(&self) -> u64 {
        self.errors
    }
}
