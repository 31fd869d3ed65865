//! What client and server say to each other, the same over every way.

/// The most values of one message.
pub(super) const ENTRIES_MAX: usize = 512;
/// Numbers of a question and of an answer, for each value.
pub(super) const ASKED: usize = 6;
pub(super) const ANSWERED: usize = 2;
/// In place of a length: there is no such value.
pub(super) const NOTHING: u64 = u64::MAX;

/// A key, padded with zeros.
pub(super) type Key = [u64; 4];

/// The keys of the comparison are shorter than this.
const KEY_BYTES: usize = size_of::<Key>();

/// A key as numbers; what is longer than a key may be is cut.
pub(super) fn key(text: &str) -> Key {
    let mut bytes = [0; KEY_BYTES];
    let len = text.len().min(KEY_BYTES);
    bytes[..len].copy_from_slice(&text.as_bytes()[..len]);
    let mut key = [0; 4];
    for (word, bytes) in key.iter_mut().zip(bytes.chunks_exact(8)) {
        *word = u64::from_le_bytes(bytes.try_into().unwrap_or_default());
    }
    key
}

/// What is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum Ask {
    /// Slots to write into.
    Grant = 1,
    /// Values to be sealed where they lie; the answer grants the next slots.
    Put = 2,
    /// Where values lie.
    Get = 3,
}

impl Ask {
    pub(super) fn from_number(number: u32) -> Option<Self> {
        [Ask::Grant, Ask::Put, Ask::Get].into_iter().find(|ask| *ask as u32 == number)
    }
}

/// A value: in a question its key, in both where it lies.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) key: Key,
    pub(super) offset: u64,
    pub(super) len: u64,
}

impl Entry {
    pub(super) fn asked(self) -> [u64; ASKED] {
        let [a, b, c, d] = self.key;
        [a, b, c, d, self.offset, self.len]
    }

    pub(super) fn from_asked([a, b, c, d, offset, len]: [u64; ASKED]) -> Self {
        Entry { key: [a, b, c, d], offset, len }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_differ_where_their_text_does() {
        assert_ne!(key("1x4096-0"), key("1x4096-1"));
        assert_eq!(key("a"), [u64::from(b'a'), 0, 0, 0]);
        assert_eq!(key(&"x".repeat(99)), key(&"x".repeat(KEY_BYTES)));
    }
}
