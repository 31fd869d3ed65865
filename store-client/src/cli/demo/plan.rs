//! Which way each tensor goes, and in which parts: the same for the process that puts and the one that gets.

use serde::{Deserialize, Serialize};

use crate::cli::model::FileTensor;

/// Where a tensor lies before it is put, and where it is to go when it is got.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Way {
    /// In a buffer of the device, which the node opens.
    DeviceBuffer,
    /// In the mapped file; in memory of the heap when it is got.
    HostMemory,
    /// In memory of the store, so that putting copies nothing.
    StoreMemory,
    /// Wherever it is stored: a view copies nothing.
    InPlace,
}

/// The bytes that a process has in flight at once, beside those of the file.
pub(crate) const PART: usize = 64 << 20;
/// The tensors of a part.
const PART_TENSORS: usize = 64;

/// One way for each tensor, so that device and host get about as many bytes each; the largest is made in the store.
pub(crate) fn ways(tensors: &[FileTensor<'_>]) -> Vec<Way> {
    let mut ways = vec![Way::HostMemory; tensors.len()];
    let mut order: Vec<usize> = (0..tensors.len()).filter(|&i| !tensors[i].bytes.is_empty()).collect();
    order.sort_by_key(|&i| (std::cmp::Reverse(tensors[i].bytes.len()), i));
    if order.len() > 2 {
        ways[order.remove(0)] = Way::StoreMemory;
    }
    let (mut on_device, mut on_host) = (0, 0);
    for i in order {
        let bytes = tensors[i].bytes.len();
        if on_device <= on_host {
            ways[i] = Way::DeviceBuffer;
            on_device += bytes;
        } else {
            on_host += bytes;
        }
    }
    ways
}

/// The tensors that go one of these ways, in parts.
pub(crate) fn parts<'t, 'f>(
    tensors: &'t [FileTensor<'f>],
    ways: &[Way],
    which: &[Way],
) -> Vec<Vec<&'t FileTensor<'f>>> {
    let mut parts: Vec<Vec<&FileTensor<'f>>> = Vec::new();
    let mut bytes = 0;
    for (tensor, _) in tensors.iter().zip(ways).filter(|(_, way)| which.contains(way)) {
        bytes += tensor.bytes.len();
        match parts.last_mut() {
            Some(part) if bytes <= PART && part.len() < PART_TENSORS => part.push(tensor),
            _ => {
                bytes = tensor.bytes.len();
                parts.push(vec![tensor]);
            }
        }
    }
    parts
}

#[cfg(test)]
mod tests {
    use haulier::Dtype;

    use super::*;

    fn tensors(lens: &[usize]) -> Vec<FileTensor<'static>> {
        static BYTES: [u8; PART] = [0; PART];
        let tensor =
            |&len| FileTensor { name: String::new(), dtype: Dtype::U8, shape: vec![], bytes: &BYTES[..len] };
        lens.iter().map(tensor).collect()
    }

    #[test]
    fn every_way_is_gone_and_empty_tensors_need_no_buffer() {
        use Way::*;
        assert_eq!(
            ways(&tensors(&[0, 10, 30, 20, 20])),
            [HostMemory, DeviceBuffer, StoreMemory, DeviceBuffer, HostMemory]
        );
        assert_eq!(ways(&tensors(&[10, 10])), [DeviceBuffer, HostMemory]);
        assert_eq!(ways(&tensors(&[0])), [HostMemory]);
        assert!(ways(&[]).is_empty());
    }

    #[test]
    fn parts_hold_what_fits_and_leave_nothing_out() {
        let tensors = tensors(&[PART, 1, PART - 1, 1, 7]);
        let ways = [Way::HostMemory, Way::HostMemory, Way::HostMemory, Way::HostMemory, Way::DeviceBuffer];
        let lens = |which: &[Way]| -> Vec<Vec<usize>> {
            let parts = parts(&tensors, &ways, which);
            parts.iter().map(|part| part.iter().map(|tensor| tensor.bytes.len()).collect()).collect()
        };
        assert_eq!(lens(&[Way::HostMemory]), [vec![PART], vec![1, PART - 1], vec![1]]);
        assert_eq!(lens(&[Way::DeviceBuffer]), [[7]]);
        assert!(lens(&[Way::StoreMemory]).is_empty());
    }
}
