//! Cases of the field's reports on the Ascend backend, through a client here and the daemon of `haulier serve` in another
//! process, with simulated runtimes of one machine. No NPU takes part.

use std::{
    fs,
    io::{BufRead, BufReader},
    path::PathBuf,
    process::{Command, Stdio},
    thread,
};

use backend_ascend::AscendDevice;
use hal::DeviceExt;
use haulier::{Error, Options, Payload, Put, StoreClient};
use haulier_sim::log::Call;
use haulier_tests::{
    acl,
    ascend::{Runtime, alone, device, filled, has_context, is_9, on, peek, sim, stream},
    conformance::pattern,
    process::{Process, binary_with_ascend},
    simulated::misplaced,
};
use tempfile::TempDir;

/// More than what may travel inside a message.
const LEN: usize = 64 << 10;

/// The daemon, which opens memory of NPUs.
struct Daemon {
    process: Process,
    place: TempDir,
}

impl Daemon {
    fn start(environment: &[(&str, &str)]) -> Self {
        let place = tempfile::tempdir().unwrap();
        Daemon { process: serve(&place, environment), place }
    }

    /// Ends it with SIGKILL, and starts another one in its place.
    fn replace(&mut self) {
        self.process.kill();
        self.process = serve(&self.place, &[]);
    }

    fn client(&self, device: AscendDevice) -> StoreClient<AscendDevice> {
        StoreClient::connect(device, self.socket(), Options::default()).unwrap()
    }

    fn socket(&self) -> PathBuf {
        self.place.path().join("private/node.sock")
    }

    /// What its runtime was asked, until now.
    fn calls(&self) -> Vec<Call> {
        let log = self.place.path().join(format!("ascend-{}.jsonl", self.process.id()));
        let lines = fs::read_to_string(log).unwrap();
        lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    fn count(&self, function: &str) -> usize {
        self.calls().iter().filter(|call| call.function == function).count()
    }
}

fn serve(place: &TempDir, environment: &[(&str, &str)]) -> Process {
    let mut command = Command::new(binary_with_ascend());
    command.args(["serve", "--pool", "256MiB", "--backend", "ascend", "--socket"]);
    command.arg(place.path().join("private/node.sock"));
    command.env("HAULIER_SIM_LOG", place.path()).envs(environment.iter().copied());
    command.stdout(Stdio::piped());
    let mut child = Process::spawn(&mut command).unwrap();
    let ready = BufReader::new(child.take_stdout().unwrap()).lines().next().unwrap().unwrap();
    assert!(ready.contains("node.sock"), "{ready}");
    child
}

/// P01, P02, P03: clients on two devices, whose threads have no context, and a daemon where nobody sets a device.
#[test]
fn two_devices_interleaved_from_threads_without_a_context_have_the_right_one_in_each_call() {
    alone(&[], || {
        let daemon = Daemon::start(&[]);
        thread::scope(|scope| {
            for logical in [0, 1] {
                let daemon = &daemon;
                scope.spawn(move || {
                    let device = device(logical);
                    let client = daemon.client(device);
                    for round in 0..100u32 {
                        let bytes = pattern(round as u8, LEN + round as usize);
                        let buffer = filled(&device, &bytes);
                        let key = format!("{logical}/{round}");
                        assert_eq!(client.put(&key, &buffer).unwrap(), Put::Stored);
                        let mut back = device.buffer(bytes.len()).unwrap();
                        client.get_into(&key, &mut back).unwrap();
                        assert!(peek(back.region()) == bytes, "{key}");
                        assert!(client.get(&key).unwrap() == bytes, "{key}");
                    }
                    assert!(!has_context(), "the caller's thread was left bound");
                });
            }
        });
        for calls in [sim().log(), daemon.calls()] {
            assert!(calls.iter().filter(|call| call.function == "aclrtSetDevice").count() <= 2);
            let wrong = misplaced::<Runtime>(calls);
            assert!(wrong.is_empty(), "{wrong:#?}");
        }
        // A put and a get into each buffer, by key.
        let imported = daemon.count("aclrtIpcMemImportByKey");
        assert_eq!((imported, daemon.count("aclrtIpcMemClose")), (400, 400));
        assert_eq!(device(0).failed_drops(), 0);
        assert_eq!(sim().live_allocations(), Ok(0));
    });
}

/// P14, P16.
#[test]
fn a_put_waits_for_the_stream_that_was_named_and_sends_what_it_wrote() {
    alone(&[], || {
        let daemon = Daemon::start(&[]);
        let device = device(1);
        let client = daemon.client(device);
        let buffer = filled(&device, &[0; LEN]);
        let stream = stream(&device);
        for byte in [0xab, 0xcd] {
            sim().hold(stream.raw() as u64).unwrap();
            let queue = || sim().fill(stream.raw() as u64, buffer.region().addr as u64, LEN, byte);
            on(&device, queue).unwrap();
            thread::scope(|scope| {
                let put = || device.with_stream(stream, || client.upsert("k", &buffer));
                let putting = scope.spawn(put);
                sim().wait_for_calls("aclrtSynchronizeStreamWithTimeout", 1);
                assert!(!putting.is_finished());
                assert_eq!(sim().pending(stream.raw() as u64).map(|queued| queued > 0), Ok(true));
                sim().release(stream.raw() as u64).unwrap();
                putting.join().unwrap().unwrap();
            });
            assert_eq!(sim().pending(stream.raw() as u64), Ok(0));
            assert!(client.get("k").unwrap() == vec![byte; LEN]);
            sim().clear_log().unwrap();
        }
        // A wait that fails sends nothing.
        sim().plan_faults("aclrtSynchronizeStreamWithTimeout=507015").unwrap();
        let refused = device.with_stream(stream, || client.put("never", &buffer));
        assert!(matches!(refused, Err(Error::NotSent { .. })), "{refused:?}");
        sim().clear_faults().unwrap();
        assert!(!client.exists("never").unwrap());
    });
}

/// P25, P37: what the daemon's runtime refuses goes by staging, in the same call.
#[test]
fn what_cannot_be_opened_there_goes_by_staging() {
    alone(&[], || {
        let daemon = Daemon::start(&[("HAULIER_SIM_FAULTS", "aclrtIpcMemImportByKey=507899")]);
        let device = device(0);
        let client = daemon.client(device);
        let bytes = pattern(7, LEN);
        let buffer = filled(&device, &bytes);
        assert_eq!(client.put("k", &buffer).unwrap(), Put::Stored);
        assert!(client.get("k").unwrap() == bytes);
        assert!(daemon.count("aclrtIpcMemImportByKey") > 0, "it was tried");
    });
}

/// P35: the daemon sees the devices in another order.
#[test]
fn the_daemon_opens_memory_on_the_same_npu_whatever_its_number_there() {
    alone(&[], || {
        let daemon = Daemon::start(&[("ASCEND_RT_VISIBLE_DEVICES", "1,0")]);
        let device = device(0);
        let client = daemon.client(device);
        let bytes = pattern(7, LEN);
        assert_eq!(client.put("k", &filled(&device, &bytes)).unwrap(), Put::Stored);
        assert!(client.get("k").unwrap() == bytes);
        let imports: Vec<_> = daemon.calls();
        let imports = imports.iter().filter(|call| call.function == "aclrtIpcMemImportByKey");
        assert!(imports.map(|call| (call.device, call.status)).eq([(Some(1), Some(0))]));
    });
}

/// P28: the driver has no ids for memory of others, and says nothing when it is freed.
#[test]
fn freed_and_reused_addresses_are_read_anew() {
    alone(&[], || {
        let daemon = Daemon::start(&[]);
        let device = device(0);
        let client = daemon.client(device);
        for round in 0..200u32 {
            let bytes = round.to_le_bytes().repeat(LEN / 4);
            let pointer = on(&device, || {
                let mut pointer = 0usize;
                assert_eq!(acl!(aclrtMalloc(&mut pointer => *mut usize, LEN => usize, 0 => i32)), 0);
                pointer
            });
            sim().poke(pointer as u64, &bytes).unwrap();
            // SAFETY: the memory is freed after the call.
            let payload = unsafe { Payload::raw(pointer, LEN) };
            client.upsert("k", payload).unwrap();
            assert_eq!(on(&device, || acl!(aclrtFree(pointer => usize))), 0);
            assert!(client.get("k").unwrap() == bytes, "stale bytes in round {round}");
        }
        assert_eq!(daemon.count("aclrtIpcMemImportByKey"), if is_9() { 200 } else { 0 });
        // The client is still there, and nothing is left open: closed before the answer, as CANN wants it.
        assert_eq!(daemon.count("aclrtIpcMemClose"), daemon.count("aclrtIpcMemImportByKey"));
        drop(client);
    });
}

/// P09: the threads that find the daemon gone, find the new one and register there have no context.
#[test]
fn after_kill_9_of_the_daemon_a_client_goes_on_by_ipc_from_threads_without_a_context() {
    alone(&[], || {
        let mut daemon = Daemon::start(&[]);
        let device = device(1);
        let client = daemon.client(device);
        let (buffer, host) = (filled(&device, &pattern(1, LEN)), vec![7; LEN]);
        let registered = client.register_buffer(&buffer).unwrap();
        assert_eq!(client.put("before", &buffer).unwrap(), Put::Stored);
        for round in 0..3u8 {
            daemon.replace();
            sim().clear_log().unwrap();
            thread::scope(|scope| {
                let put = || {
                    let put = client.put("after", &buffer);
                    (put, has_context())
                };
                let (put, bound) = scope.spawn(put).join().unwrap();
                assert_eq!(put.unwrap(), Put::Stored, "round {round}");
                assert!(!bound, "the caller's thread was left bound");
            });
            assert_eq!(client.put("host", &host).unwrap(), Put::Stored);
            assert!(client.get("after").unwrap() == pattern(1, LEN));
            assert!(matches!(client.get("before"), Err(Error::NotFound)), "it died with the daemon");
            let imports: Vec<_> = daemon.calls();
            let imports = imports.iter().filter(|call| call.function == "aclrtIpcMemImportByKey");
            assert!(imports.map(|call| (call.device, call.status)).eq([(Some(1), Some(0))]), "round {round}");
            for calls in [sim().log(), daemon.calls()] {
                let wrong = misplaced::<Runtime>(calls);
                assert!(wrong.is_empty(), "{wrong:#?}");
            }
        }
        drop(registered);
        assert_eq!((device.registrations(), device.failed_drops(), sim().retained(1)), (0, 0, Ok(1)));
    });
}
