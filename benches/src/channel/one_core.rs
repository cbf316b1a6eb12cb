//! What sending and receiving cost a core, without what it takes to move lines between cores: that part is the code's.

use std::hint::black_box;
use std::time::{Duration, Instant};

use anyhow::Result;

use super::ends::{Inlet, Outlet};
use super::rivals;
use super::run::{Bench, SLOTS};

const BATCH: usize = 32;
/// The fastest of so many counts: others met interrupts.
const TURNS: u32 = 300;
/// Messages of a turn: what the receiver has acknowledged is free again.
const MESSAGES: u32 = SLOTS / 2;

/// Measures and prints.
pub(super) fn print(bench: &mut Bench) -> Result<()> {
    println!("On one core, ns per message to send + to receive, in batches of {BATCH}:");
    for_words::<2>(bench)?;
    for_words::<8>(bench)?;
    println!();
    Ok(())
}

fn for_words<const WORDS: usize>(bench: &mut Bench) -> Result<()> {
    let memory = bench.pool().hardware();
    let (mut sender, mut receiver) = bench.both_ends::<_, WORDS>(&memory)?;
    let coherent = cost(&mut sender, &mut receiver);
    let memory = bench.pool().software();
    let (mut sender, mut receiver) = bench.both_ends::<_, WORDS>(&memory)?;
    let software = cost(&mut sender, &mut receiver);
    let (mut producer, mut consumer) = bench.in_rivals_pages(rivals::rtrb::<WORDS>);
    let rtrb = cost(&mut producer, &mut consumer);
    drop((producer, consumer));
    let (mut producer, mut consumer) = bench.in_rivals_pages(rivals::gil::<WORDS>);
    let gil = cost(&mut producer, &mut consumer);
    let show = |(send, receive): (f64, f64)| format!("{send:.2} + {receive:.2}");
    println!(
        "  {} B: hardware-coherent {}, software {}, rtrb {}, gil {}",
        WORDS * 8,
        show(coherent),
        show(software),
        show(rtrb),
        show(gil)
    );
    Ok(())
}

/// In ns per message: to send, and to receive.
fn cost<const WORDS: usize>(outlet: &mut impl Outlet<WORDS>, inlet: &mut impl Inlet<WORDS>) -> (f64, f64) {
    let messages = [[7; WORDS]; BATCH];
    let mut into = [[0; WORDS]; BATCH];
    let (mut sending, mut receiving) = (Duration::MAX, Duration::MAX);
    for _ in 0..TURNS {
        let started = Instant::now();
        let mut sent = 0;
        while sent < MESSAGES as usize {
            let count = outlet.offer(black_box(&messages));
            if count == 0 {
                break;
            }
            sent += count;
        }
        outlet.publish();
        let between = Instant::now();
        let mut received = 0;
        while received < sent {
            received += inlet.take(&mut into);
            black_box(&into);
        }
        if sent == MESSAGES as usize {
            sending = sending.min(between - started);
            receiving = receiving.min(between.elapsed());
        }
    }
    let per_message = |time: Duration| time.as_secs_f64() * 1e9 / f64::from(MESSAGES);
    (per_message(sending), per_message(receiving))
}
