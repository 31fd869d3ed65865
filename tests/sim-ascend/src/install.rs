//! Puts the simulated runtime where a test can find it.

use std::{
    io,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
};

use haulier_sim::install;

/// The name that cargo builds it under.
const BUILT: &str = "libhaulier_sim_ascend.so";

/// Where the build script puts the C++ libraries, and what they are called.
const CPLUSPLUS: &str = env!("OUT_DIR");
const CPLUSPLUS_NAMES: [&str; 2] = ["libllm_datadist.so", "libmetadef.so"];

/// The simulated runtime that cargo built beside the running test.
///
/// # Errors
/// Where the running program is not where cargo puts tests, or the library is not there.
pub fn library() -> io::Result<PathBuf> {
    install::library(BUILT, "haulier-sim-ascend")
}

/// Puts the simulated runtime into `folder` as `libascendcl.so`, and answers with its path.
///
/// What `without` names no lookup finds in it, as in a runtime that is older. With an empty list it is a link to what
/// cargo built, so that all such folders of a process give one runtime; otherwise a library of its own.
///
/// # Errors
/// Where there is no library, the folder cannot be written, or a name is not one of the library's.
pub fn install(folder: &Path, without: &[&str]) -> io::Result<PathBuf> {
    let there = folder.join("libascendcl.so");
    install::put(&library()?, &there, without)?;
    Ok(there)
}

/// Puts `libllm_datadist.so` and `libmetadef.so` beside it: with all three on `LD_LIBRARY_PATH` Mooncake's library for
/// NPUs loads. They use the runtime of their folder, or the one that is loaded under its name.
///
/// # Errors
/// Where they were not built, or the folder cannot be written.
pub fn install_adxl(folder: &Path) -> io::Result<()> {
    for name in CPLUSPLUS_NAMES {
        let built = Path::new(CPLUSPLUS).join(name);
        if !built.is_file() {
            let why = format!("{name} was not built: install Debian's build-essential (g++) and build again");
            return Err(io::Error::new(io::ErrorKind::NotFound, why));
        }
        symlink(built, folder.join(name))?;
    }
    Ok(())
}
