//! A value's head: one object that says what the value is, and holds the bytes of a small one.
//!
//! ```text
//!  0  magic and version   8 bytes       48  bytes of the description   u16
//!  8  checksum           16 bytes       50  1: the bytes follow, 0: they are in the body
//! 24  id                 16 bytes       51  zeros
//! 40  bytes of the value u64            56  description, bytes of a small value
//! ```
//! Numbers are little-endian. The checksum, over all that follows it, tells a head that somebody else's bytes took the
//! place of while it was read, and anything that is no head of ours.

use crate::{
    error::{Error, Result},
    store::META_MAX,
};

/// The longest value that travels in its head: copying so much costs less than asking Mooncake once more.
pub(crate) const INLINE_MAX: usize = 64 << 10;
/// The longest head.
pub(crate) const HEAD_MAX: usize = FIXED + META_MAX + INLINE_MAX;

const FIXED: usize = 56;
const MAGIC: [u8; 8] = *b"HAULIER\x01";

/// Tells one put from every other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Id(pub(crate) u128);

/// What a head says.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Head<'a> {
    pub(crate) id: Id,
    /// Bytes of the value.
    pub(crate) len: u64,
    pub(crate) meta: &'a [u8],
    /// The value, where it is a small one.
    pub(crate) inline: Option<&'a [u8]>,
}

/// Bytes of the head of a value.
pub(crate) fn size(len: usize, meta: &[u8]) -> usize {
    FIXED + meta.len() + if len <= INLINE_MAX { len } else { 0 }
}

/// Writes the head of a value of `len` bytes into `out`, which has [`size`] bytes and, where the value is a small one, ends
/// with its bytes already.
pub(crate) fn write(out: &mut [u8], id: Id, len: usize, meta: &[u8]) {
    out[..8].copy_from_slice(&MAGIC);
    out[24..40].copy_from_slice(&id.0.to_le_bytes());
    out[40..48].copy_from_slice(&(len as u64).to_le_bytes());
    out[48..50].copy_from_slice(&(meta.len() as u16).to_le_bytes());
    out[50] = u8::from(len <= INLINE_MAX);
    out[51..FIXED].fill(0);
    out[FIXED..FIXED + meta.len()].copy_from_slice(meta);
    let sum = sum(&out[24..]);
    out[8..24].copy_from_slice(&sum);
}

/// Reads a head, which anybody may have written.
///
/// *Errors*: [`Error::Protocol`] with what contradicts what.
pub(crate) fn read(bytes: &[u8]) -> Result<Head<'_>> {
    let broken =
        |why: &str| Error::Protocol { reason: format!("what is stored is no value of Haulier's: {why}") };
    if bytes.len() < FIXED || bytes[..8] != MAGIC {
        return Err(broken("no magic, or another version"));
    }
    if bytes[8..24] != sum(&bytes[24..]) {
        return Err(broken("the checksum differs"));
    }
    let number = |at: usize, n: usize| {
        let mut all = [0; 16];
        all[..n].copy_from_slice(&bytes[at..at + n]);
        u128::from_le_bytes(all)
    };
    let (id, len, meta) = (Id(number(24, 16)), number(40, 8) as u64, number(48, 2) as usize);
    if meta > META_MAX || FIXED + meta > bytes.len() {
        return Err(broken("its description is longer than it"));
    }
    let (meta, rest) = bytes[FIXED..].split_at(meta);
    let inline = match bytes[50] {
        1 if rest.len() as u64 == len => Some(rest),
        0 if rest.is_empty() && len > INLINE_MAX as u64 => None,
        _ => return Err(broken("its length is not that of its bytes")),
    };
    Ok(Head { id, len, meta, inline })
}

fn sum(bytes: &[u8]) -> [u8; 16] {
    let mut sum = [0; 16];
    sum.copy_from_slice(&blake3::hash(bytes).as_bytes()[..16]);
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(len: usize, meta: &[u8]) -> Vec<u8> {
        let mut out = vec![7; size(len, meta)];
        write(&mut out, Id(9), len, meta);
        out
    }

    /// What an attacker makes, who knows how the sum is made.
    fn forged(change: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
        let mut bytes = head(3, b"meta");
        change(&mut bytes);
        if bytes.len() >= FIXED {
            let sum = sum(&bytes[24..]);
            bytes[8..24].copy_from_slice(&sum);
        }
        bytes
    }

    #[test]
    fn a_head_is_read_as_it_was_written() {
        for (len, meta) in [(0, &b""[..]), (3, b"meta"), (INLINE_MAX, &[1; META_MAX]), (INLINE_MAX + 1, b"m")]
        {
            let bytes = head(len, meta);
            assert!(bytes.len() <= HEAD_MAX);
            let inline = (len <= INLINE_MAX).then(|| vec![7; len]);
            let expected = Head { id: Id(9), len: len as u64, meta, inline: inline.as_deref() };
            assert_eq!(read(&bytes).unwrap(), expected);
        }
    }

    #[test]
    fn a_hostile_head_is_an_error() {
        assert!(read(&forged(|_| ())).is_ok());
        let changes: [fn(&mut Vec<u8>); 12] = [
            |b| b.clear(),
            |b| b.truncate(FIXED - 1),
            |b| b[0] = b'h',
            |b| b[7] = 2,
            |b| b[40] = 4,
            |b| b[47] = 0xff,
            |b| b[48..50].fill(0xff),
            |b| b[48] = 8,
            |b| b[50] = 0,
            |b| b[50] = 2,
            |b| b.push(0),
            |b| b.truncate(FIXED),
        ];
        for (n, change) in changes.into_iter().enumerate() {
            assert!(matches!(read(&forged(change)), Err(Error::Protocol { .. })), "{n}");
        }
    }

    #[test]
    fn any_bit_that_flips_is_noticed() {
        let good = head(3, b"meta");
        for bit in 0..good.len() * 8 {
            let mut bytes = good.clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert!(read(&bytes).is_err(), "{bit}");
        }
    }
}
