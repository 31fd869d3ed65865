//! A simulated accelerator machine that makes ordering and binding bugs visible. For tests; never chosen by default.
//!
//! **Available with the feature `strict` only.**
//!
//! [`Machine`] is neutral: its methods take plain integers and answer with a [`Refusal`] that carries a vendor's code,
//! so that a vendor's C ABI can stand in front of it. [`StrictDevice`] is a thin [`hal::Device`] over it. What it is
//! strict about:
//!
//! - each thread has its own current device, none at first, and calls that need one are refused without;
//! - device addresses fault when the host touches them;
//! - queued work waits until the test releases it, if the test holds the stream;
//! - a per-thread stream means another stream on each thread, silently;
//! - synchronising a stream under capture, or allocating beside one, spoils the capture;
//! - freed addresses are reused at once, under a new buffer id;
//! - every call is logged with its thread and current device, and any call can be made to fail or hang.
//!
//! ```
//! use backend_cpu::strict::{Machine, Op};
//! use hal::{Device, Deadline, Kind, LogicalId, Memory};
//! use std::time::Duration;
//!
//! # fn main() -> hal::Result<()> {
//! let machine = Machine::builder().devices(2).build()?;
//! let device = machine.device(LogicalId(1))?;
//! let bound = device.bind_current()?;
//! let memory = bound.allocate(4096)?;
//!
//! let stream = device.create_stream(&bound)?;
//! machine.hold(stream.raw())?;
//! machine.fill(stream.raw(), memory.region().addr, 4096, 0xab)?;
//! let late = bound.sync_stream(stream, Deadline::after(Duration::from_millis(5)));
//! assert_eq!(late.unwrap_err().kind(), Kind::Timeout);
//!
//! machine.release(stream.raw())?;
//! bound.sync_stream(stream, Deadline::NEVER)?;
//! assert_eq!(machine.peek(memory.region().addr, 4096)?, [0xab; 4096]);
//! assert_eq!(machine.log().count(Op::SyncDevice), 0);
//! # Ok(())
//! # }
//! ```
//!
//! | module | what it holds |
//! |---|---|
//! | `builder` | [`Builder`]: devices, visibility, limits, modes |
//! | `machine` | [`Machine`], the way of every call, who is current where |
//! | `refusal` | [`Refusal`], and the codes of each [`Dialect`] |
//! | `log`, `faults` | [`Log`] and [`Faults`], by [`Op`] |
//! | `arena`, `memory` | addresses, and the memory behind them |
//! | `space` | virtual memory: reserved addresses, physical memory, mappings |
//! | `stream`, `capture` | streams, events, capture |
//! | `ipc`, `register` | sharing with other processes, registration |
//! | `device` | [`StrictDevice`] and its guards |

mod arena;
mod builder;
mod capture;
mod device;
mod faults;
mod ipc;
mod log;
mod machine;
mod memory;
mod refusal;
mod register;
mod space;
mod stream;

pub use builder::{Builder, DefaultDevice, RepeatImport, TokenForm};
pub use capture::{CaptureMode, CaptureStatus};
pub use device::{StrictAllocation, StrictDevice, StrictImport, StrictRegistration, StrictStream};
pub use faults::Faults;
pub use ipc::{OPAQUE_TOKEN_LEN, Shareable};
pub use log::{Argument, Call, Log, Op, Outcome};
pub use machine::{Machine, MachineOwner};
pub use memory::{Attributes, MemoryKind, Residence};
pub use refusal::{Answer, Dialect, Refusal, Why};
pub use space::{GRANULARITY, Physical};
pub use stream::{LEGACY_STREAM, NULL_STREAM, PER_THREAD_STREAM};
