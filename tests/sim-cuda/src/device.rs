//! Devices, and what is known of them without a context.

use std::ffi::c_char;

use backend_cpu::strict::Machine;
use hal::DeviceUuid;

use crate::{
    abi::{Answer, Out, Text, driver, refused, status},
    log::About,
    sim::Sim,
};

/// Attributes as of a device of 2022. What is not here is 0.
const ATTRIBUTES: &[(i32, i32)] = &[
    (1, 1024),       // MAX_THREADS_PER_BLOCK
    (10, 32),        // WARP_SIZE
    (13, 1_980_000), // CLOCK_RATE
    (15, 1),         // GPU_OVERLAP
    (16, 132),       // MULTIPROCESSOR_COUNT
    (19, 1),         // CAN_MAP_HOST_MEMORY
    (31, 1),         // CONCURRENT_KERNELS
    (40, 3),         // ASYNC_ENGINE_COUNT
    (41, 1),         // UNIFIED_ADDRESSING
    (75, 9),         // COMPUTE_CAPABILITY_MAJOR
    (76, 0),         // COMPUTE_CAPABILITY_MINOR
    (83, 1),         // MANAGED_MEMORY
    (89, 1),         // CONCURRENT_MANAGED_ACCESS
    (91, 1),         // CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
    (99, 1),         // HOST_REGISTER_SUPPORTED
    (102, 1),        // VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
    (103, 1),        // HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
    (113, 1),        // READ_ONLY_HOST_REGISTER_SUPPORTED
    (115, 1),        // MEMORY_POOLS_SUPPORTED
    (116, 1),        // GPU_DIRECT_RDMA_SUPPORTED
    (119, 1),        // MEMPOOL_SUPPORTED_HANDLE_TYPES: POSIX_FD
];
/// PCI_BUS_ID, the only attribute by which two devices differ.
const PCI_BUS_ID: i32 = 33;
const LAST_ATTRIBUTE: i32 = 150;

/// The UUID of a physical device, whether it is visible or not.
pub(crate) fn uuid_of(seed: u64, physical: u32) -> DeviceUuid {
    Machine::uuid_of(seed, physical)
}

impl Sim {
    /// The machine's number for a `CUdevice`.
    pub(crate) fn device(&self, device: i32) -> Answer<u32> {
        let count = self.machine()?.device_count();
        match u32::try_from(device).ok().filter(|&device| device < count) {
            Some(device) => Ok(device),
            None => refused(status::INVALID_DEVICE, format!("no device {device} among {count}")),
        }
    }

    fn bus(&self, device: i32) -> Answer<u32> {
        Ok(self.machine()?.physical(self.device(device)?)? + 1)
    }
}

fn attribute(sim: &Sim, attribute: i32, device: i32) -> Answer<i32> {
    sim.device(device)?;
    let known = |list: &[(i32, i32)]| list.iter().find(|row| row.0 == attribute).map(|row| row.1);
    if let Some(value) = known(&sim.settings.attributes) {
        return Ok(value);
    }
    match attribute {
        PCI_BUS_ID => Ok(sim.bus(device)?.cast_signed()),
        1..=LAST_ATTRIBUTE => Ok(known(ATTRIBUTES).unwrap_or(0)),
        _ => refused(status::INVALID_VALUE, format!("no attribute {attribute}")),
    }
}

fn bus_id(bus: u32) -> String {
    format!("0000:{bus:02X}:00.0")
}

fn uuid(sim: &Sim, out: Out<[u8; 16]>, device: i32) -> Answer {
    out.set(sim.machine()?.uuid(sim.device(device)?)?.0)
}

/// Writes as much of a string as there is room for, always ended by a nul.
fn put_text(out: Out<c_char>, room: i32, text: &str) -> Answer {
    let room = usize::try_from(room).unwrap_or(0);
    if room == 0 {
        return refused(status::INVALID_VALUE, "no room for a string");
    }
    let bytes = text.bytes().take(room - 1).chain([0]).map(|byte| byte.cast_signed() as c_char);
    out.set_all(&bytes.collect::<Vec<_>>())
}

driver! {
    fn cuInit(flags: u32) [About::Nothing] |sim| {
        if flags != 0 {
            return refused(status::INVALID_VALUE, "cuInit takes no flags");
        }
        sim.initialise()
    };
    fn cuDriverGetVersion(version: Out<i32>) [About::Nothing] |sim| {
        version.set(sim.settings.driver_version)
    };
    fn cuDeviceGetCount(count: Out<i32>) [About::Nothing] |sim| {
        count.set(sim.machine()?.device_count().cast_signed())
    };
    fn cuDeviceGet(device: Out<i32>, ordinal: i32) [About::Device(ordinal)] |sim| {
        device.set(sim.device(ordinal)?.cast_signed())
    };
    fn cuDeviceGetName(name: Out<c_char>, room: i32, device: i32) [About::Device(device)] |sim| {
        let physical = sim.machine()?.physical(sim.device(device)?)?;
        put_text(name, room, &format!("Haulier simulated CUDA device {physical}"))
    };
    fn cuDeviceGetUuid(out: Out<[u8; 16]>, device: i32) [About::Device(device)] |sim| uuid(sim, out, device);
    fn cuDeviceGetUuid_v2(out: Out<[u8; 16]>, device: i32) [About::Device(device)] |sim| {
        uuid(sim, out, device)
    };
    fn cuDeviceGetAttribute(value: Out<i32>, number: i32, device: i32) [About::Device(device)] |sim| {
        value.set(attribute(sim, number, device)?)
    };
    fn cuDeviceTotalMem_v2(bytes: Out<usize>, device: i32) [About::Device(device)] |sim| {
        sim.device(device)?;
        bytes.set(sim.settings.memory)
    };
    fn cuDeviceGetPCIBusId(id: Out<c_char>, room: i32, device: i32) [About::Device(device)] |sim| {
        put_text(id, room, &bus_id(sim.bus(device)?))
    };
    fn cuDeviceGetByPCIBusId(device: Out<i32>, id: Text) [About::Nothing] |sim| {
        let id = id.get()?;
        let is_there = |bus: u32| id.eq_ignore_ascii_case(&bus_id(bus));
        let mut devices = 0..sim.machine()?.device_count().cast_signed();
        match devices.find(|&device| sim.bus(device).is_ok_and(is_there)) {
            Some(found) => device.set(found),
            None => refused(status::INVALID_DEVICE, format!("no device at {id}")),
        }
    };
    fn cuDeviceCanAccessPeer(can: Out<i32>, device: i32, peer: i32) [About::Device(device)] |sim| {
        let differ = sim.device(device)? != sim.device(peer)?;
        can.set(i32::from(differ && sim.settings.peer))
    };
}
