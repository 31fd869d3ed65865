//! `haulier-compare`: Haulier beside other stores, interleaved in one run. `tests/peers/compare` installs what it needs.

use std::{
    cell::RefCell,
    env, fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::ExitCode,
    rc::Rc,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use clap::Parser;
use haulier_peers::{
    chart,
    failure::{During, Failure, Result},
    floor::{self, Floor, FloorServer, Way},
    job::{Op, Shape},
    machine::{self, Machine},
    mooncake::{Cluster, Direct, Own, Registered, Staged},
    network,
    report::{About, Report, Subject},
    run::{Plan, run},
    scale,
    store::{Here, Limits, Peer, Store},
    stores::{Fresh, HaulierHere, HaulierNode, Memcached, Memcpy, Redis},
    worker::{InWorker, Worker},
};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

/// Values of one call, and bytes of each.
const BATCHES: [Shape; 2] = [Shape { values: 400, bytes: 4 << 10 }, Shape { values: 64, bytes: 64 << 10 }];

/// The two tables: what each is about, and the name of its files.
const STORES: (Subject, &str) =
    (Subject { title: "Haulier beside other stores", reference: "memcpy" }, "compare");
const MOONCAKE: (Subject, &str) = (
    Subject {
        title: "Haulier's engine for Mooncake beside Mooncake's own client",
        reference: "mooncake, registered once",
    },
    "mooncake",
);

/// Measure Haulier beside memcpy, bare floors and other stores, in turns, in one run
///
/// Servers are started on Unix sockets or in a network namespace with nothing but loopback, and end with this process,
/// however that ends. A peer that cannot be had is named in the table with the reason.
#[derive(Debug, Parser)]
#[command(name = "haulier-compare", args_override_self = true)]
struct Args {
    /// Fewer and shorter rounds: at most some 5 minutes
    #[arg(long)]
    quick: bool,

    /// Where the table (compare.md, compare.json) and the chart (compare.svg) go
    #[arg(long, value_name = "DIR", default_value = "target/peers")]
    out: PathBuf,

    /// The `haulier` command [default: beside this program]
    #[arg(long, value_name = "FILE")]
    haulier: Option<PathBuf>,

    /// A Python that has the peers of requirements.txt
    #[arg(long, value_name = "FILE")]
    python: Option<PathBuf>,

    /// Only what needs nothing installed: memcpy, the floors, Haulier
    #[arg(long)]
    bare: bool,

    /// Instead, Haulier's engine for Mooncake beside Mooncake's own client: mooncake.md and mooncake.json, no chart
    #[arg(long, conflicts_with = "bare")]
    mooncake: bool,

    /// With --mooncake: its store library, beside which its programs lie
    #[arg(long, value_name = "FILE", env = "HAULIER_MOONCAKE")]
    mooncake_library: Option<PathBuf>,

    /// Instead, measure 1, 2, 8 and 32 processes that put and get 4 KiB through one daemon (scale.md, scale.json)
    #[arg(long, conflicts_with = "mooncake")]
    scale: bool,

    /// Sizes of values; the batches have 400 of 4KiB and 64 of 64KiB and run where that size is among them
    #[arg(
        long,
        value_name = "SIZE,...",
        value_delimiter = ',',
        value_parser = size,
        default_value = "4KiB,64KiB,1MiB,16MiB,256MiB",
        default_value_if("mooncake", "true", "4KiB,1MiB,16MiB")
    )]
    sizes: Vec<usize>,

    /// Rounds for each size [default: 15; 5 with --quick]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    rounds: Option<u16>,
}

fn size(text: &str) -> std::result::Result<usize, String> {
    let (number, unit) = match (text.strip_suffix("KiB"), text.strip_suffix("MiB")) {
        (Some(number), _) => (number, 1 << 10),
        (_, Some(number)) => (number, 1 << 20),
        _ => (text, 1),
    };
    let bytes = number.parse().ok().and_then(|number: usize| number.checked_mul(unit));
    bytes
        .filter(|bytes| (1..=1 << 30).contains(bytes))
        .ok_or_else(|| format!("{text:?} is no size of 1 to 1024MiB"))
}

fn main() -> ExitCode {
    let done = match env::args().nth(1).as_deref() {
        Some("floor") => floor::serve(),
        Some(scale::CLIENT) => scale::client(env::args().skip(2)),
        _ => compare(&Args::parse()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("haulier-compare: {e}");
            ExitCode::FAILURE
        }
    }
}

fn compare(args: &Args) -> Result<()> {
    let interrupted = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        signal_hook::flag::register(signal, Arc::clone(&interrupted)).during("watching for signals")?;
    }
    if args.scale {
        return measure_scale(args, &interrupted);
    }
    let machine = Machine::here();
    let plan = plan(args);
    let most = plan.shapes.iter().map(|shape| shape.total()).max().unwrap_or(0);
    require_memory(most, args.bare)?;
    fs::create_dir_all(&args.out).during(args.out.display())?;
    let dir = private_dir()?;

    let start = Instant::now();
    let Field { mut peers, about, cluster } = match args.mooncake {
        true => mooncake_field(args, most, dir.path())?,
        false => field(args, &plan, most, dir.path())?,
    };
    let mut last = None;
    let cells = run(&mut peers, &plan, |shape, round| {
        go_on(&interrupted)?;
        if last != Some((shape, round)) {
            last = Some((shape, round));
            let what = if round == 0 { "checking bytes".into() } else { format!("round {round}") };
            eprintln!("{:4.0} s  {shape}: {what}", start.elapsed().as_secs_f64());
        }
        Ok(())
    })?;
    drop(peers);
    drop(cluster);

    let (subject, name) = if args.mooncake { MOONCAKE } else { STORES };
    let report = Report::new(subject, machine, &plan, start.elapsed().as_secs_f64(), about, &cells);
    write(&args.out, name, &report)?;
    let ours: Vec<String> = cells
        .iter()
        .filter(|cell| cell.peer.starts_with("haulier"))
        .filter_map(|cell| Some(format!("{}, {}: {}", cell.op.label(), cell.shape, cell.failed.as_ref()?)))
        .collect();
    if ours.is_empty() { Ok(()) } else { Err(Failure::new("Haulier's own calls failed", ours.join("; "))) }
}

fn measure_scale(args: &Args, interrupted: &AtomicBool) -> Result<()> {
    fs::create_dir_all(&args.out).during(args.out.display())?;
    let dir = private_dir()?;
    let (rounds, each) = if args.quick { (3, 500) } else { (5, 3000) };
    let rounds = args.rounds.map_or(rounds, usize::from);
    let each = Duration::from_millis(each);
    let scale = scale::run(&haulier(args)?, dir.path(), rounds, each, |round, clients| {
        eprintln!("round {}: {clients} clients", round + 1);
        go_on(interrupted)
    })?;
    scale.write(&args.out)?;
    println!("{}", scale.markdown());
    eprintln!("written: scale.md and scale.json in {}", args.out.display());
    Ok(())
}

fn go_on(interrupted: &AtomicBool) -> Result<()> {
    match interrupted.load(Ordering::Relaxed) {
        true => Err(Failure("interrupted: nothing was written".into())),
        false => Ok(()),
    }
}

/// A node serves in a directory of its user alone.
fn private_dir() -> Result<tempfile::TempDir> {
    let private = fs::Permissions::from_mode(0o700);
    let dir = tempfile::Builder::new().prefix("haulier-peers-").permissions(private).tempdir();
    dir.during("a private directory")
}

/// The `haulier` command.
fn haulier(args: &Args) -> Result<PathBuf> {
    match &args.haulier {
        Some(path) => Ok(path.clone()),
        None => Ok(env::current_exe().during("this program's own file")?.with_file_name("haulier")),
    }
}

fn plan(args: &Args) -> Plan {
    let mut sizes = args.sizes.clone();
    sizes.sort_unstable();
    sizes.dedup();
    let batches = BATCHES.into_iter().filter(|batch| sizes.contains(&batch.bytes));
    let mut shapes: Vec<Shape> = sizes.iter().map(|&bytes| Shape::one(bytes)).chain(batches).collect();
    // What takes long comes last, and has what time is left.
    shapes.sort_by_key(|shape| shape.total());
    let (rounds, budget, time) = if args.quick { (5, 15, 230) } else { (15, 60, 2700) };
    Plan {
        shapes,
        rounds: args.rounds.map_or(rounds, usize::from),
        limits: Limits { budget: Duration::from_millis(budget), least: 2, most: 2000 },
        time: Duration::from_secs(time),
    }
}

/// Refuses early what would take more memory than there is. Counted are all copies of the largest call that peers keep.
fn require_memory(most: usize, bare: bool) -> Result<()> {
    let needed = most as u64 * if bare { 12 } else { 28 } + (1 << 30);
    let available = machine::available();
    if needed <= available {
        return Ok(());
    }
    let mib = |bytes: u64| bytes >> 20;
    Err(Failure(format!(
        "the peers take up to {} MiB together, and {} MiB are available: choose smaller --sizes",
        mib(needed),
        mib(available)
    )))
}

/// Starts every peer; those that cannot be had are described only.
fn field(args: &Args, plan: &Plan, most: usize, dir: &Path) -> Result<Field> {
    let mut field = Field::default();
    field.add(Ok(Memcpy::new(most)))?;
    field.add(Ok(Fresh::default()))?;

    // Each shape has one value and one slot that is granted ahead.
    let arena =
        plan.shapes.iter().map(|shape| 2 * shape.total() + 128 * shape.values).sum::<usize>() + (1 << 20);
    let server = Rc::new(RefCell::new(FloorServer::start(dir, arena)?));
    for way in [Way::Socket, Way::Futex, Way::Mailbox, Way::Index] {
        field.add(Ok(Floor::new(&server, way)))?;
    }

    let pool = 2 * most + (256 << 20);
    field.add(HaulierNode::start(&haulier(args)?, dir, pool))?;
    field.add(HaulierHere::open(pool))?;
    if !args.bare {
        field.add_or_name("redis", "Redis over a Unix socket", Redis::start(dir, most));
        field.add_or_name("memcached", "memcached over a Unix socket", Memcached::start(dir, most));
        field.add_workers(args.python.as_deref(), dir, most);
    }
    Ok(field)
}

/// Mooncake's own client and Haulier's engine, each used in two ways, on one cluster.
fn mooncake_field(args: &Args, most: usize, dir: &Path) -> Result<Field> {
    let mut field = Field::default();
    field.add(Ok(Memcpy::new(most)))?;
    let cluster = match &args.mooncake_library {
        Some(library) => network::leave().and_then(|()| Cluster::start(library, dir, 8 * most + (256 << 20))),
        None => Err(Failure("no --mooncake-library was named; tests/peers/compare fetches one".into())),
    };
    match cluster {
        Ok(cluster) => {
            for way in [Registered::Once, Registered::PerCall] {
                field.add_or_name(way.name(), way.about(), Own::join(&cluster, most, way));
            }
            field.add(Direct::join(&cluster, most))?;
            field.add(Staged::join(&cluster))?;
            field.cluster = Some(cluster);
        }
        Err(why) => {
            for way in [Registered::Once, Registered::PerCall] {
                field.name_only(way.name(), way.about(), &why);
            }
            for (name, about) in [Direct::NAME, Staged::NAME] {
                field.name_only(name, about, &why);
            }
        }
    }
    Ok(field)
}

/// Who takes part.
#[derive(Default)]
struct Field {
    peers: Vec<Box<dyn Peer>>,
    about: Vec<About>,
    /// Outlives its clients.
    cluster: Option<Cluster>,
}

impl Field {
    fn add<S: Store + 'static>(&mut self, store: Result<S>) -> Result<()> {
        self.take(Box::new(Here(store?)));
        Ok(())
    }

    fn take(&mut self, peer: Box<dyn Peer>) {
        self.about.push(About::present(&*peer));
        self.peers.push(peer);
    }

    fn add_or_name<S: Store + 'static>(&mut self, name: &str, about: &str, store: Result<S>) {
        match store {
            Ok(store) => self.take(Box::new(Here(store))),
            Err(why) => self.name_only(name, about, &why),
        }
    }

    fn name_only(&mut self, name: &str, about: &str, why: &Failure) {
        eprintln!("not measured: {name}: {why}");
        self.about.push(About { name: name.into(), about: about.into(), missing: Some(why.to_string()) });
    }

    /// The stores whose clients are Python's: a process for each kind, which may be used in several ways.
    fn add_workers(&mut self, python: Option<&Path>, dir: &Path, most: usize) {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("worker.py");
        for (kind, rests, ways) in WORKERS {
            let started = match python {
                Some(python) => Worker::start(python, &script, kind, rests, dir, most),
                None => Err(Failure("no --python was named; tests/peers/compare installs one".into())),
            };
            match started {
                Ok(worker) => {
                    let worker = Rc::new(RefCell::new(worker));
                    for &(mode, name, about, ops) in ways {
                        self.take(Box::new(InWorker { worker: Rc::clone(&worker), mode, name, about, ops }));
                    }
                }
                Err(why) => ways.iter().for_each(|(_, name, about, _)| self.name_only(name, about, &why)),
            }
        }
    }
}

/// Kinds of workers, and for each whether it is stopped while others are measured, and the ways to use it: mode, name,
/// description, operations. Mooncake's must go on, because its master wants to hear from its clients; NIXL has threads that
/// never sleep.
type Ways = &'static [(&'static str, &'static str, &'static str, &'static [Op])];
const COPIES: &[Op] = &[Op::Put, Op::GetInto];
const WORKERS: [(&str, bool, Ways); 3] = [
    (
        "mooncake",
        false,
        &[
            (
                "registered-once",
                "mooncake, registered once",
                "Mooncake Store inside the caller's process, its master beside it (TCP on loopback): put_from, get_into. \
                 Called from Python: about 1 µs of each call is Python's",
                COPIES,
            ),
            (
                "register-per-call",
                "mooncake, registered per call",
                "the same, with register_buffer and unregister_buffer around each call. Called from Python",
                COPIES,
            ),
        ],
    ),
    (
        "mooncake-light",
        false,
        &[(
            "light",
            "mooncake, light client",
            "Mooncake's light client through its daemon: put of private memory; put in place: put_from of its memory pool, \
             which the daemon copies; get_into: get_buffer and a copy out of it; view: get_buffer, which is a view of the \
             daemon's hot cache where the value is in it, else a copy. Called from Python: about 1 µs of each call is Python's",
            &[Op::Put, Op::PutInPlace, Op::GetInto, Op::View],
        )],
    ),
    (
        "nixl",
        true,
        &[(
            "prepared",
            "nixl",
            "NIXL over UCX, between two agents of one process, transfers prepared: no keys, no store, one receiver. Called \
             from Python: about 1 µs of each call is Python's, and more for each look whether it is done",
            COPIES,
        )],
    ),
];

fn write(out: &Path, name: &str, report: &Report) -> Result<()> {
    let json = serde_json::to_string_pretty(report).during("writing JSON")?;
    let table = report.markdown();
    let mut files = vec![("json", json), ("md", table.clone())];
    if report.subject == STORES.0 {
        files.push(("svg", chart::draw(report)));
    }
    for (kind, text) in &files {
        let path = out.join(format!("{name}.{kind}"));
        fs::write(&path, text).during(path.display())?;
        eprintln!("written: {}", path.display());
    }
    println!("{table}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read() {
        assert_eq!(size("4KiB"), Ok(4096));
        assert_eq!(size("256MiB"), Ok(256 << 20));
        assert_eq!(size("77"), Ok(77));
        for wrong in ["", "KiB", "0", "-1", "2048MiB", "99999999999999999999MiB", "18014398509481985KiB"] {
            assert!(size(wrong).is_err(), "{wrong}");
        }
    }
}
