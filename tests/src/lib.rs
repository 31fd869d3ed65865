//! What the tests of the workspace are made of: the conformance suite, rigs, real processes.

pub mod ascend;
pub mod backends;
pub mod conformance;
pub mod cuda;
pub mod fixture;
pub mod gate;
pub mod mix;
pub mod mooncake;
pub mod node;
pub mod peer;
pub mod process;
pub mod proof;
pub mod rig;
pub mod simulated;
pub mod world;
