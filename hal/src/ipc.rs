//! IPC handles: how one process lets another one open its memory.

use std::os::fd::OwnedFd;

use serde::{Deserialize, Serialize};

use crate::{BufferId, DeviceUuid};

/// The most bytes of an opaque handle: CUDA's has 64, ACL's key 65, a fabric handle 128.
const OPAQUE_MAX: usize = 128;

/// The most descriptors of one handle; the kernel passes at most 253 in a message.
pub const DESCRIPTORS_MAX: usize = 128;

/// What the driver needs to open an exported allocation.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Token {
    /// The vendor's bytes, as they are.
    Opaque(Vec<u8>),
    /// Descriptors passed beside the handle, one for each of these lengths in bytes, in address order.
    Descriptors(Vec<u64>),
}

/// A handle for a whole *allocation*, in the form that crosses the wire.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct IpcHandle {
    /// The device that owns the allocation.
    pub device: DeviceUuid,
    /// The allocation's identity in the exporting process. A cache key must hold it: a reused address shares the rest.
    pub buffer: BufferId,
    /// The exporting process.
    pub exporter: u32,
    /// The allocation's bytes.
    pub len: u64,
    /// What the driver needs.
    pub token: Token,
}

impl IpcHandle {
    /// Whether the handle, which may come from a hostile peer, is of a form that any exporter makes and comes with
    /// `descriptors` descriptors.
    pub fn is_well_formed(&self, descriptors: usize) -> bool {
        match &self.token {
            Token::Opaque(bytes) => descriptors == 0 && !bytes.is_empty() && bytes.len() <= OPAQUE_MAX,
            Token::Descriptors(lens) => {
                descriptors == lens.len()
                    && (1..=DESCRIPTORS_MAX).contains(&descriptors)
                    && !lens.contains(&0)
                    && lens.iter().try_fold(0u64, |sum, &len| sum.checked_add(len)) == Some(self.len)
            }
        }
    }
}

/// An exported region: the allocation's handle, and the region's place in it.
#[derive(Debug)]
pub struct Exported {
    /// Names the allocation.
    pub handle: IpcHandle,
    /// Beside it, for [`Token::Descriptors`].
    pub descriptors: Vec<OwnedFd>,
    /// Where the region starts in the allocation, in bytes.
    pub offset: u64,
    /// The region's bytes.
    pub len: u64,
}

/// The answer of [`Device::export_ipc`](crate::Device::export_ipc).
#[derive(Debug)]
pub enum Export {
    /// The handle.
    Handle(Exported),
    /// This memory cannot be exported, which is no error: it goes by staging.
    NotExportable(NotExportable),
}

/// Why memory cannot be exported.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum NotExportable {
    /// Host memory that the backend did not allocate.
    HostMemory,
    /// Virtual memory made without a shareable handle type.
    NoHandleType,
    /// Memory of a pool that does not share.
    Pool,
    /// Managed memory.
    Managed,
    /// Memory that was imported itself.
    Imported,
    /// The device exports nothing: [`Caps::ipc_export`](crate::Caps::ipc_export) is clear. Who looks at the flag first
    /// counts this reason; a backend that is asked all the same answers [`Kind::Unsupported`](crate::Kind::Unsupported).
    Device,
    /// The driver does not say where the allocation begins, and only a whole one has a handle.
    UnknownBase,
    /// Virtual memory of more separately mapped parts than the [`DESCRIPTORS_MAX`] that one handle names.
    TooManyParts,
}

impl NotExportable {
    /// The reason as a short, stable word for logs and metrics.
    pub fn label(self) -> &'static str {
        match self {
            NotExportable::HostMemory => "host_memory",
            NotExportable::NoHandleType => "no_handle_type",
            NotExportable::Pool => "pool",
            NotExportable::Managed => "managed",
            NotExportable::Imported => "imported",
            NotExportable::Device => "device",
            NotExportable::UnknownBase => "unknown_base",
            NotExportable::TooManyParts => "too_many_parts",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn handle(token: Token, len: u64) -> IpcHandle {
        IpcHandle { device: DeviceUuid([7; 16]), buffer: BufferId(1), exporter: 1, len, token }
    }

    #[test]
    fn the_wire_form_holds_a_cuda_handle_an_acl_key_and_descriptors() {
        for (token, descriptors) in [
            (Token::Opaque(vec![1; 64]), 0),
            (Token::Opaque(vec![2; 65]), 0),
            (Token::Descriptors(vec![2 << 20, 20 << 20]), 2),
        ] {
            let h = handle(token, 22 << 20);
            let there: IpcHandle = postcard::from_bytes(&postcard::to_stdvec(&h).unwrap()).unwrap();
            assert_eq!(there, h);
            assert!(there.is_well_formed(descriptors));
        }
    }

    #[test]
    fn a_hostile_handle_is_not_well_formed() {
        assert!(!handle(Token::Opaque(vec![]), 1).is_well_formed(0));
        assert!(!handle(Token::Opaque(vec![0; 129]), 1).is_well_formed(0));
        assert!(!handle(Token::Opaque(vec![0; 64]), 1).is_well_formed(1));
        assert!(!handle(Token::Descriptors(vec![]), 0).is_well_formed(0));
        assert!(!handle(Token::Descriptors(vec![8, 8]), 16).is_well_formed(1));
        assert!(!handle(Token::Descriptors(vec![8, 8]), 17).is_well_formed(2));
        assert!(!handle(Token::Descriptors(vec![u64::MAX, 2]), 1).is_well_formed(2));
        assert!(!handle(Token::Descriptors(vec![0, 16]), 16).is_well_formed(2));
    }
}
