//! What a node daemon says of itself, and what is left in it when its clients have gone.

use backend_cpu::CpuDevice;
use haulier::{Put, StoreClient};

use crate::{
    process::{Daemon, wait_for},
    world::MIB,
};

/// The sum of the counters of this name that have all of these labels.
///
/// # Panics
/// Where the daemon does not answer.
pub fn counter(client: &StoreClient<CpuDevice>, name: &str, labels: &[&str]) -> u64 {
    let text = client.metrics().expect("the daemon's metrics");
    let rows =
        text.lines().filter(|row| row.starts_with(name) && labels.iter().all(|label| row.contains(label)));
    rows.map(|row| row.rsplit_once(' ').and_then(|(_, value)| value.parse::<u64>().ok()).expect("a counter"))
        .sum()
}

/// A client of a daemon that has no other one any more: nothing is held, granted or imported.
///
/// # Panics
/// Where that does not come to be.
pub fn alone(daemon: &Daemon) -> StoreClient<CpuDevice> {
    let client = daemon.client();
    wait_for("the end of all other sessions", || {
        let left = ["haulier_clients", "haulier_holds", "haulier_grants", "haulier_imports"]
            .map(|name| counter(&client, name, &[]));
        (left == [1, 0, 0, 0]).then_some(())
    });
    client
}

/// All clients have gone, and all of the pool can be had.
///
/// # Panics
/// Where it cannot.
pub fn expect_nothing_is_lost(daemon: &Daemon, pool: u64) {
    let client = alone(daemon);
    client.clear().expect("the daemon's answer");
    let stat = client.stat().expect("the daemon's answer");
    assert_eq!((stat.used, stat.granted), (0, 0), "used and granted");
    let value = vec![7; (pool - MIB) as usize];
    assert_eq!(client.put("nearly the whole pool", &value).ok(), Some(Put::Stored));
}

/// Does something when it is dropped, also by a panic: ends what other threads of a test do until they are told.
pub struct AtTheEnd<F: Fn()>(pub F);

impl<F: Fn()> Drop for AtTheEnd<F> {
    fn drop(&mut self) {
        self.0();
    }
}
