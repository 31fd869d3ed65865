//! `haulier devices` on machines with and without CANN. The runtime is simulated; no NPU takes part.

use std::{ffi::OsStr, fs, path::PathBuf, process::Command};

use haulier_sim::install;
use haulier_tests::{ascend::install_into, process::binary_with_ascend};
use serde_json::Value;

/// What the command says of Ascend with this library, in this environment.
fn listed(library: impl AsRef<OsStr>, environment: &[(&str, &str)]) -> Value {
    let mut command = Command::new(binary_with_ascend());
    command.args(["--json", "devices"]).env("HAULIER_ASCENDCL", library).envs(environment.iter().copied());
    let output = command.output().expect("the command starts");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {said}", output.status);
    assert!(!said.contains("panicked"), "{said}");
    let listed: Value = serde_json::from_slice(&output.stdout).expect("it writes JSON");
    let ascend = listed.as_array().unwrap().iter().find(|backend| backend["backend"] == "ascend").unwrap();
    assert_eq!(ascend["compiled_in"], true);
    ascend.clone()
}

fn is_broken(listed: &Value, because: &str) {
    assert_eq!(listed["state"], "broken", "{listed}");
    let why = listed["why"].as_str().unwrap_or_default();
    assert!(why.contains(because), "{because:?} is not in {why:?}");
    assert!(listed["devices"].as_array().unwrap().is_empty(), "{listed}");
}

/// A runtime that lacks these functions.
fn without(functions: &[&str]) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let there = folder.path().join("libascendcl.so");
    let built = install::library("libhaulier_sim_ascend.so", "haulier-sim-ascend").unwrap();
    install::put(&built, &there, functions).unwrap();
    (folder, there)
}

/// P86, P87.
#[test]
fn absent_no_device_and_present_are_told_apart() {
    let folder = tempfile::tempdir().unwrap();
    let sim = install_into(folder.path(), "9.0.0");

    let absent = listed("/nowhere/libascendcl.so", &[]);
    assert_eq!((&absent["state"], &absent["library"]), (&"absent".into(), &Value::Null), "{absent}");
    assert_eq!(absent["looked"], serde_json::json!(["/nowhere/libascendcl.so"]));
    assert!(absent["why"].as_str().unwrap().contains("set_env.sh"), "{absent}");

    let stub = folder.path().join("stub");
    fs::create_dir(&stub).unwrap();
    fs::copy(&sim, stub.join("libascendcl.so")).unwrap();
    is_broken(&listed(stub.join("libascendcl.so"), &[]), "stub");
    is_broken(&listed(&sim, &[("HAULIER_SIM_DEVICES", "0")]), "no NPU");
    is_broken(&listed(&sim, &[("ASCEND_RT_VISIBLE_DEVICES", "")]), "ASCEND_RT_VISIBLE_DEVICES");
    // A number that no header has.
    is_broken(&listed(&sim, &[("HAULIER_SIM_MODE", "unknown")]), "999999");

    for release in ["8.5.0", "9.0.0"] {
        let present = listed(&sim, &[("HAULIER_SIM_CANN", release), ("ASCEND_RT_VISIBLE_DEVICES", "1,0")]);
        assert_eq!((&present["state"], &present["why"]), (&"present".into(), &Value::Null), "{present}");
        let devices = present["devices"].as_array().unwrap();
        let ids: Vec<_> = devices.iter().map(|device| (&device["id"], &device["physical_id"])).collect();
        assert_eq!(ids, [(&0.into(), &1.into()), (&1.into(), &0.into())], "{present}");
        assert_ne!(devices[0]["uuid"], devices[1]["uuid"]);
        assert_eq!(devices[0]["caps"]["ipc_export"], true, "{present}");
    }
}

/// P86.
#[test]
fn a_cann_without_a_function_that_is_needed_is_named_with_it() {
    let (_folder, old) = without(&["aclrtSetCurrentContext"]);
    let listed_old = listed(old, &[]);
    is_broken(&listed_old, "aclrtSetCurrentContext");
    is_broken(&listed_old, "too old");

    // What is not needed takes only its own capability away.
    let (_folder, old) = without(&["aclrtIpcMemGetExportKey", "aclrtMemExportToShareableHandle"]);
    let present = listed(old, &[]);
    assert_eq!(present["state"], "present", "{present}");
    let caps = &present["devices"][0]["caps"];
    let flags = ["ipc_export", "ipc_import", "register_host"].map(|flag| caps[flag] == true);
    assert_eq!(flags, [false, true, true], "{present}");
}
