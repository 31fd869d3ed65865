//! NVIDIA devices, or the simulated driver.

use std::{mem, path::Path};

use backend_cuda::{CudaDevice, CudaStream};
use hal::{Deadline, Device, DeviceExt, Presence, Region};
use haulier_sim_cuda::Control;
use tempfile::TempDir;

use super::{Backend, Found, Watched};
use crate::{
    conformance::read,
    cu,
    cuda::{self, DriverFixture},
    fixture::Fixture,
};

/// The CUDA backend.
#[derive(Debug)]
pub struct Cuda;

impl Backend for Cuda {
    type Device = CudaDevice;
    type Fixture = DriverFixture;

    const NAME: &'static str = backend_cuda::BACKEND;

    fn simulate() -> Result<TempDir, String> {
        cuda::install_simulator().map_err(|e| format!("the simulated driver cannot be installed: {e}"))
    }

    fn find() -> Result<Found, String> {
        let (presence, devices) = backend_cuda::devices();
        let (Presence::Present { library: Some(library) }, Some(first)) = (&presence, devices.first()) else {
            return Err(format!("no NVIDIA GPU can be used here: the driver is {presence}"));
        };
        devices.iter().for_each(warm_up);
        // Else each trial would make the contexts anew.
        mem::forget(devices.clone());
        let simulator = Control::open(Path::new(library)).ok().map(|control| control.version());
        let mut version = 0;
        let asked = cu!(cuDriverGetVersion(&mut version => *mut i32));
        let serves = if asked == 0 { version } else { 0 };
        let (major, minor) = (serves / 1000, serves % 1000 / 10);
        let identity = first.identity();
        let runs_on = match &simulator {
            Some(simulator) => format!("{simulator} ({library})"),
            None => {
                format!("{} {}, driver for CUDA {major}.{minor} ({library})", identity.name, identity.uuid)
            }
        };
        Ok(Found { devices: devices.len() as u32, simulated: simulator.is_some(), runs_on })
    }

    fn devices() -> Vec<CudaDevice> {
        CudaDevice::all().expect("the driver is up")
    }

    fn fixture(device: u32) -> DriverFixture {
        DriverFixture::new(device)
    }
}

/// A context, the driver's own kernels, and the backend's streams and staging memory: all that may be made late.
fn warm_up(device: &CudaDevice) {
    let buffer = device.buffer(4096).expect("device memory");
    let stream = cuda::stream(device);
    cuda::queue_fill(device, stream, buffer.region(), 1);
    let bound = device.bind_current().expect("it binds");
    bound.sync_stream(stream, Deadline::NEVER).expect("it is done");
    assert_eq!(read(&bound, buffer.region()), [1; 4096]);
}

impl Watched<CudaDevice> for DriverFixture {
    type Mark = u64;

    fn mark(&self, stream: CudaStream) -> u64 {
        self.event(stream)
    }

    fn is_reached(&self, mark: &u64) -> bool {
        DriverFixture::is_reached(self, *mark)
    }

    fn wait_for(&self, stream: CudaStream, mark: &u64) {
        cuda::wait_for(self.device(), stream, *mark);
    }

    unsafe fn plain_copy(&self, to: Region, from: Region) {
        // SAFETY: the caller's promise.
        unsafe { DriverFixture::plain_copy(self, to, from) }
    }
}
