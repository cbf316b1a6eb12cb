//! What tests begin with that need a file of each kind.

use std::path::Path;

use cxl_pool::{CreateOptions, Pool};

use super::Config;

/// A pool in this directory, and the configuration of a controller for it.
pub(crate) fn pool_and_config(directory: &Path) -> (Pool, Config) {
    let (path, run) = (directory.join("pool"), directory.join("run"));
    let pool = CreateOptions { size_bytes: Some(32 << 20), ..CreateOptions::default() };
    let pool = Pool::create(&path, &pool).expect("a pool");
    let (path, run) = (path.display(), run.display());
    let text = format!("[controller]\nstate = '/s'\n[pool]\npath = '{path}'\n[run]\ndirectory = '{run}'\n");
    let config = Config::parse(&text, Path::new("controller.toml")).expect("a configuration");
    (pool, config)
}
