//! How much of what is shared one receiver may hold: a channel has room for so many messages, a NIC has so many receive buffers, and
//! whoever is flooded, or does not look at what has come, would take all of it.
//!
//! So nobody holds more than is still free (a *dynamic threshold*, Choudhury and Hahne 1998). One that is flooded has half of it at most,
//! of two each a third, and who has little finds room whatever happens to the others. Nothing is kept for those who receive nothing.

/// To whom a frame goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reach {
    /// To one address.
    One,
    /// To all that hear its group. Of these a receiver holds no more than half of what it may, so that what is for it alone still
    /// finds room when everybody is flooded.
    Group,
}

impl Reach {
    /// Of a frame that is flooded, or is not.
    #[inline]
    pub(super) fn of_flooded(flooded: bool) -> Self {
        if flooded { Self::Group } else { Self::One }
    }

    #[inline]
    fn weight(self) -> usize {
        match self {
            Self::One => 1,
            Self::Group => 2,
        }
    }
}

/// What is free, for all that may receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Free {
    /// Messages that the channel of the receiver takes.
    pub(super) messages: usize,
    /// Receive buffers of the NIC, without those in which the frames in question lie already.
    pub(super) buffers: usize,
}

impl Free {
    /// Whether a receiver that holds so many buffers may have a frame of so many pieces. Who holds nothing always may.
    #[inline]
    pub(super) fn allows(self, held: usize, pieces: usize, reach: Reach) -> bool {
        let weight = reach.weight();
        held == 0 || (held + pieces) * weight <= self.messages && held * weight <= self.buffers
    }

    /// Of how many frames of one piece each, to one address, that is true, each of them counted when the next one is looked at.
    #[inline]
    pub(super) fn allows_frames(self, held: usize) -> usize {
        // A message takes room from those behind it, a buffer was taken before.
        let by_messages = (self.messages + 1).saturating_sub(held) / 2;
        let by_buffers = (self.buffers + 1).saturating_sub(held);
        if held == 0 {
            by_messages.max(1).min(self.messages).min(by_buffers)
        } else {
            by_messages.min(by_buffers)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const fn free(messages: usize, buffers: usize) -> Free {
        Free { messages, buffers }
    }

    #[test]
    fn who_holds_nothing_may_have_a_frame_however_little_is_free() {
        for reach in [Reach::One, Reach::Group] {
            assert!(free(1, 0).allows(0, 1, reach));
            assert!(!free(1, 100).allows(1, 1, reach));
            assert!(!free(100, 0).allows(1, 1, reach));
        }
        assert_eq!((free(1, 0).allows_frames(0), free(0, 9).allows_frames(0)), (1, 0));
    }

    #[test]
    fn what_goes_to_all_leaves_half_of_a_share_to_what_goes_to_one() {
        assert!(free(40, 40).allows(19, 1, Reach::Group) && !free(40, 40).allows(20, 1, Reach::Group));
        assert!(free(40, 40).allows(39, 1, Reach::One) && !free(40, 40).allows(40, 1, Reach::One));
        assert!(!free(100, 19).allows(10, 1, Reach::Group) && free(100, 19).allows(10, 1, Reach::One));
    }

    proptest! {
        #[test]
        fn as_many_flooded_ones_as_there_are_have_the_same_and_leave_as_much(flooded in 1..20_usize, room in 60..3000_usize) {
            let mut held = vec![0; flooded];
            for turn in 0..flooded * room {
                let rest = room - held.iter().sum::<usize>();
                let held = &mut held[turn % flooded];
                *held += usize::from(rest > 0 && free(rest, usize::MAX).allows(*held, 1, Reach::One));
            }
            let share = room / (flooded + 1);
            prop_assert!(held.iter().all(|it| it.abs_diff(share) <= 1), "{held:?} of {room}");
        }

        #[test]
        fn frames_together_are_as_many_as_one_after_the_other(messages in 0..200_usize, buffers in 0..200_usize, held in 0..200_usize) {
            let mut one_by_one = 0;
            while messages > one_by_one && free(messages - one_by_one, buffers).allows(held + one_by_one, 1, Reach::One) {
                one_by_one += 1;
            }
            prop_assert_eq!(free(messages, buffers).allows_frames(held), one_by_one);
        }
    }
}
