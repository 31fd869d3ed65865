//! Safetensors files: read by mapping them, written whole or not at all.

use std::{
    borrow::Cow,
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use haulier::Dtype;
use memmap2::Mmap;
use safetensors::{SafeTensorError, SafeTensors, View};

use super::{
    exit::{Exit, Failure, Result},
    memory,
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

impl View for NewTensor<'_> {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        (self.bytes)()
    }

    fn data_len(&self) -> usize {
        self.len
    }
}

/// Writes a file of these tensors. It appears under `path` when it is whole; until then, and when this fails, what was
/// there stays.
pub(crate) fn write(path: &Path, tensors: Vec<(String, NewTensor<'_>)>) -> Result<()> {
    replace(path, |temporary| safetensors::serialize_to_file(tensors, None, temporary).map_err(reason))
}

/// Writes a file of these bytes, as [`write`].
pub(crate) fn write_bytes(path: &Path, bytes: &[u8]) -> Result<()> {
    replace(path, |temporary| fs::write(temporary, bytes).map_err(|e| e.to_string()))
}

fn replace(path: &Path, fill: impl FnOnce(&Path) -> Result<(), String>) -> Result<()> {
    let refuse =
        |why: String| Failure::new(Exit::Refused, "os", format!("{}: not written: {why}", path.display()));
    let beside = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let temporary = tempfile::Builder::new()
        .prefix(".haulier-")
        // The process' umask takes from this, as for any new file.
        .permissions(fs::Permissions::from_mode(0o666))
        .tempfile_in(beside)
        .map_err(|e| refuse(e.to_string()))?
        .into_temp_path();
    let finish = || -> std::io::Result<()> { fs::File::open(&temporary)?.sync_all() };
    let mode = fs::metadata(&temporary).map_err(|e| refuse(e.to_string()))?.permissions();
    fill(&temporary).map_err(refuse)?;
    // The writer may have replaced the temporary file by one of its own, with other permissions.
    fs::set_permissions(&temporary, mode).and_then(|()| finish()).map_err(|e| refuse(e.to_string()))?;
    temporary.persist(path).map_err(|e| refuse(e.error.to_string()))
}

fn reason(e: SafeTensorError) -> String {
    match e {
        SafeTensorError::IoError(e) => e.to_string(),
        e => e.to_string(),
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
