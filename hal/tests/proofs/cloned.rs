#[path = "../dummy/mod.rs"]
mod dummy;

use dummy::Red;
use hal::Device;

/// A copy could outlive the moment in which the device was current.
fn main() -> hal::Result<()> {
    let device = Red::new(0);
    let bound = device.bind_current()?;
    let again = bound.clone();
    drop((bound, again));
    Ok(())
}
