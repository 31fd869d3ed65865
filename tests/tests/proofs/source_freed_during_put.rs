use backend_cpu::CpuDevice;
use haulier::{Payload, StoreClient};

/// Nor can it be freed.
fn free(client: &StoreClient<CpuDevice>) -> haulier::Result<haulier::Put> {
    let source = vec![1u8; 4096];
    let payload = Payload::from(&source);
    drop(source);
    client.put("k", payload)
}

fn main() {}
