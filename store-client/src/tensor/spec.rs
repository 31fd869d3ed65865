//! What a tensor is besides its bytes, and how that is stored beside them.

use safetensors::Dtype;
use serde::{Deserialize, Serialize, de::IntoDeserializer};

use crate::error::{Error, Result};

/// The most dimensions of a stored tensor.
pub const NDIM_MAX: usize = 32;

/// The first byte of a stored description; values put as plain bytes have no description at all.
const MAGIC: u8 = b'T';
const VERSION: u8 = 1;

/// Dtype and shape, and which part of a larger tensor this is, if it is one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSpec {
    /// The element type: the set of safetensors, bf16 and fp8 included.
    pub dtype: Dtype,
    /// Elements along each dimension, outermost first. Empty for a 0-d tensor; a 0 makes an empty one.
    pub shape: Vec<u64>,
    /// Set where this is a tensor-parallel shard.
    pub shard: Option<Shard>,
}

/// Which shard of a tensor: its place among the ranks that share dimension `dim`.
///
/// The ranks divide the dimension into consecutive parts; where it does not divide evenly, the first ranks have one more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Shard {
    /// The dimension that is divided, 0 for the outermost.
    pub dim: u32,
    /// This part, from 0.
    pub rank: u32,
    /// How many parts there are.
    pub world: u32,
    /// Elements along `dim` of the whole tensor.
    pub full: u64,
}

impl Shard {
    /// The first element along `dim` and how many there are; none beyond the last rank.
    pub fn range(&self) -> (u64, u64) {
        if self.rank >= self.world {
            return (self.full, 0);
        }
        let (world, rank) = (u64::from(self.world), u64::from(self.rank));
        let (each, more) = (self.full / world, self.full % world);
        (rank * each + rank.min(more), each + u64::from(rank < more))
    }

    /// The rank that has an element of the dimension.
    pub(crate) fn rank_of(&self, element: u64) -> u32 {
        let (each, more) = (self.full / u64::from(self.world), self.full % u64::from(self.world));
        let longer = more * (each + 1);
        // Where `each` is 0 every element is of a longer part.
        let rank =
            if element < longer { element / (each + 1) } else { more + (element - longer) / each.max(1) };
        rank as u32
    }

    pub(crate) fn check(&self, ndim: usize) -> Result<()> {
        if self.dim as usize >= ndim || self.rank >= self.world {
            let reason = format!(
                "there is no shard {} of {} along dimension {} of {ndim}",
                self.rank, self.world, self.dim
            );
            return Err(Error::InvalidTensor { reason });
        }
        Ok(())
    }
}

#[derive(Serialize, Deserialize)]
struct Stored<'a> {
    magic: u8,
    version: u8,
    // By name: the numbers of a library's enum are no storage format.
    dtype: &'a str,
    shape: Vec<u64>,
    shard: Option<Shard>,
}

impl TensorSpec {
    /// A tensor that is no shard.
    pub fn new(dtype: Dtype, shape: impl Into<Vec<u64>>) -> Self {
        TensorSpec { dtype, shape: shape.into(), shard: None }
    }

    /// Bytes of the tensor when it is contiguous.
    ///
    /// *Errors*: [`Error::InvalidTensor`] for too many dimensions, for sizes whose product overflows, and for elements
    /// of less than a byte that do not fill their last byte.
    pub fn bytes(&self) -> Result<u64> {
        let reason = |reason: String| Error::InvalidTensor { reason };
        if self.shape.len() > NDIM_MAX {
            return Err(reason(format!("{} dimensions, the limit is {NDIM_MAX}", self.shape.len())));
        }
        if self.shape.contains(&0) {
            return Ok(0);
        }
        let bits = self
            .shape
            .iter()
            .try_fold(self.dtype.bitsize() as u64, |bits, &n| bits.checked_mul(n))
            .ok_or_else(|| reason(format!("shape {:?} of {} overflows", self.shape, self.dtype)))?;
        if !bits.is_multiple_of(8) {
            return Err(reason(format!("shape {:?} of {} ends within a byte", self.shape, self.dtype)));
        }
        Ok(bits / 8)
    }

    /// The stored form.
    pub(crate) fn encode(&self) -> Result<Vec<u8>> {
        self.bytes()?;
        let dtype = self.dtype.to_string();
        let stored = Stored {
            magic: MAGIC,
            version: VERSION,
            dtype: &dtype,
            shape: self.shape.clone(),
            shard: self.shard,
        };
        postcard::to_stdvec(&stored).map_err(|e| Error::InvalidTensor { reason: e.to_string() })
    }

    /// Reads the stored form, which anybody may have written, beside a value of `len` bytes.
    ///
    /// *Errors*: [`Error::InvalidTensor`] where it is no description, or contradicts itself or `len`.
    pub fn decode(meta: &[u8], len: u64) -> Result<Self> {
        let invalid = |reason: String| Error::InvalidTensor { reason };
        if meta.is_empty() {
            return Err(invalid("the value was stored as plain bytes".into()));
        }
        let (stored, rest): (Stored<'_>, _) = postcard::take_from_bytes(meta)
            .map_err(|e| invalid(format!("the description cannot be read ({e})")))?;
        if (stored.magic, stored.version) != (MAGIC, VERSION) || !rest.is_empty() {
            return Err(invalid("the description is of an unknown form".into()));
        }
        let name: serde::de::value::StrDeserializer<'_, serde::de::value::Error> =
            stored.dtype.into_deserializer();
        let dtype =
            Dtype::deserialize(name).map_err(|_| invalid(format!("unknown dtype {:?}", stored.dtype)))?;
        let spec = TensorSpec { dtype, shape: stored.shape, shard: stored.shard };
        let described = spec.bytes()?;
        if described != len {
            return Err(invalid(format!(
                "shape {:?} of {dtype} has {described} bytes, the value {len}",
                spec.shape
            )));
        }
        if let Some(shard) = spec.shard {
            shard.check(spec.shape.len())?;
            if spec.shape[shard.dim as usize] != shard.range().1 {
                return Err(invalid(format!("shape {:?} is not that of {shard:?}", spec.shape)));
            }
        }
        Ok(spec)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn raw(dtype: &str, shape: &[u64]) -> Vec<u8> {
        let stored = Stored { magic: MAGIC, version: VERSION, dtype, shape: shape.to_vec(), shard: None };
        postcard::to_stdvec(&stored).unwrap()
    }

    #[test]
    fn every_dtype_survives_its_stored_form() {
        use Dtype::*;
        for dtype in [
            BOOL,
            F4,
            F6_E2M3,
            F6_E3M2,
            U8,
            I8,
            F8_E5M2,
            F8_E4M3,
            F8_E8M0,
            F8_E4M3FNUZ,
            F8_E5M2FNUZ,
            I16,
            U16,
            F16,
            BF16,
            I32,
            U32,
            F32,
            C64,
            F64,
            I64,
            U64,
        ] {
            let spec = TensorSpec::new(dtype, [4, 2]);
            assert_eq!(TensorSpec::decode(&spec.encode().unwrap(), spec.bytes().unwrap()).unwrap(), spec);
        }
    }

    #[test]
    fn a_hand_made_description_that_lies_is_refused() {
        let refused = |meta: &[u8], len| {
            assert!(matches!(TensorSpec::decode(meta, len), Err(Error::InvalidTensor { .. })), "{meta:?}");
        };
        refused(&raw("F32", &[2, 3]), 25); // product != payload
        refused(&raw("F32", &[1; NDIM_MAX + 1]), 4);
        refused(&raw("F32", &[u64::MAX, 2]), 0);
        refused(&raw("F99", &[1]), 4);
        refused(&raw("F4", &[3]), 1);
        let whole = raw("F32", &[2, 3]);
        for cut in 0..whole.len() {
            refused(&whole[..cut], 24);
        }
        refused(&[&whole[..], b"x"].concat(), 24);
    }

    proptest::proptest! {
        #[test]
        fn no_description_from_outside_panics(meta: Vec<u8>, len: u64) {
            let _ = TensorSpec::decode(&meta, len);
        }
    }

    #[test]
    fn shards_cover_the_dimension_without_gap_or_overlap() {
        for (full, world) in [(8, 4), (10, 4), (3, 8), (0, 2), (1, 1)] {
            let mut next = 0;
            for rank in 0..world {
                let (start, len) = Shard { dim: 0, rank, world, full }.range();
                assert_eq!(start, next);
                next += len;
                let shard = Shard { dim: 0, rank, world, full };
                assert!((start..next).all(|element| shard.rank_of(element) == rank));
            }
            assert_eq!(next, full);
        }
    }
}
