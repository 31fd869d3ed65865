//! Payloads of the Ascend backend that are not ready when they are put, on simulated runtimes as of CANN 9 and of CANN
//! 8.5: the client in one process, the node in another. No NPU takes part.

use haulier_tests::{
    ascend::{Runtime, alone, misplaced},
    proof::Ascend,
    simulated::readiness,
};

const PEER: &str = env!("CARGO_BIN_EXE_haulier-peer");

haulier_tests::readiness_matrix!(Ascend, alone, || {
    let wrong = misplaced();
    assert!(wrong.is_empty(), "{wrong:?}");
});

#[test]
fn a_failed_synchronisation_sends_nothing_and_says_so_in_every_slot() {
    alone(&[], || readiness::a_failed_synchronisation::<Runtime>(PEER));
}

#[test]
fn a_failed_check_sends_nothing_and_says_so_in_every_slot() {
    alone(&[], || readiness::a_failed_check::<Runtime>(PEER));
}

#[test]
fn an_export_that_fails_for_one_item_sends_nothing_and_says_so_in_every_slot() {
    alone(&[], || readiness::an_export_that_fails_for_one_item::<Runtime>(PEER));
}

#[test]
fn a_node_that_dies_between_export_and_send_leaves_no_key_and_every_slot_told() {
    alone(&[], || readiness::a_node_that_dies_between_export_and_send::<Runtime>(PEER));
}

#[test]
fn two_streams_over_eight_payloads_are_waited_for_once_each() {
    alone(&[], || readiness::two_streams_over_eight_payloads::<Runtime>(PEER));
}
