//! What one client holds: words, each 0 or the id of a value, and before them one bit for each word that says whether it is
//! in use, so that the daemon looks at few words and the client finds a free one. The bits are in groups; a word before
//! them says how many groups were ever used, which are few, and the daemon looks no further.

use super::words::Words;

/// The hold words of one client.
#[derive(Debug)]
pub(crate) struct Holds<W> {
    words: W,
    groups: usize,
}

/// Words whose bits share a word.
pub(super) const GROUP: usize = u64::BITS as usize;

/// Where it says how many groups were used.
const USED: usize = 0;
/// Where the bits begin.
const BITS: usize = 1;

/// Words for so many groups.
pub(super) const fn words(groups: usize) -> usize {
    BITS + groups + groups * GROUP
}

impl<W: Words> Holds<W> {
    /// Over [`words`] of so many groups, which were 0 at first.
    pub(super) fn new(words: W, groups: usize) -> Self {
        Holds { words, groups }
    }

    /// Step 3: writes `id` into a free word; which one. None where all are in use.
    pub(crate) fn take(&self, id: u64) -> Option<usize> {
        for group in 0..self.groups {
            let mut bits = self.words.load(BITS + group);
            while bits != u64::MAX {
                self.use_group(group);
                let free = bits.trailing_ones() as usize;
                match self.words.replace(BITS + group, bits, bits | 1 << free) {
                    Ok(()) => {
                        let word = group * GROUP + free;
                        // Releases what the word's last user has read, which the claim has acquired.
                        self.words.store_release(self.id(word), id);
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
        self.words.store_release(self.id(word), 0);
        self.words.clear_bits(BITS + word / GROUP, 1 << (word % GROUP));
    }

    /// Step d, after a fence: whether `id` is held.
    pub(crate) fn contain(&self, id: u64) -> bool {
        self.ids().any(|held| held == id)
    }

    /// What is held, by the same step.
    pub(crate) fn ids(&self) -> impl Iterator<Item = u64> + '_ {
        (0..self.used()).flat_map(move |group| {
            let mut bits = self.words.load_acquire(BITS + group);
            std::iter::from_fn(move || {
                let word = (bits != 0).then(|| bits.trailing_zeros() as usize)?;
                bits &= bits - 1;
                Some(self.words.load_acquire(self.id(group * GROUP + word)))
            })
        })
    }

    /// How many words are in use.
    pub(crate) fn count(&self) -> u64 {
        (0..self.used()).map(|group| u64::from(self.words.load(BITS + group).count_ones())).sum()
    }

    fn id(&self, word: usize) -> usize {
        BITS + self.groups + word
    }

    /// Says that a group is used, before it is.
    fn use_group(&self, group: usize) {
        let mut used = self.words.load(USED);
        while used <= group as u64 {
            match self.words.replace(USED, used, group as u64 + 1) {
                Ok(()) => return,
                Err(now) => used = now,
            }
        }
    }

    /// The groups that may have bits, as the client says.
    fn used(&self) -> usize {
        usize::try_from(self.words.load(USED)).unwrap_or(usize::MAX).min(self.groups)
    }
}

#[cfg(test)]
mod tests {
    use std::{ptr::NonNull, sync::Arc};

    use super::{super::Mapped, *};

    /// Of this many groups.
    fn holds(groups: usize) -> Holds<Mapped> {
        let memory: Arc<Box<[std::sync::atomic::AtomicU64]>> =
            Arc::new((0..words(groups)).map(|_| 0.into()).collect());
        let base = NonNull::from(&memory[0]).cast();
        // SAFETY: the words live as long as the box, which is kept, and are atomic.
        Holds::new(unsafe { Mapped::new(base, words(groups), memory) }, groups)
    }

    #[test]
    fn holds_are_found_in_every_group_until_they_are_cleared() {
        let holds = holds(3);
        let taken: Vec<_> = (1..=3 * GROUP as u64).map(|id| holds.take(id).unwrap()).collect();
        assert_eq!(holds.take(1000), None, "all are in use");
        assert_eq!(holds.count(), 3 * GROUP as u64);
        for (id, word) in (1..).zip(taken) {
            assert!(holds.contain(id));
            holds.clear(word);
            assert!(!holds.contain(id));
        }
        assert_eq!(holds.take(1000), Some(0));
        assert!(holds.contain(1000));
    }

    #[test]
    fn more_groups_than_there_are_may_be_said_to_be_used() {
        let holds = holds(2);
        holds.words.store(USED, u64::MAX);
        holds.take(5).unwrap();
        assert!(holds.contain(5) && !holds.contain(6));
        assert_eq!(holds.count(), 1);
    }
}
