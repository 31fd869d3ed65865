use std::thread;

use hal::{Buffer, Device};
use haulier::StoreClient;

/// So does device memory: it cannot be the source of a put and the target of a get at once.
fn overwrite<D: Device>(client: &StoreClient<D>, mut buffer: Buffer<D>) {
    thread::scope(|scope| {
        scope.spawn(|| client.put("k", &buffer));
        scope.spawn(|| client.get_into("other", &mut buffer));
    });
}

fn main() {}
