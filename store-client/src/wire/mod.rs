//! What a client and the node daemon say to each other.
//!
//! One Unix socket of type SEQPACKET per client: every message is whole, descriptors ride beside the message they belong
//! to, and the socket's end is the death signal. A message is a [`Frame`] or an [`Answer`] in postcard form; every
//! length, offset and identifier is 64-bit. Large values never travel here: they lie in shared memory, and
//! messages only name them.

mod message;
mod socket;

pub(crate) use message::*;
pub use message::{Fallback, Path};
pub(crate) use socket::Socket;
