//! The fixtures of the backends in this workspace.

use std::{
    collections::HashMap,
    ptr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc::{self, Sender},
    },
    thread,
};

use backend_cpu::{
    CpuDevice, CpuStream, CpuStreamOwner,
    strict::{
        Builder, CaptureMode, DefaultDevice, Dialect, Machine, MachineOwner, MemoryKind, Op,
        PER_THREAD_STREAM, StrictAllocation, StrictDevice, StrictStream, TokenForm,
    },
};
use hal::{Caps, Device, DeviceUuid, LogicalId, Memory, NotExportable, Region};
use haulier::{AnyDevice, devices::AnyStream};
use parking_lot::{Mutex, MutexGuard};

#[cfg(feature = "cuda")]
use crate::cuda::CudaFixture;
use crate::fixture::{Fixture, Need, Refuse};

/// The host in production.
pub struct CpuFixture {
    device: CpuDevice,
    streams: Mutex<Vec<CpuStreamOwner>>,
    held: Mutex<HashMap<CpuStream, Sender<()>>>,
    /// What is still queued must not touch memory any more.
    over: Arc<AtomicBool>,
    /// The host's registrations are counted for the whole process, so its cases take turns.
    _turn: MutexGuard<'static, ()>,
}

impl CpuFixture {
    /// The host has one device, so `device` is 0.
    ///
    /// # Panics
    /// Where the host cannot be opened.
    pub fn new(device: u32) -> Self {
        static TURN: Mutex<()> = Mutex::new(());
        assert_eq!(device, 0, "the host is one device");
        CpuFixture {
            _turn: TURN.lock(),
            device: CpuDevice::open().expect("the host is present"),
            streams: Mutex::default(),
            held: Mutex::default(),
            over: Arc::default(),
        }
    }
}

impl Drop for CpuFixture {
    fn drop(&mut self) {
        self.over.store(true, Ordering::SeqCst);
    }
}

impl Fixture<CpuDevice> for CpuFixture {
    fn device(&self) -> &CpuDevice {
        &self.device
    }

    fn lacks(&self) -> &'static [(Need, &'static str)] {
        &[
            (Need::SecondDevice, "the host is one device"),
            (Need::CurrentDevice, "the host has no current device"),
            (Need::Unbind, "the host has no current device"),
            (Need::OneWay, "every thread of the host is given back as it was"),
            (Need::Switches, "the host has no driver"),
            (Need::Faults, "the host has no driver"),
            (Need::PerThreadStream, "the host's streams mean the same on every thread"),
            (Need::Capture, "the host's streams are not captured"),
            (Need::AddressReuse, "the kernel chooses addresses"),
            (Need::Unshareable, "every buffer of the host has a descriptor"),
            (Need::RegisterLimit, "the host registers any size"),
            (Need::RegisterAlignment, "the host registers any address"),
            (Need::NoCaps, "the host can do everything"),
        ]
    }

    fn too_much(&self) -> usize {
        1 << 46
    }

    fn stream(&self) -> CpuStream {
        let owner = self.device.create_stream().expect("a thread can be had");
        let stream = owner.stream();
        self.streams.lock().push(owner);
        stream
    }

    fn hold(&self, stream: CpuStream) {
        let (release, released) = mpsc::channel::<()>();
        // Ends when the other end is dropped, at the latest with the fixture.
        let wait = move || {
            let _ = released.recv();
        };
        self.device.enqueue(stream, wait).expect("the stream is there");
        self.held.lock().insert(stream, release);
    }

    fn release(&self, stream: CpuStream) {
        self.held.lock().remove(&stream).expect("the stream is held");
    }

    fn queue_fill(&self, stream: CpuStream, region: Region, byte: u8) {
        let over = Arc::clone(&self.over);
        let fill = move || {
            if !over.load(Ordering::SeqCst) {
                // SAFETY: a case keeps memory until what it queued on it is done, or fails and drops the fixture.
                unsafe {
                    ptr::write_bytes(ptr::with_exposed_provenance_mut::<u8>(region.addr), byte, region.len)
                }
            }
        };
        self.device.enqueue(stream, fill).expect("the stream is there");
    }

    fn queue_failure(&self, stream: CpuStream) {
        let fail = || std::panic::resume_unwind(Box::new("queued to fail"));
        self.device.enqueue(stream, fail).expect("the stream is there");
    }

    fn registered(&self) -> usize {
        self.device.registrations()
    }
}

/// A backend again, through [`AnyDevice`], which must add nothing and lose nothing.
pub struct AnyFixture<D: Device, F> {
    inner: F,
    device: AnyDevice,
    wrap: fn(D) -> AnyDevice,
    name: fn(D::Stream) -> AnyStream,
    named: fn(AnyStream) -> D::Stream,
}

/// The host through [`AnyDevice`]. As [`CpuFixture::new`].
pub fn any_cpu(device: u32) -> AnyFixture<CpuDevice, CpuFixture> {
    AnyFixture::new(CpuFixture::new(device), AnyDevice::Cpu, AnyStream::Cpu, |stream| match stream {
        AnyStream::Cpu(stream) => stream,
        #[allow(unreachable_patterns, reason = "there may be no other backend")]
        other => panic!("{other:?} is not the host's"),
    })
}

/// The CUDA backend on the simulated driver through [`AnyDevice`]. As [`CudaFixture::new`].
#[cfg(feature = "cuda")]
pub fn any_cuda(device: u32) -> AnyFixture<backend_cuda::CudaDevice, CudaFixture> {
    AnyFixture::new(CudaFixture::new(device), AnyDevice::Cuda, AnyStream::Cuda, |stream| match stream {
        AnyStream::Cuda(stream) => stream,
        other => panic!("{other:?} is not CUDA's"),
    })
}

impl<D: Device, F: Fixture<D>> AnyFixture<D, F> {
    fn new(
        inner: F,
        wrap: fn(D) -> AnyDevice,
        name: fn(D::Stream) -> AnyStream,
        named: fn(AnyStream) -> D::Stream,
    ) -> Self {
        AnyFixture { device: wrap(inner.device().clone()), inner, wrap, name, named }
    }
}

impl<D: Device, F: Fixture<D>> Fixture<AnyDevice> for AnyFixture<D, F> {
    fn device(&self) -> &AnyDevice {
        &self.device
    }

    fn lacks(&self) -> &'static [(Need, &'static str)] {
        self.inner.lacks()
    }

    fn enter(&self) {
        self.inner.enter();
    }

    fn too_much(&self) -> usize {
        self.inner.too_much()
    }

    fn stream(&self) -> AnyStream {
        (self.name)(self.inner.stream())
    }

    fn hold(&self, stream: AnyStream) {
        self.inner.hold((self.named)(stream));
    }

    fn release(&self, stream: AnyStream) {
        self.inner.release((self.named)(stream));
    }

    fn queue_fill(&self, stream: AnyStream, region: Region, byte: u8) {
        self.inner.queue_fill((self.named)(stream), region, byte);
    }

    fn queue_failure(&self, stream: AnyStream) {
        self.inner.queue_failure((self.named)(stream));
    }

    fn registered(&self) -> usize {
        self.inner.registered()
    }

    fn second(&self) -> AnyDevice {
        (self.wrap)(self.inner.second())
    }

    fn current(&self) -> Option<DeviceUuid> {
        self.inner.current()
    }

    fn switches(&self) -> u64 {
        self.inner.switches()
    }

    fn refuse(&self, call: Refuse, nth: u64, code: i64) {
        self.inner.refuse(call, nth, code);
    }

    fn per_thread_stream(&self) -> AnyStream {
        (self.name)(self.inner.per_thread_stream())
    }

    fn begin_capture(&self, stream: AnyStream) {
        self.inner.begin_capture((self.named)(stream));
    }

    fn end_capture(&self, stream: AnyStream) -> bool {
        self.inner.end_capture((self.named)(stream))
    }

    fn unshareable(&self) -> Vec<(Region, NotExportable)> {
        self.inner.unshareable()
    }

    fn register_limit(&self) -> usize {
        self.inner.register_limit()
    }

    fn register_alignment(&self) -> usize {
        self.inner.register_alignment()
    }

    fn without_caps(&self) -> AnyDevice {
        (self.wrap)(self.inner.without_caps())
    }
}

/// Bytes of each strict device.
const MEMORY: usize = 256 << 20;
/// The most bytes of one registration.
const REGISTER_MAX: usize = 2 << 20;
/// What a registered address is a multiple of.
const REGISTER_ALIGNMENT: usize = 64;

/// A device of the strict machine.
pub struct StrictFixture {
    device: StrictDevice,
    lacks: &'static [(Need, &'static str)],
    /// Each thread of an application has a device, and keeps one for ever.
    one_way: bool,
    /// Dropped before the machine.
    kept: Mutex<Vec<StrictAllocation>>,
    others: Mutex<Vec<MachineOwner>>,
    machine: MachineOwner,
}

impl StrictFixture {
    /// A device of a machine that behaves as CUDA does.
    ///
    /// # Panics
    /// Where there is no room for the machine.
    pub fn cuda(device: u32) -> Self {
        const LACKS: &[(Need, &str)] = &[(Need::OneWay, "this driver gives every thread back")];
        Self::new(device, Self::rules(), LACKS, false)
    }

    /// A device of a machine that behaves as Ascend does: a thread keeps its device, asking a thread without one
    /// answers 0, and memory that the driver did not allocate is unknown to it.
    ///
    /// # Panics
    /// As [`cuda`](Self::cuda).
    pub fn ascend(device: u32) -> Self {
        const LACKS: &[(Need, &str)] = &[
            (Need::Unbind, "this driver takes no thread's device away"),
            (Need::ForeignPointers, "this driver refuses to say anything of memory that it did not allocate"),
        ];
        let rules = Self::rules()
            .dialect(Dialect::Acl)
            .default_device(DefaultDevice::AnswersZero)
            .no_unbind()
            .foreign_pointers_fail()
            .token(TokenForm::Opaque);
        Self::new(device, rules, LACKS, true)
    }

    fn rules() -> Builder {
        Machine::builder()
            .devices(2)
            .memory(MEMORY)
            .register_max(REGISTER_MAX)
            .register_alignment(REGISTER_ALIGNMENT)
    }

    fn new(device: u32, rules: Builder, lacks: &'static [(Need, &'static str)], one_way: bool) -> Self {
        let machine = rules.build().expect("there is room for the machine");
        StrictFixture {
            device: machine.device(LogicalId(device)).expect("the machine has two devices"),
            lacks,
            one_way,
            kept: Mutex::default(),
            others: Mutex::default(),
            machine,
        }
    }

    fn bound<R>(&self, call: impl FnOnce(&Machine) -> R) -> R {
        let _bound = self.device.bind_current().expect("the fixture's thread was entered");
        call(&self.machine)
    }
}

impl Drop for StrictFixture {
    fn drop(&mut self) {
        self.kept.lock().clear();
        if !thread::panicking() {
            assert_eq!(self.machine.drop_failures(), 0, "a guard could not give back what it held");
            assert_eq!(self.machine.log().count(Op::SyncDevice), 0, "a whole device was waited for");
        }
    }
}

impl Fixture<StrictDevice> for StrictFixture {
    fn device(&self) -> &StrictDevice {
        &self.device
    }

    fn lacks(&self) -> &'static [(Need, &'static str)] {
        self.lacks
    }

    fn enter(&self) {
        if self.one_way {
            self.machine.bind(0).expect("the machine has a device 0");
        }
    }

    fn too_much(&self) -> usize {
        2 * MEMORY
    }

    fn stream(&self) -> StrictStream {
        let bound = self.device.bind_current().expect("the fixture's thread was entered");
        self.device.create_stream(&bound).expect("a stream")
    }

    fn hold(&self, stream: StrictStream) {
        self.bound(|machine| machine.hold(stream.raw())).expect("the stream is there");
    }

    fn release(&self, stream: StrictStream) {
        self.bound(|machine| machine.release(stream.raw())).expect("the stream is there");
    }

    fn queue_fill(&self, stream: StrictStream, region: Region, byte: u8) {
        self.bound(|machine| machine.fill(stream.raw(), region.addr, region.len, byte))
            .expect("it is queued");
    }

    fn queue_failure(&self, stream: StrictStream) {
        let fail = || std::panic::resume_unwind(Box::new("queued to fail"));
        self.bound(|machine| machine.enqueue(stream.raw(), fail)).expect("it is queued");
    }

    fn registered(&self) -> usize {
        self.machine.registrations()
    }

    fn second(&self) -> StrictDevice {
        let other = 1 - self.device.identity().logical.0;
        self.machine.device(LogicalId(other)).expect("the machine has two devices")
    }

    fn current(&self) -> Option<DeviceUuid> {
        let device = self.machine.current().expect("the machine is up")?;
        Some(self.machine.uuid(device).expect("it is current"))
    }

    fn switches(&self) -> u64 {
        [Op::Bind, Op::Unbind, Op::Push, Op::Pop].into_iter().map(|op| self.machine.log().count(op)).sum()
    }

    fn refuse(&self, call: Refuse, nth: u64, code: i64) {
        let op = match call {
            Refuse::Bind => Op::Bind,
            Refuse::Allocate => Op::Allocate,
            Refuse::Pin => Op::Register,
        };
        self.machine.faults().fail(op, nth, code);
    }

    fn per_thread_stream(&self) -> StrictStream {
        self.device.stream(PER_THREAD_STREAM)
    }

    fn begin_capture(&self, stream: StrictStream) {
        self.bound(|machine| machine.begin_capture(stream.raw(), CaptureMode::Global))
            .expect("it is captured");
    }

    fn end_capture(&self, stream: StrictStream) -> bool {
        self.bound(|machine| machine.end_capture(stream.raw())).is_ok()
    }

    fn unshareable(&self) -> Vec<(Region, NotExportable)> {
        let bound = self.device.bind_current().expect("the fixture's thread was entered");
        let kinds = [
            (MemoryKind::Vmm, NotExportable::NoHandleType),
            (MemoryKind::Pool, NotExportable::Pool),
            (MemoryKind::Managed, NotExportable::Managed),
        ];
        kinds
            .map(|(kind, why)| {
                let memory = StrictDevice::allocate_kind(&bound, 4096, kind).expect("it is small");
                let region = memory.region();
                self.kept.lock().push(memory);
                (region, why)
            })
            .into()
    }

    fn register_limit(&self) -> usize {
        REGISTER_MAX
    }

    fn register_alignment(&self) -> usize {
        REGISTER_ALIGNMENT
    }

    fn without_caps(&self) -> StrictDevice {
        let rules = Machine::builder().devices(1).memory(MEMORY).caps(Caps::default());
        let machine = rules.build().expect("there is room for the machine");
        let device = machine.device(LogicalId(0)).expect("it has one device");
        self.others.lock().push(machine);
        device
    }
}
