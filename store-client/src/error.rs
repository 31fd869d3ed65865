//! What a call on the store can answer besides success. One list for every engine; it crosses the wire as it is.

use serde::{Deserialize, Serialize};

/// A result whose error is [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a call, or one slot of a batch, did not do what was asked.
#[derive(Debug, Clone, thiserror::Error, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Error {
    /// Nothing is stored under the key. An empty value is not this: it is a value of length 0.
    #[error("nothing is stored under this key")]
    NotFound,
    /// The destination is shorter than the value.
    #[error("the destination is too small: the value has {need} bytes")]
    TooSmall {
        /// Bytes that the value has.
        need: u64,
    },
    /// The store has no room and may not evict.
    #[error(
        "the store is full: {free} bytes are free, the largest piece has {largest}; remove values, unpin, or serve a larger pool"
    )]
    Full {
        /// Bytes that are free in all.
        free: u64,
        /// Bytes in the largest free piece.
        largest: u64,
    },
    /// The value can never fit, whatever is evicted.
    #[error("{size} bytes can never fit: the limit is {limit}")]
    TooLarge {
        /// Bytes asked for.
        size: u64,
        /// The largest value possible.
        limit: u64,
    },
    /// The key is empty or too long.
    #[error("the key has {len} bytes; a key has 1 to {limit}")]
    InvalidKey {
        /// Bytes of the key.
        len: u64,
        /// The longest key possible.
        limit: u64,
    },
    /// An offset and length reach outside of what they refer to.
    #[error("offset {offset} with length {len} is outside of what was granted ({limit} bytes)")]
    InvalidRange {
        /// Where the range starts.
        offset: u64,
        /// Its bytes.
        len: u64,
        /// Bytes of what it should lie in.
        limit: u64,
    },
    /// An argument breaks a stated rule.
    #[error("{what}")]
    InvalidArgument {
        /// The rule, and what was given.
        what: String,
    },
    /// A destination overlaps another of the same batch, or a registered region in part.
    #[error("the region overlaps another one of this call or a registered one")]
    Overlap,
    /// A strided tensor that cannot be gathered where it lives.
    #[error("the tensor is not contiguous and cannot be gathered where it lives; make it contiguous first")]
    NonContiguous,
    /// The stored or given description of a tensor contradicts itself or its bytes.
    #[error("not a valid tensor: {reason}")]
    InvalidTensor {
        /// The contradiction.
        reason: String,
    },
    /// The deadline passed. What a put did by then is not known unless the operation says so.
    #[error("{op} did not finish before its deadline")]
    Timeout {
        /// What was being done.
        op: String,
    },
    /// The engine, node or device cannot do this.
    #[error("not supported here: {what}")]
    Unsupported {
        /// What was asked.
        what: String,
    },
    /// The memory belongs to another device than the client's.
    #[error("the memory is on device {found}, the client works on {expected}; use a client of that device")]
    DeviceMismatch {
        /// The client's device.
        expected: String,
        /// The device of the memory.
        found: String,
    },
    /// The caller's stream is being captured into a graph.
    #[error("the stream is being captured; end the capture before this call")]
    StreamCapturing,
    /// Nothing of the batch was sent, because the check or the synchronisation failed.
    #[error("nothing was sent: {cause}")]
    NotSent {
        /// What failed.
        cause: Box<Error>,
    },
    /// A bounded helper resource (staging memory, holds, descriptors, connections) is used up for now.
    #[error("{what} is exhausted for now; retry, or raise its limit")]
    ResourceExhausted {
        /// The resource.
        what: String,
    },
    /// Memory could not be had.
    #[error("{asked} bytes of memory cannot be had; {available} are available")]
    OutOfMemory {
        /// Bytes asked for.
        asked: u64,
        /// Bytes that could be had, as far as known.
        available: u64,
    },
    /// A daemon already serves this socket.
    #[error("a node daemon already serves this socket (pid {pid}); stop it or use another --socket")]
    AlreadyRunning {
        /// Its process id.
        pid: u32,
    },
    /// The daemon cannot be reached.
    #[error("no node daemon answers at {socket}: {reason}; start one with `haulier serve`")]
    Unreachable {
        /// The socket's path.
        socket: String,
        /// The operating system's reason.
        reason: String,
    },
    /// The daemon went away after it was sent a value and before it answered. A put that is not an upsert is not sent
    /// again then, unless the daemon has restarted and its memory is gone.
    #[error(
        "the node daemon went away before it answered ({reason}); whether the value was stored is not known"
    )]
    Disconnected {
        /// How it showed.
        reason: String,
    },
    /// The peer broke the protocol, or speaks another version of it.
    #[error("protocol error: {reason}")]
    Protocol {
        /// What was wrong.
        reason: String,
    },
    /// The client was closed.
    #[error("the client is closed")]
    Closed,
    /// The client was opened before a fork and is used in the child.
    #[error("this client was opened in process {opened_in} and does not survive a fork; open a new one here")]
    ForkedProcess {
        /// The process that opened it.
        opened_in: u32,
    },
    /// The device refused.
    #[error(transparent)]
    Device(hal::Error),
    /// Mooncake refused; with its code, and what its source says that the code means.
    #[error(transparent)]
    Mooncake(hal::Error),
    /// The operating system refused.
    #[error("{what}: {reason}")]
    Os {
        /// What was being done.
        what: String,
        /// The operating system's words.
        reason: String,
        /// Its error number.
        errno: Option<i32>,
    },
}

impl Error {
    /// The error as a short, stable word for programs, in metrics and in the command's JSON. One that only wraps another
    /// has the other's: `NotSent` its cause's, `Device` the kind of what the device said.
    pub fn label(&self) -> &'static str {
        match self {
            Error::NotFound => "not_found",
            Error::TooSmall { .. } => "too_small",
            Error::Full { .. } => "full",
            Error::TooLarge { .. } => "too_large",
            Error::InvalidKey { .. } => "invalid_key",
            Error::InvalidRange { .. } => "invalid_range",
            Error::InvalidArgument { .. } => "invalid_argument",
            Error::Overlap => "overlap",
            Error::NonContiguous => "non_contiguous",
            Error::InvalidTensor { .. } => "invalid_tensor",
            Error::Timeout { .. } => "timeout",
            Error::Unsupported { .. } => "unsupported",
            Error::DeviceMismatch { .. } => "device_mismatch",
            Error::StreamCapturing => "stream_capturing",
            Error::NotSent { cause } => cause.label(),
            Error::ResourceExhausted { .. } => "resource_exhausted",
            Error::OutOfMemory { .. } => "out_of_memory",
            Error::AlreadyRunning { .. } => "already_running",
            Error::Unreachable { .. } => "unreachable",
            Error::Disconnected { .. } => "disconnected",
            Error::Protocol { .. } => "protocol",
            Error::Closed => "closed",
            Error::ForkedProcess { .. } => "forked_process",
            Error::Device(e) => e.kind().label(),
            Error::Mooncake(e) => match e.vendor_code() {
                Some(-200) => "full",
                Some(-900 | -901) => "unreachable",
                _ => e.kind().label(),
            },
            Error::Os { .. } => "os",
        }
    }
}

impl From<hal::Error> for Error {
    /// Gives the store's own names to what callers branch on; everything else keeps the device's.
    fn from(e: hal::Error) -> Self {
        match e.kind() {
            hal::Kind::StreamCapturing => Error::StreamCapturing,
            hal::Kind::Timeout => Error::Timeout { op: e.to_string() },
            _ => Error::Device(e),
        }
    }
}
