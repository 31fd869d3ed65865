//! Haulier's device contract: one small trait, and the proofs that make two families of bugs impossible to write.
//!
//! - **A thread without the device's context.** What needs a context takes a [`Bound`], and only binding a device gives
//!   one. It cannot leave its thread.
//! - **A payload exposed before it is written.** What exposes a payload takes a batch that was made ready through
//!   [`Device::sync_stream`]; the store client builds on it.
//!
//! This crate knows no vendor. A backend implements [`Device`]; everything above is generic over it.
//!
//! | method | in one line |
//! |---|---|
//! | [`bind_current`](Device::bind_current) | make the device current here, and restore on drop |
//! | [`current_stream`](Device::current_stream) | where this thread's next work would be queued |
//! | [`sync_stream`](Device::sync_stream) | wait for work queued before, never device-wide |
//! | [`export_ipc`](Device::export_ipc) | a handle for the allocation, or the reason why there is none |
//! | [`register`](Device::register) | make a region usable for DMA, as a guard |

mod bound;
mod caps;
mod deadline;
mod device;
mod error;
mod identity;
mod ipc;
mod presence;
mod region;
mod registry;
mod stream;
mod workers;

pub use bound::Bound;
pub use caps::Caps;
pub use deadline::Deadline;
pub use device::{Buffer, Device, DeviceExt, Keep};
pub use error::{Error, Kind, Result};
pub use identity::{DeviceUuid, Identity, LogicalId, PhysicalId};
pub use ipc::{DESCRIPTORS_MAX, Export, Exported, IpcHandle, NotExportable, Token};
pub use presence::Presence;
pub use region::{Allocated, BufferId, Located, Memory, Place, Region};
pub use registry::{Pin, Registered, Registry};
pub use stream::named as named_stream;
pub use workers::Workers;
