use hal::{Bound, Deadline, Device};
use haulier::{Description, Engine, Result, arrow::Captured};

/// A destination, too, must be ready: queued work may still read it.
fn fill<D: Device>(
    engine: &dyn Engine<D>,
    bound: &Bound<'_, D>,
    batch: &Captured<D>,
) -> Vec<Result<Description>> {
    engine.get_into(bound, batch, Deadline::NEVER, &|_| ())
}

fn main() {}
