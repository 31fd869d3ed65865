//! Cutting batches into messages: a message and the answer to it must fit their limits.

use std::os::fd::{AsFd, BorrowedFd};

use hal::{Device, IpcHandle, Token};

use crate::{
    arrow::{Handle, Ready, Route},
    store::META_MAX,
    wire::{IpcItem, MESSAGE_DESCRIPTORS_MAX, MESSAGE_MAX, SLOTS_MAX},
};

/// The most items whose answers say no more than a verdict.
pub(super) const VERDICTS: usize = SLOTS_MAX;
/// The most items whose answers may hold a description, or an error of a driver, which is about as long.
pub(super) const DESCRIPTIONS: usize = MESSAGE_MAX / (META_MAX + 64);

/// What the parts of a request need beside its items.
const FRAME: usize = 64;
/// What an item needs beside its key and description: a few numbers.
const ITEM: usize = 40;
/// What a handle needs beside its token.
const HANDLE: usize = 48;

/// What something takes of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Cost {
    bytes: usize,
    descriptors: usize,
}

impl Cost {
    /// An item with this key and description.
    pub(super) fn item(key: &str, meta: &[u8]) -> Self {
        Cost { bytes: ITEM + key.len() + meta.len(), descriptors: 0 }
    }

    fn handle(handle: &Handle) -> Self {
        let token = match &handle.handle.token {
            Token::Opaque(bytes) => bytes.len(),
            Token::Descriptors(lens) => 10 * lens.len(),
        };
        Cost { bytes: HANDLE + token, descriptors: handle.descriptors.len() }
    }

    fn plus(self, other: Cost) -> Self {
        Cost { bytes: self.bytes + other.bytes, descriptors: self.descriptors + other.descriptors }
    }
}

/// How many items from the first on fit one message, `most` at most. At least one where there is any: one alone fits,
/// or is refused for itself when it is sent.
pub(super) fn first<T: Copy>(items: &[T], most: usize, mut cost: impl FnMut(T) -> Cost) -> usize {
    let mut sum = Cost { bytes: FRAME, descriptors: 0 };
    let fit = items.iter().take(most).take_while(|item| {
        sum = sum.plus(cost(**item));
        sum.bytes <= MESSAGE_MAX && sum.descriptors <= MESSAGE_DESCRIPTORS_MAX
    });
    fit.count().max(1).min(items.len())
}

/// The slots that go into one message by IPC, from the first on; handles that they share count once.
pub(super) fn first_ipc<D: Device>(batch: &Ready<D>, slots: &[usize]) -> usize {
    let mut seen: Vec<usize> = Vec::new();
    first(slots, DESCRIPTIONS, |i| {
        let slot = &batch.slots()[i];
        let item = Cost::item(slot.key(), slot.meta());
        match slot.route() {
            Route::Ipc { handle, .. } if !seen.contains(&handle) => {
                seen.push(handle);
                item.plus(Cost::handle(&batch.handles()[handle]))
            }
            _ => item,
        }
    })
}

/// What a message by IPC consists of.
#[derive(Debug)]
pub(super) struct IpcMessage<'a> {
    pub(super) handles: Vec<IpcHandle>,
    pub(super) items: Vec<IpcItem<'a>>,
    pub(super) descriptors: Vec<BorrowedFd<'a>>,
}

impl<'a> IpcMessage<'a> {
    /// The message for these slots of `batch`, which all go by IPC.
    pub(super) fn of<D: Device>(batch: &'a Ready<D>, slots: &[usize]) -> Self {
        // Handles are counted anew in each message.
        let mut sent: Vec<usize> = Vec::new();
        let mut items = Vec::with_capacity(slots.len());
        for slot in slots.iter().map(|&i| &batch.slots()[i]) {
            let Route::Ipc { handle, offset } = slot.route() else { continue };
            let at = sent.iter().position(|&other| other == handle).unwrap_or_else(|| {
                sent.push(handle);
                sent.len() - 1
            });
            items.push(IpcItem {
                key: slot.key(),
                meta: slot.meta(),
                handle: at as u64,
                offset,
                len: slot.region().len as u64,
            });
        }
        let sent = sent.iter().map(|&handle| &batch.handles()[handle]);
        IpcMessage {
            handles: sent.clone().map(|handle| handle.handle.clone()).collect(),
            items,
            descriptors: sent.flat_map(|handle| &handle.descriptors).map(AsFd::as_fd).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::KEY_MAX;

    fn runs(costs: &[Cost], most: usize) -> Vec<usize> {
        let mut rest = costs;
        let mut runs = Vec::new();
        while !rest.is_empty() {
            runs.push(first(rest, most, |cost| cost));
            rest = &rest[runs[runs.len() - 1]..];
        }
        runs
    }

    #[test]
    fn a_batch_is_cut_by_bytes_by_descriptors_and_by_count() {
        let long = Cost::item(&"k".repeat(KEY_MAX), &[0; META_MAX]);
        let fit = (MESSAGE_MAX - FRAME) / long.bytes;
        assert_eq!(runs(&vec![long; 2 * fit + 1], VERDICTS), [fit, fit, 1]);
        assert_eq!(runs(&[Cost { bytes: 1, descriptors: 128 }; 3], VERDICTS), [1, 1, 1]);
        assert_eq!(runs(&[Cost { bytes: 1, descriptors: 120 }; 3], VERDICTS), [2, 1]);
        assert_eq!(runs(&[Cost::item("k", &[]); 10], 4), [4, 4, 2]);
    }

    #[test]
    fn one_item_always_makes_a_message_and_none_makes_none() {
        assert_eq!(first(&[Cost { bytes: MESSAGE_MAX + 1, descriptors: 0 }], VERDICTS, |cost| cost), 1);
        assert_eq!(first(&[], VERDICTS, |cost: Cost| cost), 0);
    }

    #[test]
    fn what_is_cut_to_fit_does_fit() {
        use crate::{
            store::Mode,
            wire::{CommitItem, Frame, Path, Request},
        };
        let (key, meta) = ("k".repeat(200), [7; 30]);
        let slots = vec![(); 4096];
        let n = first(&slots, usize::MAX, |()| Cost::item(&key, &meta));
        let item = || CommitItem { grant: u64::MAX, key: &key, meta: &meta, len: u64::MAX, path: Path::Ipc };
        let items = (0..n).map(|_| item()).collect();
        let request = Request::Commit { items, mode: Mode::Put, ahead: u64::MAX };
        let bytes = postcard::to_stdvec(&Frame { id: u64::MAX, request }).unwrap();
        assert!(bytes.len() <= MESSAGE_MAX && bytes.len() > MESSAGE_MAX * 4 / 5, "{}", bytes.len());
    }
}
