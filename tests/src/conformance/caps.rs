//! Capabilities: a flag set means that the call works, a flag clear means exactly `Unsupported`.

use hal::{Device, Export, Kind, Memory, Result};

use super::{Page, cases, is_device};
use crate::fixture::Fixture;

cases! {
    each_flag_tells_the_truth,
    what_is_clear_is_exactly_unsupported [NoCaps],
}

/// Tries what each flag is about, and compares.
fn hold_to_its_flags<D: Device>(device: &D) {
    let bound = device.bind_current().unwrap();
    let caps = device.caps();
    let memory = bound.allocate(4096).unwrap();
    let region = memory.region();
    let is = |flag: &str, set: bool, outcome: Result<()>| match outcome {
        Ok(()) => assert!(set, "{flag} is clear and the call works"),
        Err(e) => assert_eq!((set, e.kind()), (false, Kind::Unsupported), "{flag}: {e}"),
    };

    let export = bound.export_ipc(region);
    is("ipc_export", caps.ipc_export, export.as_ref().map(drop).map_err(Clone::clone));
    if let Ok(export) = export {
        assert!(matches!(export, Export::Handle(_)), "ipc_export is set and ordinary memory has no handle");
    }

    let page = Page::of(4096);
    is("register_host", caps.register_host, bound.register(page.region()).map(drop));
    if is_device(region) {
        is("register_device", caps.register_device, bound.register(region).map(drop));
    }
    if !caps.ipc_import {
        // A device that imports says what is wrong with this one; see the group `ipc`.
        let handle = hal::IpcHandle {
            device: device.identity().uuid,
            buffer: hal::BufferId(1),
            exporter: 1,
            len: 4096,
            token: hal::Token::Opaque(vec![1; 64]),
        };
        assert_eq!(bound.import_ipc(&handle, vec![]).map(drop).unwrap_err().kind(), Kind::Unsupported);
    }
}

fn each_flag_tells_the_truth<D: Device>(f: &dyn Fixture<D>) {
    hold_to_its_flags(f.device());
}

fn what_is_clear_is_exactly_unsupported<D: Device>(f: &dyn Fixture<D>) {
    let device = f.without_caps();
    assert!(device.caps().flags().iter().all(|(_, set)| !set));
    hold_to_its_flags(&device);
}
