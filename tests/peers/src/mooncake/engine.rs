//! Haulier's engine for Mooncake.

use std::ops::Range;

use haulier::{AnyDevice, Mooncake, Options, Payload, Registered, StoreClient, Target};
use memmap2::MmapMut;

use super::Cluster;
use crate::{
    failure::{During, Failure, Result},
    job::{Job, Op, Shape},
    store::Store,
    stores::{Calls, host, stored},
};

fn join(cluster: &Cluster) -> Result<StoreClient<AnyDevice>> {
    let mooncake = Mooncake {
        library: Some(cluster.library.clone()),
        metadata: super::METADATA.into(),
        host: super::HOST.into(),
        buffer: super::BUFFER,
        ..Mooncake::new(Cluster::master(), super::PROTOCOL)
    };
    StoreClient::mooncake(host()?, &mooncake, Options::default()).during("joining the cluster")
}

/// The engine, and memory that an application has registered with it.
pub struct Direct {
    // Deregistered before it is freed.
    _registered: [Registered<'static, AnyDevice>; 2],
    client: StoreClient<AnyDevice>,
    source: MmapMut,
    target: MmapMut,
}

impl Direct {
    /// In the tables, and what it is.
    pub const NAME: (&'static str, &'static str) = (
        "haulier, registered once",
        "Haulier's engine for Mooncake, from memory that was registered before with register_buffer. A put says whether \
         it stored, and a get whether the value was removed meanwhile",
    );

    /// Joins the cluster, for calls of at most `most` bytes.
    pub fn join(cluster: &Cluster, most: usize) -> Result<Self> {
        let warm = |byte| {
            let mut memory = MmapMut::map_anon(most).during("the application's memory")?;
            memory.fill(byte);
            Ok::<_, Failure>(memory)
        };
        let (source, target) = (warm(0x5a)?, warm(0x11)?);
        let client = join(cluster)?;
        let register = |memory: &MmapMut| {
            // SAFETY: the memory goes after the guard.
            let payload = unsafe { Payload::raw(memory.as_ptr().expose_provenance(), memory.len()) };
            client.register_buffer(payload).during("register_buffer")
        };
        Ok(Direct { _registered: [register(&source)?, register(&target)?], client, source, target })
    }

    /// Where the values of a call lie.
    fn parts(shape: Shape) -> impl Iterator<Item = Range<usize>> {
        (0..shape.values).map(move |n| n * shape.bytes..(n + 1) * shape.bytes)
    }
}

impl Store for Direct {
    fn name(&self) -> &'static str {
        Self::NAME.0
    }

    fn about(&self) -> &'static str {
        Self::NAME.1
    }

    fn offers(&self, op: Op, _: Shape) -> bool {
        matches!(op, Op::Put | Op::GetInto)
    }

    fn before(&mut self, op: Op, job: &mut Job, fill: bool) -> Result<()> {
        if fill {
            self.source[..job.shape.total()].copy_from_slice(job.source());
            self.target[..job.shape.total()].fill(0);
        }
        if op.reads() { Ok(()) } else { self.forget(job) }
    }

    fn call(&mut self, op: Op, job: &mut Job) -> Result<()> {
        if op.reads() {
            let start = self.target.as_mut_ptr().expose_provenance();
            let items = job.keys.iter().zip(Self::parts(job.shape)).map(|(key, part)| {
                // SAFETY: the memory is this value's, and nobody touches it during the call.
                (key.as_str(), unsafe { Target::raw(start + part.start, part.len()) })
            });
            let got = self.client.batch_get_into(items.collect());
            got.into_iter().try_for_each(|slot| slot.map(drop)).during("get_into")
        } else {
            let start = self.source.as_ptr().expose_provenance();
            let items = job.keys.iter().zip(Self::parts(job.shape)).map(|(key, part)| {
                // SAFETY: the memory is this value's, and nobody writes it during the call.
                (key.as_str(), unsafe { Payload::raw(start + part.start, part.len()) })
            });
            self.client.batch_put(items.collect()).into_iter().try_for_each(stored)
        }
    }

    fn look(&mut self, _: &mut Job) -> Result<()> {
        Err(Failure("views are not compared".into()))
    }

    fn landed<'a>(&'a self, job: &'a Job) -> &'a [u8] {
        &self.target[..job.shape.total()]
    }

    fn forget(&mut self, job: &mut Job) -> Result<()> {
        let keys: Vec<&str> = job.keys.iter().map(String::as_str).collect();
        self.client.batch_remove(&keys).into_iter().try_for_each(|slot| slot.map(drop)).during("remove")
    }
}

/// The engine, and any memory of an application: it goes through the engine's pool of registered memory.
pub struct Staged(Calls);

impl Staged {
    /// In the tables, and what it is.
    pub const NAME: (&'static str, &'static str) = (
        "haulier, any memory",
        "the same, from memory that nobody registered: copied through the engine's pool of registered memory",
    );

    /// Joins the cluster.
    pub fn join(cluster: &Cluster) -> Result<Self> {
        Ok(Staged(Calls::new(join(cluster)?)))
    }
}

impl Store for Staged {
    fn name(&self) -> &'static str {
        Self::NAME.0
    }

    fn about(&self) -> &'static str {
        Self::NAME.1
    }

    fn offers(&self, op: Op, _: Shape) -> bool {
        matches!(op, Op::Put | Op::GetInto)
    }

    fn before(&mut self, op: Op, job: &mut Job, fill: bool) -> Result<()> {
        self.0.before(op, job, fill)
    }

    fn call(&mut self, op: Op, job: &mut Job) -> Result<()> {
        self.0.call(op, job)
    }

    fn look(&mut self, job: &mut Job) -> Result<()> {
        self.0.look(job)
    }

    fn forget(&mut self, job: &mut Job) -> Result<()> {
        self.0.forget(job)
    }
}
