//! Puts the simulated driver where a test can find it.

use std::{
    env, fs, io,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
};

/// The name that cargo builds it under.
const BUILT: &str = "libhaulier_sim_cuda.so";

/// The simulated driver that cargo built beside the running test.
///
/// # Errors
/// Where the running program is not where cargo puts tests, or the library is not there.
pub fn library() -> io::Result<PathBuf> {
    // <target>/<profile>/deps/<test>-<hash>, or one level up for a program.
    let test = env::current_exe()?;
    let beside =
        test.ancestors().skip(1).take(2).flat_map(|folder| [folder.join("deps"), folder.to_path_buf()]);
    let found = beside.map(|folder| folder.join(BUILT)).find(|path| path.is_file());
    found.ok_or_else(|| {
        let why = format!("{BUILT} is not beside {}: depend on haulier-sim-cuda", test.display());
        io::Error::new(io::ErrorKind::NotFound, why)
    })
}

/// Puts the simulated driver into `folder` as `libcuda.so.1` and `libcuda.so`, and answers with the path of the first.
///
/// What `without` names no lookup finds in it, as in a driver that is older. With an empty list it is a link to what
/// cargo built, so that all such folders of a process give one driver; otherwise a library of its own.
///
/// # Errors
/// Where there is no library, the folder cannot be written, or a name is not one of the library's.
pub fn install(folder: &Path, without: &[&str]) -> io::Result<PathBuf> {
    let (built, there) = (library()?, folder.join("libcuda.so.1"));
    if without.is_empty() {
        symlink(&built, &there)?;
    } else {
        let mut bytes = fs::read(&built)?;
        for name in without {
            hide(&mut bytes, name)?;
        }
        fs::write(&there, bytes)?;
    }
    // The same file under both names: cudarc looks for this one first, and must not get a second driver.
    symlink("libcuda.so.1", folder.join("libcuda.so"))?;
    Ok(there)
}

/// Changes a name in the string tables, so that the linker's comparison fails wherever its hash leads.
fn hide(library: &mut [u8], name: &str) -> io::Result<()> {
    let entry = [b"\0", name.as_bytes(), b"\0"].concat();
    let mut at = 0;
    let mut found = false;
    while let Some(next) = library[at..].windows(entry.len()).position(|window| window == entry) {
        library[at + next + 1] = b'_';
        at += next + 1;
        found = true;
    }
    if found {
        return Ok(());
    }
    Err(io::Error::new(io::ErrorKind::InvalidInput, format!("the library has no {name}")))
}
