//! What is asked of every store.

use std::fmt;

use serde::Serialize;

/// An operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Op {
    /// The caller's own memory becomes a value.
    Put,
    /// Memory inside the store, filled before, becomes a value: nothing is copied.
    PutInPlace,
    /// A value goes into the caller's own memory.
    GetInto,
    /// A value is looked at where it lies: nothing is copied.
    View,
}

impl Op {
    /// In the order of the tables.
    pub const ALL: [Op; 4] = [Op::Put, Op::PutInPlace, Op::GetInto, Op::View];

    /// As in the code.
    pub fn label(self) -> &'static str {
        match self {
            Op::Put => "put",
            Op::PutInPlace => "put_in_place",
            Op::GetInto => "get_into",
            Op::View => "view",
        }
    }

    /// As in a heading.
    pub fn title(self) -> &'static str {
        match self {
            Op::Put => "put: the caller's memory into the store",
            Op::PutInPlace => "put in place: memory inside the store becomes a value, no copy",
            Op::GetInto => "get_into: a value into the caller's memory",
            Op::View => "view: a value looked at where it lies, no copy",
        }
    }

    /// Whether it only reads.
    pub fn reads(self) -> bool {
        matches!(self, Op::GetInto | Op::View)
    }
}

/// So many values of so many bytes in one call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct Shape {
    /// Values of one call.
    pub values: usize,
    /// Bytes of each.
    pub bytes: usize,
}

impl Shape {
    /// One value.
    pub const fn one(bytes: usize) -> Self {
        Shape { values: 1, bytes }
    }

    /// Bytes of one call.
    pub fn total(self) -> usize {
        self.values * self.bytes
    }

    /// A key for each value. Keys of different shapes are different.
    pub fn keys(self) -> Vec<String> {
        (0..self.values).map(|n| format!("{}x{}-{n}", self.values, self.bytes)).collect()
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.values > 1 {
            write!(f, "{} x ", self.values)?;
        }
        match self.bytes {
            bytes if bytes >= 1 << 20 && bytes % (1 << 20) == 0 => write!(f, "{} MiB", bytes >> 20),
            bytes if bytes >= 1 << 10 && bytes % (1 << 10) == 0 => write!(f, "{} KiB", bytes >> 10),
            bytes => write!(f, "{bytes} B"),
        }
    }
}

/// The call in hand: the keys, and the memory that values come from and go to, all of it warm.
#[derive(Debug)]
pub struct Job {
    /// Values and bytes.
    pub shape: Shape,
    /// One for each value.
    pub keys: Vec<String>,
    source: Vec<u8>,
    target: Vec<u8>,
    pattern: u64,
}

impl Job {
    /// Memory for shapes of at most `most` bytes in all.
    pub fn new(most: usize) -> Self {
        // Written, and not only allocated, so that every page is there.
        let (source, target) = (vec![0x5a; most], vec![0x11; most]);
        Job { shape: Shape::one(0), keys: Vec::new(), source, target, pattern: 0 }
    }

    /// Turns to another shape.
    pub fn turn_to(&mut self, shape: Shape) {
        assert!(shape.total() <= self.source.len(), "no memory for {shape}");
        (self.shape, self.keys) = (shape, shape.keys());
    }

    /// What is put.
    pub fn source(&self) -> &[u8] {
        &self.source[..self.shape.total()]
    }

    /// Where what is got goes.
    pub fn target(&self) -> &[u8] {
        &self.target[..self.shape.total()]
    }

    /// As [`target`](Self::target), and the keys.
    pub fn target_mut(&mut self) -> (&[String], &mut [u8]) {
        (&self.keys, &mut self.target[..self.shape.total()])
    }

    /// Fills the source with bytes that it never had before, and wipes the target.
    pub fn renew(&mut self) {
        self.pattern += 1;
        let total = self.shape.total();
        let mut state = self.pattern.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        for chunk in self.source[..total].chunks_mut(8) {
            state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
            chunk.copy_from_slice(&state.to_le_bytes()[..chunk.len()]);
        }
        self.target[..total].fill(0);
    }
}

/// Key, value pairs of one call, the values cut out of `memory`.
pub fn pairs<'a>(keys: &'a [String], memory: &'a [u8]) -> impl Iterator<Item = (&'a str, &'a [u8])> {
    let bytes = memory.len() / keys.len().max(1);
    keys.iter().map(String::as_str).zip(memory.chunks(bytes.max(1)))
}

/// As [`pairs`], for values that are written.
pub fn pairs_mut<'a>(
    keys: &'a [String],
    memory: &'a mut [u8],
) -> impl Iterator<Item = (&'a str, &'a mut [u8])> {
    let bytes = memory.len() / keys.len().max(1);
    keys.iter().map(String::as_str).zip(memory.chunks_mut(bytes.max(1)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn renewed_bytes_are_new_and_the_target_is_wiped() {
        let mut job = Job::new(100);
        job.turn_to(Shape { values: 3, bytes: 33 });
        job.renew();
        let first = job.source().to_vec();
        job.target_mut().1.copy_from_slice(&first);
        job.renew();
        assert_ne!(job.source(), first);
        assert_eq!(job.target(), vec![0; 99]);
    }

    #[test]
    fn each_key_has_its_own_bytes() {
        let shape = Shape { values: 2, bytes: 3 };
        let keys = shape.keys();
        let cut: Vec<_> = pairs(&keys, b"abcdef").collect();
        assert_eq!(cut, [("2x3-0", &b"abc"[..]), ("2x3-1", b"def")]);
    }

    #[test]
    fn shapes_are_written_in_words() {
        assert_eq!(Shape::one(4 << 10).to_string(), "4 KiB");
        assert_eq!(Shape { values: 64, bytes: 1 << 20 }.to_string(), "64 x 1 MiB");
        assert_eq!(Shape::one(1025).to_string(), "1025 B");
    }
}
