//! What an error says.

use hal::{Deadline, Device, Error, Memory, Region};

use super::{cases, patient};
use crate::fixture::{Fixture, Refuse};

cases! {
    each_error_is_a_full_sentence_that_names_its_operation,
    a_failure_of_queued_work_is_a_full_sentence [QueuedFailure],
    a_number_that_nobody_knows_is_kept [Faults],
}

fn is_a_sentence<D: Device>(f: &dyn Fixture<D>, error: &Error, op: &str) {
    let identity = f.device().identity();
    let text = error.to_string();
    assert_eq!((error.backend(), error.op()), (identity.backend, op));
    assert!(text.starts_with(identity.backend) && text.contains(op), "{text}");
    assert!(text.split_whitespace().count() >= 6, "no sentence: {text}");
    assert!(!text.ends_with([' ', ':']) && !text.contains("  ") && !text.contains(": :"), "{text:?}");
}

fn each_error_is_a_full_sentence_that_names_its_operation<D: Device>(f: &dyn Fixture<D>) {
    let bound = f.device().bind_current().unwrap();
    let memory = bound.allocate(64).unwrap();
    let region = memory.region();
    is_a_sentence(f, &bound.allocate(0).unwrap_err(), "allocate");
    is_a_sentence(f, &bound.allocate(f.too_much()).unwrap_err(), "allocate");
    is_a_sentence(f, &bound.locate(region.addr, 65).unwrap_err(), "locate");
    let short = Region { len: 63, ..region };
    // SAFETY: nothing is copied, since the lengths differ.
    is_a_sentence(f, &unsafe { bound.copy(region, short) }.unwrap_err(), "copy");
    let too_long = Region { len: 65, ..region };
    is_a_sentence(f, &bound.export_ipc(too_long).unwrap_err(), "export_ipc");
    let none = Region { len: 0, ..region };
    is_a_sentence(f, &bound.register(none).unwrap_err(), "register");
    let stream = f.stream();
    f.hold(stream);
    f.queue_fill(stream, region, 1);
    is_a_sentence(f, &bound.sync_stream(stream, Deadline::passed()).unwrap_err(), "sync_stream");
    f.release(stream);
    bound.sync_stream(stream, patient()).unwrap();
}

fn a_failure_of_queued_work_is_a_full_sentence<D: Device>(f: &dyn Fixture<D>) {
    let (bound, stream) = (f.device().bind_current().unwrap(), f.stream());
    f.queue_failure(stream);
    is_a_sentence(f, &bound.sync_stream(stream, patient()).unwrap_err(), "sync_stream");
}

fn a_number_that_nobody_knows_is_kept<D: Device>(f: &dyn Fixture<D>) {
    let bound = f.device().bind_current().unwrap();
    for code in [-77, 31_337, i64::from(i32::MAX)] {
        f.refuse(Refuse::Allocate, 1, code);
        let error = bound.allocate(64).unwrap_err();
        assert_eq!((error.kind(), error.vendor_code()), (hal::Kind::Driver, Some(code)));
        is_a_sentence(f, &error, "allocate");
        assert!(error.to_string().contains(&code.to_string()), "{error}");
    }
    bound.allocate(64).unwrap();
}
