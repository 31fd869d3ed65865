//! NPUs, or the simulated runtime: as of CANN 9, or of the release that `HAULIER_SIM_CANN` names.

use std::{env, path::Path};

use backend_ascend::{AscendDevice, AscendStream};
use hal::{Deadline, Device, DeviceExt, Presence, Region};
use haulier_sim::control::Control;
use tempfile::TempDir;

use super::{Backend, Found, Watched};
use crate::{
    acl,
    ascend::{self, DriverFixture},
    conformance::{read, write},
    fixture::Fixture,
};

/// The Ascend backend.
#[derive(Debug)]
pub struct Ascend;

impl Backend for Ascend {
    type Device = AscendDevice;
    type Fixture = DriverFixture;

    const NAME: &'static str = backend_ascend::BACKEND;

    fn simulate() -> Result<TempDir, String> {
        let release = env::var(ascend::RELEASE).unwrap_or_else(|_| ascend::RELEASES[0].into());
        ascend::install_simulator(&release)
            .map_err(|e| format!("the simulated runtime cannot be installed: {e}"))
    }

    fn find() -> Result<Found, String> {
        let (presence, devices) = backend_ascend::devices();
        let (Presence::Present { library: Some(library) }, Some(first)) = (&presence, devices.first()) else {
            return Err(format!("no Ascend NPU can be used here: CANN is {presence}"));
        };
        devices.iter().for_each(warm_up);
        let simulator = Control::open(Path::new(library)).ok().map(|control| control.version());
        let mut version = 0;
        let asked = acl!(aclsysGetVersionNum(c"runtime".as_ptr() => *const _, &mut version => *mut i32));
        let release = match asked {
            0 => {
                format!("CANN {}.{}.{}", version / 10_000_000, version / 100_000 % 100, version / 1000 % 100)
            }
            _ => "a CANN that does not tell its version".into(),
        };
        let identity = first.identity();
        let runs_on = match &simulator {
            Some(simulator) => format!("{simulator} as {release} ({library})"),
            None => format!("{} {}, {release} ({library})", identity.name, identity.uuid),
        };
        Ok(Found { devices: devices.len() as u32, simulated: simulator.is_some(), runs_on })
    }

    fn devices() -> Vec<AscendDevice> {
        AscendDevice::all().expect("the runtime is up")
    }

    fn fixture(device: u32) -> DriverFixture {
        DriverFixture::new(device)
    }
}

/// A context, the runtime's own kernels, and the backend's streams and staging memory: all that may be made late.
fn warm_up(device: &AscendDevice) {
    let buffer = device.buffer(4096).expect("device memory");
    let stream = ascend::stream(device);
    ascend::queue_fill(device, stream, buffer.region(), 1);
    let region = buffer.region();
    let warm = device.bound(|bound| {
        bound.sync_stream(stream, Deadline::NEVER)?;
        let filled = read(bound, region);
        write(bound, region, &[2; 4096]);
        Ok(filled)
    });
    assert_eq!(warm.expect("it binds"), [1; 4096]);
}

impl Watched<AscendDevice> for DriverFixture {
    type Mark = u64;

    fn mark(&self, stream: AscendStream) -> u64 {
        self.event(stream)
    }

    fn is_reached(&self, mark: &u64) -> bool {
        ascend::is_reached(self.device(), *mark)
    }

    fn wait_for(&self, stream: AscendStream, mark: &u64) {
        ascend::wait_for(self.device(), stream, *mark);
    }

    unsafe fn plain_copy(&self, to: Region, from: Region) {
        // SAFETY: the caller's promise.
        unsafe { DriverFixture::plain_copy(self, to, from) }
    }
}
