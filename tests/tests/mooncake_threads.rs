//! Threads and contexts with the real Mooncake library on the simulated Ascend runtime; no NPU takes part.
//!
//! What an application's own pool threads get from Mooncake, and what they get through Haulier: the owner works on device
//! 1, and the threads that register have no context.

use std::{
    collections::BTreeMap,
    ffi::{CString, c_char, c_int, c_void},
    thread,
    time::Duration,
};

use backend_ascend::AscendDevice;
use haulier::{
    Error, Options, Payload, Put, StoreClient, Target,
    hal::{Buffer, DeviceExt, Kind, LogicalId, Region},
};
use haulier_sim::log::Call;
use haulier_tests::{
    acl,
    ascend::sim,
    mooncake::{Raw, Trial, cluster, role},
    world::bytes,
};

const MIB: u64 = 1 << 20;
const WORKERS: usize = 4;

/// What the log says of a registration without a context, by release.
const NO_CONTEXT: &str = "aclrtGetCurrentContext failed";
const NO_CONTEXT_8: &str = "Call acl failed, detail:";

/// The context that is current on this thread, if any.
fn context() -> Option<usize> {
    let mut context = 0usize;
    let status = acl!(aclrtGetCurrentContext(&mut context => *mut usize));
    (status == 0 && context != 0).then_some(context)
}

fn device() -> AscendDevice {
    AscendDevice::open(LogicalId(1)).unwrap()
}

fn options() -> Options {
    Options { workers: WORKERS, deadline: Duration::from_secs(60), ..Options::default() }
}

fn upload(device: &AscendDevice, bytes: &[u8]) -> Buffer<AscendDevice> {
    let buffer = device.buffer(bytes.len()).unwrap();
    let from = Region::host(bytes.as_ptr() as usize, bytes.len());
    // SAFETY: the buffer is new and the bytes are borrowed.
    device.bound(|bound| unsafe { bound.copy(buffer.region(), from) }).unwrap();
    buffer
}

fn download(device: &AscendDevice, buffer: &Buffer<AscendDevice>) -> Vec<u8> {
    let mut bytes = vec![0; buffer.region().len];
    let to = Region::host(bytes.as_mut_ptr() as usize, bytes.len());
    // SAFETY: the vector is this function's, and nothing writes the buffer.
    device.bound(|bound| unsafe { bound.copy(to, buffer.region()) }).unwrap();
    bytes
}

/// An application that calls the C ABI itself. Its main thread owns device 1; its pool threads have no context.
fn without_haulier(old: bool) {
    type Register = unsafe extern "C" fn(*mut c_void, *mut c_void, usize) -> c_int;
    type Unregister = unsafe extern "C" fn(*mut c_void, *mut c_void) -> c_int;
    type Setup = unsafe extern "C" fn(
        *mut c_void,
        *const c_char,
        *const c_char,
        u64,
        u64,
        *const c_char,
        *const c_char,
        *const c_char,
    ) -> c_int;
    const EACH: usize = 6;
    const LEN: usize = 1 << 16;

    let raw = Raw::load();
    // SAFETY: the types are those of the ABI.
    let (create, setup, register, unregister, destroy) = unsafe {
        (
            raw.function::<unsafe extern "C" fn() -> *mut c_void>("mooncake_store_create"),
            raw.function::<Setup>("mooncake_store_setup"),
            raw.function::<Register>("mooncake_store_register_buffer"),
            raw.function::<Unregister>("mooncake_store_unregister_buffer"),
            raw.function::<unsafe extern "C" fn(*mut c_void)>("mooncake_store_destroy"),
        )
    };
    assert_eq!(acl!(aclrtSetDevice(1 => i32)), 0);
    let text = |text: &str| CString::new(text).unwrap();
    let (host, metadata, protocol) = (text("127.0.0.1"), text("P2PHANDSHAKE"), text("ascend"));
    let (none, master) = (text(""), text(&cluster(0).master));
    // SAFETY: as the ABI wants it.
    let store = unsafe { create() };
    // SAFETY: the texts live for the call.
    let joined = unsafe {
        setup(
            store,
            host.as_ptr(),
            metadata.as_ptr(),
            16 * MIB,
            MIB,
            protocol.as_ptr(),
            none.as_ptr(),
            master.as_ptr(),
        )
    };
    assert_eq!(joined, 0);

    let mut buffers: Vec<Vec<u8>> = (0..WORKERS * EACH).map(|_| vec![0; LEN]).collect();
    let addrs: Vec<usize> =
        buffers.iter_mut().map(|buffer| buffer.as_mut_ptr().expose_provenance()).collect();
    let store = store.expose_provenance();
    let pointer = |addr: usize| std::ptr::with_exposed_provenance_mut::<c_void>(addr);
    let pool = |work: &(dyn Fn(usize) -> c_int + Sync)| -> Vec<(c_int, bool)> {
        thread::scope(|scope| {
            let threads: Vec<_> = addrs
                .chunks(EACH)
                .map(|mine| {
                    scope.spawn(move || {
                        assert_eq!(context(), None, "a new thread has none");
                        mine.iter().map(|&addr| (work(addr), context().is_some())).collect::<Vec<_>>()
                    })
                })
                .collect();
            threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
        })
    };

    // SAFETY: the buffers live to the end.
    let registered = pool(&|addr| unsafe { register(pointer(store), pointer(addr), LEN) });
    assert_eq!(registered, [(-600, false); WORKERS * EACH], "no registration succeeds");

    for &addr in &addrs {
        // SAFETY: as above.
        assert_eq!(unsafe { register(pointer(store), pointer(addr), LEN) }, 0, "on the owner's thread");
    }
    // SAFETY: as above.
    let unregistered = pool(&|addr| unsafe { unregister(pointer(store), pointer(addr)) });
    if old {
        // It says that all is well, and leaves the thread bound to what it was not.
        assert_eq!(unregistered, [(0, true); WORKERS * EACH]);
    } else {
        assert_eq!(unregistered, [(-600, false); WORKERS * EACH], "no deregistration succeeds");
    }
    // SAFETY: nobody uses it any more.
    unsafe { destroy(pointer(store)) };
}

fn before(test: &str, release: &'static str, old: bool) {
    if role().is_some() {
        return without_haulier(old);
    }
    let Some(trial) = Trial::new(test, release, "ascend") else { return };
    let report = trial.run("application");
    let line = if old { NO_CONTEXT_8 } else { NO_CONTEXT };
    let said = report.said.matches(line).count();
    // 8.5 notices a registration only.
    let expected = if old { 24 } else { 48 };
    assert!(said >= expected, "{said} times {line:?}\n{}", report.said);
}

#[test]
fn without_haulier_no_pool_thread_registers_or_deregisters() {
    before("without_haulier_no_pool_thread_registers_or_deregisters", "9.0.0", false);
}

#[test]
fn without_haulier_on_cann_8_no_pool_thread_registers_and_each_is_left_bound() {
    before("without_haulier_on_cann_8_no_pool_thread_registers_and_each_is_left_bound", "8.5.0", true);
}

/// The same through a client: threads without a context register, deregister, and stay as they were.
fn through_haulier() {
    const EACH: usize = 40;
    let device = device();
    let client = StoreClient::mooncake(device, &cluster(64 * MIB), options()).unwrap();
    let registrations = || sim().ask("haulier_sim_adxl_registrations").unwrap();
    let own = registrations();
    thread::scope(|scope| {
        for worker in 0..WORKERS {
            let client = &client;
            scope.spawn(move || {
                let before = context();
                assert_eq!(before, None);
                // Half of them the device's memory, half the host's.
                let buffers: Vec<_> = (0..EACH / 2).map(|_| device.buffer(1 << 16).unwrap()).collect();
                let host: Vec<_> = (0..EACH / 2).map(|_| vec![worker as u8; 1 << 16]).collect();
                let guards: Vec<_> = (buffers.iter().map(Payload::from))
                    .chain(host.iter().map(Payload::from))
                    .map(|payload| client.register_buffer(payload).unwrap())
                    .collect();
                // Again, which only counts.
                drop(client.register_buffer(&buffers[0]).unwrap());
                drop(guards);
                assert_eq!(context(), before, "the thread is as it was");
            });
        }
    });
    assert_eq!(registrations(), own, "nothing is left registered");

    // A buffer that is put is registered by the way, once, and let go before its memory is freed.
    let value = bytes(1, 200_000);
    let buffer = upload(&device, &value);
    assert_eq!(client.put("direct/1", &buffer).unwrap(), Put::Stored);
    assert_eq!(client.put("direct/2", &buffer).unwrap(), Put::Stored);
    assert_eq!(registrations(), own + 1);
    assert_eq!(client.get("direct/1").unwrap(), value);
    drop(buffer);
    assert_eq!(registrations(), own);
    assert_eq!(sim().freed_while_registered(), Ok(0));

    // A part that is registered by itself keeps the whole from being so: that goes by staging.
    let parted = upload(&device, &value);
    let part = client.register_buffer(Payload::part(&parted, 4096, 4096).unwrap()).unwrap();
    client.put("parted", &parted).unwrap();
    assert_eq!(client.get("parted").unwrap(), value);
    assert_eq!(registrations(), own + 1);
    drop(part);
    drop(parted);
    assert_eq!(registrations(), own);

    // What is registered when the client goes, goes with it.
    let kept = upload(&device, &value);
    client.put("direct/3", &kept).unwrap();
    drop(client);
    assert_eq!(registrations(), 0);
    assert_eq!(sim().ask("haulier_sim_adxl_left"), Ok(0));
    drop(kept);
}

fn after(test: &str, release: &'static str) {
    if role().is_some() {
        return through_haulier();
    }
    let Some(trial) = Trial::new(test, release, "ascend") else { return };
    let report = trial.run("client");
    for line in [NO_CONTEXT, NO_CONTEXT_8] {
        assert!(!report.said.contains(line), "{line:?} was said\n{}", report.said);
    }
    for function in ["adxl_RegisterMem", "adxl_DeregisterMem"] {
        let calls: Vec<&Call> = report.calls.iter().filter(|call| call.function == function).collect();
        let mut outcomes: BTreeMap<(Option<i32>, Option<u32>), usize> = BTreeMap::new();
        for call in &calls {
            *outcomes.entry((call.status, call.device)).or_default() += 1;
        }
        eprintln!(
            "simulated CANN {release}, {function}: {} calls, by status and device {outcomes:?}",
            calls.len()
        );
        assert!(calls.len() >= 159, "{function}: {} calls", calls.len());
        assert_eq!(
            outcomes.keys().collect::<Vec<_>>(),
            [&(Some(0), Some(1))],
            "{function}: all succeed on device 1"
        );
    }
}

#[test]
fn through_haulier_every_registration_and_deregistration_succeeds_on_the_owners_device() {
    after("through_haulier_every_registration_and_deregistration_succeeds_on_the_owners_device", "9.0.0");
}

#[test]
fn through_haulier_on_cann_8_every_registration_and_deregistration_succeeds_on_the_owners_device() {
    let test =
        "through_haulier_on_cann_8_every_registration_and_deregistration_succeeds_on_the_owners_device";
    after(test, "8.5.0");
}

/// Puts a buffer of device 1 and fills another one, on a thread that is called so.
fn round_trip(client: &StoreClient<AscendDevice>, name: &str, current: Option<i32>) {
    let (client, key) = (client.clone(), name.to_owned());
    let work = move || {
        if let Some(other) = current {
            assert_eq!(acl!(aclrtSetDevice(other => i32)), 0);
        }
        let before = context();
        let device = *client.device();
        let value = bytes(key.len() as u64, 150_000);
        let (source, mut target) = (upload(&device, &value), device.buffer(value.len()).unwrap());
        assert_eq!(client.put(&key, &source).unwrap(), Put::Stored);
        assert_eq!(client.get_into(&key, Target::from(&mut target)).unwrap(), value.len() as u64);
        assert_eq!(download(&device, &target), value);
        client.health().unwrap();
        drop(client.register_buffer(&target).unwrap());
        assert!(client.remove(&key).unwrap());
        assert_eq!(context(), before, "{key}: the thread is as it was");
    };
    thread::Builder::new().name(name.into()).spawn(work).unwrap().join().unwrap();
}

#[test]
fn every_thread_of_an_application_works_on_the_device_that_the_client_was_opened_for() {
    let test = "every_thread_of_an_application_works_on_the_device_that_the_client_was_opened_for";
    if role().is_some() {
        // P02: a helper with a deadline, a thread without a context, opens it.
        let opened = thread::spawn(|| {
            let client = StoreClient::mooncake(device(), &cluster(64 * MIB), options()).unwrap();
            assert_eq!(context(), None);
            client
        });
        let client = opened.join().unwrap();
        for name in ["deadline", "listener", "reconnect", "heartbeat"] {
            round_trip(&client, name, None);
            round_trip(&client, &format!("{name}/0"), Some(0));
            round_trip(&client, &format!("{name}/1"), Some(1));
        }
        return;
    }
    let Some(trial) = Trial::new(test, "9.0.0", "ascend") else { return };
    let report = trial.run("application");
    let elsewhere: Vec<&Call> = report
        .calls
        .iter()
        .filter(|call| call.function.starts_with("adxl_") && call.device.is_some_and(|device| device != 1))
        .collect();
    assert!(elsewhere.is_empty(), "{elsewhere:?}");
}

/// The error in an error.
fn device_error(e: &Error) -> &haulier::hal::Error {
    match e {
        Error::Device(e) | Error::Mooncake(e) => e,
        Error::NotSent { cause } => device_error(cause),
        e => panic!("{e:?} is no device's error"),
    }
}

#[test]
fn a_bind_or_a_registration_that_fails_is_the_slots_error_and_nothing_goes_another_way() {
    let test = "a_bind_or_a_registration_that_fails_is_the_slots_error_and_nothing_goes_another_way";
    if role().is_some() {
        let device = device();
        sim().plan_faults("aclrtSetDevice=507033").unwrap();
        let refused = StoreClient::mooncake(device, &cluster(64 * MIB), options()).unwrap_err();
        let e = device_error(&refused);
        assert_eq!((e.vendor_code(), e.device()), (Some(507033), Some("1")), "{refused}");
        assert!(e.vendor_text().is_some(), "{refused}");
        sim().clear_faults().unwrap();

        let client = StoreClient::mooncake(device, &cluster(64 * MIB), options()).unwrap();
        let buffer = upload(&device, &bytes(1, 150_000));
        // This thread has another device's context, and the way back to its own is barred.
        assert_eq!(acl!(aclrtSetDevice(0 => i32)), 0);
        sim().plan_faults("aclrtSetCurrentContext=507899").unwrap();
        let refused = client.put("k", &buffer).unwrap_err();
        sim().clear_faults().unwrap();
        let e = device_error(&refused);
        assert_eq!((e.vendor_code(), e.device()), (Some(507899), Some("1")), "{refused}");
        assert!(e.vendor_text().is_some(), "{refused}");
        assert!(!client.exists("k").unwrap());

        // One slot's registration is refused; the others are stored.
        sim().plan_faults("adxl_RegisterMem:1=103900").unwrap();
        let small = bytes(2, 100);
        let verdicts = client.batch_put(vec![("k", (&buffer).into()), ("l", (&small).into())]);
        sim().clear_faults().unwrap();
        let e = device_error(verdicts[0].as_ref().unwrap_err());
        assert_eq!(e.kind(), Kind::InvalidArgument, "{e}");
        assert_eq!((e.backend(), e.vendor_code()), ("mooncake", Some(-600)), "{e}");
        assert_eq!(verdicts[1].as_ref().unwrap(), &Put::Stored);
        assert!(!client.exists("k").unwrap());
        assert_eq!(client.put("k", &buffer).unwrap(), Put::Stored);
        return;
    }
    let Some(trial) = Trial::new(test, "9.0.0", "ascend") else { return };
    trial.run("application");
}
