use hal::Device;
use haulier::StoreClient;

/// Others can see the value now, so its writer has let go of it.
fn write<D: Device>(client: &StoreClient<D>) -> haulier::Result<()> {
    let mut buffer = client.alloc(4096)?;
    client.put_allocated("k", buffer)?;
    buffer[0] = 1;
    Ok(())
}

fn main() {}
