//! An application's calls of the driver: those that every driver has, simulated or not.

use std::{
    collections::HashMap,
    ffi::c_void,
    mem,
    sync::{Arc, OnceLock},
    thread,
};

use backend_cuda::{CudaDevice, CudaStream};
use hal::{Device, DeviceUuid, LogicalId, NotExportable, Place, Presence, Region};
use libloading::Library;
use parking_lot::{Mutex, MutexGuard};

use crate::{
    fixture::{Fixture, Need},
    gate::Gate,
};

/// The library that the backend has found in this process.
///
/// # Panics
/// Where it has found none.
pub fn library() -> &'static Library {
    static LIBRARY: OnceLock<Library> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        let Presence::Present { library: Some(path) } = backend_cuda::probe() else {
            panic!("there is no driver");
        };
        // SAFETY: the backend has opened it before.
        unsafe { Library::new(path) }.expect("it was found")
    })
}

/// Calls a function of the driver as an application would, and gives its status.
#[macro_export]
macro_rules! cu {
    ($name:ident($($value:expr => $ty:ty),* $(,)?)) => {{
        // SAFETY: this is the function's signature.
        let function = unsafe {
            $crate::cuda::library().get::<unsafe extern "C" fn($($ty),*) -> i32>(stringify!($name))
        };
        let function = function.expect("the driver has it");
        #[allow(clippy::macro_metavars_in_unsafe, reason = "the arguments are expressions of tests")]
        // SAFETY: pointers are to locals of the caller, handles are the driver's.
        let status = unsafe { function($($value),*) };
        status
    }};
}

/// The device with this id.
///
/// # Panics
/// Where the machine does not have it.
pub fn device(logical: u32) -> CudaDevice {
    CudaDevice::open(LogicalId(logical)).expect("the machine has it")
}

/// Runs an application's calls with the device current.
///
/// # Panics
/// Where the driver refuses.
pub fn on<R>(device: &CudaDevice, work: impl FnOnce() -> R) -> R {
    let _bound = device.bind_current().expect("the driver is up");
    work()
}

/// A new stream that does not wait for the default stream.
///
/// # Panics
/// Where the driver refuses.
pub fn stream(device: &CudaDevice) -> CudaStream {
    const NON_BLOCKING: u32 = 1;
    let mut raw = 0;
    on(device, || assert_eq!(cu!(cuStreamCreate(&mut raw => *mut usize, NON_BLOCKING => u32)), 0));
    // SAFETY: tests destroy no stream, but for a fixture its own at its end.
    unsafe { CudaStream::from_raw(raw) }
}

/// Queues setting all of `region` to `byte`.
///
/// # Panics
/// Where the driver refuses.
pub fn queue_fill(device: &CudaDevice, stream: CudaStream, region: Region, byte: u8) {
    let (pointer, len) = (region.addr as u64, region.len);
    let queued =
        on(device, || cu!(cuMemsetD8Async(pointer => u64, byte => u8, len => usize, stream.raw() => usize)));
    assert_eq!(queued, 0);
}

/// An event at the end of what is queued on the stream.
///
/// # Panics
/// Where the driver refuses.
pub fn event(device: &CudaDevice, stream: CudaStream) -> u64 {
    const NO_TIMING: u32 = 2;
    let mut event = 0;
    on(device, || {
        assert_eq!(cu!(cuEventCreate(&mut event => *mut u64, NO_TIMING => u32)), 0);
        assert_eq!(cu!(cuEventRecord(event => u64, stream.raw() => usize)), 0);
    });
    event
}

/// Lets what is queued on the stream from now on wait for the event.
///
/// # Panics
/// Where the driver refuses.
pub fn wait_for(device: &CudaDevice, stream: CudaStream, event: u64) {
    let status = on(device, || cu!(cuStreamWaitEvent(stream.raw() => usize, event => u64, 0 => u32)));
    assert_eq!(status, 0);
}

/// 4 KiB of a pool and 4 KiB of managed memory, of the current device.
///
/// # Panics
/// Where the driver refuses.
pub fn unshareable() -> (u64, u64) {
    const GLOBAL: u32 = 1;
    let (mut pool, mut managed) = (0u64, 0u64);
    assert_eq!(cu!(cuMemAllocAsync(&mut pool => *mut u64, 4096 => usize, 0 => usize)), 0);
    assert_eq!(cu!(cuMemAllocManaged(&mut managed => *mut u64, 4096 => usize, GLOBAL => u32)), 0);
    (pool, managed)
}

/// Virtual memory of chunks of these lengths, made to be shared, as PyTorch's expandable segments are. It lives as long
/// as the process.
///
/// # Panics
/// Where the driver refuses.
pub fn expandable(device: &CudaDevice, chunks: &[usize]) -> Region {
    /// `CUmemAllocationProp`.
    #[repr(C)]
    struct Properties {
        kind: u32,
        handle_types: u32,
        location: [u32; 2],
        win32: usize,
        flags: [u8; 8],
    }
    const PINNED: u32 = 1;
    const POSIX_FD: u32 = 1;
    const ON_DEVICE: u32 = 1;
    const READ_WRITE: u32 = 3;
    let ordinal = device.identity().logical.0;
    let len = chunks.iter().sum::<usize>();
    let mut addr = 0u64;
    on(device, || {
        let reserved =
            cu!(cuMemAddressReserve(&mut addr => *mut u64, 2 * len => usize, 0 => usize, 0 => u64, 0 => u64));
        assert_eq!(reserved, 0);
        let mut at = addr;
        for &chunk in chunks {
            let location = [ON_DEVICE, ordinal];
            let properties =
                Properties { kind: PINNED, handle_types: POSIX_FD, location, win32: 0, flags: [0; 8] };
            let mut handle = 0u64;
            let created = cu!(cuMemCreate(
                &mut handle => *mut u64, chunk => usize, &properties => *const Properties, 0 => u64
            ));
            assert_eq!(created, 0);
            assert_eq!(cu!(cuMemMap(at => u64, chunk => usize, 0 => usize, handle => u64, 0 => u64)), 0);
            // The mapping keeps the memory.
            assert_eq!(cu!(cuMemRelease(handle => u64)), 0);
            let access = [ON_DEVICE, ordinal, READ_WRITE];
            let allowed =
                cu!(cuMemSetAccess(at => u64, chunk => usize, access.as_ptr() => *const u32, 1 => usize));
            assert_eq!(allowed, 0);
            at += chunk as u64;
        }
    });
    device.region(addr as usize, len)
}

/// A device of the CUDA backend and what an application does with it, for the conformance suite on any driver.
pub struct DriverFixture {
    device: CudaDevice,
    other: Option<CudaDevice>,
    failed_drops: u64,
    streams: Mutex<Vec<CudaStream>>,
    events: Mutex<Vec<u64>>,
    held: Mutex<HashMap<CudaStream, Arc<Gate>>>,
    /// What `unshareable` made: a pool's memory, and managed memory.
    kept: Mutex<Vec<u64>>,
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
        let devices = CudaDevice::all().expect("the driver is up");
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
    pub fn event(&self, stream: CudaStream) -> u64 {
        let event = event(&self.device, stream);
        self.events.lock().push(event);
        event
    }

    /// Whether the driver says that an event of [`event`](Self::event) is reached.
    ///
    /// # Panics
    /// Where it says something else.
    pub fn is_reached(&self, event: u64) -> bool {
        const NOT_READY: i32 = 600;
        match on(&self.device, || cu!(cuEventQuery(event => u64))) {
            0 => true,
            NOT_READY => false,
            other => panic!("cuEventQuery: {other}"),
        }
    }

    /// Copies between the device and the host by the driver's plain call.
    ///
    /// # Safety
    /// Both regions must be allocated and left alone meanwhile, one of them on the device.
    ///
    /// # Panics
    /// Where the driver refuses.
    pub unsafe fn plain_copy(&self, to: Region, from: Region) {
        let (into, out_of, len) = (to.addr as u64, from.addr as u64, to.len.min(from.len));
        let status = on(&self.device, || match to.place {
            Place::Host => cu!(cuMemcpyDtoH_v2(into => u64, out_of => u64, len => usize)),
            Place::Device(_) => cu!(cuMemcpyHtoD_v2(into => u64, out_of => u64, len => usize)),
        });
        assert_eq!(status, 0);
    }

    /// How many bytes the device has.
    fn memory(&self) -> usize {
        let mut bytes = 0usize;
        let ordinal = self.device.identity().logical.0.cast_signed();
        assert_eq!(cu!(cuDeviceTotalMem_v2(&mut bytes => *mut usize, ordinal => i32)), 0);
        bytes
    }
}

impl Drop for DriverFixture {
    fn drop(&mut self) {
        self.held.lock().drain().for_each(|(_, gate)| gate.open());
        on(&self.device, || {
            for stream in mem::take(&mut *self.streams.lock()) {
                // Also where a trial failed and left work behind.
                cu!(cuStreamSynchronize(stream.raw() => usize));
                cu!(cuStreamDestroy_v2(stream.raw() => usize));
            }
            for event in mem::take(&mut *self.events.lock()) {
                cu!(cuEventDestroy_v2(event => u64));
            }
            for pointer in mem::take(&mut *self.kept.lock()) {
                cu!(cuMemFree_v2(pointer => u64));
            }
        });
        if !thread::panicking() {
            let failed = self.device.failed_drops() - self.failed_drops;
            assert_eq!(failed, 0, "guards could not give back what they held");
        }
    }
}

impl Fixture<CudaDevice> for DriverFixture {
    fn device(&self) -> &CudaDevice {
        &self.device
    }

    fn lacks(&self) -> &'static [(Need, &'static str)] {
        const LACKS: &[(Need, &str)] = &[
            (Need::SecondDevice, "this machine has one device"),
            (Need::OneWay, "this driver gives every thread back"),
            (Need::Switches, "a driver does not say how often it was called"),
            (Need::Faults, "a driver is not made to refuse"),
            (Need::QueuedFailure, "a kernel that fails ends CUDA for the whole process"),
            (Need::AddressReuse, "the driver chooses addresses"),
            (Need::RegisterLimit, "this driver limits no registration of device memory"),
            (Need::RegisterAlignment, "this driver registers any address"),
            (Need::NoCaps, "a process has one driver, and this one can do everything"),
        ];
        if self.other.is_none() { LACKS } else { &LACKS[1..] }
    }

    fn too_much(&self) -> usize {
        2 * self.memory()
    }

    fn stream(&self) -> CudaStream {
        let stream = stream(&self.device);
        self.streams.lock().push(stream);
        stream
    }

    /// By a host function on the stream. A driver may run all of a process's host functions on one thread, so at most one
    /// stream is to be held at a time.
    fn hold(&self, stream: CudaStream) {
        let gate = Arc::new(Gate::default());
        let data = Arc::into_raw(Arc::clone(&gate)).cast_mut().cast::<c_void>();
        let status = on(&self.device, || {
            cu!(cuLaunchHostFunc(
                stream.raw() => usize, pass => extern "C" fn(*mut c_void), data => *mut c_void
            ))
        });
        assert_eq!(status, 0);
        self.held.lock().insert(stream, gate);
    }

    fn release(&self, stream: CudaStream) {
        self.held.lock().remove(&stream).expect("the stream is held").open();
    }

    fn queue_fill(&self, stream: CudaStream, region: Region, byte: u8) {
        queue_fill(&self.device, stream, region, byte);
    }

    fn registered(&self) -> usize {
        self.device.registrations()
    }

    fn second(&self) -> CudaDevice {
        self.other.clone().expect("the machine has two devices")
    }

    fn current(&self) -> Option<DeviceUuid> {
        let mut ordinal = 0u32;
        let status = cu!(cuCtxGetDevice(&mut ordinal => *mut u32));
        (status == 0).then(|| device(ordinal).identity().uuid)
    }

    fn per_thread_stream(&self) -> CudaStream {
        CudaStream::per_thread()
    }

    fn begin_capture(&self, stream: CudaStream) {
        const GLOBAL: u32 = 0;
        let begun = on(&self.device, || cu!(cuStreamBeginCapture_v2(stream.raw() => usize, GLOBAL => u32)));
        assert_eq!(begun, 0);
    }

    fn end_capture(&self, stream: CudaStream) -> bool {
        let mut graph = 0usize;
        let ended =
            on(&self.device, || cu!(cuStreamEndCapture(stream.raw() => usize, &mut graph => *mut usize)));
        if graph != 0 {
            cu!(cuGraphDestroy(graph => usize));
        }
        ended == 0
    }

    fn unshareable(&self) -> Vec<(Region, NotExportable)> {
        let (pool, managed) = on(&self.device, unshareable);
        self.kept.lock().extend([pool, managed]);
        let region = |pointer: u64| self.device.region(pointer as usize, 4096);
        vec![(region(pool), NotExportable::Pool), (region(managed), NotExportable::Managed)]
    }
}
