//! Memory that clients get before they ask for it, which saves a put one of its two round trips. It may not be evicted,
//! so it is kept small: one grant for each client and one in preparation, and a share of the pool for all.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

/// How much may be lent ahead.
#[derive(Debug)]
pub(super) struct Budget {
    each: u64,
    all: u64,
    lent: Arc<AtomicU64>,
}

/// Bytes of a [`Budget`]; given back when dropped.
#[derive(Debug)]
pub(super) struct Share {
    bytes: u64,
    lent: Arc<AtomicU64>,
}

impl Budget {
    pub(super) fn of_pool(pool: u64) -> Self {
        Budget { each: pool / 64, all: pool / 16, lent: Arc::default() }
    }

    /// Takes `bytes` of it, if they are there.
    pub(super) fn take(&self, bytes: u64) -> Option<Share> {
        if bytes > self.each {
            return None;
        }
        let add = |lent: u64| lent.checked_add(bytes).filter(|&sum| sum <= self.all);
        self.lent.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add).ok()?;
        Some(Share { bytes, lent: Arc::clone(&self.lent) })
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.lent.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_client_and_not_all_of_them_together_get_more_than_their_share() {
        let budget = Budget::of_pool(6400);
        assert!(budget.take(101).is_none());
        let mut shares: Vec<_> = (0..4).filter_map(|_| budget.take(100)).collect();
        assert_eq!(shares.len(), 4);
        assert!(budget.take(1).is_none());
        shares.pop();
        assert!(budget.take(100).is_some());
    }
}
