//! Runs the conformance suite on every backend of this workspace. See `haulier_tests::conformance`.

use std::process::ExitCode;

use haulier_tests::{
    ascend::{self, AscendFixture},
    backends::{self, CpuFixture, StrictFixture},
    conformance::{ExpectedFailure, Suite},
    cuda::{self, CudaFixture},
};

/// What is known to fail, and why.
const EXPECTED_FAILURES: &[ExpectedFailure] = &[];

fn main() -> ExitCode {
    // Kept until the end.
    let (_driver, _runtime) = (cuda::install(), ascend::install("9.0.0"));
    let mut suite = Suite::new(EXPECTED_FAILURES)
        .backend("cpu", 1, CpuFixture::new)
        .backend("any-cpu", 1, backends::any_cpu)
        .backend("strict", 2, StrictFixture::cuda)
        .backend("strict-ascend", 2, StrictFixture::ascend)
        .backend("cuda-sim", 2, CudaFixture::new)
        .backend("ascend-sim", 2, AscendFixture::new)
        .absent("cuda", "no GPU takes part here: cuda-sim is the CUDA backend on a simulated libcuda.so.1")
        .absent(
            "ascend",
            "no NPU takes part here: ascend-sim is the Ascend backend on a simulated libascendcl.so",
        );
    #[cfg(feature = "cuda")]
    {
        suite = suite.backend("any-cuda-sim", 2, backends::any_cuda);
    }
    let backends = haulier::devices::backends().into_iter();
    let simulated = |name| ["cuda", "ascend"].contains(&name);
    for backend in backends.filter(|backend| backend.devices.is_empty() && !simulated(backend.name)) {
        suite = match backend.presence {
            Some(presence) => suite.absent(backend.name, presence),
            None => suite.absent(backend.name, "not compiled in"),
        };
    }
    suite.run()
}
