//! Tensor-parallel tensors: one stored shard for each rank, put and got by whoever has which part.
//!
//! A tensor under key `k` is stored as values `k@shard0`, `k@shard1`, ... Each carries its own place in the whole, so that a
//! reader may divide the tensor otherwise than the writers did: over another number of ranks, or along another dimension.

use hal::Device;

use super::{Layout, Shard, Tensor, TensorRef, TensorSpec, TensorView, element, row_major};
use crate::{
    client::StoreClient,
    error::{Error, Result},
    store::{Mode, Put},
};

/// Where shard `rank` of `key` is stored.
fn shard_key(key: &str, rank: u32) -> String {
    format!("{key}@shard{rank}")
}

impl<D: Device> StoreClient<D> {
    /// Stores this rank's shard of the tensor `key`.
    ///
    /// *Errors*: as [`put_tensor`](Self::put_tensor), and [`Error::InvalidTensor`] where the tensor has not the shape of
    /// that shard.
    pub fn put_shard(&self, key: &str, tensor: TensorRef<'_, D>, shard: Shard) -> Result<Put> {
        self.put_tensor(&shard_key(key, shard.rank), &tensor.shard(shard)?)
    }

    /// [`put_shard`](Self::put_shard) that replaces a shard that is there.
    pub fn upsert_shard(&self, key: &str, tensor: TensorRef<'_, D>, shard: Shard) -> Result<Put> {
        self.upsert_tensor(&shard_key(key, shard.rank), &tensor.shard(shard)?)
    }

    /// Stores a whole tensor as `world` shards along dimension `dim`; one verdict for each rank.
    ///
    /// *Errors*: as [`put_shard`](Self::put_shard). A shard that is not contiguous in the tensor is gathered, which needs
    /// host memory.
    pub fn put_sharded(
        &self,
        key: &str,
        tensor: &TensorRef<'_, D>,
        dim: u32,
        world: u32,
    ) -> Result<Vec<Result<Put>>> {
        self.store_sharded(key, tensor, dim, world, Mode::Put)
    }

    /// [`put_sharded`](Self::put_sharded) that replaces shards that are there. Each is replaced atomically; the tensor as a
    /// whole is not, so readers that come meanwhile may be told that the shards do not belong together.
    pub fn upsert_sharded(
        &self,
        key: &str,
        tensor: &TensorRef<'_, D>,
        dim: u32,
        world: u32,
    ) -> Result<Vec<Result<Put>>> {
        self.store_sharded(key, tensor, dim, world, Mode::Upsert)
    }

    fn store_sharded(
        &self,
        key: &str,
        tensor: &TensorRef<'_, D>,
        dim: u32,
        world: u32,
        mode: Mode,
    ) -> Result<Vec<Result<Put>>> {
        let spec = tensor.spec();
        Shard { dim, rank: 0, world, full: 0 }.check(spec.shape.len())?;
        let full = spec.shape[dim as usize];
        let parts = (0..world).map(|rank| {
            let shard = Shard { dim, rank, world, full };
            Ok((shard_key(key, rank), tensor.narrow(shard)?))
        });
        let parts: Vec<(String, TensorRef<'_, D>)> = parts.collect::<Result<_>>()?;
        let parts: Vec<(&str, TensorRef<'_, D>)> =
            parts.iter().map(|(key, part)| (key.as_str(), part.clone())).collect();
        Ok(self.store_tensors(&parts, mode))
    }

    /// The part of the sharded tensor `key` that `rank` of `world` has along `dim`, whatever way it was sharded when it
    /// was put.
    ///
    /// *Errors*: [`Error::NotFound`] where a shard that is needed is missing; [`Error::InvalidTensor`] where the stored
    /// shards do not belong together.
    pub fn get_shard(&self, key: &str, dim: u32, rank: u32, world: u32) -> Result<Tensor> {
        self.assemble(key, |full| {
            let asked = Shard { dim, rank, world, full: 0 };
            asked.check(full.len())?;
            Ok(Some(Shard { full: full[dim as usize], ..asked }))
        })
    }

    /// The sharded tensor `key` as a whole. *Errors*: as [`get_shard`](Self::get_shard).
    pub fn get_sharded(&self, key: &str) -> Result<Tensor> {
        self.assemble(key, |_| Ok(None))
    }

    /// Removes every shard of the tensor `key`; how many were there.
    pub fn remove_sharded(&self, key: &str) -> Result<u64> {
        let prefix = format!("{key}@shard");
        let mut shards = self.list(&prefix)?;
        // Other keys may begin in the same way.
        shards.retain(|(found, _)| {
            let rank = &found[prefix.len()..];
            !rank.is_empty() && rank.bytes().all(|byte| byte.is_ascii_digit())
        });
        let keys: Vec<&str> = shards.iter().map(|(key, _)| key.as_str()).collect();
        self.batch_remove(&keys).into_iter().try_fold(0, |removed, slot| Ok(removed + u64::from(slot?)))
    }

    fn assemble(&self, key: &str, asked: impl FnOnce(&[u64]) -> Result<Option<Shard>>) -> Result<Tensor> {
        let first = self.view_tensor(&shard_key(key, 0))?;
        let stored = shard_of(&first)?;
        let mut full = first.spec().shape.clone();
        full[stored.dim as usize] = stored.full;
        let asked = asked(&full)?;

        let mut spec = TensorSpec { dtype: first.spec().dtype, shape: full.clone(), shard: asked };
        let wanted = Block::of(&full, asked);
        spec.shape = wanted.shape();
        let size = element(spec.dtype)?;
        // All parts are found before memory is asked for: what a stored description claims costs nothing to write.
        let mut parts = Vec::new();
        let (start, end) = wanted.0[stored.dim as usize];
        // Not all ranks, of which a hostile description can claim very many.
        let ranks = if start < end { stored.rank_of(start)..stored.rank_of(end - 1) + 1 } else { 0..0 };
        for rank in ranks {
            let place = Shard { rank, ..stored };
            let source = Block::of(&full, Some(place));
            let Some(common) = wanted.common(&source) else { continue };
            let shard = self.view_tensor(&shard_key(key, rank))?;
            let expected = TensorSpec { dtype: spec.dtype, shape: source.shape(), shard: Some(place) };
            if *shard.spec() != expected {
                let reason = format!("shard {rank} of the tensor does not belong to shard 0");
                return Err(Error::InvalidTensor { reason });
            }
            parts.push((common, source, shard));
        }
        let len = spec.bytes()?;
        let mut bytes = Vec::new();
        let grown =
            usize::try_from(len).ok().map(|len| bytes.try_reserve_exact(len).map(|()| bytes.resize(len, 0)));
        if !matches!(grown, Some(Ok(()))) {
            return Err(Error::OutOfMemory { asked: len, available: 0 });
        }
        for (common, source, shard) in parts {
            common.layout(&source, size)?.copy_to(shard.bytes(), &common.layout(&wanted, size)?, &mut bytes);
        }
        Ok(Tensor { spec, bytes })
    }
}

fn shard_of(tensor: &TensorView) -> Result<Shard> {
    tensor.spec().shard.ok_or_else(|| Error::InvalidTensor { reason: "the stored tensor is no shard".into() })
}

/// A box of elements of the whole tensor: first and one past the last along each dimension.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Block(Vec<(u64, u64)>);

impl Block {
    fn of(full: &[u64], shard: Option<Shard>) -> Block {
        let mut block: Vec<(u64, u64)> = full.iter().map(|&n| (0, n)).collect();
        if let Some(shard) = shard {
            let (start, len) = shard.range();
            block[shard.dim as usize] = (start, start + len);
        }
        Block(block)
    }

    fn shape(&self) -> Vec<u64> {
        self.0.iter().map(|&(start, end)| end - start).collect()
    }

    /// What both have, if anything.
    fn common(&self, other: &Block) -> Option<Block> {
        self.0
            .iter()
            .zip(&other.0)
            .map(|(&(a, b), &(c, d))| Some((a.max(c), b.min(d))).filter(|(start, end)| start < end))
            .collect::<Option<_>>()
            .map(Block)
    }

    /// How this box lies inside the contiguous bytes of `outer`.
    fn layout(&self, outer: &Block, size: usize) -> Result<Layout> {
        let shape = outer.shape();
        let strides = row_major(&shape);
        let offset: u64 =
            self.0.iter().zip(&outer.0).zip(&strides).map(|((a, b), &s)| (a.0 - b.0) * s as u64).sum();
        let storage = shape.iter().product::<u64>() as usize * size;
        Layout::new(size, &self.shape(), &strides, offset, storage)
    }
}
