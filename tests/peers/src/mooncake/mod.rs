//! Haulier's engine for Mooncake beside Mooncake's own client: the same library, master and holder of the values.

mod abi;
mod engine;
mod own;

use std::{
    net::TcpStream,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

pub use self::{
    engine::{Direct, Staged},
    own::{Own, Registered},
};
use crate::{
    child::Server,
    failure::{Failure, Result},
};

// In the network of this process alone nobody else has these ports.
const MASTER: u16 = 50051;
const METRICS: u16 = 9003;
const HOLDER: u16 = 50052;
/// What clients say of themselves.
const HOST: &str = "127.0.0.1";
const METADATA: &str = "P2PHANDSHAKE";
const PROTOCOL: &str = "tcp";
/// Bytes of Mooncake's own buffer in each client.
const BUFFER: u64 = 64 << 20;

/// A master, and a client in a process of its own that holds the values: so they are equally far from everybody.
#[derive(Debug)]
pub struct Cluster {
    library: PathBuf,
    // The holder goes first.
    _holder: Server,
    _master: Server,
}

impl Cluster {
    /// Starts the programs that lie beside `library`, with room for so many bytes of values.
    pub fn start(library: &Path, dir: &Path, room: usize) -> Result<Self> {
        let beside = |name: &str| Command::new(library.with_file_name(name));
        let mut master = beside("mooncake_master");
        master.arg(format!("-rpc_address={HOST}"));
        master.arg(format!("-rpc_port={MASTER}")).arg(format!("-metrics_port={METRICS}"));
        let mut holder = beside("mooncake_client");
        holder
            .arg(format!("-master_server_address={}", Self::master()))
            .args([format!("-host={HOST}"), format!("-port={HOLDER}")])
            .args([format!("-metadata_server={METADATA}"), format!("-protocol={PROTOCOL}")])
            .arg(format!("-global_segment_size={room}"));
        Ok(Cluster {
            library: library.into(),
            _master: listening("mooncake_master", dir, &mut master, MASTER)?,
            _holder: listening("mooncake_client", dir, &mut holder, HOLDER)?,
        })
    }

    fn master() -> String {
        format!("{HOST}:{MASTER}")
    }
}

fn listening(name: &'static str, dir: &Path, command: &mut Command, port: u16) -> Result<Server> {
    if !Path::new(command.get_program()).is_file() {
        return Err(Failure(format!("{} is not there", command.get_program().display())));
    }
    let mut server = Server::start(name, dir, command.stdin(Stdio::null()).stdout(Stdio::null()))?;
    server.until(|| TcpStream::connect((HOST, port)))?;
    Ok(server)
}
