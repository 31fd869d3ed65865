//! One error for every backend: a neutral kind to branch on, the vendor's own code and words beside it.

use std::{borrow::Cow, fmt, sync::Arc};

use serde::{Deserialize, Serialize};

/// A result whose error is [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong, in words that mean the same on every backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Kind {
    /// The backend's library, driver or hardware is not on this machine.
    NotPresent,
    /// The driver is unloading, as it does at process exit.
    ShutDown,
    /// The device is not current on the calling thread.
    NotBound,
    /// The driver offers no way to give this thread back as it was; the work belongs on an owned worker.
    CannotRestore,
    /// No device has this id or UUID.
    InvalidDevice,
    /// The memory lives on another device than the one asked to handle it.
    DeviceMismatch,
    /// An argument breaks a stated rule (alignment, size, a null address).
    InvalidArgument,
    /// An offset and length reach outside their allocation.
    InvalidRange,
    /// The stream is being captured into a graph; waiting for it would spoil the capture.
    StreamCapturing,
    /// The stream means something else on this thread than where it was captured.
    WrongThread,
    /// The region overlaps a registered one without being equal to it.
    Overlap,
    /// There is no such registration.
    NotRegistered,
    /// The driver refuses to open an exported handle here.
    ImportRefused,
    /// Not enough memory.
    OutOfMemory,
    /// The deadline passed first.
    Timeout,
    /// The capability is not there; its flag in [`Caps`](crate::Caps) is clear.
    Unsupported,
    /// Any other answer of the driver; see the vendor code.
    Driver,
}

impl Kind {
    /// The kind as a short, stable word for logs and metrics.
    pub fn label(self) -> &'static str {
        match self {
            Kind::NotPresent => "not_present",
            Kind::ShutDown => "shut_down",
            Kind::NotBound => "not_bound",
            Kind::CannotRestore => "cannot_restore",
            Kind::InvalidDevice => "invalid_device",
            Kind::DeviceMismatch => "device_mismatch",
            Kind::InvalidArgument => "invalid_argument",
            Kind::InvalidRange => "invalid_range",
            Kind::StreamCapturing => "stream_capturing",
            Kind::WrongThread => "wrong_thread",
            Kind::Overlap => "overlap",
            Kind::NotRegistered => "not_registered",
            Kind::ImportRefused => "import_refused",
            Kind::OutOfMemory => "out_of_memory",
            Kind::Timeout => "timeout",
            Kind::Unsupported => "unsupported",
            Kind::Driver => "driver",
        }
    }

    fn sentence(self) -> &'static str {
        match self {
            Kind::NotPresent => "the backend is not present on this machine",
            Kind::ShutDown => "the driver is shutting down",
            Kind::NotBound => "the device is not current on this thread; bind it first",
            Kind::CannotRestore => "this thread could not be given back as it was; use an owned worker",
            Kind::InvalidDevice => "there is no such device",
            Kind::DeviceMismatch => "the memory belongs to another device",
            Kind::InvalidArgument => "an argument is not acceptable",
            Kind::InvalidRange => "the range reaches outside its allocation",
            Kind::StreamCapturing => "the stream is being captured; end the capture first",
            Kind::WrongThread => "a per-thread stream can only be waited for on its own thread",
            Kind::Overlap => "the region overlaps a registered one; register it whole or separately",
            Kind::NotRegistered => "the region is not registered",
            Kind::ImportRefused => "the driver refuses to open this handle here",
            Kind::OutOfMemory => "out of memory",
            Kind::Timeout => "the deadline passed",
            Kind::Unsupported => "the backend cannot do this here",
            Kind::Driver => "the driver reported an error",
        }
    }
}

/// An error of a backend. Always prints a full sentence, also when the vendor gave no text.
///
/// Boxed, so that a `Result` stays small on the fast path.
#[derive(Clone, Serialize, Deserialize)]
pub struct Error(Box<Inner>);

#[derive(Clone, Serialize, Deserialize)]
struct Inner {
    kind: Kind,
    op: Cow<'static, str>,
    backend: Cow<'static, str>,
    device: Option<Cow<'static, str>>,
    vendor_code: Option<i64>,
    vendor_text: Option<String>,
    detail: Option<Cow<'static, str>>,
    #[serde(skip)]
    source: Option<Arc<dyn std::error::Error + Send + Sync>>,
}

impl Error {
    /// An error of `kind` in operation `op` of `backend`.
    pub fn new(kind: Kind, backend: &'static str, op: &'static str) -> Self {
        Error(Box::new(Inner {
            kind,
            op: op.into(),
            backend: backend.into(),
            device: None,
            vendor_code: None,
            vendor_text: None,
            detail: None,
            source: None,
        }))
    }

    /// Names the device.
    pub fn on(mut self, device: impl fmt::Display) -> Self {
        self.0.device = Some(device.to_string().into());
        self
    }

    /// Keeps the vendor's number and, where there is one, its text.
    pub fn vendor(mut self, code: impl Into<i64>, text: Option<&str>) -> Self {
        self.0.vendor_code = Some(code.into());
        self.0.vendor_text = text.map(str::trim).filter(|t| !t.is_empty()).map(str::to_owned);
        self
    }

    /// Adds what the reader needs to mend it: the cause, the values, the remedy.
    pub fn detail(mut self, text: impl Into<Cow<'static, str>>) -> Self {
        self.0.detail = Some(text.into());
        self
    }

    /// Keeps the error below. It does not travel to another process.
    pub fn with_source(mut self, source: impl std::error::Error + Send + Sync + 'static) -> Self {
        self.0.source = Some(Arc::new(source));
        self
    }

    /// What to branch on.
    pub fn kind(&self) -> Kind {
        self.0.kind
    }

    /// The operation that failed, such as `sync_stream`.
    pub fn op(&self) -> &str {
        &self.0.op
    }

    /// The backend's name, such as `cpu`.
    pub fn backend(&self) -> &str {
        &self.0.backend
    }

    /// The device, where one was involved.
    pub fn device(&self) -> Option<&str> {
        self.0.device.as_deref()
    }

    /// The vendor's number: an integer, since newer drivers know codes that older bindings do not.
    pub fn vendor_code(&self) -> Option<i64> {
        self.0.vendor_code
    }

    /// The vendor's text, if it gave any.
    pub fn vendor_text(&self) -> Option<&str> {
        self.0.vendor_text.as_deref()
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let e = &*self.0;
        write!(f, "{} ", e.backend)?;
        if let Some(device) = &e.device {
            write!(f, "device {device}: ")?;
        }
        write!(f, "{}: {}", e.op, e.kind.sentence())?;
        if let Some(detail) = &e.detail {
            write!(f, ": {detail}")?;
        }
        match (e.vendor_code, &e.vendor_text) {
            (Some(code), Some(text)) => write!(f, " [vendor code {code}: {text}]"),
            (Some(code), None) => write!(f, " [vendor code {code}, no text]"),
            (None, Some(text)) => write!(f, " [vendor: {text}]"),
            (None, None) => Ok(()),
        }
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "hal::Error({:?}: {self})", self.0.kind)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.source.as_deref().map(|e| e as _)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_vendor_message_still_gives_a_full_sentence() {
        let e = Error::new(Kind::Driver, "ascend", "register").on("1").vendor(507899, Some("  "));
        assert_eq!(
            e.to_string(),
            "ascend device 1: register: the driver reported an error [vendor code 507899, no text]"
        );
    }

    #[test]
    fn code_text_and_kind_survive_the_wire() {
        let e = Error::new(Kind::ImportRefused, "cuda", "import_ipc").vendor(205, Some("map failed"));
        let there = over_the_wire(&e);
        assert_eq!((there.kind(), there.vendor_code()), (Kind::ImportRefused, Some(205)));
        assert_eq!(there.to_string(), e.to_string());
    }

    fn over_the_wire(e: &Error) -> Error {
        postcard::from_bytes(&postcard::to_stdvec(e).unwrap()).unwrap()
    }
}
