//! Copies, on streams of the backend's own: they wait for nothing that the caller queued.
//!
//! Host memory that is pinned goes to and from the device as it is. Other host memory goes through pinned staging
//! memory, in two halves: while the device moves one, the host fills or empties the other. So the driver never sees host
//! memory that is registered in part, which it refuses to copy.

use std::ptr;

use hal::{Bound, Kind, Place, Region, Result};
use parking_lot::Mutex;

use crate::{
    CudaDevice,
    ffi::{Answer, Driver},
    memory::{Around, around},
};

/// Bytes of each staging half.
const HALF: usize = 4 << 20;
/// How many idle lanes are kept; a copy that finds none makes one.
const IDLE_MAX: usize = 8;

/// What one copy at a time uses. Made and used with its device current.
#[derive(Debug)]
struct Lane {
    streams: [usize; 2],
    /// Whether something may be in flight on each of them.
    busy: [bool; 2],
    staging: Staging,
}

/// A lane's pinned memory, one half for each of its streams.
#[derive(Debug, Clone, Copy)]
enum Staging {
    /// Until a copy needs it.
    Untried,
    /// The driver gives none; it copies pageable memory itself.
    Refused,
    Ready([usize; 2]),
}

/// A device's idle lanes.
#[derive(Debug, Default)]
pub(crate) struct Lanes(Mutex<Vec<Lane>>);

/// Which way a copy goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Within,
    ToDevice,
    ToHost,
}

/// As [`hal::Device::copy`].
///
/// # Safety
/// As there.
pub(crate) unsafe fn copy(bound: &Bound<'_, CudaDevice>, to: Region, from: Region) -> Result<()> {
    const OP: &str = "copy";
    let device = bound.device();
    device.own(OP, to.place)?;
    device.own(OP, from.place)?;
    if to.len != from.len {
        let lengths = format!("{} bytes into {} bytes", from.len, to.len);
        return Err(device.plain(Kind::InvalidArgument, OP).detail(lengths));
    }
    if to.len == 0 {
        return Ok(());
    }
    if to.place == Place::Host && from.place == Place::Host {
        host_side(device, OP, to.addr)?;
        host_side(device, OP, from.addr)?;
        let (source, target) =
            (ptr::with_exposed_provenance::<u8>(from.addr), ptr::with_exposed_provenance_mut::<u8>(to.addr));
        // SAFETY: the caller promises that both regions are allocated and left alone; they may overlap.
        unsafe { ptr::copy(source, target, to.len) };
        return Ok(());
    }
    let way = match (to.place, from.place) {
        (Place::Host, _) => Way::ToHost,
        (_, Place::Host) => Way::ToDevice,
        _ => Way::Within,
    };
    let _relaxed = CudaDevice::unspoiled(bound, OP)?;
    let mut lane = device.lanes().take(device.driver()).map_err(|refusal| device.refused(OP, refusal))?;
    // SAFETY: the caller promises that both regions are allocated and left alone until this returns, and the lane is
    // settled before.
    let moved = unsafe { lane.queue_all(device, OP, way, to, from) };
    let settled = lane.settle(device.driver()).map_err(|refusal| device.refused(OP, refusal));
    let outcome = moved.and(settled);
    device.lanes().put_back(device.driver(), lane, outcome.is_ok());
    outcome
}

/// How much host memory from `addr` on is pinned as one. Memory of a device is refused: the host would fault on it.
fn host_side(device: &CudaDevice, op: &'static str, addr: usize) -> Result<Option<usize>> {
    match around(device, op, addr, 0)? {
        Around::Host { pinned } => Ok(pinned),
        Around::Device(block) => Err(device.plain(Kind::DeviceMismatch, op).detail(format!(
            "{addr:#x} was given as host memory and is memory of a device ({:?})",
            block.place
        ))),
    }
}

impl Lanes {
    fn take(&self, driver: &Driver) -> Answer<Lane> {
        let idle = self.0.lock().pop();
        idle.map_or_else(|| Lane::new(driver), Ok)
    }

    /// A lane that failed is not used again.
    fn put_back(&self, driver: &Driver, lane: Lane, sound: bool) {
        let mut idle = self.0.lock();
        if sound && idle.len() < IDLE_MAX {
            idle.push(lane);
            return;
        }
        drop(idle);
        if let Err(refusal) = lane.close(driver) {
            tracing::debug!(?refusal, "streams of a copy not destroyed");
        }
    }

    /// Closes them all, with the device current and no copy under way.
    pub(crate) fn close(&self, driver: &Driver) -> Answer<()> {
        let idle = std::mem::take(&mut *self.0.lock());
        idle.into_iter().map(|lane| lane.close(driver)).fold(Ok(()), Result::and)
    }
}

impl Lane {
    fn new(driver: &Driver) -> Answer<Self> {
        let first = driver.create_stream()?;
        let second = driver.create_stream().inspect_err(|_| {
            // SAFETY: made just now and used by nobody. That it cannot be destroyed either is told by the first refusal.
            let _ = unsafe { driver.destroy_stream(first) };
        })?;
        Ok(Lane { streams: [first, second], busy: [false; 2], staging: Staging::Untried })
    }

    /// Queues the copy, and moves what goes through staging memory.
    ///
    /// # Safety
    /// Both regions must be allocated and left alone until the lane is settled.
    unsafe fn queue_all(
        &mut self,
        device: &CudaDevice,
        op: &'static str,
        way: Way,
        to: Region,
        from: Region,
    ) -> Result<()> {
        let driver = device.driver();
        let refused = |refusal| device.refused(op, refusal);
        let mut done = 0;
        while done < to.len {
            let (to, from, left) = (to.addr + done, from.addr + done, to.len - done);
            let host = match way {
                // SAFETY: the caller's promise.
                Way::Within => return unsafe { self.queue(driver, 0, to, from, left) }.map_err(refused),
                Way::ToDevice => from,
                Way::ToHost => to,
            };
            let pinned = host_side(device, op, host)?.map(|part| part.min(left));
            if pinned.is_none()
                && let Some(halves) = self.staging(driver)
            {
                // SAFETY: the caller's promise.
                return unsafe { self.staged(driver, halves, way, to, from, left) }.map_err(refused);
            }
            let part = pinned.unwrap_or(left);
            // SAFETY: the caller's promise.
            unsafe { self.queue(driver, 0, to, from, part) }.map_err(refused)?;
            done += part;
        }
        Ok(())
    }

    /// Moves host memory that is not pinned. Returns when the host's side is done with.
    ///
    /// # Safety
    /// As [`queue_all`](Lane::queue_all).
    unsafe fn staged(
        &mut self,
        driver: &Driver,
        halves: [usize; 2],
        way: Way,
        to: usize,
        from: usize,
        len: usize,
    ) -> Answer<()> {
        // What the device has been told to move into each half, and the host has yet to take out.
        let mut owed: [Option<(usize, usize)>; 2] = [None; 2];
        let parts = (0..len).step_by(HALF).map(|offset| Some((offset, HALF.min(len - offset))));
        // Two more turns empty what is owed.
        for (turn, part) in parts.chain([None, None]).enumerate() {
            let half = turn % 2;
            self.wait(driver, half)?;
            if let Some((target, len)) = owed[half].take() {
                // SAFETY: the device has filled the half; the caller promises the target.
                unsafe { host_copy(target, halves[half], len) };
            }
            let Some((offset, len)) = part else { continue };
            let (to, from) = (to + offset, from + offset);
            // SAFETY: nothing is in flight in this half; the caller promises the rest.
            unsafe {
                if way == Way::ToHost {
                    self.queue(driver, half, halves[half], from, len)?;
                    owed[half] = Some((to, len));
                } else {
                    host_copy(halves[half], from, len);
                    self.queue(driver, half, to, halves[half], len)?;
                }
            }
        }
        Ok(())
    }

    /// # Safety
    /// As [`queue_all`](Lane::queue_all).
    unsafe fn queue(
        &mut self,
        driver: &Driver,
        half: usize,
        to: usize,
        from: usize,
        len: usize,
    ) -> Answer<()> {
        self.busy[half] = true;
        // SAFETY: the caller's promise, and the stream is the lane's own.
        unsafe { driver.copy(to, from, len, self.streams[half]) }
    }

    fn wait(&mut self, driver: &Driver, half: usize) -> Answer<()> {
        if !self.busy[half] {
            return Ok(());
        }
        // SAFETY: the stream is the lane's own.
        unsafe { driver.synchronize(self.streams[half])? };
        self.busy[half] = false;
        Ok(())
    }

    /// Waits for all that is in flight, also where one of the two fails.
    fn settle(&mut self, driver: &Driver) -> Answer<()> {
        let first = self.wait(driver, 0);
        self.wait(driver, 1).and(first)
    }

    fn staging(&mut self, driver: &Driver) -> Option<[usize; 2]> {
        if let Staging::Untried = self.staging {
            self.staging = match driver.allocate_host(2 * HALF) {
                Ok(addr) => Staging::Ready([addr, addr + HALF]),
                Err(refusal) => {
                    tracing::debug!(
                        ?refusal,
                        "no pinned staging memory; the driver copies pageable memory itself"
                    );
                    Staging::Refused
                }
            };
        }
        match self.staging {
            Staging::Ready(halves) => Some(halves),
            Staging::Untried | Staging::Refused => None,
        }
    }

    fn close(self, driver: &Driver) -> Answer<()> {
        // SAFETY: the lane is settled, or its streams have failed for good, and nobody else knows them.
        let streams = self.streams.map(|stream| unsafe { driver.destroy_stream(stream) });
        let staging = match self.staging {
            // SAFETY: as above.
            Staging::Ready([addr, _]) => unsafe { driver.free_host(addr) },
            Staging::Untried | Staging::Refused => Ok(()),
        };
        streams.into_iter().fold(staging, Result::and)
    }
}

/// # Safety
/// Both must be allocated host memory, and left alone meanwhile.
unsafe fn host_copy(to: usize, from: usize, len: usize) {
    let (to, from) = (ptr::with_exposed_provenance_mut::<u8>(to), ptr::with_exposed_provenance::<u8>(from));
    // SAFETY: the caller's promise.
    unsafe { ptr::copy_nonoverlapping(from, to, len) };
}
