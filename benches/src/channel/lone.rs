//! A lone message, by ping-pong: half of the time from a message over one channel to the answer over another one, and what
//! the same takes a bare line. No message carries a time, and the clock is read once in a thousand of them.

use std::sync::Barrier;
use std::sync::atomic::{Ordering, fence};
use std::thread;
use std::time::Instant;

use anyhow::Result;
use cxl_channel::{Receiver, Sender};
use cxl_pool::{ByteOffset, Memory};

use super::rivals::{self, Gil, Rtrb};
use super::run::Bench;
use super::variant::{OURS, Variant};
use crate::cores::{self, Cores, Distance};
use crate::report::{Figure, Goal, median};

const ROUND_TRIPS: u64 = 1000;
/// Each of so many times of a thousand counts; the median is taken of all.
const TIMES: usize = 5;
/// How much longer than the bare line a message may take.
const RATIO_GOAL: f64 = 1.5;

/// One side of a ping-pong. Numbers are sent from 1 on.
trait End: Send {
    fn put(&mut self, number: u64);
    /// The number, if it has come.
    fn get(&mut self, number: u64) -> bool;
}

struct Channels<M: Memory, const WORDS: usize> {
    sender: Sender<M, WORDS>,
    receiver: Receiver<M, WORDS>,
}

impl<M: Memory, const WORDS: usize> End for Channels<M, WORDS> {
    #[inline]
    fn put(&mut self, number: u64) {
        // There is one message at a time: it fits.
        let _ = self.sender.send([number; WORDS]);
        let _ = self.sender.publish();
    }

    #[inline]
    fn get(&mut self, number: u64) -> bool {
        self.receiver.receive().is_some_and(|message| message[0] == number)
    }
}

/// A word in a line each way, with what the memory offers and nothing else.
struct Line<M: Memory> {
    memory: M,
    ours: ByteOffset,
    theirs: ByteOffset,
}

impl<M: Memory> End for Line<M> {
    #[inline]
    fn put(&mut self, number: u64) {
        self.memory.store(self.ours, number);
        self.memory.write_back(self.ours, 8);
    }

    #[inline]
    fn get(&mut self, number: u64) -> bool {
        if self.memory.load(self.theirs) == number {
            return true;
        }
        if !M::COHERENT {
            self.memory.invalidate(self.theirs, 8);
            self.memory.full_fence();
        }
        false
    }
}

impl<const WORDS: usize> End for Rtrb<WORDS> {
    #[inline]
    fn put(&mut self, number: u64) {
        // As above.
        let _ = self.0.push([number; WORDS]);
    }

    #[inline]
    fn get(&mut self, number: u64) -> bool {
        self.1.pop().is_ok_and(|message| message[0] == number)
    }
}

impl<const WORDS: usize> End for Gil<WORDS> {
    #[inline]
    fn put(&mut self, number: u64) {
        // As above.
        let _ = self.0.try_send([number; WORDS]);
    }

    #[inline]
    fn get(&mut self, number: u64) -> bool {
        self.1.try_recv().is_some_and(|message| message[0] == number)
    }
}

/// What was measured of one kind.
struct Kind {
    name: &'static str,
    slug: &'static str,
    /// The slug of the bare line it is compared with.
    bare: Option<&'static str>,
    samples: Vec<(Distance, f64)>,
}

impl Kind {
    fn is_rivals(&self) -> bool {
        Variant::RIVALS.iter().any(|rival| self.slug.ends_with(rival.slug()))
    }

    fn median_ns(&self, distance: Distance) -> Option<f64> {
        median(self.samples.iter().filter(|sample| sample.0 == distance).map(|sample| sample.1))
    }
}

/// Measures, prints, and says what came of the goal.
pub(super) fn measure(bench: &mut Bench, rounds: u32) -> Result<Vec<Figure>> {
    let kind = |name, slug, bare| Kind { name, slug, bare, samples: Vec::new() };
    let mut kinds = [
        kind("a bare line, software", "line-software", None),
        kind("16 B, software", "16B/adaptive", Some("line-software")),
        kind("64 B, software", "64B/adaptive", Some("line-software")),
        kind("a bare line, hardware-coherent", "line-coherent", None),
        kind("16 B, hardware-coherent", "16B/coherent", Some("line-coherent")),
        kind("64 B, hardware-coherent", "64B/coherent", Some("line-coherent")),
        kind("16 B, rtrb", "16B/rtrb", Some("line-coherent")),
        kind("16 B, gil", "16B/gil", Some("line-coherent")),
    ];
    let (software, hardware) = (bench.pool().software(), bench.pool().hardware());
    for _ in 0..rounds {
        let samples = [
            bare(bench, &software)?,
            channels::<_, 2>(bench, &software, OURS)?,
            channels::<_, 8>(bench, &software, OURS)?,
            bare(bench, &hardware)?,
            channels::<_, 2>(bench, &hardware, Variant::Coherent)?,
            channels::<_, 8>(bench, &hardware, Variant::Coherent)?,
            rival(bench, rivals::rtrb::<2>)?,
            rival(bench, rivals::gil::<2>)?,
        ];
        for (kind, samples) in kinds.iter_mut().zip(samples) {
            kind.samples.extend(samples);
        }
    }
    Ok(summarise(&kinds))
}

fn summarise(kinds: &[Kind]) -> Vec<Figure> {
    let show = |value: Option<f64>| value.map_or("n/a".to_owned(), |value| format!("{value:.0}"));
    println!("A lone message, one way, in ns near / far, by ping-pong:");
    let mut figures = Vec::new();
    for kind in kinds {
        let (near, far) = (kind.median_ns(Distance::Near), kind.median_ns(Distance::Far));
        println!("  {:<32} {} / {}", kind.name, show(near), show(far));
        for (distance, value) in [(Distance::Near, near), (Distance::Far, far)] {
            let Some(value) = value else { continue };
            let figure = Figure::new(format!("channel/lone/{}/{distance}", kind.slug), value, "ns");
            let bare = kind.bare.and_then(|slug| kinds.iter().find(|kind| kind.slug == slug));
            let bare_ns = bare.and_then(|bare| bare.median_ns(distance));
            figures.push(match (bare, bare_ns) {
                (Some(bare), Some(bare_ns)) if !kind.is_rivals() => {
                    let goal = Goal::AtMost((bare_ns * RATIO_GOAL).round());
                    figure.against(bare.slug, Some(bare_ns)).with_goal(goal)
                }
                _ => figure,
            });
        }
    }
    println!();
    figures
}

fn bare<M: Memory>(bench: &Bench, memory: &M) -> Result<Vec<(Distance, f64)>> {
    let [ours, theirs] = bench.spare_lines();
    memory.store(ours, 0);
    memory.store(theirs, 0);
    memory.flush(ours, 8);
    memory.flush(theirs, 8);
    memory.full_fence();
    let end = |ours, theirs| Line { memory: memory.clone(), ours, theirs };
    ping_pong(bench.cores(), end(ours, theirs), end(theirs, ours))
}

fn channels<M: Memory, const WORDS: usize>(
    bench: &mut Bench,
    memory: &M,
    variant: Variant,
) -> Result<Vec<(Distance, f64)>> {
    let [one, other] = bench.two_channels::<M, WORDS>(memory, variant)?;
    let (here, there) =
        (Channels { sender: one.0, receiver: other.1 }, Channels { sender: other.0, receiver: one.1 });
    ping_pong(bench.cores(), here, there)
}

fn rival<P, C>(bench: &mut Bench, ring: impl Fn() -> (P, C)) -> Result<Vec<(Distance, f64)>>
where
    (P, C): End,
{
    let [one, other] = bench.in_rivals_pages(|| [(); 2].map(|()| ring()));
    ping_pong(bench.cores(), (one.0, other.1), (other.0, one.1))
}

/// Waits for a number.
#[inline]
fn wait_for(end: &mut impl End, number: u64) {
    while !end.get(number) {
        // As the workers do it; see `traffic`.
        fence(Ordering::SeqCst);
    }
}

fn ping_pong(cores: Cores, mut here: impl End, mut there: impl End) -> Result<Vec<(Distance, f64)>> {
    let before_ns = cores.line_transfer_ns()?;
    let total = ROUND_TRIPS * TIMES as u64;
    let started_together = Barrier::new(2);
    let mut times = Vec::with_capacity(TIMES);
    thread::scope(|scope| -> Result<()> {
        let answering = scope.spawn(|| -> Result<()> {
            let pinned = cores::pin(cores.sender);
            started_together.wait();
            for number in 1..=total {
                wait_for(&mut there, number);
                there.put(number);
            }
            pinned
        });
        let pinned = cores::pin(cores.receiver);
        started_together.wait();
        let mut started = Instant::now();
        for number in 1..=total {
            here.put(number);
            wait_for(&mut here, number);
            if number.is_multiple_of(ROUND_TRIPS) {
                #[allow(clippy::cast_precision_loss, reason = "far below 2^53")]
                times.push(started.elapsed().as_nanos() as f64 / (2 * ROUND_TRIPS) as f64);
                started = Instant::now();
            }
        }
        answering.join().map_err(|_| anyhow::anyhow!("the answering thread panicked"))??;
        pinned
    })?;
    let distance = Distance::of(before_ns, cores.line_transfer_ns()?);
    Ok(times.into_iter().map(|time| (distance, time)).collect())
}
