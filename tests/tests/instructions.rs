//! How many instructions small operations of the in-process engine take, beside the copy of the bytes. Callgrind counts
//! them, which is repeatable however busy the machine is, so a regression shows where a clock could not tell.
//!
//! `HAULIER_BLESS=1` writes `instructions.txt` anew.

use std::{
    collections::BTreeMap,
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

const COUNTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/instructions.txt");

/// How far a count may be from the written one, in parts of a hundred.
const TOLERANCE: u64 = 5;

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

/// Of one operation: what the second half of the operations takes.
fn each(workload: &Path, operation: &str, times: u64) -> u64 {
    (instructions(workload, operation, 2 * times) - instructions(workload, operation, times)) / times
}

/// Were there anything that is gone through, or a tree, this would show it: there are 64 times as many values.
#[test]
fn a_put_takes_the_same_among_many_values_as_among_few() {
    const FEW: u64 = 1000;
    const MANY: u64 = 64 * FEW;
    let workload = workload();
    let (few, many) = (each(&workload, "fill", FEW), each(&workload, "fill", MANY));
    println!("{few} instructions among {FEW} values and more, {many} among {MANY} and more");
    assert!(many <= few + few / 20, "a put takes {many} instructions among {MANY} values, {few} among {FEW}");
}

#[test]
fn small_operations_take_no_more_instructions_than_they_did() {
    let workload = workload();
    let copy = each(&workload, "memcpy", 1000);
    let mut counts = BTreeMap::new();
    for (operation, copies) in [("put", 1), ("get_into", 1), ("view", 0)] {
        counts.insert(operation, each(&workload, operation, 1000) - copies * copy);
    }
    counts.insert("batch_get_into", each(&workload, "batch_get_into", 5) - VALUES * copy);
    // Each time the batch is removed, so that it can be put again.
    counts.insert("batch_put", each(&workload, "batch_put", 5) - VALUES * copy);

    let text: String = counts.iter().map(|(operation, count)| format!("{operation} {count}\n")).collect();
    if env::var_os("HAULIER_BLESS").is_some() {
        fs::write(COUNTS, &text).unwrap();
    }
    let written = fs::read_to_string(COUNTS).unwrap();
    for (line, (operation, count)) in written.lines().zip(&counts) {
        let (name, was) = line.split_once(' ').unwrap();
        let was: u64 = was.parse().unwrap();
        assert_eq!(name, *operation);
        assert!(
            count.abs_diff(was) * 100 <= was * TOLERANCE,
            "{operation} takes {count} instructions beside the copy and took {was}. If that is meant, run this test with \
             HAULIER_BLESS=1, and say why in the commit. All counts now:\n{text}"
        );
    }
    assert_eq!(written.lines().count(), counts.len());
}
