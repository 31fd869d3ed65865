//! `haulier devices`: what this build and this machine have.

use std::collections::BTreeMap;

use haulier::{
    AnyDevice,
    devices::{Backend, backends},
    hal::{Device, Presence},
};
use serde::Serialize;

use super::{exit::Result, global::Global, output};

/// List every backend: compiled in or not, its library found or not and where it was looked for, its devices
#[derive(Debug, clap::Args)]
pub(crate) struct Args {}

#[derive(Debug, Serialize)]
struct Listed {
    backend: &'static str,
    compiled_in: bool,
    /// `present`, `absent`, `broken`, or `not_compiled_in`.
    state: &'static str,
    library: Option<String>,
    /// Why it is absent or broken.
    why: Option<String>,
    /// The names and paths that were tried, in order, where nothing was found.
    looked: Vec<String>,
    devices: Vec<ListedDevice>,
}

#[derive(Debug, Serialize)]
struct ListedDevice {
    id: u32,
    physical_id: Option<u32>,
    uuid: String,
    name: String,
    caps: BTreeMap<&'static str, bool>,
}

pub(crate) fn run(global: &Global, _: &Args) -> Result<()> {
    let listed: Vec<Listed> = backends().into_iter().map(Listed::from).collect();
    global.output().show(&listed, || text(&listed))
}

impl From<Backend> for Listed {
    fn from(backend: Backend) -> Self {
        let compiled_in = backend.presence.is_some();
        let (state, library, why, looked) = match backend.presence {
            None => {
                let why = format!("this build is without it (cargo feature `{}`)", backend.name);
                ("not_compiled_in", None, Some(why), Vec::new())
            }
            Some(Presence::Present { library }) => ("present", library, None, Vec::new()),
            Some(Presence::Absent { why, looked }) => ("absent", None, Some(why), looked),
            Some(Presence::Broken { library, error }) => {
                ("broken", Some(library), Some(error.to_string()), Vec::new())
            }
        };
        let devices = backend.devices.iter().map(ListedDevice::from).collect();
        Listed { backend: backend.name, compiled_in, state, library, why, looked, devices }
    }
}

impl From<&AnyDevice> for ListedDevice {
    fn from(device: &AnyDevice) -> Self {
        let identity = device.identity();
        ListedDevice {
            id: identity.logical.0,
            physical_id: identity.physical.map(|id| id.0),
            uuid: identity.uuid.to_string(),
            name: identity.name.clone(),
            caps: device.caps().flags().into_iter().collect(),
        }
    }
}

fn text(listed: &[Listed]) -> String {
    let mut backends = output::table(&["BACKEND", "STATE", "DETAIL"]);
    let mut devices = output::table(&["DEVICE", "NAME", "UUID", "CAN"]);
    for backend in listed {
        backends.add_row([backend.backend.to_owned(), backend.state.replace('_', " "), backend.detail()]);
        for device in &backend.devices {
            let can: Vec<&str> = device.caps.iter().filter(|(_, set)| **set).map(|(name, _)| *name).collect();
            devices.add_row([
                format!("{}/{}", backend.backend, device.id),
                device.name.clone(),
                device.uuid.clone(),
                if can.is_empty() { "-".into() } else { can.join(",") },
            ]);
        }
    }
    if devices.is_empty() {
        return backends.trim_fmt();
    }
    format!("{}\n\n{}", backends.trim_fmt(), devices.trim_fmt())
}

impl Listed {
    fn detail(&self) -> String {
        let library = self.library.clone().unwrap_or_else(|| "needs no library".into());
        let mut detail = match (&self.why, self.state) {
            (Some(why), "broken") => format!("{library}: {why}"),
            (Some(why), _) => why.clone(),
            (None, _) => library,
        };
        if !self.looked.is_empty() {
            detail += &format!(" (looked for {})", self.looked.join(", "));
        }
        detail
    }
}

#[cfg(test)]
mod tests {
    use haulier::hal::{Error, Kind};

    use super::*;

    fn listed(presence: Option<Presence>) -> Listed {
        Backend { name: "cuda", presence, devices: Vec::new() }.into()
    }

    #[test]
    fn each_state_says_why() {
        let absent =
            Presence::Absent { why: "no driver".into(), looked: vec!["a.so".into(), "/b.so".into()] };
        let error = Error::new(Kind::NotPresent, "cuda", "open").detail("a stub");
        let broken = Presence::Broken { library: "/lib/a.so".into(), error };
        for (presence, state, detail) in [
            (None, "not_compiled_in", "this build is without it (cargo feature `cuda`)"),
            (Some(absent), "absent", "no driver (looked for a.so, /b.so)"),
            (
                Some(broken),
                "broken",
                "/lib/a.so: cuda open: the backend is not present on this machine: a stub",
            ),
            (Some(Presence::Present { library: Some("/lib/a.so".into()) }), "present", "/lib/a.so"),
            (Some(Presence::Present { library: None }), "present", "needs no library"),
        ] {
            let listed = listed(presence);
            assert_eq!((listed.state, listed.detail().as_str()), (state, detail));
            assert_eq!(listed.compiled_in, state != "not_compiled_in");
        }
    }

    #[test]
    fn the_table_names_every_backend() {
        let text = text(&[listed(None)]);
        let last: Vec<&str> = text.lines().last().unwrap().split_whitespace().collect();
        assert_eq!(last[..4], ["cuda", "not", "compiled", "in"]);
    }
}
