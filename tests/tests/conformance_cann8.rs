//! The conformance suite on the Ascend backend with a runtime that behaves as CANN 8.5: `conformance` has the one that
//! behaves as CANN 9, and a process has one.

use std::process::ExitCode;

use haulier_tests::{
    ascend::{self, AscendFixture},
    conformance::Suite,
};

fn main() -> ExitCode {
    // Kept until the end.
    let _runtime = ascend::install("8.5.0");
    Suite::new(&[]).backend("ascend-sim-8.5", 2, AscendFixture::new).run()
}
