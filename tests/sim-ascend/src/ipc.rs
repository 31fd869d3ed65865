//! Ordinary device memory that other processes open by a key.

use std::{
    collections::{HashMap, hash_map::Entry},
    ffi::c_char,
};

use backend_cpu::strict::{MemoryKind, Residence};
use haulier_sim::log::About;
use parking_lot::Mutex;

use crate::{
    abi::{Answer, In, Out, Text, null, refused, runtime, status},
    memory::PAGE,
    record::{Place, Record},
    sim::{Sim, address},
};

/// Bytes of a key with its nul, which is what callers have to pass.
const KEY: usize = 65;
/// Exported for everybody; imported with access to another device.
const FLAG: u64 = 1;
/// Pids that one call can add.
const PIDS: usize = 31;
const MAGIC: u32 = u32::from_le_bytes(*b"HSA1");

/// The exports and imports of a process.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    /// By the allocation's base.
    exports: Mutex<HashMap<usize, Export>>,
    /// By key.
    imports: Mutex<HashMap<String, Import>>,
}

#[derive(Debug)]
struct Export {
    device: u32,
    flags: u64,
    key: String,
    record: Record,
}

#[derive(Debug, Clone, Copy)]
struct Import {
    base: usize,
    count: u64,
    device: u32,
    foreign: bool,
}

impl Shared {
    /// Whether what is imported there is another device's memory.
    pub(crate) fn is_foreign(&self, base: usize) -> bool {
        self.imports.lock().values().any(|import| import.base == base && import.foreign)
    }

    /// Freed memory is exported no longer.
    pub(crate) fn freed(&self, base: usize) {
        self.exports.lock().remove(&base);
    }

    /// Nor is that of a device that is reset.
    pub(crate) fn forget(&self, device: u32) {
        self.exports.lock().retain(|_, export| export.device != device);
        self.imports.lock().retain(|_, import| import.device != device);
    }
}

/// 32 bytes in hex: where the export's record is.
fn key_of(place: Place) -> String {
    let mut bytes = [0u8; 32];
    bytes[..4].copy_from_slice(&MAGIC.to_le_bytes());
    bytes[4..8].copy_from_slice(&place.pid.to_le_bytes());
    bytes[8..12].copy_from_slice(&place.fd.to_le_bytes());
    bytes[12..20].copy_from_slice(&place.inode.to_le_bytes());
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn place_of(key: &str) -> Answer<Place> {
    let nibbles: Option<Vec<u8>> = key.chars().map(|digit| Some(digit.to_digit(16)? as u8)).collect();
    let bytes: Vec<u8> =
        nibbles.unwrap_or_default().chunks(2).map(|pair| pair[0] << 4 | pair[pair.len() - 1]).collect();
    let number = |at: usize, len: usize| {
        bytes[at..at + len].iter().rev().fold(0u64, |number, &byte| number << 8 | u64::from(byte))
    };
    if key.len() != KEY - 1 || bytes.len() != 32 || number(0, 4) != u64::from(MAGIC) {
        return refused(status::PARAMETER, "no key of this runtime's");
    }
    Ok(Place { pid: number(4, 4) as u32, fd: number(8, 4) as u32, inode: number(12, 8) })
}

fn import(sim: &Sim, key: &str, flags: u64) -> Answer<usize> {
    let (_, device) = sim.context()?;
    if flags > FLAG {
        return refused(status::PARAMETER, format!("flags {flags:#x}"));
    }
    let place = place_of(key)?;
    let mut imports = sim.shared.imports.lock();
    if imports.get(key).is_some_and(|open| open.device != device) {
        return refused(status::DRIVER, "the key is open already, on another device");
    }
    let found = place.read(sim.settings.seed, sim.bare_pid(), |inode| inode == place.inode)?;
    let machine = sim.machine()?;
    let foreign = found.physical != machine.physical(device)?;
    if foreign && (flags != FLAG || !sim.settings.peer) {
        return refused(
            status::PARAMETER,
            "the memory is another device's, to which no access was asked for or is had",
        );
    }
    let base = machine.import_opaque(&found.content)?;
    imports.entry(key.into()).or_insert(Import { base, count: 0, device, foreign }).count += 1;
    Ok(base)
}

runtime! {
    fn aclrtIpcMemGetExportKey(pointer: u64, bytes: usize, key: Out<c_char>, len: usize, flags: u64)
        [About::Address(pointer)] |sim| {
        sim.context()?;
        if pointer == 0 || key.is_null() {
            return null("a null pointer");
        }
        if len != KEY || flags > FLAG || bytes == 0 {
            return refused(status::PARAMETER, format!("{bytes} bytes, a key of {len}, flags {flags:#x}"));
        }
        let base = address(pointer)?;
        let machine = sim.machine()?;
        let known = machine.attributes(base)?;
        let ordinary = matches!(known.residence, Residence::Device(_, MemoryKind::Normal));
        if !ordinary || known.base != base || !base.is_multiple_of(PAGE) || bytes > known.len {
            let what = known.residence;
            return refused(status::PARAMETER, format!("{bytes} bytes at {base:#x} are no whole block of pages: {what:?}"));
        }
        let shared = machine.export_opaque(base)?;
        let mut exports = sim.shared.exports.lock();
        let export = match exports.entry(base) {
            Entry::Occupied(before) => before.into_mut(),
            Entry::Vacant(new) => {
                let physical = machine.physical(shared.device)?;
                let record = Record::new(sim.settings.seed, physical, flags == FLAG, &shared.token)?;
                new.insert(Export { device: shared.device, flags, key: key_of(record.place()?), record })
            }
        };
        if export.flags != flags {
            return refused(status::PARAMETER, "exported before, with other flags");
        }
        let bytes = export.key.bytes().chain([0]).map(|byte| byte as c_char);
        key.set_all(&bytes.collect::<Vec<_>>())
    };
    fn aclrtIpcMemSetImportPid(key: Text, pids: In<i32>, count: usize) [About::Nothing] |sim| {
        sim.context()?;
        let key = key.get()?;
        if !(1..=PIDS).contains(&count) {
            return refused(status::PARAMETER, format!("{count} pids"));
        }
        match sim.shared.exports.lock().values().find(|export| export.key == key) {
            Some(export) => export.record.allow(&pids.get_all(count)?),
            None => refused(status::PARAMETER, "the key is no export of this process's"),
        }
    };
    fn aclrtIpcMemImportByKey(out: Out<u64>, key: Text, flags: u64) [About::Nothing] |sim| {
        if out.is_null() {
            return null("a null result pointer");
        }
        out.set(import(sim, &key.get()?, flags)? as u64)
    };
    fn aclrtIpcMemClose(key: Text) [About::Nothing] |sim| {
        sim.context()?;
        let key = key.get()?;
        let mut imports = sim.shared.imports.lock();
        if let Some(open) = imports.get_mut(&key) {
            sim.machine()?.close_import(open.base)?;
            open.count -= 1;
            if open.count == 0 {
                imports.remove(&key);
            }
            return Ok(());
        }
        let mut exports = sim.shared.exports.lock();
        let before = exports.len();
        exports.retain(|_, export| export.key != key);
        if exports.len() == before {
            return refused(status::PARAMETER, "the key is neither an import nor an export of this process's");
        }
        Ok(())
    };
}
