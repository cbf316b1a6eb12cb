//! A writer of "newc" cpio archives, the format of an initramfs.

use std::collections::BTreeMap;

/// What an archive holds at one path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Entry {
    /// A directory.
    Directory,
    /// A file with its permissions.
    File {
        /// Permission bits, such as `0o755`.
        mode: u32,
        /// What is in it.
        content: Vec<u8>,
    },
    /// A symbolic link to this target.
    Link(String),
    /// A character device.
    CharacterDevice {
        /// Major number.
        major: u32,
        /// Minor number.
        minor: u32,
    },
}

/// A tree of files that becomes the same bytes whenever it holds the same entries: paths are sorted, there
/// are no times, owners or inode numbers of the machine that writes it.
#[derive(Debug, Default)]
pub struct Archive {
    entries: BTreeMap<String, Entry>,
}

impl Archive {
    /// An empty archive.
    pub fn new() -> Self {
        Self::default()
    }

    /// Puts `entry` at `path` (relative, without a leading slash), with the directories above it.
    pub fn put(&mut self, path: &str, entry: Entry) {
        let path = path.trim_matches('/');
        let mut parent = path;
        while let Some((above, _)) = parent.rsplit_once('/') {
            self.entries.entry(above.to_owned()).or_insert(Entry::Directory);
            parent = above;
        }
        self.entries.insert(path.to_owned(), entry);
    }

    /// Puts a file at `path`.
    pub fn put_file(&mut self, path: &str, mode: u32, content: Vec<u8>) {
        self.put(path, Entry::File { mode, content });
    }

    /// Whether something is at `path`.
    pub fn contains(&self, path: &str) -> bool {
        self.entries.contains_key(path.trim_matches('/'))
    }

    /// The archive's bytes.
    pub fn into_bytes(self) -> Vec<u8> {
        let mut bytes = Vec::new();
        for (inode, (path, entry)) in (1u32..).zip(&self.entries) {
            let empty: &[u8] = &[];
            let (mode, content, device) = match entry {
                Entry::Directory => (0o040_755, empty, (0, 0)),
                Entry::File { mode, content } => (0o100_000 | mode, content.as_slice(), (0, 0)),
                Entry::Link(target) => (0o120_777, target.as_bytes(), (0, 0)),
                Entry::CharacterDevice { major, minor } => (0o020_600, empty, (*major, *minor)),
            };
            append(&mut bytes, inode, path, mode, content, device);
        }
        append(&mut bytes, 0, "TRAILER!!!", 0, &[], (0, 0));
        // The kernel's reader and QEMU's loader both like whole blocks.
        bytes.resize(bytes.len().next_multiple_of(512), 0);
        bytes
    }
}

fn append(bytes: &mut Vec<u8>, inode: u32, path: &str, mode: u32, content: &[u8], device: (u32, u32)) {
    // magic, then eight hexadecimal digits each: inode, mode, uid, gid, links, mtime, size, device major and
    // minor, device major and minor of the node, length of the name with its zero, checksum.
    let fields = [
        inode,
        mode,
        0,
        0,
        1,
        0,
        u32::try_from(content.len()).expect("the format holds files below 4 GiB"),
        0,
        0,
        device.0,
        device.1,
        u32::try_from(path.len() + 1).expect("paths are short"),
        0,
    ];
    bytes.extend_from_slice(b"070701");
    for field in fields {
        bytes.extend_from_slice(format!("{field:08x}").as_bytes());
    }
    bytes.extend_from_slice(path.as_bytes());
    bytes.push(0);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes.extend_from_slice(content);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_above_come_first() {
        let mut archive = Archive::new();
        archive.put_file("a/b/c", 0o644, b"text".to_vec());
        let bytes = archive.into_bytes();
        let text = String::from_utf8_lossy(&bytes);
        let at = |name: &str| text.find(name).expect("is in the archive");
        assert!(at("a\0") < at("a/b\0"));
        assert!(at("a/b\0") < at("a/b/c\0"));
        assert!(at("a/b/c\0") < at("TRAILER!!!"));
    }

    #[test]
    fn order_of_insertion_leaves_no_trace() {
        let build = |names: &[&str]| {
            let mut archive = Archive::new();
            for name in names {
                archive.put_file(name, 0o600, name.as_bytes().to_vec());
            }
            archive.into_bytes()
        };
        assert_eq!(build(&["x/1", "y", "a"]), build(&["a", "y", "x/1"]));
    }

    #[test]
    fn header_is_110_bytes_and_content_is_aligned() {
        let mut archive = Archive::new();
        archive.put_file("f", 0o644, b"12345".to_vec());
        let bytes = archive.into_bytes();
        assert_eq!(&bytes[..6], b"070701");
        // 110 bytes of header, "f\0", so the content begins at 112.
        assert_eq!(&bytes[112..117], b"12345");
        assert_eq!(&bytes[120..126], b"070701");
    }
}
