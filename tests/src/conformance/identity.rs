//! Who a device is, here and in another process.

use hal::{Device, DeviceUuid};

use super::{cases, peer_as};
use crate::{fixture::Fixture, peer::Link};

cases! {
    the_uuid_is_the_same_in_another_process,
    two_devices_have_two_uuids [SecondDevice],
    a_clone_is_the_same_device,
    it_prints_as_backend_and_logical_id,
}

/// A peer that tells its device's UUID.
pub(super) const ROLE: &str = "identity";

/// What the peer does.
pub(super) fn serve<D: Device>(f: &dyn Fixture<D>, link: &Link) {
    link.send(&f.device().identity().uuid, &[]);
}

fn the_uuid_is_the_same_in_another_process<D: Device>(f: &dyn Fixture<D>) {
    let there: DeviceUuid = peer_as(ROLE).link().expect();
    assert_eq!(there, f.device().identity().uuid);
}

fn two_devices_have_two_uuids<D: Device>(f: &dyn Fixture<D>) {
    let (first, second) = (f.device().clone(), f.second());
    assert_ne!(first.identity().uuid, second.identity().uuid);
    assert_ne!(first.identity().logical, second.identity().logical);
}

fn a_clone_is_the_same_device<D: Device>(f: &dyn Fixture<D>) {
    let clone = f.device().clone();
    assert_eq!(clone.identity(), f.device().identity());
    let _outer = f.device().bind_current().unwrap();
    // Bound once is bound for every clone.
    clone.bind_current().unwrap().allocate(64).unwrap();
}

fn it_prints_as_backend_and_logical_id<D: Device>(f: &dyn Fixture<D>) {
    let identity = f.device().identity();
    assert_eq!(identity.to_string(), format!("{}/{}", identity.backend, identity.logical.0));
    assert!(!identity.name.is_empty());
}
