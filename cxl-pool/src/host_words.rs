//! Words that processes of one host share, outside of the pool.

use std::fmt;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;

use crate::PoolError;
use crate::mapping::{Mapping, reserve};

/// So many times a file is looked for anew that its last user took away in the meantime.
const TRIES: usize = 100;

/// Words in a file of this host, mapped into each process that opens it.
///
/// The processors of one host keep each other's caches coherent, so these are ordinary atomics, as the pool's lines are not. A new file's words
/// are zero. Whoever leaves last takes the file away; of a process that was killed words stay as they were.
///
/// The file has to lie where only trusted processes may open it: one that is made shorter ends all that use it (SIGBUS).
pub struct HostWords {
    mapping: Mapping,
    words: usize,
    path: PathBuf,
}

impl HostWords {
    /// Opens the file at `path`, which is created if need be, with so many words of 8 bytes.
    ///
    /// # Errors
    /// If the file cannot be created, locked or mapped.
    pub fn open(path: &Path, words: usize) -> Result<Self, PoolError> {
        for _ in 0..TRIES {
            let file = open(path, words)?;
            // It was taken away between its being opened and its being locked: others have another one by now.
            let is_gone = file.metadata().map_err(io_error("look at", path))?.nlink() == 0;
            if !is_gone {
                let mapping = Mapping::new(file, path, bytes(words))?;
                return Ok(Self { mapping, words, path: path.to_owned() });
            }
        }
        let source = std::io::Error::other("others take it away all the time");
        Err(PoolError::Io { operation: "open", path: path.to_owned(), source })
    }

    /// The word with this index.
    ///
    /// # Panics
    /// If there are not so many.
    #[inline]
    pub fn word(&self, index: usize) -> &AtomicU64 {
        assert!(index < self.words, "word {index} of {}", self.words);
        // SAFETY: the mapping begins at a page and has so many words, by `open`, for as long as `self` lives; nobody has them but as atomics.
        unsafe { AtomicU64::from_ptr(self.mapping.base().cast::<u64>().as_ptr().add(index)) }
    }
}

impl fmt::Debug for HostWords {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostWords")
            .field("path", &self.path)
            .field("words", &self.words)
            .finish_non_exhaustive()
    }
}

impl Drop for HostWords {
    fn drop(&mut self) {
        // Only its last user gets the lock for himself. Who opens it meanwhile waits for that, and sees that it is gone.
        match self.mapping.file().try_lock() {
            // What cannot be taken away costs a page until the next boot.
            Ok(()) => drop(fs::remove_file(&self.path)),
            Err(TryLockError::WouldBlock | TryLockError::Error(_)) => {}
        }
    }
}

fn open(path: &Path, words: usize) -> Result<File, PoolError> {
    let mut options = OpenOptions::new();
    let options = options.read(true).write(true).create(true).truncate(false).mode(0o600);
    let file = options.open(path).map_err(io_error("open", path))?;
    file.lock_shared().map_err(io_error("lock", path))?;
    let length = file.metadata().map_err(io_error("look at", path))?.len();
    if length < bytes(words) {
        file.set_len(bytes(words)).map_err(io_error("grow", path))?;
    }
    // Its user may have had no room for it.
    reserve(&file, bytes(words)).map_err(|error| io_error("take room for", path)(error.into()))?;
    Ok(file)
}

fn bytes(words: usize) -> u64 {
    (words * size_of::<u64>()) as u64
}

fn io_error(operation: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> PoolError {
    let path = path.to_owned();
    move |source| PoolError::Io { operation, path, source }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::sync::atomic::Ordering;
    use std::thread;

    use super::*;

    #[test]
    fn all_who_open_it_have_the_same_words_and_the_last_one_takes_them_away() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("words");
        let (one, other) =
            (HostWords::open(&path, 3).expect("words"), HostWords::open(&path, 3).expect("words"));
        one.word(2).store(7, Ordering::Relaxed);
        assert_eq!(other.word(2).fetch_add(1, Ordering::Relaxed), 7);
        drop(one);
        let third = HostWords::open(&path, 3).expect("words");
        drop(other);
        assert_eq!(third.word(2).load(Ordering::Relaxed), 8);
        assert!(
            fs::metadata(&path).expect("a file").blocks() > 0,
            "a full file system is met here, and not at a word"
        );
        drop(third);
        assert!(!path.exists());
        assert_eq!(HostWords::open(&path, 3).expect("words").word(2).load(Ordering::Relaxed), 0);
    }

    #[test]
    fn who_comes_while_the_last_one_leaves_is_not_left_with_words_of_his_own() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("words");
        let (threads, rounds) = (4, 200);
        let barrier = Barrier::new(threads);
        let seen = thread::scope(|scope| {
            let visit = || {
                let mut sums = Vec::new();
                for _ in 0..rounds {
                    barrier.wait();
                    let words = HostWords::open(&path, 1).expect("words");
                    words.word(0).fetch_add(1, Ordering::Relaxed);
                    barrier.wait();
                    // All have it now.
                    sums.push(words.word(0).load(Ordering::Relaxed));
                    barrier.wait();
                }
                sums
            };
            let threads: Vec<_> = (0..threads).map(|_| scope.spawn(visit)).collect();
            threads.into_iter().flat_map(|thread| thread.join().expect("no panic")).collect::<Vec<u64>>()
        });
        // Some are still leaving while the next ones come, so words may live on for rounds; but all of a round have the same ones.
        let by_round = |round: usize| (0..threads).map(move |thread| thread * rounds + round);
        for round in 0..rounds {
            let mut sums = by_round(round).map(|at| seen[at]);
            let first = sums.next().expect("threads");
            assert!(sums.all(|sum| sum == first) && first >= threads as u64, "round {round}");
        }
    }
}
