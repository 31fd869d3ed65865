//! Redis over a Unix socket, in its own protocol (RESP2).

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

/// A server of its own, and one connection.
#[derive(Debug)]
pub struct Redis {
    line: Line,
    _server: Server,
}

impl Redis {
    /// Starts `redis-server` with its socket in `dir`, for values of at most `most` bytes.
    pub fn start(dir: &Path, most: usize) -> Result<Self> {
        let socket = dir.join("redis.sock");
        let limit = (2 * most).max(64 << 20).to_string();
        let mut command = Command::new("redis-server");
        command.args(["--port", "0", "--unixsocketperm", "700", "--save", "", "--appendonly", "no"]);
        command.args(["--proto-max-bulk-len", &limit, "--client-query-buffer-limit", &limit]);
        command.arg("--dir").arg(dir).arg("--unixsocket").arg(&socket);
        let mut server =
            Server::start("redis-server", dir, command.stdin(Stdio::null()).stdout(Stdio::null()))?;
        Ok(Redis { line: Line::connect(&mut server, &socket)?, _server: server })
    }

    /// Sends a command, whose words may be values.
    fn command<'a>(&mut self, count: usize, words: impl Iterator<Item = &'a [u8]>) -> Result<()> {
        let words: Vec<(String, &[u8])> = words.map(|word| (format!("${}\r\n", word.len()), word)).collect();
        let head = format!("*{count}\r\n");
        let mut parts: Vec<&[u8]> = vec![head.as_bytes()];
        for (len, word) in &words {
            parts.extend([len.as_bytes(), word, b"\r\n"]);
        }
        self.line.send(&parts)
    }
}

impl Store for Redis {
    fn name(&self) -> &'static str {
        "redis"
    }

    fn about(&self) -> &'static str {
        "Redis over a Unix socket: SET, GET; MSET, MGET for batches"
    }

    fn offers(&self, op: Op, _: Shape) -> bool {
        matches!(op, Op::Put | Op::GetInto)
    }

    fn before(&mut self, op: Op, job: &mut Job, _: bool) -> Result<()> {
        if op.reads() { Ok(()) } else { self.forget(job) }
    }

    fn call(&mut self, op: Op, job: &mut Job) -> Result<()> {
        let Shape { values, .. } = job.shape;
        if op == Op::Put {
            let verb: &[u8] = if values == 1 { b"SET" } else { b"MSET" };
            let words = pairs(&job.keys, job.source()).flat_map(|(key, value)| [key.as_bytes(), value]);
            self.command(1 + 2 * values, std::iter::once(verb).chain(words))?;
            return self.line.expect("+OK");
        }
        let verb: &[u8] = if values == 1 { b"GET" } else { b"MGET" };
        self.command(1 + values, std::iter::once(verb).chain(job.keys.iter().map(|key| key.as_bytes())))?;
        if values > 1 {
            self.line.expect(&format!("*{values}"))?;
        }
        let wanted = format!("${}", job.shape.bytes);
        let (keys, target) = job.target_mut();
        for (_, target) in pairs_mut(keys, target) {
            self.line.expect(&wanted)?;
            self.line.value(target)?;
        }
        Ok(())
    }

    fn look(&mut self, _: &mut Job) -> Result<()> {
        Err(Failure("Redis has no views".into()))
    }

    fn forget(&mut self, job: &mut Job) -> Result<()> {
        let keys = job.keys.iter().map(|key| key.as_bytes());
        self.command(1 + job.keys.len(), std::iter::once(&b"DEL"[..]).chain(keys))?;
        match self.line.line()? {
            line if line.starts_with(':') => Ok(()),
            line => Err(Failure(format!("DEL answers {line:?}"))),
        }
    }

    fn recover(&mut self) -> Result<()> {
        self.line.renew()
    }
}
