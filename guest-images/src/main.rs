//! `guest-image`: builds the test guest and says where it is.

#![forbid(unsafe_code)]

use std::path::PathBuf;

use anyhow::Result;
use clap::Parser;
use guest_images::{Bar, Guest};

/// Builds the test guest from Debian packages, unless it is there already, and prints its kernel and initramfs.
#[derive(Parser)]
#[command(name = "guest-image", version)]
struct Arguments {
    /// Where guests are kept.
    #[arg(long, env = "WADI_GUEST_DIR", default_value_os_t = Guest::default_directory())]
    directory: PathBuf,
    /// Build it again, from the newest packages.
    #[arg(long)]
    refresh: bool,
    /// Build a disk, too, that boots it through BIOS and UEFI, and print where it is.
    #[arg(long)]
    disk: bool,
    /// Print the packages that it consists of, too.
    #[arg(long)]
    manifest: bool,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    if arguments.refresh {
        Guest::forget(&arguments.directory)?;
    }
    let guest = Guest::ensure_in(&arguments.directory, &mut Bar::new())?;
    println!("kernel {}\ninitrd {}", guest.kernel.display(), guest.initrd.display());
    if arguments.disk {
        println!("disk {}", guest.boot_disk(&mut Bar::new())?.display());
    }
    if arguments.manifest {
        for package in guest.manifest()?.packages {
            println!("package {} {}", package.file, package.sha256);
        }
    }
    Ok(())
}
