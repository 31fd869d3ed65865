#[path = "../dummy/mod.rs"]
mod dummy;

use dummy::Red;
use hal::{Device, Region};

/// What is current here is not current there.
fn main() -> hal::Result<()> {
    let device = Red::new(0);
    let bound = device.bind_current()?;
    std::thread::scope(|scope| {
        scope.spawn(move || bound.register(Region::host(0, 1)));
    });
    Ok(())
}
