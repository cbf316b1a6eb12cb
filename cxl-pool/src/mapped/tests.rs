//! What the mapped memory does with whole lines.

use super::*;
use crate::simulated::Random;
use crate::{CreateOptions, Pool};

const MARK: LineMark = LineMark { bits: [0, 1 << 63, 0, 1 << 63, 0, 1 << 63, 0, 1 << 63], set: true };

/// With whole lines at a time, if this CPU can, with pairs of words, and with one word after the other.
fn each_way(check: impl Fn(&HardwareMemory, ByteOffset)) {
    let directory = tempfile::tempdir().unwrap();
    let options = CreateOptions {
        size_bytes: Some(16 << 20),
        host_slots: 2,
        replica_slots: 1,
        ..CreateOptions::default()
    };
    let pool = Pool::create(&directory.path().join("pool"), &options).unwrap();
    let at = pool.layout().data().start.bytes();
    let mut memory = pool.hardware();
    check(&memory, at);
    memory.zero(at, 1024);
    memory.instructions.wide = false;
    check(&memory, at);
    memory.zero(at, 1024);
    memory.instructions.whole_pairs = false;
    check(&memory, at);
}

#[test]
fn words_come_out_as_they_went_in() {
    each_way(|memory, at| {
        let words: [u64; LINE_WORDS] = std::array::from_fn(|word| 0x0101 << word);
        memory.store_words(at, words);
        for (number, word) in words.iter().enumerate() {
            assert_eq!(memory.load(at.saturating_add(number as u64 * 8)), *word);
        }
        assert_eq!(memory.load_words(at), words);
        assert_eq!(memory.load_words::<2>(at.saturating_add(16)), words[2..4]);
        memory.store_words(at.saturating_add(32), [7, 8]);
        assert_eq!(memory.load_words(at), [words[0], words[1], words[2], words[3], 7, 8, words[6], words[7]]);
    });
}

#[test]
fn lines_come_out_as_they_went_in() {
    each_way(|memory, at| {
        let mut random = Random::new(7);
        let mut lines = [[0; LINE_WORDS]; 5];
        lines.as_flattened_mut().fill_with(|| random.below(u64::MAX));
        for set in [true, false] {
            let mark = LineMark { set, ..MARK };
            memory.store_lines(at, &lines, &mark);
            for (word, value) in lines.as_flattened().iter().enumerate() {
                let held = memory.load(at.saturating_add(word as u64 * 8));
                assert_eq!(held, mark.apply(word % LINE_WORDS, *value), "word {word}");
            }
            let mut into = [[0; LINE_WORDS]; 5];
            assert_eq!(memory.load_lines(at, &mut into, &mark), 5);
            for (word, value) in into.as_flattened().iter().enumerate() {
                let bits = MARK.bits[word % LINE_WORDS];
                assert_eq!(*value, lines.as_flattened()[word] & !bits, "word {word}");
            }
        }
    });
}

#[test]
fn lines_are_loaded_up_to_the_first_one_that_is_not_new() {
    each_way(|memory, at| {
        for set in [true, false] {
            let mark = LineMark { set, ..MARK };
            for word in (0..LINE_WORDS).filter(|word| MARK.bits[*word] != 0) {
                memory.store_lines(at, &[[3; LINE_WORDS]; 3], &mark);
                let other = at.saturating_add((LINE_BYTES + word * 8) as u64);
                for old in [0, mark.apply(word, 3) ^ MARK.bits[word]] {
                    memory.store(other, old);
                    let mut into = [[1; LINE_WORDS]; 3];
                    assert_eq!(memory.load_lines(at, &mut into, &mark), 1, "word {word} is {old:x}");
                    assert_eq!(into, [[3; LINE_WORDS], [1; LINE_WORDS], [1; LINE_WORDS]]);
                }
            }
        }
    });
}

#[test]
fn bytes_past_the_cache_come_out_as_they_went_in() {
    each_way(|memory, at| {
        let mut random = Random::new(9);
        let mut source = vec![0_u8; 6 * LINE_BYTES];
        source.fill_with(|| random.below(256).to_le_bytes()[0]);
        // Ends within a line, whole lines in between, and sources that begin anywhere.
        for (from, to, bytes) in [(0, 0, 64), (3, 0, 256), (1, 12, 300), (7, 60, 4), (5, 63, 66), (2, 0, 63)]
        {
            memory.zero(at, 1024);
            let taken = &mut source[from..from + bytes];
            let held = |memory: &HardwareMemory| {
                memory.store_fence();
                let mut held = vec![1; to + bytes + LINE_BYTES];
                memory.read(at, &mut held);
                held
            };
            let expected = [&vec![0; to][..], taken, &[0; LINE_BYTES]].concat();
            memory.stream_from(at.saturating_add(to as u64), &VolatileSlice::from(taken));
            assert_eq!(held(memory), expected, "{bytes} bytes from {from} to {to}");
        }
    });
}

#[test]
#[should_panic(expected = "outside the pool")]
fn lines_outside_the_pool_are_refused() {
    each_way(|memory, _| {
        let last = ByteOffset::new(memory.size_bytes() - LINE_BYTES as u64);
        memory.store_lines(last, &[[0; LINE_WORDS]; 2], &MARK);
    });
}

#[test]
fn a_load_that_is_timed_takes_some_time_and_changes_nothing() {
    each_way(|memory, at| {
        memory.store(at, 7);
        let took = memory.time_load(at).unwrap();
        assert!(!took.is_zero());
        assert_eq!(memory.load(at), 7, "what was not written back is not lost");
    });
}
