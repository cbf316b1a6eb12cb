//! The messages between frontend and backend: 64 bytes, modelled on an NVMe command and its completion.
//!
//! ```text
//!         63      56 55           32 31        16 15     8 7      0
//! word 0 | status   | lease         | generation | flags  | opcode |
//! word 1 | 0          |    place    | tag                          |
//! word 2 | offset in the volume, bytes                             |
//! word 3 | length, bytes                                           |
//! word 4 | first line of the data in the pool; all ones with a list |
//! word 5 | 0                                    | charge | marked  |
//! word 6 | segments | first line of their list in the pool         |
//! word 7 |epoch (the channel's)| 0                             | 1 |
//! ```
//!
//! The last bit of word 7 is set in every message, and means nothing. Where a message ends in zeros the receiver has to look, in each
//! lap of which the epoch is 0, whether the sender has not emptied the slot: a fence, and a line to fetch. Versions that leave it clear are
//! understood, and do not look at it.
//!
//! The place says which of the lease's places with this backend is meant. It is 0 but while a volume moves between two SSDs of one host;
//! backends of versions that know of one place only take any other for no message.
//!
//! Data that does not lie in one piece has a list of segments, as with NVMe: see [`crate::segments`]. Backends of versions that
//! know no lists do not look at word 6. What they find in word 4 lies in nobody's area, so they refuse the request; and their
//! completions do not say in word 4 that they know lists, so the frontend passes the data in one piece then.
//!
//! A request may be for the volume's write-intent log instead of its data; the offset is then one in the log.
//!
//! A completion repeats opcode, lease, generation and tag, says how many bytes were moved, and bears the device's write
//! verifier in word 2. Word 5 says for how many milliseconds the volume's next request will wait for the volume's rates; backends of
//! earlier versions say 0, and their frontends do not look at it. Everything that a
//! backend receives is checked by it: see [`Request::decode`] for the form, and the backend for what the sender may do.

use cxl_pool::{ByteOffset, LineCount, LineOffset};
use pod_protocol::ids::{LeaseGeneration, LeaseId, PlaceId, PlaceNumber};

/// 64-bit words of a message.
pub const WORDS: usize = 8;

/// A message as it travels.
pub type Words = [u64; WORDS];

/// What the device shall do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Operation {
    /// Fill the data buffer.
    Read = 1,
    /// Store the data buffer.
    Write = 2,
    /// Bring everything that was completed to the medium.
    Flush = 3,
    /// The range is not needed any more.
    Discard = 4,
    /// The range reads as zeros from now on.
    WriteZeroes = 5,
}

impl Operation {
    fn from_code(code: u8) -> Option<Self> {
        [Self::Read, Self::Write, Self::Flush, Self::Discard, Self::WriteZeroes]
            .into_iter()
            .find(|operation| *operation as u8 == code)
    }

    /// Whether a buffer in the pool belongs to it.
    pub fn has_data(self) -> bool {
        matches!(self, Self::Read | Self::Write)
    }

    /// Whether the medium changes.
    pub fn writes(self) -> bool {
        matches!(self, Self::Write | Self::Discard | Self::WriteZeroes)
    }
}

/// A completion's first byte has this bit on top of the operation.
const COMPLETION: u8 = 0x80;

/// The write must have reached the medium when it completes.
const FLAG_FORCE_UNIT_ACCESS: u8 = 1;
/// Zeroes may be written by giving the range back.
const FLAG_MAY_UNMAP: u8 = 2;
/// The range lies in the volume's write-intent log.
const FLAG_INTENT_LOG: u8 = 4;
/// In a word that backends of earlier versions do not look at, where a flag that they do not know would cost the request.
const WORD_MARKED: u64 = 1;
/// There too: how much of it the volume's rates count.
const WORD_CHARGED_AS_DISCARD: u64 = 2;
const WORD_NOT_CHARGED: u64 = 4;
/// Where data with a list seems to lie for those who do not know lists.
const NOWHERE: u64 = u64::MAX;
/// Of the word with a list, the bits that say where it begins.
const LIST_LINE: u64 = (1 << 48) - 1;
/// In a completion: its sender knows lists.
const WORD_KNOWS_LISTS: u64 = 1;
/// In the last word: this is a message, and not a slot that was emptied.
const WORD_NOT_EMPTY: u64 = 1;

/// How much of a request the volume's rates count. Backends of earlier versions count all of everything.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Charge {
    /// All of it.
    Whole,
    /// Zeroes that stand for a discard: what that would be.
    AsDiscard,
    /// Nothing: the guest did not ask for it.
    Nothing,
}

/// Who speaks, and of what: which lease, in which of its generations, of which of its places.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Holder {
    /// The lease.
    pub lease: LeaseId,
    /// Which of its places with the backend.
    pub place: PlaceNumber,
    /// Its generation.
    pub generation: LeaseGeneration,
}

impl Holder {
    /// What it speaks of.
    pub const fn place_id(&self) -> PlaceId {
        PlaceId { lease: self.lease, place: self.place }
    }
}

/// A frontend's name for a request in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Tag(u32);

impl Tag {
    /// Wraps a number.
    pub const fn new(tag: u32) -> Self {
        Self(tag)
    }

    /// The number.
    pub const fn get(self) -> u32 {
        self.0
    }
}

/// From frontend to backend.
#[expect(clippy::struct_excessive_bools, reason = "flags of a message, each for itself")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// On whose behalf.
    pub holder: Holder,
    /// Comes back in the completion.
    pub tag: Tag,
    /// What to do.
    pub operation: Operation,
    /// The write must have reached the medium when it completes.
    pub force_unit_access: bool,
    /// Zeroes may be written by giving the range back.
    pub may_unmap: bool,
    /// It is about the volume's write-intent log, which [`crate::intent_log`] describes, and not its data. Reads and writes
    /// only.
    pub intent_log: bool,
    /// What it writes is marked in the write-intent log, wherever the volume has one. A write that is not makes the backend
    /// clear the log: whoever wrote before it did not keep it.
    pub marked: bool,
    /// What of it the volume's rates count.
    pub charge: Charge,
    /// Where in the volume, or in its log.
    pub offset_bytes: u64,
    /// How many bytes of it.
    pub length_bytes: u64,
    /// Where the data lies in the pool, if there is any, or the list of where it lies.
    pub data: LineOffset,
    /// In how many segments of a list the data lies; 0 if it is in one piece, without a list. Reads and writes of the volume's
    /// data only.
    pub segments: u16,
}

/// How a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Status {
    /// It was done.
    Ok = 0,
    /// The device failed, or the request reached beyond the volume.
    IoError = 1,
    /// The device cannot do this.
    Unsupported = 2,
    /// The backend does not (or no longer) serve this lease in this generation.
    Refused = 3,
}

/// From backend to frontend.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Completion {
    /// Whose request it was.
    pub holder: Holder,
    /// Which one.
    pub tag: Tag,
    /// What it was.
    pub operation: Operation,
    /// How it ended.
    pub status: Status,
    /// Bytes moved.
    pub length_bytes: u64,
    /// Changes when the device may have lost what it acknowledged and did not flush. Of what was carried out only.
    pub write_verifier: u64,
    /// The backend takes data in lists.
    pub knows_lists: bool,
    /// For so many milliseconds the volume's next request will wait for the volume's rates.
    pub throttled_ms: u32,
}

/// A message that does not have the form it must have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not a block message: first word {0:#x}")]
pub struct Malformed(pub u64);

impl Request {
    /// As devices have to be asked that shall hold the same afterwards: with a discard, each of them does what it likes.
    #[must_use]
    pub(crate) fn same_everywhere(self) -> Self {
        match self.operation {
            Operation::Discard => {
                Self { operation: Operation::WriteZeroes, may_unmap: true, charge: Charge::AsDiscard, ..self }
            }
            _ => self,
        }
    }

    /// Whether the volume's rates count nothing of it. What is noted in the log is done on the guest's behalf, as copies are.
    pub(crate) fn is_free(&self) -> bool {
        self.intent_log || self.charge == Charge::Nothing
    }

    /// As it travels.
    pub fn encode(&self) -> Words {
        let charge = match self.charge {
            Charge::Whole => 0,
            Charge::AsDiscard => WORD_CHARGED_AS_DISCARD,
            Charge::Nothing => WORD_NOT_CHARGED,
        };
        let flags = if self.force_unit_access { FLAG_FORCE_UNIT_ACCESS } else { 0 }
            | if self.may_unmap { FLAG_MAY_UNMAP } else { 0 }
            | if self.intent_log { FLAG_INTENT_LOG } else { 0 };
        [
            first_word(self.operation as u8, flags, self.holder, 0),
            second_word(self.tag, self.holder),
            self.offset_bytes,
            self.length_bytes,
            if self.segments > 0 { NOWHERE } else { self.data.get() },
            if self.marked { WORD_MARKED } else { 0 } | charge,
            if self.segments > 0 { self.data.get() & LIST_LINE | u64::from(self.segments) << 48 } else { 0 },
            WORD_NOT_EMPTY,
        ]
    }

    /// Reads a message. What it asks for may still be anything.
    pub fn decode(words: &Words) -> Result<Self, Malformed> {
        let malformed = Malformed(words[0]);
        let [code, flags, ..] = words[0].to_le_bytes();
        let operation = Operation::from_code(code).ok_or(malformed)?;
        let intent_log = flags & FLAG_INTENT_LOG != 0;
        if flags & !(FLAG_FORCE_UNIT_ACCESS | FLAG_MAY_UNMAP | FLAG_INTENT_LOG) != 0
            || intent_log && !operation.has_data()
        {
            return Err(malformed);
        }
        let [.., low, high] = words[6].to_le_bytes();
        let segments = u16::from_le_bytes([low, high]);
        let may_have_list = operation.has_data() && !intent_log && words[4] == NOWHERE;
        if segments > 0 && !may_have_list {
            return Err(malformed);
        }
        let charge = match words[5] {
            word if word & WORD_NOT_CHARGED != 0 => Charge::Nothing,
            word if word & WORD_CHARGED_AS_DISCARD != 0 => Charge::AsDiscard,
            _ => Charge::Whole,
        };
        let data = if segments > 0 { words[6] & LIST_LINE } else { words[4] };
        Ok(Self {
            holder: holder(words).ok_or(malformed)?,
            tag: tag(words[1]),
            operation,
            force_unit_access: flags & FLAG_FORCE_UNIT_ACCESS != 0,
            may_unmap: flags & FLAG_MAY_UNMAP != 0,
            intent_log,
            marked: words[5] & WORD_MARKED != 0,
            charge,
            offset_bytes: words[2],
            length_bytes: words[3],
            data: LineOffset::new(data),
            segments,
        })
    }

    /// Where its data begins, or the list of it.
    pub fn data_start(&self) -> ByteOffset {
        self.data.bytes()
    }

    /// The lines of its data, if that is in one piece.
    pub fn data_lines(&self) -> LineCount {
        LineCount::covering(self.length_bytes)
    }

    /// Its completion, by a device with this write verifier.
    pub fn completion(&self, status: Status, length_bytes: u64, write_verifier: u64) -> Completion {
        let Self { holder, tag, operation, .. } = *self;
        Completion {
            holder,
            tag,
            operation,
            status,
            length_bytes,
            write_verifier,
            knows_lists: true,
            throttled_ms: 0,
        }
    }

    /// Its completion, if it was not carried out.
    pub fn not_done(&self, status: Status) -> Completion {
        self.completion(status, 0, 0)
    }
}

impl Completion {
    /// As it travels.
    pub fn encode(&self) -> Words {
        [
            first_word(COMPLETION | self.operation as u8, 0, self.holder, self.status as u8),
            second_word(self.tag, self.holder),
            self.write_verifier,
            self.length_bytes,
            if self.knows_lists { WORD_KNOWS_LISTS } else { 0 },
            self.throttled_ms.into(),
            0,
            WORD_NOT_EMPTY,
        ]
    }

    /// Reads a message.
    pub fn decode(words: &Words) -> Result<Self, Malformed> {
        let malformed = Malformed(words[0]);
        let [code, flags, _, _, _, _, _, status] = words[0].to_le_bytes();
        if code & COMPLETION == 0 || flags != 0 {
            return Err(malformed);
        }
        let status = [Status::Ok, Status::IoError, Status::Unsupported, Status::Refused]
            .into_iter()
            .find(|known| *known as u8 == status)
            .ok_or(malformed)?;
        Ok(Self {
            holder: holder(words).ok_or(malformed)?,
            tag: tag(words[1]),
            operation: Operation::from_code(code & !COMPLETION).ok_or(malformed)?,
            status,
            length_bytes: words[3],
            write_verifier: words[2],
            knows_lists: words[4] & WORD_KNOWS_LISTS != 0,
            throttled_ms: u32::try_from(words[5]).unwrap_or(u32::MAX),
        })
    }
}

fn first_word(code: u8, flags: u8, holder: Holder, status: u8) -> u64 {
    u64::from(code)
        | u64::from(flags) << 8
        | u64::from(holder.generation.get()) << 16
        | u64::from(holder.lease.get()) << 32
        | u64::from(status) << 56
}

fn second_word(tag: Tag, holder: Holder) -> u64 {
    u64::from(tag.0) | u64::from(holder.place.get()) << 32
}

fn holder(words: &Words) -> Option<Holder> {
    let [_, _, low, high, a, b, c, _] = words[0].to_le_bytes();
    Some(Holder {
        lease: LeaseId::new(u32::from_le_bytes([a, b, c, 0]))?,
        place: PlaceNumber::new(u8::try_from(words[1] >> 32).ok()?),
        generation: LeaseGeneration::new(u16::from_le_bytes([low, high])),
    })
}

fn tag(word: u64) -> Tag {
    let [a, b, c, d, ..] = word.to_le_bytes();
    Tag(u32::from_le_bytes([a, b, c, d]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn a_holder() -> impl Strategy<Value = Holder> {
        (0..1u32 << 24, any::<u8>(), any::<u16>()).prop_map(|(lease, place, generation)| Holder {
            lease: LeaseId::new(lease).unwrap(),
            place: PlaceNumber::new(place),
            generation: LeaseGeneration::new(generation),
        })
    }

    fn an_operation() -> impl Strategy<Value = Operation> {
        prop::sample::select(vec![
            Operation::Read,
            Operation::Write,
            Operation::Flush,
            Operation::Discard,
            Operation::WriteZeroes,
        ])
    }

    proptest! {
        #[test]
        fn requests_survive_the_journey(
            holder in a_holder(), operation in an_operation(), tag: u32, fua: bool, unmap: bool, log: bool,
            marked: bool,
            charge in prop::sample::select(vec![Charge::Whole, Charge::AsDiscard, Charge::Nothing]),
            offset: u64, length: u64, line in 0u64..1 << 57, segments: u16,
        ) {
            let segments = if operation.has_data() && !log { segments } else { 0 };
            let line = if segments > 0 { line & LIST_LINE } else { line };
            let request = Request {
                holder, tag: Tag::new(tag), operation, force_unit_access: fua, may_unmap: unmap,
                intent_log: log && operation.has_data(), marked, charge,
                offset_bytes: offset, length_bytes: length, data: LineOffset::new(line), segments,
            };
            let words = request.encode();
            prop_assert_eq!(words[7] >> 63, 0, "the epoch is the channel's");
            prop_assert_ne!(words[7], 0, "taken for a slot that was emptied until its generation has been looked at");
            prop_assert_eq!(Request::decode(&words), Ok(request));
            prop_assert!(Completion::decode(&words).is_err());
            // Who knows one place only takes the second word for the tag, of 32 bits.
            prop_assert_eq!(u32::try_from(words[1]).is_ok(), holder.place.is_first());
            // Who does not know lists finds the data in no area, and refuses it.
            prop_assert!(segments == 0 || words[4] == u64::MAX);
        }

        #[test]
        fn completions_survive_the_journey(
            holder in a_holder(), operation in an_operation(), tag: u32, length: u64, write_verifier: u64,
            knows_lists: bool, throttled_ms: u32,
            status in prop::sample::select(vec![Status::Ok, Status::IoError, Status::Unsupported, Status::Refused]),
        ) {
            let completion =
                Completion { holder, tag: Tag::new(tag), operation, status, length_bytes: length, write_verifier, knows_lists, throttled_ms };
            let words = completion.encode();
            prop_assert_eq!(words[7] >> 63, 0, "the epoch is the channel's");
            prop_assert_ne!(words[7], 0, "taken for a slot that was emptied until its generation has been looked at");
            prop_assert_eq!(Completion::decode(&words), Ok(completion));
            prop_assert!(Request::decode(&words).is_err());
        }

        #[test]
        fn only_data_of_the_volume_has_a_list(request in any::<[u64; 8]>(), code in 1u8..=5, flags in 0u8..8, segments: u16, place: bool) {
            let mut words = request;
            words[0] = words[0] & !0xffff | u64::from(flags) << 8 | u64::from(code);
            words[1] &= u64::from(u32::MAX);
            words[4] = if place { u64::MAX } else { words[4] >> 1 };
            words[6] = words[6] & LIST_LINE | u64::from(segments) << 48;
            let has_data = code <= 2;
            let in_log = flags & FLAG_INTENT_LOG != 0;
            let well_formed = (has_data || !in_log) && (segments == 0 || has_data && !in_log && place);
            prop_assert_eq!(Request::decode(&words).is_ok(), well_formed);
        }

        #[test]
        fn any_words_are_read_without_a_panic(words: [u64; 8]) {
            let _ = (Request::decode(&words), Completion::decode(&words));
        }
    }
}
