//! What the environment says. Tests set it before the first call; it is read once.

use std::{env, path::PathBuf, str::FromStr};

use haulier_sim::settings::{choice, number, text};

/// A mode in which the whole driver answers the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    /// It works.
    Normal,
    /// `cuInit` says that there is no device, and nothing else works.
    NoDevice,
    /// Every function answers with this number.
    Always(i32),
}

impl FromStr for Mode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "normal" | "" => Ok(Mode::Normal),
            "no-device" => Ok(Mode::NoDevice),
            "stub" => Ok(Mode::Always(crate::abi::status::STUB_LIBRARY)),
            "unloaded" => Ok(Mode::Always(crate::abi::status::DEINITIALIZED)),
            "unknown" => Ok(Mode::Always(9999)),
            number => number
                .parse()
                .map(Mode::Always)
                .map_err(|_| "neither normal, no-device, stub, unloaded, unknown nor a number".into()),
        }
    }
}

/// The settings, one for each variable.
#[derive(Debug)]
pub(crate) struct Settings {
    pub(crate) devices: u32,
    pub(crate) visible: Vec<u32>,
    pub(crate) seed: u64,
    pub(crate) memory: usize,
    pub(crate) mode: Mode,
    pub(crate) faults: String,
    pub(crate) driver_version: i32,
    pub(crate) log: Option<PathBuf>,
    pub(crate) unblock: Option<PathBuf>,
    pub(crate) register_max: usize,
    pub(crate) register_alignment: usize,
    pub(crate) register_pages: bool,
    pub(crate) pointer_query_anywhere: bool,
    pub(crate) unbound_event_aborts: bool,
    pub(crate) peer: bool,
    /// Device attributes that differ from the simulator's own.
    pub(crate) attributes: Vec<(i32, i32)>,
}

impl Settings {
    /// Reads the environment. An error names the variable.
    pub(crate) fn read() -> Result<Self, String> {
        let devices = number("HAULIER_SIM_DEVICES", 2)?;
        let seed = number("HAULIER_SIM_SEED", 0)?;
        Ok(Settings {
            devices,
            visible: visible(devices, seed, text("CUDA_VISIBLE_DEVICES").as_deref()),
            seed,
            memory: number("HAULIER_SIM_MEMORY", 4 << 30)?,
            mode: choice("HAULIER_SIM_MODE", Mode::Normal)?,
            faults: text("HAULIER_SIM_FAULTS").unwrap_or_default(),
            driver_version: number("HAULIER_SIM_DRIVER_VERSION", 12080)?,
            log: env::var_os("HAULIER_SIM_LOG").map(PathBuf::from),
            unblock: env::var_os("HAULIER_SIM_UNBLOCK_FILE").map(PathBuf::from),
            register_max: number("HAULIER_SIM_REGISTER_MAX", usize::MAX)?,
            register_alignment: number("HAULIER_SIM_REGISTER_ALIGN", 1)?,
            register_pages: number("HAULIER_SIM_REGISTER_PAGES", 0)? != 0,
            pointer_query_anywhere: number("HAULIER_SIM_POINTER_QUERY_ANYWHERE", 0)? != 0,
            unbound_event_aborts: number("HAULIER_SIM_UNBOUND_EVENT_ABORTS", 1)? != 0,
            peer: number("HAULIER_SIM_PEER", 0)? != 0,
            attributes: pairs("HAULIER_SIM_ATTRIBUTES")?,
        })
    }
}

fn pairs(name: &str) -> Result<Vec<(i32, i32)>, String> {
    let value = text(name).unwrap_or_default();
    let pair = |pair: &str| {
        let (attribute, value) = pair.split_once('=')?;
        Some((attribute.trim().parse().ok()?, value.trim().parse().ok()?))
    };
    value
        .split(',')
        .filter(|part| !part.trim().is_empty())
        .map(|part| pair(part).ok_or_else(|| format!("{name}: {part} is not ATTRIBUTE=VALUE")))
        .collect()
}

/// Which devices `CUDA_VISIBLE_DEVICES` leaves, in its order. As with the driver the first entry that names no device
/// ends the list, and a device that is named twice leaves none.
fn visible(devices: u32, seed: u64, list: Option<&str>) -> Vec<u32> {
    let Some(list) = list else { return (0..devices).collect() };
    let mut seen = Vec::new();
    for entry in list.split(',').map(str::trim) {
        let by_uuid = || {
            let known =
                |device: &u32| format!("GPU-{}", crate::device::uuid_of(seed, *device)).starts_with(entry);
            let mut found = (0..devices).filter(known);
            found.next().filter(|_| entry.len() > 4 && found.next().is_none())
        };
        let device = match entry.parse::<u32>() {
            Ok(ordinal) => Some(ordinal).filter(|&ordinal| ordinal < devices),
            Err(_) => by_uuid(),
        };
        match device {
            Some(device) if seen.contains(&device) => return Vec::new(),
            Some(device) => seen.push(device),
            None => break,
        }
    }
    seen
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn visible_devices_are_remapped_and_the_list_ends_at_nonsense() {
        assert_eq!(visible(4, 0, None), [0, 1, 2, 3]);
        assert_eq!(visible(4, 0, Some("2,0")), [2, 0]);
        assert_eq!(visible(4, 0, Some("2,-1,0")), [2]);
        assert!(visible(4, 0, Some("")).is_empty() && visible(4, 0, Some("4,0")).is_empty());
        assert!(visible(4, 0, Some("1,1")).is_empty());
        let uuid = format!("GPU-{}", crate::device::uuid_of(7, 3));
        assert_eq!(visible(4, 7, Some(&format!("{uuid},1"))), [3, 1]);
    }

    #[test]
    fn modes_by_name_and_by_number() {
        assert_eq!("unloaded".parse(), Ok(Mode::Always(4)));
        assert_eq!("803".parse(), Ok(Mode::Always(803)));
        assert!("nonsense".parse::<Mode>().is_err());
    }
}
