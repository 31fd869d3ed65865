//! Sharing memory with another process.

use std::os::fd::{AsFd, OwnedFd};

use hal::{
    Bound, Device, DeviceExt, Export, Exported, IpcHandle, Kind, Memory, NotExportable, Region, Token,
};
use serde::{Deserialize, Serialize};

use super::{cases, pattern, peer_as, read, write};
use crate::{fixture::Fixture, peer::Link};

cases! {
    an_export_names_the_allocation_with_offset_and_length_beside,
    regions_of_one_allocation_have_equal_handles,
    two_allocations_have_different_handles,
    heap_memory_cannot_be_exported_and_says_why [ForeignPointers],
    memory_without_a_handle_cannot_be_exported_and_says_why [Unshareable],
    a_region_that_leaves_its_allocation_is_not_exported,
    memory_of_another_device_is_not_exported [SecondDevice],
    another_process_reads_and_writes_exported_memory,
    imported_memory_cannot_be_exported_again,
    a_closed_import_can_be_opened_again,
    a_handle_of_another_device_is_refused,
    a_garbage_handle_is_refused,
    a_handle_with_another_length_is_refused,
    a_handle_without_its_descriptors_is_refused,
}

/// A peer that opens what it is sent.
pub(super) const ROLE: &str = "import";

#[derive(Debug, Serialize, Deserialize)]
enum Ask {
    /// Open the handle, read `len` bytes from `offset` on, then set them to `fill`.
    Open { handle: IpcHandle, offset: u64, len: u64, fill: u8 },
    /// Close what is open.
    Close,
}

#[derive(Debug, Serialize, Deserialize)]
enum Told {
    Opened { bytes: Vec<u8>, exported_again: String },
    Refused { kind: Kind, text: String },
    Closed,
}

/// What the peer does.
pub(super) fn serve<D: Device>(f: &dyn Fixture<D>, link: &Link) {
    let bound = f.device().bind_current().unwrap();
    let mut open = Vec::new();
    while let Some((ask, descriptors)) = link.receive::<Ask>() {
        let told = match ask {
            Ask::Close => {
                open.clear();
                Told::Closed
            }
            Ask::Open { handle, offset, len, fill } => match bound.import_ipc(&handle, descriptors) {
                Err(e) => Told::Refused { kind: e.kind(), text: e.to_string() },
                Ok(import) => {
                    let part = import.region().part(offset as usize, len as usize).unwrap();
                    let bytes = read(&bound, part);
                    write(&bound, part, &vec![fill; len as usize]);
                    let exported_again = match bound.export_ipc(import.region()) {
                        Ok(Export::NotExportable(why)) => why.label().to_owned(),
                        Ok(Export::Handle(_)) => "a handle".into(),
                        Err(e) => e.to_string(),
                    };
                    open.push(import);
                    Told::Opened { bytes, exported_again }
                }
            },
        };
        link.send(&told, &[]);
    }
}

fn handle_of<D: Device>(bound: &Bound<'_, D>, region: Region) -> Exported {
    match bound.export_ipc(region).unwrap() {
        Export::Handle(exported) => exported,
        Export::NotExportable(why) => panic!("not exportable: {why:?}"),
    }
}

fn reason_of<D: Device>(bound: &Bound<'_, D>, region: Region) -> NotExportable {
    match bound.export_ipc(region).unwrap() {
        Export::NotExportable(why) => why,
        Export::Handle(exported) => panic!("exported: {exported:?}"),
    }
}

fn an_export_names_the_allocation_with_offset_and_length_beside<D: Device>(f: &dyn Fixture<D>) {
    let bound = f.device().bind_current().unwrap();
    let memory = bound.allocate(8192).unwrap();
    let region = memory.region();
    let Exported { handle, descriptors, offset, len } = handle_of(&bound, region.part(4100, 77).unwrap());
    assert_eq!((offset, len), (4100, 77));
    assert_eq!((handle.device, handle.len), (f.device().identity().uuid, 8192));
    assert_eq!(handle.exporter, std::process::id());
    let buffer = bound.locate(region.addr, 1).unwrap().allocation.expect("allocated").buffer;
    assert_eq!(handle.buffer, buffer);
    assert!(handle.is_well_formed(descriptors.len()));
}

fn regions_of_one_allocation_have_equal_handles<D: Device>(f: &dyn Fixture<D>) {
    let bound = f.device().bind_current().unwrap();
    let memory = bound.allocate(8192).unwrap();
    let whole = handle_of(&bound, memory.region());
    for (offset, len) in [(0, 1), (1, 4096), (8191, 1)] {
        let part = handle_of(&bound, memory.region().part(offset, len).unwrap());
        assert_eq!(part.handle, whole.handle);
        assert_eq!((part.offset, part.len), (offset as u64, len as u64));
    }
}

fn two_allocations_have_different_handles<D: Device>(f: &dyn Fixture<D>) {
    let bound = f.device().bind_current().unwrap();
    let (a, b) = (bound.allocate(4096).unwrap(), bound.allocate(4096).unwrap());
    assert_ne!(handle_of(&bound, a.region()).handle, handle_of(&bound, b.region()).handle);
}

fn heap_memory_cannot_be_exported_and_says_why<D: Device>(f: &dyn Fixture<D>) {
    let bound = f.device().bind_current().unwrap();
    let heap = vec![0u8; 4096];
    let region = Region::host(heap.as_ptr().expose_provenance(), heap.len());
    assert_eq!(reason_of(&bound, region), NotExportable::HostMemory);
}

fn memory_without_a_handle_cannot_be_exported_and_says_why<D: Device>(f: &dyn Fixture<D>) {
    let regions = f.unshareable();
    assert!(!regions.is_empty());
    let bound = f.device().bind_current().unwrap();
    for (region, why) in regions {
        assert_eq!(reason_of(&bound, region), why);
        assert_eq!(reason_of(&bound, region.part(1, 1).unwrap()), why);
    }
}

fn a_region_that_leaves_its_allocation_is_not_exported<D: Device>(f: &dyn Fixture<D>) {
    let bound = f.device().bind_current().unwrap();
    let memory = bound.allocate(4096).unwrap();
    let too_long = Region { len: 4097, ..memory.region() };
    assert_eq!(bound.export_ipc(too_long).map(drop).unwrap_err().kind(), Kind::InvalidRange);
}

fn memory_of_another_device_is_not_exported<D: Device>(f: &dyn Fixture<D>) {
    let theirs = f.second().buffer(4096).unwrap();
    let bound = f.device().bind_current().unwrap();
    assert_eq!(bound.export_ipc(theirs.region()).map(drop).unwrap_err().kind(), Kind::DeviceMismatch);
}

fn send(link: &Link, ask: &Ask, descriptors: &[OwnedFd]) -> Told {
    let descriptors: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
    link.send(ask, &descriptors);
    link.expect()
}

fn another_process_reads_and_writes_exported_memory<D: Device>(f: &dyn Fixture<D>) {
    let bound = f.device().bind_current().unwrap();
    let memory = bound.allocate(10_000).unwrap();
    let bytes = pattern(1, 10_000);
    write(&bound, memory.region(), &bytes);
    let peer = peer_as(ROLE);
    // The second time it has the allocation open already.
    for (offset, len, fill) in [(0, 4096, 1), (5000, 3000, 2)] {
        let Exported { handle, descriptors, offset, len } =
            handle_of(&bound, memory.region().part(offset, len).unwrap());
        let told = send(peer.link(), &Ask::Open { handle, offset, len, fill }, &descriptors);
        let Told::Opened { bytes: there, .. } = told else { panic!("{told:?}") };
        assert!(there == bytes[offset as usize..][..len as usize]);
    }
    let here = read(&bound, memory.region());
    assert!(here[..4096].iter().all(|byte| *byte == 1) && here[5000..8000].iter().all(|byte| *byte == 2));
    assert!(here[4096..5000] == bytes[4096..5000] && here[8000..] == bytes[8000..]);
}

fn imported_memory_cannot_be_exported_again<D: Device>(f: &dyn Fixture<D>) {
    let bound = f.device().bind_current().unwrap();
    let memory = bound.allocate(4096).unwrap();
    let peer = peer_as(ROLE);
    let Exported { handle, descriptors, .. } = handle_of(&bound, memory.region());
    let told = send(peer.link(), &Ask::Open { handle, offset: 0, len: 1, fill: 0 }, &descriptors);
    let Told::Opened { exported_again, .. } = told else { panic!("{told:?}") };
    assert_eq!(exported_again, NotExportable::Imported.label());
}

fn a_closed_import_can_be_opened_again<D: Device>(f: &dyn Fixture<D>) {
    let bound = f.device().bind_current().unwrap();
    let memory = bound.allocate(4096).unwrap();
    let peer = peer_as(ROLE);
    for byte in [3, 4, 5] {
        write(&bound, memory.region(), &[byte; 4096]);
        let Exported { handle, descriptors, .. } = handle_of(&bound, memory.region());
        let told = send(peer.link(), &Ask::Open { handle, offset: 0, len: 2, fill: 0 }, &descriptors);
        assert!(matches!(told, Told::Opened { ref bytes, .. } if *bytes == [byte; 2]), "{told:?}");
        assert!(matches!(send(peer.link(), &Ask::Close, &[]), Told::Closed));
    }
}

/// What the peer says to a handle that was tampered with.
fn refusal<D: Device>(
    f: &dyn Fixture<D>,
    tamper: impl FnOnce(&mut IpcHandle, &mut Vec<OwnedFd>),
) -> (Kind, String) {
    let bound = f.device().bind_current().unwrap();
    let memory = bound.allocate(8192).unwrap();
    let Exported { mut handle, mut descriptors, .. } = handle_of(&bound, memory.region());
    tamper(&mut handle, &mut descriptors);
    let peer = peer_as(ROLE);
    match send(peer.link(), &Ask::Open { handle, offset: 0, len: 1, fill: 0 }, &descriptors) {
        Told::Refused { kind, text } => (kind, text),
        told => panic!("{told:?}"),
    }
}

fn a_handle_of_another_device_is_refused<D: Device>(f: &dyn Fixture<D>) {
    let (kind, text) = refusal(f, |handle, _| handle.device.0[3] ^= 1);
    assert_eq!(kind, Kind::DeviceMismatch, "{text}");
    assert!(text.contains(&f.device().identity().uuid.to_string()), "{text}");
}

fn a_garbage_handle_is_refused<D: Device>(f: &dyn Fixture<D>) {
    let (kind, text) = refusal(f, |handle, descriptors| {
        descriptors.clear();
        handle.token = Token::Opaque(vec![0xa5; 64]);
    });
    assert_eq!(kind, Kind::ImportRefused, "{text}");
    let (kind, text) = refusal(f, |handle, descriptors| {
        // A file that is no memory.
        *descriptors = vec![std::fs::File::open("/proc/self/exe").unwrap().into()];
        handle.token = Token::Descriptors(vec![handle.len]);
    });
    assert_eq!(kind, Kind::ImportRefused, "{text}");
}

fn a_handle_with_another_length_is_refused<D: Device>(f: &dyn Fixture<D>) {
    let (kind, text) = refusal(f, |handle, _| {
        handle.len += 4096;
        if let Token::Descriptors(lens) = &mut handle.token {
            lens[0] += 4096;
        }
    });
    assert_eq!(kind, Kind::ImportRefused, "{text}");
}

fn a_handle_without_its_descriptors_is_refused<D: Device>(f: &dyn Fixture<D>) {
    let (kind, text) = refusal(f, |handle, descriptors| {
        descriptors.clear();
        handle.token = Token::Descriptors(vec![handle.len]);
    });
    assert_eq!(kind, Kind::ImportRefused, "{text}");
}
