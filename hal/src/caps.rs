//! What a device can do, as data.

use serde::{Deserialize, Serialize};

/// Capabilities of one device.
///
/// A flag that is set means that the call works; a flag that is clear means that it answers exactly
/// [`Kind::Unsupported`](crate::Kind::Unsupported). The conformance suite checks both directions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Caps {
    /// Some memory can be exported with [`Device::export_ipc`](crate::Device::export_ipc).
    pub ipc_export: bool,
    /// Handles of another process can be opened with [`Device::import_ipc`](crate::Device::import_ipc).
    pub ipc_import: bool,
    /// Host memory can be registered for DMA.
    pub register_host: bool,
    /// Device memory can be registered for DMA.
    pub register_device: bool,
}

impl Caps {
    /// Every flag by name, for tables.
    pub fn flags(&self) -> [(&'static str, bool); 4] {
        [
            ("ipc_export", self.ipc_export),
            ("ipc_import", self.ipc_import),
            ("register_host", self.register_host),
            ("register_device", self.register_device),
        ]
    }
}
