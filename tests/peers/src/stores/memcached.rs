//! memcached over a Unix socket, in its text protocol.

use std::{
    path::Path,
    process::{Command, Stdio},
};

use super::line::Line;
use crate::{
    child::Server,
    failure::{Failure, Result},
    job::{Job, Op, Shape, pairs, pairs_mut},
    store::Store,
};

/// The largest value that memcached can be told to take.
const ITEM_MAX: usize = 1 << 30;

/// A server of its own, and one connection.
#[derive(Debug)]
pub struct Memcached {
    line: Line,
    _server: Server,
}

impl Memcached {
    /// Starts `memcached` with its socket in `dir`, for values of at most `most` bytes.
    pub fn start(dir: &Path, most: usize) -> Result<Self> {
        let socket = dir.join("memcached.sock");
        // Twice the largest value, and no more than half of its memory: it refuses to start otherwise.
        let item = (2 * most).clamp(1 << 20, ITEM_MAX);
        let memory = (2 * item).max(128 << 20) >> 20;
        let mut command = Command::new("memcached");
        command.args([
            "-a",
            "0700",
            "-t",
            "1",
            "-u",
            "root",
            "-m",
            &memory.to_string(),
            "-I",
            &item.to_string(),
        ]);
        command.arg("-s").arg(&socket).stdin(Stdio::null()).stdout(Stdio::null());
        let mut server = Server::start("memcached", dir, &mut command)?;
        Ok(Memcached { line: Line::connect(&mut server, &socket)?, _server: server })
    }
}

impl Store for Memcached {
    fn name(&self) -> &'static str {
        "memcached"
    }

    fn about(&self) -> &'static str {
        "memcached over a Unix socket: set, get; pipelined sets and one get of all keys for batches"
    }

    fn offers(&self, op: Op, _: Shape) -> bool {
        matches!(op, Op::Put | Op::GetInto)
    }

    fn before(&mut self, op: Op, job: &mut Job, _: bool) -> Result<()> {
        if op.reads() { Ok(()) } else { self.forget(job) }
    }

    fn call(&mut self, op: Op, job: &mut Job) -> Result<()> {
        if op == Op::Put {
            let bytes = job.shape.bytes;
            let heads: Vec<String> =
                job.keys.iter().map(|key| format!("set {key} 0 0 {bytes}\r\n")).collect();
            let values = pairs(&job.keys, job.source());
            let parts: Vec<&[u8]> = heads
                .iter()
                .zip(values)
                .flat_map(|(head, (_, value))| [head.as_bytes(), value, b"\r\n"])
                .collect();
            self.line.send(&parts)?;
            return job.keys.iter().try_for_each(|_| self.line.expect("STORED"));
        }
        self.line.send(&[format!("get {}\r\n", job.keys.join(" ")).as_bytes()])?;
        let bytes = job.shape.bytes;
        let (keys, target) = job.target_mut();
        for (key, target) in pairs_mut(keys, target) {
            self.line.expect(&format!("VALUE {key} 0 {bytes}"))?;
            self.line.value(target)?;
        }
        self.line.expect("END")
    }

    fn look(&mut self, _: &mut Job) -> Result<()> {
        Err(Failure("memcached has no views".into()))
    }

    fn forget(&mut self, job: &mut Job) -> Result<()> {
        let lines: Vec<String> = job.keys.iter().map(|key| format!("delete {key}\r\n")).collect();
        self.line.send(&lines.iter().map(String::as_bytes).collect::<Vec<_>>())?;
        for _ in &job.keys {
            match self.line.line()? {
                "DELETED" | "NOT_FOUND" => {}
                line => return Err(Failure(format!("delete answers {line:?}"))),
            }
        }
        Ok(())
    }

    fn recover(&mut self) -> Result<()> {
        self.line.renew()
    }
}
