#[path = "../dummy/mod.rs"]
mod dummy;

use dummy::{Blue, Red};
use hal::{Device, Region};

/// A proof carries its device's type.
fn main() -> hal::Result<()> {
    let device = Red::new(0);
    let bound = device.bind_current()?;
    Blue::register(&bound, Region::host(0, 1))?;
    Ok(())
}
