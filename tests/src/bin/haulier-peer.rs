//! The other processes of the device cases: each plays one role, told by its environment.

use std::{cell::RefCell, path::PathBuf};

use backend_cpu::strict::{MachineOwner, StrictDevice};
use hal::{Buffer, Device, DeviceUuid, LogicalId};
use haulier::{Error, Options, Registered, StoreClient};
use haulier_tests::{
    ascend, cuda,
    peer::{self, Link},
    rig::{filled, machine},
    simulated::{self, Simulated},
};
use serde::{Deserialize, Serialize};

fn main() {
    let (role, link) = peer::role().expect("started by a test");
    match role.as_str() {
        "client" => client(&link),
        "exits" => exits(&link),
        cuda::Driver::NODE => simulated::serve::<cuda::Driver>(&link),
        cuda::Driver::CLIENT => simulated::client::<cuda::Driver>(&link),
        ascend::Runtime::NODE => simulated::serve::<ascend::Runtime>(&link),
        ascend::Runtime::CLIENT => simulated::client::<ascend::Runtime>(&link),
        other => panic!("there is no role {other}"),
    }
}

/// What a client is to do.
#[derive(Debug, Serialize, Deserialize)]
struct Setup {
    socket: PathBuf,
    devices: u32,
    visible: Option<Vec<u32>>,
    logical: u32,
}

/// One thing that the test asks of a client.
#[derive(Debug, Serialize, Deserialize)]
enum Ask {
    Put { key: String, byte: u8, len: usize },
    Get { key: String, len: usize },
}

fn open(link: &Link) -> (MachineOwner, StoreClient<StrictDevice>) {
    let Setup { socket, devices, visible, logical } = link.expect();
    let rules = machine(devices);
    let rules = match visible {
        Some(visible) => rules.visible(visible),
        None => rules,
    };
    let machine = rules.build().expect("a machine");
    let device = machine.device(LogicalId(logical)).expect("the device is visible");
    let client = StoreClient::connect(device, socket, Options::default()).expect("the node serves");
    (machine, client)
}

/// Puts and gets as it is told, until it is killed or the test ends.
fn client(link: &Link) {
    let (machine, client) = open(link);
    link.send(&client.device().identity().uuid, &[]);
    let mut kept: Vec<Buffer<StrictDevice>> = Vec::new();
    while let Some((ask, _)) = link.receive::<Ask>() {
        match ask {
            Ask::Put { key, byte, len } => {
                let buffer = filled(client.device(), &vec![byte; len]);
                let put = client.put(&key, &buffer).map(drop).map_err(|e| e.to_string());
                kept.push(buffer);
                link.send(&put, &[]);
            }
            Ask::Get { key, len } => {
                let mut buffer = filled(client.device(), &vec![0; len]);
                let got = client.get_into(&key, &mut buffer).map_err(|e| e.to_string());
                let bytes = machine.peek(buffer.region().addr, len).expect("it is allocated");
                let first: Option<u8> = bytes.first().copied().filter(|byte| bytes.iter().all(|b| b == byte));
                link.send(&(got, first), &[]);
            }
        }
    }
}

thread_local! {
    /// Dropped when the main thread ends, after the driver is gone.
    static LAST: RefCell<Vec<Kept>> = const { RefCell::new(Vec::new()) };
}

/// What an application may still hold at its end.
#[allow(dead_code, reason = "held only to be dropped")]
struct Kept {
    registered: Registered<'static, StrictDevice>,
    buffer: &'static Buffer<StrictDevice>,
    client: StoreClient<StrictDevice>,
    machine: MachineOwner,
}

/// Ends with the driver unloaded before what still uses it.
fn exits(link: &Link) {
    let (machine, client) = open(link);
    let _: DeviceUuid = client.device().identity().uuid;
    // As a static of the program has it: never freed.
    let buffer: &'static Buffer<StrictDevice> = Box::leak(Box::new(filled(client.device(), &[1; 4096])));
    let registered = client.register_buffer(buffer).expect("it registers");
    client.put("k", buffer).expect("it puts");
    machine.shut_down();
    // Calls made this late answer, too.
    let late = client.put("late", buffer);
    let unloaded = |e: &Error| match e {
        Error::Device(e) => e.kind() == hal::Kind::ShutDown,
        Error::NotSent { cause } => matches!(&**cause, Error::Device(e) if e.kind() == hal::Kind::ShutDown),
        _ => false,
    };
    let answer = match &late {
        Err(e) if unloaded(e) => "shut down".to_owned(),
        other => format!("{other:?}"),
    };
    LAST.with_borrow_mut(|last| last.push(Kept { registered, buffer, client, machine }));
    link.send(&answer, &[]);
}
