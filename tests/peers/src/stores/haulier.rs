//! Haulier: a node daemon beside this process, and a store inside it.

use std::{
    hint::black_box,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{ChildStdout, Command, Stdio},
};

use haulier::{
    AnyDevice, Options, PoolBuffer, Put, StoreClient, devices,
    store::{Config, Store as Pool},
};

use crate::{
    child::Server,
    failure::{During, Failure, Result},
    job::{Job, Op, Shape, pairs, pairs_mut},
    store::Store,
};

pub(crate) fn host() -> Result<AnyDevice> {
    let devices = devices::open("cpu").during("opening the host")?;
    devices.into_iter().next().ok_or(Failure("the host has no device".into()))
}

/// The calls, which are the same for every engine.
pub(crate) struct Calls {
    client: StoreClient<AnyDevice>,
    allocated: Option<PoolBuffer>,
}

impl Calls {
    pub(crate) fn new(client: StoreClient<AnyDevice>) -> Self {
        Calls { client, allocated: None }
    }

    pub(crate) fn before(&mut self, op: Op, job: &Job, fill: bool) -> Result<()> {
        if op.reads() {
            return Ok(());
        }
        self.allocated = None;
        self.forget(job)?;
        if op == Op::PutInPlace {
            let mut buffer = self.client.alloc(job.shape.bytes as u64).during("alloc")?;
            if fill {
                buffer.copy_from_slice(job.source());
            }
            self.allocated = Some(buffer);
        }
        Ok(())
    }

    pub(crate) fn call(&mut self, op: Op, job: &mut Job) -> Result<()> {
        let one = job.shape.values == 1;
        match op {
            Op::Put if one => stored(self.client.put(&job.keys[0], job.source())),
            Op::Put => {
                let items = pairs(&job.keys, job.source()).map(|(key, value)| (key, value.into())).collect();
                self.client.batch_put(items).into_iter().try_for_each(stored)
            }
            Op::PutInPlace => {
                let buffer = self.allocated.take().ok_or(Failure("nothing was allocated".into()))?;
                stored(self.client.put_allocated(&job.keys[0], buffer))
            }
            Op::GetInto if one => {
                let (keys, target) = job.target_mut();
                self.client.get_into(&keys[0], target).map(drop).during("get_into")
            }
            Op::GetInto => {
                let (keys, target) = job.target_mut();
                let items = pairs_mut(keys, target).map(|(key, value)| (key, value.into())).collect();
                let got = self.client.batch_get_into(items);
                got.into_iter().try_for_each(|slot| slot.map(drop)).during("batch_get_into")
            }
            Op::View if one => {
                self.client.view(&job.keys[0]).map(|view| drop(black_box(view))).during("view")
            }
            Op::View => {
                let keys: Vec<&str> = job.keys.iter().map(String::as_str).collect();
                let views = black_box(self.client.batch_view(&keys));
                views.into_iter().try_for_each(|slot| slot.map(drop)).during("batch_view")
            }
        }
    }

    pub(crate) fn look(&mut self, job: &mut Job) -> Result<()> {
        let (keys, target) = job.target_mut();
        for (key, target) in pairs_mut(keys, target) {
            let view = self.client.view(key).during("view")?;
            if view.len() != target.len() {
                return Err(Failure(format!("a view of {} bytes instead of {}", view.len(), target.len())));
            }
            target.copy_from_slice(&view);
        }
        Ok(())
    }

    pub(crate) fn forget(&mut self, job: &Job) -> Result<()> {
        let keys: Vec<&str> = job.keys.iter().map(String::as_str).collect();
        self.client.batch_remove(&keys).into_iter().try_for_each(|slot| slot.map(drop)).during("remove")
    }
}

pub(crate) fn stored(put: haulier::Result<Put>) -> Result<()> {
    match put.during("put")? {
        Put::Stored => Ok(()),
        other => Err(Failure(format!("put answered {other:?} instead of Stored"))),
    }
}

/// A node daemon that was started for this.
pub struct Node {
    socket: PathBuf,
    _stdout: BufReader<ChildStdout>,
    _server: Server,
}

impl Node {
    /// Starts the command `haulier` with a pool of so many bytes.
    pub fn start(haulier: &Path, dir: &Path, pool: usize) -> Result<Self> {
        let socket = dir.join("haulier.sock");
        let mut command = Command::new(haulier);
        command
            .args(["serve", "--json", "--no-evict", "--pool", &pool.to_string(), "--socket"])
            .arg(&socket)
            .env_remove("RUST_LOG")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut server = Server::start("haulier", dir, &mut command)?;
        let (_stdin, stdout) = server.pipes().ok_or(Failure("the node has no stdout".into()))?;
        let mut stdout = BufReader::new(stdout);
        // A line when it serves, the pipe's end when it does not.
        let mut ready = String::new();
        stdout.read_line(&mut ready).during("reading what the node says")?;
        if ready.is_empty() {
            return Err(server.last_words());
        }
        Ok(Node { socket, _stdout: stdout, _server: server })
    }

    /// Its socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }
}

/// A client, for host memory, of the node that serves at `socket`.
pub fn connect(socket: &Path) -> Result<StoreClient<AnyDevice>> {
    StoreClient::connect(host()?, socket, Options::default()).during("connecting to the node")
}

/// A client of a node daemon that was started for it.
pub struct HaulierNode {
    calls: Calls,
    // Last: the client goes first.
    _node: Node,
}

impl HaulierNode {
    /// Starts the command `haulier` with a pool of so many bytes, and connects to it.
    pub fn start(haulier: &Path, dir: &Path, pool: usize) -> Result<Self> {
        let node = Node::start(haulier, dir, pool)?;
        Ok(HaulierNode { calls: Calls::new(connect(node.socket())?), _node: node })
    }
}

/// A store inside this process.
pub struct HaulierHere(Calls);

impl HaulierHere {
    /// With a pool of so many bytes.
    pub fn open(pool: usize) -> Result<Self> {
        let config = Config { evict: false, ..Config::new(pool as u64) };
        let pool = Pool::open(config, |_, _| {}).during("reserving a pool")?;
        let client =
            StoreClient::in_process(host()?, pool, Options::default()).during("opening the engine")?;
        Ok(HaulierHere(Calls::new(client)))
    }
}

impl Store for HaulierNode {
    fn name(&self) -> &'static str {
        "haulier"
    }

    fn about(&self) -> &'static str {
        "through the node daemon, one client; removing and allocating are outside of the time"
    }

    fn offers(&self, op: Op, shape: Shape) -> bool {
        op != Op::PutInPlace || shape.values == 1
    }

    fn before(&mut self, op: Op, job: &mut Job, fill: bool) -> Result<()> {
        self.calls.before(op, job, fill)
    }

    fn call(&mut self, op: Op, job: &mut Job) -> Result<()> {
        self.calls.call(op, job)
    }

    fn look(&mut self, job: &mut Job) -> Result<()> {
        self.calls.look(job)
    }

    fn forget(&mut self, job: &mut Job) -> Result<()> {
        self.calls.forget(job)
    }
}

impl Store for HaulierHere {
    fn name(&self) -> &'static str {
        "haulier, in process"
    }

    fn about(&self) -> &'static str {
        "the engine inside the caller's process, no daemon"
    }

    fn offers(&self, op: Op, shape: Shape) -> bool {
        op != Op::PutInPlace || shape.values == 1
    }

    fn before(&mut self, op: Op, job: &mut Job, fill: bool) -> Result<()> {
        self.0.before(op, job, fill)
    }

    fn call(&mut self, op: Op, job: &mut Job) -> Result<()> {
        self.0.call(op, job)
    }

    fn look(&mut self, job: &mut Job) -> Result<()> {
        self.0.look(job)
    }

    fn forget(&mut self, job: &mut Job) -> Result<()> {
        self.0.forget(job)
    }
}
