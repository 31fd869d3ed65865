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
//!
//! # The way of a request
//!
//! ```text
//! client (a thread that has the line)              daemon (the session's thread)
//!  1  encode the frame                              a  take a record, copied out of the ring
//!  2  push: the record, then `written` (Release)    b  decode, check, do it
//!  3  fence; the daemon sleeps? one byte by the     c  push the answer; fence; the client sleeps?
//!     socket                                           one byte by the socket
//!  4  look at `written` of the answers for a while  d  look for the next request for a while
//!  5  `asleep` := 1, fence, look once more, and     e  as 5
//!     sleep in a receive from the socket
//! ```
//!
//! Of the fences in 3 and 5 one comes first: either the producer sees that the consumer sleeps, or the consumer sees the
//! message in its last look. So no wake-up is lost, and while nothing is said both sleep in the kernel without a timer.
//! While both are awake a message costs no system call. `ring::models` runs this under loom, with the fences and without.
//!
//! - **Large values** never pass: a put writes into memory that was granted before, and its one message is the commit, which
//!   brings the grant for the next put of that size.
//! - **Descriptors** ride beside a bell that is sent before the message, whose head says so.
//! - **Lies**: each end keeps its own positions to itself, reads each word of the peer's once, checks it, and copies a record
//!   out before it is decoded. A claim that cannot be ends the connection with an error that says so.
//! - **Death**: the socket's end wakes who sleeps there, and what was said before it is still taken. A daemon that ends a
//!   client which never stops asking looks at that before each message.
//! - **A fork**: the child has the mapping and the socket, and is refused before it comes to use them (`crate::fork`).

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
