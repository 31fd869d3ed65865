//! Who a device is. The UUID is the only name that means the same in two processes.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A device's hardware identity, the same in every process whatever devices it can see.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct DeviceUuid(pub [u8; 16]);

impl fmt::Display for DeviceUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, byte) in self.0.iter().enumerate() {
            if matches!(i, 4 | 6 | 8 | 10) {
                f.write_str("-")?;
            }
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for DeviceUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

macro_rules! id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        pub struct $name(pub u32);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

id! {
    /// What the driver's calls take in this process: an index into the devices that the process can see.
    LogicalId
}
id! {
    /// The device's place in the machine, whatever this process can see.
    PhysicalId
}

/// One device, as this process knows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// The backend's name: `cpu`, `cuda`, `ascend`.
    pub backend: &'static str,
    /// The identity on the wire.
    pub uuid: DeviceUuid,
    /// The identity in this process.
    pub logical: LogicalId,
    /// The identity in this machine, where the driver tells it.
    pub physical: Option<PhysicalId>,
    /// The model's name.
    pub name: String,
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.backend, self.logical)
    }
}
