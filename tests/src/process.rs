//! Real processes for tests: the `haulier` command, the node daemon, and clients.
//!
//! Each has a private directory or uses that of the daemon that it is a client of. Each is ended by its own id when its
//! owner is dropped, by the kernel when the thread that started it ends, and by a watchdog when a test hangs, so that a
//! pipe that a test waits at always comes to an end.

use std::{
    env,
    ffi::{OsStr, OsString},
    fmt,
    fs::{self, File},
    io::{self, BufRead, BufReader, Read, Write},
    os::{
        fd::OwnedFd,
        unix::{fs::PermissionsExt, process::CommandExt},
    },
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Output, Stdio},
    sync::{
        Arc, OnceLock,
        mpsc::{self, RecvTimeoutError, Sender},
    },
    thread,
    time::{Duration, Instant},
};

use backend_cpu::CpuDevice;
use haulier::{Options, StoreClient};
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, kill_process, pidfd_open, pidfd_send_signal,
    set_parent_process_death_signal, waitid,
};
use tempfile::TempDir;

/// How long a process may live before the watchdog takes its test for hung.
const LIFE: Duration = Duration::from_secs(300);
/// How long something that happens by itself may take before its test fails. Generous: nothing here is about speed.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// The `haulier` command: the one that `HAULIER_BIN` names, else that of this workspace, built once in the profile of
/// the tests.
///
/// Cargo builds a package's binaries for that package's own tests only. Asking cargo costs little where nothing changed,
/// and never finds a binary that is older than its source.
pub fn binary() -> &'static Path {
    static BINARY: OnceLock<PathBuf> = OnceLock::new();
    BINARY.get_or_init(|| match env::var_os("HAULIER_BIN") {
        Some(path) => path.into(),
        None => build(&[]).unwrap_or_else(|e| panic!("the haulier command could not be built: {e}")),
    })
}

/// The `haulier` command with this workspace's CUDA backend compiled in beside the host's.
///
/// # Panics
/// Where it cannot be built.
pub fn binary_with_cuda() -> &'static Path {
    static BINARY: OnceLock<PathBuf> = OnceLock::new();
    BINARY.get_or_init(|| binary_with("cuda"))
}

/// As [`binary_with_cuda`], with the Ascend backend.
///
/// # Panics
/// As there.
pub fn binary_with_ascend() -> &'static Path {
    static BINARY: OnceLock<PathBuf> = OnceLock::new();
    BINARY.get_or_init(|| binary_with("ascend"))
}

/// As [`binary_with_cuda`], with the Mooncake engine.
///
/// # Panics
/// As there.
pub fn binary_with_mooncake() -> &'static Path {
    static BINARY: OnceLock<PathBuf> = OnceLock::new();
    BINARY.get_or_init(|| binary_with("mooncake"))
}

fn binary_with(backend: &str) -> PathBuf {
    let built = build(&[backend]).unwrap_or_else(|e| panic!("the haulier command could not be built: {e}"));
    // Cargo gives each selection of features the same name, and the next build takes it away.
    let own = built.with_file_name(format!("haulier-with-{backend}"));
    let fresh = built.with_file_name(format!("haulier-with-{backend}.{}", std::process::id()));
    fs::copy(&built, &fresh).and_then(|_| fs::rename(&fresh, &own)).expect("a copy of the command");
    own
}

fn build(features: &[&str]) -> Result<PathBuf, String> {
    // <target>/<profile>/deps/<test>-<hash>
    let test = env::current_exe().map_err(|e| e.to_string())?;
    let outside = || format!("{} is not where cargo puts tests", test.display());
    let folder = test.parent().and_then(Path::parent).ok_or_else(outside)?;
    let (target, folder) = folder.parent().zip(folder.file_name()).ok_or_else(outside)?;
    let profile = if folder == "debug" { OsStr::new("dev") } else { folder };
    let built = Command::new(env::var_os("CARGO").unwrap_or_else(|| env!("CARGO").into()))
        .args(["build", "--quiet", "--package", "haulier", "--bin", "haulier"])
        .arg(format!("--features={}", features.join(",")))
        .arg("--profile")
        .arg(profile)
        .arg("--target-dir")
        .arg(target)
        .args(["--message-format", "json-render-diagnostics"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .map_err(|e| e.to_string())?;
    if !built.status.success() {
        return Err(format!("cargo build: {}", built.status));
    }
    let messages = String::from_utf8_lossy(&built.stdout);
    let mut executables = messages.lines().filter_map(|line| {
        let message: serde_json::Value = serde_json::from_str(line).ok()?;
        let ours = message["target"]["name"] == "haulier";
        Some(PathBuf::from(message["executable"].as_str().filter(|_| ours)?))
    });
    executables.next_back().ok_or_else(|| "cargo build names no executable".into())
}

/// Says loudly that a test could not run here. With `HAULIER_NO_SKIP` set that is a failure.
///
/// # Panics
/// Where `HAULIER_NO_SKIP` is set.
pub fn skip(test: &str, reason: impl fmt::Display) {
    let line = format!("SKIPPED {test}: {reason}");
    // Straight to the descriptor: libtest hides what a passing test prints.
    let _ = writeln!(io::stderr(), "\n{line}");
    let required = env::var_os("HAULIER_NO_SKIP").is_some_and(|value| !value.is_empty() && value != "0");
    assert!(!required, "{line} (HAULIER_NO_SKIP is set)");
}

/// Runs `act` if its time is up before this is dropped.
#[derive(Debug)]
pub struct Watchdog {
    // Its end tells the thread that all went well.
    _alive: Sender<()>,
}

impl Watchdog {
    /// Lets `act` run after `limit`.
    ///
    /// # Panics
    /// Where no thread can be had.
    pub fn new(limit: Duration, act: impl FnOnce() + Send + 'static) -> Self {
        let (alive, ended) = mpsc::channel::<()>();
        let watch = move || {
            if ended.recv_timeout(limit) == Err(RecvTimeoutError::Timeout) {
                act();
            }
        };
        thread::Builder::new().name("watchdog".into()).spawn(watch).expect("a thread for the watchdog");
        Watchdog { _alive: alive }
    }

    /// Ends this whole process after `limit`: for what may hang in it and has no deadline.
    pub fn abort_after(limit: Duration) -> Self {
        Self::new(limit, move || {
            let _ = writeln!(io::stderr(), "a test hangs: nothing came of it for {limit:?}");
            std::process::abort();
        })
    }
}

/// Waits until `what` answers something, asking again and again: for changes in another process that nobody tells.
///
/// # Panics
/// When nothing came within [`PATIENCE`].
pub fn wait_for<T>(what: &str, mut ask: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(answer) = ask() {
            return answer;
        }
        assert!(start.elapsed() < PATIENCE, "{what} did not come about within {PATIENCE:?}");
        thread::sleep(Duration::from_millis(2));
    }
}

/// A process that is ended when this is dropped.
#[derive(Debug)]
pub struct Process {
    child: Child,
    handle: Arc<OwnedFd>,
    _watchdog: Watchdog,
}

impl Process {
    /// Starts `command`.
    ///
    /// # Errors
    /// What the system says, or what a `pre_exec` of the command said.
    pub fn spawn(command: &mut Command) -> io::Result<Self> {
        // SAFETY: one system call, which allocates nothing.
        unsafe {
            command.pre_exec(|| Ok(set_parent_process_death_signal(Some(Signal::KILL))?));
        }
        let child = command.spawn()?;
        let handle = Arc::new(pidfd_open(Pid::from_child(&child), PidfdFlags::empty())?);
        let watched = Arc::clone(&handle);
        let name = format!("{command:?}");
        let watchdog = Watchdog::new(LIFE, move || {
            let _ = writeln!(io::stderr(), "a test hangs: ended {name} after {LIFE:?}");
            let _ = pidfd_send_signal(&*watched, Signal::KILL);
        });
        Ok(Process { child, handle, _watchdog: watchdog })
    }

    /// What it writes to a pipe that its command made of stdout, once.
    pub fn take_stdout(&mut self) -> Option<ChildStdout> {
        self.child.stdout.take()
    }

    /// Its id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Sends it a signal.
    ///
    /// # Panics
    /// Where it has ended already.
    pub fn signal(&self, signal: Signal) {
        pidfd_send_signal(&*self.handle, signal).unwrap_or_else(|e| panic!("sending {signal:?}: {e}"));
    }

    /// Stops it, and returns when it has stopped.
    pub fn freeze(&self) {
        self.signal(Signal::STOP);
        let stopped = waitid(WaitId::Pid(Pid::from_child(&self.child)), WaitIdOptions::STOPPED);
        assert!(matches!(stopped, Ok(Some(_))), "waiting for it to stop: {stopped:?}");
    }

    /// Lets it go on.
    pub fn thaw(&self) {
        self.signal(Signal::CONT);
    }

    /// Kills it with SIGKILL, and returns when it is gone.
    pub fn kill(&mut self) -> ExitStatus {
        // Where it has ended by itself there is nothing to kill.
        let _ = pidfd_send_signal(&*self.handle, Signal::KILL);
        self.child.wait().expect("a child can be waited for")
    }

    /// Waits for its end.
    pub fn wait(&mut self) -> ExitStatus {
        self.child.wait().expect("a child can be waited for")
    }

    /// Whether it has ended, and how.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().expect("a child can be asked")
    }

    /// Waits for its end, and reads what it has written until then.
    pub fn output(mut self) -> Output {
        let stderr = self.child.stderr.take().map(|mut pipe| {
            thread::spawn(move || {
                let mut text = Vec::new();
                pipe.read_to_end(&mut text).map(|_| text)
            })
        });
        let mut stdout = Vec::new();
        if let Some(mut pipe) = self.child.stdout.take() {
            pipe.read_to_end(&mut stdout).expect("stdout of a child");
        }
        let stderr = stderr.map_or_else(Vec::new, |reader| {
            reader.join().expect("the reader of stderr").expect("stderr of a child")
        });
        Output { status: self.wait(), stdout, stderr }
    }

    /// How many descriptors it has open.
    pub fn descriptors(&self) -> usize {
        descriptors(self.id())
    }

    /// How many mappings it has.
    pub fn mappings(&self) -> usize {
        mappings(self.id())
    }

    /// The sockets of the network that it listens at, by protocol and local address as the kernel writes them.
    pub fn listens_at(&self) -> Vec<String> {
        let inodes = socket_inodes(self.id());
        // The fourth column is the state; 0A is LISTEN, and a UDP socket that is bound has 07.
        let open = |protocol: &str, state: &str| -> Vec<String> {
            let table = fs::read_to_string(format!("/proc/{}/net/{protocol}", self.id())).unwrap_or_default();
            let rows = table.lines().skip(1).map(|line| line.split_whitespace().collect::<Vec<_>>());
            rows.filter(|row| row.get(3) == Some(&state))
                .filter(|row| row.get(9).is_some_and(|inode| inodes.iter().any(|own| own == inode)))
                .map(|row| format!("{protocol} {}", row[1]))
                .collect()
        };
        [("tcp", "0A"), ("tcp6", "0A"), ("udp", "07"), ("udp6", "07")]
            .iter()
            .flat_map(|(protocol, state)| open(protocol, state))
            .collect()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// How many descriptors process `id` has open.
pub fn descriptors(id: u32) -> usize {
    fs::read_dir(format!("/proc/{id}/fd")).map_or(0, Iterator::count)
}

/// How many mappings process `id` has.
pub fn mappings(id: u32) -> usize {
    fs::read_to_string(format!("/proc/{id}/maps")).map_or(0, |maps| maps.lines().count())
}

fn socket_inodes(id: u32) -> Vec<String> {
    let links = fs::read_dir(format!("/proc/{id}/fd")).into_iter().flatten().flatten();
    links
        .filter_map(|link| fs::read_link(link.path()).ok())
        .filter_map(|target| target.to_str()?.strip_prefix("socket:[")?.strip_suffix(']').map(str::to_owned))
        .collect()
}

/// The processes whose command line names `what`, by id and command line.
pub fn processes_that_name(what: &OsStr) -> Vec<(u32, String)> {
    let what = what.to_string_lossy();
    let entries = fs::read_dir("/proc").expect("/proc is mounted").flatten();
    entries
        .filter_map(|entry| {
            let id: u32 = entry.file_name().to_str()?.parse().ok()?;
            let line = fs::read(entry.path().join("cmdline")).ok()?;
            let line = String::from_utf8_lossy(&line).replace('\0', " ");
            (id != std::process::id() && line.contains(&*what)).then_some((id, line))
        })
        .collect()
}

/// How a daemon is to be started.
pub struct Serve {
    pool: String,
    /// None: [`binary`].
    program: Option<PathBuf>,
    args: Vec<OsString>,
    place: Option<Arc<TempDir>>,
    user: Option<u32>,
    tweak: Option<Tweak>,
}

type Tweak = Box<dyn FnOnce(&mut Command)>;

impl Serve {
    /// With a pool of this size, such as `64MiB`, and eviction.
    pub fn pool(size: impl Into<String>) -> Self {
        Serve { pool: size.into(), program: None, args: Vec::new(), place: None, user: None, tweak: None }
    }

    /// By this build of the command.
    pub fn program(mut self, program: &Path) -> Self {
        self.program = Some(program.into());
        self
    }

    /// With a pool of this many bytes.
    pub fn pool_of(bytes: u64) -> Self {
        Self::pool(bytes.to_string())
    }

    /// Without eviction.
    pub fn no_evict(self) -> Self {
        self.arg("--no-evict")
    }

    /// Gives a namespace this much of the pool.
    pub fn quota(self, namespace: &str, size: impl fmt::Display) -> Self {
        self.arg("--quota").arg(format!("{namespace}={size}"))
    }

    /// One more argument.
    pub fn arg(mut self, arg: impl Into<OsString>) -> Self {
        self.args.push(arg.into());
        self
    }

    /// More arguments.
    pub fn args<A: Into<OsString>>(self, args: impl IntoIterator<Item = A>) -> Self {
        args.into_iter().fold(self, Serve::arg)
    }

    /// In the place of another daemon, whose files are still there.
    pub fn at(mut self, place: &Arc<TempDir>) -> Self {
        self.place = Some(Arc::clone(place));
        self
    }

    /// As this user.
    pub fn user(mut self, id: u32) -> Self {
        self.user = Some(id);
        self
    }

    /// Lets `tweak` change the command before it is run.
    pub fn tweak(mut self, tweak: impl FnOnce(&mut Command) + 'static) -> Self {
        self.tweak = Some(Box::new(tweak));
        self
    }

    /// Starts it, and returns when it serves.
    ///
    /// # Panics
    /// Where it ends instead of serving; with what it said.
    pub fn start(self) -> Daemon {
        match self.try_start() {
            Ok(daemon) => daemon,
            Err(ended) => panic!("the daemon does not start: {ended}"),
        }
    }

    /// Starts it; how it ended where it does not serve.
    ///
    /// # Errors
    /// How it ended, and what it said.
    pub fn try_start(self) -> Result<Daemon, Ended> {
        self.launch()?.ready()
    }

    /// Starts it, and does not wait for it.
    ///
    /// # Errors
    /// As [`try_start`](Self::try_start), where it cannot even be run.
    pub fn launch(self) -> Result<Launched, Ended> {
        let place = self.place.unwrap_or_else(private_dir);
        let socket = place.path().join("node.sock");
        let log = place.path().join("node.log");
        let program = self.program.unwrap_or_else(|| binary().into());
        let mut command = Command::new(&program);
        if let Some(user) = self.user {
            // The user may have no way to where the tests were built.
            let public = place.path().join("haulier");
            fs::copy(&program, &public).expect("a copy of the binary");
            fs::set_permissions(&public, fs::Permissions::from_mode(0o755)).expect("modes can be set");
            for path in [place.path(), &public] {
                std::os::unix::fs::chown(path, Some(user), Some(user)).expect("root may give files away");
            }
            command = Command::new(public);
            command.uid(user).gid(user);
        }
        let stderr =
            File::options().create(true).append(true).open(&log).expect("a log in a private directory");
        if let Some(user) = self.user {
            std::os::unix::fs::chown(&log, Some(user), Some(user)).expect("root may give files away");
        }
        command
            .args(["serve", "--json", "--pool", &self.pool, "--socket"])
            .arg(&socket)
            .args(self.args)
            .env_remove("RUST_LOG")
            .env_remove("HAULIER_SOCKET")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(stderr);
        if let Some(tweak) = self.tweak {
            tweak(&mut command);
        }
        let process =
            Process::spawn(&mut command).map_err(|e| Ended { status: None, said: e.to_string() })?;
        Ok(Launched { process, socket, log, place })
    }
}

/// A daemon of which it is not known yet whether it serves.
#[derive(Debug)]
pub struct Launched {
    process: Process,
    socket: PathBuf,
    log: PathBuf,
    place: Arc<TempDir>,
}

impl Launched {
    /// Waits until it serves, or has ended.
    ///
    /// # Errors
    /// How it ended, and what it said.
    pub fn ready(self) -> Result<Daemon, Ended> {
        let Launched { mut process, socket, log, place } = self;
        let mut stdout = BufReader::new(process.child.stdout.take().expect("stdout is piped"));
        let mut ready = String::new();
        // A line when it serves, the pipe's end when it does not.
        stdout.read_line(&mut ready).expect("stdout of the daemon");
        let said = || fs::read_to_string(&log).unwrap_or_default();
        if ready.is_empty() {
            let status = process.wait();
            return Err(Ended { status: Some(status), said: said() });
        }
        let ready =
            serde_json::from_str(&ready).unwrap_or_else(|e| panic!("serve --json says {ready:?}: {e}"));
        Ok(Daemon { process, socket, log, ready, place, _stdout: stdout })
    }
}

/// How a daemon ended that was to serve.
#[derive(Debug)]
pub struct Ended {
    /// Its status, where it ran at all.
    pub status: Option<ExitStatus>,
    /// What it wrote to stderr.
    pub said: String,
}

impl fmt::Display for Ended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.status, self.said)
    }
}

/// A new directory that only its owner can enter.
///
/// # Panics
/// Where none can be made.
pub fn private_dir() -> Arc<TempDir> {
    // Short: the path of a socket has 107 bytes at most.
    let mut builder = tempfile::Builder::new();
    builder.prefix("hlr-").permissions(fs::Permissions::from_mode(0o700));
    Arc::new(builder.tempdir().expect("a private directory"))
}

/// A node daemon that serves.
#[derive(Debug)]
pub struct Daemon {
    /// Its process.
    pub process: Process,
    /// What it said when it was ready.
    pub ready: serde_json::Value,
    socket: PathBuf,
    log: PathBuf,
    place: Arc<TempDir>,
    // Kept open, so that nothing it may write fails.
    _stdout: BufReader<ChildStdout>,
}

impl Daemon {
    /// Its socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// The directory of its socket.
    pub fn place(&self) -> &Arc<TempDir> {
        &self.place
    }

    /// What it has logged.
    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// A client in this process.
    ///
    /// # Panics
    /// Where it cannot connect.
    pub fn client(&self) -> StoreClient<CpuDevice> {
        self.client_with(Options::default())
    }

    /// A client in this process with these options.
    ///
    /// # Panics
    /// Where it cannot connect.
    pub fn client_with(&self, options: Options) -> StoreClient<CpuDevice> {
        connect(&self.socket, options)
            .unwrap_or_else(|e| panic!("connecting to the daemon: {e}\n{}", self.log()))
    }

    /// Kills it, and starts another one in its place.
    pub fn restart(mut self, serve: Serve) -> Daemon {
        self.process.kill();
        serve.at(&self.place).start()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if thread::panicking() {
            let state = self.process.ended().map_or("still runs".into(), |status| format!("ended: {status}"));
            let (socket, log) = (self.socket.display(), self.log());
            let _ = writeln!(io::stderr(), "--- the daemon at {socket} {state}\n{log}");
        }
    }
}

/// A client of the daemon at `socket`, for host memory.
///
/// # Errors
/// As [`StoreClient::connect`].
pub fn connect(socket: &Path, options: Options) -> haulier::Result<StoreClient<CpuDevice>> {
    StoreClient::connect(CpuDevice::open().map_err(haulier::Error::from)?, socket, options)
}

/// A client in a process of its own, which does what it is told, line by line. See `src/bin/haulier-actor.rs` for what it
/// understands.
#[derive(Debug)]
pub struct Actor {
    /// Its process.
    pub process: Process,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Actor {
    /// Starts the actor that lies at `binary` as a client of the daemon at `socket`; the macro [`actor!`](crate::actor)
    /// knows where it lies.
    ///
    /// # Panics
    /// Where it cannot be started.
    pub fn spawn(binary: &str, socket: &Path) -> Self {
        Self::spawn_with(binary, socket, |_| {}).unwrap_or_else(|e| panic!("starting an actor: {e}"))
    }

    /// As [`spawn`](Self::spawn), with changes to the command before it is run.
    ///
    /// # Errors
    /// What the system says, or what a `pre_exec` of `tweak` said.
    pub fn spawn_with(binary: &str, socket: &Path, tweak: impl FnOnce(&mut Command)) -> io::Result<Self> {
        let mut command = Command::new(binary);
        command.arg(socket).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::inherit());
        tweak(&mut command);
        let mut process = loop {
            match Process::spawn(&mut command) {
                // A copy that was just written: a child that another thread forked meanwhile has it open for a moment.
                Err(e) if e.kind() == io::ErrorKind::ExecutableFileBusy => {
                    thread::sleep(Duration::from_millis(5))
                }
                spawned => break spawned?,
            }
        };
        let orders = process.child.stdin.take().expect("stdin is piped");
        let answers = BufReader::new(process.child.stdout.take().expect("stdout is piped"));
        Ok(Actor { process, orders, answers })
    }

    /// Tells it to do something, without waiting for the answer.
    ///
    /// # Panics
    /// Where it has ended.
    pub fn tell(&mut self, order: impl fmt::Display) {
        writeln!(self.orders, "{order}").unwrap_or_else(|e| panic!("telling an actor to {order}: {e}"));
    }

    /// Its next answer; `None` where it has ended instead.
    pub fn answer(&mut self) -> Option<String> {
        let mut line = String::new();
        match self.answers.read_line(&mut line) {
            Ok(n) if n > 0 && line.ends_with('\n') => Some(line.trim_end().to_owned()),
            _ => None,
        }
    }

    /// Tells it to do something; what it answers.
    ///
    /// # Panics
    /// Where it ends instead.
    pub fn ask(&mut self, order: impl fmt::Display) -> String {
        self.tell(&order);
        self.answer().unwrap_or_else(|| panic!("the actor ended when told to {order}"))
    }

    /// As [`ask`](Self::ask), and checks the answer.
    ///
    /// # Panics
    /// Where it is another one.
    pub fn expect(&mut self, order: impl fmt::Display, answer: &str) {
        let got = self.ask(&order);
        assert_eq!(got, answer, "told to {order}");
    }
}

/// Starts an [`Actor`](crate::process::Actor) as a client of the daemon at this socket. For integration tests, which are
/// told where it lies.
#[macro_export]
macro_rules! actor {
    ($socket:expr) => {
        $crate::process::Actor::spawn(env!("CARGO_BIN_EXE_haulier-actor"), $socket)
    };
    ($socket:expr, $tweak:expr) => {
        $crate::process::Actor::spawn_with(env!("CARGO_BIN_EXE_haulier-actor"), $socket, $tweak)
    };
}

/// Sends `signal` to process `id`, which the caller has started and not yet waited for.
///
/// # Panics
/// Where that cannot be.
pub fn signal(id: u32, signal: Signal) {
    let pid = i32::try_from(id).ok().and_then(Pid::from_raw).expect("a process id");
    kill_process(pid, signal).unwrap_or_else(|e| panic!("sending {signal:?} to {id}: {e}"));
}
