//! Sharing memory with other processes.

use backend_cpu::strict::{MachineOwner, MemoryKind, Op, RepeatImport, StrictDevice, TokenForm, Why};
use hal::{BufferId, Caps, Device, DeviceUuid, Export, Exported, Kind, Memory, NotExportable, Region, Token};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

use crate::{
    builder,
    common::{assert_success, child, is_child, pass, passed},
    machine, of,
};

fn exported(export: Export) -> Exported {
    match export {
        Export::Handle(exported) => exported,
        Export::NotExportable(reason) => panic!("{reason:?}"),
    }
}

/// The child sees the exporter's device 1 alone, as its device 0.
fn childs_machine() -> (MachineOwner, StrictDevice) {
    let machine = builder().seed(7).visible([1]).build().unwrap();
    let device = machine.device(hal::LogicalId(0)).unwrap();
    (machine, device)
}

fn another_process_reads_and_writes(name: &str, token: TokenForm) {
    if is_child() {
        let (machine, device) = childs_machine();
        let bound = device.bind_current().unwrap();
        let (handle, descriptors) = passed();
        let import = bound.import_ipc(&handle, descriptors).unwrap();
        let Region { addr, len, .. } = import.region();
        assert_eq!(len, 10_000);
        assert_eq!(machine.peek(addr + 5_000, 4), Ok(vec![0xab; 4]));
        machine.poke(addr, b"seen").unwrap();
        let again = bound.export_ipc(import.region()).unwrap();
        assert!(matches!(again, Export::NotExportable(NotExportable::Imported)));
        drop(import);
        assert_eq!((machine.open_imports(), machine.drop_failures()), (0, 0));
        return;
    }
    let (machine, _, device) = of(builder().seed(7).token(token));
    let bound = device.bind_current().unwrap();
    let memory = bound.allocate(10_000).unwrap();
    let addr = memory.region().addr;
    machine.poke(addr + 5_000, &[0xab; 4]).unwrap();
    let export = exported(bound.export_ipc(memory.region().part(5_000, 4).unwrap()).unwrap());
    assert_eq!((export.offset, export.len, export.handle.len), (5_000, 4, 10_000));
    assert!(export.handle.is_well_formed(export.descriptors.len()));
    let mut child = child(name);
    pass(&mut child, &export);
    assert_success(child.output().unwrap());
    assert_eq!(machine.peek(addr, 4), Ok(b"seen".to_vec()));
}

#[test]
fn another_process_opens_memory_by_a_descriptor() {
    another_process_reads_and_writes(
        "ipc::another_process_opens_memory_by_a_descriptor",
        TokenForm::Descriptor,
    );
}

#[test]
fn another_process_opens_memory_by_an_opaque_token() {
    another_process_reads_and_writes(
        "ipc::another_process_opens_memory_by_an_opaque_token",
        TokenForm::Opaque,
    );
}

#[test]
fn an_opaque_token_of_freed_memory_is_refused_in_another_process() {
    let name = "ipc::an_opaque_token_of_freed_memory_is_refused_in_another_process";
    if is_child() {
        let (_machine, device) = childs_machine();
        let (handle, descriptors) = passed();
        let e = device.bind_current().unwrap().import_ipc(&handle, descriptors).unwrap_err();
        assert_eq!((e.kind(), e.vendor_code()), (Kind::ImportRefused, Some(205)));
        return;
    }
    let (_machine, _, device) = of(builder().seed(7).token(TokenForm::Opaque));
    let bound = device.bind_current().unwrap();
    let memory = bound.allocate(64).unwrap();
    let export = exported(bound.export_ipc(memory.region()).unwrap());
    drop(memory);
    // Most likely the descriptor's number is in use again, for memory of the same size.
    let _other = bound.allocate(64).unwrap();
    let mut child = child(name);
    pass(&mut child, &export);
    assert_success(child.output().unwrap());
}

#[test]
fn an_interior_pointer_exports_its_whole_allocation() {
    let (_machine, device, _) = machine();
    let bound = device.bind_current().unwrap();
    let memory = bound.allocate(4 << 20).unwrap();
    let tensors = [0, 1 << 20, 3 << 20].map(|offset| memory.region().part(offset, 1 << 20).unwrap());
    let exports = tensors.map(|tensor| exported(bound.export_ipc(tensor).unwrap()));
    assert!(exports.iter().all(|export| export.handle == exports[0].handle));
    assert_eq!(exports.map(|export| export.offset), [0, 1 << 20, 3 << 20]);
}

#[test]
fn memory_without_a_handle_answers_with_the_reason_and_no_call_fails() {
    let (machine, device, _) = of(builder().token(TokenForm::Opaque));
    let bound = device.bind_current().unwrap();
    for (kind, reason) in [
        (MemoryKind::Vmm, NotExportable::NoHandleType),
        (MemoryKind::Pool, NotExportable::Pool),
        (MemoryKind::Managed, NotExportable::Managed),
    ] {
        let memory = StrictDevice::allocate_kind(&bound, 64, kind).unwrap();
        match bound.export_ipc(memory.region()).unwrap() {
            Export::NotExportable(given) => assert_eq!(given, reason),
            Export::Handle(_) => panic!("{kind:?} was exported"),
        }
        assert_eq!(machine.export_opaque(memory.region().addr).unwrap_err().code, 1);
    }
    assert_eq!(machine.log().count(Op::Export), 3, "these three of ours");
    let shareable = StrictDevice::allocate_kind(&bound, 64, MemoryKind::VmmShareable).unwrap();
    let export = exported(bound.export_ipc(shareable.region()).unwrap());
    assert!(matches!(export.handle.token, Token::Descriptors(_)));
    let host = [0u8; 8];
    let export = bound.export_ipc(Region::host(host.as_ptr() as usize, 8)).unwrap();
    assert!(matches!(export, Export::NotExportable(NotExportable::HostMemory)));
}

#[test]
fn exporting_and_closing_need_the_memorys_own_device() {
    let (machine, zero, one) = machine();
    let memory = one.bind_current().unwrap().allocate(64).unwrap();
    let bound = zero.bind_current().unwrap();
    assert_eq!(bound.export_ipc(memory.region()).unwrap_err().kind(), Kind::DeviceMismatch);
    assert_eq!(machine.export_descriptor(memory.region().addr).unwrap_err().why, Why::WrongContext);
    let (import, export) = {
        let bound = one.bind_current().unwrap();
        let export = exported(bound.export_ipc(memory.region()).unwrap());
        let fds = export.descriptors.iter().map(|fd| fd.try_clone().unwrap()).collect();
        (bound.import_ipc(&export.handle, fds).unwrap(), export)
    };
    let e = bound.import_ipc(&export.handle, export.descriptors).unwrap_err();
    assert_eq!(e.kind(), Kind::DeviceMismatch);
    assert_eq!(machine.close_import(import.region().addr).unwrap_err().why, Why::WrongContext);
    machine.log().clear();
    drop(import);
    let close = machine.log().of(Op::CloseImport).remove(0);
    assert_eq!((close.current, close.owner), (Some(1), Some(1)));
    assert_eq!((machine.current(), machine.open_imports(), machine.drop_failures()), (Ok(Some(0)), 0, 0));
}

#[test]
fn a_driver_that_will_not_import_keeps_its_number() {
    let (machine, device, _) = machine();
    let bound = device.bind_current().unwrap();
    let memory = bound.allocate(64).unwrap();
    for code in [205, 1, 507899, 201] {
        let export = exported(bound.export_ipc(memory.region()).unwrap());
        machine.faults().fail(Op::Import, 1, code);
        let e = bound.import_ipc(&export.handle, export.descriptors).unwrap_err();
        assert_eq!((e.kind(), e.vendor_code()), (Kind::ImportRefused, Some(code)));
    }
}

#[test]
fn opening_twice_is_counted_or_refused_as_the_machine_was_built() {
    for rule in [RepeatImport::Counted, RepeatImport::Refused] {
        let (machine, device, _) = of(builder().repeat_import(rule).token(TokenForm::Opaque));
        let bound = device.bind_current().unwrap();
        let memory = bound.allocate(64).unwrap();
        let handle = exported(bound.export_ipc(memory.region()).unwrap()).handle;
        let first = bound.import_ipc(&handle, vec![]).unwrap();
        match (rule, bound.import_ipc(&handle, vec![])) {
            (RepeatImport::Counted, Ok(second)) => {
                assert_eq!(second.region(), first.region());
                drop(first);
                assert_eq!(machine.peek(second.region().addr, 1), Ok(vec![0]));
                drop(second);
            }
            (RepeatImport::Refused, Err(e)) => {
                assert_eq!((e.kind(), e.vendor_code()), (Kind::ImportRefused, Some(208)));
                drop(first);
            }
            (_, outcome) => panic!("{outcome:?}"),
        }
        assert_eq!((machine.open_imports(), machine.drop_failures()), (0, 0));
    }
}

#[test]
fn a_process_can_be_kept_from_opening_its_own_handles() {
    for token in [TokenForm::Descriptor, TokenForm::Opaque] {
        let (_machine, device, _) = of(builder().token(token).refuse_own_process_import());
        let bound = device.bind_current().unwrap();
        let memory = bound.allocate(64).unwrap();
        let export = exported(bound.export_ipc(memory.region()).unwrap());
        let e = bound.import_ipc(&export.handle, export.descriptors).unwrap_err();
        assert_eq!((e.kind(), e.vendor_code()), (Kind::ImportRefused, Some(201)));
    }
}

#[test]
fn memory_that_is_freed_while_imported_stays_readable() {
    let (machine, device, _) = machine();
    let bound = device.bind_current().unwrap();
    let memory = bound.allocate(64).unwrap();
    machine.poke(memory.region().addr, &[5; 64]).unwrap();
    let export = exported(bound.export_ipc(memory.region()).unwrap());
    let import = bound.import_ipc(&export.handle, export.descriptors).unwrap();
    drop(memory);
    assert_eq!(machine.peek(import.region().addr, 64), Ok(vec![5; 64]));
    assert_eq!(machine.free(import.region().addr).unwrap_err().why, Why::InvalidValue);
}

#[test]
fn what_a_hostile_peer_sends_is_refused() {
    let (machine, device, _) = machine();
    let bound = device.bind_current().unwrap();
    let memory = bound.allocate(4096).unwrap();
    let memfd = |len: u64, seals: SealFlags| {
        let fd = memfd_create("peer", MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&fd, len).unwrap();
        fcntl_add_seals(&fd, seals).unwrap();
        fd
    };
    let good = exported(bound.export_ipc(memory.region()).unwrap()).handle;
    for fd in [memfd(4096, SealFlags::empty()), memfd(100, SealFlags::SHRINK), memfd(8192, SealFlags::SHRINK)]
    {
        let e = bound.import_ipc(&good, vec![fd]).unwrap_err();
        assert_eq!(e.kind(), Kind::ImportRefused);
    }
    let opaque = |bytes: Vec<u8>| hal::IpcHandle { token: Token::Opaque(bytes), ..good.clone() };
    for handle in [opaque(vec![1]), opaque(vec![0xff; 32]), opaque(vec![0; 64]), opaque(vec![])] {
        assert!(bound.import_ipc(&handle, vec![]).is_err());
    }
    let other = hal::IpcHandle { device: DeviceUuid([1; 16]), buffer: BufferId(1), ..good };
    let e = bound.import_ipc(&other, vec![memfd(4096, SealFlags::SHRINK)]).unwrap_err();
    assert_eq!(e.kind(), Kind::DeviceMismatch);
    assert_eq!(machine.open_imports(), 0);
}

#[test]
fn an_opaque_handle_that_lies_about_its_length_is_refused_and_closed() {
    let (machine, device, _) = of(builder().token(TokenForm::Opaque));
    let bound = device.bind_current().unwrap();
    let memory = bound.allocate(4096).unwrap();
    let mut handle = exported(bound.export_ipc(memory.region()).unwrap()).handle;
    handle.len = 1 << 30;
    let e = bound.import_ipc(&handle, vec![]).unwrap_err();
    assert_eq!((e.kind(), machine.open_imports()), (Kind::ImportRefused, 0));
}

#[test]
fn a_capability_that_is_clear_answers_unsupported() {
    let (machine, device, _) = of(builder().caps(Caps::default()));
    let bound = device.bind_current().unwrap();
    let memory = bound.allocate(64).unwrap();
    let handle = hal::IpcHandle {
        device: device.identity().uuid,
        buffer: BufferId(1),
        exporter: 1,
        len: 64,
        token: Token::Opaque(vec![0; 32]),
    };
    for refused in [
        bound.export_ipc(memory.region()).map(drop),
        bound.import_ipc(&handle, vec![]).map(drop),
        bound.register(memory.region()).map(drop),
        bound.register(Region::host(0x1000, 64)).map(drop),
    ] {
        assert_eq!(refused.unwrap_err().kind(), Kind::Unsupported);
    }
    let made = [Op::Export, Op::Import, Op::Register].map(|op| machine.log().count(op));
    assert_eq!(made, [0; 3]);
}
