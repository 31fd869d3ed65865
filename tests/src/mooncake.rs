//! The real Mooncake: its master on loopback, and processes that load its store library.
//!
//! `HAULIER_MOONCAKE` names the library, beside which the master lies, as in the wheel for NPUs that `tests/run` fetches.
//! That library needs CANN; what it finds in its place are the simulated runtime and the two C++ libraries beside it. The
//! loader looks for those when a process starts, and the simulator reads its settings once, so each test has a process of
//! its own.

use std::{
    collections::BTreeMap,
    env,
    ffi::OsStr,
    fs,
    io::{self, Read, Write},
    net::{TcpListener, TcpStream},
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::Duration,
};

use haulier::Mooncake;
use haulier_sim::{install, log::Call};
use tempfile::TempDir;

use crate::{
    ascend,
    process::{Process, Serve, binary_with_mooncake, skip, wait_for},
};

/// Names the store library.
pub const LIBRARY: &str = "HAULIER_MOONCAKE";
/// What a process of a test is told: which one it is, where the master is, and the protocol.
const ROLE: &str = "HAULIER_TEST_MOONCAKE_ROLE";
const MASTER: &str = "HAULIER_TEST_MOONCAKE_MASTER";
const PROTOCOL: &str = "HAULIER_TEST_MOONCAKE_PROTOCOL";
/// Where the master tells its figures.
const METRICS: &str = "HAULIER_TEST_MOONCAKE_METRICS";
/// A folder where the processes of a trial leave each other signs.
const SIGNS: &str = "HAULIER_TEST_MOONCAKE_SIGNS";

/// The C++ libraries beside the simulated runtime.
const CPLUSPLUS: [&str; 2] = ["libllm_datadist.so", "libmetadef.so"];

/// The master, which ends with this.
#[derive(Debug)]
pub struct Master {
    process: Process,
    port: u16,
    metrics_port: u16,
    folder: PathBuf,
}

impl Master {
    /// Starts the master that lies in `folder`, on ports that are free, and returns when it listens.
    ///
    /// # Panics
    /// Where it does not start.
    pub fn start(folder: &Path) -> Self {
        Self::start_at(folder, free_port(), &[])
    }

    fn start_at(folder: &Path, port: u16, options: &[&str]) -> Self {
        let (program, metrics_port) = (folder.join("mooncake_master"), free_port());
        let mut command = Command::new(&program);
        command
            .args(["-rpc_address", "127.0.0.1", "-rpc_port", &port.to_string()])
            .args(["-metrics_port", &metrics_port.to_string()])
            .args(options)
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let mut process =
            Process::spawn(&mut command).unwrap_or_else(|e| panic!("{}: {e}", program.display()));
        wait_for("the master's port", || {
            assert!(process.ended().is_none(), "the master ended");
            TcpStream::connect(("127.0.0.1", port)).ok()
        });
        Master { process, port, metrics_port, folder: folder.into() }
    }

    /// Its address.
    pub fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// One of its figures, by the name that it has at its metrics port.
    ///
    /// # Panics
    /// Where it has none of this name.
    pub fn figure(&self, name: &str) -> u64 {
        let text = figures(self.metrics_port);
        let value = text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<f64>().ok());
        value.unwrap_or_else(|| panic!("the master does not tell {name}:\n{text}")) as u64
    }

    /// Kills it.
    pub fn kill(&mut self) {
        self.process.kill();
    }

    /// Starts another one in its place.
    pub fn restart(&mut self) {
        self.kill();
        *self = Self::start_at(&self.folder, self.port, &[]);
    }
}

fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port of loopback");
    listener.local_addr().expect("it is bound").port()
}

/// What the library needs in place of CANN, in a folder of its own.
///
/// # Panics
/// Where it is not built.
pub fn stand_ins(release: &str) -> TempDir {
    let folder = tempfile::tempdir().expect("a private directory");
    let runtime = ascend::install_into(folder.path(), release);
    let built = install::library("libhaulier_sim_ascend.so", "haulier-sim-ascend").expect("it is built");
    // Where cargo has its build script's outputs, of which the newest is this build's.
    let profile = built.ancestors().find(|folder| folder.join("build").is_dir()).expect("cargo's folder");
    for name in CPLUSPLUS {
        let outputs = fs::read_dir(profile.join("build")).expect("it can be read").flatten();
        let made = outputs
            .filter(|entry| entry.file_name().to_string_lossy().starts_with("haulier-sim-ascend-"))
            .map(|entry| entry.path().join("out").join(name))
            .filter_map(|file| Some((fs::metadata(&file).ok()?.modified().ok()?, file)))
            .max();
        let (_, file) = made.unwrap_or_else(|| panic!("{name} was not built: is g++ there?"));
        symlink(file, folder.path().join(name)).expect("the folder can be written");
    }
    assert!(runtime.is_file());
    folder
}

/// How a test's processes are started.
pub struct Trial {
    test: String,
    release: &'static str,
    protocol: &'static str,
    folder: PathBuf,
    stand_ins: TempDir,
    logs: TempDir,
    signs: TempDir,
    /// The cluster's.
    pub master: Master,
    environment: Vec<(&'static str, String)>,
}

/// What a process of a test left behind.
#[derive(Debug)]
pub struct Report {
    /// What it, and Mooncake in it, said.
    pub said: String,
    /// Every call of the simulated runtime, of all processes of the trial.
    pub calls: Vec<Call>,
}

impl Trial {
    /// A trial of `test`, the path of a test in the running program, against a master of its own. `None`, loudly, where
    /// there is no Mooncake.
    pub fn new(test: &str, release: &'static str, protocol: &'static str) -> Option<Self> {
        let Some(library) = env::var_os(LIBRARY).filter(|path| !path.is_empty()) else {
            skip(test, format_args!("{LIBRARY} names no Mooncake; tests/run fetches one"));
            return None;
        };
        let folder = Path::new(&library).parent().expect("a file in a folder").to_owned();
        Some(Trial {
            test: test.into(),
            release,
            protocol,
            master: Master::start(&folder),
            folder,
            stand_ins: stand_ins(release),
            logs: tempfile::tempdir().expect("a private directory"),
            signs: tempfile::tempdir().expect("a private directory"),
            environment: Vec::new(),
        })
    }

    /// One more variable for the processes.
    pub fn set(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.environment.push((name, value.into()));
        self
    }

    /// Starts the master anew, with these options.
    ///
    /// # Panics
    /// Where it does not start.
    pub fn restart_master(&mut self, options: &[&str]) {
        self.master.kill();
        self.master = Master::start_at(&self.folder, self.master.port, options);
    }

    /// Gives a command what it needs to load the library.
    pub fn prepare(&self, command: &mut Command) {
        command
            .env("LD_LIBRARY_PATH", self.stand_ins.path())
            .env(LIBRARY, self.folder.join("libmooncake_store.so"))
            .env(ascend::LIBRARY, self.stand_ins.path().join("libascendcl.so"))
            .env(ascend::RELEASE, self.release)
            .env("HAULIER_SIM_LOG", self.logs.path())
            .env(MASTER, self.master.address())
            .env(METRICS, self.master.metrics_port.to_string())
            .env(PROTOCOL, self.protocol)
            .env(SIGNS, self.signs.path())
            .envs(self.environment.iter().map(|(name, value)| (*name, value.as_str())));
        if self.protocol == "tcp" {
            command.env("MC_FORCE_TCP", "1");
        } else {
            command.env_remove("MC_FORCE_TCP");
        }
    }

    /// As [`prepare`](Self::prepare), for a command that finds the library on the loader's search path.
    pub fn prepare_to_search(&self, command: &mut Command) {
        self.prepare(command);
        let folders = [self.stand_ins.path(), &self.folder];
        command.env_remove(LIBRARY).env("LD_LIBRARY_PATH", env::join_paths(folders).expect("folders"));
    }

    /// How a node daemon is to be started that keeps its values in the cluster, and gives this much memory to it.
    pub fn serve(&self, pool: &str, segment: &str) -> Serve {
        let mut told = Command::new("");
        self.prepare(&mut told);
        let environment: Vec<_> =
            told.get_envs().map(|(name, value)| (name.to_owned(), value.map(OsStr::to_owned))).collect();
        Serve::pool(pool)
            .program(binary_with_mooncake())
            .arg("--mooncake")
            .arg(self.master.address())
            .args(["--mooncake-protocol", self.protocol, "--mooncake-segment", segment])
            .args(["--mooncake-staging", "16MiB"])
            .tweak(move |command| {
                for (name, value) in environment {
                    match value {
                        Some(value) => command.env(name, value),
                        None => command.env_remove(name),
                    };
                }
            })
    }

    /// Starts Mooncake's own client, which holds values in this much memory of its.
    ///
    /// # Panics
    /// Where it cannot be started.
    pub fn start_holder(&self, memory: &str) -> Process {
        let mut command = Command::new(self.folder.join("mooncake_client"));
        command
            .arg(format!("-master_server_address={}", self.master.address()))
            .args(["-host=127.0.0.1", "-metadata_server=P2PHANDSHAKE", "-protocol=tcp"])
            .arg(format!("-port={}", free_port()))
            .arg(format!("-global_segment_size={memory}"))
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        self.prepare(&mut command);
        Process::spawn(&mut command).expect("it lies beside the library")
    }

    /// Starts the test once more, in a process that has this role.
    ///
    /// # Panics
    /// Where it cannot be started.
    pub fn start(&self, role: &str) -> Process {
        let mut command = Command::new(env::current_exe().expect("a running program"));
        command.args(["--exact", &self.test, "--nocapture"]).env(ROLE, role);
        // To a file: it is shown where the test fails, whichever process is the cause.
        let said = fs::File::create(self.said_by(role)).expect("the folder can be written");
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(said);
        self.prepare(&mut command);
        Process::spawn(&mut command).expect("the test's own program")
    }

    /// Runs the test once more, in a process that has this role, to its end.
    ///
    /// # Panics
    /// Where it fails there.
    pub fn run(&self, role: &str) -> Report {
        self.finish(role, self.start(role))
    }

    /// As [`run`](Self::run), of one that was started.
    ///
    /// # Panics
    /// As there.
    pub fn finish(&self, role: &str, process: Process) -> Report {
        let output = process.output();
        let result = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(
            output.status.success() && result.contains("1 passed"),
            "{} as {role}: {}\n{result}",
            self.test,
            output.status
        );
        let said = fs::read(self.said_by(role)).expect("it was written");
        Report { said: String::from_utf8_lossy(&said).into_owned(), calls: self.calls() }
    }

    fn said_by(&self, role: &str) -> PathBuf {
        self.signs.path().join(format!("{role}.stderr"))
    }

    /// Leaves a sign for the other processes.
    pub fn sign(&self, name: &str) {
        sign_in(self.signs.path(), name);
    }

    /// Waits for a sign of another process.
    pub fn wait_for(&self, name: &str) {
        wait_in(self.signs.path(), name);
    }

    /// Every call of the simulated runtime until now.
    ///
    /// # Panics
    /// Where the log cannot be read.
    pub fn calls(&self) -> Vec<Call> {
        let files = fs::read_dir(self.logs.path()).expect("the log's folder").flatten();
        let text: String = files.map(|file| fs::read_to_string(file.path()).expect("a log")).collect();
        text.lines().map(|line| serde_json::from_str(line).expect("a call")).collect()
    }
}

impl Drop for Trial {
    fn drop(&mut self) {
        if thread::panicking() {
            for file in fs::read_dir(self.signs.path()).into_iter().flatten().flatten() {
                let said = fs::read(file.path()).unwrap_or_default();
                let name = file.file_name();
                let _ = writeln!(io::stderr(), "--- {}\n{}", name.display(), String::from_utf8_lossy(&said));
            }
        }
    }
}

/// The role of this process, where it has one.
pub fn role() -> Option<String> {
    env::var(ROLE).ok()
}

/// What a master tells at its metrics port.
fn figures(port: u16) -> String {
    let mut master = TcpStream::connect(("127.0.0.1", port)).expect("the master tells its figures");
    let request = b"GET /metrics HTTP/1.1\r\nHost: master\r\nConnection: close\r\n\r\n";
    master.write_all(request).expect("a question");
    master.set_read_timeout(Some(Duration::from_secs(10))).expect("a limit");
    let mut text = Vec::new();
    // It may keep the connection open: what came by then counts.
    let _ = master.read_to_end(&mut text);
    String::from_utf8_lossy(&text).into_owned()
}

/// What clients have asked the master about values until now: how often, by kind.
///
/// # Panics
/// Where this process has no role, or the master does not tell.
pub fn asked() -> BTreeMap<String, u64> {
    let port: u16 = env::var(METRICS).expect("the process has a role").parse().expect("a port");
    let text = figures(port);
    let counter = |line: &str| {
        let (name, count) = line.strip_prefix("master_")?.split_once("_requests_total ")?;
        // What else there is, heartbeats and the like, comes by itself.
        let of_values =
            ["put_", "exist_key", "replica_list", "remove"].iter().any(|kind| name.contains(kind));
        let count = count.trim().parse().ok()?;
        (of_values && count > 0).then(|| (name.to_owned(), count))
    };
    let counters: BTreeMap<String, u64> = text.lines().filter_map(counter).collect();
    assert!(text.contains("master_ping_requests_total"), "{text}");
    counters
}

/// Leaves a sign for the other processes of the trial.
///
/// # Panics
/// Where this process has no role.
pub fn sign(name: &str) {
    sign_in(Path::new(&env::var_os(SIGNS).expect("the process has a role")), name);
}

/// Waits for a sign of another process of the trial.
///
/// # Panics
/// Where this process has no role, or none comes.
pub fn wait_for_sign(name: &str) {
    wait_in(Path::new(&env::var_os(SIGNS).expect("the process has a role")), name);
}

fn sign_in(folder: &Path, name: &str) {
    fs::write(folder.join(name), b"").expect("the folder can be written");
}

fn wait_in(folder: &Path, name: &str) {
    wait_for(name, || folder.join(name).exists().then_some(()));
}

/// How a client of this process joins the trial's cluster, giving it `segment` bytes.
///
/// # Panics
/// Where this process has no role.
pub fn cluster(segment: u64) -> Mooncake {
    let told = |name| env::var(name).expect("the process has a role");
    Mooncake { segment, staging: 16 << 20, ..Mooncake::new(told(MASTER), told(PROTOCOL)) }
}

/// Calls the store's C ABI as an application without Haulier would.
#[derive(Debug)]
pub struct Raw(libloading::Library);

impl Raw {
    /// Loads the library.
    ///
    /// # Panics
    /// Where it cannot be loaded.
    pub fn load() -> Self {
        let path = env::var_os(LIBRARY).expect("the process has a role");
        // SAFETY: Mooncake's library, with what it needs on the loader's path.
        Raw(unsafe { libloading::Library::new(path) }.unwrap_or_else(|e| panic!("{e:?}")))
    }

    /// The function of this name.
    ///
    /// # Panics
    /// Where there is none.
    ///
    /// # Safety
    /// `F` must be its type.
    pub unsafe fn function<F: Copy>(&self, name: &str) -> F {
        // SAFETY: the caller's promise.
        *unsafe { self.0.get::<F>(name) }.unwrap_or_else(|e| panic!("{name}: {e}"))
    }
}

/// How long a call may take that Mooncake ends by itself, with its own retries.
pub const SLOW: Duration = Duration::from_secs(60);
