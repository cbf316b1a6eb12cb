//! Just enough of ELF to learn what a program wants from shared libraries.
//!
//! The files come from Debian packages whose checksums were verified; a malformed one is an error all the
//! same, never a panic.

use std::collections::HashMap;

/// A symbol that a file expects some library to define.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Wanted {
    /// The symbol's name.
    pub symbol: String,
    /// The library and version it must come from, where the file says so.
    pub version: Option<(String, String)>,
}

/// The dynamic linking of one 64-bit little-endian ELF file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Linkage {
    /// Libraries by soname, in order.
    pub needed: Vec<String>,
    /// Symbols that must be found elsewhere (weak ones may stay away and are not listed).
    pub wanted: Vec<Wanted>,
    /// Symbols that this file defines.
    pub defined: Vec<String>,
}

const SHT_DYNAMIC: u32 = 6;
const SHT_DYNSYM: u32 = 11;
const SHT_GNU_VERNEED: u32 = 0x6fff_fffe;
const SHT_GNU_VERSYM: u32 = 0x6fff_ffff;
const DT_NEEDED: u64 = 1;
const STB_GLOBAL: u8 = 1;

struct Section {
    kind: u32,
    start: usize,
    bytes: usize,
    link: usize,
}

struct File<'a> {
    bytes: &'a [u8],
    sections: Vec<Section>,
}

impl Linkage {
    /// Reads `bytes`; `None` if that is not a well-formed 64-bit little-endian ELF file with dynamic linking.
    pub fn read(bytes: &[u8]) -> Option<Self> {
        let file = File::parse(bytes)?;
        let mut linkage = Self::default();
        let dynamic = file.section(SHT_DYNAMIC)?;
        for at in (dynamic.start..dynamic.start + dynamic.bytes).step_by(16) {
            if u64_at(bytes, at)? == DT_NEEDED {
                let name = usize::try_from(u64_at(bytes, at + 8)?).ok()?;
                linkage.needed.push(file.string(dynamic.link, name)?);
            }
        }
        let versions = file.needed_versions()?;
        let symbols = file.section(SHT_DYNSYM)?;
        for (index, at) in (symbols.start..symbols.start + symbols.bytes).step_by(24).enumerate().skip(1) {
            let name = file.string(symbols.link, usize::try_from(u32_at(bytes, at)?).ok()?)?;
            let binding = *bytes.get(at + 4)? >> 4;
            let undefined = u16_at(bytes, at + 6)? == 0;
            if !undefined {
                linkage.defined.push(name);
            } else if binding == STB_GLOBAL {
                let version = match file.section(SHT_GNU_VERSYM) {
                    Some(table) => versions.get(&(u16_at(bytes, table.start + 2 * index)? & 0x7fff)).cloned(),
                    None => None,
                };
                linkage.wanted.push(Wanted { symbol: name, version });
            }
        }
        Some(linkage)
    }
}

impl<'a> File<'a> {
    fn parse(bytes: &'a [u8]) -> Option<Self> {
        if bytes.get(..6)? != b"\x7fELF\x02\x01" {
            return None;
        }
        let table = usize::try_from(u64_at(bytes, 0x28)?).ok()?;
        let count = usize::from(u16_at(bytes, 0x3c)?);
        let mut sections = Vec::with_capacity(count);
        for index in 0..count {
            let at = table.checked_add(index * 64)?;
            let section = Section {
                kind: u32_at(bytes, at + 4)?,
                start: usize::try_from(u64_at(bytes, at + 24)?).ok()?,
                bytes: usize::try_from(u64_at(bytes, at + 32)?).ok()?,
                link: usize::try_from(u32_at(bytes, at + 40)?).ok()?,
            };
            section.start.checked_add(section.bytes)?;
            sections.push(section);
        }
        Some(Self { bytes, sections })
    }

    fn section(&self, kind: u32) -> Option<&Section> {
        self.sections.iter().find(|section| section.kind == kind)
    }

    fn string(&self, section: usize, offset: usize) -> Option<String> {
        let section = self.sections.get(section)?;
        let table = self.bytes.get(section.start..section.start + section.bytes)?;
        let text = table.get(offset..)?;
        let end = text.iter().position(|byte| *byte == 0)?;
        String::from_utf8(text[..end].to_vec()).ok()
    }

    /// Version index → (library, version).
    fn needed_versions(&self) -> Option<HashMap<u16, (String, String)>> {
        let mut versions = HashMap::new();
        let Some(section) = self.section(SHT_GNU_VERNEED) else { return Some(versions) };
        let mut at = section.start;
        loop {
            let count = u16_at(self.bytes, at + 2)?;
            let library = self.string(section.link, usize::try_from(u32_at(self.bytes, at + 4)?).ok()?)?;
            let mut entry = at + usize::try_from(u32_at(self.bytes, at + 8)?).ok()?;
            for _ in 0..count {
                let index = u16_at(self.bytes, entry + 6)? & 0x7fff;
                let name =
                    self.string(section.link, usize::try_from(u32_at(self.bytes, entry + 8)?).ok()?)?;
                versions.insert(index, (library.clone(), name));
                entry += usize::try_from(u32_at(self.bytes, entry + 12)?).ok()?;
            }
            match usize::try_from(u32_at(self.bytes, at + 12)?).ok()? {
                0 => return Some(versions),
                next => at += next,
            }
        }
    }
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(bytes.get(at..at.checked_add(2)?)?.try_into().ok()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at.checked_add(4)?)?.try_into().ok()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at.checked_add(8)?)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_program_needs_the_c_library() {
        let bytes = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        let linkage = Linkage::read(&bytes).expect("the test program is an ELF file");
        assert!(linkage.needed.iter().any(|name| name == "libc.so.6"), "{:?}", linkage.needed);
        let from_libc = linkage
            .wanted
            .iter()
            .filter_map(|wanted| wanted.version.as_ref())
            .any(|(library, version)| library == "libc.so.6" && version.starts_with("GLIBC_"));
        assert!(from_libc, "{:?}", linkage.wanted);
    }

    #[test]
    fn garbage_is_refused() {
        assert_eq!(Linkage::read(b""), None);
        assert_eq!(Linkage::read(b"\x7fELF\x02\x01 and nothing more"), None);
        let mut bytes = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        bytes.truncate(5000);
        assert_eq!(Linkage::read(&bytes), None);
    }
}
