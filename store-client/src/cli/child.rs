//! Processes of this same binary that a command starts and ends. They are ended by their id, also when the command fails or
//! is interrupted, and end by themselves when the command is killed.

use std::{
    env,
    ffi::OsString,
    fs::{self, File},
    io,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, de::DeserializeOwned};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use tempfile::TempDir;

use super::{
    exit::{Exit, Failure, Result},
    global::Global,
    output,
};

/// How long a child may take to end by itself.
const PATIENCE: Duration = Duration::from_secs(10);
const POLL: Duration = Duration::from_millis(2);

/// Notes signals that ask the process to end, instead of ending it at once, so that it can clean up.
#[derive(Debug, Clone)]
pub(crate) struct Interrupts(Arc<AtomicBool>);

impl Interrupts {
    pub(crate) fn watch() -> Result<Self> {
        let flag = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            signal_hook::flag::register(signal, Arc::clone(&flag))
                .map_err(|e| Failure::system("watching for signals", e))?;
        }
        Ok(Interrupts(flag))
    }

    pub(crate) fn check(&self) -> Result<()> {
        if self.0.load(Ordering::Relaxed) { Err(Failure::interrupted()) } else { Ok(()) }
    }

    /// The real reason of a failure: Ctrl-C on a terminal ends children too, which may be noticed first.
    pub(crate) fn explain(&self, failure: Failure) -> Failure {
        self.check().err().unwrap_or(failure)
    }
}

/// A temporary directory that is nobody else's: a node serves in no other.
pub(crate) fn private_dir(prefix: &str) -> Result<TempDir> {
    let private = fs::Permissions::from_mode(0o700);
    let dir = tempfile::Builder::new().prefix(prefix).permissions(private).tempdir();
    dir.map_err(|e| Failure::system("making a private directory", e))
}

/// A command that runs this same binary.
pub(crate) fn this_binary() -> Result<Command> {
    env::current_exe().map(Command::new).map_err(|e| Failure::system("finding the program's own file", e))
}

/// A child whose output goes to files in a directory of its owner.
#[derive(Debug)]
pub(crate) struct Helper {
    name: &'static str,
    child: Child,
    stdout: PathBuf,
    stderr: PathBuf,
}

impl Helper {
    pub(crate) fn start(dir: &Path, name: &'static str, args: &[OsString]) -> Result<Self> {
        let (stdout, stderr) = (dir.join(format!("{name}.out")), dir.join(format!("{name}.err")));
        let refuse = |e: io::Error| Failure::system(format_args!("starting the {name} process"), e);
        let child = this_binary()?
            .args(args)
            .stdin(Stdio::null())
            .stdout(File::create(&stdout).map_err(refuse)?)
            .stderr(File::create(&stderr).map_err(refuse)?)
            .spawn()
            .map_err(refuse)?;
        Ok(Helper { name, child, stdout, stderr })
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits until it has written a whole line of JSON, and reads that.
    pub(crate) fn first_line<T: DeserializeOwned>(&mut self, interrupts: &Interrupts) -> Result<T> {
        loop {
            interrupts.check()?;
            let ended = self.poll()?;
            let text = self.output()?;
            if let Some((line, _)) = text.split_once('\n') {
                return self.parse(line);
            }
            if let Some(status) = ended {
                return Err(self.failure(status));
            }
            thread::sleep(POLL);
        }
    }

    /// Waits for its end, and reads the JSON that it has written.
    pub(crate) fn result<T: DeserializeOwned>(mut self, interrupts: &Interrupts) -> Result<T> {
        loop {
            interrupts.check()?;
            match self.poll()? {
                Some(status) if status.success() => return self.parse(&self.output()?),
                Some(status) => return Err(self.failure(status)),
                None => thread::sleep(POLL),
            }
        }
    }

    /// Asks it to end and waits for that; the failure, if it did not end well.
    pub(crate) fn stop(mut self) -> Result<()> {
        match self.end()? {
            status if status.success() => Ok(()),
            status => Err(self.failure(status)),
        }
    }

    fn end(&mut self) -> Result<ExitStatus> {
        let refuse = |e: io::Error| Failure::system("ending a process", e);
        if let Some(status) = self.poll()? {
            return Ok(status);
        }
        // The child has not been waited for, so the id is still its own.
        if let Some(pid) = i32::try_from(self.pid()).ok().and_then(Pid::from_raw) {
            kill_process(pid, Signal::TERM).map_err(|e| refuse(e.into()))?;
        }
        let since = Instant::now();
        while since.elapsed() < PATIENCE {
            if let Some(status) = self.poll()? {
                return Ok(status);
            }
            thread::sleep(POLL);
        }
        self.child.kill().map_err(refuse)?;
        self.child.wait().map_err(refuse)
    }

    fn poll(&mut self) -> Result<Option<ExitStatus>> {
        self.child
            .try_wait()
            .map_err(|e| Failure::system(format_args!("waiting for the {} process", self.name), e))
    }

    fn output(&self) -> Result<String> {
        fs::read_to_string(&self.stdout).map_err(|e| Failure::system(output::path(&self.stdout), e))
    }

    fn parse<T: DeserializeOwned>(&self, json: &str) -> Result<T> {
        serde_json::from_str(json)
            .map_err(|e| Failure::system(format_args!("reading what the {} process says", self.name), e))
    }

    /// What went wrong, in the child's own words.
    fn failure(&self, status: ExitStatus) -> Failure {
        let said = fs::read_to_string(&self.stderr).unwrap_or_default();
        let exit = match status.code() {
            Some(2) => Exit::Usage,
            Some(3) => Exit::Unreachable,
            Some(4) => Exit::BadInput,
            Some(5) => Exit::Timeout,
            Some(130) => Exit::Interrupted,
            _ => Exit::Refused,
        };
        Failure::new(exit, "child", format!("the {} process: {}", self.name, last_words(&said, status)))
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        if let Err(e) = self.end() {
            tracing::warn!(process = self.name, error = %e, "could not be ended");
        }
    }
}

/// The error that a child has printed, else its last line, else how it ended.
fn last_words(stderr: &str, status: ExitStatus) -> String {
    #[derive(Deserialize)]
    struct Said {
        error: Error,
    }
    #[derive(Deserialize)]
    struct Error {
        message: String,
    }
    let error = stderr.lines().rev().find_map(|line| serde_json::from_str::<Said>(line).ok());
    match (error, stderr.trim_end().lines().next_back()) {
        (Some(said), _) => said.error.message,
        (None, Some(line)) => format!("{line} ({status})"),
        (None, None) => status.to_string(),
    }
}

/// A node of this process' own, on a socket in a private directory.
#[derive(Debug)]
pub(crate) struct PrivateNode {
    helper: Helper,
    socket: PathBuf,
}

impl PrivateNode {
    /// Starts it and waits until it serves. It never evicts: what does not fit is to be an error.
    pub(crate) fn start(global: &Global, dir: &Path, pool: u64, interrupts: &Interrupts) -> Result<Self> {
        let socket = dir.join("node.sock");
        let mut args = global.for_child(socket.clone());
        args.extend(["serve", "--no-evict", "--pool"].map(OsString::from));
        args.push(pool.to_string().into());
        let mut helper = Helper::start(dir, "node", &args)?;
        helper.first_line::<serde_json::Value>(interrupts)?;
        Ok(PrivateNode { helper, socket })
    }

    pub(crate) fn socket(&self) -> &Path {
        &self.socket
    }

    pub(crate) fn pid(&self) -> u32 {
        self.helper.pid()
    }

    pub(crate) fn stop(self) -> Result<()> {
        self.helper.stop()
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;

    use super::*;

    #[test]
    fn a_childs_error_is_found_among_its_logs() {
        let status = ExitStatus::from_raw(1 << 8);
        let said = "INFO starting\n{\"error\":{\"kind\":\"full\",\"message\":\"no room\"}}\n";
        assert_eq!(last_words(said, status), "no room");
        assert_eq!(last_words("one\ntwo\n", status), "two (exit status: 1)");
        assert_eq!(last_words("", status), "exit status: 1");
    }
}
