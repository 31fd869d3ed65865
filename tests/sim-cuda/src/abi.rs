//! What crosses the C boundary: pointers of the caller's, statuses, and the shape of an exported function.

use std::ffi::{CStr, c_char, c_void};

use backend_cpu::strict::Refusal;

/// A refused call: the driver's number, and for the log what led to it.
#[derive(Debug)]
pub(crate) struct Refused {
    pub(crate) code: i32,
    pub(crate) why: String,
}

/// What a function's body answers with.
pub(crate) type Answer<T = ()> = Result<T, Refused>;

/// A refusal with this number.
pub(crate) fn refused<T>(code: i32, why: impl Into<String>) -> Answer<T> {
    Err(Refused { code, why: why.into() })
}

impl From<Refusal> for Refused {
    fn from(refusal: Refusal) -> Self {
        Refused { code: i32::try_from(refusal.code).unwrap_or(status::UNKNOWN), why: refusal.text }
    }
}

/// The driver's numbers that the simulator itself gives.
pub(crate) mod status {
    pub(crate) const SUCCESS: i32 = 0;
    pub(crate) const INVALID_VALUE: i32 = 1;
    pub(crate) const OUT_OF_MEMORY: i32 = 2;
    pub(crate) const NOT_INITIALIZED: i32 = 3;
    pub(crate) const DEINITIALIZED: i32 = 4;
    pub(crate) const STUB_LIBRARY: i32 = 34;
    pub(crate) const NO_DEVICE: i32 = 100;
    pub(crate) const INVALID_DEVICE: i32 = 101;
    pub(crate) const INVALID_CONTEXT: i32 = 201;
    pub(crate) const MAP_FAILED: i32 = 205;
    pub(crate) const PEER_ACCESS_UNSUPPORTED: i32 = 217;
    pub(crate) const INVALID_HANDLE: i32 = 400;
    pub(crate) const NOT_FOUND: i32 = 500;
    pub(crate) const NOT_READY: i32 = 600;
    pub(crate) const PEER_ACCESS_NOT_ENABLED: i32 = 705;
    pub(crate) const PRIMARY_CONTEXT_ACTIVE: i32 = 708;
    pub(crate) const CONTEXT_IS_DESTROYED: i32 = 709;
    pub(crate) const HOST_MEMORY_NOT_REGISTERED: i32 = 713;
    pub(crate) const NOT_PERMITTED: i32 = 800;
    pub(crate) const NOT_SUPPORTED: i32 = 801;
    pub(crate) const UNKNOWN: i32 = 999;
}

/// Where the caller wants an answer. Only the C ABI makes one.
#[derive(Debug)]
#[repr(transparent)]
pub(crate) struct Out<T>(*mut T);

// Derived, these would ask for a `T` that is `Copy` too.
impl<T> Clone for Out<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Out<T> {}

impl<T> Out<T> {
    /// Writes the answer; a null pointer is an invalid value.
    pub(crate) fn set(self, value: T) -> Answer {
        if self.is_null() {
            refused(status::INVALID_VALUE, "a null result pointer")
        } else {
            self.offer(value)
        }
    }

    /// Writes the answer where it is wanted.
    pub(crate) fn offer(self, value: T) -> Answer {
        if !self.is_null() {
            // SAFETY: by the driver's contract a pointer that is not null is good for one unaligned `T`.
            unsafe { self.0.write_unaligned(value) };
        }
        Ok(())
    }

    pub(crate) fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// Writes consecutive answers.
    pub(crate) fn set_all(self, values: &[T]) -> Answer
    where
        T: Copy,
    {
        if self.is_null() {
            return refused(status::INVALID_VALUE, "a null result pointer");
        }
        for (at, &value) in values.iter().enumerate() {
            // SAFETY: the caller gave room for as many as it asked for.
            unsafe { self.0.add(at).write_unaligned(value) };
        }
        Ok(())
    }
}

impl<T: Copy> Out<T> {
    /// What stands there, for arguments that go both ways.
    pub(crate) fn get(self) -> Answer<T> {
        In(self.0.cast_const()).get()
    }
}

/// Untyped room for an answer, whose type another argument decides.
#[derive(Debug, Clone, Copy)]
#[repr(transparent)]
pub(crate) struct OutAny(*mut c_void);

impl OutAny {
    pub(crate) fn of<T>(self) -> Out<T> {
        Out(self.0.cast())
    }
}

/// What the caller passes by pointer. Only the C ABI makes one.
#[derive(Debug, Clone, Copy)]
#[repr(transparent)]
pub(crate) struct In<T>(*const T);

impl<T: Copy> In<T> {
    pub(crate) fn get(self) -> Answer<T> {
        if self.0.is_null() {
            return refused(status::INVALID_VALUE, "a null argument");
        }
        // SAFETY: by the driver's contract a pointer that is not null is good for one unaligned `T`.
        Ok(unsafe { self.0.read_unaligned() })
    }

    pub(crate) fn get_all(self, count: usize) -> Answer<Vec<T>> {
        if self.0.is_null() && count > 0 {
            return refused(status::INVALID_VALUE, "a null argument");
        }
        // SAFETY: the caller says that there are so many.
        Ok((0..count).map(|at| unsafe { self.0.add(at).read_unaligned() }).collect())
    }
}

/// A C string of the caller's.
#[derive(Debug, Clone, Copy)]
#[repr(transparent)]
pub(crate) struct Text(*const c_char);

impl Text {
    pub(crate) fn get(self) -> Answer<String> {
        if self.0.is_null() {
            return refused(status::INVALID_VALUE, "a null string");
        }
        // SAFETY: by the contract of every function that takes one it ends with a nul.
        Ok(unsafe { CStr::from_ptr(self.0) }.to_string_lossy().into_owned())
    }
}

/// A function of the caller's, for work that runs later.
pub(crate) type HostFn = Option<extern "C" fn(*mut c_void)>;

/// Defines the driver's functions. Each has a name, its C arguments, in brackets what the log says that it is about,
/// and a body that answers with a status. What every call has in common is [`gate::enter`](crate::gate::enter).
macro_rules! driver {
    ($(
        $(#[$meta:meta])*
        fn $name:ident($($arg:ident: $ty:ty),* $(,)?) [$about:expr] |$sim:pat_param| $body:expr;
    )*) => {$(
        $(#[$meta])*
        #[unsafe(no_mangle)]
        extern "C" fn $name($($arg: $ty),*) -> i32 {
            let body = move |$sim: &'static $crate::sim::Sim| -> $crate::abi::Answer { $body };
            $crate::gate::enter(stringify!($name), $about, body)
        }
    )*};
}
pub(crate) use driver;
