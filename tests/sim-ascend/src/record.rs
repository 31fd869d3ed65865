//! What an export says of itself to other processes, for as long as it exists: a file that the exporter keeps open and
//! importers find by the exporter's pid and the descriptor's number.

use std::{
    fs::File,
    io,
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::fs::{FileExt, MetadataExt},
    },
    process,
};

use rustix::fs::{MemfdFlags, memfd_create};

use crate::abi::{Answer, refused, status};

const MAGIC: u64 = u64::from_le_bytes(*b"HAULSIMA");
const HEAD: usize = 32;
/// What it is about: the machine's token of ordinary memory, or descriptor and file of physical memory.
pub(crate) const CONTENT: usize = 32;
const PIDS: u64 = (HEAD + CONTENT) as u64;
/// Pids of one whitelist.
const MOST: usize = 1024;

/// The exporter's side.
#[derive(Debug)]
pub(crate) struct Record(File);

/// Where a record is to be found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Place {
    pub(crate) pid: u32,
    pub(crate) fd: u32,
    /// A descriptor's number is reused; the file behind it is not.
    pub(crate) inode: u64,
}

/// The importer's view.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) physical: u32,
    pub(crate) content: [u8; CONTENT],
}

fn failed<T>(e: impl std::fmt::Display) -> Answer<T> {
    refused(status::DRIVER, format!("the export is out of reach, or over: {e}"))
}

impl Record {
    /// A record of memory of this physical device; `open` means that nobody's pid is looked at.
    pub(crate) fn new(seed: u64, physical: u32, open: bool, content: &[u8; CONTENT]) -> Answer<Self> {
        let make = || -> io::Result<File> {
            let file = File::from(memfd_create("haulier-export", MemfdFlags::CLOEXEC)?);
            let mut head = [0; HEAD];
            head[..8].copy_from_slice(&MAGIC.to_le_bytes());
            head[8..16].copy_from_slice(&seed.to_le_bytes());
            head[16..20].copy_from_slice(&physical.to_le_bytes());
            head[20] = u8::from(open);
            file.write_all_at(&head, 0)?;
            file.write_all_at(content, HEAD as u64)?;
            Ok(file)
        };
        make().map(Record).or_else(failed)
    }

    pub(crate) fn place(&self) -> Answer<Place> {
        let inode = self.0.metadata().or_else(failed)?.ino();
        Ok(Place { pid: process::id(), fd: self.0.as_raw_fd().cast_unsigned(), inode })
    }

    /// Adds to the whitelist.
    pub(crate) fn allow(&self, pids: &[i32]) -> Answer {
        let end = self.0.metadata().or_else(failed)?.len();
        if (end - PIDS) as usize / 4 + pids.len() > MOST {
            return refused(status::PARAMETER, "too many pids");
        }
        let bytes: Vec<u8> = pids.iter().flat_map(|pid| pid.to_le_bytes()).collect();
        self.0.write_all_at(&bytes, end).or_else(failed)
    }
}

impl Place {
    /// Reads the record as the process with this pid, which its whitelist has to have. Where the whole inode is not
    /// known, `inode` answers whether it can be this one.
    pub(crate) fn read(self, seed: u64, bare_pid: i32, inode: impl Fn(u64) -> bool) -> Answer<Found> {
        if self.pid == process::id() {
            return refused(status::DRIVER, "the export is this process's own");
        }
        let file = File::from(self.open()?);
        if !inode(file.metadata().or_else(failed)?.ino()) {
            return failed("another file has taken its place");
        }
        let mut bytes = vec![0; HEAD + CONTENT];
        file.read_exact_at(&mut bytes, 0).or_else(failed)?;
        let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap_or_default());
        if word(0) != MAGIC || word(8) != seed {
            return failed("the memory is of another machine (HAULIER_SIM_SEED differs)");
        }
        if bytes[20] == 0 {
            let mut pids = vec![0; MOST * 4];
            let len = file.read_at(&mut pids, PIDS).or_else(failed)?;
            if !pids[..len].chunks_exact(4).any(|pid| pid == bare_pid.to_le_bytes()) {
                let why =
                    format!("pid {bare_pid} (aclrtDeviceGetBareTgid) is not on the exporter's whitelist");
                return refused(status::NO_PERMISSION, why);
            }
        }
        let content = bytes[HEAD..].try_into().unwrap_or([0; CONTENT]);
        Ok(Found { physical: word(16) as u32, content })
    }

    /// What stands open in the exporter under this number.
    pub(crate) fn open(self) -> Answer<OwnedFd> {
        let path = format!("/proc/{}/fd/{}", self.pid, self.fd);
        File::options().read(true).write(true).open(path).map(OwnedFd::from).or_else(failed)
    }
}
