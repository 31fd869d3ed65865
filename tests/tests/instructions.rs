//! How many instructions small operations take, beside the copy of the bytes: in the in-process engine, and through a node,
//! where the client's and the daemon's are told apart. Callgrind counts them, which is repeatable however busy the machine
//! is, so a regression shows where a clock could not tell.
//!
//! What a wait takes is no work and differs from run to run, so the functions that look for a message and that sleep and
//! wake are left out. Under callgrind one thread runs at a time, so without them a put differs by 0.3 %.
//!
//! `HAULIER_BLESS=1` writes `instructions.txt` anew.

use std::{
    collections::BTreeMap,
    env, fs,
    path::{Path, PathBuf},
    process::Command,
    sync::Mutex,
};

const COUNTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/instructions.txt");

/// How far a count may be from the written one, in parts of a hundred.
const TOLERANCE: u64 = 5;
/// The same of a single put through a node. How the two sides' threads meet is up to the scheduler, and a put that finds no
/// memory granted ahead is two messages: on a busy machine a tenth more was counted.
const TOLERANCE_OF_TWO: u64 = 20;
/// And the daemon's in instructions for each value: it has nothing to do with a read, but what it takes to begin with
/// differs. A message would be thousands.
const STRAY: u64 = 200;

/// Of a batch.
const VALUES: u64 = 400;

/// Builds the workload, optimised.
fn workload() -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let built = Command::new(cargo)
        .args(["build", "--quiet", "--profile", "counted", "--package", "haulier-counted"])
        .current_dir(root)
        .status()
        .unwrap();
    assert!(built.success(), "the workload cannot be built");
    let target = env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from);
    target.join("counted/haulier-counted")
}

fn instructions(workload: &Path, operation: &str, times: u64) -> u64 {
    let output = Command::new("valgrind")
        .args(["--tool=callgrind", "--callgrind-out-file=/dev/null"])
        .arg(workload)
        .args([operation, &times.to_string()])
        .output()
        .expect("valgrind counts instructions; tests/run installs it");
    let log = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{log}");
    let count = log.lines().find_map(|line| line.split_once("Collected :"));
    count.and_then(|(_, count)| count.trim().parse().ok()).unwrap_or_else(|| panic!("no count in: {log}"))
}

/// The workload has each of the waits as a function of its own; else they would be counted, without a word.
fn expect_waits_apart(workload: &Path) {
    let output = Command::new("readelf").args(["--wide", "--syms", "--demangle"]).arg(workload).output();
    let symbols =
        String::from_utf8(output.expect("readelf lists symbols; tests/run installs it").stdout).unwrap();
    for wait in WAITS {
        let function = symbols.lines().find(|line| line.contains(" FUNC ") && line.contains(wait));
        assert!(function.is_some(), "{wait} is not a function of its own");
    }
}

/// Where the client or the daemon waits for the other, or wakes it.
const WAITS: [&str; 3] = [
    "haulier::wire::link::look",
    "haulier::wire::socket::Socket::recv_short",
    "haulier::wire::socket::Socket::offer",
];

/// Of the main thread, which is the client's, and of all others, which are the daemon's.
fn instructions_through_a_node(workload: &Path, operation: &str, times: u64) -> [u64; 2] {
    let dir = tempfile::tempdir().unwrap();
    let output = Command::new("valgrind")
        .args(["--tool=callgrind", "--separate-threads=yes"])
        .arg(format!("--callgrind-out-file={}", dir.path().join("out").display()))
        .args(WAITS.map(|function| format!("--toggle-collect={function}")))
        // Behind those, which would have it the other way round.
        .arg("--collect-atstart=yes")
        .arg(workload)
        .args(["--node", operation, &times.to_string()])
        .output()
        .expect("valgrind counts instructions; tests/run installs it");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let mut sums = [0; 2];
    for file in fs::read_dir(dir.path()).unwrap() {
        let profile = fs::read_to_string(file.unwrap().path()).unwrap();
        let number = |name: &str| {
            let line = profile.lines().find_map(|line| line.strip_prefix(name));
            line.and_then(|number| number.trim().parse::<u64>().ok())
        };
        // The file of the whole has neither.
        if let (Some(thread), Some(count)) = (number("thread:"), number("summary:")) {
            sums[usize::from(thread != 1)] += count;
        }
    }
    sums
}

/// The least of some tries: how often both sides wait in vain while the workload begins differs, and can only add.
fn each_through_a_node(workload: &Path, operation: &str, times: u64) -> [u64; 2] {
    let [once, twice] = [1, 2].map(|n| {
        let tries = [(); 3].map(|()| instructions_through_a_node(workload, operation, n * times));
        [0, 1].map(|side| tries.iter().map(|counts| counts[side]).min().unwrap_or_default())
    });
    [0, 1].map(|side| twice[side].saturating_sub(once[side]) / times)
}

/// Of one operation: what the second half of the operations takes.
fn each(workload: &Path, operation: &str, times: u64) -> u64 {
    (instructions(workload, operation, 2 * times) - instructions(workload, operation, times)) / times
}

/// One of these tests at a time: the threads of a node are not to wait for another one's.
static ALONE: Mutex<()> = Mutex::new(());

/// Were there anything that is gone through, or a tree, this would show it: there are 64 times as many values.
#[test]
fn a_put_takes_the_same_among_many_values_as_among_few() {
    let _alone = ALONE.lock();
    const FEW: u64 = 1000;
    const MANY: u64 = 64 * FEW;
    let workload = workload();
    let (few, many) = (each(&workload, "fill", FEW), each(&workload, "fill", MANY));
    println!("{few} instructions among {FEW} values and more, {many} among {MANY} and more");
    assert!(many <= few + few / 20, "a put takes {many} instructions among {MANY} values, {few} among {FEW}");
}

#[test]
fn small_operations_take_no_more_instructions_than_they_did() {
    let _alone = ALONE.lock();
    let workload = workload();
    let copy = each(&workload, "memcpy", 1000);
    let mut counts = BTreeMap::new();
    for (operation, copies) in [("put", 1), ("get_into", 1), ("view", 0)] {
        counts.insert(operation, each(&workload, operation, 1000) - copies * copy);
    }
    counts.insert("batch_get_into", each(&workload, "batch_get_into", 5) - VALUES * copy);
    // Each time the batch is removed, so that it can be put again.
    counts.insert("batch_put", each(&workload, "batch_put", 5) - VALUES * copy);
    expect_waits_apart(&workload);
    for (operation, names, copies, times) in [
        ("put", ["node_put_client", "node_put_daemon"], 1, 1000),
        // To begin with differs by so much that short calls must be many.
        ("get_into", ["node_get_into_client", "node_get_into_daemon"], 1, 30_000),
        ("view", ["node_view_client", "node_view_daemon"], 0, 60_000),
        ("batch_put", ["node_batch_put_client", "node_batch_put_daemon"], VALUES, 5),
        ("batch_get_into", ["node_batch_get_into_client", "node_batch_get_into_daemon"], VALUES, 20),
    ] {
        let [client, daemon] = each_through_a_node(&workload, operation, times);
        counts.insert(names[0], client - copies * copy);
        counts.insert(names[1], daemon);
    }

    let text: String = counts.iter().map(|(operation, count)| format!("{operation} {count}\n")).collect();
    if env::var_os("HAULIER_BLESS").is_some() {
        fs::write(COUNTS, &text).unwrap();
    }
    let written = fs::read_to_string(COUNTS).unwrap();
    for (line, (operation, count)) in written.lines().zip(&counts) {
        let (name, was) = line.split_once(' ').unwrap();
        let was: u64 = was.parse().unwrap();
        assert_eq!(name, *operation);
        let values = if operation.contains("batch") { VALUES } else { 1 };
        let stray = if operation.ends_with("daemon") { STRAY * values } else { 0 };
        let tolerance = if operation.starts_with("node_put") { TOLERANCE_OF_TWO } else { TOLERANCE };
        assert!(
            count.abs_diff(was) * 100 <= (was * tolerance).max(stray * 100),
            "{operation} takes {count} instructions beside the copy and took {was}. If that is meant, run this test with \
             HAULIER_BLESS=1, and say why in the commit. All counts now:\n{text}"
        );
    }
    assert_eq!(written.lines().count(), counts.len());
}
