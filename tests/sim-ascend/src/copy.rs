//! Copies and fills.

use std::ptr;

use backend_cpu::strict::{CaptureStatus, Residence};
use hal::Deadline;
use haulier_sim::log::About;

use crate::{
    abi::{Answer, In, Out, null, refused, runtime, status},
    pointer::Location,
    sim::{Sim, address},
};

/// The last of the directions that a caller can name; the runtime goes by the addresses.
const LAST_KIND: i32 = 7;

/// One batch has at most this many copies.
const BATCH: usize = 4096;

/// What an address turns out to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Pageable,
    Pinned,
    Device,
    /// Another device's memory, imported.
    Foreign,
}

impl Kind {
    fn is_host(self) -> bool {
        matches!(self, Kind::Pageable | Kind::Pinned)
    }
}

/// `aclrtMemcpyBatchAttr`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct BatchAttributes {
    to: Location,
    from: Location,
    reserved: [u8; 16],
}

const _: () = assert!(size_of::<BatchAttributes>() == 32);

/// A copy as the caller asks for it.
#[derive(Debug, Clone, Copy)]
struct Copy {
    to: usize,
    from: usize,
    len: usize,
}

impl Copy {
    fn new(to: u64, room: usize, from: u64, len: usize, kind: i32) -> Answer<Self> {
        if to == 0 || from == 0 {
            return null("a null address");
        }
        if len == 0 || len > room || !(0..=LAST_KIND).contains(&kind) {
            return refused(status::PARAMETER, format!("{len} bytes into room for {room}, direction {kind}"));
        }
        Ok(Copy { to: address(to)?, from: address(from)?, len })
    }
}

impl Sim {
    fn kind(&self, address: usize, len: usize) -> Answer<Kind> {
        let machine = self.machine()?;
        if !machine.is_device_address(address) {
            return Ok(if self.pinned.covers(address, len) { Kind::Pinned } else { Kind::Pageable });
        }
        let (_, current) = self.context()?;
        let known = machine.attributes(address)?;
        let foreign = match known.residence {
            // Virtual memory keeps its own device; what came by key was given the importer's.
            Residence::Imported(device) if known.physical != 0 => device != current,
            Residence::Imported(_) => self.shared.is_foreign(known.base),
            _ => false,
        };
        Ok(if foreign { Kind::Foreign } else { Kind::Device })
    }

    fn kinds(&self, copy: Copy) -> Answer<(Kind, Kind)> {
        Ok((self.kind(copy.to, copy.len)?, self.kind(copy.from, copy.len)?))
    }

    /// A copy that is done when this returns. It waits for no stream.
    fn copy(&self, copy: Copy) -> Answer {
        self.context()?;
        self.beside_captures()?;
        let kinds = self.kinds(copy)?;
        if kinds.0 == Kind::Foreign || kinds.1 == Kind::Foreign {
            return refused(
                status::PARAMETER,
                "another device's imported memory is copied asynchronously only",
            );
        }
        // SAFETY: the caller has that much memory at both sides for the call.
        Ok(unsafe { self.machine()?.copy(copy.to, copy.from, copy.len) }?)
    }

    /// Queues a copy. One with pageable host memory is waited for.
    fn queue_copy(&self, copy: Copy, stream: u64) -> Answer {
        let stream = self.usable(stream)?;
        let (_, current) = self.context()?;
        let machine = self.machine()?;
        match self.kinds(copy)? {
            (to, from) if to.is_host() && from.is_host() => {
                refused(status::NOT_SUPPORTED, "from host to host there is no asynchronous copy")
            }
            (Kind::Foreign, from) if from.is_host() => self.no_way_to_host(),
            (to, Kind::Foreign) if to.is_host() => self.no_way_to_host(),
            (to, from) if to.is_host() || from.is_host() => {
                // SAFETY: the caller keeps pinned memory until the copy is done; pageable memory is waited for below.
                unsafe { machine.copy_async(stream, copy.to, copy.from, copy.len) }?;
                let pageable = to == Kind::Pageable || from == Kind::Pageable;
                if pageable && machine.capture_status(stream)? == CaptureStatus::None {
                    machine.sync_stream(stream, Deadline::NEVER)?;
                }
                Ok(())
            }
            _ => {
                // Both on devices. What the current one has no access to needs it to be enabled.
                let owner = |address| machine.owner_of_address(address).unwrap_or(current);
                let far = |address: &usize| !machine.has_access(*address, current).unwrap_or(false);
                let mut far = [copy.to, copy.from].into_iter().filter(far).map(owner).peekable();
                if far.peek().is_none() {
                    // SAFETY: no host memory takes part.
                    return Ok(unsafe { machine.copy_async(stream, copy.to, copy.from, copy.len) }?);
                }
                match far.find(|&owner| !self.streams.are_peers(current, owner)) {
                    Some(owner) => refused(
                        status::PARAMETER,
                        format!("device {current} has no access to device {owner}: enable it first"),
                    ),
                    None => Ok(machine.copy_between(stream, copy.to, copy.from, copy.len)?),
                }
            }
        }
    }

    fn no_way_to_host(&self) -> Answer {
        refused(status::PARAMETER, "another device's imported memory is not copied to or from the host")
    }

    /// Many copies, all to the device or all from it. Where one cannot be done, the caller learns which; whether others
    /// were is not said.
    fn copy_batch(&self, batch: &Batch, failed: Out<usize>, copy: impl Fn(Copy) -> Answer) -> Answer {
        self.context()?;
        if !self.settings.memcpy_batch {
            return refused(status::NOT_SUPPORTED, "this device copies no batches");
        }
        failed.offer(usize::MAX)?;
        let mut direction = None;
        for (at, one) in batch.copies()?.into_iter().enumerate() {
            let here = self.kinds(one).map(|(to, from)| (to.is_host(), from.is_host()));
            let done = here.and_then(|here| {
                if here.0 == here.1 || *direction.get_or_insert(here) != here {
                    return refused(status::PARAMETER, "a batch goes all to the device or all to the host");
                }
                let named = batch.attributes_of(at)?;
                if named.to.is_host() != here.0 || named.from.is_host() != here.1 {
                    return refused(
                        status::PARAMETER,
                        format!("copy {at} is not of the direction named for it"),
                    );
                }
                copy(one)
            });
            if done.is_err() {
                failed.offer(at)?;
                return done;
            }
        }
        Ok(())
    }

    fn fill(&self, to: u64, room: usize, byte: i32, len: usize) -> Answer {
        self.context()?;
        self.beside_captures()?;
        let bytes = vec![byte as u8; len.min(room)];
        let copy = Copy::new(to, room, bytes.as_ptr().expose_provenance() as u64, len, 0)?;
        if self.kind(copy.to, len)? == Kind::Foreign {
            return refused(status::PARAMETER, "another device's imported memory");
        }
        // SAFETY: the bytes are this function's; the caller has that much memory at the target.
        Ok(unsafe { self.machine()?.copy(copy.to, copy.from, len) }?)
    }
}

/// The arguments of a batch.
#[derive(Debug)]
struct Batch {
    to: In<u64>,
    room: In<usize>,
    from: In<u64>,
    len: In<usize>,
    count: usize,
    attributes: In<BatchAttributes>,
    starts: In<usize>,
    kinds: usize,
}

impl Batch {
    fn copies(&self) -> Answer<Vec<Copy>> {
        if !(1..=BATCH).contains(&self.count) || !(1..=self.count).contains(&self.kinds) {
            return refused(status::PARAMETER, format!("{} copies of {} kinds", self.count, self.kinds));
        }
        let starts = self.starts.get_all(self.kinds)?;
        if starts[0] != 0 || !starts.is_sorted_by(|a, b| a < b) || starts[self.kinds - 1] >= self.count {
            return refused(status::PARAMETER, format!("attributes begin at {starts:?}"));
        }
        let (to, room) = (self.to.get_all(self.count)?, self.room.get_all(self.count)?);
        let (from, len) = (self.from.get_all(self.count)?, self.len.get_all(self.count)?);
        (0..self.count).map(|at| Copy::new(to[at], room[at], from[at], len[at], 0)).collect()
    }

    fn attributes_of(&self, at: usize) -> Answer<BatchAttributes> {
        let kind = self.starts.get_all(self.kinds)?.iter().rposition(|&start| start <= at);
        Ok(self.attributes.get_all(self.kinds)?[kind.unwrap_or(0)])
    }
}

runtime! {
    fn aclrtMemcpy(to: u64, room: usize, from: u64, len: usize, kind: i32) [About::Address(to)] |sim| {
        sim.copy(Copy::new(to, room, from, len, kind)?)
    };
    fn aclrtMemcpyAsync(to: u64, room: usize, from: u64, len: usize, kind: i32, stream: u64)
        [About::Stream(stream)] |sim| {
        sim.queue_copy(Copy::new(to, room, from, len, kind)?, stream)
    };
    fn aclrtMemcpyBatch(
        to: In<u64>, room: In<usize>, from: In<u64>, len: In<usize>, count: usize,
        attributes: In<BatchAttributes>, starts: In<usize>, kinds: usize, failed: Out<usize>
    ) [About::Nothing] |sim| {
        let batch = Batch { to, room, from, len, count, attributes, starts, kinds };
        sim.copy_batch(&batch, failed, |one| sim.copy(one))
    };
    fn aclrtMemcpyBatchAsync(
        to: In<u64>, room: In<usize>, from: In<u64>, len: In<usize>, count: usize,
        attributes: In<BatchAttributes>, starts: In<usize>, kinds: usize, failed: Out<usize>, stream: u64
    ) [About::Stream(stream)] |sim| {
        let batch = Batch { to, room, from, len, count, attributes, starts, kinds };
        sim.copy_batch(&batch, failed, |one| sim.queue_copy(one, stream))
    };
    fn aclrtMemset(to: u64, room: usize, byte: i32, len: usize) [About::Address(to)] |sim| {
        sim.fill(to, room, byte, len)
    };
    fn aclrtMemsetAsync(to: u64, room: usize, byte: i32, len: usize, stream: u64) [About::Stream(stream)] |sim| {
        let stream = sim.usable(stream)?;
        // The source only stands in for one.
        let copy = Copy::new(to, room, ptr::dangling::<u8>().addr() as u64, len, 0)?;
        match sim.kind(copy.to, len)? {
            Kind::Device => Ok(sim.machine()?.fill(stream, copy.to, len, byte as u8)?),
            other => refused(status::PARAMETER, format!("{other:?} memory is not filled on a stream")),
        }
    };
}
