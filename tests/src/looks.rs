//! A look past all daemons at what they keep: the SSDs, and the memory of the pool.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::process::Command;

use anyhow::{Context as _, Result};
use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;

use crate::pod::Pod;

/// What a host's SSD has of a volume.
pub fn volume_on(pod: &Pod, volume: &str, host: &str, ssd: &str) -> Result<Vec<u8>> {
    let image = pod.directory().join(format!("{host}-{ssd}.img"));
    let said = Command::new(pod.binary("vhost-blk-cxl")).args(["volumes", "--json"]).arg(&image).output()?;
    let table: serde_json::Value = serde_json::from_slice(&said.stdout)
        .with_context(|| format!("no table: {}", String::from_utf8_lossy(&said.stderr)))?;
    let mut volumes = table["volumes"].as_array().into_iter().flatten();
    let volume = volumes.find(|it| it["name"] == volume);
    let volume = volume.with_context(|| format!("{host}/{ssd} does not have it: {table}"))?;
    let number = |key: &str| volume[key].as_u64().with_context(|| format!("no {key} in {volume}"));
    let mut bytes = vec![0; usize::try_from(number("size_bytes")?)?];
    File::open(image)?.read_exact_at(&mut bytes, number("start_bytes")?)?;
    Ok(bytes)
}

/// Every place in the pool's memory where these bytes are, with what follows them up to this length in all. What is no longer used stays
/// in memory, so look for what was never there before.
pub fn in_pool(pod: &Pod, wanted: &[u8], length: usize) -> Result<Vec<Vec<u8>>> {
    let file = File::open(pod.pool_path())?;
    let size = file.metadata()?.len();
    let mut found = Vec::new();
    let mut at = 0;
    // Most of it was never touched.
    loop {
        at = match seek(&file, SeekFrom::Data(at)) {
            Ok(begin) => begin,
            Err(Errno::NXIO) => return Ok(found),
            Err(error) => return Err(error.into()),
        };
        let end = seek(&file, SeekFrom::Hole(at))?.min(size);
        let mut bytes = vec![0; usize::try_from(end - at)?];
        file.read_exact_at(&mut bytes, at)?;
        let places = bytes.windows(length).filter(|place| place.starts_with(wanted));
        found.extend(places.map(<[u8]>::to_vec));
        at = end;
    }
}
