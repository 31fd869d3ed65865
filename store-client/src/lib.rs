//! Haulier hauls tensors between accelerator memory and a key-value store.
//!
//! [`StoreClient`] is where to begin. It is generic over the device whose memory it hauls and works on one of
//! three [`Engine`]s: a store inside the process, the node daemon of this host, or a Mooncake cluster of many hosts (with
//! the feature `mooncake`).
//!
//! What makes it different is the [`arrow`]: a thread without the device's context cannot touch its memory, and a payload
//! cannot be sent before the work that writes it is done. Both hold by type, on every path.
//!
//! | module | what it holds |
//! |---|---|
//! | [`arrow`] | the five steps from the caller's memory to the engine |
//! | [`store`] | the bytes and the index: pool, arenas, namespaces, eviction |
//! | [`node`] | the daemon: one process per host that owns the memory |
//! | [`devices`] | the backends that are compiled in |
//! | [`hal`] | the device contract |
#![cfg_attr(doctest, doc = include_str!("../../README.md"))]

#[cfg(test)]
mod alone;
pub mod arrow;
mod client;
pub mod devices;
mod engine;
mod error;
mod fork;
mod index;
mod metrics;
pub mod node;
mod payload;
mod retry;
mod shm;
pub mod store;
mod streaming;
mod tensor;
mod wire;

pub use client::{Options, Progress, Registered, StoreClient};
pub use devices::AnyDevice;
#[cfg(feature = "mooncake")]
pub use engine::mooncake::Mooncake;
pub use engine::{Description, Engine, PoolBuffer, View};
pub use error::{Error, Result};
pub use hal;
pub use payload::{KEY_MAX, Payload, Target};
pub use store::{Mode, Put, Stat};
pub use tensor::{Dtype, NDIM_MAX, Shard, Tensor, TensorMut, TensorRef, TensorSpec, TensorView};
pub use wire::{Fallback, Path};
