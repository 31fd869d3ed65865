//! Haulier beside other stores, and beside the floors under all of them, interleaved in one run.
//!
//! Every store is asked to do the same calls with values of the same sizes, in turns, so that whatever else the machine
//! does hits all of them. Nothing is timed before its bytes were found right once.
//!
//! | module | what it holds |
//! |---|---|
//! | [`job`] | operations, shapes, and the memory that values come from and go to |
//! | [`store`] | what every store must be able to do, and how its calls are checked and timed |
//! | [`stores`] | memcpy, the floors, Haulier, Redis, memcached |
//! | [`mooncake`] | a cluster, Mooncake's own client in this process, and Haulier's engine for it |
//! | [`worker`] | stores whose clients are Python's, in processes of their own |
//! | [`floor`] | the bare store: an arena, an index, and three ways to ask for a slot |
//! | [`run`] | the rounds |
//! | [`network`] | a network of this process alone |
//! | [`report`], [`chart`] | what comes out |
//! | [`scale`] | many clients of Haulier's daemon at once |

pub mod chart;
pub mod child;
pub mod failure;
pub mod floor;
pub mod job;
pub mod machine;
pub mod mooncake;
pub mod network;
pub mod report;
pub mod run;
pub mod scale;
pub mod store;
pub mod stores;
pub mod worker;
