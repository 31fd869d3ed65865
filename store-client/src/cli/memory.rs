//! The command's own memory: mapped files, and buffers of a device. All `unsafe` of the command is here.

use std::{fs::File, os::unix::fs::OpenOptionsExt, path::Path};

use haulier::{
    AnyDevice,
    hal::{Buffer, DeviceExt, Region},
};
use memmap2::{Mmap, MmapOptions};
use rustix::fs::OFlags;

use super::exit::{Exit, Failure, Result};

/// Maps a file for reading.
pub(crate) fn map(path: &Path) -> Result<Mmap> {
    let refuse = |e: std::io::Error| Failure::input(path, e);
    // Without waiting: a FIFO would be waited for until somebody writes into it.
    let nonblock = OFlags::NONBLOCK.bits() as i32;
    let file = File::options().read(true).custom_flags(nonblock).open(path).map_err(refuse)?;
    if !file.metadata().map_err(refuse)?.is_file() {
        return Err(Failure::input(path, "not a regular file"));
    }
    // SAFETY: the mapping is private to this process and only read. Whoever cuts or rewrites the file meanwhile breaks
    // the reading of it, as with every program that maps its input; the store never sees the mapping itself.
    unsafe { MmapOptions::new().map(&file) }.map_err(refuse)
}

/// A new buffer of `device` that holds these bytes, of which there is at least one.
pub(crate) fn upload(device: &AnyDevice, bytes: &[u8]) -> Result<Buffer<AnyDevice>> {
    let buffer = device.buffer(bytes.len())?;
    let source = Region::host(bytes.as_ptr() as usize, bytes.len());
    // SAFETY: the buffer was just made, so nobody else knows it, and `bytes` is borrowed for the call.
    device.bound(|bound| unsafe { bound.copy(buffer.region(), source) })?;
    Ok(buffer)
}

/// The bytes that a buffer of `device` holds.
pub(crate) fn download(device: &AnyDevice, buffer: &mut Buffer<AnyDevice>) -> Result<Vec<u8>> {
    let mut bytes = vec![0; buffer.region().len];
    let target = Region::host(bytes.as_mut_ptr() as usize, bytes.len());
    // SAFETY: the vector is this function's own, and the command queues no work on its buffers, so that nothing writes
    // this one meanwhile.
    device.bound(|bound| unsafe { bound.copy(target, buffer.region()) })?;
    Ok(bytes)
}

/// Refuses early what would take more memory than the system has left.
pub(crate) fn require(bytes: u64, what: &str) -> Result<()> {
    match available() {
        Some(available) if available < bytes => {
            let text = format!("{what} takes {bytes} bytes of memory, of which {available} are available");
            Err(Failure::new(Exit::Refused, "out_of_memory", text))
        }
        _ => Ok(()),
    }
}

fn available() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    field(&text, "MemAvailable:")
}

/// A field of a file under /proc that is given in kB, in bytes.
pub(crate) fn field(text: &str, name: &str) -> Option<u64> {
    let rest = text.lines().find_map(|line| line.strip_prefix(name))?;
    rest.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_of_proc_are_read_in_bytes() {
        let text = "MemTotal:       10 kB\nMemAvailable:    5 kB\nThreads: 3\n";
        assert_eq!(field(text, "MemAvailable:"), Some(5 << 10));
        assert_eq!((field(text, "Threads:"), field(text, "Mem:")), (None, None));
    }

    #[test]
    fn what_does_not_fit_is_refused_before_it_is_tried() {
        assert!(require(1, "a byte").is_ok());
        assert_eq!(require(u64::MAX, "too much").unwrap_err().exit, Exit::Refused);
    }

    #[test]
    fn only_regular_files_are_mapped() {
        let dir = tempfile::tempdir().unwrap();
        let fifo = dir.path().join("fifo");
        rustix::fs::mkfifoat(rustix::fs::CWD, &fifo, rustix::fs::Mode::RUSR).unwrap();
        for path in [Path::new("/dev/zero"), Path::new("/tmp"), Path::new("/nonexistent"), &fifo] {
            assert_eq!(map(path).unwrap_err().exit, Exit::BadInput, "{}", path.display());
        }
    }

    #[test]
    fn bytes_go_to_a_device_and_back() {
        let Some(device) =
            haulier::devices::backends().into_iter().find_map(|b| b.devices.into_iter().next())
        else {
            return;
        };
        let mut buffer = upload(&device, b"there and back").unwrap();
        assert_eq!(download(&device, &mut buffer).unwrap(), b"there and back");
    }
}
