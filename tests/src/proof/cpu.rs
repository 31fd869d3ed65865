//! The host: no accelerator, and so the proof of the proof's other half.

use std::{ptr, sync::Arc};

use backend_cpu::{CpuDevice, CpuStream};
use hal::Region;
use tempfile::TempDir;

use super::{Backend, Found, Watched};
use crate::{backends::CpuFixture, fixture::Fixture, gate::Gate};

pub(super) struct Cpu;

impl Backend for Cpu {
    type Device = CpuDevice;
    type Fixture = CpuFixture;

    const NAME: &'static str = "cpu";

    fn simulate() -> Result<TempDir, String> {
        Err("the host has no driver to simulate".into())
    }

    fn find() -> Result<Found, String> {
        let device = CpuDevice::open().map_err(|e| e.to_string())?;
        let runs_on = format!("host memory and no accelerator ({})", hal::Device::identity(&device).name);
        Ok(Found { devices: 1, simulated: false, runs_on })
    }

    fn devices() -> Vec<CpuDevice> {
        vec![CpuDevice::open().expect("the host is present")]
    }

    fn fixture(device: u32) -> CpuFixture {
        CpuFixture::new(device)
    }
}

impl Watched<CpuDevice> for CpuFixture {
    type Mark = Arc<Gate>;

    fn mark(&self, stream: CpuStream) -> Arc<Gate> {
        let mark = Arc::new(Gate::default());
        let reached = Arc::clone(&mark);
        self.device().enqueue(stream, move || reached.open()).expect("the stream is there");
        mark
    }

    fn is_reached(&self, mark: &Arc<Gate>) -> bool {
        mark.is_open()
    }

    fn wait_for(&self, stream: CpuStream, mark: &Arc<Gate>) {
        let mark = Arc::clone(mark);
        self.device().enqueue(stream, move || mark.pass()).expect("the stream is there");
    }

    unsafe fn plain_copy(&self, to: Region, from: Region) {
        let (into, out_of) =
            (ptr::with_exposed_provenance_mut::<u8>(to.addr), ptr::with_exposed_provenance::<u8>(from.addr));
        // SAFETY: the caller's promise; what is called the device's is the host's, too.
        unsafe { ptr::copy(out_of, into, to.len.min(from.len)) };
    }
}
