//! Runs the conformance suite on every backend of this workspace. See `haulier_tests::conformance`.

use std::process::ExitCode;

use haulier_tests::{
    backends::{AnyFixture, CpuFixture, StrictFixture},
    conformance::{ExpectedFailure, Suite},
};

/// What is known to fail, and why.
const EXPECTED_FAILURES: &[ExpectedFailure] = &[];

fn main() -> ExitCode {
    let mut suite = Suite::new(EXPECTED_FAILURES)
        .backend("cpu", 1, CpuFixture::new)
        .backend("any", 1, AnyFixture::new)
        .backend("strict", 2, StrictFixture::cuda)
        .backend("strict-ascend", 2, StrictFixture::ascend);
    for backend in haulier::devices::backends().into_iter().filter(|backend| backend.devices.is_empty()) {
        suite = match backend.presence {
            Some(presence) => suite.absent(backend.name, presence),
            None => suite.absent(backend.name, "not compiled in"),
        };
    }
    suite.run()
}
