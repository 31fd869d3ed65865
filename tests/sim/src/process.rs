//! A test in a process of its own, which a simulator's tests need: a process has one simulated library, whose settings
//! are read once.

use std::{
    env,
    os::unix::process::ExitStatusExt,
    process::{Command, Output, Stdio},
};

/// Set where the test's own process runs.
const CHILD: &str = "HAULIER_SIM_TEST_CHILD";
/// What the second process of a test is told.
const PEER: &str = "HAULIER_SIM_TEST_PEER";

/// Runs `body` in a process that runs only this test.
///
/// `test` is its path, beginning with the test binary's name.
///
/// # Panics
/// Where the test fails there.
pub fn isolated(test: &str, environment: &[(&str, &str)], body: impl FnOnce()) {
    if env::var_os(CHILD).is_some() {
        return body();
    }
    let mut command = again(test);
    command.envs(environment.iter().copied());
    assert!(succeeded(&command.output().expect("the test's own program")), "{test}");
}

/// Runs `body` in a process that this signal has to end.
///
/// # Panics
/// Where it ends otherwise.
pub fn dies(test: &str, signal: i32, body: impl FnOnce()) {
    if env::var_os(CHILD).is_some() {
        return body();
    }
    let output = again(test).output().expect("the test's own program");
    assert_eq!(output.status.signal(), Some(signal), "{test}");
}

/// Runs the test once more in a second process, which is told something.
///
/// # Panics
/// Where the test fails there.
pub fn peer(test: &str, what: &str, environment: &[(&str, &str)]) {
    let mut command = again(test);
    command.env(PEER, what).envs(environment.iter().copied());
    assert!(succeeded(&command.output().expect("the test's own program")), "the second process");
}

/// What the first process told this one; `None` in the first.
pub fn told() -> Option<String> {
    env::var(PEER).ok()
}

fn again(test: &str) -> Command {
    let (_, test) = test.split_once("::").expect("a test in a module");
    let mut command = Command::new(env::current_exe().expect("a running program"));
    command.args(["--exact", test, "--nocapture"]).env(CHILD, "1").stdin(Stdio::null());
    command
}

fn succeeded(output: &Output) -> bool {
    let said = String::from_utf8_lossy(&output.stdout);
    if !output.status.success() {
        eprintln!("{}\n{said}{}", output.status, String::from_utf8_lossy(&output.stderr));
    }
    output.status.success() && said.contains("1 passed")
}
