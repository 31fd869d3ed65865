//! The program that proves a backend on hardware, where there is none: what it says, and that it never passes by mistake.

use std::process::{Command, Output};

const PROOF: &str = env!("CARGO_BIN_EXE_haulier-proof");

fn proof(arguments: &[&str], environment: &[(&str, &str)]) -> (Output, String) {
    let mut command = Command::new(PROOF);
    command.args(arguments).env_remove("HAULIER_LIBCUDA").envs(environment.iter().copied());
    let output = command.output().expect("it starts");
    let said = [&output.stdout[..], &output.stderr[..]].concat();
    (output, String::from_utf8(said).expect("it is text"))
}

#[test]
fn without_a_driver_it_fails_and_says_why() {
    let (output, said) = proof(&["cuda"], &[("HAULIER_LIBCUDA", "/nowhere/libcuda.so.1")]);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(
        said.contains("no NVIDIA GPU can be used here") && said.contains("/nowhere/libcuda.so.1"),
        "{said}"
    );
    assert!(said.contains("nothing was proved") && !said.contains("test result"), "{said}");
}

#[test]
fn a_driver_without_a_device_is_no_pass_either() {
    let (output, said) = proof(&["cuda", "--simulator"], &[("HAULIER_SIM_DEVICES", "0")]);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("100") && said.contains("nothing was proved"), "{said}");
}

#[test]
fn a_simulator_is_never_taken_for_a_gpu() {
    let library = haulier_sim_cuda::library().unwrap();
    let (output, said) = proof(&["cuda"], &[("HAULIER_LIBCUDA", library.to_str().unwrap())]);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("without --simulator") && said.contains("haulier-sim-cuda"), "{said}");
}

#[test]
fn what_ran_on_the_simulator_says_so_first_and_last() {
    let only = ["cuda", "--simulator", "--", "readiness::single_pending_by_ipc"];
    let (output, said) = proof(&only, &[]);
    assert!(output.status.success(), "{said}");
    let text = String::from_utf8_lossy(&output.stdout);
    let lines: Vec<&str> = text.lines().filter(|line| !line.is_empty()).collect();
    for line in [lines.first(), lines.last()] {
        assert!(line.is_some_and(|line| line.contains("SIMULATOR, no hardware took part")), "{said}");
    }
    assert!(
        said.contains("20 of 20 right, 20 expected") && said.contains(" 0 of 20 right, 0 expected"),
        "{said}"
    );
}

#[test]
fn a_trial_that_fails_fails_the_proof() {
    let only = ["cuda", "--simulator", "--", "[cuda/0] memory::freed_memory_can_be_had_again"];
    // The first ones are the program's own.
    let (output, said) = proof(&only, &[("HAULIER_SIM_FAULTS", "cuMemAlloc_v2:9=2")]);
    assert!(!output.status.success() && said.contains("1 failed"), "{said}");
}

#[test]
fn an_unknown_backend_or_option_is_refused() {
    let (output, said) = proof(&["tpu"], &[]);
    assert!(output.status.code() == Some(1) && said.contains("there are cpu, cuda"), "{said}");
    for arguments in [&[][..], &["cuda", "cpu"], &["cuda", "--fast"]] {
        let (output, said) = proof(arguments, &[]);
        assert!(output.status.code() == Some(2) && said.contains("Usage: haulier-proof"), "{said}");
    }
}
