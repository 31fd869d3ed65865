//! The comparison itself, with tiny rounds and only the peers that need nothing installed.

use std::{
    collections::BTreeSet,
    fs,
    process::{Command, Stdio},
    thread,
    time::Duration,
};

use haulier_tests::{
    mooncake::{LIBRARY, stand_ins},
    process::{Process, binary, skip, wait_for},
};
use rustix::process::Signal;
use serde_json::Value;

fn compare(out: &std::path::Path, sizes: &str, rounds: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_haulier-compare"));
    command.args(["--quick", "--bare", "--sizes", sizes, "--rounds", rounds, "--out"]).arg(out);
    command.arg("--haulier").arg(binary()).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

#[test]
fn a_tiny_run_writes_a_whole_table_and_chart() {
    let out = tempfile::tempdir().unwrap();
    let output = Process::spawn(&mut compare(out.path(), "4KiB,64KiB", "2")).unwrap().output();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));

    let read = |name: &str| fs::read_to_string(out.path().join(name)).unwrap();
    let report: Value = serde_json::from_str(&read("compare.json")).unwrap();
    let rows = report["rows"].as_array().unwrap();
    let mut seen = BTreeSet::new();
    for row in rows {
        let of = &row["figures"];
        let number = |name: &str| of[name].as_f64().unwrap_or_else(|| panic!("{name} in {row}"));
        assert_eq!(row["failed"], Value::Null, "{row}");
        assert!(number("p25_us") <= number("median_us") && number("median_us") <= number("p75_us"), "{row}");
        assert!(
            number("median_us") > 0.0 && number("times_reference") > 0.0 && number("rounds") == 2.0,
            "{row}"
        );
        let of = (row["peer"].as_str().unwrap(), row["op"].as_str().unwrap());
        assert!(
            seen.insert((of.0, of.1, row["values"].as_u64().unwrap(), row["bytes"].as_u64().unwrap())),
            "{row}"
        );
    }
    // Every peer has put and get of both sizes and both batches, apart from the shared index, which only reads.
    let shapes = [(1, 4096), (1, 65536), (400, 4096), (64, 65536)];
    let copying = [
        "memcpy",
        "memcpy, fresh memory",
        "floor: socket",
        "floor: futex",
        "floor: mailbox",
        "haulier",
        "haulier, in process",
    ];
    for (values, bytes) in shapes {
        for peer in copying {
            assert!(seen.contains(&(peer, "put", values, bytes)), "{peer}, put, {values} x {bytes}");
            assert!(
                seen.contains(&(peer, "get_into", values, bytes)),
                "{peer}, get_into, {values} x {bytes}"
            );
        }
        assert!(seen.contains(&("floor: shared index", "view", values, bytes)));
        assert!(seen.contains(&("haulier", "view", values, bytes)));
    }
    assert!(seen.contains(&("haulier", "put_in_place", 1, 4096)));
    assert!(!seen.contains(&("memcpy", "view", 1, 4096)));

    let table = read("compare.md");
    assert!(table.contains("| haulier | **") && table.contains("load "), "{table}");
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim_end(), table.trim_end());
    let chart = read("compare.svg");
    assert!(chart.starts_with("<svg ") && chart.trim_end().ends_with("</svg>"), "{chart}");
    assert!(
        chart.contains(">haulier ")
            && chart.contains(">haulier, view ")
            && !chart.contains("nothing was measured")
    );
}

#[test]
fn an_interrupted_run_leaves_no_server_and_says_so() {
    let out = tempfile::tempdir().unwrap();
    // Long enough to be interrupted.
    let run = Process::spawn(&mut compare(out.path(), "4KiB", "60000")).unwrap();
    let id = run.id();
    let servers = || {
        let children = fs::read_to_string(format!("/proc/{id}/task/{id}/children")).unwrap_or_default();
        children.split_whitespace().map(|id| id.parse::<u32>().unwrap()).collect::<Vec<_>>()
    };
    let servers = wait_for("the servers of the run", || Some(servers()).filter(|s| s.len() >= 2));
    thread::sleep(Duration::from_millis(300));
    run.signal(Signal::INT);
    let output = run.output();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("interrupted"), "{said}");
    assert!(!out.path().join("compare.json").exists());
    for server in servers {
        assert!(!fs::exists(format!("/proc/{server}")).unwrap(), "server {server} outlived the run");
    }
}

const OF_MOONCAKE: [&str; 4] = [
    "mooncake, registered once",
    "mooncake, registered per call",
    "haulier, registered once",
    "haulier, any memory",
];

fn mooncake(out: &std::path::Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_haulier-compare"));
    command.args(["--mooncake", "--quick", "--sizes", "4KiB,1MiB", "--rounds", "1", "--out"]).arg(out);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn report_of(command: &mut Command, out: &std::path::Path) -> Value {
    let output = Process::spawn(command).unwrap().output();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(!out.join("mooncake.svg").exists());
    serde_json::from_str(&fs::read_to_string(out.join("mooncake.json")).unwrap()).unwrap()
}

#[test]
fn where_there_is_no_mooncake_the_table_names_who_is_missing() {
    let out = tempfile::tempdir().unwrap();
    for (library, why) in
        [(None, "no --mooncake-library"), (Some("/nowhere/lib.so"), "/nowhere/mooncake_master")]
    {
        let mut command = mooncake(out.path());
        command.env_remove(LIBRARY);
        if let Some(library) = library {
            command.args(["--mooncake-library", library]);
        }
        let report = report_of(&mut command, out.path());
        for name in OF_MOONCAKE {
            let peers = report["peers"].as_array().unwrap();
            let peer =
                peers.iter().find(|peer| peer["name"] == name).unwrap_or_else(|| panic!("{name}: {peers:?}"));
            assert!(peer["missing"].as_str().is_some_and(|reason| reason.contains(why)), "{peer}");
        }
    }
}

#[test]
fn the_engine_for_mooncake_is_measured_beside_mooncakes_own_client() {
    const TEST: &str = "the_engine_for_mooncake_is_measured_beside_mooncakes_own_client";
    let Some(library) = std::env::var_os(LIBRARY).filter(|path| !path.is_empty()) else {
        return skip(TEST, format_args!("{LIBRARY} names no Mooncake; tests/run fetches one"));
    };
    let (out, stand_ins) = (tempfile::tempdir().unwrap(), stand_ins("9.0.0"));
    let mut command = mooncake(out.path());
    command.env("LD_LIBRARY_PATH", stand_ins.path()).env("MC_FORCE_TCP", "1").env(LIBRARY, library);
    let report = report_of(&mut command, out.path());
    assert_eq!(report["reference"], OF_MOONCAKE[0]);
    let rows = report["rows"].as_array().unwrap();
    for name in OF_MOONCAKE {
        for (op, values, bytes) in
            ["put", "get_into"].into_iter().flat_map(|op| [(op, 1, 4096), (op, 1, 1 << 20), (op, 400, 4096)])
        {
            let is = |row: &&Value| {
                row["peer"] == name && row["op"] == op && row["values"] == values && row["bytes"] == bytes
            };
            let row = rows.iter().find(is).unwrap_or_else(|| panic!("{name}, {op}, {values} x {bytes}"));
            assert_eq!(row["failed"], Value::Null, "{row}");
            assert!(row["figures"]["times_reference"].as_f64().is_some_and(|times| times > 0.0), "{row}");
        }
    }
}

/// How fast is the machine's business; that all numbers of clients are there, and each client got on, is ours.
#[test]
fn many_clients_at_once_are_measured() {
    let out = tempfile::tempdir().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_haulier-compare"));
    command.args(["--scale", "--quick", "--rounds", "1", "--out"]).arg(out.path());
    command.arg("--haulier").arg(binary()).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let output = Process::spawn(&mut command).unwrap().output();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let read = |name: &str| fs::read_to_string(out.path().join(name)).unwrap();
    let report: Value = serde_json::from_str(&read("scale.json")).unwrap();
    let rows = report["rows"].as_array().unwrap();
    assert_eq!(rows.iter().map(|row| row["clients"].as_u64().unwrap()).collect::<Vec<_>>(), [1, 2, 8, 32]);
    for row in rows {
        assert!(
            row["calls_per_s"].as_f64().unwrap() > 0.0 && row["fairness"].as_f64().unwrap() > 0.0,
            "{row}"
        );
        for op in ["put", "get_into"] {
            let of = |name: &str| row[op][name].as_f64().unwrap_or_else(|| panic!("{name} in {row}"));
            assert!(
                of("median_us") > 0.0 && of("median_us") <= of("p99_us") && of("p99_us") <= of("p999_us"),
                "{row}"
            );
        }
    }
    let table = read("scale.md");
    assert!(table.contains("| 32 | "), "{table}");
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim_end(), table.trim_end());
}
