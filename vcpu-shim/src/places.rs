//! Where code lies that a translator has generated: a thread that is there holds nothing.

use std::fs;
use std::sync::atomic::{AtomicUsize, Ordering};

/// How many areas are kept. QEMU has one, with unusable pages in between.
const AREAS: usize = 8;
/// Areas as close as this are one: QEMU leaves a page between the parts of its buffer.
const GAP: usize = 64 << 10;
/// Smaller areas are somebody else's, such as those of regular expressions, which may be used with a lock held.
const LEAST: usize = 1 << 20;

struct Area {
    begin: AtomicUsize,
    /// 0 while the area is none.
    end: AtomicUsize,
}

static FOUND: [Area; AREAS] =
    [const { Area { begin: AtomicUsize::new(0), end: AtomicUsize::new(0) } }; AREAS];

/// Looks for areas. Not for signal handlers.
pub(crate) fn refresh() {
    let Ok(maps) = fs::read_to_string("/proc/self/maps") else { return };
    let mut areas = parse(&maps).into_iter();
    for place in &FOUND {
        let (begin, end) = areas.next().unwrap_or((0, 0));
        if (place.begin.load(Ordering::Relaxed), place.end.load(Ordering::Relaxed)) != (begin, end) {
            // Whoever looks meanwhile finds it empty.
            place.end.store(0, Ordering::SeqCst);
            place.begin.store(begin, Ordering::SeqCst);
            place.end.store(end, Ordering::SeqCst);
        }
    }
}

/// Whether an instruction at this address was generated.
pub(crate) fn generated(address: usize) -> bool {
    FOUND
        .iter()
        .any(|area| address < area.end.load(Ordering::SeqCst) && address >= area.begin.load(Ordering::SeqCst))
}

/// The areas in `/proc/self/maps` that can be executed and belong to no file, or to one that exists for generated code.
fn parse(maps: &str) -> Vec<(usize, usize)> {
    let mut areas: Vec<(usize, usize)> = Vec::new();
    for line in maps.lines() {
        let mut fields = line.split_whitespace();
        let (Some(range), Some(rights)) = (fields.next(), fields.next()) else { continue };
        let name = fields.nth(3).unwrap_or("");
        let anonymous = name.is_empty() && rights.starts_with("rwx");
        let for_code = name.starts_with("/memfd:tcg-jit") && rights.as_bytes().get(2) == Some(&b'x');
        let range = range.split_once('-').and_then(|(begin, end)| {
            Some((usize::from_str_radix(begin, 16).ok()?, usize::from_str_radix(end, 16).ok()?))
        });
        let Some((begin, end)) = range.filter(|_| anonymous || for_code) else { continue };
        match areas.last_mut() {
            Some(last) if begin.saturating_sub(last.1) <= GAP => last.1 = end,
            _ => areas.push((begin, end)),
        }
    }
    areas.retain(|(begin, end)| end - begin >= LEAST);
    areas
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &str = "\
5555556a2000-555555cde000 r-xp 0014e000 fe:00 26315   /usr/bin/qemu-system-x86_64
7fff00000000-7fff00001000 rwxp 00000000 00:00 0
7fff58000000-7fff5bfff000 rwxp 00000000 00:00 0 
7fff5bfff000-7fff5c000000 ---p 00000000 00:00 0 
7fff5c000000-7fff5ffff000 rwxp 00000000 00:00 0 
7fff60000000-7fff70000000 rw-p 00000000 00:00 0 
7fff80000000-7fff90000000 r-xs 00000000 00:01 1037    /memfd:tcg-jit (deleted)
7ffff7fc5000-7ffff7fc7000 r-xp 00000000 00:00 0       [vdso]";

    #[test]
    fn only_buffers_of_a_translator_count() {
        assert_eq!(parse(MAPS), [(0x7fff_5800_0000, 0x7fff_5fff_f000), (0x7fff_8000_0000, 0x7fff_9000_0000)]);
        assert_eq!(parse("nonsense\n1-2\nx-y rwxp 0 0 0"), []);
    }

    #[test]
    fn compiled_code_is_not_generated() {
        refresh();
        assert!(!generated(refresh as fn() as usize));
    }
}
