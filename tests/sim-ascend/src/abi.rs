//! The runtime's numbers, and the shape of an exported function.

pub(crate) use haulier_sim::abi::{Answer, HostFn, In, Out, OutAny, Refused, Text, null, refused};

use backend_cpu::strict::{Answer as MachineAnswer, Why};

/// The numbers that the simulator itself gives.
pub(crate) mod status {
    pub(crate) const SUCCESS: i32 = 0;
    /// Of the outermost layer, for null pointers above all.
    pub(crate) const INVALID_PARAM: i32 = 100000;
    pub(crate) const REPEAT_INITIALIZE: i32 = 100002;
    pub(crate) const REPEAT_FINALIZE: i32 = 100037;
    pub(crate) const PARAMETER: i32 = 107000;
    pub(crate) const DEVICE: i32 = 107001;
    pub(crate) const NO_CONTEXT: i32 = 107002;
    pub(crate) const STREAM_CONTEXT: i32 = 107003;
    pub(crate) const HANDLE: i32 = 107017;
    pub(crate) const CAPTURE_FORBIDS: i32 = 107030;
    pub(crate) const NOT_SUPPORTED: i32 = 207000;
    pub(crate) const OUT_OF_MEMORY: i32 = 207001;
    pub(crate) const NO_DEVICE: i32 = 207004;
    pub(crate) const NO_PERMISSION: i32 = 207006;
    pub(crate) const INTERNAL: i32 = 507000;
    pub(crate) const CONTEXT_RELEASE: i32 = 507007;
    pub(crate) const STREAM_TIMEOUT: i32 = 507046;
    pub(crate) const EVENT_TIMEOUT: i32 = 507047;
    pub(crate) const DRIVER: i32 = 507899;
    pub(crate) const ALREADY_REGISTERED: i32 = 507910;
    pub(crate) const NOT_REGISTERED: i32 = 507911;
}

/// Another number than the machine's for its reasons of refusing where the function has its own.
pub(crate) trait Instead<T> {
    fn instead(self, why: Why, code: i32) -> Answer<T>;
}

impl<T> Instead<T> for MachineAnswer<T> {
    fn instead(self, why: Why, code: i32) -> Answer<T> {
        self.map_err(|refusal| {
            let other = (refusal.why == why).then_some(code);
            let mut refused = Refused::from(refusal);
            refused.code = other.or(refused.code);
            refused
        })
    }
}

/// Defines the runtime's functions. Each has a name, its C arguments, in brackets what the log says that it is about,
/// and a body that answers with a status. What every call has in common is [`gate::enter`](crate::gate::enter).
macro_rules! runtime {
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
pub(crate) use runtime;
