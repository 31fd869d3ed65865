//! Mooncake's own client, in this process.

use memmap2::MmapMut;

use super::{
    Cluster,
    abi::{self, Values},
};
use crate::{
    failure::{During, Failure, Result},
    job::{Job, Op, Shape},
    store::Store,
};

/// When memory is registered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Registered {
    /// Before anything is timed.
    Once,
    /// In each call, for that call.
    PerCall,
}

impl Registered {
    /// As [`Store::name`].
    pub fn name(self) -> &'static str {
        match self {
            Registered::Once => "mooncake, registered once",
            Registered::PerCall => "mooncake, registered per call",
        }
    }

    /// As [`Store::about`].
    pub fn about(self) -> &'static str {
        match self {
            Registered::Once => {
                "Mooncake's client through its C ABI, from and to memory that was registered before: put_from, get_into, \
                 and their batches. A put does not say whether it stored"
            }
            Registered::PerCall => {
                "the same, with register_buffer and unregister_buffer around each call, as its users do"
            }
        }
    }
}

/// A client, and the memory of an application that uses it in one way.
pub struct Own {
    way: Registered,
    // Goes before the memory that is registered with it.
    store: abi::Store,
    source: MmapMut,
    target: MmapMut,
    /// Made before the call: the names as C has them, and where their bytes lie.
    values: Option<Values>,
}

impl Own {
    /// Joins the cluster, for calls of at most `most` bytes.
    pub fn join(cluster: &Cluster, most: usize, way: Registered) -> Result<Self> {
        let warm = |byte| {
            let mut memory = MmapMut::map_anon(most).during("the application's memory")?;
            memory.fill(byte);
            Ok::<_, Failure>(memory)
        };
        let store = abi::Store::join(&cluster.library)?;
        let mut own = Own { way, store, source: warm(0x5a)?, target: warm(0x11)?, values: None };
        if way == Registered::Once {
            for memory in [&mut own.source, &mut own.target] {
                // SAFETY: the memory goes after the store.
                unsafe { own.store.register(memory.as_mut_ptr(), most)? };
            }
        }
        Ok(own)
    }
}

impl Store for Own {
    fn name(&self) -> &'static str {
        self.way.name()
    }

    fn about(&self) -> &'static str {
        self.way.about()
    }

    fn offers(&self, op: Op, _: Shape) -> bool {
        matches!(op, Op::Put | Op::GetInto)
    }

    fn before(&mut self, op: Op, job: &mut Job, fill: bool) -> Result<()> {
        if fill {
            self.source[..job.shape.total()].copy_from_slice(job.source());
            self.target[..job.shape.total()].fill(0);
        }
        let memory = if op.reads() { &mut self.target } else { &mut self.source };
        let values = Values::new(&job.keys, memory.as_mut_ptr(), job.shape.bytes)?;
        if !op.reads() {
            self.store.remove(&values);
        }
        self.values = Some(values);
        Ok(())
    }

    fn call(&mut self, op: Op, job: &mut Job) -> Result<()> {
        let values = self.values.as_mut().ok_or(Failure("nothing was prepared".into()))?;
        let memory = if op.reads() { &mut self.target } else { &mut self.source };
        let (start, len) = (memory.as_mut_ptr(), job.shape.total());
        if self.way == Registered::PerCall {
            // SAFETY: the memory goes after the store.
            unsafe { self.store.register(start, len)? };
        }
        // SAFETY: the memory is this value's alone.
        let done = unsafe { if op.reads() { self.store.get(values) } else { self.store.put(values) } };
        if self.way == Registered::PerCall {
            self.store.unregister(start)?;
        }
        done
    }

    fn look(&mut self, _: &mut Job) -> Result<()> {
        Err(Failure("it has no views".into()))
    }

    fn landed<'a>(&'a self, job: &'a Job) -> &'a [u8] {
        &self.target[..job.shape.total()]
    }

    fn forget(&mut self, job: &mut Job) -> Result<()> {
        self.store.remove(&Values::new(&job.keys, self.source.as_mut_ptr(), job.shape.bytes)?);
        Ok(())
    }
}
