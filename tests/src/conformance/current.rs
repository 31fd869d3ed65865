//! Which device is current on a thread, and that a thread gets back what it had.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Barrier,
    thread,
};

use hal::{Device, Kind, Result, Workers};

use super::{cases, on_thread, patient};
use crate::fixture::{Fixture, Refuse};

cases! {
    bind_makes_the_device_current [CurrentDevice],
    dropping_a_proof_gives_a_thread_back_that_had_none [CurrentDevice, Unbind],
    dropping_a_proof_restores_another_device [CurrentDevice, SecondDevice],
    nested_proofs_restore_in_order [CurrentDevice, SecondDevice],
    an_error_while_bound_restores [CurrentDevice],
    a_panic_while_bound_restores [CurrentDevice],
    binding_what_is_current_switches_nothing [Switches],
    a_refused_bind_is_an_error_and_binds_nothing [CurrentDevice, SecondDevice, Faults],
    an_outer_proof_does_no_work_under_another_device [SecondDevice],
    an_owned_thread_stays_bound [CurrentDevice],
    threads_do_not_disturb_each_other [CurrentDevice, SecondDevice],
    every_worker_works_on_the_device,
    a_thread_that_cannot_be_given_back_says_so [OneWay],
    work_of_such_a_thread_goes_to_a_worker [OneWay],
}

fn bind_makes_the_device_current<D: Device>(f: &dyn Fixture<D>) {
    let bound = f.device().bind_current().unwrap();
    assert_eq!(f.current(), Some(f.device().identity().uuid));
    drop(bound);
}

fn dropping_a_proof_gives_a_thread_back_that_had_none<D: Device>(f: &dyn Fixture<D>) {
    assert_eq!(f.current(), None);
    drop(f.device().bind_current().unwrap());
    assert_eq!(f.current(), None);
}

fn dropping_a_proof_restores_another_device<D: Device>(f: &dyn Fixture<D>) {
    let second = f.second();
    let _outer = second.bind_current().unwrap();
    drop(f.device().bind_current().unwrap());
    assert_eq!(f.current(), Some(second.identity().uuid));
}

fn nested_proofs_restore_in_order<D: Device>(f: &dyn Fixture<D>) {
    let before = f.current();
    let (first, second) = (f.device().clone(), f.second());
    let outer = first.bind_current().unwrap();
    let middle = second.bind_current().unwrap();
    let inner = first.bind_current().unwrap();
    assert_eq!(f.current(), Some(first.identity().uuid));
    drop(inner);
    assert_eq!(f.current(), Some(second.identity().uuid));
    drop(middle);
    assert_eq!(f.current(), Some(first.identity().uuid));
    drop(outer);
    assert_eq!(f.current(), before);
}

fn an_error_while_bound_restores<D: Device>(f: &dyn Fixture<D>) {
    fn fails<D: Device>(device: &D) -> Result<()> {
        let bound = device.bind_current()?;
        bound.allocate(0)?;
        Ok(())
    }
    let before = f.current();
    assert_eq!(fails(f.device()).unwrap_err().kind(), Kind::InvalidArgument);
    assert_eq!(f.current(), before);
}

fn a_panic_while_bound_restores<D: Device>(f: &dyn Fixture<D>) {
    let before = f.current();
    let unwound = catch_unwind(AssertUnwindSafe(|| {
        let _bound = f.device().bind_current().unwrap();
        std::panic::resume_unwind(Box::new("while bound"));
    }));
    assert!(unwound.is_err());
    assert_eq!(f.current(), before);
}

fn binding_what_is_current_switches_nothing<D: Device>(f: &dyn Fixture<D>) {
    let outer = f.device().bind_current().unwrap();
    let before = f.switches();
    for _ in 0..3 {
        drop(f.device().bind_current().unwrap());
    }
    assert_eq!(f.switches(), before);
    // And it is still current.
    outer.allocate(64).unwrap();
}

fn a_refused_bind_is_an_error_and_binds_nothing<D: Device>(f: &dyn Fixture<D>) {
    let second = f.second();
    let _outer = second.bind_current().unwrap();
    f.refuse(Refuse::Bind, 1, 4242);
    let error = f.device().bind_current().unwrap_err();
    assert_eq!((error.vendor_code(), error.op()), (Some(4242), "bind_current"));
    assert_eq!(f.current(), Some(second.identity().uuid));
    f.refuse(Refuse::Bind, 1, 4242);
    let on_a_worker = Workers::start(f.device().clone(), 1).map(drop).unwrap_err();
    assert_eq!(on_a_worker.vendor_code(), Some(4242));
}

fn an_outer_proof_does_no_work_under_another_device<D: Device>(f: &dyn Fixture<D>) {
    let second = f.second();
    let outer = f.device().bind_current().unwrap();
    {
        let _inner = second.bind_current().unwrap();
        assert_eq!(outer.allocate(64).map(drop).unwrap_err().kind(), Kind::NotBound);
    }
    outer.allocate(64).unwrap();
}

fn an_owned_thread_stays_bound<D: Device>(f: &dyn Fixture<D>) {
    let uuid = f.device().identity().uuid;
    thread::scope(|scope| {
        scope.spawn(|| {
            let bound = f.device().bind_owned_thread().unwrap();
            assert_eq!(f.current(), Some(uuid));
            bound.allocate(64).unwrap();
            assert_eq!(f.current(), Some(uuid));
        });
    });
}

fn threads_do_not_disturb_each_other<D: Device>(f: &dyn Fixture<D>) {
    let devices = [f.device().clone(), f.second()];
    let together = Barrier::new(8);
    thread::scope(|scope| {
        for i in 0..8 {
            let (device, together) = (&devices[i % 2], &together);
            scope.spawn(move || {
                f.enter();
                together.wait();
                for _ in 0..200 {
                    let bound = device.bind_current().unwrap();
                    assert_eq!(f.current(), Some(device.identity().uuid));
                    bound.allocate(64).unwrap();
                }
            });
        }
    });
}

fn every_worker_works_on_the_device<D: Device>(f: &dyn Fixture<D>) {
    let workers = Workers::start(f.device().clone(), 4).unwrap();
    let together = std::sync::Arc::new(Barrier::new(4));
    let bases = thread::scope(|scope| {
        let callers: Vec<_> = (0..4)
            .map(|_| {
                let (workers, together) = (&workers, std::sync::Arc::clone(&together));
                scope.spawn(move || {
                    let work = move |bound: &hal::Bound<'_, D>| {
                        // Each job waits for the others, so each has a worker of its own.
                        together.wait();
                        bound.allocate(4096)
                    };
                    workers.run(patient(), "allocate", work).unwrap()
                })
            })
            .collect();
        callers.into_iter().map(|caller| caller.join().unwrap()).collect::<Vec<_>>()
    });
    let bound = f.device().bind_current().unwrap();
    for allocation in &bases {
        let region = hal::Memory::region(allocation);
        assert_eq!(bound.locate(region.addr, region.len).unwrap().region, region);
    }
}

fn a_thread_that_cannot_be_given_back_says_so<D: Device>(f: &dyn Fixture<D>) {
    // A thread that has not been entered.
    thread::scope(|scope| {
        scope.spawn(|| {
            let error = f.device().bind_current().map(drop).unwrap_err();
            assert_eq!(error.kind(), Kind::CannotRestore);
            assert_eq!(f.current(), None, "and nothing was changed");
        });
    });
}

fn work_of_such_a_thread_goes_to_a_worker<D: Device>(f: &dyn Fixture<D>) {
    let workers = Workers::start(f.device().clone(), 1).unwrap();
    let ran_on = |workers: &Workers<D>| {
        workers.bound(patient(), "test", |bound| {
            bound.allocate(64)?;
            Ok(thread::current().id())
        })
    };
    thread::scope(|scope| {
        scope.spawn(|| {
            assert_ne!(ran_on(&workers).unwrap(), thread::current().id());
            assert_eq!(f.current(), None);
        });
    });
    // A thread that has a device is given back as it was, so the work stays there.
    on_thread(f, || {
        let before = f.current();
        assert_eq!(ran_on(&workers).unwrap(), thread::current().id());
        assert_eq!(f.current(), before);
    });
}
