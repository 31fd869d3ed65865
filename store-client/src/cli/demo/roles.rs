//! The two processes of the demo: one puts the file's tensors, the other gets and views them.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use haulier::{AnyDevice, Dtype, Payload, Put, StoreClient, Target, TensorRef, TensorView, View};
use serde::{Deserialize, Serialize};

use super::plan::{Way, parts, ways};
use crate::cli::{
    exit::{Failure, Result},
    memory,
    model::FileTensor,
};

/// What a buffer holds before it is filled: not zeros, so that a get that does nothing is noticed.
const BLANK: u8 = 0xee;
/// Regions of a device buffer start at multiples of this, as allocators of frameworks do it.
const ALIGN: usize = 256;

/// One line of the demo's table.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Leg {
    pub(crate) op: String,
    pub(crate) way: Way,
    pub(crate) tensors: u64,
    pub(crate) bytes: u64,
    pub(crate) seconds: f64,
}

/// What one of the processes reports.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Report {
    pub(crate) legs: Vec<Leg>,
    /// Tensors that came back otherwise than they are in the file, and in what.
    pub(crate) wrong: Vec<String>,
    /// Of everything that was viewed; empty for the process that puts.
    pub(crate) digest: String,
}

/// Puts every tensor of the file.
pub(crate) fn put(client: &StoreClient<AnyDevice>, tensors: &[FileTensor<'_>]) -> Result<Report> {
    let ways = ways(tensors);
    let mut legs = [Way::DeviceBuffer, Way::HostMemory, Way::StoreMemory].map(|way| Leg::new("put", way));
    let [device, host, store] = &mut legs;
    for part in parts(tensors, &ways, &[Way::DeviceBuffer]) {
        let (bytes, offsets) = together(&part);
        let buffer = memory::upload(client.device(), &bytes)?;
        drop(bytes);
        let payloads =
            part.iter().zip(offsets).map(|(tensor, at)| Payload::part(&buffer, at, tensor.bytes.len()));
        put_part(client, &part, payloads, device)?;
    }
    for part in parts(tensors, &ways, &[Way::HostMemory]) {
        put_part(client, &part, part.iter().map(|tensor| Ok(tensor.bytes.into())), host)?;
    }
    for tensor in parts(tensors, &ways, &[Way::StoreMemory]).into_iter().flatten() {
        let mut buffer = client.alloc(tensor.bytes.len() as u64)?;
        buffer.copy_from_slice(tensor.bytes);
        let since = Instant::now();
        let put = client.put_tensor_allocated(&key(tensor), tensor.dtype, &tensor.shape, buffer);
        store.add([tensor].iter(), since.elapsed());
        stored(tensor, put)?;
    }
    Ok(Report::new(legs))
}

fn put_part<'p>(
    client: &StoreClient<AnyDevice>,
    part: &[&FileTensor<'_>],
    payloads: impl Iterator<Item = haulier::Result<Payload<'p, AnyDevice>>>,
    leg: &mut Leg,
) -> Result<()> {
    let keys: Vec<String> = part.iter().map(|tensor| key(tensor)).collect();
    let items = keys.iter().zip(part).zip(payloads).map(|((key, tensor), payload)| {
        Ok((key.as_str(), TensorRef::new(tensor.dtype, &tensor.shape, payload?)?))
    });
    let items: Vec<_> = items.collect::<haulier::Result<_>>()?;
    let since = Instant::now();
    let verdicts = client.batch_put_tensor(&items);
    leg.add(part.iter(), since.elapsed());
    part.iter().zip(verdicts).try_for_each(|(tensor, put)| stored(tensor, put))
}

fn stored(tensor: &FileTensor<'_>, put: haulier::Result<Put>) -> Result<()> {
    match put {
        Ok(Put::Stored) => Ok(()),
        Ok(other) => Err(Failure::refused(format!("{}: {other:?} instead of stored", tensor.name))),
        Err(e) => Err(Failure::from(e).about(&tensor.name)),
    }
}

/// The tensors' bytes one after the other, and where each begins: many tensors in one allocation.
fn together(part: &[&FileTensor<'_>]) -> (Vec<u8>, Vec<usize>) {
    let mut bytes = Vec::new();
    let offsets = part.iter().map(|tensor| {
        bytes.resize(bytes.len().next_multiple_of(ALIGN), 0);
        bytes.extend_from_slice(tensor.bytes);
        bytes.len() - tensor.bytes.len()
    });
    let offsets = offsets.collect();
    (bytes, offsets)
}

/// Gets and views every tensor, and compares each with the file.
pub(crate) fn get(client: &StoreClient<AnyDevice>, tensors: &[FileTensor<'_>]) -> Result<Report> {
    let ways = ways(tensors);
    let mut legs = [
        Leg::new("get_into", Way::DeviceBuffer),
        Leg::new("get_into", Way::HostMemory),
        Leg::new("view", Way::InPlace),
    ];
    let [device, host, view] = &mut legs;
    let mut wrong = Vec::new();
    for part in parts(tensors, &ways, &[Way::DeviceBuffer]) {
        let blank =
            |tensor: &&FileTensor<'_>| memory::upload(client.device(), &vec![BLANK; tensor.bytes.len()]);
        let mut buffers: Vec<_> = part.iter().map(blank).collect::<Result<_>>()?;
        get_part(client, &part, buffers.iter_mut().map(Target::from), device)?;
        for (tensor, buffer) in part.iter().zip(&mut buffers) {
            compare(
                &mut wrong,
                tensor,
                "get_into a device buffer",
                &memory::download(client.device(), buffer)?,
            );
        }
    }
    for part in parts(tensors, &ways, &[Way::HostMemory, Way::StoreMemory]) {
        let mut buffers: Vec<Vec<u8>> = part.iter().map(|tensor| vec![BLANK; tensor.bytes.len()]).collect();
        get_part(client, &part, buffers.iter_mut().map(Target::from), host)?;
        for (tensor, buffer) in part.iter().zip(&buffers) {
            compare(&mut wrong, tensor, "get_into host memory", buffer);
        }
    }
    let mut digest = Digest::default();
    for part in parts(tensors, &ways, &[Way::DeviceBuffer, Way::HostMemory, Way::StoreMemory]) {
        for (tensor, viewed) in part.iter().zip(view_part(client, &part, view)?) {
            let viewed = TensorView::try_from(viewed).map_err(|e| Failure::from(e).about(&tensor.name))?;
            let spec = viewed.spec();
            if (spec.dtype, &spec.shape) != (tensor.dtype, &tensor.shape) {
                wrong.push(format!("{}: dtype or shape in a view", tensor.name));
            }
            compare(&mut wrong, tensor, "a view", viewed.bytes());
            digest.add(&tensor.name, spec.dtype, &spec.shape, viewed.bytes());
        }
    }
    Ok(Report { wrong, digest: digest.hex(), ..Report::new(legs) })
}

fn get_part<'p>(
    client: &StoreClient<AnyDevice>,
    part: &[&FileTensor<'_>],
    targets: impl Iterator<Item = Target<'p, AnyDevice>>,
    leg: &mut Leg,
) -> Result<()> {
    let keys: Vec<String> = part.iter().map(|tensor| key(tensor)).collect();
    let items = keys.iter().map(String::as_str).zip(targets).collect();
    let since = Instant::now();
    let verdicts = client.batch_get_into(items);
    leg.add(part.iter(), since.elapsed());
    for (tensor, verdict) in part.iter().zip(verdicts) {
        let len = verdict.map_err(|e| Failure::from(e).about(&tensor.name))?;
        if len != tensor.bytes.len() as u64 {
            return Err(Failure::refused(format!("{}: {len} bytes are stored", tensor.name)));
        }
    }
    Ok(())
}

fn view_part(client: &StoreClient<AnyDevice>, part: &[&FileTensor<'_>], leg: &mut Leg) -> Result<Vec<View>> {
    let keys: Vec<String> = part.iter().map(|tensor| key(tensor)).collect();
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    let since = Instant::now();
    let views = client.batch_view(&keys);
    leg.add(part.iter(), since.elapsed());
    let found = part.iter().zip(views);
    found.map(|(tensor, view)| view.map_err(|e| Failure::from(e).about(&tensor.name))).collect()
}

fn compare(wrong: &mut Vec<String>, tensor: &FileTensor<'_>, how: &str, bytes: &[u8]) {
    if bytes != tensor.bytes {
        wrong.push(format!("{}: bytes by {how}", tensor.name));
    }
}

/// Apart from other keys, and good for the empty name too.
fn key(tensor: &FileTensor<'_>) -> String {
    format!("demo/{}", tensor.name)
}

/// A digest over tensors, in whatever order they come: names, dtypes, shapes and bytes.
#[derive(Debug, Default)]
pub(crate) struct Digest(BTreeMap<String, blake3::Hash>);

impl Digest {
    pub(crate) fn add(&mut self, name: &str, dtype: Dtype, shape: &[u64], bytes: &[u8]) {
        // The description ends in a bracket, which no dtype and no shape has inside.
        let described = format!("{dtype} {shape:?}");
        self.0.insert(
            name.to_owned(),
            blake3::Hasher::new().update(described.as_bytes()).update(bytes).finalize(),
        );
    }

    pub(crate) fn hex(&self) -> String {
        let mut all = blake3::Hasher::new();
        for (name, hash) in &self.0 {
            all.update(blake3::hash(name.as_bytes()).as_bytes()).update(hash.as_bytes());
        }
        all.finalize().to_hex().to_string()
    }
}

impl Leg {
    fn new(op: &str, way: Way) -> Self {
        Leg { op: op.to_owned(), way, tensors: 0, bytes: 0, seconds: 0.0 }
    }

    fn add<'t, 'f: 't>(&mut self, tensors: impl Iterator<Item = &'t &'t FileTensor<'f>>, took: Duration) {
        for tensor in tensors {
            self.tensors += 1;
            self.bytes += tensor.bytes.len() as u64;
        }
        self.seconds += took.as_secs_f64();
    }
}

impl Report {
    fn new(legs: [Leg; 3]) -> Self {
        let legs = legs.into_iter().filter(|leg| leg.tensors > 0).collect();
        Report { legs, wrong: Vec::new(), digest: String::new() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_of_one_allocation_are_aligned_and_whole() {
        let tensor = |bytes| FileTensor { name: String::new(), dtype: Dtype::U8, shape: vec![], bytes };
        let (a, b) = (tensor(&[1, 2, 3][..]), tensor(&[4, 5][..]));
        let (bytes, offsets) = together(&[&a, &b]);
        assert_eq!(offsets, [0, ALIGN]);
        assert_eq!((&bytes[..3], &bytes[ALIGN..]), (&[1, 2, 3][..], &[4, 5][..]));
    }

    #[test]
    fn the_digest_tells_apart_what_differs_and_not_what_comes_in_another_order() {
        let of = |tensors: &[(&str, Dtype, &[u64], &[u8])]| {
            let mut digest = Digest::default();
            for (name, dtype, shape, bytes) in tensors {
                digest.add(name, *dtype, shape, bytes);
            }
            digest.hex()
        };
        let (a, b) = (("a", Dtype::U8, &[2][..], &[1, 2][..]), ("b", Dtype::U8, &[2][..], &[1, 2][..]));
        assert_eq!(of(&[a, b]), of(&[b, a]));
        for other in [
            ("c", Dtype::U8, &[2][..], &[1, 2][..]),
            ("a", Dtype::I8, &[2][..], &[1, 2][..]),
            ("a", Dtype::U8, &[1, 2][..], &[1, 2][..]),
            ("a", Dtype::U8, &[2][..], &[1, 3][..]),
        ] {
            assert_ne!(of(&[a]), of(&[other]));
        }
    }
}
