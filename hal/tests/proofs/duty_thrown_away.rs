#[path = "../dummy/mod.rs"]
mod dummy;

use dummy::Red;
use hal::Device;

/// The thread would never be given back as it was.
fn main() -> hal::Result<()> {
    let device = Red::new(0);
    drop(device.bind_current()?.into_previous());
    Ok(())
}
