//! What a client and the node daemon say to each other.
//!
//! A message is a [`Frame`] or an [`Answer`] in postcard form; every length, offset and identifier is 64-bit. Large values
//! never travel here: they lie in shared memory, and messages only name them.
//!
//! | module | what it is |
//! |---|---|
//! | `message` | the messages |
//! | `socket` | one Unix socket of type SEQPACKET per client: messages whole, descriptors beside them, its end the death signal |
//! | `ring` | memory that both share, by which messages go without a call of the kernel |
//! | `link` | the two together: what a connection sends and receives by |
//!
//! A client connects, says hello and asks for a ring, all by the socket; from then on every message goes by the ring. The
//! socket stays for what the ring cannot do: waking one that sleeps, passing descriptors, and dying.

mod link;
mod message;
mod ring;
mod socket;

pub(crate) use link::Link;
pub(crate) use message::*;
pub use message::{Fallback, Path};
pub(crate) use ring::Ring;
#[cfg(test)]
pub(crate) use ring::words as ring_words;
pub(crate) use socket::Socket;
