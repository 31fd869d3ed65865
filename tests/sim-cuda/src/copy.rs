//! Copies and fills. What has no stream of its own goes on the legacy default stream.

use std::{ptr, slice};

use backend_cpu::strict::{CaptureStatus, LEGACY_STREAM};
use hal::Deadline;

use crate::{
    abi::{Answer, driver, refused, status},
    log::About,
    sim::{Sim, address},
};

/// What a function says of its argument.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Is {
    Host,
    Device,
    /// Found out by the address.
    Either,
}

/// What an address turns out to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Pageable,
    Pinned,
    Device,
}

impl Sim {
    fn kind(&self, address: usize, len: usize, is: Is) -> Answer<Kind> {
        let on_device = self.machine()?.is_device_address(address);
        match (is, on_device) {
            (Is::Host, true) => refused(status::INVALID_VALUE, format!("{address:#x} is device memory")),
            (Is::Device, false) => {
                refused(status::INVALID_VALUE, format!("{address:#x} is no device memory"))
            }
            (_, true) => Ok(Kind::Device),
            (_, false) if self.pinned.covers(address, len) => Ok(Kind::Pinned),
            (_, false) => Ok(Kind::Pageable),
        }
    }

    /// Queues a copy. Pageable host memory is the caller's again when this returns, as with the driver: its bytes are
    /// taken at once, or the call waits until they are there.
    fn queue_copy(&self, stream: u64, to: (u64, Is), from: (u64, Is), len: usize) -> Answer {
        self.context()?;
        let (to, to_is) = (address(to.0)?, to.1);
        let (from, from_is) = (address(from.0)?, from.1);
        if len == 0 {
            return Ok(());
        }
        if to == 0 || from == 0 {
            return refused(status::INVALID_VALUE, "a null address");
        }
        let machine = self.machine()?;
        match (self.kind(to, len, to_is)?, self.kind(from, len, from_is)?) {
            (Kind::Device, Kind::Pageable) => {
                // SAFETY: the caller has `len` bytes there that nobody writes during the call.
                let bytes = unsafe { slice::from_raw_parts(ptr::with_exposed_provenance(from), len) };
                Ok(machine.write_async(stream, to, bytes.to_vec())?)
            }
            (to_kind, from_kind) => {
                // SAFETY: the caller keeps pinned memory until the copy is done; pageable memory is waited for below.
                unsafe { machine.copy_async(stream, to, from, len) }?;
                let pageable = to_kind == Kind::Pageable || from_kind == Kind::Pageable;
                if pageable && machine.capture_status(stream)? == CaptureStatus::None {
                    machine.sync_stream(stream, Deadline::NEVER)?;
                }
                Ok(())
            }
        }
    }

    /// A copy that is done when this returns, but for one within device memory, which is only queued.
    fn copy(&self, to: (u64, Is), from: (u64, Is), len: usize) -> Answer {
        self.context()?;
        let machine = self.machine()?;
        machine.forbidden_beside_captures()?;
        self.queue_copy(LEGACY_STREAM, to, from, len)?;
        let on_device = |pointer| address(pointer).is_ok_and(|pointer| machine.is_device_address(pointer));
        if len > 0 && !(on_device(to.0) && on_device(from.0)) {
            machine.sync_stream(LEGACY_STREAM, Deadline::NEVER)?;
        }
        Ok(())
    }

    fn fill(&self, stream: u64, to: u64, count: usize, byte: u8) -> Answer {
        self.context()?;
        if count == 0 {
            return Ok(());
        }
        Ok(self.machine()?.fill(stream, address(to)?, count, byte)?)
    }

    fn fill_words(&self, stream: u64, to: u64, word: u32, count: usize) -> Answer {
        self.context()?;
        let (Some(len), 0) = (count.checked_mul(4), to % 4) else {
            return refused(status::INVALID_VALUE, "not words");
        };
        if len == 0 {
            return Ok(());
        }
        self.kind(address(to)?, len, Is::Device)?;
        Ok(self.machine()?.write_async(stream, address(to)?, word.to_le_bytes().repeat(count))?)
    }

    fn fill_now(&self, fill: impl FnOnce() -> Answer) -> Answer {
        self.context()?;
        self.machine()?.forbidden_beside_captures()?;
        fill()
    }

    /// A copy between devices, from the current context's point of view: the streams of neither side but the given one
    /// order it.
    fn copy_between(&self, stream: u64, to: (u64, u64), from: (u64, u64), len: usize) -> Answer {
        self.context()?;
        let known = |context| match self.contexts.device_of(context) {
            Some(device) => Ok(device),
            None => refused(status::INVALID_CONTEXT, format!("{context:#x} is no context")),
        };
        known(to.1)?;
        known(from.1)?;
        let (to, from) = (address(to.0)?, address(from.0)?);
        self.kind(to, len, Is::Device)?;
        self.kind(from, len, Is::Device)?;
        Ok(self.machine()?.copy_between(stream, to, from, len)?)
    }
}

driver! {
    fn cuMemcpy(to: u64, from: u64, len: usize) [About::Address(to)] |sim| {
        sim.copy((to, Is::Either), (from, Is::Either), len)
    };
    fn cuMemcpyHtoD_v2(to: u64, from: u64, len: usize) [About::Address(to)] |sim| {
        sim.copy((to, Is::Device), (from, Is::Host), len)
    };
    fn cuMemcpyDtoH_v2(to: u64, from: u64, len: usize) [About::Address(from)] |sim| {
        sim.copy((to, Is::Host), (from, Is::Device), len)
    };
    fn cuMemcpyDtoD_v2(to: u64, from: u64, len: usize) [About::Address(to)] |sim| {
        sim.copy((to, Is::Device), (from, Is::Device), len)
    };
    fn cuMemcpyAsync(to: u64, from: u64, len: usize, stream: u64) [About::Stream(stream)] |sim| {
        sim.queue_copy(stream, (to, Is::Either), (from, Is::Either), len)
    };
    fn cuMemcpyHtoDAsync_v2(to: u64, from: u64, len: usize, stream: u64) [About::Stream(stream)] |sim| {
        sim.queue_copy(stream, (to, Is::Device), (from, Is::Host), len)
    };
    fn cuMemcpyDtoHAsync_v2(to: u64, from: u64, len: usize, stream: u64) [About::Stream(stream)] |sim| {
        sim.queue_copy(stream, (to, Is::Host), (from, Is::Device), len)
    };
    fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, len: usize, stream: u64) [About::Stream(stream)] |sim| {
        sim.queue_copy(stream, (to, Is::Device), (from, Is::Device), len)
    };
    fn cuMemcpyPeer(to: u64, to_context: u64, from: u64, from_context: u64, len: usize)
        [About::Address(to)] |sim| {
        sim.copy_between(LEGACY_STREAM, (to, to_context), (from, from_context), len)
    };
    fn cuMemcpyPeerAsync(to: u64, to_context: u64, from: u64, from_context: u64, len: usize, stream: u64)
        [About::Stream(stream)] |sim| {
        sim.copy_between(stream, (to, to_context), (from, from_context), len)
    };
    fn cuMemsetD8_v2(to: u64, byte: u8, count: usize) [About::Address(to)] |sim| {
        sim.fill_now(|| sim.fill(LEGACY_STREAM, to, count, byte))
    };
    fn cuMemsetD32_v2(to: u64, word: u32, count: usize) [About::Address(to)] |sim| {
        sim.fill_now(|| sim.fill_words(LEGACY_STREAM, to, word, count))
    };
    fn cuMemsetD8Async(to: u64, byte: u8, count: usize, stream: u64) [About::Stream(stream)] |sim| {
        sim.fill(stream, to, count, byte)
    };
    fn cuMemsetD32Async(to: u64, word: u32, count: usize, stream: u64) [About::Stream(stream)] |sim| {
        sim.fill_words(stream, to, word, count)
    };
}
