use hal::{Bound, Deadline, Device};
use haulier::{Engine, Mode, Put, Result, arrow::Checked};

/// The devices agree, and nothing has waited for the streams.
fn send<D: Device>(engine: &dyn Engine<D>, bound: &Bound<'_, D>, batch: &Checked<D>) -> Vec<Result<Put>> {
    engine.put(bound, batch, Mode::Put, Deadline::NEVER, &|_| ())
}

fn main() {}
