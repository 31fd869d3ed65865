#[path = "../dummy/mod.rs"]
mod dummy;

use dummy::Red;
use hal::{Device, Region};

/// A reference crosses threads no more than the proof itself.
fn main() -> hal::Result<()> {
    let device = Red::new(0);
    let bound = device.bind_current()?;
    std::thread::scope(|scope| {
        scope.spawn(|| bound.register(Region::host(0, 1)));
    });
    Ok(())
}
