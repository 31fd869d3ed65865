//! `haulier devices` on machines with and without a CUDA driver. The driver is simulated; no GPU takes part.

use std::{ffi::OsStr, process::Command};

use haulier_sim_cuda::install;
use haulier_tests::process::binary_with_cuda;
use serde_json::Value;

/// What the command says of CUDA with this library, in this environment.
fn listed(library: impl AsRef<OsStr>, environment: &[(&str, &str)]) -> Value {
    let mut command = Command::new(binary_with_cuda());
    command.args(["--json", "devices"]).env("HAULIER_LIBCUDA", library).envs(environment.iter().copied());
    let output = command.output().expect("the command starts");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {said}", output.status);
    assert!(!said.contains("panicked"), "{said}");
    let listed: Value = serde_json::from_slice(&output.stdout).expect("it writes JSON");
    let cuda = listed.as_array().unwrap().iter().find(|backend| backend["backend"] == "cuda").unwrap();
    assert_eq!(cuda["compiled_in"], true);
    cuda.clone()
}

fn is_broken(listed: &Value, because: &str) {
    assert_eq!(listed["state"], "broken", "{listed}");
    let why = listed["why"].as_str().unwrap_or_default();
    assert!(why.contains(because), "{because:?} is not in {why:?}");
    assert!(listed["devices"].as_array().unwrap().is_empty(), "{listed}");
}

/// P86, P87.
#[test]
fn absent_stub_no_device_and_present_are_told_apart() {
    let folder = tempfile::tempdir().unwrap();
    let sim = install(folder.path(), &[]).unwrap();

    let absent = listed("/nowhere/libcuda.so.1", &[]);
    assert_eq!((&absent["state"], &absent["library"]), (&"absent".into(), &Value::Null), "{absent}");
    assert_eq!(absent["looked"], serde_json::json!(["/nowhere/libcuda.so.1"]));
    assert!(absent["why"].as_str().unwrap().contains("HAULIER_LIBCUDA"), "{absent}");

    is_broken(&listed(&sim, &[("HAULIER_SIM_MODE", "stub")]), "stub");
    is_broken(&listed(&sim, &[("HAULIER_SIM_MODE", "no-device")]), "device");
    // A number that no header has.
    is_broken(&listed(&sim, &[("HAULIER_SIM_MODE", "unknown")]), "9999");
    let none = listed(&sim, &[("CUDA_VISIBLE_DEVICES", "")]);
    is_broken(&none, "device");
    let whys: Vec<Value> = [
        listed(&sim, &[("HAULIER_SIM_MODE", "stub")]),
        listed(&sim, &[("HAULIER_SIM_MODE", "no-device")]),
        absent,
    ]
    .map(|listed| listed["why"].clone())
    .into();
    assert!(whys[0] != whys[1] && whys[1] != whys[2] && whys[0] != whys[2], "{whys:?}");

    let present = listed(&sim, &[]);
    assert_eq!((&present["state"], &present["why"]), (&"present".into(), &Value::Null), "{present}");
    let devices = present["devices"].as_array().unwrap();
    assert_eq!(devices.len(), 2);
    assert_ne!(devices[0]["uuid"], devices[1]["uuid"]);
    assert_eq!(devices[0]["caps"]["ipc_export"], true, "{present}");
}

/// P86.
#[test]
fn a_driver_without_a_function_that_is_needed_is_named_with_it() {
    let folder = tempfile::tempdir().unwrap();
    let old = install(folder.path(), &["cuStreamIsCapturing"]).unwrap();
    is_broken(&listed(old, &[]), "cuStreamIsCapturing");

    // What is not needed takes only its own capability away.
    let folder = tempfile::tempdir().unwrap();
    let old =
        install(folder.path(), &["cuCtxCreate_v4", "cuIpcGetMemHandle", "cuMemExportToShareableHandle"]);
    let present = listed(old.unwrap(), &[]);
    assert_eq!(present["state"], "present", "{present}");
    assert_eq!(present["devices"][0]["caps"]["ipc_export"], false, "{present}");
}
