#[path = "../dummy/mod.rs"]
mod dummy;

use dummy::Red;
use hal::Device;

/// A proof restores through its device, so the device is there until then.
fn main() -> hal::Result<()> {
    let device = Red::new(0);
    let bound = device.bind_current()?;
    drop(device);
    drop(bound);
    Ok(())
}
