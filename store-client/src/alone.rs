//! Tests that measure the whole process.

use std::{env, process::Command};

/// Runs the body of the test `name` of `module` in a process of its own, so that what other tests do is not measured.
pub(crate) fn alone(module: &str, name: &str, body: impl FnOnce()) {
    const MARK: &str = "HAULIER_TEST_ALONE";
    if env::var_os(MARK).is_some() {
        return body();
    }
    let path = module.split_once("::").map_or("", |(_, path)| path);
    let output = Command::new(env::current_exe().unwrap())
        .args([&format!("{path}::{name}"), "--exact", "--nocapture"])
        .env(MARK, "1")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && text.contains("1 passed"),
        "{text}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    print!("{text}");
}
