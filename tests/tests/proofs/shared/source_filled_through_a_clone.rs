use std::thread;

use hal::{Buffer, Device};
use haulier::StoreClient;

/// A clone would be the source of a put and the target of a get at once: a data race where the memory is the host's.
fn overwrite<D: Device>(client: &StoreClient<D>, buffer: Buffer<D>) {
    let mut clone = buffer.clone();
    thread::scope(|scope| {
        scope.spawn(|| client.put("k", &buffer));
        scope.spawn(|| client.get_into("other", &mut clone));
    });
}

fn main() {}
