//! The proof on a machine with the hardware: one program, `haulier-proof`, that holds all it needs, so that a machine
//! without a toolchain or a network can run it.
//!
//! | part | what it shows |
//! |---|---|
//! | conformance | the suite of [`conformance`](crate::conformance) on the backend |
//! | [`readiness`] | {one payload, eight} x {pending, ready} x {IPC, staging}, twenty puts each, through a node |
//! | [`speed`] | put and get_into beside the driver's plain copy, and what waiting for a ready stream costs |
//!
//! A backend is added with one implementation of [`Backend`] and one line in [`main`]. The program says where it ran, and
//! takes a simulated driver only where it is told to.

use std::{
    env,
    path::{Path, PathBuf},
    process::ExitCode,
    time::Instant,
};

use hal::{Device, Region};
use haulier::{
    Options, StoreClient,
    node::{Node, NodeConfig},
    store::{Config, Store},
};
use libtest_mimic::Arguments;
use serde::{Deserialize, Serialize};
use tempfile::TempDir;

use crate::{
    conformance::Suite,
    fixture::Fixture,
    peer::{self, Link, Peer},
    rig::counter,
};

mod ascend;
mod cpu;
mod cuda;
pub mod readiness;
pub mod speed;

pub use self::{ascend::Ascend, cuda::Cuda};

/// What a proof runs on.
#[derive(Debug)]
pub struct Found {
    /// How many devices there are.
    pub devices: u32,
    /// Whether no hardware takes part.
    pub simulated: bool,
    /// Where it ran, as the report says it: device, driver, library.
    pub runs_on: String,
}

/// A backend that can be proved.
pub trait Backend: 'static {
    /// Its devices.
    type Device: Device;
    /// One of them, and the means to watch it.
    type Fixture: Watched<Self::Device>;

    /// Its name.
    const NAME: &'static str;

    /// Puts a simulated driver in the place of the real one, for this process and those that it starts, as long as the
    /// folder is kept. Called while the process has one thread.
    ///
    /// # Errors
    /// A sentence: why there is none.
    fn simulate() -> Result<TempDir, String>;

    /// What is here, ready to be held: what a driver does only once, and may wait for a whole device for, is done.
    ///
    /// # Errors
    /// A sentence: why nothing can be proved here.
    fn find() -> Result<Found, String>;

    /// Every device that this process sees.
    fn devices() -> Vec<Self::Device>;

    /// The fixture of one device.
    fn fixture(device: u32) -> Self::Fixture;
}

/// A fixture that can say what its device has done, by the driver's own word: the product is not its own witness.
pub trait Watched<D: Device>: Fixture<D> {
    /// A place in a stream.
    type Mark: Clone + Send + Sync;

    /// The end of what is queued on the stream.
    fn mark(&self, stream: D::Stream) -> Self::Mark;

    /// Whether all before the mark is done.
    fn is_reached(&self, mark: &Self::Mark) -> bool;

    /// Lets what is queued on `stream` from now on wait for the mark.
    fn wait_for(&self, stream: D::Stream, mark: &Self::Mark);

    /// Copies by the plainest call that the driver has, and waits for it.
    ///
    /// # Safety
    /// Both regions must be allocated and left alone meanwhile; one of them is the host's, the other one the device's.
    unsafe fn plain_copy(&self, to: Region, from: Region);
}

/// The role of the node's process; the backend's name follows.
const NODE: &str = "proof-node ";

#[derive(Debug, Serialize, Deserialize)]
struct Setup {
    socket: PathBuf,
    pool: u64,
    /// Whether it opens memory of devices.
    imports: bool,
}

/// A node in a process of its own, of `haulier-proof`.
struct ProofNode {
    dir: TempDir,
    /// Ends it.
    peer: Peer,
}

impl ProofNode {
    fn start<B: Backend>(program: &Path, path: Way, pool: u64) -> Self {
        let dir = tempfile::tempdir().expect("a private directory");
        let node = ProofNode { dir, peer: Peer::start(program, &format!("{NODE}{}", B::NAME)) };
        node.peer.link().send(&Setup { socket: node.socket(), pool, imports: path == Way::Ipc }, &[]);
        let () = node.peer.link().expect();
        node
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("private/node.sock")
    }

    fn client<D: Device>(&self, device: &D) -> StoreClient<D> {
        StoreClient::connect(device.clone(), self.socket(), Options::default()).expect("the node serves")
    }
}

/// What the node's process does, until the proof ends.
fn serve<B: Backend>(link: &Link) {
    let Setup { socket, pool, imports } = link.expect();
    let devices = if imports { B::devices() } else { Vec::new() };
    let store = Store::open(Config::new(pool), |_, _| {}).expect("the pool's memory can be had");
    let node = Node::start(NodeConfig { socket, store, devices, metrics: None, clients_max: 8 });
    let _node = node.expect("the node starts");
    link.send(&(), &[]);
    let _ = link.receive::<()>();
}

/// How payloads are to travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// The node opens the device's memory.
    Ipc,
    /// Through host memory.
    Staging,
}

impl Way {
    const BOTH: [Way; 2] = [Way::Ipc, Way::Staging];

    fn label(self) -> &'static str {
        match self {
            Way::Ipc => "ipc",
            Way::Staging => "staging",
        }
    }

    /// How many operations of this kind went this way and came to this.
    fn count<D: Device>(self, client: &StoreClient<D>, op: &str, outcome: &str) -> u64 {
        let metrics = client.metrics().expect("the node serves");
        let labels =
            [format!("op=\"{op}\""), format!("path=\"{}\"", self.label()), format!("outcome=\"{outcome}\"")];
        counter(&metrics, "haulier_operations_total", &labels.each_ref().map(String::as_str))
    }
}

#[derive(Debug, Default)]
struct Asked {
    backend: Option<String>,
    simulator: bool,
    quick: bool,
    /// For the trials: a filter, `--list` and the like.
    rest: Vec<String>,
}

const USAGE: &str = "\
Usage: haulier-proof BACKEND [--simulator] [--quick] [-- TEST-OPTIONS]

Proves a backend on the hardware of this machine: the conformance suite, payloads that are not ready when they are put,
and speed beside the driver's plain copy. Needs no other file, no toolchain and no network.

  BACKEND      cuda, ascend, cpu
  --simulator  on the simulated driver beside this program, for CI: no hardware takes part
  --quick      smaller sizes and fewer turns for speed
  --           a filter and options of the test harness; with any, no speed is measured

The exit status is 0 only if every trial passed. Each one that was left out is listed with its reason.
";

/// The whole of `haulier-proof`.
pub fn main() -> ExitCode {
    let role = peer::role();
    let asked = match &role {
        None => match asked(env::args().skip(1)) {
            Some(asked) => asked,
            None => {
                eprint!("{USAGE}");
                return ExitCode::from(2);
            }
        },
        // A role names its backend first: `cuda/0 import`, or after the word for a node.
        Some((role, _)) => {
            let name = role.strip_prefix(NODE).unwrap_or(role).split(['/', ' ']).next();
            Asked { backend: name.map(str::to_owned), ..Asked::default() }
        }
    };
    let name = asked.backend.as_deref().unwrap_or_default();
    let outcome = match name {
        cpu::Cpu::NAME => run::<cpu::Cpu>(&asked, role.as_ref()),
        Cuda::NAME => run::<Cuda>(&asked, role.as_ref()),
        Ascend::NAME => run::<Ascend>(&asked, role.as_ref()),
        other => Err(format!("there is no proof of a backend {other:?}; there are cpu, cuda, ascend")),
    };
    outcome.unwrap_or_else(|why| {
        eprintln!("haulier-proof: {why}\nhaulier-proof: nothing was proved");
        ExitCode::FAILURE
    })
}

fn asked(mut words: impl Iterator<Item = String>) -> Option<Asked> {
    let mut asked = Asked::default();
    while let Some(word) = words.next() {
        match word.as_str() {
            "--" => asked.rest = words.by_ref().collect(),
            "--simulator" => asked.simulator = true,
            "--quick" => asked.quick = true,
            option if option.starts_with('-') => return None,
            _ if asked.backend.is_some() => return None,
            _ => asked.backend = Some(word),
        }
    }
    asked.backend.is_some().then_some(asked)
}

fn run<B: Backend>(asked: &Asked, role: Option<&(String, Link)>) -> Result<ExitCode, String> {
    if let Some((role, link)) = role {
        if role.starts_with(NODE) {
            serve::<B>(link);
        } else {
            let devices = B::devices().len() as u32;
            Suite::new(&[]).backend(B::NAME, devices, B::fixture).serve(role, link);
        }
        return Ok(ExitCode::SUCCESS);
    }
    let _driver = if asked.simulator { Some(B::simulate()?) } else { None };
    let found = B::find()?;
    if found.simulated != asked.simulator {
        let told = if asked.simulator { "with" } else { "without" };
        return Err(format!("started {told} --simulator, and what is here is {}", found.runs_on));
    }
    let start = Instant::now();
    let where_it_ran = banner::<B>(&found);
    println!("{where_it_ran}\n");

    let matrix = readiness::Matrix::default();
    // Two show all that more would.
    let suite = Suite::new(&[]).backend(B::NAME, found.devices.min(2), B::fixture).also(matrix.trials::<B>());
    // In turns, since what they look at is the process's.
    let words = ["haulier-proof", "--test-threads=1"].into_iter().map(str::to_owned);
    let args = Arguments::from_iter(words.chain(asked.rest.iter().cloned()));
    let proved = suite.run_with(&args);
    print!("{matrix}");
    if asked.rest.is_empty() {
        println!("\n{}", speed::measure::<B>(&found, asked.quick));
    }
    println!("{where_it_ran}; {} s", start.elapsed().as_secs());
    Ok(proved)
}

/// Says where a report comes from.
fn banner<B: Backend>(Found { devices, simulated, runs_on }: &Found) -> String {
    let kind = if *simulated { "SIMULATOR, no hardware took part" } else { "on this machine" };
    format!("haulier-proof: {}, {kind}: {runs_on}; devices: {devices}", B::NAME)
}
