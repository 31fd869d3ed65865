use backend_cpu::CpuDevice;
use haulier::{Payload, StoreClient};

/// A payload borrows its source until the put has returned.
fn overwrite(client: &StoreClient<CpuDevice>) -> haulier::Result<haulier::Put> {
    let mut source = vec![1u8; 4096];
    let payload = Payload::from(&source);
    source[0] = 2;
    client.put("k", payload)
}

fn main() {}
