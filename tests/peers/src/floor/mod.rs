//! The floor: a bare store between two processes. A server with an arena that the client maps once, touched at start, a
//! hash index, and three ways to ask it for something: a Unix socket, a futex, a mailbox that both poll for a while. No
//! eviction, no holds, no crash safety: whatever a real store adds costs something beside it.
//!
//! A put is one message: the client writes into a slot that was granted with the answer before, and the server seals it
//! there. A get asks where the value lies, or reads the index, which is shared, by itself.

mod client;
mod mailbox;
mod message;
mod server;
mod shared;

pub use client::{Floor, FloorServer, Way};
pub use server::serve;
