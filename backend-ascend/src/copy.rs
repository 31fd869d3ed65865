//! Copies, on streams of the backend's own: they wait for nothing that the caller queued.
//!
//! A copy returns when ACL is done with both sides, however long that takes: their memory is the caller's again then, and
//! giving up earlier would hand it over while the device still moves it. Whoever has a deadline copies on a worker of
//! [`Workers`](hal::Workers), which is left to a call that never returns.
//!
//! Host memory that ACL says is pinned, at its beginning and its end, goes to and from the device as it is. (An older
//! driver says so of all host memory, and then moves it before it returns.) Other host memory goes through pinned staging
//! memory, in two halves: while the device moves one, the host fills or empties the other.

use std::ptr;

use hal::{Bound, Kind, Place, Region, Result};
use parking_lot::Mutex;

use crate::{
    AscendDevice,
    ffi::{Answer, Driver, Way},
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
    /// ACL gives none; it copies pageable memory itself.
    Refused,
    Ready([usize; 2]),
}

/// A device's idle lanes.
#[derive(Debug, Default)]
pub(crate) struct Lanes(Mutex<Vec<Lane>>);

/// As [`hal::Device::copy`].
///
/// # Safety
/// As there.
pub(crate) unsafe fn copy(bound: &Bound<'_, AscendDevice>, to: Region, from: Region) -> Result<()> {
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
    let mut direct = true;
    for side in [to, from] {
        if side.place == Place::Host {
            direct &= is_pinned(device, OP, side)?;
        }
    }
    if to.place == Place::Host && from.place == Place::Host {
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
    let _relaxed = AscendDevice::unspoiled(bound, OP)?;
    let mut lane = device.lanes().take(device.driver()).map_err(|refusal| device.refused(OP, refusal))?;
    // SAFETY: the caller promises that both regions are allocated and left alone until this returns, and the lane is
    // settled before.
    let moved = unsafe { lane.queue_all(device.driver(), way, direct, to, from) };
    let settled = lane.settle(device.driver());
    let outcome = moved.and(settled).map_err(|refusal| device.refused(OP, refusal));
    device.lanes().put_back(device.driver(), lane, outcome.is_ok());
    outcome
}

/// Whether ACL can move this host memory as it is. Memory of a device is refused: the host would fault on it. Where ACL
/// cannot be asked the caller's word stands.
fn is_pinned(device: &AscendDevice, op: &'static str, region: Region) -> Result<bool> {
    let pinned = |addr| match around(device, op, addr, 0) {
        Ok(Around::Host { pinned }) => Ok(pinned),
        Ok(Around::Device(block)) => Err(device.plain(Kind::DeviceMismatch, op).detail(format!(
            "{addr:#x} was given as host memory and is memory of a device ({:?})",
            block.place
        ))),
        Err(e) if e.kind() == Kind::InvalidArgument && addr == 0 => Err(e),
        Err(e) => {
            tracing::debug!(error = %e, "taken for host memory, as it was given");
            Ok(false)
        }
    };
    Ok(pinned(region.addr)? && pinned(region.end() - 1)?)
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
        driver: &Driver,
        way: Way,
        direct: bool,
        to: Region,
        from: Region,
    ) -> Answer<()> {
        let halves = if direct { None } else { self.staging(driver) };
        // SAFETY: the caller's promise.
        unsafe {
            match halves {
                Some(halves) => self.staged(driver, halves, way, to.addr, from.addr, to.len),
                None => self.queue(driver, way, 0, to.addr, from.addr, to.len),
            }
        }
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
                    self.queue(driver, way, half, halves[half], from, len)?;
                    owed[half] = Some((to, len));
                } else {
                    host_copy(halves[half], from, len);
                    self.queue(driver, way, half, to, halves[half], len)?;
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
        way: Way,
        half: usize,
        to: usize,
        from: usize,
        len: usize,
    ) -> Answer<()> {
        self.busy[half] = true;
        // SAFETY: the caller's promise, and the stream is the lane's own.
        unsafe { driver.copy(way, to, from, len, self.streams[half]) }
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
                    tracing::debug!(?refusal, "no pinned staging memory; ACL copies pageable memory itself");
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
