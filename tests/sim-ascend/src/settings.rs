//! What the environment says. Tests set it before the first call; it is read once.

use std::{env, path::PathBuf, str::FromStr};

use haulier_sim::settings::{choice, number, text};

/// A mode in which the whole runtime answers the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    /// It works.
    Normal,
    /// Every function answers with this number.
    Always(i32),
}

impl FromStr for Mode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "normal" | "" => Ok(Mode::Normal),
            "unloaded" => Ok(Mode::Always(crate::abi::status::INTERNAL)),
            "unknown" => Ok(Mode::Always(999_999)),
            number => number
                .parse()
                .map(Mode::Always)
                .map_err(|_| "neither normal, unloaded, unknown nor a number".into()),
        }
    }
}

/// A release of CANN.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Cann {
    pub(crate) major: i32,
    pub(crate) minor: i32,
    pub(crate) patch: i32,
}

impl Cann {
    /// As `aclsysGetVersionNum` writes it.
    pub(crate) fn number(self) -> i32 {
        self.major * 10_000_000 + self.minor * 100_000 + self.patch * 1000
    }
}

impl FromStr for Cann {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut parts = text.split('.').map(|part| part.parse().ok().filter(|part| (0..100).contains(part)));
        match (parts.next().flatten(), parts.next().flatten(), parts.next().flatten(), parts.next()) {
            (Some(major), Some(minor), Some(patch), None) => Ok(Cann { major, minor, patch }),
            _ => Err("no release such as 9.0.0".into()),
        }
    }
}

/// The settings, one for each variable.
#[derive(Debug)]
pub(crate) struct Settings {
    pub(crate) devices: u32,
    /// The physical ids of the devices by their logical ids.
    pub(crate) logical: Vec<u32>,
    /// The logical ids of the devices by their user ids.
    pub(crate) visible: Vec<u32>,
    pub(crate) seed: u64,
    pub(crate) memory: usize,
    pub(crate) mode: Mode,
    pub(crate) cann: Cann,
    pub(crate) soc: String,
    pub(crate) faults: String,
    pub(crate) log: Option<PathBuf>,
    pub(crate) unblock: Option<PathBuf>,
    pub(crate) pid_offset: i32,
    pub(crate) peer: bool,
    pub(crate) fabric: bool,
    pub(crate) error_text: bool,
    pub(crate) old_driver: bool,
    pub(crate) register_pinned_only: bool,
    pub(crate) memcpy_batch: bool,
}

impl Settings {
    /// Reads the environment. An error names the variable.
    pub(crate) fn read() -> Result<Self, String> {
        let devices = number("HAULIER_SIM_DEVICES", 2)?;
        let logical = mounted(devices, text("HAULIER_SIM_MOUNTED").as_deref())?;
        let flag = |name, otherwise: bool| number(name, i32::from(otherwise)).map(|number| number != 0);
        Ok(Settings {
            devices,
            visible: visible(logical.len() as u32, text("ASCEND_RT_VISIBLE_DEVICES").as_deref()),
            logical,
            seed: number("HAULIER_SIM_SEED", 0)?,
            memory: number("HAULIER_SIM_MEMORY", 4 << 30)?,
            mode: choice("HAULIER_SIM_MODE", Mode::Normal)?,
            cann: choice("HAULIER_SIM_CANN", Cann { major: 9, minor: 0, patch: 0 })?,
            soc: text("HAULIER_SIM_SOC").unwrap_or_else(|| "Ascend910B3".into()),
            faults: text("HAULIER_SIM_FAULTS").unwrap_or_default(),
            log: env::var_os("HAULIER_SIM_LOG").map(PathBuf::from),
            unblock: env::var_os("HAULIER_SIM_UNBLOCK_FILE").map(PathBuf::from),
            pid_offset: number("HAULIER_SIM_PID_OFFSET", 1_000_000)?,
            peer: flag("HAULIER_SIM_PEER", true)?,
            fabric: flag("HAULIER_SIM_FABRIC", false)?,
            error_text: flag("HAULIER_SIM_ERROR_TEXT", true)?,
            old_driver: flag("HAULIER_SIM_OLD_DRIVER", false)?,
            register_pinned_only: flag("HAULIER_SIM_REGISTER_PINNED_ONLY", false)?,
            memcpy_batch: flag("HAULIER_SIM_MEMCPY_BATCH", true)?,
        })
    }
}

/// Which physical devices the container has, in the order of their logical ids.
fn mounted(devices: u32, list: Option<&str>) -> Result<Vec<u32>, String> {
    let Some(list) = list else { return Ok((0..devices).collect()) };
    let device = |entry: &str| entry.trim().parse().ok().filter(|&device| device < devices);
    let all: Option<Vec<u32>> = list.split(',').map(device).collect();
    all.ok_or_else(|| format!("HAULIER_SIM_MOUNTED={list}: no list of physical devices below {devices}"))
}

/// Which devices `ASCEND_RT_VISIBLE_DEVICES` leaves, in its order. What the runtime makes of nonsense is taken at its
/// harshest: the first entry that names no device ends the list, and a device that is named twice leaves none.
fn visible(devices: u32, list: Option<&str>) -> Vec<u32> {
    let Some(list) = list else { return (0..devices).collect() };
    let mut seen = Vec::new();
    for entry in list.split(',') {
        match entry.trim().parse::<u32>().ok().filter(|&device| device < devices) {
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
        assert_eq!(visible(4, None), [0, 1, 2, 3]);
        assert_eq!(visible(4, Some("2,0")), [2, 0]);
        assert_eq!(visible(4, Some("2,x,0")), [2]);
        assert!(visible(4, Some("")).is_empty() && visible(4, Some("1,1")).is_empty());
    }

    #[test]
    fn mounted_devices_are_physical_ids() {
        assert_eq!(mounted(8, Some("6, 7")), Ok(vec![6, 7]));
        assert!(mounted(2, Some("2")).is_err());
    }

    #[test]
    fn releases_are_numbers() {
        assert_eq!("8.5.1".parse().map(Cann::number), Ok(80_501_000));
        assert_eq!("9.0.0".parse().map(Cann::number), Ok(90_000_000));
        assert!("9.0".parse::<Cann>().is_err() && "9.0.0.1".parse::<Cann>().is_err());
    }
}
