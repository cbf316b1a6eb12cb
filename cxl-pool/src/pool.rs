//! Creating and opening a pool.

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::RenameFlags;
use rustix::io::Errno;
use uuid::Uuid;

use crate::mapping::{Backing, Mapping, reserve};
use crate::{
    Area, ByteOffset, CoherenceMode, FileIdentity, HardwareMemory, LINE_BYTES, Layout, MAJOR_VERSION, Memory,
    PoolError, SoftwareMemory, Superblock, usual_region_slots,
};

/// What a new pool is to be like.
#[derive(Clone, Debug)]
pub struct CreateOptions {
    /// Its size: a multiple of 2 MiB. A DAX device is used whole and needs none.
    pub size_bytes: Option<u64>,
    /// How hosts see each other's writes.
    pub mode: CoherenceMode,
    /// For how many hosts.
    pub host_slots: u16,
    /// For how many controller replicas.
    pub replica_slots: u16,
    /// For how many regions. Nothing: as many as a pool of its size has usually, one for each 256 KiB.
    pub region_slots: Option<u32>,
    /// Take the memory of all of a file at once. Otherwise it is taken when it is first written to, and if others have used it up by
    /// then, whoever writes is killed.
    pub reserve: bool,
    /// Replace what is there. Daemons that have the old file open keep it; nobody else will find it.
    pub force: bool,
}

impl Default for CreateOptions {
    fn default() -> Self {
        Self {
            size_bytes: Some(1 << 30),
            mode: CoherenceMode::Software,
            host_slots: 16,
            replica_slots: 3,
            region_slots: None,
            reserve: false,
            force: false,
        }
    }
}

/// A mapped pool. Clones share the mapping.
#[derive(Clone)]
pub struct Pool {
    mapping: Arc<Mapping>,
    superblock: Superblock,
    layout: Layout,
    identity: FileIdentity,
}

impl Pool {
    /// Creates a pool. A file appears under its name only when it is complete.
    pub fn create(path: &Path, options: &CreateOptions) -> Result<Self, PoolError> {
        let failed = |operation, source| PoolError::Io { operation, path: path.to_owned(), source };
        match std::fs::metadata(path) {
            Ok(metadata) => match Backing::of(path, &metadata)? {
                Backing::Device => Self::create_on_device(path, options),
                Backing::File if options.force => Self::create_file(path, options),
                Backing::File => Err(PoolError::Exists { path: path.to_owned() }),
            },
            Err(error) if error.kind() == io::ErrorKind::NotFound => Self::create_file(path, options),
            Err(source) => Err(failed("look at", source)),
        }
    }

    /// Opens the pool at this path.
    pub fn open(path: &Path) -> Result<Self, PoolError> {
        let (file, backing) = open_backing(path)?;
        let actual_bytes = backing.size_bytes(&file, path)?;
        if actual_bytes < Superblock::WIRE_BYTES as u64 {
            let expected_bytes = Superblock::WIRE_BYTES as u64;
            return Err(PoolError::Truncated { path: path.to_owned(), actual_bytes, expected_bytes });
        }
        let mapping = Arc::new(Mapping::new(file, path, actual_bytes)?);
        let superblock = Superblock::decode(read_superblock(&careful(&mapping)), actual_bytes, path)?;
        Self::from_parts(mapping, superblock, path)
    }

    /// What the pool says about itself.
    pub fn superblock(&self) -> &Superblock {
        &self.superblock
    }

    /// Where everything lies.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Access for a pool whose mode is [`CoherenceMode::Software`].
    pub fn software(&self) -> SoftwareMemory {
        SoftwareMemory::new(Arc::clone(&self.mapping))
    }

    /// Access for a pool whose mode is [`CoherenceMode::Hardware`].
    pub fn hardware(&self) -> HardwareMemory {
        HardwareMemory::new(Arc::clone(&self.mapping))
    }

    /// Where an area is mapped, for drivers that hand addresses to the kernel. Valid for as long as this
    /// `Pool` or a clone lives.
    ///
    /// # Panics
    ///
    /// If the area does not lie inside the pool.
    pub fn pointer(&self, area: Area) -> *mut u8 {
        let whole = Area::new(ByteOffset::new(0).line(), crate::LineCount::covering(self.mapping.bytes()));
        assert!(whole.contains_area(&area), "{area} lies outside the pool");
        // SAFETY: the area lies inside the mapping, so its start does.
        unsafe { self.mapping.base().as_ptr().add(area.start_byte().get() as usize) }
    }

    /// Which file or device the pool is, by which guest memory that lies in the pool is known.
    pub fn file_identity(&self) -> FileIdentity {
        self.identity
    }

    /// The pool's file.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.mapping.file().as_fd()
    }

    fn create_file(path: &Path, options: &CreateOptions) -> Result<Self, PoolError> {
        let failed = |operation, source| PoolError::Io { operation, path: path.to_owned(), source };
        let size_bytes = options.size_bytes.unwrap_or(0);
        let superblock = new_superblock(size_bytes, options);
        let layout = Layout::of(&superblock)?;
        let unfinished = Unfinished::new(path)?;
        let available_bytes = available_bytes(&unfinished.file).map_err(|e| failed("look at", e))?;
        let no_space =
            |available_bytes| PoolError::NoSpace { path: path.to_owned(), available_bytes, size_bytes };
        if let Some(available_bytes) = available_bytes.filter(|&available| available < size_bytes) {
            return Err(no_space(available_bytes));
        }
        unfinished.file.set_len(size_bytes).map_err(|source| failed("size", source))?;
        if options.reserve {
            reserve(&unfinished.file, size_bytes).map_err(|error| match error {
                // Others were faster.
                Errno::NOSPC => no_space(available_bytes.unwrap_or(0)),
                _ => failed("reserve", error.into()),
            })?;
        }
        let file = unfinished.file.try_clone().map_err(|source| failed("open", source))?;
        let mapping = Arc::new(Mapping::new(file, path, size_bytes)?);
        write_superblock(&careful(&mapping), &superblock);
        unfinished.finish(path, options.force)?;
        let pool = Self::from_parts(mapping, superblock, path)?;
        debug_assert_eq!(pool.layout, layout);
        Ok(pool)
    }

    fn create_on_device(path: &Path, options: &CreateOptions) -> Result<Self, PoolError> {
        let (file, backing) = open_backing(path)?;
        let whole_bytes = backing.size_bytes(&file, path)?;
        let size_bytes = options.size_bytes.unwrap_or(whole_bytes);
        let superblock = new_superblock(size_bytes, options);
        let layout = Layout::of(&superblock)?;
        if size_bytes != whole_bytes {
            let path = path.to_owned();
            return Err(PoolError::SizeMismatch {
                path,
                actual_bytes: whole_bytes,
                expected_bytes: size_bytes,
            });
        }
        let mapping = Arc::new(Mapping::new(file, path, size_bytes)?);
        if !options.force && Superblock::has_magic(&read_superblock(&careful(&mapping))) {
            return Err(PoolError::Exists { path: path.to_owned() });
        }
        // A device remembers: nothing of an earlier pool may look like a record or a ring of this one.
        let memory = careful(&mapping);
        wipe(&memory, layout.control());
        write_superblock(&memory, &superblock);
        Self::from_parts(mapping, superblock, path)
    }

    fn from_parts(mapping: Arc<Mapping>, superblock: Superblock, path: &Path) -> Result<Self, PoolError> {
        let layout = Layout::of(&superblock)?;
        let identity = FileIdentity::of(mapping.file()).map_err(|source| PoolError::Io {
            operation: "look at",
            path: path.to_owned(),
            source,
        })?;
        Ok(Self { mapping, superblock, layout, identity })
    }
}

fn new_superblock(size_bytes: u64, options: &CreateOptions) -> Superblock {
    let region_slots = options.region_slots.unwrap_or_else(|| usual_region_slots(size_bytes));
    Superblock {
        major: MAJOR_VERSION,
        minor: Superblock::minor_for(region_slots),
        uuid: Uuid::new_v4(),
        size_bytes,
        mode: options.mode,
        host_slots: options.host_slots,
        replica_slots: options.replica_slots,
        region_slots,
    }
}

/// Before the mode is known, the careful way to access memory is right for both.
fn careful(mapping: &Arc<Mapping>) -> SoftwareMemory {
    SoftwareMemory::new(Arc::clone(mapping))
}

/// Nothing is there any more, for any host, once there is something else.
pub(crate) fn wipe<M: Memory>(memory: &M, area: Area) {
    memory.zero(area.start_byte(), area.bytes());
    memory.flush(area.start_byte(), area.bytes());
    memory.full_fence();
}

pub(crate) fn read_superblock<M: Memory>(memory: &M) -> [u8; Superblock::WIRE_BYTES] {
    let mut bytes = [0; Superblock::WIRE_BYTES];
    memory.invalidate(ByteOffset::new(0), LINE_BYTES as u64);
    memory.full_fence();
    memory.read(ByteOffset::new(0), &mut bytes);
    bytes
}

pub(crate) fn write_superblock<M: Memory>(memory: &M, superblock: &Superblock) {
    memory.write(ByteOffset::new(0), &superblock.encode());
    memory.flush(ByteOffset::new(0), Superblock::WIRE_BYTES as u64);
    memory.full_fence();
}

fn open_backing(path: &Path) -> Result<(File, Backing), PoolError> {
    let failed = |operation, source: io::Error| match source.kind() {
        io::ErrorKind::NotFound => PoolError::Missing { path: path.to_owned() },
        _ => PoolError::Io { operation, path: path.to_owned(), source },
    };
    // Looked at before it is opened: opening a FIFO would wait, and some devices react.
    let metadata = std::fs::metadata(path).map_err(|source| failed("look at", source))?;
    let backing = Backing::of(path, &metadata)?;
    let file =
        OpenOptions::new().read(true).write(true).open(path).map_err(|source| failed("open", source))?;
    Ok((file, backing))
}

/// The room on a file's file system; nothing where it does not say (hugetlbfs without a limit).
fn available_bytes(file: &File) -> io::Result<Option<u64>> {
    let stat = rustix::fs::fstatvfs(file)?;
    Ok((stat.f_blocks > 0).then(|| stat.f_bavail.saturating_mul(stat.f_frsize)))
}

/// A pool file that has no name of its own yet. Dropped unfinished, it is removed.
struct Unfinished {
    file: File,
    path: PathBuf,
}

impl Unfinished {
    fn new(path: &Path) -> Result<Self, PoolError> {
        let mut name = OsString::from(path);
        name.push(format!(".{}.new", std::process::id()));
        let unfinished_path = PathBuf::from(name);
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&unfinished_path)
            .map_err(|source| match source.kind() {
                io::ErrorKind::NotFound => PoolError::DirectoryMissing { path: path.to_owned() },
                _ => PoolError::Io { operation: "create", path: path.to_owned(), source },
            })?;
        Ok(Self { file, path: unfinished_path })
    }

    fn finish(&self, path: &Path, replace: bool) -> Result<(), PoolError> {
        let flags = if replace { RenameFlags::empty() } else { RenameFlags::NOREPLACE };
        let here = rustix::fs::CWD;
        rustix::fs::renameat_with(here, &self.path, here, path, flags).map_err(|error| match error {
            Errno::EXIST => PoolError::Exists { path: path.to_owned() },
            _ => PoolError::Io { operation: "create", path: path.to_owned(), source: error.into() },
        })
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        // Gone already if it was renamed; if it cannot be removed, there is nothing better to do.
        let _ = std::fs::remove_file(&self.path);
    }
}
