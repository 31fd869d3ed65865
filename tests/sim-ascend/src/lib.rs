//! A simulated `libascendcl.so`: the C ABI of Ascend's runtime in front of the strict machine of `backend-cpu`, so that
//! the real Ascend backend, and Mooncake's own library for NPUs, run where there is no NPU. For tests only; nothing looks
//! for it on a user's path.
//!
//! As a `cdylib` it is the runtime. As a library it is how a test gets one: [`install`](install()) puts it into a
//! private directory, with or without certain functions, [`install_adxl`] puts CANN's C++ libraries beside it as far as
//! Mooncake needs them, and [`Control`] steers it.
//!
//! It imitates what the runtime does, also where that is unpleasant, and where a behaviour is unknown it takes the
//! harsher one. Everything else about it comes from the environment, which is read at the first call:
//!
//! | variable | meaning | default |
//! |---|---|---|
//! | `HAULIER_SIM_CANN` | the release of CANN that it behaves as, see below | 9.0.0 |
//! | `HAULIER_SIM_DEVICES` | devices of the machine; 0 for none | 2 |
//! | `HAULIER_SIM_MOUNTED` | physical ids of the devices in this container, in the order of their logical ids | all |
//! | `ASCEND_RT_VISIBLE_DEVICES` | as the runtime's: logical ids, in the order of their user ids | all |
//! | `HAULIER_SIM_SEED` | which machine it is: processes with the same seed can share memory | 0 |
//! | `HAULIER_SIM_MEMORY` | bytes of memory of each device | 4 GiB |
//! | `HAULIER_SIM_SOC` | what aclrtGetSocName answers; with `Ascend950…` pointers can be asked about at once | Ascend910B3 |
//! | `HAULIER_SIM_MODE` | see below | `normal` |
//! | `HAULIER_SIM_FAULTS` | see below | none |
//! | `HAULIER_SIM_UNBLOCK_FILE` | hanging calls go on once this file exists | none |
//! | `HAULIER_SIM_LOG` | a directory: each call is appended to `ascend-<pid>.jsonl` in it, one [`Call`] a line | none |
//! | `HAULIER_SIM_PID_OFFSET` | how far aclrtDeviceGetBareTgid is from getpid, as in a container | 1000000 |
//! | `HAULIER_SIM_PEER` | 0: devices cannot access each other | 1 |
//! | `HAULIER_SIM_FABRIC` | 1: there are shareable handles of 128 bytes | 0 |
//! | `HAULIER_SIM_ERROR_TEXT` | 0: aclGetRecentErrMsg is always null | 1 |
//! | `HAULIER_SIM_OLD_DRIVER` | 1: memory that the runtime does not know is called host memory | 0 |
//! | `HAULIER_SIM_REGISTER_PINNED_ONLY` | 1: only memory of aclrtMallocHost is registered, as on old kernels | 0 |
//! | `HAULIER_SIM_MEMCPY_BATCH` | 0: aclrtMemcpyBatch answers 207000 | 1 |
//!
//! Before release 9 aclrtGetCurrentContext answers 0 and a null context on a thread that has none, imported memory is
//! called managed, and [`SINCE_9`] are not there: pass those to [`install`](install()), since the environment cannot
//! take a function away.
//!
//! A mode is what the whole runtime does: `normal`, `unloaded` (everything answers 507000), `unknown` (999999, which is
//! no status), or a number that everything answers with. When the process exits after it opened a device the mode becomes
//! `unloaded`, and a forked child's runtime answers 507899.
//!
//! Faults go by the exported name, separated by commas: `aclrtMalloc:3=207001` is the third call from when it was
//! planned, `aclrtMalloc:3+=207001` every call from the third on, `aclrtMalloc=207001` every call. With `hang` in place
//! of a status the call does not return until it is let go, and then does what it should. With 0 it succeeds and does
//! nothing.
//!
//! The functions `haulier_sim_*` of the library, which [`Control`] wraps, let a test hold streams, queue work that
//! fills memory, look past the runtime at memory, read the log and plan faults.

mod abi;
mod adxl;
mod context;
mod control;
mod controls;
mod copy;
mod device;
mod error;
mod event;
mod gate;
mod host;
mod init;
mod install;
mod ipc;
mod memory;
mod pointer;
mod record;
mod settings;
mod sim;
mod stream;
mod vmm;

pub use control::Control;
pub use haulier_sim::log::Call;
pub use install::{install, install_adxl, library};

/// Functions that no release before 9.0 has.
pub const SINCE_9: &[&str] = &["aclrtMemGetAddressRange", "aclrtReserveMemAddressNoUCMemory"];
