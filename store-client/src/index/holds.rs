//! What one client holds: words, each 0 or the id of a value, and before them one bit for each word that says whether it is
//! in use, so that the daemon looks at few words and the client finds a free one.

use super::words::Words;

/// The hold words of one client.
#[derive(Debug)]
pub(crate) struct Holds<W> {
    words: W,
    groups: usize,
}

/// Words whose bits share a word.
pub(super) const GROUP: usize = u64::BITS as usize;

impl<W: Words> Holds<W> {
    /// Over `groups` words of bits and 64 hold words for each of them.
    pub(super) fn new(words: W, groups: usize) -> Self {
        Holds { words, groups }
    }

    /// Step 3: writes `id` into a free word; which one. None where all are in use.
    pub(crate) fn take(&self, id: u64) -> Option<usize> {
        for group in 0..self.groups {
            let mut bits = self.words.load(group);
            while bits != u64::MAX {
                let free = bits.trailing_ones() as usize;
                match self.words.replace(group, bits, bits | 1 << free) {
                    Ok(()) => {
                        let word = group * GROUP + free;
                        // Releases what the word's last user has read, which the claim has acquired.
                        self.words.store_release(self.groups + word, id);
                        return Some(word);
                    }
                    Err(now) => bits = now,
                }
            }
        }
        None
    }

    /// Step 6: ends the hold that a word stands for.
    pub(crate) fn clear(&self, word: usize) {
        self.words.store_release(self.groups + word, 0);
        self.words.clear_bits(word / GROUP, 1 << (word % GROUP));
    }

    /// Step d, after a fence: whether `id` is held.
    pub(crate) fn contain(&self, id: u64) -> bool {
        self.ids().any(|held| held == id)
    }

    /// What is held, by the same step.
    pub(crate) fn ids(&self) -> impl Iterator<Item = u64> + '_ {
        (0..self.groups).flat_map(move |group| {
            let mut bits = self.words.load_acquire(group);
            std::iter::from_fn(move || {
                let word = (bits != 0).then(|| bits.trailing_zeros() as usize)?;
                bits &= bits - 1;
                Some(self.words.load_acquire(self.groups + group * GROUP + word))
            })
        })
    }

    /// How many words are in use.
    pub(crate) fn count(&self) -> u64 {
        (0..self.groups).map(|group| u64::from(self.words.load(group).count_ones())).sum()
    }
}
