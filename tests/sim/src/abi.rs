//! What crosses the C boundary: pointers of the caller's, and how a call is refused.

use std::ffi::{CStr, c_char, c_void};

use backend_cpu::strict::Refusal;

/// A refused call.
#[derive(Debug)]
pub struct Refused {
    /// The vendor's number; `None` for a null pointer, for which each vendor has one of its own.
    pub code: Option<i32>,
    /// For the log, what led to it.
    pub why: String,
}

/// What a function's body answers with.
pub type Answer<T = ()> = Result<T, Refused>;

/// A refusal with this number.
pub fn refused<T>(code: i32, why: impl Into<String>) -> Answer<T> {
    Err(Refused { code: Some(code), why: why.into() })
}

/// The refusal of a null pointer.
pub fn null<T>(why: impl Into<String>) -> Answer<T> {
    Err(Refused { code: None, why: why.into() })
}

impl From<Refusal> for Refused {
    fn from(refusal: Refusal) -> Self {
        Refused { code: Some(i32::try_from(refusal.code).unwrap_or(i32::MAX)), why: refusal.text }
    }
}

/// Where the caller wants an answer. Only the C ABI makes one.
#[derive(Debug)]
#[repr(transparent)]
pub struct Out<T>(*mut T);

// Derived, these would ask for a `T` that is `Copy` too.
impl<T> Clone for Out<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Out<T> {}

impl<T> Out<T> {
    /// Writes the answer; a null pointer is an invalid value.
    pub fn set(self, value: T) -> Answer {
        if self.is_null() { null("a null result pointer") } else { self.offer(value) }
    }

    /// Writes the answer where it is wanted.
    pub fn offer(self, value: T) -> Answer {
        if !self.is_null() {
            // SAFETY: by the driver's contract a pointer that is not null is good for one unaligned `T`.
            unsafe { self.0.write_unaligned(value) };
        }
        Ok(())
    }

    /// Whether the caller wants none.
    pub fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// Writes consecutive answers.
    pub fn set_all(self, values: &[T]) -> Answer
    where
        T: Copy,
    {
        if self.is_null() {
            return null("a null result pointer");
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
    pub fn get(self) -> Answer<T> {
        In(self.0.cast_const()).get()
    }
}

/// Untyped room for an answer, whose type another argument decides.
#[derive(Debug, Clone, Copy)]
#[repr(transparent)]
pub struct OutAny(*mut c_void);

impl OutAny {
    /// The room, for an answer of this type.
    pub fn of<T>(self) -> Out<T> {
        Out(self.0.cast())
    }
}

/// What the caller passes by pointer. Only the C ABI makes one.
#[derive(Debug, Clone, Copy)]
#[repr(transparent)]
pub struct In<T>(*const T);

impl<T: Copy> In<T> {
    /// Whether the caller passed nothing.
    pub fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// What the caller passed.
    pub fn get(self) -> Answer<T> {
        if self.0.is_null() {
            return null("a null argument");
        }
        // SAFETY: by the driver's contract a pointer that is not null is good for one unaligned `T`.
        Ok(unsafe { self.0.read_unaligned() })
    }

    /// So many of them.
    pub fn get_all(self, count: usize) -> Answer<Vec<T>> {
        if self.0.is_null() && count > 0 {
            return null("a null argument");
        }
        // SAFETY: the caller says that there are so many.
        Ok((0..count).map(|at| unsafe { self.0.add(at).read_unaligned() }).collect())
    }
}

/// A C string of the caller's.
#[derive(Debug, Clone, Copy)]
#[repr(transparent)]
pub struct Text(*const c_char);

impl Text {
    /// Whether the caller passed none.
    pub fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// The string.
    pub fn get(self) -> Answer<String> {
        if self.0.is_null() {
            return null("a null string");
        }
        // SAFETY: by the contract of every function that takes one it ends with a nul.
        Ok(unsafe { CStr::from_ptr(self.0) }.to_string_lossy().into_owned())
    }
}

/// A function of the caller's, for work that runs later.
pub type HostFn = Option<extern "C" fn(*mut c_void)>;
