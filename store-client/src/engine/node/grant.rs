//! Memory that the daemon has granted to this client, and the one grant that is kept ahead.

use std::sync::Arc;

use hal::Region;

use super::connection::{Connection, Fault};
use crate::{error::Result, wire::Granted};

/// Memory inside the store that this client alone may write. Dropped before it is spent, it goes back.
#[derive(Debug)]
pub(super) struct Grant {
    /// Keeps `region` mapped.
    connection: Arc<Connection>,
    region: Region,
    id: u64,
    spent: bool,
}

impl Grant {
    /// The first `len` bytes of what the daemon says that it has granted.
    ///
    /// *Errors*: [`Error::Protocol`](crate::Error::Protocol) where they are not all there, or not in an arena of ours.
    pub(super) fn new(connection: &Arc<Connection>, granted: Granted, len: u64) -> Result<Self> {
        let region = connection.granted(granted, len)?;
        Ok(Grant { connection: Arc::clone(connection), region, id: granted.grant, spent: false })
    }

    /// The memory, for writing, mapped while this lives.
    pub(super) fn region(&self) -> Region {
        self.region
    }

    /// What the daemon calls it.
    pub(super) fn id(&self) -> u64 {
        self.id
    }

    /// The connection that it is good on.
    pub(super) fn connection(&self) -> &Arc<Connection> {
        &self.connection
    }
}

impl Drop for Grant {
    fn drop(&mut self) {
        if !self.spent {
            self.connection.abandon(vec![self.id]);
        }
    }
}

/// Says that the daemon has these back, as values or not, unless the commit's outcome tells that it never arrived. Their
/// regions stay mapped.
pub(super) fn spend<R>(grants: &mut [Grant], commit: &Result<R, Fault>) {
    if commit.as_ref().err().is_none_or(Fault::may_have_arrived) {
        grants.iter_mut().for_each(|grant| grant.spent = true);
    }
}

/// Whether a spare grant suits a put of `len` bytes: not wastefully large, so that the pool is not filled with slack.
pub(super) fn suits(capacity: u64, len: u64) -> bool {
    capacity.checked_sub(len).is_some_and(|slack| slack <= len / 4 + 4096)
}

#[cfg(test)]
mod tests {
    use super::suits;

    #[test]
    fn a_spare_grant_suits_a_put_of_similar_size_only() {
        const MIB: u64 = 1 << 20;
        assert!(suits(MIB, MIB));
        assert!(suits(MIB, MIB - MIB / 8));
        assert!(!suits(MIB, MIB + 1));
        assert!(!suits(MIB, MIB / 2));
        assert!(suits(8192, 4096) && !suits(16384, 4096));
        assert!(!suits(0, u64::MAX) && suits(u64::MAX, u64::MAX));
    }
}
