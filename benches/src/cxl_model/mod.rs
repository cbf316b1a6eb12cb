//! `cxl-model`: what channels would do on CXL memory that is not coherent, by a model of what its parts cost.

mod fit;
mod link;
mod memory;
mod predict;
mod summary;
mod traffic;
mod world;

use std::path::Path;

use anyhow::Result;
use clap::Args;

use self::fit::fit;
use self::link::{Link, PARAMETERS};
use self::predict::{Curve, Prediction, curves, predict};

/// Message channels on a model of a CXL 2.0 link, against the paper's measurements on a real one.
///
/// The very code of the channels runs on two modelled hosts: a cache that the other host's writes do not reach, a link of
/// eight lanes, a limited number of fetches under way, prefetches that ignore what is cached, and what CLWB, CLFLUSHOPT
/// and MFENCE cost. Time is modelled too, so that every run finds the same, on any machine.
///
/// Of the paper's figures (Oasis, SOSP '25, §3.2.2, Figure 6) only two are used to fit parameters: 0.6 µs for a lone
/// message, and 3.0 M messages/s for the variant that bypasses the cache. The others are predicted.
#[derive(Args, Default)]
pub(crate) struct Options {
    /// Leave out what each parameter does.
    #[arg(long)]
    no_sensitivity: bool,
}

/// What changing a parameter does to the predictions.
struct Sensitivity {
    parameter: usize,
    factor: f64,
    predicted: Vec<Prediction>,
}

/// Runs the model.
pub(crate) fn run(options: &Options, output: &Path) -> Result<()> {
    let link = fit(&Link::SOURCED)?;
    let predicted = predict(&link)?;
    let curves: Vec<Curve> = curves(&link)?;
    let mut sensitivity = Vec::new();
    if !options.no_sensitivity {
        for (parameter, known) in PARAMETERS.iter().enumerate() {
            for factor in [0.8, 1.2] {
                let mut changed = link;
                *(known.of)(&mut changed) *= factor;
                sensitivity.push(Sensitivity { parameter, factor, predicted: predict(&changed)? });
            }
        }
    }
    summary::write(&link, &predicted, &curves, &sensitivity, output)
}
