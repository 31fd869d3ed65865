//! Tensors: dtype and shape beside the bytes, strided input, and tensor-parallel shards.

mod shards;
mod spec;
mod strided;

use hal::Device;
pub use safetensors::Dtype;

pub use self::spec::{NDIM_MAX, Shard, TensorSpec};
use self::strided::Layout;
use crate::{
    client::{StoreClient, only},
    engine::{PoolBuffer, View},
    error::{Error, Result},
    payload::{Payload, Span, Target},
    store::{Mode, Put},
};

/// A tensor to put: a description and borrowed memory.
#[derive(Debug, Clone)]
pub struct TensorRef<'a, D: Device> {
    spec: TensorSpec,
    storage: Payload<'a, D>,
    strided: Option<Strided>,
}

/// Where the elements are that do not simply fill their storage.
#[derive(Debug, Clone)]
struct Strided {
    strides: Vec<i64>,
    offset: u64,
    layout: Layout,
}

impl<'a, D: Device> TensorRef<'a, D> {
    /// A contiguous tensor that fills `bytes`.
    ///
    /// *Errors*: [`Error::InvalidTensor`] where dtype and shape do not make that many bytes.
    pub fn new(dtype: Dtype, shape: &[u64], bytes: impl Into<Payload<'a, D>>) -> Result<Self> {
        let (spec, storage) = (TensorSpec::new(dtype, shape), bytes.into());
        expect_bytes(&spec, storage.len())?;
        Ok(TensorRef { spec, storage, strided: None })
    }

    /// A tensor inside `storage` whose neighbours along each dimension are `strides` elements apart and whose first
    /// element is `offset` elements in: a transpose, a slice, an expanded tensor.
    ///
    /// In host memory it is gathered when it is put; elsewhere a put answers [`Error::NonContiguous`].
    ///
    /// *Errors*: [`Error::InvalidTensor`] where it reaches outside of `storage`; [`Error::NonContiguous`] for elements of
    /// less than a byte.
    pub fn strided(
        dtype: Dtype,
        shape: &[u64],
        strides: &[i64],
        offset: u64,
        storage: impl Into<Payload<'a, D>>,
    ) -> Result<Self> {
        let (spec, storage) = (TensorSpec::new(dtype, shape), storage.into());
        let layout = layout(&spec, strides, offset, storage.len())?;
        let strided = Some(Strided { strides: strides.to_vec(), offset, layout });
        Ok(TensorRef { spec, storage, strided })
    }

    /// Dtype and shape.
    pub fn spec(&self) -> &TensorSpec {
        &self.spec
    }

    /// Says that this is a shard of a larger tensor.
    ///
    /// *Errors*: [`Error::InvalidTensor`] where the shape is not that of the shard.
    pub fn shard(mut self, shard: Shard) -> Result<Self> {
        shard.check(self.spec.shape.len())?;
        let (has, wants) = (self.spec.shape[shard.dim as usize], shard.range().1);
        if has != wants {
            let reason =
                format!("the shard has {has} elements along its dimension, rank {} has {wants}", shard.rank);
            return Err(Error::InvalidTensor { reason });
        }
        self.spec.shard = Some(shard);
        Ok(self)
    }

    /// The memory to read, if it is contiguous; else the layout by which to gather it.
    fn contiguous(&self) -> Result<Span<D>, &Layout> {
        contiguous(&self.storage.span, self.strided.as_ref().map(|strided| &strided.layout))
    }

    /// The part that is this shard of the tensor.
    fn narrow(&self, shard: Shard) -> Result<Self> {
        let (dim, (start, len)) = (shard.dim as usize, shard.range());
        let (strides, offset) = match &self.strided {
            Some(Strided { strides, offset, .. }) => (strides.clone(), *offset),
            None => (row_major(&self.spec.shape), 0),
        };
        let mut shape = self.spec.shape.clone();
        shape[dim] = len;
        // Wraps only where the tensor is empty, and then no element is looked for.
        let offset = offset.wrapping_add_signed((start as i64).wrapping_mul(strides[dim]));
        Self::strided(self.spec.dtype, &shape, &strides, offset, self.storage.clone())?.shard(shard)
    }
}

/// The strides of a contiguous tensor, in elements.
fn row_major(shape: &[u64]) -> Vec<i64> {
    let mut strides = vec![1i64; shape.len()];
    for i in (1..shape.len()).rev() {
        // Saturates only where an empty dimension makes the strides meaningless.
        strides[i - 1] = strides[i].saturating_mul(shape[i] as i64);
    }
    strides
}

fn contiguous<'l, D: Device>(storage: &Span<D>, layout: Option<&'l Layout>) -> Result<Span<D>, &'l Layout> {
    let mut span = storage.clone();
    if let Some(layout) = layout {
        (span.addr, span.len) = layout.contiguous(span.addr).ok_or(layout)?;
    }
    Ok(span)
}

/// A tensor to fill: a description and borrowed memory.
#[derive(Debug)]
pub struct TensorMut<'a, D: Device> {
    spec: TensorSpec,
    storage: Target<'a, D>,
    layout: Option<Layout>,
}

impl<'a, D: Device> TensorMut<'a, D> {
    /// A contiguous tensor that fills `bytes`. *Errors*: as [`TensorRef::new`].
    pub fn new(dtype: Dtype, shape: &[u64], bytes: impl Into<Target<'a, D>>) -> Result<Self> {
        let (spec, storage) = (TensorSpec::new(dtype, shape), bytes.into());
        expect_bytes(&spec, storage.len())?;
        Ok(TensorMut { spec, storage, layout: None })
    }

    /// A tensor inside `storage`, as [`TensorRef::strided`]; bytes of `storage` between its elements stay as they are.
    ///
    /// *Errors*: as there.
    pub fn strided(
        dtype: Dtype,
        shape: &[u64],
        strides: &[i64],
        offset: u64,
        storage: impl Into<Target<'a, D>>,
    ) -> Result<Self> {
        let (spec, storage) = (TensorSpec::new(dtype, shape), storage.into());
        let layout = layout(&spec, strides, offset, storage.len())?;
        Ok(TensorMut { spec, storage, layout: Some(layout) })
    }
}

fn expect_bytes(spec: &TensorSpec, len: usize) -> Result<()> {
    let wants = spec.bytes()?;
    if wants != len as u64 {
        let reason = format!("shape {:?} of {} has {wants} bytes, the memory {len}", spec.shape, spec.dtype);
        return Err(Error::InvalidTensor { reason });
    }
    Ok(())
}

fn layout(spec: &TensorSpec, strides: &[i64], offset: u64, storage: usize) -> Result<Layout> {
    spec.bytes()?;
    Layout::new(element(spec.dtype)?, &spec.shape, strides, offset, storage)
}

/// Bytes of an element that can be moved by itself.
fn element(dtype: Dtype) -> Result<usize> {
    let bits = dtype.bitsize();
    if bits.is_multiple_of(8) { Ok(bits / 8) } else { Err(Error::NonContiguous) }
}

/// An owned tensor, contiguous.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tensor {
    /// Dtype and shape.
    pub spec: TensorSpec,
    /// Its bytes.
    pub bytes: Vec<u8>,
}

/// A stored tensor, looked at without a copy.
#[derive(Debug)]
pub struct TensorView {
    spec: TensorSpec,
    view: View,
}

impl TensorView {
    /// Dtype and shape.
    pub fn spec(&self) -> &TensorSpec {
        &self.spec
    }

    /// Its bytes, contiguous.
    pub fn bytes(&self) -> &[u8] {
        &self.view
    }
}

impl TryFrom<View> for TensorView {
    type Error = Error;

    /// Reads the description that was stored beside the bytes.
    ///
    /// *Errors*: [`Error::InvalidTensor`] where there is none, or it contradicts itself or the bytes.
    fn try_from(view: View) -> Result<Self> {
        Ok(TensorView { spec: TensorSpec::decode(view.meta(), view.len() as u64)?, view })
    }
}

impl<D: Device> StoreClient<D> {
    /// [`put`](Self::put) of a tensor, with its dtype and shape.
    ///
    /// *Errors*: as `put`, and [`Error::NonContiguous`] for a strided tensor outside of host memory.
    pub fn put_tensor(&self, key: &str, tensor: &TensorRef<'_, D>) -> Result<Put> {
        self.store_tensor(key, tensor, Mode::Put)
    }

    /// [`upsert`](Self::upsert) of a tensor, with its dtype and shape. *Errors*: as [`put_tensor`](Self::put_tensor).
    pub fn upsert_tensor(&self, key: &str, tensor: &TensorRef<'_, D>) -> Result<Put> {
        self.store_tensor(key, tensor, Mode::Upsert)
    }

    /// [`put_tensor`](Self::put_tensor) for many tensors.
    pub fn batch_put_tensor(&self, items: &[(&str, TensorRef<'_, D>)]) -> Vec<Result<Put>> {
        self.store_tensors(items, Mode::Put)
    }

    /// [`upsert_tensor`](Self::upsert_tensor) for many tensors.
    pub fn batch_upsert_tensor(&self, items: &[(&str, TensorRef<'_, D>)]) -> Vec<Result<Put>> {
        self.store_tensors(items, Mode::Upsert)
    }

    /// [`put_allocated`](Self::put_allocated) of a contiguous tensor that fills `buffer`; nothing is copied.
    ///
    /// *Errors*: as there, and [`Error::InvalidTensor`] where dtype and shape do not make that many bytes. The buffer is
    /// spent, whatever the verdict.
    pub fn put_tensor_allocated(
        &self,
        key: &str,
        dtype: Dtype,
        shape: &[u64],
        buffer: PoolBuffer,
    ) -> Result<Put> {
        self.store_tensor_allocated(key, TensorSpec::new(dtype, shape), buffer, Mode::Put)
    }

    /// [`put_tensor_allocated`](Self::put_tensor_allocated) that replaces a tensor that is there.
    pub fn upsert_tensor_allocated(
        &self,
        key: &str,
        dtype: Dtype,
        shape: &[u64],
        buffer: PoolBuffer,
    ) -> Result<Put> {
        self.store_tensor_allocated(key, TensorSpec::new(dtype, shape), buffer, Mode::Upsert)
    }

    /// The tensor, owned. *Errors*: as [`view_tensor`](Self::view_tensor).
    pub fn get_tensor(&self, key: &str) -> Result<Tensor> {
        only(self.batch_get_tensor(&[key]))
    }

    /// [`get_tensor`](Self::get_tensor) for many tensors.
    pub fn batch_get_tensor(&self, keys: &[&str]) -> Vec<Result<Tensor>> {
        let views = self.batch_view_tensor(keys).into_iter();
        views
            .map(|slot| slot.map(|TensorView { spec, view }| Tensor { spec, bytes: view.to_vec() }))
            .collect()
    }

    /// A read-only look at the tensor, without a copy.
    ///
    /// *Errors*: [`Error::NotFound`]; [`Error::InvalidTensor`] where the value is no tensor.
    pub fn view_tensor(&self, key: &str) -> Result<TensorView> {
        self.view(key)?.try_into()
    }

    /// [`view_tensor`](Self::view_tensor) for many tensors.
    pub fn batch_view_tensor(&self, keys: &[&str]) -> Vec<Result<TensorView>> {
        self.batch_view(keys).into_iter().map(|slot| slot.and_then(TensorView::try_from)).collect()
    }

    /// Dtype and shape of a stored tensor. No side effect. *Errors*: as [`view_tensor`](Self::view_tensor).
    pub fn tensor_spec(&self, key: &str) -> Result<TensorSpec> {
        only(self.batch_tensor_spec(&[key]))
    }

    /// [`tensor_spec`](Self::tensor_spec) for many tensors.
    pub fn batch_tensor_spec(&self, keys: &[&str]) -> Vec<Result<TensorSpec>> {
        let found = self.describe(keys).into_iter();
        found.map(|slot| slot.and_then(|found| TensorSpec::decode(&found.meta, found.len))).collect()
    }

    /// Fills `target` with the tensor, which must have the same dtype and shape.
    ///
    /// *Errors*: [`Error::InvalidTensor`] where they differ, and `target` stays as it was (unless the tensor was replaced by
    /// another one during the call); [`Error::NonContiguous`] for a strided target outside of host memory.
    pub fn get_tensor_into(&self, key: &str, target: TensorMut<'_, D>) -> Result<()> {
        let TensorMut { spec, storage, layout } = target;
        let same = |found: &TensorSpec| {
            if (found.dtype, &found.shape) == (spec.dtype, &spec.shape) {
                return Ok(());
            }
            let reason = format!(
                "{} {:?} is stored, the target is {} {:?}",
                found.dtype, found.shape, spec.dtype, spec.shape
            );
            Err(Error::InvalidTensor { reason })
        };
        match contiguous(&storage.span, layout.as_ref()) {
            Ok(span) => {
                same(&self.tensor_spec(key)?)?;
                let filled = only(self.fill([(key, span)]))?;
                // It may have been replaced since it was asked for.
                same(&TensorSpec::decode(&filled.meta, filled.len)?)
            }
            Err(layout) => {
                let stored = self.view_tensor(key)?;
                same(&stored.spec)?;
                let layout = layout.clone();
                self.on_host("get_into", storage.span, move |slot| layout.scatter(stored.bytes(), slot))
            }
        }
    }

    fn store_tensor(&self, key: &str, tensor: &TensorRef<'_, D>, mode: Mode) -> Result<Put> {
        let meta = tensor.spec.encode()?;
        match tensor.contiguous() {
            Ok(span) => only(self.store([(key, &meta[..], span)], mode)),
            Err(layout) => {
                let mut buffer = self.alloc(layout.bytes() as u64)?;
                let layout = layout.clone();
                let gathered = self.on_host("put", tensor.storage.span.clone(), move |slot| {
                    layout.gather(slot, &mut buffer);
                    buffer
                })?;
                self.store_allocated(key, &meta, gathered, mode)
            }
        }
    }

    fn store_tensor_allocated(
        &self,
        key: &str,
        spec: TensorSpec,
        buffer: PoolBuffer,
        mode: Mode,
    ) -> Result<Put> {
        expect_bytes(&spec, buffer.len())?;
        self.store_allocated(key, &spec.encode()?, buffer, mode)
    }

    /// Contiguous tensors go as one batch; each strided one is gathered straight into the store.
    fn store_tensors(&self, items: &[(&str, TensorRef<'_, D>)], mode: Mode) -> Vec<Result<Put>> {
        let encoded: Vec<Result<Vec<u8>>> = items.iter().map(|(_, tensor)| tensor.spec.encode()).collect();
        let batch = items.iter().zip(&encoded).filter_map(|((key, tensor), meta)| {
            Some((*key, meta.as_ref().ok()?.as_slice(), tensor.contiguous().ok()?))
        });
        let mut batched = self.store(batch, mode).into_iter();
        items
            .iter()
            .zip(encoded)
            .map(|((key, tensor), meta)| match tensor.contiguous() {
                Ok(_) => meta.and_then(|_| only(batched.by_ref().take(1))),
                Err(_) => self.store_tensor(key, tensor, mode),
            })
            .collect()
    }
}
