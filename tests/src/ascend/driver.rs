//! An application's calls of ACL: those that every runtime has, simulated or not.

use std::{
    collections::HashMap,
    ffi::{OsString, c_void},
    mem,
    sync::{Arc, OnceLock},
    thread,
};

use backend_ascend::{AscendDevice, AscendStream};
use hal::{Device, DeviceExt, DeviceUuid, LogicalId, NotExportable, Place, Region};
use libloading::Library;
use parking_lot::{Mutex, MutexGuard};

use crate::{
    ascend::LIBRARY,
    fixture::{Fixture, Need},
    gate::Gate,
};

/// What registered host memory begins at a multiple of, and what is shared.
const PAGE: usize = 4096;

/// The library that the backend finds in this process.
///
/// # Panics
/// Where there is none.
pub fn library() -> &'static Library {
    static LOADED: OnceLock<Library> = OnceLock::new();
    LOADED.get_or_init(|| {
        let named = std::env::var_os(LIBRARY).filter(|name| !name.is_empty());
        let names =
            named.map_or_else(|| vec!["libascendcl.so".into(), "libacl_rt.so".into()], |name| vec![name]);
        // SAFETY: the backend opens the same one.
        let mut found = names.iter().filter_map(|name: &OsString| unsafe { Library::new(name) }.ok());
        found.next().expect("there is a runtime")
    })
}

/// Calls a function of the runtime as an application would, and gives its status.
#[macro_export]
macro_rules! acl {
    ($name:ident($($value:expr => $ty:ty),* $(,)?)) => {{
        // SAFETY: this is the function's signature.
        let function = unsafe {
            $crate::ascend::library().get::<unsafe extern "C" fn($($ty),*) -> i32>(stringify!($name))
        };
        let function = function.expect("the runtime has it");
        #[allow(clippy::macro_metavars_in_unsafe, reason = "the arguments are expressions of tests")]
        // SAFETY: pointers are to locals of the caller, handles are the runtime's.
        let status = unsafe { function($($value),*) };
        status
    }};
}

/// The device with this id.
///
/// # Panics
/// Where the machine does not have it.
pub fn device(logical: u32) -> AscendDevice {
    AscendDevice::open(LogicalId(logical)).expect("the machine has it")
}

/// Runs an application's calls with the device current.
///
/// # Panics
/// Where the runtime refuses.
pub fn on<R: Send>(device: &AscendDevice, work: impl FnOnce() -> R + Send) -> R {
    device.bound(|_| Ok(work())).expect("the runtime is up")
}

/// A new stream, made as torch_npu makes them.
///
/// # Panics
/// Where the runtime refuses.
pub fn stream(device: &AscendDevice) -> AscendStream {
    const FAST: u32 = 3;
    let raw = on(device, || {
        let mut raw = 0;
        assert_eq!(acl!(aclrtCreateStreamWithConfig(&mut raw => *mut usize, 0 => u32, FAST => u32)), 0);
        raw
    });
    // SAFETY: tests destroy no stream, but for a fixture its own at its end.
    unsafe { AscendStream::from_raw(raw) }
}

/// Queues setting all of `region` to `byte`.
///
/// # Panics
/// Where the runtime refuses.
pub fn queue_fill(device: &AscendDevice, stream: AscendStream, region: Region, byte: u8) {
    let Region { addr, len, .. } = region;
    let byte = i32::from(byte);
    let queued = on(device, || {
        acl!(aclrtMemsetAsync(
            addr => usize, len => usize, byte => i32, len => usize, stream.raw() => usize
        ))
    });
    assert_eq!(queued, 0);
}

/// An event at the end of what is queued on the stream.
///
/// # Panics
/// Where the runtime refuses.
pub fn event(device: &AscendDevice, stream: AscendStream) -> u64 {
    // Streams can wait for it; it can be asked for its status, but not by the older aclrtQueryEvent.
    const SYNC: u32 = 1;
    on(device, || {
        let mut event = 0;
        assert_eq!(acl!(aclrtCreateEventExWithFlag(&mut event => *mut u64, SYNC => u32)), 0);
        assert_eq!(acl!(aclrtRecordEvent(event => u64, stream.raw() => usize)), 0);
        event
    })
}

/// Whether ACL says that all before an event of [`event`] is done.
///
/// # Panics
/// Where ACL says something else.
pub fn is_reached(device: &AscendDevice, event: u64) -> bool {
    const COMPLETE: i32 = 1;
    let mut state = 0;
    let asked = on(device, || acl!(aclrtQueryEventStatus(event => u64, &mut state => *mut i32)));
    assert_eq!(asked, 0);
    state == COMPLETE
}

/// Lets what is queued on the stream from now on wait for the event.
///
/// # Panics
/// Where the runtime refuses.
pub fn wait_for(device: &AscendDevice, stream: AscendStream, event: u64) {
    let status = on(device, || acl!(aclrtStreamWaitEvent(stream.raw() => usize, event => u64)));
    assert_eq!(status, 0);
}

/// Virtual memory of chunks of these lengths, as torch_npu's expandable segments are. It lives as long as the process.
///
/// # Panics
/// Where the runtime refuses.
pub fn expandable(device: &AscendDevice, chunks: &[usize]) -> Region {
    /// `aclrtPhysicalMemProp`.
    #[repr(C)]
    struct Properties {
        handle_type: i32,
        allocation_type: i32,
        attribute: i32,
        id: u32,
        place: i32,
        reserve: u64,
    }
    const HBM_HUGE: i32 = 4;
    const ON_DEVICE: i32 = 1;
    const HUGE_PAGES: u64 = 1;
    let id = device.identity().logical.0;
    let len = chunks.iter().sum::<usize>();
    let addr = on(device, || {
        let mut addr = 0usize;
        let reserved = acl!(aclrtReserveMemAddress(
            &mut addr => *mut usize, 2 * len => usize, 0 => usize, 0 => usize, HUGE_PAGES => u64
        ));
        assert_eq!(reserved, 0);
        let mut at = addr;
        for &chunk in chunks {
            let properties = Properties {
                handle_type: 0,
                allocation_type: 0,
                attribute: HBM_HUGE,
                id,
                place: ON_DEVICE,
                reserve: 0,
            };
            let mut handle = 0usize;
            let made = acl!(aclrtMallocPhysical(
                &mut handle => *mut usize, chunk => usize, &properties => *const Properties, 0 => u64
            ));
            assert_eq!(made, 0);
            let mapped =
                acl!(aclrtMapMem(at => usize, chunk => usize, 0 => usize, handle => usize, 0 => u64));
            assert_eq!(mapped, 0);
            at += chunk;
        }
        addr
    });
    device.region(addr, len)
}

/// A device of the Ascend backend and what an application does with it, for the conformance suite on any runtime.
pub struct DriverFixture {
    device: AscendDevice,
    other: Option<AscendDevice>,
    failed_drops: u64,
    streams: Mutex<Vec<AscendStream>>,
    events: Mutex<Vec<u64>>,
    held: Mutex<HashMap<AscendStream, Arc<Gate>>>,
    /// What `unshareable` made.
    kept: Mutex<Vec<usize>>,
    /// What a fixture looks at is the process's, so the trials take turns.
    _turn: MutexGuard<'static, ()>,
}

/// The host function that holds a stream.
extern "C" fn pass(gate: *mut c_void) {
    // SAFETY: `hold` gave one count of the gate away for this one call.
    unsafe { Arc::from_raw(gate.cast_const().cast::<Gate>()) }.pass();
}

impl DriverFixture {
    /// The device with this id, beside another one where the machine has one.
    ///
    /// # Panics
    /// Where the machine does not have it.
    pub fn new(logical: u32) -> Self {
        static TURN: Mutex<()> = Mutex::new(());
        let turn = TURN.lock();
        let device = device(logical);
        let devices = AscendDevice::all().expect("the runtime is up");
        let other = devices.into_iter().find(|other| other.identity().logical.0 != logical);
        DriverFixture {
            failed_drops: device.failed_drops(),
            device,
            other,
            streams: Mutex::default(),
            events: Mutex::default(),
            held: Mutex::default(),
            kept: Mutex::default(),
            _turn: turn,
        }
    }

    /// An event at the end of what is queued on the stream. It lives as long as the fixture.
    pub fn event(&self, stream: AscendStream) -> u64 {
        let event = event(&self.device, stream);
        self.events.lock().push(event);
        event
    }

    /// Copies between the device and the host by ACL's plain call.
    ///
    /// # Safety
    /// Both regions must be allocated and left alone meanwhile, one of them on the device.
    ///
    /// # Panics
    /// Where the runtime refuses.
    pub unsafe fn plain_copy(&self, to: Region, from: Region) {
        const TO_DEVICE: i32 = 1;
        const TO_HOST: i32 = 2;
        let (into, out_of, room, len) = (to.addr, from.addr, to.len, to.len.min(from.len));
        let kind = if to.place == Place::Host { TO_HOST } else { TO_DEVICE };
        let status = on(
            &self.device,
            || acl!(aclrtMemcpy(into => usize, room => usize, out_of => usize, len => usize, kind => i32)),
        );
        assert_eq!(status, 0);
    }

    /// Whether streams can be captured here, by the same question as the backend's.
    fn captures(&self) -> bool {
        // SAFETY: only looked up.
        let asks = unsafe { library().get::<unsafe extern "C" fn()>("aclmdlRICaptureGetInfo") }.is_ok();
        let stream = self.stream().raw();
        let (mut state, mut model) = (0, 0usize);
        asks && on(
            &self.device,
            || acl!(aclmdlRICaptureGetInfo(stream => usize, &mut state => *mut i32, &mut model => *mut usize)),
        ) == 0
    }

    /// How many bytes the device has.
    fn memory(&self) -> usize {
        const HBM: i32 = 1;
        let (mut free, mut total) = (0usize, 0usize);
        let asked = on(
            &self.device,
            || acl!(aclrtGetMemInfo(HBM => i32, &mut free => *mut usize, &mut total => *mut usize)),
        );
        assert_eq!(asked, 0);
        total
    }
}

impl Drop for DriverFixture {
    fn drop(&mut self) {
        self.held.lock().drain().for_each(|(_, gate)| gate.open());
        on(&self.device, || {
            for stream in mem::take(&mut *self.streams.lock()) {
                // Also where a trial failed and left work behind.
                acl!(aclrtSynchronizeStream(stream.raw() => usize));
                acl!(aclrtDestroyStream(stream.raw() => usize));
            }
            for event in mem::take(&mut *self.events.lock()) {
                acl!(aclrtDestroyEvent(event => u64));
            }
            for pointer in mem::take(&mut *self.kept.lock()) {
                acl!(aclrtFree(pointer => usize));
            }
        });
        if !thread::panicking() {
            let failed = self.device.failed_drops() - self.failed_drops;
            assert_eq!(failed, 0, "guards could not give back what they held");
        }
    }
}

impl Fixture<AscendDevice> for DriverFixture {
    fn device(&self) -> &AscendDevice {
        &self.device
    }

    fn lacks(&self) -> &'static [(Need, &'static str)] {
        const LACKS: &[(Need, &str)] = &[
            (Need::Unbind, "this driver takes no thread's device away"),
            (Need::Switches, "a driver does not say how often it was called"),
            (Need::Faults, "a driver is not made to refuse"),
            (Need::QueuedFailure, "a kernel that fails may end the device for the whole process"),
            (Need::PerThreadStream, "this driver's streams mean the same on every thread"),
            (Need::AddressReuse, "the driver chooses addresses"),
            (Need::RegisterLimit, "this driver limits no registration of device memory"),
            (Need::RegisterAlignment, "this driver registers device memory at any address"),
            (Need::NoCaps, "a process has one runtime, and this one can do everything"),
        ];
        // The same for each device of a process.
        static HERE: OnceLock<Vec<(Need, &str)>> = OnceLock::new();
        HERE.get_or_init(|| {
            let one = self.other.is_none().then_some((Need::SecondDevice, "this machine has one device"));
            let old = (!self.device.caps().register_host).then_some((
                Need::RegisterHost,
                "this CANN has no aclrtHostRegister, or takes pinned memory only, as on Linux 5.10 and older",
            ));
            let whole = self.unshareable().is_empty().then_some((
                Need::Unshareable,
                "here even the smallest memory begins with a page, so ACL shares all of it",
            ));
            let none = (!self.captures()).then_some((Need::Capture, "this device captures no stream"));
            LACKS.iter().copied().chain(one).chain(old).chain(whole).chain(none).collect()
        })
    }

    /// As a thread of an application that works with device 0 for good.
    fn enter(&self) {
        assert_eq!(acl!(aclrtSetDevice(0 => i32)), 0);
    }

    fn too_much(&self) -> usize {
        2 * self.memory()
    }

    fn stream(&self) -> AscendStream {
        let stream = stream(&self.device);
        self.streams.lock().push(stream);
        stream
    }

    /// By a host function on the stream, which blocks what is queued behind it.
    fn hold(&self, stream: AscendStream) {
        let gate = Arc::new(Gate::default());
        let data = Arc::into_raw(Arc::clone(&gate)).expose_provenance();
        let status = on(&self.device, || {
            acl!(aclrtLaunchHostFunc(
                stream.raw() => usize, pass => extern "C" fn(*mut c_void), data => usize
            ))
        });
        assert_eq!(status, 0);
        self.held.lock().insert(stream, gate);
    }

    fn release(&self, stream: AscendStream) {
        self.held.lock().remove(&stream).expect("the stream is held").open();
    }

    fn queue_fill(&self, stream: AscendStream, region: Region, byte: u8) {
        queue_fill(&self.device, stream, region, byte);
    }

    fn registered(&self) -> usize {
        self.device.registrations()
    }

    fn second(&self) -> AscendDevice {
        self.other.expect("the machine has two devices")
    }

    fn current(&self) -> Option<DeviceUuid> {
        let (mut context, mut user) = (0usize, 0u32);
        let asked = acl!(aclrtGetCurrentContext(&mut context => *mut usize));
        if asked != 0 || context == 0 {
            return None;
        }
        assert_eq!(acl!(aclrtGetDevice(&mut user => *mut u32)), 0);
        Some(device(user).identity().uuid)
    }

    fn begin_capture(&self, stream: AscendStream) {
        const GLOBAL: i32 = 0;
        let status = on(&self.device, || acl!(aclmdlRICaptureBegin(stream.raw() => usize, GLOBAL => i32)));
        assert_eq!(status, 0);
    }

    fn end_capture(&self, stream: AscendStream) -> bool {
        on(&self.device, || {
            let mut model = 0usize;
            let ended = acl!(aclmdlRICaptureEnd(stream.raw() => usize, &mut model => *mut usize));
            if model != 0 {
                acl!(aclmdlRIDestroy(model => usize));
            }
            ended == 0
        })
    }

    /// The application's own memory: from CANN 9 on what does not begin with a page, as what ACL shares does; before,
    /// all of it, since nobody says where it begins.
    fn unshareable(&self) -> Vec<(Region, NotExportable)> {
        // SAFETY: only looked up.
        let range = unsafe { library().get::<unsafe extern "C" fn()>("aclrtMemGetAddressRange") };
        let old = range.is_err();
        let why = if old { NotExportable::UnknownBase } else { NotExportable::Pool };
        let len = if old { PAGE } else { 64 };
        let make = || {
            let mut pointer = 0usize;
            assert_eq!(acl!(aclrtMalloc(&mut pointer => *mut usize, len => usize, 0 => i32)), 0);
            pointer
        };
        // Some begin with a page by chance, where one was free.
        for _ in 0..256 {
            let pointer = on(&self.device, make);
            self.kept.lock().push(pointer);
            if old || !pointer.is_multiple_of(PAGE) {
                return vec![(self.device.region(pointer, len), why)];
            }
        }
        Vec::new()
    }
}
