use std::thread;

use backend_cpu::CpuDevice;
use hal::Buffer;
use haulier::StoreClient;

/// A shared reference gives no way to write what a put reads.
fn overwrite(client: &StoreClient<CpuDevice>, buffer: &Buffer<CpuDevice>) {
    thread::scope(|scope| {
        scope.spawn(|| client.put("k", buffer));
        scope.spawn(|| buffer.allocation().write(0, &[1]));
    });
}

fn main() {}
