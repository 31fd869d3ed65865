//! The `haulier` command on a Mooncake cluster: the real library, the real master, and Mooncake's own client, which holds
//! the values. Over TCP and in host memory; the CANN that the library wants to load is simulated.

use std::{
    env, fs,
    process::{Command, Output},
};

use haulier_tests::{
    mooncake::Trial,
    process::{binary_with_mooncake, skip, wait_for},
};

/// Runs the command, which has to end with this code; what it said on stdout and stderr.
fn haulier(trial: &Trial, args: &[&str], code: i32) -> (String, String) {
    let Output { status, stdout, stderr } = run(trial, args);
    let [stdout, stderr] = [stdout, stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    assert_eq!(status.code(), Some(code), "haulier {args:?}\n{stdout}\n{stderr}");
    (stdout, stderr)
}

fn run(trial: &Trial, args: &[&str]) -> Output {
    let mut command = Command::new(binary_with_mooncake());
    trial.prepare(&mut command);
    command.args(["--engine", "mooncake", "--mooncake-master", &trial.master.address()]);
    command.args(args).output().expect("the command")
}

#[test]
fn a_model_goes_through_a_cluster_from_one_process_to_another() {
    const TEST: &str = "a_model_goes_through_a_cluster_from_one_process_to_another";
    let Some(model) = env::var_os("HAULIER_MODEL").and_then(|path| path.into_string().ok()) else {
        return skip(TEST, "HAULIER_MODEL names no safetensors file; tests/run fetches one");
    };
    let Some(mut trial) = Trial::new(TEST, "9.0.0", "tcp") else { return };
    let _holder = trial.start_holder("512 MB");
    // Until it has joined there is no memory at all.
    let place = tempfile::tempdir().unwrap();
    let path = |name: &str| place.path().join(name).to_str().unwrap().to_owned();
    wait_for("the holder", || {
        run(&trial, &["put", "--upsert", "--prefix", "try", &model]).status.success().then_some(())
    });

    let (stored, _) = haulier(&trial, &["--json", "put", "--prefix", "m", &model], 0);
    let stored: serde_json::Value = serde_json::from_str(&stored).unwrap();
    assert_eq!(stored["failed"], serde_json::json!([]));
    let count = stored["stored"].as_u64().unwrap();
    assert!(count > 50);
    // A key that is there is kept, and said to be.
    let (again, _) = haulier(&trial, &["--json", "put", "--prefix", "m", &model], 1);
    let again: serde_json::Value = serde_json::from_str(&again).unwrap();
    assert_eq!((&again["stored"], &again["already_there"]), (&0.into(), &count.into()));

    // Every tensor of the file, from another process.
    let file = fs::read(&model).unwrap();
    let len = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let header: serde_json::Value = serde_json::from_slice(&file[8..8 + len]).unwrap();
    let names: Vec<&String> =
        header.as_object().unwrap().keys().filter(|name| *name != "__metadata__").collect();
    assert_eq!(names.len() as u64, count);
    let keys: Vec<String> = names.iter().map(|name| format!("m/{name}")).collect();
    let copy = path("copy.safetensors");
    let mut args = vec!["get", "-o", &copy];
    args.extend(keys.iter().map(String::as_str));
    haulier(&trial, &args, 0);
    let copy = fs::read(copy).unwrap();
    let copy_len = u64::from_le_bytes(copy[..8].try_into().unwrap()) as usize;
    let copied: serde_json::Value = serde_json::from_slice(&copy[8..8 + copy_len]).unwrap();
    for (name, key) in names.iter().zip(&keys) {
        let (was, is) = (&header[name.as_str()], &copied[key.as_str()]);
        assert_eq!((&was["dtype"], &was["shape"]), (&is["dtype"], &is["shape"]), "{name}");
        let part = |bytes: &'_ [u8], from: usize, about: &serde_json::Value| {
            let [start, end] = [0, 1].map(|i| 8 + from + about["data_offsets"][i].as_u64().unwrap() as usize);
            bytes[start..end].to_vec()
        };
        assert!(part(&file, len, was) == part(&copy, copy_len, is), "{name}");
    }
    let raw = path("raw");
    haulier(&trial, &["get", "--raw", &keys[0], "-o", &raw], 0);
    assert!(!fs::read(raw).unwrap().is_empty());

    let (said, _) = haulier(&trial, &["stat"], 0);
    assert!(said.contains("the Mooncake cluster answers"), "{said}");
    for args in [&["ls"][..], &["get", "--prefix", "m/", "-o", &path("x")]] {
        let (_, said) = haulier(&trial, args, 1);
        assert!(said.contains("Mooncake's C ABI lists no keys"), "{said}");
    }
    let (_, said) = haulier(&trial, &["serve"], 2);
    assert!(said.contains("leave out --engine mooncake"), "{said}");
    let (said, _) = haulier(&trial, &["rm", &keys[0], "absent"], 0);
    assert!(said.contains("1 value removed"), "{said}");
    let (said, _) = haulier(&trial, &["rm", "--prefix", "m/"], 0);
    assert!(said.contains(&format!("{} values removed", count - 1)), "{said}");
    let (_, said) = haulier(&trial, &["get", "--raw", &keys[1], "-o", &path("x")], 1);
    assert!(said.contains("nothing is stored under this key"), "{said}");
    let (said, _) = haulier(&trial, &["--json", "bench", "--quick", "--sizes", "4KiB"], 0);
    let rows: Vec<serde_json::Value> = serde_json::from_str(&said).unwrap();
    assert!(rows.len() >= 5 && rows.iter().all(|row| row["path"] == "mooncake"), "{said}");

    // Where the library lies on the loader's path nothing has to name it; where what it needs is not there, that is told.
    let mut searching = Command::new(binary_with_mooncake());
    trial.prepare_to_search(&mut searching);
    let stat = ["--engine", "mooncake", "--mooncake-master", &trial.master.address(), "stat"];
    assert!(searching.args(stat).output().unwrap().status.success());
    let mut without_cann = Command::new(binary_with_mooncake());
    trial.prepare(&mut without_cann);
    let output = without_cann.env_remove("LD_LIBRARY_PATH").args(["--json"]).args(stat).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(
        said.contains(r#""kind":"not_present""#) && said.contains("libascendcl.so: cannot open"),
        "{said}"
    );

    trial.master.kill();
    let (_, said) = haulier(&trial, &["--timeout", "2", "stat"], 5);
    assert!(said.contains("does a master listen there?"), "{said}");
}

#[test]
fn without_the_library_or_a_master_the_command_says_what_to_do() {
    let missing = |command: &mut Command| {
        let output =
            command.args(["--mooncake-library", "/nowhere/libmooncake_store.so", "stat"]).output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let with = || {
        let mut command = Command::new(binary_with_mooncake());
        command.args(["--engine", "mooncake"]).env_remove("HAULIER_MOONCAKE_MASTER");
        command
    };
    let (code, said) = missing(&mut with());
    assert!(code == Some(2) && said.contains("needs --mooncake-master HOST:PORT"), "{said}");
    let (code, said) = missing(with().args(["--mooncake-master", "127.0.0.1:1"]));
    assert!(code == Some(1) && said.contains("/nowhere/libmooncake_store.so"), "{said}");
    assert!(said.contains("HAULIER_MOONCAKE"), "{said}");
    // A library that is not Mooncake's.
    let output = with()
        .args(["--mooncake-master", "127.0.0.1:1", "--mooncake-library", "libc.so.6", "stat"])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        said.contains("libc.so.6 is not the store library") && said.contains("mooncake_store_create"),
        "{said}"
    );
}
