//! Trying the slots again that may succeed later, and only those.

use std::{thread, time::Duration};

use backon::{BackoffBuilder, ExponentialBuilder};
use hal::Deadline;

use crate::error::{Error, Result};

/// Whether the same slot may succeed a moment later without anybody doing anything else.
fn retry_helps<R>(verdict: &Result<R>) -> bool {
    matches!(verdict, Err(Error::ResourceExhausted { .. }))
}

/// Runs `all`, which answers one verdict for each slot, then `some` on those that are still to be done, given by index,
/// until none is retryable or `deadline` leaves no room for another pause. `some` answers one verdict for each index.
pub(crate) fn per_slot<R>(
    deadline: Deadline,
    all: impl FnOnce() -> Vec<Result<R>>,
    mut some: impl FnMut(&[usize]) -> Vec<Result<R>>,
) -> Vec<Result<R>> {
    let mut verdicts = all();
    if !verdicts.iter().any(retry_helps) {
        return verdicts;
    }
    let pauses = ExponentialBuilder::default()
        .with_min_delay(Duration::from_millis(1))
        .with_max_delay(Duration::from_millis(100))
        .without_max_times()
        .with_jitter()
        .build();
    for pause in pauses {
        let again: Vec<usize> = (0..verdicts.len()).filter(|&i| retry_helps(&verdicts[i])).collect();
        if again.is_empty() || deadline.left().is_some_and(|left| left <= pause) {
            break;
        }
        thread::sleep(pause);
        for (i, verdict) in again.iter().zip(some(&again)) {
            verdicts[*i] = verdict;
        }
    }
    verdicts
}

#[cfg(test)]
mod tests {
    use super::*;

    fn busy() -> Error {
        Error::ResourceExhausted { what: "test".into() }
    }

    #[test]
    fn only_retryable_slots_are_tried_again() {
        let mut calls = Vec::new();
        let all = || vec![Ok(0), Err(busy()), Err(Error::NotFound)];
        let verdicts = per_slot(Deadline::after(Duration::from_secs(5)), all, |slots| {
            calls.push(slots.to_vec());
            slots.iter().map(|&i| if calls.len() < 2 { Err(busy()) } else { Ok(i) }).collect()
        });
        assert_eq!(calls, [[1], [1]]);
        assert!(matches!(verdicts[..], [Ok(0), Ok(1), Err(Error::NotFound)]));
    }

    #[test]
    fn the_deadline_ends_the_retries_with_the_last_verdict() {
        let again = || vec![Err::<(), _>(busy())];
        let verdicts = per_slot(Deadline::after(Duration::from_millis(20)), again, |_| again());
        assert!(matches!(verdicts[..], [Err(Error::ResourceExhausted { .. })]));
    }
}
