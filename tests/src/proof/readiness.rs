//! Payloads whose work is still queued when they are put, through a node in another process.
//!
//! Right bytes alone can be luck. So each pending trial shows that the work is pending right before the call, by the
//! driver's word, that nothing is stored while it is held, and that it is done when the call returns. And each pending
//! row has a counterpart that waits for nothing, of which no value may be right.

use std::{
    env, fmt,
    path::Path,
    sync::{Arc, mpsc},
    thread,
    time::Duration,
};

use hal::{Buffer, Device, DeviceExt};
use haulier::{Payload, Put, StoreClient};
use libtest_mimic::Trial;
use parking_lot::Mutex;

use super::{Backend, ProofNode, Watched, Way};
use crate::{
    conformance::{watched, write},
    fixture::Fixture,
    rig::eventually,
};

const TRIALS: usize = 20;
/// Payloads of one call.
const BATCH: usize = 8;
/// Bytes of a payload: more than what may travel inside a message.
const LEN: usize = 64 << 10;
const STALE: u8 = 0x11;
/// How long the work is held once the call has begun.
const HELD: Duration = Duration::from_millis(20);
const POOL: u64 = 64 << 20;

/// One row.
#[derive(Debug, Clone, Copy)]
pub struct Row {
    /// Eight payloads in one call.
    pub batch: bool,
    /// Whether the work is still queued when they are put.
    pub pending: bool,
    /// How they are to travel.
    pub way: Way,
    /// Whether the client waits, as it does unless it is told that the caller has waited.
    pub waits: bool,
}

/// Makes each row a test, on device 1 of a simulated driver: for a [`Backend`], what runs a test's body in a process of
/// its own, and what to look at afterwards.
#[macro_export]
macro_rules! readiness_matrix {
    ($backend:ty, $alone:path, $afterwards:expr) => {
        $crate::readiness_matrix! {
            @ $backend, $alone, $afterwards,
            single_pending_by_ipc: false, true, Ipc, true;
            single_ready_by_ipc: false, false, Ipc, true;
            batch_pending_by_ipc: true, true, Ipc, true;
            batch_ready_by_ipc: true, false, Ipc, true;
            single_pending_by_staging: false, true, Staging, true;
            single_ready_by_staging: false, false, Staging, true;
            batch_pending_by_staging: true, true, Staging, true;
            batch_ready_by_staging: true, false, Staging, true;
            // The test of the test: who does not wait stores stale bytes every time.
            single_pending_by_ipc_without_waiting: false, true, Ipc, false;
            batch_pending_by_ipc_without_waiting: true, true, Ipc, false;
            single_pending_by_staging_without_waiting: false, true, Staging, false;
            batch_pending_by_staging_without_waiting: true, true, Staging, false;
            single_ready_by_ipc_without_waiting: false, false, Ipc, false;
            batch_ready_by_staging_without_waiting: true, false, Staging, false;
        }
    };
    (@ $backend:ty, $alone:path, $afterwards:expr,
        $($name:ident: $batch:expr, $pending:expr, $way:ident, $waits:expr;)*) => {
        /// P14, P15.
        mod matrix {
            use super::*;

            $(#[test]
            fn $name() {
                use $crate::proof::{Way, readiness::{Row, twenty_puts}};

                $alone(&[], || {
                    let row = Row { batch: $batch, pending: $pending, way: Way::$way, waits: $waits };
                    let right = twenty_puts::<$backend>(env!("CARGO_BIN_EXE_haulier-proof").as_ref(), 1, row);
                    assert_eq!(right, row.expected(), "of 20 are right");
                    $afterwards();
                });
            })*
        }
    };
}

impl Row {
    /// Every row: eight that wait, and four of the pending ones that do not.
    fn all() -> Vec<Row> {
        let mut rows = Vec::new();
        for waits in [true, false] {
            for way in Way::BOTH {
                for batch in [false, true] {
                    for pending in [true, false] {
                        if waits || pending {
                            rows.push(Row { batch, pending, way, waits });
                        }
                    }
                }
            }
        }
        rows
    }

    /// How many of the trials are to have the right bytes.
    pub fn expected(self) -> usize {
        if self.waits || !self.pending { TRIALS } else { 0 }
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Row { batch, pending, way, waits } = *self;
        let size = if batch { "batch" } else { "single" };
        let state = if pending { "pending" } else { "ready" };
        let without = if waits { "" } else { "_without_waiting" };
        write!(f, "{size}_{state}_by_{}{without}", way.label())
    }
}

/// The rows that ran.
#[derive(Debug, Clone, Default)]
pub struct Matrix(Arc<Mutex<Vec<(Row, usize)>>>);

impl Matrix {
    /// One trial for each row, on device 0.
    pub fn trials<B: Backend>(&self) -> Vec<Trial> {
        let trial = |row: Row| {
            let (name, ran) = (format!("[{}/0] readiness::{row}", B::NAME), Arc::clone(&self.0));
            Trial::test(name.clone(), move || {
                let outcome = watched(&name, || {
                    let program = env::current_exe().expect("/proc is mounted");
                    let right = twenty_puts::<B>(&program, 0, row);
                    ran.lock().push((row, right));
                    assert_eq!(right, row.expected(), "of {TRIALS} are right");
                });
                outcome.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
                Ok(())
            })
        };
        Row::all().into_iter().map(trial).collect()
    }
}

impl fmt::Display for Matrix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (row, right) in self.0.lock().iter() {
            writeln!(
                f,
                "readiness: {:<42} {right:>2} of {TRIALS} right, {} expected",
                row.to_string(),
                row.expected()
            )?;
        }
        Ok(())
    }
}

fn put_all<D: Device>(
    client: &StoreClient<D>,
    keys: &[String],
    buffers: &[Buffer<D>],
    waits: bool,
) -> Vec<haulier::Result<Put>> {
    let payload = |buffer| {
        let payload = Payload::from(buffer);
        if waits { payload } else { payload.already_done() }
    };
    match buffers {
        [one] => vec![client.put(&keys[0], payload(one))],
        all => client.batch_put(keys.iter().map(String::as_str).zip(all.iter().map(payload)).collect()),
    }
}

/// How many of the trials stored the right bytes. `program` is `haulier-proof`, where the node is.
///
/// # Panics
/// Where a trial shows nothing, a payload went another way, or the client did not wait.
pub fn twenty_puts<B: Backend>(program: &Path, device: u32, row: Row) -> usize {
    let node = ProofNode::start::<B>(program, row.way, POOL);
    let f = &B::fixture(device);
    f.enter();
    let client = node.client(f.device());
    let values = if row.batch { BATCH } else { 1 };
    let right = (0..TRIALS).filter(|&trial| is_right::<B>(f, &client, row, trial, values)).count();
    let stored = row.way.count(&client, "put", "stored");
    assert_eq!(stored, (TRIALS * values) as u64, "they did not go by {}", row.way.label());
    right
}

fn is_right<B: Backend>(
    f: &B::Fixture,
    client: &StoreClient<B::Device>,
    row: Row,
    trial: usize,
    values: usize,
) -> bool {
    // The producer is a stream that the current one waits for.
    let (producer, current) = (f.stream(), f.stream());
    let buffers: Vec<_> = (0..values)
        .map(|_| {
            let buffer = f.device().buffer(LEN).expect("device memory");
            write(&f.device().bind_current().expect("it binds"), buffer.region(), &[STALE; LEN]);
            buffer
        })
        .collect();
    let byte = |i: usize| 0x80 + (trial + i) as u8;
    if row.pending {
        f.hold(producer);
    }
    for (i, buffer) in buffers.iter().enumerate() {
        f.queue_fill(producer, buffer.region(), byte(i));
    }
    let produced = f.mark(producer);
    f.wait_for(current, &produced);
    let keys: Vec<String> = (0..values).map(|i| format!("{trial}/{i}")).collect();
    let put = || f.device().with_stream(current, || put_all(client, &keys, &buffers, row.waits));
    let puts = match (row.pending, row.waits) {
        (true, true) => {
            let nothing_stored = || client.list("").expect("the node serves").len() == trial * values;
            released_meanwhile(f, producer, &produced, nothing_stored, put)
        }
        (true, false) => {
            assert!(!f.is_reached(&produced), "the work must be pending before the call");
            let puts = put();
            assert!(!f.is_reached(&produced), "the work was done during the call, so this shows nothing");
            f.release(producer);
            puts
        }
        (false, _) => {
            eventually("the work is done before the call", || f.is_reached(&produced));
            put()
        }
    };
    assert!(puts.iter().all(|put| matches!(put, Ok(Put::Stored))), "{puts:?}");
    let right =
        keys.iter().enumerate().all(|(i, key)| client.get(key).expect("it is stored") == [byte(i); LEN]);
    // The memory is freed next.
    eventually("the work is done", || f.is_reached(&produced));
    right
}

/// Runs `call`, and lets go of `producer` a while after it has begun.
fn released_meanwhile<D: Device, F: Watched<D>, R: Send>(
    f: &F,
    producer: D::Stream,
    produced: &F::Mark,
    nothing_happened: impl Fn() -> bool,
    call: impl FnOnce() -> R + Send,
) -> R {
    let (begins, begun) = mpsc::channel();
    thread::scope(|scope| {
        let caller = scope.spawn(move || {
            f.enter();
            let pending_before = !f.is_reached(produced);
            // The other side is there until it has joined this one.
            let _ = begins.send(());
            let answer = call();
            (pending_before, answer, f.is_reached(produced))
        });
        let _ = begun.recv();
        thread::sleep(HELD);
        let early = caller.is_finished();
        let quiet = nothing_happened();
        f.release(producer);
        let (pending_before, answer, complete) =
            caller.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        assert!(pending_before, "the work must be pending before the call");
        assert!(!early, "the call returned while the work was held");
        assert!(quiet, "something was stored while the work was held");
        assert!(complete, "the call returned before the work was complete");
        answer
    })
}
