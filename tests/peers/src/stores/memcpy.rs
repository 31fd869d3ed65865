//! memcpy: what nothing that copies once can beat by much.

use std::hint::black_box;

use memmap2::MmapMut;

use crate::{
    failure::{During, Failure, Result},
    job::{Job, Op, Shape},
    store::Store,
};

/// Into memory that was used before.
#[derive(Debug)]
pub struct Memcpy {
    slot: Vec<u8>,
}

impl Memcpy {
    /// With room for `most` bytes.
    pub fn new(most: usize) -> Self {
        Memcpy { slot: vec![0x22; most] }
    }
}

/// Copies in pieces, as a store copies the values of a batch.
fn copy(from: &[u8], to: &mut [u8], piece: usize) {
    for (from, to) in from.chunks(piece).zip(to.chunks_mut(piece)) {
        black_box(to).copy_from_slice(black_box(from));
    }
}

impl Store for Memcpy {
    fn name(&self) -> &'static str {
        "memcpy"
    }

    fn about(&self) -> &'static str {
        "in one process, into memory that was used before: what the ratios refer to"
    }

    fn offers(&self, op: Op, _: Shape) -> bool {
        matches!(op, Op::Put | Op::GetInto)
    }

    fn before(&mut self, _: Op, _: &mut Job, _: bool) -> Result<()> {
        Ok(())
    }

    fn call(&mut self, op: Op, job: &mut Job) -> Result<()> {
        let Shape { bytes, .. } = job.shape;
        let slot = &mut self.slot[..job.shape.total()];
        match op {
            Op::Put | Op::PutInPlace => copy(job.source(), slot, bytes),
            Op::GetInto | Op::View => copy(slot, job.target_mut().1, bytes),
        }
        Ok(())
    }

    fn steady(&self, _: Op) -> bool {
        true
    }

    fn look(&mut self, job: &mut Job) -> Result<()> {
        self.call(Op::GetInto, job)
    }

    fn forget(&mut self, _: &mut Job) -> Result<()> {
        Ok(())
    }
}

/// Into memory that the system has just given: every page is faulted in.
#[derive(Debug, Default)]
pub struct Fresh {
    map: Option<MmapMut>,
}

impl Store for Fresh {
    fn name(&self) -> &'static str {
        "memcpy, fresh memory"
    }

    fn about(&self) -> &'static str {
        "in one process, into memory just mapped: what a buffer of its own for each value costs"
    }

    fn offers(&self, op: Op, _: Shape) -> bool {
        matches!(op, Op::Put | Op::GetInto)
    }

    fn before(&mut self, _: Op, job: &mut Job, _: bool) -> Result<()> {
        self.map = None;
        self.map = Some(MmapMut::map_anon(job.shape.total()).during("mapping fresh memory")?);
        Ok(())
    }

    fn call(&mut self, _: Op, job: &mut Job) -> Result<()> {
        let map = self.map.as_mut().ok_or(Failure("nothing is mapped".into()))?;
        copy(job.source(), map, job.shape.bytes);
        Ok(())
    }

    fn steady(&self, _: Op) -> bool {
        false
    }

    fn look(&mut self, _: &mut Job) -> Result<()> {
        Ok(())
    }

    fn landed<'a>(&'a self, _: &'a Job) -> &'a [u8] {
        self.map.as_deref().unwrap_or_default()
    }

    fn fetch(&mut self, _: &mut Job) -> Result<()> {
        Ok(())
    }

    fn forget(&mut self, _: &mut Job) -> Result<()> {
        self.map = None;
        Ok(())
    }
}
