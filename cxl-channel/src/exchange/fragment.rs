//! How a message of any length travels in slots of 64 B.
//!
//! A fragment is seven words of payload and a header word, the slot's last:
//!
//! ```text
//! bit  63      62..48     47..16        15..10     9..8   7     6      5..0
//!      epoch   reserved   request id    reserved   kind   last  first  payload bytes (0 to 56)
//! ```

use super::RequestId;

/// Words of a slot.
pub(super) const WORDS: usize = 8;
/// Payload bytes of a slot.
pub(super) const FRAGMENT_BYTES: usize = (WORDS - 1) * 8;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Request,
    Response,
    Notification,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) kind: Kind,
    pub(super) id: RequestId,
    pub(super) first: bool,
    pub(super) last: bool,
    /// At most [`FRAGMENT_BYTES`].
    pub(super) bytes: usize,
}

impl Header {
    fn encode(self) -> u64 {
        let kind = match self.kind {
            Kind::Request => 1,
            Kind::Response => 2,
            Kind::Notification => 3,
        };
        self.bytes as u64
            | u64::from(self.first) << 6
            | u64::from(self.last) << 7
            | kind << 8
            | u64::from(self.id.0) << 16
    }

    fn decode(word: u64) -> Option<Self> {
        let kind = match word >> 8 & 3 {
            1 => Kind::Request,
            2 => Kind::Response,
            3 => Kind::Notification,
            _ => return None,
        };
        let bytes = usize::try_from(word & 0x3f).ok().filter(|bytes| *bytes <= FRAGMENT_BYTES)?;
        let id = RequestId(u32::try_from(word >> 16 & u64::from(u32::MAX)).ok()?);
        Some(Self { kind, id, first: word >> 6 & 1 == 1, last: word >> 7 & 1 == 1, bytes })
    }
}

/// Packs the header and its payload, `header.bytes` long.
pub(super) fn pack(header: Header, payload: &[u8]) -> [u64; WORDS] {
    let mut bytes = [0; FRAGMENT_BYTES];
    bytes[..payload.len()].copy_from_slice(payload);
    let mut words = [0; WORDS];
    for (word, bytes) in words.iter_mut().zip(bytes.as_chunks::<8>().0) {
        *word = u64::from_le_bytes(*bytes);
    }
    words[WORDS - 1] = header.encode();
    words
}

/// The header and the payload's place, of which `header.bytes` count; nothing if it is malformed.
pub(super) fn unpack(words: &[u64; WORDS]) -> Option<(Header, [u8; FRAGMENT_BYTES])> {
    let header = Header::decode(words[WORDS - 1])?;
    let mut payload = [0; FRAGMENT_BYTES];
    for (word, bytes) in words.iter().zip(payload.as_chunks_mut::<8>().0) {
        *bytes = word.to_le_bytes();
    }
    Some((header, payload))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn fragments_unpack_to_what_was_packed(
            kind in prop_oneof![Just(Kind::Request), Just(Kind::Response), Just(Kind::Notification)],
            id: u32,
            first: bool,
            last: bool,
            payload in proptest::collection::vec(any::<u8>(), 0..=FRAGMENT_BYTES),
        ) {
            let header = Header { kind, id: RequestId(id), first, last, bytes: payload.len() };
            let words = pack(header, &payload);
            prop_assert_eq!(words[WORDS - 1] >> 63, 0, "the top bit is the channel's");
            let (unpacked, bytes) = unpack(&words).unwrap();
            prop_assert_eq!(unpacked, header);
            prop_assert_eq!(&bytes[..unpacked.bytes], &payload[..]);
        }

        #[test]
        fn any_words_unpack_or_are_refused(words: [u64; WORDS]) {
            if let Some((header, _)) = unpack(&words) {
                prop_assert!(header.bytes <= FRAGMENT_BYTES);
            }
        }
    }
}
