//! A shared library as the dynamic linker gives it.

use std::{
    error::Error as _,
    ffi::OsStr,
    fs,
    mem::ManuallyDrop,
    path::{Path, PathBuf},
};

/// An open library. It is never closed: a driver starts threads and registers exit handlers, and unloading would leave
/// them without their code.
#[derive(Debug)]
pub(crate) struct Library(ManuallyDrop<libloading::Library>);

/// Why a library could not be opened.
#[derive(Debug)]
pub(crate) enum Refusal {
    /// The linker finds nothing of this name.
    Missing,
    /// It is there, and the linker refuses it; in the linker's words.
    Unloadable(String),
}

impl Library {
    /// Opens `name`: a path where it has a slash, else a name for the linker to search for.
    pub(crate) fn open(name: &OsStr) -> Result<Self, Refusal> {
        // SAFETY: this runs the library's initialisers. The name is the driver's own, or what the user set in its place.
        match unsafe { libloading::Library::new(name) } {
            Ok(library) => Ok(Library(ManuallyDrop::new(library))),
            Err(e) => {
                let words = e.source().map_or_else(|| e.to_string(), ToString::to_string);
                Err(if is_missing(name, &words) { Refusal::Missing } else { Refusal::Unloadable(words) })
            }
        }
    }

    /// The library itself, for whoever keeps it open.
    pub(crate) fn into_inner(self) -> libloading::Library {
        ManuallyDrop::into_inner(self.0)
    }

    /// Where `symbol` is, or `None` where this version does not have it.
    pub(crate) fn address_of(&self, symbol: &str) -> Option<usize> {
        // SAFETY: the symbol is located and not called, so its true type does not matter.
        let symbol = unsafe { self.0.get::<unsafe extern "C" fn()>(symbol).ok()?.into_raw() };
        Some(symbol.into_raw().addr())
    }
}

/// The linker gives no code, only words. They start with the name as it was asked for where nothing was found, and with
/// the file's path, or a dependency's name, where something was.
fn is_missing(name: &OsStr, words: &str) -> bool {
    let name = Path::new(name);
    if name.components().count() > 1 {
        matches!(name.try_exists(), Ok(false))
    } else {
        words.starts_with(&format!("{}: ", name.display()))
    }
}

/// The file that the code at `addr` was loaded from, with links resolved.
pub(crate) fn file_of(addr: usize) -> Option<PathBuf> {
    file_in(&fs::read_to_string("/proc/self/maps").ok()?, addr)
}

/// A line reads `start-end permissions offset device inode path`.
fn file_in(maps: &str, addr: usize) -> Option<PathBuf> {
    maps.lines().find_map(|line| {
        let (start, end) = line.split_once(' ')?.0.split_once('-')?;
        let range = usize::from_str_radix(start, 16).ok()?..usize::from_str_radix(end, 16).ok()?;
        range.contains(&addr).then(|| line.find('/').map(|at| PathBuf::from(&line[at..])))?
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_nothing_has_is_missing() {
        let words = "libx.so.1: cannot open shared object file: No such file or directory";
        assert!(is_missing(OsStr::new("libx.so.1"), words));
        assert!(is_missing(OsStr::new("/nowhere/libx.so.1"), words));
    }

    #[test]
    fn a_library_whose_dependency_is_absent_is_there() {
        let words = "libdep.so: cannot open shared object file: No such file or directory";
        assert!(!is_missing(OsStr::new("libx.so.1"), words));
    }

    #[test]
    fn an_address_leads_to_its_file() {
        let maps = "10-20 r-xp 00000000 08:01 7   /opt/a b/libx.so\n20-30 rw-p 00000000 00:00 0 \nnonsense\n";
        assert_eq!(file_in(maps, 0x1f), Some(PathBuf::from("/opt/a b/libx.so")));
        assert_eq!(file_in(maps, 0x20), None);
        assert_eq!(file_in(maps, 0x30), None);
    }
}
