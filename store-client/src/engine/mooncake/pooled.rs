//! Values that come and go through the pool of a node, which stores here for its clients.
//!
//! Mooncake reads and writes the pool's memory itself: an arena is registered when the first value of it comes by, and stays
//! registered for as long as it has its memory. Only heads, with the bytes of small values, are copied.

use std::{any::Any, ffi::CString, sync::Arc};

use hal::{Deadline, Device, Region};

use super::{MooncakeEngine, Way, ffi, get, put::Source, refusal, session::Session};
use crate::{
    error::{Error, Result},
    shm,
    store::{Arena, Grant, Mode, Object, Put, Space, Writer},
};

/// A value that was written into the pool.
pub(crate) struct Written<'k> {
    pub(crate) key: &'k str,
    pub(crate) object: Arc<Object>,
    pub(crate) deadline: Deadline,
}

impl<D: Device> Source<D> for Written<'_> {
    fn key(&self) -> &str {
        self.key
    }

    fn meta(&self) -> &[u8] {
        self.object.meta()
    }

    fn len(&self) -> usize {
        self.object.len() as usize
    }

    fn copy_in(&self, to: Region) -> Result<()> {
        let from = Region::host(self.object.as_ptr().expose_provenance(), to.len);
        // SAFETY: the value is held, and whoever wrote it gave it up; the block is this put's alone.
        unsafe { shm::copy_host_in(to, from, self.deadline) }
    }

    fn body(&self, session: &Arc<Session<D>>, _wait: bool) -> Result<Option<Way<D>>> {
        register(session, self.object.arena(), self.deadline)?;
        Ok(Some(Way::Pooled(Arc::clone(&self.object))))
    }

    fn passed(&self) {}
}

impl<D: Device> MooncakeEngine<D> {
    /// Stores values of the pool.
    pub(crate) fn put_pooled(
        &self,
        written: &[Written<'_>],
        mode: Mode,
        deadline: Deadline,
    ) -> Vec<Result<Put>> {
        self.in_turns(written, |written| self.put_some(written, mode, deadline))
    }

    /// Brings values into memory that `writer` finds for them in the pool.
    pub(crate) fn get_pooled(
        &self,
        keys: &[&str],
        space: &Space,
        writer: &Writer,
        deadline: Deadline,
    ) -> Vec<Result<Arc<Object>>> {
        self.in_turns(keys, |keys| self.bring_some(keys, space, writer, deadline))
    }

    fn bring_some(
        &self,
        keys: &[&str],
        space: &Space,
        writer: &Writer,
        deadline: Deadline,
    ) -> Result<Vec<Result<Arc<Object>>>> {
        let session = self.session()?;
        let names: Vec<CString> = keys.iter().map(|key| self.names.head(key)).collect();
        let (mut planned, mut places) = (Vec::new(), Vec::new());
        let mut verdicts: Vec<Result<Arc<Object>>> = Vec::with_capacity(keys.len());
        for (key, found) in keys.iter().zip(get::heads(&session, &names, deadline)) {
            let brought = found.and_then(|found| {
                let mut grant = writer.reserve(space, found.len)?;
                if let Some((block, range)) = found.inline {
                    grant.write(0, &block.bytes()[range])?;
                    session.counters.gets[0].count(found.len);
                    return space.without_key(grant, found.len, &found.meta).map(Some);
                }
                register(&session, grant.arena(), deadline)?;
                let object = ffi::Object {
                    name: self.names.body(key, found.id),
                    addr: grant.as_mut_ptr().expose_provenance(),
                    len: grant.capacity() as usize,
                };
                planned.push((object, grant));
                places.push((verdicts.len(), found.len, found.meta));
                Ok(None)
            });
            // What is planned is answered below.
            verdicts.push(brought.and_then(|object| object.ok_or(Error::NotFound)));
        }
        if planned.is_empty() {
            return Ok(verdicts);
        }
        // SAFETY: the grant is this call's alone, and keeps its arena, which is registered.
        let read: Result<Vec<(Grant, Result<()>)>> = unsafe { get::bodies(&session, planned, deadline) };
        match read {
            Ok(read) => {
                for ((i, len, meta), (grant, outcome)) in places.into_iter().zip(read) {
                    verdicts[i] = outcome.and_then(|()| {
                        session.counters.gets[1].count(len);
                        space.without_key(grant, len, &meta)
                    });
                }
            }
            Err(e) => places.into_iter().for_each(|(i, ..)| verdicts[i] = Err(e.clone())),
        }
        Ok(verdicts)
    }
}

/// Sees to it that all of the arena's memory is registered.
fn register<D: Device>(session: &Arc<Session<D>>, arena: &Arc<Arena>, deadline: Deadline) -> Result<()> {
    arena.attach(|region| {
        let owned = Arc::clone(arena);
        let registered = session.run("register", deadline, move |session, bound| {
            // SAFETY: the guard is dropped before the arena's memory: by the arena, or right here with it.
            unsafe { session.register(bound, region) }.map(|guard| (guard, owned))
        });
        let (guard, _arena) = registered?.map_err(refusal::error)?;
        Ok(Box::new(guard) as Box<dyn Any + Send>)
    })
}
