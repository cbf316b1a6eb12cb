//! What frontends publish of each K in the pool: the bytes that they counted, and the α that was in force. So what guests were let move is judged K by K.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use mem_channel::{ElementId, Node, RECORD_WORDS, Record, decode};

const LINE_BYTES: usize = 64;
/// How much of the pool is read at once.
const CHUNK_BYTES: usize = 1 << 20;
/// Records about VMs have no element.
const NO_ELEMENT: ElementId = ElementId(u32::MAX);
/// How often lines are looked at: several times in a K of 50 ms, so that none is missed as a rule.
const LOOK_EVERY: Duration = Duration::from_millis(5);
/// The meter decides a little early at most: a K is as long as this part of it, or longer.
const SHORTEST_K: f64 = 0.95;

/// The lines of all frontends of which VMs move something.
#[derive(Debug)]
pub struct Boards {
    pool: File,
    /// Where each is.
    lines: Vec<u64>,
}

/// What one frontend's VMs of one tenant did in a K.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Counted {
    /// In bytes/s.
    pub rate: f64,
    /// The α of that K, in bytes/s.
    pub alpha: f64,
    /// Σw of who moved something.
    pub weight: f64,
}

/// A K that follows another one of which something is known.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Judged {
    /// What was counted.
    pub counted: Counted,
    /// w·α·(1 + 2·T_W/K), in bytes/s: what it may be at most, with the greater α of the two.
    pub most: f64,
}

impl Boards {
    /// Looks for them in the pool's file, while guests are at work.
    pub fn find(pool: &Path) -> Result<Self> {
        let file = File::open(pool).with_context(|| format!("cannot open {}", pool.display()))?;
        let size = file.metadata()?.len();
        let (mut lines, mut chunk) = (Vec::new(), vec![0; CHUNK_BYTES]);
        let mut at = 0;
        while at < size {
            let read = file.read_at(&mut chunk, at)?;
            let found = chunk[..read].chunks_exact(LINE_BYTES).enumerate();
            let found = found.filter(|(_, line)| moves(line).is_some());
            lines.extend(found.map(|(number, _)| at + (number * LINE_BYTES) as u64));
            at += CHUNK_BYTES as u64;
        }
        Ok(Self { pool: file, lines })
    }

    /// Watches them for a while: each K of each line that was seen, and was seen just after the one before. T_W and K in µs.
    pub fn watch(&self, time: Duration, window_us: f64, sample_us: f64) -> Result<Vec<Judged>> {
        let (began, mut last) = (Instant::now(), BTreeMap::new());
        let mut judged = Vec::new();
        while began.elapsed() < time {
            for at in &self.lines {
                let mut line = [0; LINE_BYTES];
                self.pool.read_exact_at(&mut line, *at)?;
                // One that is being written is seen the next time.
                let Some((sequence, counted)) = moves(&line) else { continue };
                judged.extend(after(last.get(at), (sequence, counted), window_us, sample_us));
                last.insert(*at, (sequence, counted));
            }
            thread::sleep(LOOK_EVERY);
        }
        Ok(judged)
    }
}

/// What a line says of VMs of a tenant that move something.
fn moves(line: &[u8]) -> Option<(u32, Counted)> {
    let mut words = [0; RECORD_WORDS];
    for (word, bytes) in words.iter_mut().zip(line.chunks_exact(8)) {
        *word = u64::from_le_bytes(bytes.try_into().ok()?);
    }
    let (sequence, Record { element, node, sums }) = decode(&words)?;
    let is_tenant = matches!(node, Node::Tenant { .. }) && element != NO_ELEMENT;
    let counted = Counted { rate: sums.rate, alpha: sums.alpha, weight: sums.weight };
    (is_tenant && sums.rate > 0.0).then_some((sequence, counted))
}

/// Judges what was found after this.
fn after(
    before: Option<&(u32, Counted)>,
    (sequence, counted): (u32, Counted),
    window_us: f64,
    sample_us: f64,
) -> Option<Judged> {
    let (earlier, previous) = before?;
    let alpha = previous.alpha.max(counted.alpha);
    let most = counted.weight * alpha * (1.0 + 2.0 * window_us / (SHORTEST_K * sample_us));
    (sequence == earlier.wrapping_add(1)).then_some(Judged { counted, most })
}

#[cfg(test)]
mod tests {
    use mem_channel::{Sums, TenantId, encode};

    use super::*;

    fn line(element: u32, rate: f64, sequence: u32) -> Vec<u8> {
        let node = Node::Tenant { tenant: TenantId(0), weight: 1.0 };
        let sums = Sums { rate, demand: rate, max_demand: rate, alpha: 4e6, weight: 1.0 };
        let words = encode(&Record { element: ElementId(element), node, sums }, sequence);
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    #[test]
    fn tenants_lines_are_found_and_each_k_is_judged_by_the_one_before() {
        let pool = tempfile::NamedTempFile::new().unwrap();
        let lines = [vec![0; 64], line(1, 3e6, 7), line(u32::MAX, 3e6, 7), line(1, 0.0, 7)];
        std::fs::write(pool.path(), lines.concat()).unwrap();
        assert_eq!(Boards::find(pool.path()).unwrap().lines, [64]);
        let (sequence, counted) = moves(&line(1, 3e6, 7)).unwrap();
        let next =
            |sequence| after(Some(&(7, Counted { alpha: 5e6, ..counted })), (sequence, counted), 9.5, 20.0);
        assert_eq!((sequence, next(7), next(9)), (7, None, None));
        assert!((next(8).unwrap().most - 1e7).abs() < 1.0, "{:?}", next(8));
    }
}
