//! Puts the simulated driver where a test can find it.

use std::{
    io,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
};

use haulier_sim::install;

/// The name that cargo builds it under.
const BUILT: &str = "libhaulier_sim_cuda.so";

/// The simulated driver that cargo built beside the running test.
///
/// # Errors
/// Where the running program is not where cargo puts tests, or the library is not there.
pub fn library() -> io::Result<PathBuf> {
    install::library(BUILT, "haulier-sim-cuda")
}

/// Puts the simulated driver into `folder` as `libcuda.so.1` and `libcuda.so`, and answers with the path of the first.
///
/// What `without` names no lookup finds in it, as in a driver that is older. With an empty list it is a link to what
/// cargo built, so that all such folders of a process give one driver; otherwise a library of its own.
///
/// # Errors
/// Where there is no library, the folder cannot be written, or a name is not one of the library's.
pub fn install(folder: &Path, without: &[&str]) -> io::Result<PathBuf> {
    let there = folder.join("libcuda.so.1");
    install::put(&library()?, &there, without)?;
    // The same file under both names: cudarc looks for this one first, and must not get a second driver.
    symlink("libcuda.so.1", folder.join("libcuda.so"))?;
    Ok(there)
}
