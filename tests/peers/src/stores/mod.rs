//! The stores that are called from this process.

mod haulier;
mod line;
mod memcached;
mod memcpy;
mod redis;

pub(crate) use self::haulier::{Calls, host, stored};
pub use self::{
    haulier::{HaulierHere, HaulierNode, Node, connect},
    memcached::Memcached,
    memcpy::{Fresh, Memcpy},
    redis::Redis,
};
