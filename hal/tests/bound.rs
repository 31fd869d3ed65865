//! Proofs restore what they found, and workers are bound before they work.

mod dummy;

use std::{
    cell::RefCell,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Barrier,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use dummy::{Blue, Red, Stream, current, freed};
use hal::{
    Bound, BufferId, Deadline, Device, DeviceExt, Error, IpcHandle, Kind, Region, Result, Token, Workers,
};

/// Long enough for a loaded machine; a test that reaches it has failed.
fn patient() -> Deadline {
    Deadline::after(Duration::from_secs(30))
}

#[test]
fn dropping_a_proof_restores_what_was_current() {
    let (outer, inner) = (Red::new(0), Red::new(1));
    let first = outer.bind_current().unwrap();
    {
        let _second = inner.bind_current().unwrap();
        assert_eq!(current(), Some(inner.uuid()));
    }
    assert_eq!(current(), Some(outer.uuid()));
    drop(first);
    assert_eq!(current(), None);
}

#[test]
fn an_error_while_bound_restores() {
    fn fails(device: &Red) -> Result<()> {
        let _bound = device.bind_current()?;
        Err(Error::new(Kind::OutOfMemory, "dummy", "allocate"))
    }
    assert_eq!(fails(&Red::new(0)).unwrap_err().kind(), Kind::OutOfMemory);
    assert_eq!(current(), None);
}

#[test]
fn a_panic_while_bound_restores() {
    let device = Red::new(0);
    let unwound = catch_unwind(AssertUnwindSafe(|| {
        let _bound = device.bind_current().unwrap();
        panic!("while bound");
    }));
    assert!(unwound.is_err());
    assert_eq!(current(), None);
}

#[test]
fn binding_what_is_current_already_leaves_it_current() {
    let device = Red::new(0);
    let outer = device.bind_current().unwrap();
    drop(device.bind_current().unwrap());
    assert_eq!(current(), Some(device.uuid()));
    outer.register(Region::host(0, 1)).unwrap();
}

#[test]
fn an_outer_proof_does_no_work_while_another_device_is_bound() {
    let (outer, inner) = (Red::new(0), Blue::new(1));
    let bound = outer.bind_current().unwrap();
    every_call(&bound, |result| assert!(result.is_ok(), "{result:?}"));
    {
        let _inner = inner.bind_current().unwrap();
        refuses(&bound);
    }
    every_call(&bound, |result| assert!(result.is_ok(), "{result:?}"));
}

/// That of all its calls says the proof that its device need not be current.
fn refuses(bound: &Bound<'_, Red>) {
    every_call(bound, |result| assert_eq!(result.unwrap_err().kind(), Kind::NotBound));
}

#[test]
fn a_proof_whose_elder_went_first_refuses_and_restores_nothing() {
    let (red, other) = (Red::new(0), Red::new(1));
    let a = red.bind_current().unwrap();
    let b = other.bind_current().unwrap();
    drop(a);
    assert_eq!(current(), None, "the older one gives the thread back");
    refuses(&b);
    drop(b);
    assert_eq!(current(), None, "the younger one brought its own device back");
}

#[test]
fn proofs_dropped_out_of_order_leave_nothing_behind_that_vouches_for_later_ones() {
    let (red, other) = (Red::new(0), Red::new(1));
    let (a, b) = (red.bind_current().unwrap(), red.bind_current().unwrap());
    drop(a);
    refuses(&b);
    drop(b);

    let first = other.bind_current().unwrap();
    let second = red.bind_current().unwrap();
    every_call(&second, |result| assert!(result.is_ok(), "{result:?}"));
    drop(first);
    refuses(&second);
    drop(second);
    assert_eq!(current(), None);
}

#[test]
fn an_invalid_proof_stays_so_when_its_device_is_bound_again() {
    let (red, other) = (Red::new(0), Red::new(1));
    let a = red.bind_current().unwrap();
    let b = other.bind_current().unwrap();
    drop(a);
    let again = other.bind_current().unwrap();
    refuses(&b);
    every_call(&again, |result| assert!(result.is_ok(), "{result:?}"));
    drop(b);
    every_call(&again, |result| assert!(result.is_ok(), "{result:?}"));
    drop(again);
    assert_eq!(current(), None);
}

#[test]
fn a_proof_that_restores_nothing_can_go_first() {
    let (red, other) = (Red::new(0), Red::new(1));
    let outer = red.bind_current().unwrap();
    let a = red.bind_current().unwrap();
    let b = other.bind_current().unwrap();
    drop(a);
    every_call(&b, |result| assert!(result.is_ok(), "{result:?}"));
    drop(b);
    assert_eq!(current(), Some(red.uuid()));
    every_call(&outer, |result| assert!(result.is_ok(), "{result:?}"));
}

#[test]
fn a_forgotten_proof_keeps_an_older_one_from_working_on_its_device() {
    let (red, other) = (Red::new(0), Red::new(1));
    let a = red.bind_current().unwrap();
    std::mem::forget(other.bind_current().unwrap());
    refuses(&a);
    drop(a);
    assert_eq!(current(), None);
    every_call(&red.bind_current().unwrap(), |result| assert!(result.is_ok(), "{result:?}"));
}

#[test]
fn a_thread_that_ends_can_still_be_bound_and_is_given_back() {
    /// Binds when its thread's locals go, as a guard does that an application keeps in one.
    struct AtTheEnd(Red, mpsc::Sender<Option<hal::DeviceUuid>>);
    impl Drop for AtTheEnd {
        fn drop(&mut self) {
            drop(self.0.bind_current());
            let _ = self.1.send(current());
        }
    }
    thread_local!(static KEPT: RefCell<Option<AtTheEnd>> = const { RefCell::new(None) });

    let (tell, told) = mpsc::channel();
    let ended = thread::spawn(move || {
        let device = Red::new(0);
        // Which of the two locals goes first depends on which was used first.
        KEPT.set(Some(AtTheEnd(device.clone(), tell)));
        drop(device.bind_current());
    });
    assert!(ended.join().is_ok());
    assert_eq!(told.recv().unwrap(), None);
}

fn every_call(bound: &Bound<'_, Red>, check: impl Fn(Result<()>)) {
    let region = Region::host(0, 1);
    let handle = IpcHandle {
        device: bound.device().uuid(),
        buffer: BufferId(0),
        exporter: 0,
        len: 1,
        token: Token::Opaque(vec![0]),
    };
    check(bound.sync_stream(Stream(0), Deadline::NEVER));
    check(bound.locate(0, 1).map(drop));
    check(bound.allocate(1).map(drop));
    check(bound.export_ipc(region).map(drop));
    check(bound.import_ipc(&handle, vec![]).map(drop));
    check(bound.register(region).map(drop));
    // SAFETY: the dummy copies nothing.
    check(unsafe { bound.copy(region, region) });
}

#[test]
fn every_worker_is_bound_before_start_returns() {
    let device = Red::new(3);
    let workers = Arc::new(Workers::start(device.clone(), 4).unwrap());
    assert_eq!(device.owned(), 4);

    // Each job waits for the others, so each is on a worker of its own.
    let together = Arc::new(Barrier::new(4));
    let callers: Vec<_> = (0..4)
        .map(|_| {
            let (workers, together) = (Arc::clone(&workers), Arc::clone(&together));
            thread::spawn(move || {
                workers.run(patient(), "test", move |_| {
                    together.wait();
                    Ok(current())
                })
            })
        })
        .collect();
    for caller in callers {
        assert_eq!(caller.join().unwrap().unwrap(), Some(device.uuid()));
    }
}

#[test]
fn a_worker_that_cannot_be_bound_is_reported() {
    let error = Workers::start(Red::scarce(0, 2), 4).unwrap_err();
    assert_eq!((error.kind(), error.op()), (Kind::InvalidDevice, "bind_owned_thread"));
}

/// A job that hangs, as a driver call may, until it is let go.
struct Hanging {
    started: mpsc::Receiver<()>,
    release: mpsc::Sender<()>,
}

impl Hanging {
    fn job() -> (Self, impl FnOnce(&Bound<'_, Red>) -> Result<()> + Send + 'static) {
        let ((start, started), (release, released)) = (mpsc::channel(), mpsc::channel());
        let job = move |_: &Bound<'_, Red>| {
            let _ = start.send(());
            // Ends too when the test drops its end.
            let _ = released.recv();
            Ok(())
        };
        (Hanging { started, release }, job)
    }
}

#[test]
fn a_job_that_does_not_return_times_out_and_the_pool_goes_on() {
    let workers = Workers::start(Red::new(0), 1).unwrap();
    let (hanging, job) = Hanging::job();
    give_up(&workers, job);
    hanging.started.recv().unwrap();
    assert_eq!(workers.run(patient(), "test", |_| Ok(7)).unwrap(), 7);
}

/// Runs a hanging job and gives up when it has surely begun.
fn give_up(workers: &Workers<Red>, job: impl FnOnce(&Bound<'_, Red>) -> Result<()> + Send + 'static) {
    let error = workers.run(Deadline::after(Duration::from_millis(250)), "hang", job).unwrap_err();
    assert_eq!((error.kind(), error.op()), (Kind::Timeout, "hang"));
}

#[test]
fn a_replacement_that_hangs_at_binding_is_not_waited_for() {
    let (device, jam) = Red::jammed(0, 1);
    let workers = Workers::start(device.clone(), 1).unwrap();
    let (hanging, job) = Hanging::job();
    let begin = Instant::now();
    give_up(&workers, job);
    assert!(begin.elapsed() < Duration::from_secs(15), "{:?}", begin.elapsed());
    hanging.started.recv().unwrap();
    // The driver comes back to its senses, and so does the pool.
    drop(jam);
    assert_eq!(workers.run(patient(), "test", |_| Ok(7)).unwrap(), 7);
}

#[test]
fn a_replacement_that_fails_does_not_hide_the_timeout_and_is_tried_again() {
    let device = Red::scarce(0, 1);
    let workers = Workers::start(device.clone(), 1).unwrap();
    let (hanging, job) = Hanging::job();
    give_up(&workers, job);
    hanging.started.recv().unwrap();
    device.plenty();
    // The replacement may fail a moment after this call has looked for a vacancy.
    let ran = || workers.run(Deadline::after(Duration::from_millis(100)), "test", |_| Ok(7)).ok();
    assert_eq!((0..300).find_map(|_| ran()), Some(7));
}

#[test]
fn a_worker_goes_on_after_a_hanging_job_where_it_could_not_be_replaced() {
    let device = Red::scarce(0, 1);
    let workers = Workers::start(device.clone(), 1).unwrap();
    let (hanging, job) = Hanging::job();
    give_up(&workers, job);
    // Every replacement fails.
    drop(hanging);
    let ran = || workers.run(Deadline::after(Duration::from_millis(100)), "test", |_| Ok(7)).ok();
    assert_eq!((0..300).find_map(|_| ran()), Some(7));
}

#[test]
fn jobs_given_up_while_queued_cost_no_threads_and_count_as_nothing_lost() {
    let device = Red::new(0);
    let workers = Workers::start(device.clone(), 1).unwrap();
    let (hanging, job) = Hanging::job();
    thread::scope(|scope| {
        let first = scope.spawn(|| workers.run(patient(), "hang", job));
        hanging.started.recv().unwrap();
        for _ in 0..100 {
            let late = workers.run(Deadline::passed(), "late", |_| Ok(())).unwrap_err();
            assert_eq!(late.kind(), Kind::Timeout);
            assert!(!late.to_string().contains("never returned"), "{late}");
        }
        hanging.release.send(()).unwrap();
        first.join().unwrap().unwrap();
    });
    assert_eq!(workers.run(patient(), "test", |_| Ok(7)).unwrap(), 7);
    assert_eq!(device.owned(), 1);
}

#[test]
fn a_job_given_up_while_queued_never_runs() {
    let workers = Workers::start(Red::new(0), 1).unwrap();
    let (hanging, job) = Hanging::job();
    let ran = Arc::new(AtomicBool::new(false));
    thread::scope(|scope| {
        let first = scope.spawn(|| workers.run(patient(), "hang", job));
        hanging.started.recv().unwrap();

        let ran_in_job = Arc::clone(&ran);
        let late = workers.run(Deadline::passed(), "late", move |_| {
            ran_in_job.store(true, Ordering::SeqCst);
            Ok(())
        });
        assert_eq!(late.unwrap_err().kind(), Kind::Timeout);

        hanging.release.send(()).unwrap();
        first.join().unwrap().unwrap();
    });
    // The queue is in order, so the late job has been taken when this one is done.
    workers.run(patient(), "test", |_| Ok(())).unwrap();
    assert!(!ran.load(Ordering::SeqCst));
}

#[test]
fn a_panic_in_a_job_is_an_error_and_its_worker_survives() {
    let workers = Workers::start(Red::new(0), 1).unwrap();
    let on = || workers.run(patient(), "test", |_| Ok(thread::current().id())).unwrap();
    let before = on();
    let error = workers.run(patient(), "panic", |_| -> Result<()> { panic!("in a job") }).unwrap_err();
    assert_eq!((error.kind(), error.op()), (Kind::Driver, "panic"));
    assert_eq!(on(), before);
}

#[test]
fn a_worker_runs_its_own_devices_work_right_there() {
    let workers = Arc::new(Workers::start(Red::new(0), 1).unwrap());
    let inner = Arc::clone(&workers);
    let (outside, inside) = workers
        .run(patient(), "outer", move |_| {
            let here = thread::current().id();
            Ok((here, inner.run(patient(), "inner", |_| Ok(thread::current().id()))?))
        })
        .unwrap();
    assert_eq!(outside, inside);
}

/// Where the work ran, and the stream that was current there.
fn where_it_runs(workers: &Workers<Red>) -> (thread::ThreadId, Stream) {
    let work = |bound: &Bound<'_, Red>| Ok((thread::current().id(), bound.current_stream()));
    workers.bound(patient(), "test", work).unwrap()
}

#[test]
fn work_stays_on_a_thread_that_can_be_given_back() {
    let workers = Workers::start(Red::new(0), 1).unwrap();
    let found = workers.device().with_stream(Stream(7), || where_it_runs(&workers));
    assert_eq!(found, (thread::current().id(), Stream(7)));
    assert_eq!(current(), None);
}

#[test]
fn work_of_a_thread_that_cannot_goes_to_a_worker_with_its_stream() {
    let workers = Workers::start(Red::one_way(0), 1).unwrap();
    let (thread, stream) = workers.device().with_stream(Stream(7), || where_it_runs(&workers));
    assert_ne!(thread, thread::current().id());
    assert_eq!(stream, Stream(7));
    assert_eq!(current(), None);
    // The worker does not keep the name for the next caller.
    assert_eq!(where_it_runs(&workers), (thread, Stream(0)));
}

#[test]
fn named_streams_nest_and_unwind() {
    let (device, other) = (Red::new(0), Red::new(1));
    let named = |device: &Red| device.bind_current().unwrap().current_stream();
    device.with_stream(Stream(1), || {
        let unwound = catch_unwind(AssertUnwindSafe(|| {
            device.with_stream(Stream(2), || {
                assert_eq!((named(&device), named(&other)), (Stream(2), Stream(0)));
                panic!("under a name");
            })
        }));
        assert!(unwound.is_err());
        assert_eq!(named(&device), Stream(1));
    });
    assert_eq!(named(&device), Stream(0));
}

#[test]
fn a_call_runs_bound_from_any_thread_with_the_stream_that_was_named() {
    for (device, elsewhere) in [(Red::new(0), false), (Red::one_way(0), true)] {
        let here = thread::current().id();
        let work = |bound: &Bound<'_, Red>| Ok((thread::current().id(), current(), bound.current_stream()));
        let (ran_on, was, stream) = device.with_stream(Stream(7), || device.bound(work)).unwrap();
        assert_eq!((ran_on != here, was, stream), (elsewhere, Some(device.uuid()), Stream(7)));
        assert_eq!(device.buffer(64).unwrap().region().len, 64);
        assert_eq!(current(), None, "the caller's thread is as it was");
        let panic = catch_unwind(AssertUnwindSafe(|| device.bound(|_| -> Result<()> { panic!("as told") })));
        assert!(panic.is_err());
    }
}

#[test]
fn what_is_attached_to_a_buffer_goes_right_before_its_memory() {
    struct Guard(mpsc::Sender<usize>);
    impl Drop for Guard {
        fn drop(&mut self) {
            self.0.send(freed()).unwrap();
        }
    }
    let (told, tells) = mpsc::channel();
    let mut buffer = Red::new(0).buffer(1).unwrap();
    buffer.keep().attach(Guard(told.clone()));
    buffer.keep().attach(Guard(told));
    assert!(buffer.allocation_mut().is_some(), "it keeps nobody from the memory");
    let keep = buffer.keep();
    drop(buffer);
    assert!(tells.try_recv().is_err(), "the memory is kept");
    drop(keep);
    assert_eq!(tells.iter().collect::<Vec<_>>(), [0, 0]);
    assert_eq!(freed(), 1);
}
