//! Requests that reach into the client's own memory: the node opens it on its thread, which is bound to the client's
//! device, and copies. Where the driver refuses, the slot says so and the client goes by staging.

use std::{io, os::fd::OwnedFd};

use hal::{Deadline, Device, IpcHandle, Place, Region, Token};

use super::{
    answer::{Answer, Room},
    handle::descriptions,
    imports::Imports,
    session::{Session, protocol},
    values::described,
};
use crate::{
    engine::Description,
    error::{Error, Result},
    metrics::{Op, Route},
    shm,
    store::{Mode, Put, check_key},
    wire::{IpcItem, Path, Reply},
};

impl<D: Device> Session<'_, D> {
    pub(super) fn put_ipc(
        &mut self,
        handles: Vec<IpcHandle>,
        items: &[IpcItem<'_>],
        mode: Mode,
        fds: impl Iterator<Item = OwnedFd>,
        answer: Answer<'_>,
    ) -> io::Result<()> {
        let mut offers = match self.offers(handles, items, fds) {
            Ok(offers) => offers,
            Err(e) => return self.refuse(Op::Put, answer, e),
        };
        let mut room = Room::for_slots(items.len());
        let slots = items
            .iter()
            .map(|item| {
                let put = self.copy_in(&mut offers, item, mode);
                self.node.metrics.put(&put, item.len, Path::Ipc);
                room.fit(put)
            })
            .collect();
        self.trim_imports();
        answer.give(Reply::Puts(slots), &[])
    }

    pub(super) fn get_ipc(
        &mut self,
        handles: Vec<IpcHandle>,
        items: &[IpcItem<'_>],
        fds: impl Iterator<Item = OwnedFd>,
        answer: Answer<'_>,
    ) -> io::Result<()> {
        let mut offers = match self.offers(handles, items, fds) {
            Ok(offers) => offers,
            Err(e) => return self.refuse(Op::Get, answer, e),
        };
        let found: Vec<_> = items
            .iter()
            .map(|item| {
                let copied = self.copy_out(&mut offers, item);
                match &copied {
                    Ok(value) => self.node.metrics.got(Route::Ipc, value.len),
                    Err(e) => self.node.metrics.count(Op::Get, Some(Route::Ipc), e.label(), 1),
                }
                copied
            })
            .collect();
        self.trim_imports();
        answer.give(Reply::Gets { slots: descriptions(&found, described) }, &[])
    }

    fn copy_in(&mut self, offers: &mut [Offer], item: &IpcItem<'_>, mode: Mode) -> Result<Put> {
        check_key(item.key)?;
        let offer = offer_of(offers, item)?;
        if self.keeps(item.key, mode) {
            return Ok(Put::AlreadyExists);
        }
        let imports = imports(&mut self.imports)?;
        let from = (item.len > 0).then(|| offer.part(imports, item.offset, item.len)).transpose()?;
        let mut grant = self.writer.reserve(self.values.space(), item.len)?;
        if let Some(from) = from {
            let to = Region::host(grant.as_mut_ptr() as usize, from.len);
            // SAFETY: the import stays open for the whole request, and the grant is ours and as long as `from`. The
            // client promised to leave its memory alone; where it does not, the torn bytes are a value of its own.
            unsafe {
                match from.place {
                    Place::Host => shm::copy_host_in(to, from, Deadline::NEVER)?,
                    Place::Device(_) => imports.bound().copy(to, from)?,
                }
            }
        }
        self.store((grant, item.key, item.len, item.meta), mode)
    }

    /// Copies one value, which is let go again: where values pass through the pool, the next one may need its room.
    fn copy_out(&mut self, offers: &mut [Offer], item: &IpcItem<'_>) -> Result<Description> {
        let offer = offer_of(offers, item)?;
        let object = self.find(&[item.key]).pop().unwrap_or(Err(Error::NotFound))?;
        if object.len() > item.len {
            return Err(Error::TooSmall { need: object.len() });
        }
        if !object.is_empty() {
            let imports = imports(&mut self.imports)?;
            let to = offer.part(imports, item.offset, object.len())?;
            let from = Region::host(object.as_ptr() as usize, to.len);
            // SAFETY: the object is held and never written; the import stays open for the whole request, and what is
            // in it is the client's own.
            unsafe { imports.bound().copy(to, from)? };
        }
        Ok(Description { len: object.len(), meta: object.meta().into() })
    }

    /// Checks the form of the handles and gives each its descriptors.
    fn offers(
        &self,
        handles: Vec<IpcHandle>,
        items: &[IpcItem<'_>],
        mut fds: impl Iterator<Item = OwnedFd>,
    ) -> Result<Vec<Offer>> {
        if self.imports.is_none() {
            return Err(not_negotiated());
        }
        if handles.len() > items.len() {
            return Err(protocol("there are more handles than items"));
        }
        let offers = handles
            .into_iter()
            .map(|handle| {
                let count = match &handle.token {
                    Token::Opaque(_) => 0,
                    Token::Descriptors(lens) => lens.len(),
                };
                let own: Vec<_> = fds.by_ref().take(count).collect();
                if !handle.is_well_formed(own.len()) {
                    return Err(protocol("a handle is not well formed, or its descriptors are missing"));
                }
                Ok(Offer { handle, state: State::Closed(own) })
            })
            .collect::<Result<_>>()?;
        match fds.next() {
            None => Ok(offers),
            Some(_) => Err(protocol("there are more descriptors than the handles name")),
        }
    }

    fn trim_imports(&mut self) {
        if let Some(imports) = &mut self.imports {
            imports.trim();
        }
    }
}

/// A handle of a request; opened when the first item needs it.
struct Offer {
    handle: IpcHandle,
    state: State,
}

enum State {
    Closed(Vec<OwnedFd>),
    Open(Region),
    Refused(Error),
}

impl Offer {
    /// Where a range of the allocation, checked by [`offer_of`], is in this process.
    fn part<D: Device>(&mut self, imports: &mut Imports<'_, D>, offset: u64, len: u64) -> Result<Region> {
        if let State::Closed(fds) = &mut self.state {
            self.state = match imports.open(&self.handle, std::mem::take(fds)) {
                Ok(region) => State::Open(region),
                Err(e) => State::Refused(e),
            };
        }
        let limit = match &self.state {
            State::Open(region) => {
                let range = usize::try_from(offset).ok().zip(usize::try_from(len).ok());
                if let Some(part) = range.and_then(|(offset, len)| region.part(offset, len).ok()) {
                    return Ok(part);
                }
                region.len as u64
            }
            State::Refused(e) => return Err(e.clone()),
            State::Closed(_) => 0,
        };
        // What the driver opened is shorter than its owner said.
        Err(Error::InvalidRange { offset, len, limit })
    }
}

/// The handle of an item, whose range lies in what the handle says that it is for.
fn offer_of<'o>(offers: &'o mut [Offer], item: &IpcItem<'_>) -> Result<&'o mut Offer> {
    let count = offers.len();
    let offer = usize::try_from(item.handle).ok().and_then(|at| offers.get_mut(at));
    let offer =
        offer.ok_or_else(|| Error::InvalidArgument { what: format!("handle {} of {count}", item.handle) })?;
    let limit = offer.handle.len;
    match item.offset.checked_add(item.len) {
        Some(end) if end <= limit => Ok(offer),
        _ => Err(Error::InvalidRange { offset: item.offset, len: item.len, limit }),
    }
}

fn imports<'i, 'd, D: Device>(imports: &'i mut Option<Imports<'d, D>>) -> Result<&'i mut Imports<'d, D>> {
    imports.as_mut().ok_or_else(not_negotiated)
}

fn not_negotiated() -> Error {
    Error::Unsupported { what: "opening the client's memory".into() }
}
