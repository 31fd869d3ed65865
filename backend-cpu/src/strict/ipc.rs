//! Sharing allocations with other processes that simulate the same machine.

use std::{
    fs::File,
    os::fd::{AsFd, AsRawFd, OwnedFd},
};

use hal::BufferId;

use super::{
    builder::RepeatImport,
    log::{Argument, Op},
    machine::Machine,
    memory::{MemoryKind, Residence},
    refusal::{Answer, Why},
};
use crate::memfd;

/// Bytes of an opaque token. Short enough to be written as hex into an Ascend key of 65 bytes.
pub const OPAQUE_TOKEN_LEN: usize = 32;

/// Imports are mapped at whole pages.
const PAGE: usize = 4096;

/// What an export gives.
#[derive(Debug)]
pub struct Shareable<T> {
    /// The allocation's device.
    pub device: u32,
    /// The allocation's first byte, which an interior pointer is resolved to.
    pub base: usize,
    /// The allocation's bytes.
    pub len: usize,
    /// The allocation's identity.
    pub buffer: BufferId,
    /// What the importer needs.
    pub token: T,
}

/// An opaque token: where in the exporting process the memory is to be found.
struct Opaque {
    pid: u32,
    fd: u32,
    /// A descriptor's number is reused; the file behind it is not.
    inode: u64,
    len: u64,
    physical: u32,
    buffer: u32,
}

impl Opaque {
    fn to_bytes(&self) -> [u8; OPAQUE_TOKEN_LEN] {
        let mut bytes = [0; OPAQUE_TOKEN_LEN];
        bytes[0..4].copy_from_slice(&self.pid.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.fd.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.inode.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.len.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.physical.to_le_bytes());
        bytes[28..32].copy_from_slice(&self.buffer.to_le_bytes());
        bytes
    }

    fn from_bytes(bytes: &[u8; OPAQUE_TOKEN_LEN]) -> Self {
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        Opaque {
            pid: word(0),
            fd: word(4),
            inode: long(8),
            len: long(16),
            physical: word(24),
            buffer: word(28),
        }
    }
}

impl Machine {
    /// A call: a token for the allocation around `addr`, which must be ordinary memory of the current device.
    ///
    /// It works until the allocation is freed or the process ends, in any process that may look into this one.
    pub fn export_opaque(&self, addr: usize) -> Answer<Shareable<[u8; OPAQUE_TOKEN_LEN]>> {
        self.export(addr, false, |fd, shared| {
            let token = Opaque {
                pid: std::process::id(),
                fd: fd.as_raw_fd().cast_unsigned(),
                inode: memfd::identity(fd).map_err(|e| self.refuse(Why::Other, e.to_string()))?.1,
                len: shared.len as u64,
                physical: self.physical(shared.device)?,
                buffer: shared.buffer.0 as u32,
            };
            Ok(token.to_bytes())
        })
    }

    /// A call: a descriptor for the allocation around `addr`, which must be ordinary or shareable virtual memory of the
    /// current device. It outlives the allocation and the process.
    pub fn export_descriptor(&self, addr: usize) -> Answer<Shareable<OwnedFd>> {
        self.export(addr, true, |fd, _| {
            fd.try_clone().map_err(|e| self.refuse(Why::Other, format!("no descriptor: {e}")))
        })
    }

    /// A call: opens an opaque token on the current device, and answers with the address. Memory of another device opens
    /// only where the machine was built with [`Builder::peer_import`](super::Builder::peer_import).
    pub fn import_opaque(&self, token: &[u8]) -> Answer<usize> {
        self.call(Op::Import, Argument::None, || {
            let device = self.context()?;
            let refused = |text: String| self.refuse(Why::ImportRefused, text);
            let bytes = token
                .first_chunk::<OPAQUE_TOKEN_LEN>()
                .ok_or_else(|| refused(format!("a token of {} bytes", token.len())))?;
            let token = Opaque::from_bytes(bytes);
            if token.physical != self.physical(device)? && !self.0.spec.peer_import {
                return Err(self.refuse(
                    Why::WrongContext,
                    format!("the memory is on physical device {}, which is not current", token.physical),
                ));
            }
            if token.pid == std::process::id() && !self.0.spec.own_process_import {
                return Err(self.refuse(Why::OwnProcess, "the handle is this process's own"));
            }
            let path = format!("/proc/{}/fd/{}", token.pid, token.fd);
            let file = File::options()
                .read(true)
                .write(true)
                .open(&path)
                .map_err(|e| refused(format!("the exporter's memory ({path}) is out of reach: {e}")))?;
            let fd = OwnedFd::from(file);
            let found = memfd::identity(&fd).map_err(|e| refused(e.to_string()))?.1;
            if found != token.inode {
                return Err(refused(format!("buffer {} of process {} is freed", token.buffer, token.pid)));
            }
            self.open(device, fd, token.len)
        })
    }

    /// A call: opens the first `len` bytes of a descriptor on the current device, and answers with the address.
    ///
    /// The machine cannot tell which device a descriptor's memory is of; the caller compares UUIDs.
    pub fn import_descriptor(&self, fd: OwnedFd, len: u64) -> Answer<usize> {
        self.call(Op::Import, Argument::None, || {
            let device = self.context()?;
            let own =
                |file| {
                    self.0.memory.lock().blocks.values().any(|block| {
                        block.store.file == file && matches!(block.residence, Residence::Device(..))
                    })
                };
            if !self.0.spec.own_process_import && memfd::identity(&fd).is_ok_and(own) {
                return Err(self.refuse(Why::OwnProcess, "the handle is this process's own"));
            }
            self.open(device, fd, len)
        })
    }

    /// A call: closes what an import opened at `addr`, on its device. An import that was counted is gone with the last.
    pub fn close_import(&self, addr: usize) -> Answer<()> {
        self.call(Op::CloseImport, Argument::Address(addr), || {
            let device = self.context()?;
            let mut memory = self.0.memory.lock();
            let (owner, file) = match memory.blocks.get(&addr) {
                Some(block)
                    if matches!(block.residence, Residence::Imported(_)) && block.mapped.is_none() =>
                {
                    (block.device, block.store.file)
                }
                _ => return Err(self.refuse(Why::InvalidValue, format!("no import at {addr:#x}"))),
            };
            if owner != device {
                return Err(self.elsewhere(addr, owner, device));
            }
            if let Some((_, count)) = memory.imports.get_mut(&file)
                && *count > 1
            {
                *count -= 1;
                return Ok(());
            }
            memory.imports.remove(&file);
            self.displace(&mut memory, addr);
            Ok(())
        })
    }

    /// How many imports are open, each counted once however often it was opened. Another process's physical memory is
    /// one while there is a handle to it or it is mapped.
    pub fn open_imports(&self) -> usize {
        let memory = self.0.memory.lock();
        memory.imports.len() + memory.imported_physical()
    }

    fn export<T>(
        &self,
        addr: usize,
        as_descriptor: bool,
        token: impl FnOnce(&OwnedFd, &Shareable<()>) -> Answer<T>,
    ) -> Answer<Shareable<T>> {
        self.call(Op::Export, Argument::Address(addr), || {
            let device = self.context()?;
            let block = self.block(addr)?;
            if block.device != device {
                return Err(self.elsewhere(addr, block.device, device));
            }
            let shareable = match block.residence {
                Residence::Device(_, MemoryKind::Normal) => true,
                Residence::Device(_, MemoryKind::VmmShareable) => as_descriptor,
                _ => false,
            };
            if !shareable {
                return Err(self
                    .refuse(Why::NotShareable, format!("{:?} memory has no such handle", block.residence)));
            }
            let (base, len, buffer) = (block.base, block.len, block.buffer);
            let token = token(&block.store.memfd, &Shareable { device, base, len, buffer, token: () })?;
            Ok(Shareable { device, base, len, buffer, token })
        })
    }

    fn open(&self, device: u32, fd: OwnedFd, len: u64) -> Answer<usize> {
        let refused = |text: String| self.refuse(Why::ImportRefused, text);
        let (file, whole) = memfd::inspect(fd.as_fd(), len).map_err(refused)?;
        // The whole allocation or nothing, so that one that is open already is the same for everybody.
        if whole != len {
            return Err(refused(format!("the memory has {whole} bytes and the handle says {len}")));
        }
        let size = usize::try_from(len).ok().filter(|&size| size > 0);
        let size = size.ok_or_else(|| refused(format!("{len} bytes cannot be mapped")))?;
        let mut memory = self.0.memory.lock();
        if let Some((base, count)) = memory.imports.get_mut(&file) {
            if self.0.spec.repeat_import == RepeatImport::Refused {
                return Err(self.refuse(Why::AlreadyOpen, "the handle is open already"));
            }
            *count += 1;
            return Ok(*base);
        }
        let base = self.place(&mut memory, device, fd, size, PAGE, Residence::Imported(device))?;
        memory.imports.insert(file, (base, 1));
        Ok(base)
    }
}
