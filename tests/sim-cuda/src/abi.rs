//! The driver's numbers, and the shape of an exported function.

pub(crate) use haulier_sim::abi::{Answer, HostFn, In, Out, OutAny, Text, refused};

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
