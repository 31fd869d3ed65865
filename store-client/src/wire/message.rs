//! The messages. Whatever arrives is from a peer and is checked by the receiver before use.

use hal::{DeviceUuid, IpcHandle, NotExportable};
use serde::{Deserialize, Serialize, Serializer};

use crate::{
    error::Result,
    store::{Mode, Put, Stat},
};

/// Spoken by both sides, or the connection is refused.
pub(crate) const VERSION: u32 = 2;

/// The longest message in bytes. Batches are cut to fit.
pub(crate) const MESSAGE_MAX: usize = 128 * 1024;

/// Values up to this many bytes may travel inside a message.
pub(crate) const INLINE_MAX: usize = 16 * 1024;

/// The most descriptors beside a message, of all that is in it; the kernel's limit is 253.
pub(crate) const MESSAGE_DESCRIPTORS_MAX: usize = 240;

/// The most slots of a message. Each then has room for its verdict and a usual description; where a batch still does not
/// fit, its later slots answer [`Error::ResourceExhausted`](crate::Error::ResourceExhausted) and are asked for again.
pub(crate) const SLOTS_MAX: usize = 1024;

/// A request. The answer bears the same `id`; `id` 0 asks for no answer.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Frame<'a> {
    pub(crate) id: u64,
    #[serde(borrow)]
    pub(crate) request: Request<'a>,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Request<'a> {
    /// The first message of a connection.
    Hello {
        version: u32,
        namespace: &'a str,
        device: DeviceUuid,
    },
    /// Asks for an arena's read-only descriptor.
    Arena {
        id: u64,
    },
    /// Asks for memory to write into, one grant for each length. `unless` has a key for each length or is empty: for what
    /// is stored already nothing is reserved, so that a put that keeps the old value evicts no other.
    Reserve {
        lens: Vec<u64>,
        #[serde(borrow)]
        unless: Vec<&'a str>,
    },
    /// Makes written grants into values, then reserves `ahead` bytes (0: none) for the next put if that costs nobody
    /// anything. A grant is used up by this, whatever the verdict.
    Commit {
        #[serde(borrow)]
        items: Vec<CommitItem<'a>>,
        mode: Mode,
        ahead: u64,
    },
    /// Gives grants back unused.
    Abandon {
        grants: Vec<u64>,
    },
    /// A small value, in the message.
    PutInline {
        key: &'a str,
        #[serde(serialize_with = "whole")]
        meta: &'a [u8],
        #[serde(serialize_with = "whole")]
        bytes: &'a [u8],
        mode: Mode,
        why: Fallback,
    },
    /// Values that the node copies out of the client's own memory. Descriptors beside, in the handles' order.
    PutIpc {
        handles: Vec<IpcHandle>,
        #[serde(borrow)]
        items: Vec<IpcItem<'a>>,
        mode: Mode,
    },
    /// Values that the node copies into the client's own memory; `len` is the destination's capacity.
    GetIpc {
        handles: Vec<IpcHandle>,
        #[serde(borrow)]
        items: Vec<IpcItem<'a>>,
    },
    /// Takes holds on values; one of up to `inline` bytes comes in the answer instead.
    Hold {
        #[serde(borrow)]
        keys: Vec<&'a str>,
        inline: u64,
    },
    /// Lets holds go.
    Release {
        holds: Vec<u64>,
    },
    Describe {
        #[serde(borrow)]
        keys: Vec<&'a str>,
    },
    Remove {
        #[serde(borrow)]
        keys: Vec<&'a str>,
    },
    RemovePrefix {
        prefix: &'a str,
    },
    SetPinned {
        #[serde(borrow)]
        keys: Vec<&'a str>,
        pinned: bool,
    },
    List {
        prefix: &'a str,
        after: Option<&'a str>,
        limit: u64,
    },
    Stat,
    /// The Prometheus text, from byte `offset` on: it may be longer than a message.
    Metrics {
        offset: u64,
    },
    /// Asks for shared memory by which all that follows goes.
    Ring,
    /// Asks for what it takes to read without requests.
    Index,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct CommitItem<'a> {
    pub(crate) grant: u64,
    pub(crate) key: &'a str,
    #[serde(serialize_with = "whole")]
    pub(crate) meta: &'a [u8],
    pub(crate) len: u64,
    pub(crate) path: Path,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct IpcItem<'a> {
    pub(crate) key: &'a str,
    #[serde(serialize_with = "whole")]
    pub(crate) meta: &'a [u8],
    /// Which of the message's handles.
    pub(crate) handle: u64,
    /// Where the region starts in that allocation.
    pub(crate) offset: u64,
    pub(crate) len: u64,
}

/// How a value's bytes came to the store or left it, for the counters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Path {
    /// The node opened the owner's memory and copied.
    Ipc,
    /// Copied through host memory, for this reason.
    Staging(Fallback),
    /// Written in place: nothing was copied.
    Alloc,
}

impl Path {
    /// The path as a short, stable word for logs and metrics.
    pub fn label(self) -> &'static str {
        match self {
            Path::Ipc => "ipc",
            Path::Staging(_) => "staging",
            Path::Alloc => "alloc",
        }
    }
}

/// Why a payload went by staging.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Fallback {
    /// The memory cannot be exported.
    NotExportable(NotExportable),
    /// The engine or node does not open memory of this device.
    NotNegotiated,
    /// The node tried to open the memory and its driver refused.
    ImportRefused,
}

impl Fallback {
    /// Plain host memory goes by staging as a rule, which deserves no warning.
    pub const HOST: Fallback = Fallback::NotExportable(NotExportable::HostMemory);

    /// The reason as a short, stable word for logs and metrics.
    pub fn label(self) -> &'static str {
        match self {
            Fallback::NotExportable(why) => why.label(),
            Fallback::NotNegotiated => "not_negotiated",
            Fallback::ImportRefused => "import_refused",
        }
    }
}

/// The answer to the request of the same `id`.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Answer<'a> {
    pub(crate) id: u64,
    #[serde(borrow)]
    pub(crate) reply: Reply<'a>,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Reply<'a> {
    /// To `Hello`.
    Welcome {
        version: u32,
        /// Differs from daemon to daemon: tells a restart from a broken connection.
        instance: u64,
        /// Whether the node opens memory of the client's device.
        imports: bool,
    },
    /// To `Arena`: its virtual length; the read-only descriptor is beside.
    Arena { len: u64 },
    /// To `Reserve`; `None` for a key that is stored already. The read-write descriptors of arenas that the client has not seen yet as a writer are beside, in the
    /// order of `arenas`.
    Reserved { grants: Vec<Result<Option<Granted>>>, arenas: Vec<ArenaInfo> },
    /// To `Commit`. `ahead` never lies in an arena that the client has not been given.
    Committed { slots: Vec<Result<Put>>, ahead: Option<Granted> },
    /// To `PutInline`.
    Put(Result<Put>),
    /// To `PutIpc`.
    Puts(Vec<Result<Put>>),
    /// To `GetIpc`.
    Gets {
        #[serde(borrow)]
        slots: Vec<Result<Described<'a>>>,
    },
    /// To `Hold`.
    Held {
        #[serde(borrow)]
        slots: Vec<Result<Held<'a>>>,
    },
    /// To `Describe`.
    Described {
        #[serde(borrow)]
        slots: Vec<Result<Described<'a>>>,
    },
    /// To `Remove` and `SetPinned`: whether each key was there.
    Found(Vec<Result<bool>>),
    /// To `RemovePrefix`, and to `Abandon` and `Release` where an answer is asked for: how many went.
    Removed(u64),
    /// To `List`.
    Listed {
        #[serde(borrow)]
        page: Vec<(&'a str, u64)>,
        /// Whether more follow after the last of them.
        more: bool,
    },
    /// To `Stat`.
    Stat(Box<Stat>),
    /// To `Index`, if there is one: the shared index, read-only, and the client's marks are beside.
    Index(Option<IndexInfo>),
    /// To `Metrics`: the text from the asked offset on, and how long it is in all.
    Metrics { text: &'a str, len: u64 },
    /// The request as a whole was refused.
    Refused(crate::Error),
    /// To `Ring`; its descriptor is beside.
    Ring,
}

/// Memory that the client may write: `capacity` bytes at `offset` of `arena`, until it commits or abandons `grant`.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct Granted {
    pub(crate) grant: u64,
    pub(crate) arena: u64,
    pub(crate) offset: u64,
    pub(crate) capacity: u64,
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct ArenaInfo {
    pub(crate) id: u64,
    pub(crate) len: u64,
}

/// What a client must know to read through the shared index.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct IndexInfo {
    /// Entries, which tell the layout.
    pub(crate) slots: u32,
    /// Of the keys' hash.
    pub(crate) seed: u64,
    /// The number of the client's namespace.
    pub(crate) space: u64,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Held<'a> {
    /// `len` bytes at `offset` of `arena` stay as they are until `hold` is released.
    Shared {
        hold: u64,
        arena: u64,
        offset: u64,
        len: u64,
        #[serde(serialize_with = "whole")]
        meta: &'a [u8],
    },
    /// The whole value.
    Inline {
        #[serde(serialize_with = "whole")]
        bytes: &'a [u8],
        #[serde(serialize_with = "whole")]
        meta: &'a [u8],
    },
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Described<'a> {
    pub(crate) len: u64,
    #[serde(serialize_with = "whole")]
    pub(crate) meta: &'a [u8],
}

/// Writes bytes in one piece: serde takes a slice for a sequence and would write them one by one. The form is the same.
fn whole<S: Serializer>(bytes: &&[u8], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_bytes(bytes)
}
