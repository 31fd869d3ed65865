//! Devices by their three numbers, and what is known of them without a context.

use std::ffi::{CString, c_char};

use haulier_sim::log::About;

use crate::{
    abi::{Answer, Out, Text, refused, runtime, status},
    gate,
    sim::Sim,
};

impl Sim {
    /// The machine's number for a user device id.
    pub(crate) fn device(&self, device: i32) -> Answer<u32> {
        let count = self.settings.visible.len();
        match u32::try_from(device).ok().filter(|&device| (device as usize) < count) {
            Some(device) => Ok(device),
            None => refused(status::DEVICE, format!("no device {device} among {count}")),
        }
    }

    fn place(&self, list: &[u32], of: i32) -> Answer<i32> {
        match list.iter().position(|&id| i64::from(id) == i64::from(of)) {
            Some(at) => Ok(at as i32),
            None => refused(status::DEVICE, format!("no device has the id {of} here")),
        }
    }

    fn at(&self, list: &[u32], of: i32) -> Answer<i32> {
        match usize::try_from(of).ok().and_then(|at| list.get(at)) {
            Some(id) => Ok(id.cast_signed()),
            None => refused(status::DEVICE, format!("no device has the id {of} here")),
        }
    }

    /// The pid that other processes' whitelists mean: not the one that a process in a container has of itself.
    pub(crate) fn bare_pid(&self) -> i32 {
        std::process::id().cast_signed().saturating_add(self.settings.pid_offset)
    }
}

runtime! {
    fn aclrtGetDeviceCount(count: Out<u32>) [About::Nothing] |sim| count.set(sim.machine()?.device_count());
    fn aclrtGetLogicDevIdByUserDevId(user: i32, logic: Out<i32>) [About::Device(user)] |sim| {
        logic.set(sim.at(&sim.settings.visible, user)?)
    };
    fn aclrtGetUserDevIdByLogicDevId(logic: i32, user: Out<i32>) [About::Nothing] |sim| {
        user.set(sim.place(&sim.settings.visible, logic)?)
    };
    fn aclrtGetPhyDevIdByLogicDevId(logic: i32, physical: Out<i32>) [About::Nothing] |sim| {
        physical.set(sim.at(&sim.settings.logical, logic)?)
    };
    fn aclrtGetLogicDevIdByPhyDevId(physical: i32, logic: Out<i32>) [About::Nothing] |sim| {
        logic.set(sim.place(&sim.settings.logical, physical)?)
    };
    fn aclrtDeviceGetBareTgid(pid: Out<i32>) [About::Nothing] |sim| pid.set(sim.bare_pid());
    fn aclrtDeviceCanAccessPeer(can: Out<i32>, device: i32, peer: i32) [About::Device(device)] |sim| {
        let differ = sim.device(device)? != sim.device(peer)?;
        can.set(i32::from(differ && sim.settings.peer))
    };
    fn aclsysGetVersionNum(package: Text, version: Out<i32>) [About::Nothing] |sim| {
        match package.get()?.as_str() {
            "runtime" => version.set(sim.settings.cann.number()),
            other => refused(status::INVALID_PARAM, format!("no package {other}")),
        }
    };
    fn aclrtGetVersion(major: Out<i32>, minor: Out<i32>, patch: Out<i32>) [About::Nothing] |sim| {
        // The interface's version, not the release's.
        major.set(1)?;
        minor.set(if sim.is_9() { 17 } else { 16 })?;
        patch.set(0)
    };
}

#[unsafe(no_mangle)]
extern "C" fn aclrtGetSocName() -> *const c_char {
    use std::sync::OnceLock;
    static NAME: OnceLock<CString> = OnceLock::new();
    let mut name = std::ptr::null();
    gate::enter("aclrtGetSocName", About::Nothing, |sim| {
        sim.machine()?;
        let text = || CString::new(sim.settings.soc.clone()).unwrap_or_default();
        name = NAME.get_or_init(text).as_ptr();
        Ok(())
    });
    name
}
