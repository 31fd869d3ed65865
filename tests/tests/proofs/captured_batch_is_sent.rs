use hal::{Bound, Deadline, Device};
use haulier::{Engine, Mode, Put, Result, arrow::Captured};

/// Streams are known, and nothing has waited for them.
fn send<D: Device>(engine: &dyn Engine<D>, bound: &Bound<'_, D>, batch: &Captured<D>) -> Vec<Result<Put>> {
    engine.put(bound, batch, Mode::Put, Deadline::NEVER, &|_| ())
}

fn main() {}
