//! What the tests of this crate share: children that run one test again, in a process of their own.

#![allow(dead_code)]

use std::{
    env,
    os::fd::{AsFd, OwnedFd},
    process::{Command, Output, Stdio},
};

use hal::{BufferId, DeviceUuid, Exported, IpcHandle, Token};

const CHILD: &str = "HAULIER_TEST_CHILD";

/// Whether this process was started by [`child`].
pub(crate) fn is_child() -> bool {
    env::var_os(CHILD).is_some()
}

/// This test binary again, for the test `name` alone, where [`is_child`] holds.
pub(crate) fn child(name: &str) -> Command {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args([name, "--exact", "--nocapture", "--test-threads=1"]).env(CHILD, "1").stdin(Stdio::null());
    command
}

pub(crate) fn assert_success(output: Output) {
    let said = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{}\n{}{}", output.status, said(&output.stdout), said(&output.stderr));
    assert!(said(&output.stdout).contains("1 passed"), "the child ran no test: {}", said(&output.stdout));
}

/// Hands an export to a child: the handle by its environment, the descriptor as its standard input.
pub(crate) fn pass(command: &mut Command, exported: &Exported) {
    let handle = &exported.handle;
    let token = match &handle.token {
        Token::Opaque(bytes) => bytes.iter().map(|byte| format!("{byte:02x}")).collect(),
        Token::Descriptors(_) => String::new(),
    };
    command
        .env("DEVICE", handle.device.0.map(|byte| format!("{byte:02x}")).concat())
        .env("BUFFER", handle.buffer.0.to_string())
        .env("EXPORTER", handle.exporter.to_string())
        .env("LEN", handle.len.to_string())
        .env("TOKEN", token);
    if let [fd] = exported.descriptors.as_slice() {
        command.stdin(fd.try_clone().unwrap());
    }
}

/// What [`pass`] handed over.
pub(crate) fn passed() -> (IpcHandle, Vec<OwnedFd>) {
    let number = |name: &str| env::var(name).unwrap().parse::<u64>().unwrap();
    let bytes = |name: &str| {
        let hex = env::var(name).unwrap();
        let byte = |at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap();
        (0..hex.len()).step_by(2).map(byte).collect::<Vec<u8>>()
    };
    let (token, descriptors) = match bytes("TOKEN") {
        empty if empty.is_empty() => (
            Token::Descriptors(vec![number("LEN")]),
            vec![std::io::stdin().as_fd().try_clone_to_owned().unwrap()],
        ),
        token => (Token::Opaque(token), vec![]),
    };
    let handle = IpcHandle {
        device: DeviceUuid(bytes("DEVICE").try_into().unwrap()),
        buffer: BufferId(number("BUFFER")),
        exporter: number("EXPORTER") as u32,
        len: number("LEN"),
        token,
    };
    (handle, descriptors)
}
