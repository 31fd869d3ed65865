//! What a machine is made of.

use hal::{Caps, Error, Kind, Result};

use super::{
    machine::{BACKEND, Machine, MachineOwner},
    refusal::Dialect,
};

/// What happens on a thread without a current device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DefaultDevice {
    /// Calls that need a device are refused, and so is asking for the current device's number.
    #[default]
    None,
    /// Asking for the number answers 0, although nothing is bound; calls that need a device are refused.
    AnswersZero,
    /// Asking for the number answers 0 and binds nothing; calls that need a device silently bind device 0.
    BindsZero,
}

/// What happens when a process opens a handle that it has open already.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum RepeatImport {
    /// The same address again, counted.
    #[default]
    Counted,
    /// Refused.
    Refused,
}

/// How [`StrictDevice`](super::StrictDevice) exports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TokenForm {
    /// A descriptor that has to be passed.
    #[default]
    Descriptor,
    /// Bytes. The importer finds the exporter's memory by them, so it needs the right to look into that process.
    Opaque,
}

/// Builds a [`Machine`]. Without further words: two devices, all visible, 4 GiB each, every capability, no rules beyond
/// the contract's.
#[derive(Debug, Clone)]
#[must_use]
pub struct Builder {
    pub(super) dialect: Dialect,
    pub(super) physical: u32,
    pub(super) visible: Option<Vec<u32>>,
    pub(super) seed: u64,
    pub(super) memory: usize,
    pub(super) alignment: usize,
    pub(super) caps: Caps,
    pub(super) default_device: DefaultDevice,
    pub(super) no_unbind: bool,
    pub(super) per_thread_default: bool,
    pub(super) legacy_order: bool,
    pub(super) foreign_pointers_fail: bool,
    pub(super) token: TokenForm,
    pub(super) own_process_import: bool,
    pub(super) peer_import: bool,
    pub(super) repeat_import: RepeatImport,
    pub(super) register_alignment: usize,
    pub(super) register_max: usize,
}

impl Default for Builder {
    fn default() -> Self {
        let mut caps = Caps::default();
        caps.ipc_export = true;
        caps.ipc_import = true;
        caps.register_host = true;
        caps.register_device = true;
        Builder {
            dialect: Dialect::default(),
            physical: 2,
            visible: None,
            seed: 0,
            memory: 4 << 30,
            alignment: 512,
            caps,
            default_device: DefaultDevice::default(),
            no_unbind: false,
            per_thread_default: false,
            legacy_order: false,
            foreign_pointers_fail: false,
            token: TokenForm::default(),
            own_process_import: true,
            peer_import: false,
            repeat_import: RepeatImport::default(),
            register_alignment: 1,
            register_max: usize::MAX,
        }
    }
}

impl Builder {
    /// How many devices the machine has.
    pub fn devices(mut self, count: u32) -> Self {
        self.physical = count;
        self
    }

    /// Which of them the process sees, by physical id, in the order of their logical ids.
    pub fn visible(mut self, physical: impl Into<Vec<u32>>) -> Self {
        self.visible = Some(physical.into());
        self
    }

    /// Which machine it is: the devices of two processes have the same UUIDs if their machines have the same seed.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Whose error numbers it speaks.
    pub fn dialect(mut self, dialect: Dialect) -> Self {
        self.dialect = dialect;
        self
    }

    /// Bytes of memory of each device.
    pub fn memory(mut self, bytes: usize) -> Self {
        self.memory = bytes;
        self
    }

    /// Every allocation starts at a multiple of this many bytes.
    pub fn alignment(mut self, bytes: usize) -> Self {
        self.alignment = bytes;
        self
    }

    /// What [`StrictDevice`](super::StrictDevice) can do; what it cannot do answers `Unsupported`.
    pub fn caps(mut self, caps: Caps) -> Self {
        self.caps = caps;
        self
    }

    /// What happens on a thread without a current device.
    pub fn default_device(mut self, mode: DefaultDevice) -> Self {
        self.default_device = mode;
        self
    }

    /// A thread that has a device keeps one for ever, as on Ascend.
    pub fn no_unbind(mut self) -> Self {
        self.no_unbind = true;
        self
    }

    /// The default stream is each thread's own.
    pub fn per_thread_default_stream(mut self) -> Self {
        self.per_thread_default = true;
        self
    }

    /// The default stream orders with the streams of its device that were created as blocking, and with the per-thread
    /// ones, as CUDA's legacy stream does; and it cannot be used while one of them is captured.
    pub fn legacy_order(mut self) -> Self {
        self.legacy_order = true;
        self
    }

    /// Asking about memory that the machine did not make is an error instead of "host".
    pub fn foreign_pointers_fail(mut self) -> Self {
        self.foreign_pointers_fail = true;
        self
    }

    /// How [`StrictDevice`](super::StrictDevice) exports.
    pub fn token(mut self, form: TokenForm) -> Self {
        self.token = form;
        self
    }

    /// A process cannot open its own handles.
    pub fn refuse_own_process_import(mut self) -> Self {
        self.own_process_import = false;
        self
    }

    /// An opaque token opens on any device, not only on the one whose memory it is.
    pub fn peer_import(mut self) -> Self {
        self.peer_import = true;
        self
    }

    /// What happens when a handle is opened twice.
    pub fn repeat_import(mut self, rule: RepeatImport) -> Self {
        self.repeat_import = rule;
        self
    }

    /// A registration starts at a multiple of this many bytes.
    pub fn register_alignment(mut self, bytes: usize) -> Self {
        self.register_alignment = bytes;
        self
    }

    /// One registration has at most this many bytes.
    pub fn register_max(mut self, bytes: usize) -> Self {
        self.register_max = bytes;
        self
    }

    /// Builds it.
    ///
    /// *Errors*: [`Kind::InvalidArgument`] for a machine without devices, a visible id that no device has or that is
    /// named twice, and for sizes of 0; [`Kind::OutOfMemory`] where the process has no room for the devices' addresses.
    pub fn build(self) -> Result<MachineOwner> {
        let refuse = |why: String| Err(Error::new(Kind::InvalidArgument, BACKEND, "build").detail(why));
        let mut seen = Vec::new();
        for &id in self.visible.iter().flatten() {
            if id >= self.physical || seen.contains(&id) {
                return refuse(format!(
                    "visible device {id} of {} devices, {:?}",
                    self.physical, self.visible
                ));
            }
            seen.push(id);
        }
        if self.physical == 0 || self.visible.as_ref().is_some_and(Vec::is_empty) {
            return refuse("a machine without devices".into());
        }
        if [self.memory, self.alignment, self.register_alignment, self.register_max].contains(&0) {
            return refuse("a size of 0".into());
        }
        Machine::assemble(self)
    }
}
