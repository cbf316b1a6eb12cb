//! Telling whether what was not flushed may have been lost.

use std::hash::{BuildHasher, DefaultHasher, Hasher, RandomState};

/// Of devices whose caches outlive a process: the same until the host is started anew.
pub(super) fn boot_verifier() -> u64 {
    match std::fs::read("/proc/sys/kernel/random/boot_id") {
        Ok(id) => {
            let mut hasher = DefaultHasher::new();
            hasher.write(&id);
            hasher.finish()
        }
        // Not knowing is taken for a new start.
        Err(_) => RandomState::new().hash_one(std::process::id()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_restarted_process_finds_the_same() {
        assert_eq!(boot_verifier(), boot_verifier());
    }
}
