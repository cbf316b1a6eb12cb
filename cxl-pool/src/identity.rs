//! Which file or device something is, whatever it is called.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;

use rustix::fs::{FileType, fstat};

/// Which file or device this is. Two descriptors of it are equal in this, by whatever names they were opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FileIdentity {
    /// A file, which its file system knows by its number.
    File {
        /// The number of the file system.
        filesystem: u64,
        /// The file's number there.
        inode: u64,
    },
    /// A character device. There may be any number of nodes for it, each of which is a file of its own: containers, and libvirt for
    /// each of its machines, make themselves some.
    Device {
        /// The device's number.
        number: u64,
    },
}

impl FileIdentity {
    /// That of an open file.
    pub fn of(file: &File) -> io::Result<Self> {
        let stat = fstat(file.as_fd())?;
        Ok(if FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice {
            Self::Device { number: stat.st_rdev }
        } else {
            Self::File { filesystem: stat.st_dev, inode: stat.st_ino }
        })
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn of(path: &Path) -> FileIdentity {
        FileIdentity::of(&File::open(path).unwrap()).unwrap()
    }

    #[test]
    fn a_file_is_itself_under_any_name_and_a_copy_is_another_one() {
        let directory = tempfile::tempdir().unwrap();
        let [file, link, copy] = ["file", "link", "copy"].map(|name| directory.path().join(name));
        std::fs::write(&file, "same").unwrap();
        std::fs::hard_link(&file, &link).unwrap();
        std::fs::copy(&file, &copy).unwrap();
        assert_eq!(of(&file), of(&link));
        assert_ne!(of(&file), of(&copy));
        assert_ne!(of(&file), of(Path::new("/dev/null")));
    }

    #[test]
    fn a_device_is_itself_through_any_node() {
        let directory = tempfile::tempdir().unwrap();
        let node = directory.path().join("null");
        if make_node_of_null(&node) {
            assert_eq!(of(&node), of(Path::new("/dev/null")));
        }
        assert_ne!(of(Path::new("/dev/null")), of(Path::new("/dev/zero")));
    }

    /// Says whether it may, and whether its directory lets devices be opened.
    fn make_node_of_null(at: &Path) -> bool {
        use rustix::fs::{CWD, Mode, makedev, mknodat};
        let made = mknodat(CWD, at, FileType::CharacterDevice, Mode::RUSR | Mode::WUSR, makedev(1, 3));
        let opens = made.is_ok() && File::open(at).is_ok();
        if !opens {
            eprintln!("skipped: it takes root, and a file system that is not mounted with nodev");
        }
        opens
    }
}
