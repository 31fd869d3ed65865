#[path = "../dummy/mod.rs"]
mod dummy;

use dummy::Red;
use hal::Device;

/// Bound for no longer than the statement, so what follows would run unbound.
#[deny(unused_must_use)]
fn main() -> hal::Result<()> {
    let device = Red::new(0);
    device.bind_current()?;
    Ok(())
}
