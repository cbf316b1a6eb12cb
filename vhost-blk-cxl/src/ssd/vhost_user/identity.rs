//! Which disk it is that a target serves.

use crate::ssd::Geometry;

/// Bytes of an id.
pub(super) const ID_BYTES: u32 = 20;

/// What is known of a target's disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Disk {
    pub(super) geometry: Geometry,
    /// What it calls itself, if it does.
    pub(super) id: Option<[u8; ID_BYTES as usize]>,
}

impl Disk {
    /// What it calls itself, for logs.
    pub(super) fn shown_id(&self) -> Option<String> {
        self.id.as_ref().map(|id| shown(id))
    }

    /// Refuses what cannot be the same disk. One that has grown can.
    pub(super) fn check(&self, now: &Self) -> Result<(), String> {
        let Geometry { size_bytes, block_bytes } = now.geometry;
        if size_bytes < self.geometry.size_bytes || block_bytes != self.geometry.block_bytes {
            return Err(format!(
                "its disk has {size_bytes} bytes in blocks of {block_bytes} now, and had {} in blocks of {}: is it the right one?",
                self.geometry.size_bytes, self.geometry.block_bytes
            ));
        }
        match (&self.id, &now.id) {
            (Some(before), Some(now)) if before != now => Err(format!(
                "its disk calls itself {:?} now, and was {:?}: is it the right one?",
                shown(now),
                shown(before)
            )),
            _ => Ok(()),
        }
    }
}

fn shown(id: &[u8]) -> String {
    let length = id.iter().position(|&byte| byte == 0).unwrap_or(id.len());
    String::from_utf8_lossy(&id[..length]).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_disk_is_told_by_its_size_its_block_or_what_it_calls_itself() {
        let id = |name: &str| {
            let mut id = [0; ID_BYTES as usize];
            id[..name.len()].copy_from_slice(name.as_bytes());
            Some(id)
        };
        let disk = |size_bytes, block_bytes, id| Disk { geometry: Geometry { size_bytes, block_bytes }, id };
        let known = disk(8192, 512, id("disk0"));
        for same in [known, disk(1 << 20, 512, id("disk0")), disk(8192, 512, None)] {
            assert_eq!(known.check(&same), Ok(()));
        }
        assert_eq!(disk(8192, 512, None).check(&known), Ok(()), "it says more than before");
        for (other, why) in [
            (disk(4096, 512, id("disk0")), "4096 bytes"),
            (disk(8192, 4096, id("disk0")), "blocks of 4096"),
            (disk(8192, 512, id("disk1")), "\"disk1\" now, and was \"disk0\""),
        ] {
            let refused = known.check(&other).unwrap_err();
            assert!(refused.contains(why) && refused.contains("the right one"), "{refused}");
        }
    }
}
