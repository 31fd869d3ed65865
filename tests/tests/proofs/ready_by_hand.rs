use hal::Device;
use haulier::arrow::Ready;

/// Only step 4 makes one.
fn forge<D: Device>() -> Ready<D> {
    Ready { slots: Vec::new(), handles: Vec::new() }
}

fn main() {}
