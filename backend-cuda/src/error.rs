//! What the driver's codes mean in `hal`'s words.

use hal::{Error, Kind};

use crate::{
    BACKEND,
    ffi::{Driver, NotStarted, Refusal},
};

/// The error of a refused call: number, name and text as the driver gives them, and the call itself.
pub(crate) fn refused(driver: &Driver, op: &'static str, refusal: Refusal) -> Error {
    let Refusal { call, code } = refusal;
    let Some(code) = code else {
        return Error::new(Kind::Unsupported, BACKEND, op).detail(format!(
            "the driver has no {call}; it serves CUDA {}, install a newer one",
            release(driver.version())
        ));
    };
    let (name, text) = driver.words(code);
    vendor(Error::new(kind(code), BACKEND, op).detail(call), code, name, text)
}

/// The error of a driver that could not be initialised.
pub(crate) fn not_started(op: &'static str, library: &str, why: NotStarted) -> Error {
    let NotStarted { refusal: Refusal { call, code }, name, text } = why;
    let code = code.unwrap_or_default();
    let remedy = match code {
        34 => {
            "; it is a CUDA toolkit's stub, which only serves linking: install the NVIDIA driver, or take the stub out \
             of the library search path"
        }
        100 => "; there is a driver and no device: see CUDA_VISIBLE_DEVICES and nvidia-smi",
        803 => {
            "; the library and the kernel module are of different versions: reboot, or mend the installation"
        }
        _ => "",
    };
    let error = Error::new(kind(code), BACKEND, op).detail(format!("{call} of {library}{remedy}"));
    vendor(error, code, name, text)
}

fn vendor(error: Error, code: i32, name: Option<String>, text: Option<String>) -> Error {
    let words: Vec<_> = name.into_iter().chain(text).collect();
    error.vendor(code, Some(&words.join(": ")))
}

/// `12040` is `12.4`.
pub(crate) fn release(version: i32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

/// The kind of the driver's code `code`, which is not 0.
///
/// Codes are integers: a newer driver knows some that this table does not, and they are [`Kind::Driver`].
pub fn kind(code: i32) -> Kind {
    match code {
        1 | 400 => Kind::InvalidArgument, // invalid value, invalid handle
        2 => Kind::OutOfMemory,
        4 => Kind::ShutDown,            // deinitialised: the process exits
        34 | 100 => Kind::NotPresent,   // stub library, no device
        101 => Kind::InvalidDevice,     // no such ordinal
        201 | 709 => Kind::NotBound,    // no context here, or a destroyed one
        217 | 801 => Kind::Unsupported, // no peer access, not supported
        600 => Kind::Timeout,           // not ready when no time was left
        712 => Kind::Overlap,           // host memory already registered
        713 => Kind::NotRegistered,     // host memory not registered
        900 | 901 | 905 | 906 | 907 => Kind::StreamCapturing, // would spoil, or has spoiled, a capture
        _ => Kind::Driver,
    }
}

#[cfg(test)]
mod tests {
    use cudarc::driver::sys::CUresult;

    use super::*;

    /// cudarc takes the numbers from NVIDIA's header, so this shows that the table has them right.
    #[test]
    fn the_table_agrees_with_the_vendors_names() {
        use CUresult::*;
        for (code, expected) in [
            (CUDA_ERROR_INVALID_VALUE, Kind::InvalidArgument),
            (CUDA_ERROR_INVALID_HANDLE, Kind::InvalidArgument),
            (CUDA_ERROR_OUT_OF_MEMORY, Kind::OutOfMemory),
            (CUDA_ERROR_DEINITIALIZED, Kind::ShutDown),
            (CUDA_ERROR_STUB_LIBRARY, Kind::NotPresent),
            (CUDA_ERROR_NO_DEVICE, Kind::NotPresent),
            (CUDA_ERROR_INVALID_DEVICE, Kind::InvalidDevice),
            (CUDA_ERROR_INVALID_CONTEXT, Kind::NotBound),
            (CUDA_ERROR_CONTEXT_IS_DESTROYED, Kind::NotBound),
            (CUDA_ERROR_PEER_ACCESS_UNSUPPORTED, Kind::Unsupported),
            (CUDA_ERROR_NOT_SUPPORTED, Kind::Unsupported),
            (CUDA_ERROR_NOT_READY, Kind::Timeout),
            (CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, Kind::Overlap),
            (CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, Kind::NotRegistered),
            (CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, Kind::StreamCapturing),
            (CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, Kind::StreamCapturing),
            (CUDA_ERROR_STREAM_CAPTURE_ISOLATION, Kind::StreamCapturing),
            (CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, Kind::StreamCapturing),
            (CUDA_ERROR_CAPTURED_EVENT, Kind::StreamCapturing),
            (CUDA_ERROR_ILLEGAL_ADDRESS, Kind::Driver),
        ] {
            assert_eq!(kind(code as i32), expected, "{code:?}");
        }
    }

    #[test]
    fn a_code_of_a_newer_driver_is_an_error_of_the_driver() {
        assert_eq!((kind(4242), kind(-1)), (Kind::Driver, Kind::Driver));
    }
}
