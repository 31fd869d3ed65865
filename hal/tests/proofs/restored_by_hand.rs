#[path = "../dummy/mod.rs"]
mod dummy;

use dummy::Red;
use hal::{Device, Region};

/// It would take the device away under the proof.
fn main() -> hal::Result<()> {
    let device = Red::new(0);
    let bound = device.bind_current()?;
    device.restore(None);
    bound.register(Region::host(0, 1))?;
    Ok(())
}
