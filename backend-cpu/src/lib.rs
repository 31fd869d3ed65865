//! Haulier's host backend: shared-memory buffers, and streams that are real queues with a thread behind each.
//!
//! [`CpuDevice`] is for production and for CI. Its buffers live in sealed memfds, so that another process opens them by
//! descriptor; plain heap memory is a host region that cannot be exported and goes by staging. Binding it takes no
//! driver, but everything else behaves as on an accelerator: work on a stream is not done because it was queued.
//!
//! | module | what it holds |
//! |---|---|
//! | `device` | [`CpuDevice`], its identity, and its side of the contract |
//! | `stream` | [`CpuStream`], [`CpuStreamOwner`], [`CpuEvent`] |
//! | `memory` | [`CpuAllocation`], and which allocation an address belongs to |
//! | `ipc` | export, and [`CpuImport`] |
//! | `register` | [`CpuRegistration`] |
//! | `error` | errors with the host's errno as vendor code |
//! | `strict` | a simulated accelerator machine, for tests: only with the feature `strict` |
//! | `memfd`, `queue` | what both are made of |

mod device;
mod error;
mod ipc;
mod memfd;
mod memory;
mod queue;
mod register;
mod stream;
#[cfg(feature = "strict")]
pub mod strict;

pub use device::{CpuDevice, probe};
pub use ipc::CpuImport;
pub use memory::CpuAllocation;
pub use register::CpuRegistration;
pub use stream::{CpuEvent, CpuStream, CpuStreamOwner};
