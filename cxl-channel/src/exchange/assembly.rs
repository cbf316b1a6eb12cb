//! Putting fragments together again.

use super::fragment::{FRAGMENT_BYTES, Header, Kind};
use super::{PAYLOAD_BYTES_LIMIT, RequestId};

/// A message whose last fragment has come.
pub(super) struct Message {
    pub(super) kind: Kind,
    pub(super) id: RequestId,
    pub(super) payload: Vec<u8>,
}

/// The message that is on its way. A ring keeps the order and its sender sends one message after the other, so
/// there is one at a time.
#[derive(Default)]
pub(super) struct Assembly {
    current: Option<(Kind, RequestId)>,
    payload: Vec<u8>,
}

/// A fragment that does not fit what came before it, or makes the message too long. The message is given up.
pub(super) struct Malformed;

impl Assembly {
    /// Drops what has come so far of a message. The rest of it makes no sense any more.
    pub(super) fn give_up(&mut self) {
        self.current = None;
        self.payload.clear();
    }

    pub(super) fn add(
        &mut self,
        header: Header,
        payload: &[u8; FRAGMENT_BYTES],
    ) -> Result<Option<Message>, Malformed> {
        if header.first {
            let interrupted = self.current.replace((header.kind, header.id)).is_some();
            self.payload.clear();
            if interrupted {
                self.current = None;
                return Err(Malformed);
            }
        }
        if self.current != Some((header.kind, header.id)) {
            self.current = None;
            return Err(Malformed);
        }
        if self.payload.len() + header.bytes > PAYLOAD_BYTES_LIMIT {
            self.current = None;
            return Err(Malformed);
        }
        self.payload.extend_from_slice(&payload[..header.bytes]);
        if !header.last {
            return Ok(None);
        }
        self.current = None;
        let payload = std::mem::take(&mut self.payload);
        Ok(Some(Message { kind: header.kind, id: header.id, payload }))
    }
}
