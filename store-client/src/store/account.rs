//! Who may use how much of the pool. A namespace with a quota has an account of its own; all others share one.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

/// A limit, and what is used of it: by values, by what readers still hold of removed ones, and by grants.
#[derive(Debug)]
pub(super) struct Account {
    limit: u64,
    charged: AtomicU64,
    granted: AtomicU64,
}

impl Account {
    pub(super) fn new(limit: u64) -> Arc<Self> {
        Arc::new(Self { limit, charged: AtomicU64::new(0), granted: AtomicU64::new(0) })
    }

    pub(super) fn limit(&self) -> u64 {
        self.limit
    }

    pub(super) fn charged(&self) -> u64 {
        self.charged.load(Ordering::Relaxed)
    }

    pub(super) fn granted(&self) -> u64 {
        self.granted.load(Ordering::Relaxed)
    }

    /// Charges `bytes` for grants, or says how many are missing.
    pub(super) fn charge(self: &Arc<Self>, bytes: u64) -> Result<Charge, u64> {
        let add = |charged: u64| charged.checked_add(bytes).filter(|&sum| sum <= self.limit);
        match self.charged.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add) {
            Ok(_) => {
                self.granted.fetch_add(bytes, Ordering::Relaxed);
                Ok(Charge { account: Arc::clone(self), bytes, granted: true })
            }
            Err(charged) => Err(bytes - self.limit.saturating_sub(charged).min(bytes)),
        }
    }
}

/// Bytes charged to an account until dropped.
#[derive(Debug)]
pub(super) struct Charge {
    account: Arc<Account>,
    bytes: u64,
    /// Whether it still counts as granted.
    granted: bool,
}

impl Charge {
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) fn account(&self) -> &Arc<Account> {
        &self.account
    }

    /// Leaves nothing here to be given up.
    pub(super) fn take(&mut self) -> Self {
        self.split(self.bytes)
    }

    /// Passes `bytes` of it, or all that there is, to a charge of its own.
    pub(super) fn split(&mut self, bytes: u64) -> Charge {
        let bytes = bytes.min(self.bytes);
        self.bytes -= bytes;
        Charge { account: Arc::clone(&self.account), bytes, granted: self.granted }
    }

    /// What was granted is a value from now on.
    pub(super) fn settle(&mut self) {
        if std::mem::take(&mut self.granted) {
            self.account.granted.fetch_sub(self.bytes, Ordering::Relaxed);
        }
    }

    /// Gives up what exceeds `bytes`.
    pub(super) fn lower(&mut self, bytes: u64) {
        drop(self.split(self.bytes.saturating_sub(bytes)));
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.settle();
        self.account.charged.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}
