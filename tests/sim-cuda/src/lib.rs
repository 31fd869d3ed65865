//! A simulated `libcuda.so.1`: the driver's C ABI in front of the strict machine of `backend-cpu`, so that the real
//! CUDA backend, cudarc included, runs where there is no GPU. For tests only; nothing looks for it on a user's path.
//!
//! As a `cdylib` it is the driver. As a library it is how a test gets one: [`install`](install()) puts it into a
//! private directory under the driver's names, with or without certain functions, and [`Control`] steers it.
//!
//! It imitates what the driver documents, also where that is unpleasant, and where a behaviour is unknown it takes the
//! harsher one. Everything else about it comes from the environment, which is read at the first call:
//!
//! | variable | meaning | default |
//! |---|---|---|
//! | `HAULIER_SIM_DEVICES` | devices of the machine; 0 for none | 2 |
//! | `HAULIER_SIM_SEED` | which machine it is: processes with the same seed agree on UUIDs and can share memory | 0 |
//! | `HAULIER_SIM_MEMORY` | bytes of memory of each device | 4 GiB |
//! | `CUDA_VISIBLE_DEVICES` | as the driver's: ordinals or `GPU-` UUIDs, ended by nonsense | all |
//! | `HAULIER_SIM_MODE` | see below | `normal` |
//! | `HAULIER_SIM_FAULTS` | see below | none |
//! | `HAULIER_SIM_UNBLOCK_FILE` | hanging calls go on once this file exists | none |
//! | `HAULIER_SIM_LOG` | a directory: each call is appended to `cuda-<pid>.jsonl` in it, one [`Call`] a line | none |
//! | `HAULIER_SIM_DRIVER_VERSION` | what cuDriverGetVersion answers | 12080 |
//! | `HAULIER_SIM_ATTRIBUTES` | device attributes that differ: `115=0,103=0` | none |
//! | `HAULIER_SIM_REGISTER_MAX`, `_ALIGN` | limits on one host registration | none, 1 |
//! | `HAULIER_SIM_REGISTER_PAGES` | 1: registrations that share a page overlap | 0 |
//! | `HAULIER_SIM_POINTER_QUERY_ANYWHERE` | 1: pointer attributes need no current context | 0 |
//! | `HAULIER_SIM_UNBOUND_EVENT_ABORTS` | 1: cuEventQuery without a context ends the process; 0: 201 | 1 |
//! | `HAULIER_SIM_PEER` | 1: devices can access each other | 0 |
//!
//! A mode is what the whole driver does: `normal`, `no-device` (cuInit answers 100), `stub` (everything answers 34),
//! `unloaded` (4), `unknown` (9999, which is no status), or a number that everything answers with. When the process
//! exits after cuInit the mode becomes `unloaded`, and a forked child's driver answers 3.
//!
//! Faults go by the exported name, separated by commas: `cuMemAlloc_v2:3=2` is the third call from when it was planned,
//! `cuMemAlloc_v2:3+=2` every call from the third on, `cuMemAlloc_v2=2` every call. With `hang` in place of a status
//! the call does not return until it is let go, and then does what it should. With 0 it succeeds and does nothing.
//!
//! The functions `haulier_sim_*` of the library, which [`Control`] wraps, let a test hold streams, queue work that
//! fills memory, look past the driver at memory, read the log and plan faults.

mod abi;
mod context;
mod controls;
mod copy;
mod device;
mod errors;
mod event;
mod gate;
mod host;
mod install;
mod ipc;
mod memory;
mod pointer;
mod settings;
mod sim;
mod stream;
mod vmm;

pub use haulier_sim::{control::Control, log::Call};
use haulier_sim::{faults, log};
pub use install::{install, library};
