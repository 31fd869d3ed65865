//! What every store must be able to do, and how its calls are checked and timed.

use std::time::{Duration, Instant};

use crate::{
    failure::{Failure, Result},
    job::{Job, Op, Shape},
};

/// How long one burst of calls may be.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Calls are made until this much time is over,
    pub budget: Duration,
    /// but at least so many,
    pub least: usize,
    /// and at most so many.
    pub most: usize,
}

/// A peer: whatever can be asked for the same calls as the others.
pub trait Peer {
    /// In the tables and the chart.
    fn name(&self) -> &'static str;

    /// What it is, and how its calls are made, in a line.
    fn about(&self) -> &'static str;

    /// Whether it has such an operation at all.
    fn offers(&self, op: Op, shape: Shape) -> bool;

    /// Makes each call once and compares the bytes. *Errors*: also where they are wrong.
    fn check(&mut self, op: Op, job: &mut Job) -> Result<()>;

    /// Makes calls, one after the other; µs of each.
    fn burst(&mut self, op: Op, job: &mut Job, limits: Limits) -> Result<Vec<f64>>;
}

/// A store that is called from this process.
pub trait Store {
    /// As [`Peer::name`].
    fn name(&self) -> &'static str;

    /// As [`Peer::about`].
    fn about(&self) -> &'static str;

    /// As [`Peer::offers`].
    fn offers(&self, op: Op, shape: Shape) -> bool;

    /// What must be done before each single call and is not part of it. Where `fill` is set, memory inside the store gets
    /// the source's bytes.
    fn before(&mut self, op: Op, job: &mut Job, fill: bool) -> Result<()>;

    /// The call that is timed.
    fn call(&mut self, op: Op, job: &mut Job) -> Result<()>;

    /// Whether [`before`](Self::before) has nothing to do, so that calls too short for the clock can be timed together.
    fn steady(&self, op: Op) -> bool {
        op.reads()
    }

    /// Copies what a view shows into the target.
    fn look(&mut self, job: &mut Job) -> Result<()>;

    /// Where [`Op::GetInto`] has left the bytes.
    fn landed<'a>(&'a self, job: &'a Job) -> &'a [u8] {
        job.target()
    }

    /// Gets what was put into the target, for comparison.
    fn fetch(&mut self, job: &mut Job) -> Result<()> {
        self.before(Op::GetInto, job, false)?;
        self.call(Op::GetInto, job)
    }

    /// Removes the values.
    fn forget(&mut self, job: &mut Job) -> Result<()>;

    /// Makes the store usable again after a call that failed.
    fn recover(&mut self) -> Result<()> {
        Ok(())
    }
}

/// A call is repeated within one sample until it takes this long: a look at the clock costs some 30 ns.
const READABLE: Duration = Duration::from_micros(10);
const REPEATS_MAX: u32 = 64;
/// Calls of a burst that do not count, as long as they fit into this time.
const WARM_UP: (usize, Duration) = (3, Duration::from_millis(20));

/// A [`Store`] as a [`Peer`].
#[derive(Debug)]
pub struct Here<S>(pub S);

impl<S: Store> Here<S> {
    fn put(&mut self, job: &mut Job) -> Result<()> {
        self.0.before(Op::Put, job, true)?;
        self.0.call(Op::Put, job)
    }

    fn check_once(&mut self, op: Op, job: &mut Job) -> Result<()> {
        job.renew();
        match op {
            Op::Put => {
                self.put(job)?;
                self.0.fetch(job)?;
            }
            Op::PutInPlace => {
                self.0.before(op, job, true)?;
                self.0.call(op, job)?;
                self.0.fetch(job)?;
            }
            Op::GetInto => {
                self.put(job)?;
                self.0.before(op, job, false)?;
                self.0.call(op, job)?;
            }
            Op::View => {
                self.put(job)?;
                self.0.look(job)?;
            }
        }
        if self.0.landed(job) != job.source() {
            return Err(Failure::new(op.label(), "the bytes that come back are not those that were put"));
        }
        self.0.forget(job)
    }

    fn once(&mut self, op: Op, job: &mut Job, repeats: u32) -> Result<Duration> {
        self.0.before(op, job, false)?;
        let start = Instant::now();
        for _ in 0..repeats {
            self.0.call(op, job)?;
        }
        Ok(start.elapsed() / repeats)
    }
}

impl<S: Store> Peer for Here<S> {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn about(&self) -> &'static str {
        self.0.about()
    }

    fn offers(&self, op: Op, shape: Shape) -> bool {
        self.0.offers(op, shape)
    }

    fn check(&mut self, op: Op, job: &mut Job) -> Result<()> {
        let checked = self.check_once(op, job);
        if checked.is_err() {
            self.0.recover()?;
        }
        checked
    }

    fn burst(&mut self, op: Op, job: &mut Job, limits: Limits) -> Result<Vec<f64>> {
        if op.reads() {
            self.put(job)?;
        }
        let (warm, short) = WARM_UP;
        let start = Instant::now();
        let mut took = self.once(op, job, 1)?;
        for _ in 1..warm {
            if start.elapsed() >= short {
                break;
            }
            took = self.once(op, job, 1)?;
        }
        let repeats = match self.0.steady(op) {
            true => (READABLE.as_nanos() / took.as_nanos().max(1)).clamp(1, REPEATS_MAX.into()) as u32,
            false => 1,
        };
        let mut samples = Vec::new();
        let start = Instant::now();
        while samples.len() < limits.least || samples.len() < limits.most && start.elapsed() < limits.budget {
            samples.push(self.once(op, job, repeats)?.as_nanos() as f64 / 1e3);
        }
        self.0.forget(job)?;
        Ok(samples)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Keeps what is put, unless it is told to cheat.
    struct Honest {
        kept: Vec<u8>,
        cheats: bool,
    }

    impl Store for Honest {
        fn name(&self) -> &'static str {
            "honest"
        }

        fn about(&self) -> &'static str {
            ""
        }

        fn offers(&self, _: Op, _: Shape) -> bool {
            true
        }

        fn before(&mut self, _: Op, _: &mut Job, _: bool) -> Result<()> {
            Ok(())
        }

        fn call(&mut self, op: Op, job: &mut Job) -> Result<()> {
            match op {
                _ if self.cheats => {}
                Op::Put | Op::PutInPlace => self.kept = job.source().to_vec(),
                Op::GetInto | Op::View => job.target_mut().1.copy_from_slice(&self.kept),
            }
            Ok(())
        }

        fn look(&mut self, job: &mut Job) -> Result<()> {
            self.call(Op::View, job)
        }

        fn forget(&mut self, _: &mut Job) -> Result<()> {
            Ok(())
        }
    }

    fn job() -> Job {
        let mut job = Job::new(64);
        job.turn_to(Shape::one(64));
        job
    }

    #[test]
    fn a_store_that_does_nothing_is_noticed() {
        for op in Op::ALL {
            let mut honest = Here(Honest { kept: Vec::new(), cheats: false });
            assert_eq!(honest.check(op, &mut job()), Ok(()));
            honest.0.cheats = true;
            assert!(honest.check(op, &mut job()).is_err(), "{op:?}");
        }
    }

    #[test]
    fn a_burst_keeps_to_its_limits() {
        let mut honest = Here(Honest { kept: Vec::new(), cheats: false });
        let limits = |budget, least, most| Limits { budget, least, most };
        let none = Duration::ZERO;
        assert_eq!(honest.burst(Op::Put, &mut job(), limits(none, 4, 9)).unwrap().len(), 4);
        let long = Duration::from_secs(60);
        assert_eq!(honest.burst(Op::GetInto, &mut job(), limits(long, 4, 9)).unwrap().len(), 9);
    }
}
