//! Haulier hauls tensors between accelerator memory and a key-value store.

pub mod arrow;
mod client;
pub mod devices;
mod engine;
mod error;
pub mod node;
mod payload;
mod retry;
mod shm;
pub mod store;
mod tensor;
mod wire;

pub use client::{Options, Progress, StoreClient};
pub use devices::AnyDevice;
pub use engine::{Description, Engine, PoolBuffer, View};
pub use error::{Error, Result};
pub use hal;
pub use payload::{KEY_MAX, Payload, Target};
pub use store::{Mode, Put, Stat};
pub use tensor::{Dtype, NDIM_MAX, Shard, Tensor, TensorMut, TensorRef, TensorSpec, TensorView};
pub use wire::{Fallback, Path};
