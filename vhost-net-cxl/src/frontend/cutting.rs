//! Packets that are longer than what their guest may save up of its share of the fabric: they are copied into the pool in pieces, each of which is
//! admitted by itself, and announced when all of it is there.

use cxl_pool::{LINE_BYTES, Memory};
use vhost_frontend::pacing::{Pacer, Way};
use vhost_frontend::{Buffer, Chain, GuestMemory};

use super::buffers::TransmitBuffers;
use super::copying::Rules;
use crate::counters::DropReason;
use crate::vnet_header::{HEADER_BYTES_U32, VnetHeader};

/// A packet of which a part is in the pool. It is the next one of its queue, where its chain stays until all of it is.
#[derive(Debug)]
pub(super) struct Cut {
    /// Its ring's index.
    pub(super) ring: usize,
    head: u16,
    bytes: u32,
    done: u32,
    /// As it was cleaned, once its begin is there.
    header: VnetHeader,
    pub(super) buffer: Buffer,
}

/// What became of a packet.
pub(super) enum Copied {
    /// There is no buffer for it now.
    NoBuffer,
    /// The rest has to wait.
    InPart,
    /// It is no good.
    Refused(DropReason),
    /// All of it is there, with this header.
    Whole(Buffer, VnetHeader),
}

impl Cut {
    /// Copies as much of a packet as may be copied now, of which perhaps `cut` tells what is there already.
    pub(super) fn advance<M: Memory>(
        cut: &mut Option<Self>,
        (buffers, pacer): (&mut TransmitBuffers, &mut Pacer),
        (memory, rules, guest): (&M, Rules, &GuestMemory),
        (ring, chain, frame_bytes): (usize, &Chain, u32),
        bounce: &mut [u8],
    ) -> Copied {
        let (head, bytes) = (chain.head(), frame_bytes + HEADER_BYTES_U32);
        let mut now = match cut.take() {
            Some(cut) if (cut.ring, cut.head, cut.bytes) == (ring, head, bytes) => cut,
            other => {
                if let Some(other) = other {
                    buffers.free(other.buffer);
                }
                let Some(buffer) = buffers.alloc(bytes) else { return Copied::NoBuffer };
                Self { ring, head, bytes, done: 0, header: VnetHeader::default(), buffer }
            }
        };
        while now.done < bytes {
            let whole_lines = (pacer.at_once_bytes() / LINE_BYTES as u64).max(1) * LINE_BYTES as u64;
            let step = u32::try_from(whole_lines).map_or(u32::MAX, |lines| lines).min(bytes - now.done);
            if !pacer.admit(Way::Asked, step.into()) {
                *cut = Some(now);
                return Copied::InPart;
            }
            let part = (now.done, now.done + step);
            match rules.copy_part(memory, guest, chain, (frame_bytes, part), now.buffer, bounce) {
                Ok(header) if now.done == 0 => now.header = header,
                Ok(_) => {}
                Err(reason) => {
                    buffers.free(now.buffer);
                    return Copied::Refused(reason);
                }
            }
            now.done += step;
        }
        Copied::Whole(now.buffer, now.header)
    }
}
