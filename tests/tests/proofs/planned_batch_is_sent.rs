use hal::{Bound, Deadline, Device};
use haulier::{Engine, Mode, Put, Result, arrow::Planned};

/// Handles are exported, and nothing has waited for the streams.
fn send<D: Device>(engine: &dyn Engine<D>, bound: &Bound<'_, D>, batch: &Planned<D>) -> Vec<Result<Put>> {
    engine.put(bound, batch, Mode::Put, Deadline::NEVER, &|_| ())
}

fn main() {}
