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

/// What came out.
struct Summary {
    link: Link,
    predicted: Vec<Prediction>,
    /// The same with loads as slow as on the paper's other host, fitted anew.
    other_host: Vec<Prediction>,
    curves: Vec<Curve>,
    sensitivity: Vec<Sensitivity>,
}

/// Runs the model.
pub(crate) fn run(options: &Options, output: &Path) -> Result<()> {
    let link = fit(&Link::SOURCED)?;
    let predicted = predict(&link)?;
    let other_host = predict(&fit(&Link::OTHER_HOST)?)?;
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
    let summary = Summary { link, predicted, other_host, curves, sensitivity };
    summary::write(&summary, output)
}

#[cfg(test)]
mod tests {
    use super::predict::TOLERANCE;
    use super::*;

    /// Time is modelled, so this holds on every machine or on none.
    #[test]
    fn what_nothing_was_fitted_to_comes_out_within_a_quarter_of_what_the_paper_measured() {
        for sourced in [Link::SOURCED, Link::OTHER_HOST] {
            for Prediction { known, value } in predict(&fit(&sourced).unwrap()).unwrap() {
                let part = value / known.measured;
                let ratio = sourced.cxl_ratio;
                assert!((part - 1.0).abs() <= TOLERANCE, "{}, {ratio} × DRAM: {part:.2} of it", known.name);
            }
        }
    }
}
