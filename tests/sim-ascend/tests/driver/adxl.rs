//! CANN's C++ libraries as far as Mooncake needs them, through their C++ names.

use std::{
    alloc::{Layout, alloc_zeroed},
    ffi::{CStr, c_char},
    thread,
};

use haulier_sim_ascend::install_adxl;
use libloading::Library;

use crate::process::{Driver, isolated};

/// `MemDesc`: address, length, and 128 reserved bytes.
#[repr(C)]
struct MemDesc {
    address: u64,
    bytes: usize,
    reserved: [u8; 128],
}

/// One pointer's worth of `AdxlEngine`, and two of `AscendString`.
type Object = *mut u64;

struct Adxl {
    datadist: Library,
    metadef: Library,
    engine: Object,
}

const DEVICE: i32 = 0;
const HOST: i32 = 1;

fn object(words: usize) -> Object {
    // SAFETY: the layout is not empty; a C++ object without anything in it yet.
    unsafe { alloc_zeroed(Layout::array::<u64>(words).unwrap()) }.cast()
}

impl Adxl {
    fn new(d: &Driver) -> Self {
        install_adxl(d.folder()).unwrap();
        // SAFETY: the stand-ins run no code when they are loaded.
        let open = |name: &str| unsafe { Library::new(d.folder().join(name)) }.unwrap();
        let adxl =
            Adxl { datadist: open("libllm_datadist.so"), metadef: open("libmetadef.so"), engine: object(1) };
        // SAFETY: the constructor's signature, on memory of an engine's size.
        unsafe {
            let construct = adxl.datadist.get::<extern "C" fn(Object)>("_ZN4adxl10AdxlEngineC1Ev").unwrap();
            construct(adxl.engine);
        }
        adxl
    }

    fn string(&self, text: &CStr) -> Object {
        let string = object(2);
        // SAFETY: the constructor's signature, on memory of a string's size.
        unsafe {
            let construct =
                self.metadef.get::<extern "C" fn(Object, *const c_char)>("_ZN2ge12AscendStringC1EPKc");
            construct.unwrap()(string, text.as_ptr());
        }
        string
    }

    fn is_less(&self, one: Object, other: Object) -> bool {
        // SAFETY: the operator's signature, on two strings.
        unsafe {
            let less =
                self.metadef.get::<extern "C" fn(Object, Object) -> bool>("_ZNK2ge12AscendStringltERKS0_");
            less.unwrap()(one, other)
        }
    }

    fn initialise(&self) -> u32 {
        // The options are not looked at, so any object does for the map.
        const NAME: &str = "_ZN4adxl10AdxlEngine10InitializeERKN2ge12AscendStringERKSt3mapIS2_S2_St4lessIS2_ESaISt4pairIS3_S2_EEE";
        // SAFETY: the method's signature.
        unsafe {
            let method = self.datadist.get::<extern "C" fn(Object, Object, Object) -> u32>(NAME).unwrap();
            method(self.engine, self.string(c"127.0.0.1:20000"), object(6))
        }
    }

    fn register(&self, address: u64, bytes: usize, kind: i32) -> (u32, u64) {
        const NAME: &str = "_ZN4adxl10AdxlEngine11RegisterMemERKNS_7MemDescENS_7MemTypeERPv";
        let (memory, mut handle) = (MemDesc { address, bytes, reserved: [0; 128] }, 0u64);
        // SAFETY: the method's signature.
        unsafe {
            let method = self
                .datadist
                .get::<extern "C" fn(Object, *const MemDesc, i32, *mut u64) -> u32>(NAME)
                .unwrap();
            (method(self.engine, &raw const memory, kind, &raw mut handle), handle)
        }
    }

    fn deregister(&self, handle: u64) -> u32 {
        // SAFETY: the method's signature.
        unsafe {
            let method = self
                .datadist
                .get::<extern "C" fn(Object, u64) -> u32>("_ZN4adxl10AdxlEngine13DeregisterMemEPv");
            method.unwrap()(self.engine, handle)
        }
    }

    fn connect(&self, name: &str) -> u32 {
        // SAFETY: Connect and Disconnect have this signature.
        unsafe {
            let method = self.datadist.get::<extern "C" fn(Object, Object, i32) -> u32>(name).unwrap();
            method(self.engine, self.string(c"127.0.0.1:20100"), 1000)
        }
    }

    fn transfer(&self) -> u32 {
        const NAME: &str = "_ZN4adxl10AdxlEngine12TransferSyncERKN2ge12AscendStringENS_10TransferOpERKSt6vectorINS_14TransferOpDescESaIS7_EEi";
        // SAFETY: the method's signature; three null pointers are an empty vector.
        unsafe {
            let method =
                self.datadist.get::<extern "C" fn(Object, Object, i32, Object, i32) -> u32>(NAME).unwrap();
            method(self.engine, self.string(c"127.0.0.1:20100"), 0, object(3), 1000)
        }
    }

    fn end(&self, name: &str) {
        // SAFETY: Finalize and the destructor have this signature.
        unsafe { self.datadist.get::<extern "C" fn(Object)>(name).unwrap()(self.engine) };
    }
}

/// A test with the C++ libraries beside the runtime.
fn with_engine(test: &str, body: impl FnOnce(&Driver, &Adxl)) {
    isolated(test, &[], &[], |d| body(d, &Adxl::new(d)));
}

#[test]
fn registrations_are_counted_with_the_device_of_the_thread() {
    let test = concat!(module_path!(), "::registrations_are_counted_with_the_device_of_the_thread");
    with_engine(test, |d, adxl| {
        let context = d.on(1);
        assert_eq!((adxl.initialise(), adxl.initialise()), (0, 103900));
        let (heap, block) = (vec![0u8; 4096], d.malloc(8192));
        let at = heap.as_ptr() as u64;
        let (status, host) = adxl.register(at, 4096, HOST);
        assert_eq!((status, d.control.adxl_registrations()), (0, Ok(1)));
        let adxl_address = std::ptr::from_ref(adxl).expose_provenance();
        thread::scope(|s| {
            s.spawn(|| {
                // SAFETY: the engine outlives the thread, which ends within the scope.
                let adxl = unsafe { &*std::ptr::with_exposed_provenance::<Adxl>(adxl_address) };
                assert_eq!(adxl.register(block, 8192, DEVICE).0, 103900, "without a context");
                ok!(d, aclrtSetCurrentContext(context));
                let (status, handle) = adxl.register(block, 8192, DEVICE);
                assert_eq!((status, d.control.adxl_registrations()), (0, Ok(2)));
                assert_ne!(handle, host);
                assert_eq!([adxl.deregister(handle), adxl.deregister(handle)], [0, 103900]);
            });
        });
        let calls = d.control.calls("adxl_RegisterMem");
        let seen: Vec<_> = calls.iter().map(|call| (call.device, call.status)).collect();
        assert_eq!(seen, [(Some(1), Some(0)), (None, Some(103900)), (Some(1), Some(0))]);
        adxl.end("_ZN4adxl10AdxlEngine8FinalizeEv");
        assert_eq!((d.control.adxl_registrations(), d.control.adxl_left()), (Ok(0), Ok(1)));
        adxl.end("_ZN4adxl10AdxlEngineD1Ev");
    });
}

#[test]
fn what_is_registered_is_looked_at() {
    let test = concat!(module_path!(), "::what_is_registered_is_looked_at");
    with_engine(test, |d, adxl| {
        let heap = vec![0u8; 8192];
        let at = heap.as_ptr() as u64;
        assert_eq!(adxl.initialise(), 103900, "without a context");
        d.on(1);
        let elsewhere = d.malloc(4096);
        d.on(0);
        let block = d.malloc(4096);
        assert_eq!(adxl.register(at, 4096, HOST).0, 103900, "before it is initialised");
        assert_eq!(adxl.initialise(), 0);
        assert_eq!((adxl.register(at, 4096, HOST).0, adxl.register(block, 4096, DEVICE).0), (0, 0));
        assert_eq!(
            [
                adxl.register(at + 4095, 2, HOST).0,
                adxl.register(block, 64, DEVICE).0,
                adxl.register(block, 64, HOST).0,
                adxl.register(at + 5000, 64, DEVICE).0,
                adxl.register(elsewhere, 4096, DEVICE).0,
                adxl.register(d.malloc(64), 4096, DEVICE).0,
                adxl.register(at + 5000, 0, HOST).0,
                adxl.register(0, 64, HOST).0,
            ],
            [103900; 8]
        );
        // A fault by the name in the log.
        d.control.plan_faults("adxl_RegisterMem:1=203900").unwrap();
        assert_eq!(adxl.register(at + 5000, 64, HOST).0, 203900);
    });
}

#[test]
fn nothing_is_pretended_to_be_moved() {
    let test = concat!(module_path!(), "::nothing_is_pretended_to_be_moved");
    with_engine(test, |d, adxl| {
        d.on(0);
        assert_eq!(adxl.initialise(), 0);
        assert_eq!(adxl.connect("_ZN4adxl10AdxlEngine7ConnectERKN2ge12AscendStringEi"), 503900);
        assert_eq!(adxl.transfer(), 503900);
        assert_eq!(adxl.connect("_ZN4adxl10AdxlEngine10DisconnectERKN2ge12AscendStringEi"), 103902);
        let why = d.control.calls("adxl_TransferSync")[0].why.clone().unwrap();
        assert!(why.contains("127.0.0.1:20100"), "{why}");
    });
}

#[test]
fn strings_are_ordered() {
    let test = concat!(module_path!(), "::strings_are_ordered");
    with_engine(test, |_, adxl| {
        let (a, b, again) = (adxl.string(c"a"), adxl.string(c"b"), adxl.string(c"a"));
        assert_eq!([adxl.is_less(a, b), adxl.is_less(b, a), adxl.is_less(a, again)], [true, false, false]);
    });
}
