//! Safetensors files: read by mapping them, written whole or not at all.

use std::{
    borrow::Cow,
    fmt,
    fs::{self, File},
    io::{self, ErrorKind, Write},
    os::unix::fs::{MetadataExt, PermissionsExt, fchown},
    path::{Path, PathBuf},
};

use haulier::Dtype;
use memmap2::Mmap;
use safetensors::{
    SafeTensorError, SafeTensors,
    tensor::{Metadata, TensorInfo},
};

use super::{
    child::Interrupts,
    exit::{Exit, Failure, Result},
    memory, output,
};

/// A mapped file. Nothing of it has been checked yet.
#[derive(Debug)]
pub(crate) struct Model {
    pub(crate) path: PathBuf,
    map: Mmap,
}

/// A tensor of a file.
#[derive(Debug, Clone)]
pub(crate) struct FileTensor<'f> {
    pub(crate) name: String,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<u64>,
    pub(crate) bytes: &'f [u8],
}

impl Model {
    pub(crate) fn open(path: &Path) -> Result<Self> {
        Ok(Model { path: path.to_owned(), map: memory::map(path)? })
    }

    /// Its tensors, in the order in which they lie in the file. The whole header is checked first.
    pub(crate) fn tensors(&self) -> Result<Vec<FileTensor<'_>>> {
        let parsed = SafeTensors::deserialize(&self.map)
            .map_err(|e| Failure::input(&self.path, format_args!("not a whole safetensors file: {e}")))?;
        let mut tensors: Vec<FileTensor<'_>> = parsed
            .tensors()
            .into_iter()
            .map(|(name, tensor)| FileTensor {
                name,
                dtype: tensor.dtype(),
                shape: tensor.shape().iter().map(|&n| n as u64).collect(),
                bytes: tensor.data(),
            })
            .collect();
        tensors.sort_by(|a, b| (a.bytes.as_ptr(), &a.name).cmp(&(b.bytes.as_ptr(), &b.name)));
        Ok(tensors)
    }
}

/// A tensor to be written; its bytes are asked for when their turn comes.
pub(crate) struct NewTensor<'b> {
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    pub(crate) len: usize,
    pub(crate) bytes: Box<dyn Fn() -> Cow<'b, [u8]> + 'b>,
}

/// What a file's header holds besides its tensors: no tensor can have this name.
pub(crate) const RESERVED: &str = "__metadata__";

/// How much is written before a look at whether the process is to end.
const PIECE: usize = 8 << 20;

/// Writes a file of these tensors. It appears under `path` when it is whole; until then, and when this fails or is
/// interrupted, what was there stays. What is there and no file, such as a pipe or a device, is written to as it is.
pub(crate) fn write(path: &Path, mut tensors: Vec<(String, NewTensor<'_>)>) -> Result<()> {
    if tensors.iter().any(|(name, _)| name == RESERVED) {
        let why = format!("a safetensors file cannot hold a tensor that is named {RESERVED}");
        return Err(Failure::refused(why).advise("use --raw for its bytes"));
    }
    // As the format asks for it: the largest elements first, so that all are aligned.
    tensors.sort_by(|(a, x), (b, y)| y.dtype.cmp(&x.dtype).then_with(|| a.cmp(b)));
    let header = header(&tensors).map_err(|e| not_written(path, e))?;
    replace(path, |out| {
        out.write_all(&header)?;
        tensors.iter().try_for_each(|(_, tensor)| out.write_all(&(tensor.bytes)()))
    })
}

/// Writes a file of these bytes, as [`write`].
pub(crate) fn write_bytes(path: &Path, bytes: &[u8]) -> Result<()> {
    replace(path, |out| out.write_all(bytes))
}

/// The header with its length before it, for tensors that follow in this order.
fn header(tensors: &[(String, NewTensor<'_>)]) -> Result<Vec<u8>, SafeTensorError> {
    let mut end = 0;
    let info = |tensor: &NewTensor<'_>| {
        let start = end;
        end += tensor.len;
        TensorInfo { dtype: tensor.dtype, shape: tensor.shape.clone(), data_offsets: (start, end) }
    };
    let infos = tensors.iter().map(|(_, tensor)| tensor).map(info);
    let named = tensors.iter().map(|(name, _)| name.clone()).zip(infos).collect();
    let mut json = serde_json::to_vec(&Metadata::new(None, named)?)?;
    // Spaces, up to where the first tensor is aligned.
    json.resize(json.len().next_multiple_of(8), b' ');
    Ok([&(json.len() as u64).to_le_bytes()[..], &json].concat())
}

fn not_written(path: &Path, why: impl fmt::Display) -> Failure {
    Failure::new(Exit::Refused, "os", format!("{}: not written: {why}", output::path(path)))
}

/// What a path names, links followed.
enum Place {
    /// A file to replace, and what it is like now.
    File(PathBuf, fs::Metadata),
    /// Nothing yet.
    New(PathBuf),
    /// Something that cannot be replaced by a file, opened for writing.
    Stream(File),
}

impl Place {
    fn find(path: &Path) -> io::Result<Self> {
        match fs::metadata(path) {
            Ok(found) if found.is_file() => {
                // Whoever may not write into a file shall not replace it either, which asks for less.
                File::options().write(true).open(path)?;
                Ok(Place::File(fs::canonicalize(path)?, found))
            }
            Ok(_) => Ok(Place::Stream(File::options().write(true).open(path)?)),
            Err(e) if e.kind() == ErrorKind::NotFound => match path.is_symlink() {
                true => Err(io::Error::other("a symbolic link to what is not there")),
                false => Ok(Place::New(path.to_owned())),
            },
            Err(e) => Err(e),
        }
    }
}

fn replace(path: &Path, fill: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<()> {
    let refuse = |e: io::Error| not_written(path, e);
    match Place::find(path).map_err(refuse)? {
        // Signals end the process at once here, also while nobody reads the pipe: nothing is to be cleaned up.
        Place::Stream(mut stream) => fill(&mut stream).map_err(refuse),
        Place::File(real, old) => fill_and_rename(&real, Some(&old), fill, refuse),
        Place::New(path) => fill_and_rename(&path, None, fill, refuse),
    }
}

fn fill_and_rename(
    path: &Path,
    old: Option<&fs::Metadata>,
    fill: impl FnOnce(&mut dyn Write) -> io::Result<()>,
    refuse: impl Fn(io::Error) -> Failure,
) -> Result<()> {
    let beside = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    // From here on a signal must not end the process before the temporary file is removed.
    let interrupts = Interrupts::watch()?;
    let temporary = tempfile::Builder::new()
        .prefix(".haulier-")
        // The process' umask takes from this, as for any new file.
        .permissions(fs::Permissions::from_mode(0o666))
        .tempfile_in(beside)
        .map_err(&refuse)?;
    let write = || -> io::Result<()> {
        let file = temporary.as_file();
        if let Some(old) = old {
            // Root replaces the files of others, who are to keep them. Other users cannot give files away.
            let _ = fchown(file, Some(old.uid()), Some(old.gid()));
            // Without what writing into a file takes from it, such as set-user-id.
            file.set_permissions(fs::Permissions::from_mode(old.mode() & 0o777))?;
        }
        fill(&mut Interruptible { file, interrupts: &interrupts })?;
        file.sync_all()
    };
    write().map_err(|e| interrupts.explain(refuse(e)))?;
    interrupts.check()?;
    temporary.persist(path).map(drop).map_err(|e| refuse(e.error))
}

/// A file that is written in pieces, until the process is asked to end.
struct Interruptible<'a> {
    file: &'a File,
    interrupts: &'a Interrupts,
}

impl Write for Interruptible<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // Not `ErrorKind::Interrupted`, after which `write_all` would go on.
        self.interrupts.check().map_err(|e| io::Error::other(e.to_string()))?;
        self.file.write(&bytes[..bytes.len().min(PIECE)])
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(dtype: Dtype, shape: &[usize], bytes: &'static [u8]) -> NewTensor<'static> {
        NewTensor { dtype, shape: shape.to_vec(), len: bytes.len(), bytes: Box::new(move || bytes.into()) }
    }

    fn names_in(dir: &Path) -> Vec<String> {
        fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect()
    }

    #[test]
    fn what_is_written_is_read_back() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.safetensors");
        write(
            &path,
            vec![
                ("w".into(), tensor(Dtype::BF16, &[2, 1], &[1, 2, 3, 4])),
                ("empty".into(), tensor(Dtype::F32, &[0, 7], &[])),
                ("scalar".into(), tensor(Dtype::I64, &[], &[9; 8])),
            ],
        )
        .unwrap();
        let model = Model::open(&path).unwrap();
        let tensors = model.tensors().unwrap();
        let find = |name: &str| tensors.iter().find(|t| t.name == name).unwrap();
        assert_eq!(
            (find("w").dtype, &find("w").shape[..], find("w").bytes),
            (Dtype::BF16, &[2, 1][..], &[1, 2, 3, 4][..])
        );
        assert_eq!((&find("empty").shape[..], find("empty").bytes.len()), (&[0, 7][..], 0));
        assert_eq!((find("scalar").shape.len(), find("scalar").bytes), (0, &[9; 8][..]));
        assert_eq!(names_in(dir.path()), ["m.safetensors"]);
    }

    #[test]
    fn a_failure_leaves_the_old_file_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.safetensors");
        write_bytes(&path, b"old").unwrap();
        let twice = vec![("w".to_owned(), tensor(Dtype::U8, &[3], &[1, 2]))];
        assert_eq!(write(&path, twice).unwrap_err().exit, Exit::Refused);
        assert_eq!(fs::read(&path).unwrap(), b"old");
        assert_eq!(names_in(dir.path()), ["m.safetensors"]);
    }

    #[test]
    fn a_link_stays_one_and_the_file_keeps_its_mode() {
        let dir = tempfile::tempdir().unwrap();
        let (file, link) = (dir.path().join("file"), dir.path().join("link"));
        write_bytes(&file, b"old").unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o4640)).unwrap();
        std::os::unix::fs::symlink("file", &link).unwrap();
        write_bytes(&link, b"new").unwrap();
        assert!(link.is_symlink());
        assert_eq!(fs::read(&file).unwrap(), b"new");
        assert_eq!(fs::metadata(&file).unwrap().mode() & 0o7777, 0o640);
        fs::remove_file(&file).unwrap();
        assert!(write_bytes(&link, b"new").unwrap_err().to_string().contains("symbolic link"));
        assert_eq!(names_in(dir.path()), ["link"]);
    }

    #[test]
    fn what_is_no_file_is_written_to_and_stays() {
        let dir = tempfile::tempdir().unwrap();
        let fifo = dir.path().join("fifo");
        rustix::fs::mkfifoat(rustix::fs::CWD, &fifo, rustix::fs::Mode::RWXU).unwrap();
        let reader = std::thread::spawn({
            let fifo = fifo.clone();
            move || fs::read(fifo).unwrap()
        });
        write(&fifo, vec![("w".into(), tensor(Dtype::U8, &[2], &[1, 2]))]).unwrap();
        let read = reader.join().unwrap();
        assert_eq!(SafeTensors::deserialize(&read).unwrap().tensor("w").unwrap().data(), [1, 2]);
        assert_eq!(names_in(dir.path()), ["fifo"]);
        assert!(matches!(Place::find(Path::new("/dev/full")), Ok(Place::Stream(_))));
        assert!(write_bytes(dir.path(), b"x").unwrap_err().to_string().contains("directory"));
    }

    #[test]
    fn a_file_that_may_not_be_written_is_not_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        fs::write(&file, b"old").unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o444)).unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o777)).unwrap();
        let refused = std::thread::scope(|scope| {
            let other_user = || {
                // Root may write everything. The system call is for this thread alone, which ends here.
                if rustix::process::geteuid().is_root() {
                    let nobody = rustix::process::Uid::from_raw(65_534);
                    rustix::thread::set_thread_res_uid(nobody, nobody, nobody).unwrap();
                }
                write_bytes(&file, b"new")
            };
            scope.spawn(other_user).join().unwrap()
        });
        assert!(refused.unwrap_err().to_string().contains("ermission"));
        assert_eq!(fs::read(&file).unwrap(), b"old");
        assert_eq!(names_in(dir.path()), ["file"]);
    }

    #[test]
    fn the_reserved_name_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let tensors = vec![(RESERVED.to_owned(), tensor(Dtype::U8, &[1], &[1]))];
        assert_eq!(write(&dir.path().join("m"), tensors).unwrap_err().exit, Exit::Refused);
        assert!(names_in(dir.path()).is_empty());
    }

    #[test]
    fn truncated_and_hostile_files_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.safetensors");
        write(&path, vec![("w".into(), tensor(Dtype::F32, &[2], &[0; 8]))]).unwrap();
        let whole = fs::read(&path).unwrap();
        let header = |json: &str| [&(json.len() as u64).to_le_bytes(), json.as_bytes()].concat();
        let mut bad: Vec<Vec<u8>> = (0..whole.len()).map(|n| whole[..n].to_vec()).collect();
        bad.push([&whole[..], b"more"].concat());
        bad.push(u64::MAX.to_le_bytes().to_vec());
        bad.push(header(r#"{"w":{"dtype":"F32","shape":[18446744073709551615,2],"data_offsets":[0,8]}}"#));
        bad.push(header(r#"{"w":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}}"#));
        bad.push(header(r#"{"w":{"dtype":"Q7","shape":[2],"data_offsets":[0,8]}}"#));
        bad.push(header("[]"));
        for bytes in bad {
            fs::write(&path, &bytes).unwrap();
            let model = Model::open(&path).unwrap();
            assert_eq!(model.tensors().unwrap_err().exit, Exit::BadInput, "{} bytes", bytes.len());
        }
    }
}
