use backend_cpu::CpuDevice;
use haulier::{StoreClient, Target};

/// A target belongs to the get until it has returned.
fn read(client: &StoreClient<CpuDevice>) -> haulier::Result<u64> {
    let mut bytes = vec![0u8; 4096];
    let target = Target::from(&mut bytes);
    let first = bytes[0];
    let len = client.get_into("k", target)?;
    Ok(len + u64::from(first))
}

fn main() {}
