//! What ACL's codes mean in `hal`'s words.

use hal::{Error, Kind};

use crate::{
    BACKEND,
    ffi::{Driver, Refusal, release},
};

/// The error of a refused call: ACL's number and text, and the call itself.
pub(crate) fn refused(driver: &Driver, op: &'static str, refusal: Refusal) -> Error {
    let Refusal { call, code, text } = refusal;
    let Some(code) = code else {
        let version = driver.version().map_or(String::new(), |version| format!(" ({})", release(version)));
        return Error::new(Kind::Unsupported, BACKEND, op)
            .detail(format!("this CANN{version} has no {call}; install a newer one"));
    };
    let remedy = match code {
        107001 => "; ids count what ASCEND_RT_VISIBLE_DEVICES leaves, from 0",
        107002 => "; the thread's context is gone: was the device reset?",
        207004 => "; CANN is there and no NPU: see ASCEND_RT_VISIBLE_DEVICES and npu-smi",
        507033 => "; the NPU cannot be opened: see npu-smi, and whether the container may use it",
        _ => "",
    };
    Error::new(kind(code), BACKEND, op).detail(format!("{call}{remedy}")).vendor(code, text.as_deref())
}

/// The kind of ACL's code `code`, which is not 0.
///
/// Codes are integers: a newer CANN knows some that this table does not, and they are [`Kind::Driver`].
pub fn kind(code: i32) -> Kind {
    match code {
        100000 | 107000 | 107008 | 107016..=107018 => Kind::InvalidArgument,
        200000 | 207001 | 207018 => Kind::OutOfMemory,
        107001 | 200002 => Kind::InvalidDevice,
        // No context here, or not the stream's.
        107002 | 107003 => Kind::NotBound,
        // Waiting took too long, or there was no time to wait.
        107019 | 507004 | 507006 | 507046 | 507047 => Kind::Timeout,
        // The call would spoil, or has spoiled, a capture.
        107027 | 107028 | 107030 | 107031 | 107041 | 507903 => Kind::StreamCapturing,
        200001 | 200006 | 207000 | 207021 => Kind::Unsupported,
        207004 => Kind::NotPresent,
        507910 => Kind::Overlap,
        507911 => Kind::NotRegistered,
        _ => Kind::Driver,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_codes_to_branch_on_have_their_kinds() {
        for (code, expected) in [
            (107000, Kind::InvalidArgument),
            (107001, Kind::InvalidDevice),
            (107002, Kind::NotBound),
            (107027, Kind::StreamCapturing),
            (207000, Kind::Unsupported),
            (207001, Kind::OutOfMemory),
            (207004, Kind::NotPresent),
            (507046, Kind::Timeout),
            (507910, Kind::Overlap),
            (507911, Kind::NotRegistered),
            (507899, Kind::Driver),
        ] {
            assert_eq!(kind(code), expected, "{code}");
        }
    }

    #[test]
    fn a_code_of_a_newer_version_is_an_error_of_the_driver() {
        assert_eq!((kind(907777), kind(-1)), (Kind::Driver, Kind::Driver));
    }
}
