//! A node that stores in a Mooncake cluster, as one client of it for all of its own.
//!
//! Values pass through the pool and nothing stays: a put is answered when Mooncake has the value, and a get brings it into
//! memory that is free again when its reader lets go. So nothing that another host removes or puts is ever answered from
//! here, and the shared index has nothing to show.

use std::{fmt, sync::Arc, time::Duration};

use hal::{Deadline, Device, Workers};
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric},
    metrics::counter::ConstCounter,
};
use twox_hash::XxHash3_64;

use super::values::{Home, Told, Values, Written};
use crate::{
    engine::{
        Engine,
        mooncake::{Mooncake, MooncakeEngine, pooled},
    },
    error::Result,
    store::{Entry, Mode, Object, Put, Space, Stat, Store, Writer, check_key},
};

/// Threads for what no client asks: joining, and letting memory go.
const WORKERS: usize = 2;

/// The membership that all clients share.
#[derive(Debug)]
pub(super) struct Cluster<D: Device> {
    engine: Arc<MooncakeEngine<D>>,
    /// How long a request may take.
    limit: Duration,
    instance: u64,
}

impl<D: Device> Cluster<D> {
    /// Joins the cluster, on threads that are bound to `device`.
    ///
    /// *Errors*: as [`StoreClient::mooncake`](crate::StoreClient::mooncake).
    pub(super) fn join(device: D, mooncake: &Mooncake, limit: Duration) -> Result<Self> {
        let workers = Arc::new(Workers::start(device, WORKERS)?);
        let engine = MooncakeEngine::join(&workers, mooncake, "", Deadline::after(limit))?;
        Ok(Cluster {
            engine: Arc::new(engine),
            limit,
            // The cluster outlives the node: a put that was not answered may be stored, whichever node is asked next.
            instance: XxHash3_64::oneshot(mooncake.master.as_bytes()),
        })
    }

    /// What Mooncake did for the node, for its counters.
    pub(super) fn counters(&self) -> Box<dyn Collector> {
        Box::new(Counters(Arc::clone(&self.engine)))
    }
}

impl<D: Device> Home for Cluster<D> {
    fn open(&self, space: Space, namespace: &str) -> Result<Box<dyn Values>> {
        Ok(Box::new(Tenant { space, engine: self.engine.tenant(namespace)?, limit: self.limit }))
    }

    fn instance(&self) -> u64 {
        self.instance
    }
}

/// One client's values.
struct Tenant<D: Device> {
    space: Space,
    engine: MooncakeEngine<D>,
    limit: Duration,
}

impl<D: Device> Tenant<D> {
    fn deadline(&self) -> Deadline {
        Deadline::after(self.limit)
    }
}

impl<D: Device> Values for Tenant<D> {
    fn space(&self) -> &Space {
        &self.space
    }

    /// Nothing is known without asking the master, as the put itself does.
    fn keeps_which(&self, keys: &[&str], _mode: Mode) -> Vec<bool> {
        vec![false; keys.len()]
    }

    fn store(&self, written: &mut dyn Iterator<Item = Result<Written<'_>>>, mode: Mode) -> Vec<Result<Put>> {
        let deadline = self.deadline();
        let mut values = Vec::new();
        let mut verdicts: Vec<Result<Put>> = written
            .enumerate()
            .map(|(i, written)| {
                let (grant, key, len, meta) = written?;
                check_key(key)?;
                let object = self.space.without_key(grant, len, meta)?;
                values.push((i, pooled::Written { key, object, deadline }));
                // Until it is answered.
                Ok(Put::Stored)
            })
            .collect();
        let (slots, values): (Vec<usize>, Vec<_>) = values.into_iter().unzip();
        for (i, verdict) in slots.into_iter().zip(self.engine.put_pooled(&values, mode, deadline)) {
            verdicts[i] = verdict;
        }
        verdicts
    }

    fn find(&self, keys: &[&str], writer: &Writer) -> Vec<Result<Arc<Object>>> {
        self.engine.get_pooled(keys, &self.space, writer, self.deadline())
    }

    fn describe(&self, keys: &[&str]) -> Vec<Result<Told>> {
        let told = self.engine.describe(keys, self.deadline()).into_iter();
        told.map(|slot| slot.map(Told::Description)).collect()
    }

    fn remove(&self, keys: &[&str]) -> Vec<Result<bool>> {
        self.engine.remove(keys, self.deadline())
    }

    fn remove_prefix(&self, prefix: &str) -> Result<u64> {
        self.engine.remove_by_prefix(prefix, self.deadline())
    }

    fn set_pinned(&self, keys: &[&str], pinned: bool) -> Vec<Result<bool>> {
        self.engine.set_pinned(keys, pinned, self.deadline())
    }

    fn list(&self, prefix: &str, after: Option<&str>, limit: usize) -> Result<Vec<Entry>> {
        let (keys, _more) = self.engine.list(prefix, after, limit as u64, self.deadline())?;
        Ok(keys.into_iter().map(|(key, len)| Entry { key, len }).collect())
    }

    /// The pool's figures, while the cluster answers.
    fn stat(&self, store: &Store) -> Result<Stat> {
        self.engine.health(self.deadline()).map(|()| store.stat())
    }
}

/// What was registered with Mooncake.
struct Counters<D: Device>(Arc<MooncakeEngine<D>>);

impl<D: Device> fmt::Debug for Counters<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Counters")
    }
}

impl<D: Device> Collector for Counters<D> {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        for (name, help, count) in self.0.registrations().into_iter().flatten() {
            let counter = ConstCounter::new(count);
            counter.encode(encoder.encode_descriptor(name, help, None, counter.metric_type())?)?;
        }
        Ok(())
    }
}
