//! Puts a simulated library where a test can find it.

use std::{
    env, fs, io,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
};

/// The library `built` that cargo built for `package`, beside the running test.
///
/// # Errors
/// Where the running program is not where cargo puts tests, or the library is not there.
pub fn library(built: &str, package: &str) -> io::Result<PathBuf> {
    // <target>/<profile>/deps/<test>-<hash>, or one level up for a program.
    let test = env::current_exe()?;
    let beside =
        test.ancestors().skip(1).take(2).flat_map(|folder| [folder.join("deps"), folder.to_path_buf()]);
    let found = beside.map(|folder| folder.join(built)).find(|path| path.is_file());
    found.ok_or_else(|| {
        let why = format!("{built} is not beside {}: depend on {package}", test.display());
        io::Error::new(io::ErrorKind::NotFound, why)
    })
}

/// Puts the library at `built` to `there`.
///
/// What `without` names no lookup finds in it, as in a library that is older. With an empty list it is a link to what
/// cargo built, so that all such links of a process give one library; otherwise a library of its own.
///
/// # Errors
/// Where it cannot be written, or a name is not one of the library's.
pub fn put(built: &Path, there: &Path, without: &[&str]) -> io::Result<()> {
    if without.is_empty() {
        return symlink(built, there);
    }
    let mut bytes = fs::read(built)?;
    for name in without {
        hide(&mut bytes, name)?;
    }
    fs::write(there, bytes)
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
