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

    /// Charges `bytes`, or says how many are missing.
    pub(super) fn charge(self: &Arc<Self>, bytes: u64) -> Result<Charge, u64> {
        let add = |charged: u64| charged.checked_add(bytes).filter(|&sum| sum <= self.limit);
        match self.charged.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add) {
            Ok(_) => Ok(Charge { account: Arc::clone(self), bytes }),
            Err(charged) => Err(bytes - self.limit.saturating_sub(charged).min(bytes)),
        }
    }
}

/// Bytes charged to an account until dropped.
#[derive(Debug)]
pub(super) struct Charge {
    account: Arc<Account>,
    bytes: u64,
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
        Self { account: Arc::clone(&self.account), bytes: std::mem::take(&mut self.bytes) }
    }

    /// Gives up what exceeds `bytes`.
    pub(super) fn lower(&mut self, bytes: u64) {
        let over = self.bytes.saturating_sub(bytes);
        self.account.charged.fetch_sub(over, Ordering::Relaxed);
        self.bytes -= over;
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.account.charged.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// Counts bytes as granted until dropped.
#[derive(Debug)]
pub(super) struct Pending {
    account: Arc<Account>,
    bytes: u64,
}

impl Pending {
    pub(super) fn new(charge: &Charge) -> Self {
        charge.account.granted.fetch_add(charge.bytes, Ordering::Relaxed);
        Self { account: Arc::clone(&charge.account), bytes: charge.bytes }
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        self.account.granted.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}
