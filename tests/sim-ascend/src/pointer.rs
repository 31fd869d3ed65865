//! What is known of an address.

use backend_cpu::strict::{Residence, Why};
use haulier_sim::log::About;

use crate::{
    abi::{Instead, Out, null, refused, runtime, status},
    memory::page_of,
    sim::{Sim, address},
};

const HOST: i32 = 0;
const DEVICE: i32 = 1;
const UNREGISTERED: i32 = 2;
const MANAGED: i32 = 3;

/// `aclrtMemLocation`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct Location {
    pub(crate) id: u32,
    pub(crate) kind: i32,
}

impl Location {
    /// The user device id of a location that is a device.
    pub(crate) fn device(self, sim: &Sim) -> crate::abi::Answer<u32> {
        if self.kind != DEVICE {
            return refused(status::NOT_SUPPORTED, format!("location type {}", self.kind));
        }
        sim.device(self.id.cast_signed())
    }

    /// Whether it is named as host memory, which has no id worth looking at.
    pub(crate) fn is_host(self) -> bool {
        self.kind == HOST
    }
}

/// `aclrtPtrAttributes`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct Attributes {
    location: Location,
    page_size: u32,
    reserved: [u32; 4],
}

const _: () = assert!(size_of::<Attributes>() == 28 && align_of::<Attributes>() == 4);

impl Attributes {
    fn new(kind: i32, device: u32, page_size: usize) -> Self {
        Attributes { location: Location { id: device, kind }, page_size: page_size as u32, reserved: [0; 4] }
    }
}

runtime! {
    fn aclrtPointerGetAttributes(pointer: u64, out: Out<Attributes>) [About::Address(pointer)] |sim| {
        if pointer == 0 || out.is_null() {
            return null("a null pointer");
        }
        // The driver of the 950 answers, the older ones do not, for host memory neither.
        if !sim.is_open() && !sim.settings.soc.starts_with("Ascend950") {
            return refused(status::HANDLE, "the process has not opened a device");
        }
        let address = address(pointer)?;
        if sim.pinned.around(address).is_some() {
            return out.set(Attributes::new(HOST, 0, 0));
        }
        let known = sim.machine()?.attributes(address).instead(Why::InvalidValue, status::DRIVER)?;
        out.set(match known.residence {
            Residence::Registered => Attributes::new(HOST, 0, 0),
            Residence::Unregistered if sim.settings.old_driver => Attributes::new(HOST, 0, 0),
            Residence::Unregistered => Attributes::new(UNREGISTERED, 0, 0),
            Residence::Device(device, _) => Attributes::new(DEVICE, device, page_of(known.len)),
            Residence::Imported(device) if sim.is_9() => Attributes::new(DEVICE, device, page_of(known.len)),
            Residence::Imported(device) => Attributes::new(MANAGED, device, page_of(known.len)),
        })
    };
}
