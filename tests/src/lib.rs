//! Placeholder.

pub mod process;
pub mod world;
pub mod backends;
pub mod conformance;
pub mod fixture;
pub mod peer;
pub mod rig;
