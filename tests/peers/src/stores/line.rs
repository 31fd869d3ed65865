//! A connection to a server that answers in lines, with values between them.

use std::{
    io::{self, BufRead, BufReader, IoSlice, Read, Write},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    time::Duration,
};

use crate::{
    child::Server,
    failure::{During, Failure, Result},
};

const PATIENCE: Duration = Duration::from_secs(30);

/// The connection.
#[derive(Debug)]
pub(super) struct Line {
    stream: BufReader<UnixStream>,
    socket: PathBuf,
    /// What was read last; kept, so that no call allocates it.
    line: String,
}

impl Line {
    /// Connects to `server` as soon as it listens at `socket`.
    pub(super) fn connect(server: &mut Server, socket: &Path) -> Result<Self> {
        Self::over(server.until(|| UnixStream::connect(socket))?, socket)
    }

    /// Connects again: after a refusal nobody knows what the server will still read or say.
    pub(super) fn renew(&mut self) -> Result<()> {
        *self = Self::over(UnixStream::connect(&self.socket).during("connecting again")?, &self.socket)?;
        Ok(())
    }

    fn over(stream: UnixStream, socket: &Path) -> Result<Self> {
        for set in [UnixStream::set_read_timeout, UnixStream::set_write_timeout] {
            set(&stream, Some(PATIENCE)).during("a timeout for a socket")?;
        }
        Ok(Line { stream: BufReader::new(stream), socket: socket.to_owned(), line: String::new() })
    }

    /// Sends all parts, without joining them before.
    pub(super) fn send(&mut self, parts: &[&[u8]]) -> Result<()> {
        let mut slices: Vec<IoSlice<'_>> = parts.iter().map(|part| IoSlice::new(part)).collect();
        let mut rest = &mut slices[..];
        let stream = self.stream.get_mut();
        while !rest.is_empty() {
            match stream.write_vectored(rest) {
                Ok(0) => return Err(Failure("the server takes no more".into())),
                Ok(sent) => IoSlice::advance_slices(&mut rest, sent),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(Failure::new("sending", e)),
            }
        }
        Ok(())
    }

    /// The next line, without its end.
    pub(super) fn line(&mut self) -> Result<&str> {
        self.line.clear();
        match self.stream.read_line(&mut self.line).during("reading an answer")? {
            0 => Err(Failure("the server has hung up".into())),
            _ => Ok(self.line.trim_end()),
        }
    }

    /// The next line, which must be this one.
    pub(super) fn expect(&mut self, wanted: &str) -> Result<()> {
        match self.line()? {
            line if line == wanted => Ok(()),
            line => Err(Failure(format!("the server says {line:?} instead of {wanted:?}"))),
        }
    }

    /// A value, and the line end behind it.
    pub(super) fn value(&mut self, target: &mut [u8]) -> Result<()> {
        self.stream.read_exact(target).during("reading a value")?;
        self.expect("")
    }
}
