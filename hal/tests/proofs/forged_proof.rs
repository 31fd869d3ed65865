#[path = "../dummy/mod.rs"]
mod dummy;

use dummy::Red;
use hal::{Bound, Region};

/// Only a backend may say that a device is current, and it takes the blame with `unsafe`.
fn main() {
    let device = Red::new(0);
    let _ = Bound::new(&device, None).register(Region::host(0, 1));
}
