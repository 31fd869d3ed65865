#[path = "../dummy/mod.rs"]
mod dummy;

use dummy::Red;
use hal::{Device, Region};

/// A worker holds the device, which is not the proof that it is current there.
fn main() {
    let device = Red::new(0);
    std::thread::spawn(move || Red::register(&device, Region::host(0, 1)));
}
