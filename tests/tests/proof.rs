//! The program that proves a backend on hardware, where there is none: what it says, and that it never passes by mistake.

use std::{
    path::PathBuf,
    process::{Command, Output},
};

use haulier_tests::ascend;

const PROOF: &str = env!("CARGO_BIN_EXE_haulier-proof");

/// A backend with a simulated driver.
struct Simulated {
    name: &'static str,
    /// Names its library.
    variable: &'static str,
    /// What it says where there is no hardware.
    absent: &'static str,
    /// The driver's number for "no device".
    no_device: &'static str,
    simulator: &'static str,
    library: fn() -> PathBuf,
    /// Lets a later allocation fail; the first ones are the program's own.
    fault: &'static str,
}

const ALL: [Simulated; 2] = [
    Simulated {
        name: "cuda",
        variable: "HAULIER_LIBCUDA",
        absent: "no NVIDIA GPU can be used here",
        no_device: "100",
        simulator: "haulier-sim-cuda",
        library: || haulier_sim_cuda::library().unwrap(),
        fault: "cuMemAlloc_v2:9=2",
    },
    Simulated {
        name: "ascend",
        variable: "HAULIER_ASCENDCL",
        absent: "no Ascend NPU can be used here",
        no_device: "207004",
        simulator: "haulier-sim-ascend",
        library: || ascend::built().unwrap(),
        fault: "aclrtMalloc:9=207001",
    },
];

fn proof(arguments: &[&str], environment: &[(&str, &str)]) -> (Output, String) {
    let mut command = Command::new(PROOF);
    command.args(arguments).envs(environment.iter().copied());
    for backend in ALL.iter().filter(|backend| environment.iter().all(|(name, _)| *name != backend.variable))
    {
        command.env_remove(backend.variable);
    }
    let output = command.output().expect("it starts");
    let said = [&output.stdout[..], &output.stderr[..]].concat();
    (output, String::from_utf8(said).expect("it is text"))
}

#[test]
fn without_a_driver_it_fails_and_says_why() {
    for Simulated { name, variable, absent, .. } in ALL {
        let (output, said) = proof(&[name], &[(variable, "/nowhere/lib.so.1")]);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains(absent) && said.contains("/nowhere/lib.so.1"), "{said}");
        assert!(said.contains("nothing was proved") && !said.contains("test result"), "{said}");
    }
}

#[test]
fn a_driver_without_a_device_is_no_pass_either() {
    for Simulated { name, no_device, .. } in ALL {
        let (output, said) = proof(&[name, "--simulator"], &[("HAULIER_SIM_DEVICES", "0")]);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains(no_device) && said.contains("nothing was proved"), "{said}");
    }
}

#[test]
fn a_simulator_is_never_taken_for_hardware() {
    for Simulated { name, variable, simulator, library, .. } in ALL {
        let (output, said) = proof(&[name], &[(variable, library().to_str().unwrap())]);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains("without --simulator") && said.contains(simulator), "{said}");
    }
}

#[test]
fn what_ran_on_the_simulator_says_so_first_and_last() {
    for Simulated { name, .. } in ALL {
        let only = [name, "--simulator", "--", "readiness::single_pending_by_ipc"];
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
}

#[test]
fn a_trial_that_fails_fails_the_proof() {
    for Simulated { name, fault, .. } in ALL {
        let trial = format!("[{name}/0] memory::freed_memory_can_be_had_again");
        let (output, said) = proof(&[name, "--simulator", "--", &trial], &[("HAULIER_SIM_FAULTS", fault)]);
        assert!(!output.status.success() && said.contains("1 failed"), "{said}");
    }
}

#[test]
fn an_unknown_backend_or_option_is_refused() {
    let (output, said) = proof(&["tpu"], &[]);
    assert!(output.status.code() == Some(1) && said.contains("there are cpu, cuda, ascend"), "{said}");
    for arguments in [&[][..], &["cuda", "cpu"], &["cuda", "--fast"]] {
        let (output, said) = proof(arguments, &[]);
        assert!(output.status.code() == Some(2) && said.contains("Usage: haulier-proof"), "{said}");
    }
}
