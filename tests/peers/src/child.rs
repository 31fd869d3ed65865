//! Servers and workers: processes that this one starts and ends.

use std::{
    fs::{self, File},
    io,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, ExitStatus},
    thread,
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process, set_parent_process_death_signal};

use crate::failure::{During, Failure, Result};

/// How long a server may take until it answers.
const PATIENCE: Duration = Duration::from_secs(20);

/// A process that ends with its owner: when this is dropped, and, by the kernel, when this process dies.
#[derive(Debug)]
pub struct Server {
    name: &'static str,
    child: Child,
    log: PathBuf,
}

impl Server {
    /// Starts `command`, whose stderr goes to `NAME.log` in `dir`; stdin and stdout are as the command says.
    pub fn start(name: &'static str, dir: &Path, command: &mut Command) -> Result<Self> {
        let log = dir.join(format!("{name}.log"));
        let stderr = File::create(&log).during(log.display())?;
        // A group of its own: Ctrl-C is for this process, which then ends its servers in order.
        command.stderr(stderr).process_group(0);
        // SAFETY: one system call, which allocates nothing.
        unsafe {
            command.pre_exec(|| Ok(set_parent_process_death_signal(Some(Signal::KILL))?));
        }
        let child = command.spawn().during(format_args!("starting {name} ({command:?})"))?;
        Ok(Server { name, child, log })
    }

    /// Its stdin and stdout, where they are pipes.
    pub fn pipes(&mut self) -> Option<(ChildStdin, ChildStdout)> {
        Some((self.child.stdin.take()?, self.child.stdout.take()?))
    }

    /// Tries `connect` until it succeeds.
    ///
    /// *Errors*: where the server ends before, with its last words, or does not answer in time.
    pub fn until<T>(&mut self, mut connect: impl FnMut() -> io::Result<T>) -> Result<T> {
        let start = Instant::now();
        loop {
            let refused = match connect() {
                Ok(connected) => return Ok(connected),
                Err(e) => e,
            };
            if let Some(status) = self.child.try_wait().during(self.name)? {
                return Err(self.ended(status));
            }
            if start.elapsed() > PATIENCE {
                return Err(Failure::new(format_args!("{} does not answer", self.name), refused));
            }
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        kill_process(Pid::from_child(&self.child), signal).during(self.name)
    }

    /// Why it is not there any more, as far as it has said so.
    pub fn last_words(&mut self) -> Failure {
        // Its pipes may end a little before it does.
        let start = Instant::now();
        while start.elapsed() < Duration::from_secs(1) {
            if let Ok(Some(status)) = self.child.try_wait() {
                return self.ended(status);
            }
            thread::sleep(Duration::from_millis(5));
        }
        Failure::new(self.name, "it does not talk any more")
    }

    fn ended(&self, status: ExitStatus) -> Failure {
        let said = fs::read_to_string(&self.log).unwrap_or_default();
        let last = said.trim_end().lines().next_back().unwrap_or("it said nothing");
        Failure::new(format_args!("{} ended ({status})", self.name), last)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Nothing that it holds outlives it, so there is nothing to ask it for. Errors: it has ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use rustix::process::test_kill_process;

    use super::*;

    #[test]
    fn a_server_ends_with_its_owner() {
        let dir = tempfile::tempdir().unwrap();
        let server = Server::start("sleep", dir.path(), Command::new("sleep").arg("1000")).unwrap();
        let id = Pid::from_child(&server.child);
        assert!(test_kill_process(id).is_ok());
        drop(server);
        assert!(test_kill_process(id).is_err());
    }

    #[test]
    fn a_server_that_ends_early_says_why() {
        let dir = tempfile::tempdir().unwrap();
        let mut command = Command::new("sh");
        let mut server =
            Server::start("sh", dir.path(), command.args(["-c", "echo no memory >&2; exit 3"])).unwrap();
        let refused = server.until(|| -> io::Result<()> { Err(io::ErrorKind::NotFound.into()) });
        assert_eq!(refused, Err(Failure("sh ended (exit status: 3): no memory".into())));
    }
}
