//! The conformance suite: what every backend must do, as plain functions over a [`Device`] and a [`Fixture`].
//!
//! A backend is added with one line of [`Suite::backend`] in `tests/conformance.rs`; a backend outside of this workspace
//! does the same in a test of its own. Each case is a trial named `[backend/device] group::case`. What a backend lacks,
//! and what is known to fail, is data: it shows with its reason and is counted in the last line.
//!
//! | group | what it is about |
//! |---|---|
//! | [`current`] | which device is current, and that it is given back |
//! | [`stream`] | the current stream, and waiting for one |
//! | [`memory`] | locating, allocating, copying |
//! | [`ipc`] | exporting, and importing in another process |
//! | [`register`] | registrations as guards |
//! | [`caps`] | capabilities tell the truth |
//! | [`identity`] | who a device is |
//! | [`errors`] | what an error says |
//! | [`store`] | a client on the device, over each engine |

use std::{
    collections::BTreeMap,
    env, fmt,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    process::{self, ExitCode},
    sync::{Arc, mpsc},
    thread,
    time::Duration,
};

use hal::{Bound, Deadline, Device, Place, Region};
use libtest_mimic::{Arguments, Completion, Trial};
use parking_lot::Mutex;

use crate::{
    fixture::{Fixture, Need},
    peer::{self, Link},
};

pub mod caps;
pub mod current;
pub mod errors;
pub mod identity;
pub mod ipc;
pub mod memory;
pub mod register;
pub mod store;
pub mod stream;

/// One case for devices `D`.
pub struct Case<D: Device> {
    /// `group::case`.
    pub name: String,
    /// What it cannot do without.
    pub needs: &'static [Need],
    /// Panics where the backend does not conform.
    pub run: fn(&dyn Fixture<D>),
}

/// Makes a group's list of cases: each function, and what it needs.
macro_rules! cases {
    ($($case:ident $([$($need:ident),*])?),* $(,)?) => {
        /// The cases of this group.
        pub fn cases<D: hal::Device>() -> Vec<$crate::conformance::Case<D>> {
            let group = module_path!().rsplit("::").next().unwrap_or_default();
            vec![$($crate::conformance::Case {
                name: format!("{group}::{}", stringify!($case)),
                needs: &[$($($crate::fixture::Need::$need),*)?],
                run: $case::<D>,
            }),*]
        }
    };
}
pub(crate) use cases;

/// Every case.
pub fn cases_of_all_groups<D: Device>() -> Vec<Case<D>> {
    let mut all = current::cases();
    all.extend(stream::cases());
    all.extend(memory::cases());
    all.extend(ipc::cases());
    all.extend(register::cases());
    all.extend(caps::cases());
    all.extend(identity::cases());
    all.extend(errors::cases());
    all.extend(store::cases());
    all
}

/// A case that is known to fail on a backend. It turns red when it passes, so that the entry does not outlive its reason.
#[derive(Debug, Clone, Copy)]
pub struct ExpectedFailure {
    /// The trial's full name.
    pub trial: &'static str,
    /// Why it fails, and what will change that.
    pub reason: &'static str,
}

/// A trial that takes longer hangs: the process ends and names it.
const WATCHDOG: Duration = Duration::from_secs(120);

/// Names backends that must be there, separated by commas.
const REQUIRE: &str = "HAULIER_REQUIRE";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Came {
    Passed,
    Failed,
    Skipped(&'static str),
    FailedAsExpected(&'static str),
}

/// What became of each trial, by backend.
#[derive(Debug, Default)]
struct Tally(Mutex<BTreeMap<&'static str, Vec<(String, Came)>>>);

impl Tally {
    fn note(&self, backend: &'static str, trial: &str, came: Came) {
        self.0.lock().entry(backend).or_default().push((trial.to_owned(), came));
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("conformance: ")?;
        let tally = self.0.lock();
        let mut reasons = Vec::new();
        for (i, (backend, trials)) in tally.iter().enumerate() {
            let skipped = trials.iter().filter(|(_, came)| matches!(came, Came::Skipped(_))).count();
            let expected =
                trials.iter().filter(|(_, came)| matches!(came, Came::FailedAsExpected(_))).count();
            let comma = if i == 0 { "" } else { "; " };
            write!(f, "{comma}{backend} {} run, {skipped} skipped", trials.len() - skipped)?;
            if expected > 0 {
                write!(f, ", {expected} failed as expected")?;
            }
            reasons.extend(trials.iter().filter_map(|(trial, came)| match came {
                Came::Skipped(why) => Some(format!("\n  skipped {trial}: {why}")),
                Came::FailedAsExpected(why) => Some(format!("\n  failed as expected {trial}: {why}")),
                Came::Passed | Came::Failed => None,
            }));
        }
        reasons.sort();
        reasons.iter().try_for_each(|line| f.write_str(line))
    }
}

type Serve = Box<dyn Fn(&str, &Link) + Send>;

/// Lists trials, runs them and counts.
#[derive(Default)]
pub struct Suite {
    trials: Vec<Trial>,
    tally: Arc<Tally>,
    expected: &'static [ExpectedFailure],
    /// What a peer process of this device does, by `backend/device`.
    peers: BTreeMap<String, Serve>,
    present: Vec<&'static str>,
    absent: Vec<(&'static str, String)>,
}

impl Suite {
    /// A suite in which these cases are known to fail.
    pub fn new(expected: &'static [ExpectedFailure]) -> Self {
        Suite { expected, ..Suite::default() }
    }

    /// Adds a backend with this many devices. `make` gives the fixture of one of them, afresh for each trial.
    #[must_use]
    pub fn backend<D: Device, F: Fixture<D> + 'static>(
        mut self,
        name: &'static str,
        devices: u32,
        make: fn(u32) -> F,
    ) -> Self {
        self.present.push(name);
        for device in 0..devices {
            let label = format!("{name}/{device}");
            let lacks = make(device).lacks();
            for case in cases_of_all_groups::<D>() {
                let trial = format!("[{label}] {}", case.name);
                let missing = lacks.iter().find(|(need, _)| case.needs.contains(need)).map(|(_, why)| *why);
                let expected = self.expected.iter().find(|e| e.trial == trial).map(|e| e.reason);
                let tally = Arc::clone(&self.tally);
                let on = label.clone();
                self.trials.push(Trial::ignorable_test(trial.clone(), move || {
                    if let Some(why) = missing {
                        tally.note(name, &trial, Came::Skipped(why));
                        return Ok(Completion::ignored_with(why));
                    }
                    let outcome = watched(&trial, || {
                        ON.set(Some(on.clone()));
                        let fixture = make(device);
                        fixture.enter();
                        (case.run)(&fixture);
                    });
                    judge(name, &trial, expected, outcome, &tally)
                }));
            }
            let serve = move |role: &str, link: &Link| {
                let fixture = make(device);
                fixture.enter();
                match role {
                    ipc::ROLE => ipc::serve(&fixture, link),
                    identity::ROLE => identity::serve(&fixture, link),
                    other => panic!("no peer plays {other}"),
                }
            };
            self.peers.insert(label, Box::new(serve));
        }
        self
    }

    /// Names a backend that is not here, and why.
    #[must_use]
    pub fn absent(mut self, name: &'static str, why: impl fmt::Display) -> Self {
        self.absent.push((name, why.to_string()));
        self
    }

    /// Adds trials that are no cases of the suite.
    #[must_use]
    pub fn also(mut self, trials: Vec<Trial>) -> Self {
        self.trials.extend(trials);
        self
    }

    /// Runs what the command line asks for. The whole of a test's `main`.
    pub fn run(self) -> ExitCode {
        match peer::role() {
            Some((role, link)) => {
                self.serve(&role, &link);
                ExitCode::SUCCESS
            }
            None => self.run_with(&Arguments::from_args()),
        }
    }

    /// What a peer process does that was started for a trial.
    ///
    /// # Panics
    /// Where no trial asks for this.
    pub fn serve(self, role: &str, link: &Link) {
        let (label, role) = role.split_once(' ').expect("a role is `backend/device role`");
        self.peers[label](role, link);
    }

    /// Runs the trials, and prints what became of them.
    pub fn run_with(self, args: &Arguments) -> ExitCode {
        let conclusion = libtest_mimic::run(args, self.trials);
        if args.list {
            return ExitCode::SUCCESS;
        }
        println!("{}", self.tally);
        for (backend, why) in &self.absent {
            println!("  absent {backend}: {why}");
        }
        let required = env::var(REQUIRE).unwrap_or_default();
        let missing: Vec<&str> = required
            .split(',')
            .map(str::trim)
            .filter(|backend| !backend.is_empty() && !self.present.contains(backend))
            .collect();
        if !missing.is_empty() {
            eprintln!("conformance: {REQUIRE} asks for {}, which is absent", missing.join(", "));
            return ExitCode::FAILURE;
        }
        let known =
            |e: &&ExpectedFailure| self.tally.0.lock().values().flatten().any(|(trial, _)| trial == e.trial);
        let whole = args.filter.is_none() && args.skip.is_empty();
        if whole && let Some(stale) = self.expected.iter().find(|e| !known(e)) {
            eprintln!("conformance: there is no trial {} that could fail as expected", stale.trial);
            return ExitCode::FAILURE;
        }
        conclusion.exit_code()
    }
}

type Caught = Result<(), Box<dyn std::any::Any + Send>>;

fn judge(
    backend: &'static str,
    trial: &str,
    expected: Option<&'static str>,
    outcome: Caught,
    tally: &Tally,
) -> Result<Completion, libtest_mimic::Failed> {
    match (outcome, expected) {
        (Ok(()), None) => {
            tally.note(backend, trial, Came::Passed);
            Ok(Completion::Completed)
        }
        (Ok(()), Some(reason)) => {
            tally.note(backend, trial, Came::Failed);
            Err(format!("passed, though it is known to fail ({reason}); take it off the list").into())
        }
        (Err(_), Some(reason)) => {
            tally.note(backend, trial, Came::FailedAsExpected(reason));
            Ok(Completion::ignored_with(format!("failed as expected: {reason}")))
        }
        (Err(panic), None) => {
            tally.note(backend, trial, Came::Failed);
            resume_unwind(panic)
        }
    }
}

pub(crate) fn watched(trial: &str, work: impl FnOnce()) -> Caught {
    let (done, watch) = mpsc::channel::<()>();
    let name = trial.to_owned();
    let watchdog = thread::spawn(move || {
        if watch.recv_timeout(WATCHDOG) == Err(mpsc::RecvTimeoutError::Timeout) {
            eprintln!("conformance: {name} hangs");
            process::abort();
        }
    });
    let outcome = catch_unwind(AssertUnwindSafe(work));
    drop(done);
    let _ = watchdog.join();
    outcome
}

thread_local! {
    /// The `backend/device` that the trial on this thread is about.
    static ON: std::cell::RefCell<Option<String>> = const { std::cell::RefCell::new(None) };
}

/// Another process with a fixture of the same device, in this role. To be called on the trial's own thread.
pub(crate) fn peer_as(role: &str) -> peer::Peer {
    let on = ON.with_borrow(Clone::clone).expect("on the trial's own thread");
    peer::Peer::again(&format!("{on} {role}"))
}

/// Long enough for a loaded machine; a case that reaches it has failed.
pub(crate) fn patient() -> Deadline {
    Deadline::after(Duration::from_secs(30))
}

/// `len` bytes that differ from place to place and from seed to seed.
pub fn pattern(seed: u8, len: usize) -> Vec<u8> {
    (0..len).map(|i| (i as u8).wrapping_mul(31).wrapping_add((i >> 8) as u8).wrapping_add(seed)).collect()
}

/// Copies bytes into a region by the device.
pub fn write<D: Device>(bound: &Bound<'_, D>, to: Region, bytes: &[u8]) {
    let from = Region::host(bytes.as_ptr().expose_provenance(), bytes.len());
    // SAFETY: the caller of a case holds both for the whole call, and nothing queued touches them.
    unsafe { bound.copy(to, from) }.expect("the device copies in");
}

/// Copies a region's bytes out by the device.
pub fn read<D: Device>(bound: &Bound<'_, D>, from: Region) -> Vec<u8> {
    let mut bytes = vec![0; from.len];
    let to = Region::host(bytes.as_mut_ptr().expose_provenance(), bytes.len());
    // SAFETY: as in `write`.
    unsafe { bound.copy(to, from) }.expect("the device copies out");
    bytes
}

/// Runs `work` on a thread of its own that [`Fixture::enter`] has seen.
pub(crate) fn on_thread<D: Device, R: Send>(f: &dyn Fixture<D>, work: impl FnOnce() -> R + Send) -> R {
    thread::scope(|scope| {
        let thread = scope.spawn(|| {
            f.enter();
            work()
        });
        thread.join().unwrap_or_else(|panic| resume_unwind(panic))
    })
}

/// Whether the region is the device's own memory rather than the host's.
pub(crate) fn is_device(region: Region) -> bool {
    matches!(region.place, Place::Device(_))
}

/// Host memory whose first byte is aligned like a page.
pub(crate) struct Page {
    bytes: Vec<u8>,
    start: usize,
}

impl Page {
    const ALIGN: usize = 4096;

    pub(crate) fn of(len: usize) -> Self {
        let bytes = vec![0u8; len + Self::ALIGN];
        let start = bytes.as_ptr().align_offset(Self::ALIGN);
        Page { bytes, start }
    }

    pub(crate) fn region(&self) -> Region {
        let addr = self.bytes.as_ptr().expose_provenance() + self.start;
        Region::host(addr, self.bytes.len() - Self::ALIGN)
    }
}
