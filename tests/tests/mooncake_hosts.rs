//! Several processes and one Mooncake cluster, on the real library and the real master: exchange, rounds, and what
//! becomes of calls when a client or the master is killed. The Ascend runtime is simulated; no NPU takes part.

use std::{
    env, fs, thread,
    time::{Duration, Instant},
};

use backend_ascend::AscendDevice;
use backend_cpu::CpuDevice;
use haulier::{
    Dtype, Error, Options, Put, StoreClient, Target, TensorRef,
    hal::{Buffer, Device, DeviceExt, LogicalId, Region},
};
use haulier_tests::{
    mooncake::{SLOW, Trial, cluster, role, sign, wait_for_sign},
    process::skip,
    world::bytes,
};

const MIB: u64 = 1 << 20;
const KEYS: usize = 802;

fn upload<D: Device>(device: &D, bytes: &[u8]) -> Buffer<D> {
    let buffer = device.buffer(bytes.len()).unwrap();
    let from = Region::host(bytes.as_ptr() as usize, bytes.len());
    // SAFETY: the buffer is new and the bytes are borrowed.
    device.bound(|bound| unsafe { bound.copy(buffer.region(), from) }).unwrap();
    buffer
}

fn download<D: Device>(device: &D, buffer: &Buffer<D>) -> Vec<u8> {
    let mut bytes = vec![0; buffer.region().len];
    let to = Region::host(bytes.as_mut_ptr() as usize, bytes.len());
    // SAFETY: the vector is this function's, and nothing writes the buffer.
    device.bound(|bound| unsafe { bound.copy(to, buffer.region()) }).unwrap();
    bytes
}

/// A counter of the client's.
fn counted<D: Device>(client: &StoreClient<D>, line: &str) -> u64 {
    let text = client.metrics().unwrap();
    let value = text.lines().find_map(|l| l.strip_prefix(line)?.trim().parse().ok());
    value.unwrap_or_else(|| panic!("{line} is not in\n{text}"))
}

/// Three rounds of put, get and clear, of host tensors and of device tensors.
fn rounds<D: Device>(device: D, direct: bool) {
    let options = Options { deadline: Duration::from_secs(120), ..Options::default() };
    let client = StoreClient::mooncake(device.clone(), &cluster(512 * MIB), options).unwrap();
    let keys: Vec<String> = (0..KEYS).map(|n| format!("layer.{n}")).collect();
    let names: Vec<&str> = keys.iter().map(String::as_str).collect();
    for round in 0..3 {
        // From one number to more than fits a head.
        let values: Vec<Vec<u8>> =
            (0..KEYS).map(|n| bytes((round * KEYS + n) as u64, 4 + n % 97 * 1024)).collect();
        let shapes: Vec<[u64; 2]> = values.iter().map(|value| [1, value.len() as u64 / 4]).collect();

        let tensors = names.iter().zip(&values).zip(&shapes);
        let tensors: Vec<(&str, TensorRef<'_, D>)> = tensors
            .map(|((name, value), shape)| (*name, TensorRef::new(Dtype::F32, shape, value).unwrap()))
            .collect();
        for verdict in client.batch_put_tensor(&tensors) {
            assert_eq!(verdict.unwrap(), Put::Stored);
        }
        for ((got, value), shape) in client.batch_get_tensor(&names).into_iter().zip(&values).zip(&shapes) {
            let got = got.unwrap();
            assert_eq!((got.spec.dtype, &got.spec.shape[..]), (Dtype::F32, &shape[..]));
            assert!(got.bytes == *value);
        }
        assert_eq!(client.clear().unwrap(), KEYS as u64);
        assert!(client.batch_exists(&names).into_iter().all(|there| !there.unwrap()));

        let sources: Vec<Buffer<D>> = values.iter().map(|value| upload(&device, value)).collect();
        let mut targets: Vec<Buffer<D>> =
            values.iter().map(|value| device.buffer(value.len()).unwrap()).collect();
        let tensors = names.iter().zip(&sources).zip(&shapes);
        let tensors: Vec<(&str, TensorRef<'_, D>)> = tensors
            .map(|((name, source), shape)| (*name, TensorRef::new(Dtype::F32, shape, source).unwrap()))
            .collect();
        for verdict in client.batch_put_tensor(&tensors) {
            assert_eq!(verdict.unwrap(), Put::Stored);
        }
        let items = names.iter().zip(&mut targets).map(|(name, target)| (*name, Target::from(target)));
        for (got, value) in client.batch_get_into(items.collect()).into_iter().zip(&values) {
            assert_eq!(got.unwrap(), value.len() as u64);
        }
        for (target, value) in targets.iter().zip(&values) {
            assert!(download(&device, target) == *value);
        }
        assert_eq!(client.clear().unwrap(), KEYS as u64);
        for gone in client.batch_get(&names) {
            assert!(matches!(gone, Err(Error::NotFound)), "{gone:?}");
        }
    }
    let went = counted(&client, "haulier_values_bytes_total{direction=\"in\",path=\"direct\"} ");
    assert_eq!(went > 0, direct, "{went} bytes went directly");
}

fn three_rounds(test: &str, protocol: &'static str) {
    if role().is_some() {
        // Over TCP Mooncake does not reach device memory: it goes by staging.
        return rounds(AscendDevice::open(LogicalId(1)).unwrap(), protocol == "ascend");
    }
    let Some(trial) = Trial::new(test, "9.0.0", protocol) else { return };
    trial.run("client");
}

#[test]
fn three_rounds_of_802_keys_over_tcp() {
    three_rounds("three_rounds_of_802_keys_over_tcp", "tcp");
}

#[test]
fn three_rounds_of_802_keys_over_ascend() {
    three_rounds("three_rounds_of_802_keys_over_ascend", "ascend");
}

fn client(segment: u64) -> StoreClient<CpuDevice> {
    StoreClient::mooncake(CpuDevice::open().unwrap(), &cluster(segment), Options::default()).unwrap()
}

/// The tensors of a safetensors file: name, dtype, shape, bytes.
fn tensors_of(file: &[u8]) -> Vec<(String, Dtype, Vec<u64>, &[u8])> {
    let len = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let header: serde_json::Value = serde_json::from_slice(&file[8..8 + len]).unwrap();
    let number = |value: &serde_json::Value| value.as_u64().unwrap();
    let tensor = |(name, about): (&String, &serde_json::Value)| {
        let dtype: Dtype = serde_json::from_value(about["dtype"].clone()).unwrap();
        let shape = about["shape"].as_array().unwrap().iter().map(number).collect();
        let [start, end] = [0, 1].map(|i| 8 + len + number(&about["data_offsets"][i]) as usize);
        (name.clone(), dtype, shape, &file[start..end])
    };
    let tensors = header.as_object().unwrap().iter().filter(|(name, _)| *name != "__metadata__");
    tensors.map(tensor).collect()
}

#[test]
fn two_processes_exchange_a_real_models_tensors() {
    const TEST: &str = "two_processes_exchange_a_real_models_tensors";
    let Some(model) = env::var_os("HAULIER_MODEL") else {
        return skip(TEST, "HAULIER_MODEL names no safetensors file; tests/run fetches one");
    };
    match role().as_deref() {
        Some("giver") => {
            let client = client(512 * MIB);
            let file = fs::read(model).unwrap();
            let tensors = tensors_of(&file);
            let items: Vec<(&str, TensorRef<'_, CpuDevice>)> = tensors
                .iter()
                .map(|(name, dtype, shape, bytes)| {
                    (name.as_str(), TensorRef::new(*dtype, shape, *bytes).unwrap())
                })
                .collect();
            for verdict in client.batch_put_tensor(&items) {
                assert_eq!(verdict.unwrap(), Put::Stored);
            }
            sign("given");
            // The values live in this process.
            wait_for_sign("taken");
        }
        Some(_) => {
            let client = client(64 * MIB);
            wait_for_sign("given");
            let file = fs::read(model).unwrap();
            let tensors = tensors_of(&file);
            assert!(tensors.len() > 50);
            for (name, dtype, shape, bytes) in &tensors {
                let got = client.get_tensor(name).unwrap();
                assert_eq!((got.spec.dtype, &got.spec.shape), (*dtype, shape), "{name}");
                assert!(got.bytes == *bytes, "{name}");
            }
            sign("taken");
        }
        None => {
            let Some(trial) = Trial::new(TEST, "9.0.0", "tcp") else { return };
            let (giver, taker) = (trial.start("giver"), trial.start("taker"));
            trial.finish("taker", taker);
            trial.finish("giver", giver);
        }
    }
}

/// Asks until it is answered with an error; each answer comes within the deadline.
fn until_it_fails<R: std::fmt::Debug>(deadline: Duration, ask: impl Fn() -> haulier::Result<R>) -> Error {
    let start = Instant::now();
    loop {
        let asked = Instant::now();
        let answer = ask();
        assert!(
            asked.elapsed() < deadline + Duration::from_secs(1),
            "{answer:?} after {:?}",
            asked.elapsed()
        );
        match answer {
            Err(e) => return e,
            Ok(_) => assert!(start.elapsed() < SLOW, "it does not fail"),
        }
        thread::sleep(Duration::from_millis(50));
    }
}

/// Asks until it is answered well; how long that took.
fn until_it_works<R>(ask: impl Fn() -> haulier::Result<R>) -> Duration {
    let start = Instant::now();
    while let Err(e) = ask() {
        assert!(start.elapsed() < SLOW, "it does not go on: {e}");
        thread::sleep(Duration::from_millis(200));
    }
    start.elapsed()
}

/// Says something that the test shows.
fn tell(what: impl std::fmt::Display) {
    eprintln!("TOLD {what}");
}

fn show(said: &str) {
    for line in said.lines().filter(|line| line.starts_with("TOLD ")) {
        eprintln!("{line}");
    }
}

#[test]
fn a_client_that_is_killed_takes_its_values_along_and_nothing_else() {
    const TEST: &str = "a_client_that_is_killed_takes_its_values_along_and_nothing_else";
    match role().as_deref() {
        Some("holder") => {
            let _client = client(64 * MIB);
            sign("holds");
            thread::sleep(2 * SLOW);
        }
        Some("successor") => {
            wait_for_sign("killed");
            let _client = client(64 * MIB);
            sign("holds again");
            wait_for_sign("done");
        }
        Some(_) => {
            wait_for_sign("holds");
            let client = client(0);
            let (small, large) = (bytes(1, 100), bytes(2, 1 << 20));
            client.put("small", &small).unwrap();
            client.put("large", &large).unwrap();
            assert_eq!(client.get("large").unwrap(), large);
            sign("stored");
            wait_for_sign("killed");
            let deadline = Duration::from_secs(10);
            let impatient = client.with_deadline(deadline);
            let start = Instant::now();
            let e = until_it_fails(deadline, || impatient.get("large"));
            assert!(matches!(e, Error::Mooncake(_) | Error::NotFound | Error::Timeout { .. }), "{e:?}");
            tell(format_args!("after {:?}: {e}", start.elapsed()));
            wait_for_sign("holds again");
            // Nothing is done here for it.
            let gone = until_it_works(|| client.upsert("small", &small));
            tell(format_args!("puts again {gone:?} after a new holder came"));
            let back = until_it_works(|| client.get("small"));
            tell(format_args!("gets again after {back:?}"));
            assert_eq!(client.get("small").unwrap(), small);
            sign("done");
        }
        None => {
            let Some(trial) = Trial::new(TEST, "9.0.0", "tcp") else { return };
            let (mut holder, user) = (trial.start("holder"), trial.start("user"));
            let successor = trial.start("successor");
            trial.wait_for("stored");
            holder.kill();
            trial.sign("killed");
            let report = trial.finish("user", user);
            show(&report.said);
            trial.finish("successor", successor);
        }
    }
}

#[test]
fn while_the_master_is_gone_calls_fail_in_time_and_after_its_restart_all_goes_on() {
    const TEST: &str = "while_the_master_is_gone_calls_fail_in_time_and_after_its_restart_all_goes_on";
    match role().as_deref() {
        Some(_) => {
            let client = client(64 * MIB);
            let value = bytes(1, 100_000);
            client.put("before", &value).unwrap();
            sign("stored");
            wait_for_sign("killed");
            let deadline = Duration::from_secs(1);
            let impatient = client.with_deadline(deadline);
            for (what, e) in [
                ("get", until_it_fails(deadline, || impatient.get("before"))),
                ("put", until_it_fails(deadline, || impatient.put("other", &value))),
                ("size", until_it_fails(deadline, || impatient.size("before"))),
                ("remove", until_it_fails(deadline, || impatient.remove("before"))),
                ("clear", until_it_fails(deadline, || impatient.clear())),
                ("health", until_it_fails(deadline, || impatient.health())),
            ] {
                let told = matches!(e, Error::Timeout { .. } | Error::Mooncake(_));
                assert!(told, "{what}: {e:?}");
                if let Error::Mooncake(_) = e {
                    assert_eq!(e.label(), "unreachable", "{what}: {e}");
                }
                tell(format_args!("{what}: {e}"));
            }
            // With patience Mooncake itself gives up, and says why.
            let e = client.health().unwrap_err();
            assert_eq!(e.label(), "unreachable", "{e}");
            sign("refused");
            wait_for_sign("restarted");
            let gone_on = until_it_works(|| client.upsert("after", &value));
            tell(format_args!("puts again {gone_on:?} after the master's restart"));
            assert_eq!(client.get("after").unwrap(), value);
            // What the old master knew the new one does not.
            assert!(matches!(client.get("before"), Err(Error::NotFound)));
            assert_eq!(client.put("before", &value).unwrap(), Put::Stored);
        }
        None => {
            let Some(mut trial) = Trial::new(TEST, "9.0.0", "tcp") else { return };
            let user = trial.start("user");
            trial.wait_for("stored");
            trial.master.kill();
            trial.sign("killed");
            trial.wait_for("refused");
            trial.master.restart();
            trial.sign("restarted");
            show(&trial.finish("user", user).said);
        }
    }
}

/// Mooncake waits for a holder that does not answer, and has no deadline of its own.
#[test]
fn a_call_of_mooncakes_that_hangs_holds_nobody_beyond_the_deadline() {
    const TEST: &str = "a_call_of_mooncakes_that_hangs_holds_nobody_beyond_the_deadline";
    match role().as_deref() {
        Some("holder") => {
            // Room for puts that are never finished.
            let _client = client(512 * MIB);
            sign("holds");
            wait_for_sign("done");
        }
        Some(_) => {
            wait_for_sign("holds");
            let client = client(0);
            let device = client.device().clone();
            let value = bytes(1, 8 << 20);
            let source = upload(&device, &value);
            client.put("k", &source).unwrap();
            sign("freeze");
            wait_for_sign("frozen");
            let deadline = Duration::from_millis(500);
            let impatient = client.with_deadline(deadline);
            // The call's own time: without optimisation to look through 8 MiB takes a while.
            let times_out = |call: &mut dyn FnMut() -> haulier::Result<()>| {
                let asked = Instant::now();
                let answer = call();
                let took = asked.elapsed();
                assert!(matches!(answer, Err(Error::Timeout { .. })), "{answer:?}");
                assert!(took < deadline + Duration::from_secs(1), "{took:?}");
            };
            // More hanging calls than workers: each is replaced. Not for long: after 10 s without a heartbeat the master
            // forgets the holder.
            for _ in 0..3 {
                // The target goes away at once, like the value that is put: the jobs keep what they work on.
                let mut target = device.buffer(value.len()).unwrap();
                times_out(&mut || impatient.get_into("k", Target::from(&mut target)).map(drop));
                drop(target);
                let mut borrowed = vec![0xEE; value.len()];
                times_out(&mut || impatient.get_into("k", &mut borrowed).map(drop));
                assert!(borrowed.iter().all(|&byte| byte == 0xEE));
                let other = upload(&device, &value);
                times_out(&mut || impatient.put("other", &other).map(drop));
            }
            // What needs no holder is answered meanwhile.
            assert!(client.exists("absent").is_ok());
            sign("thaw");
            wait_for_sign("thawed");
            let gone_on = until_it_works(|| client.get("k").map(|got| assert!(got == value)));
            tell(format_args!("reads again {gone_on:?} after the holder goes on"));
            sign("done");
        }
        None => {
            let Some(trial) = Trial::new(TEST, "9.0.0", "tcp") else { return };
            let (holder, user) = (trial.start("holder"), trial.start("user"));
            trial.wait_for("freeze");
            holder.freeze();
            trial.sign("frozen");
            trial.wait_for("thaw");
            holder.thaw();
            trial.sign("thawed");
            show(&trial.finish("user", user).said);
            trial.finish("holder", holder);
        }
    }
}

/// P58: nothing of the value is ever seen, and its key is free again when the master gives the put up.
#[test]
fn a_writer_that_is_killed_in_the_middle_of_a_put_leaves_nothing() {
    const TEST: &str = "a_writer_that_is_killed_in_the_middle_of_a_put_leaves_nothing";
    match role().as_deref() {
        Some("holder") => {
            let _client = client(64 * MIB);
            sign("holds");
            wait_for_sign("done");
        }
        Some(writer) if writer.starts_with("writer") => {
            wait_for_sign("holds");
            let client = client(0);
            sign(&format!("{writer} joined"));
            wait_for_sign("frozen");
            // The holder does not take the bytes; this process is killed meanwhile.
            let value = if writer == "writer of small" { bytes(1, 100) } else { bytes(1, 1 << 20) };
            let _ = client.put(writer, &value);
        }
        Some(_) => {
            wait_for_sign("holds");
            let client = client(0);
            wait_for_sign("killed");
            for key in ["writer of small", "writer of large"] {
                assert!(!client.exists(key).unwrap());
                assert!(matches!(client.get(key), Err(Error::NotFound)));
                let start = Instant::now();
                assert_eq!(client.put(key, &bytes(2, 200)).unwrap(), Put::Stored);
                tell(format_args!("{key}: put again after {:?}", start.elapsed()));
                assert_eq!(client.get(key).unwrap(), bytes(2, 200));
            }
            sign("done");
        }
        None => {
            let Some(mut trial) = Trial::new(TEST, "9.0.0", "tcp") else { return };
            trial.restart_master(&[
                "-put_start_discard_timeout_sec",
                "3",
                "-put_start_release_timeout_sec",
                "5",
            ]);
            let (holder, user) = (trial.start("holder"), trial.start("user"));
            let mut writers = ["writer of small", "writer of large"].map(|role| trial.start(role));
            trial.wait_for("writer of small joined");
            trial.wait_for("writer of large joined");
            holder.freeze();
            trial.sign("frozen");
            thread::sleep(Duration::from_secs(1));
            for writer in &mut writers {
                assert!(writer.ended().is_none(), "it is at its put");
                writer.kill();
            }
            holder.thaw();
            trial.sign("killed");
            show(&trial.finish("user", user).said);
            trial.finish("holder", holder);
        }
    }
}
