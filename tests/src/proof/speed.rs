//! How fast, beside the driver's plain copy of the same moment; and what waiting for a ready stream costs.
//!
//! Every turn takes one sample of each thing that is compared, so that whatever else the machine does hits all of them.

use std::{
    env,
    fmt::Write,
    time::{Duration, Instant},
};

use hal::{Bound, Buffer, Deadline, Device, DeviceExt, Region};
use haulier::{Payload, Put, StoreClient};

use super::{Backend, Found, ProofNode, Watched, Way};
use crate::{
    conformance::{Page, pattern, read, write},
    fixture::Fixture,
};

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;
const KEY: &str = "k";

/// How much is measured.
struct Extent {
    sizes: &'static [usize],
    /// Where readiness is measured.
    small: usize,
    large: usize,
    pool: u64,
    budget: Duration,
}

const WHOLE: Extent = Extent {
    sizes: &[4 * KIB, 64 * KIB, MIB, 16 * MIB, 256 * MIB],
    small: 4 * KIB,
    large: 16 * MIB,
    pool: 1 << 30,
    budget: Duration::from_secs(1),
};

const QUICK: Extent = Extent {
    sizes: &[4 * KIB, MIB],
    small: 4 * KIB,
    large: MIB,
    pool: 64 << 20,
    budget: Duration::from_millis(50),
};

/// Turns that a row has at least, and those before that are not counted.
const TURNS_MIN: usize = 10;
const WARM_UP: usize = 3;
/// What waiting may add to the median of a small put, in percent.
const TARGET: f64 = 3.0;

/// Both tables, as text.
///
/// # Panics
/// Where a call fails, bytes differ, or something did not go the way that is measured.
pub fn measure<B: Backend>(found: &Found, quick: bool) -> String {
    let extent = if quick { QUICK } else { WHOLE };
    let judged = !cfg!(debug_assertions) && !found.simulated;
    let f = &B::fixture(0);
    f.enter();
    let mut speed = String::from(
        "speed: medians; the floor is the driver's plain copy between the device and pinned memory, in the same turns\n\
         op        path     size         turns    median us       p95 us    GiB/s   floor us  floor GiB/s  x floor\n",
    );
    let mut cost = String::from(
        "readiness: what the steps before sending add to a put of memory that is ready, in the same turns. `without` is a \
         put\nthat is told to wait for nothing, less the time of locating its memory; `alone` are the steps by themselves\n\
         path     size         turns       put us   without us   cost %   alone us   alone %   noise %\n",
    );
    for way in Way::BOTH {
        let program = env::current_exe().expect("/proc is mounted");
        let node = ProofNode::start::<B>(&program, way, extent.pool);
        let client = node.client(f.device());
        for &size in extent.sizes {
            rows_of::<B>(&mut speed, f, &client, way, size, extent.budget);
        }
        for size in [extent.small, extent.large] {
            readiness_of::<B>(&mut cost, f, &client, way, size, extent.budget, judged);
        }
    }
    if !judged {
        cost.push_str(
            "on a simulator, or built without optimisation: no figure here says anything about speed\n",
        );
    }
    format!("{speed}\n{cost}")
}

/// put and get_into of one size.
fn rows_of<B: Backend>(
    table: &mut String,
    f: &B::Fixture,
    client: &StoreClient<B::Device>,
    way: Way,
    size: usize,
    budget: Duration,
) {
    let bytes = pattern(size as u8, size);
    let mut buffer = f.device().buffer(size).expect("device memory");
    let bound = f.device().bind_current().expect("it binds");
    write(&bound, buffer.region(), &bytes);
    let page = Page::of(size);
    // Where it cannot be pinned, the floor is that of pageable memory.
    let _pinned = bound.register(page.region()).ok();
    let copy = |to: Region, from: Region| {
        // SAFETY: both live until the end of this function, and no two things touch them at once.
        timed(|| unsafe { f.plain_copy(to, from) })
    };
    let (here, there) = (page.region(), buffer.region());

    let before = way.count(client, "put", "stored");
    let [floor, put] =
        in_turns(budget, [&mut || copy(here, there), &mut || put_once(client, (&buffer).into())]);
    assert!(way.count(client, "put", "stored") > before, "puts did not go by {}", way.label());
    stored(client, &buffer);
    assert!(client.view(KEY).expect("it is stored")[..] == bytes, "other bytes were stored");
    row(table, "put", way, size, &put, &floor);

    write(&bound, buffer.region(), &vec![0; size]);
    assert_eq!(client.get_into(KEY, &mut buffer).expect("it is stored"), size as u64);
    assert!(read(&bound, buffer.region()) == bytes, "other bytes came back");
    let [floor, get] = in_turns(
        budget,
        [&mut || copy(there, here), &mut || {
            timed(|| client.get_into(KEY, &mut buffer).expect("it is stored"))
        }],
    );
    row(table, "get_into", way, size, &get, &floor);
    client.remove(KEY).expect("the node serves");
}

/// What the steps cost a put of one size.
fn readiness_of<B: Backend>(
    table: &mut String,
    f: &B::Fixture,
    client: &StoreClient<B::Device>,
    way: Way,
    size: usize,
    budget: Duration,
    judged: bool,
) {
    let buffer = f.device().buffer(size).expect("device memory");
    let stream = f.stream();
    let bound = f.device().bind_current().expect("it binds");
    write(&bound, buffer.region(), &pattern(0, size));
    let [put, untold, locate, wait] = f.device().with_stream(stream, || {
        in_turns(
            2 * budget,
            [
                &mut || put_once(client, (&buffer).into()),
                &mut || put_once(client, Payload::from(&buffer).already_done()),
                &mut || timed(|| locate_once(&bound, buffer.region())),
                &mut || {
                    timed(|| {
                        bound.sync_stream(bound.current_stream(), Deadline::passed()).expect("it is idle")
                    })
                },
            ],
        )
    });
    let (located, alone) = (locate.median(), locate.median() + wait.median());
    let without = untold.median() - located;
    let percent = |of: f64| 100.0 * of / without;
    let cost = percent(put.median() - without);
    // How far the middle half of the same samples lies apart.
    let noise = percent(untold.at(75) - untold.at(25));
    let verdict = match size {
        _ if !judged => "",
        size if size == WHOLE.small && cost <= TARGET => "target 3 %: met",
        size if size == WHOLE.small => "target 3 %: missed",
        size if size == WHOLE.large && cost <= noise => "within noise",
        size if size == WHOLE.large => "beyond noise",
        _ => "",
    };
    let _ = writeln!(
        table,
        "{:<8} {:<12} {:>5} {:>12.2} {without:>12.2} {cost:>8.2} {alone:>10.2} {:>9.2} {noise:>9.2}  {verdict}",
        way.label(),
        label(size),
        put.0.len(),
        put.median(),
        percent(alone),
    );
}

fn locate_once<D: Device>(bound: &Bound<'_, D>, region: Region) {
    bound.locate(region.addr, region.len).expect("it is allocated");
}

fn stored<D: Device>(client: &StoreClient<D>, buffer: &Buffer<D>) {
    assert_eq!(client.put(KEY, buffer).expect("it is stored"), Put::Stored);
}

/// How long a put takes; the value is removed outside of the time.
fn put_once<D: Device>(client: &StoreClient<D>, payload: Payload<'_, D>) -> Duration {
    let took = timed(|| assert_eq!(client.put(KEY, payload).expect("it is stored"), Put::Stored));
    client.remove(KEY).expect("the node serves");
    took
}

fn timed<R>(call: impl FnOnce() -> R) -> Duration {
    let start = Instant::now();
    let _ = call();
    start.elapsed()
}

/// Samples, sorted, in microseconds.
struct Samples(Vec<f64>);

impl Samples {
    /// What `part` percent do not exceed.
    fn at(&self, part: usize) -> f64 {
        let rank = (self.0.len() * part).div_ceil(100).saturating_sub(1);
        self.0.get(rank).copied().unwrap_or_default()
    }

    fn median(&self) -> f64 {
        self.at(50)
    }
}

/// Takes one sample of each in every turn, another one first each time, for so long.
fn in_turns<const N: usize>(budget: Duration, takers: [&mut dyn FnMut() -> Duration; N]) -> [Samples; N] {
    let mut samples = [const { Vec::new() }; N];
    let mut since = Instant::now();
    for turn in 0.. {
        if turn == WARM_UP {
            samples = [const { Vec::new() }; N];
            since = Instant::now();
        }
        if turn >= WARM_UP + TURNS_MIN && since.elapsed() >= budget {
            break;
        }
        for i in 0..N {
            let taker = (turn + i) % N;
            samples[taker].push(takers[taker]().as_nanos() as f64 / 1e3);
        }
    }
    samples.map(|mut samples| {
        samples.sort_unstable_by(f64::total_cmp);
        Samples(samples)
    })
}

fn row(table: &mut String, op: &str, way: Way, size: usize, samples: &Samples, floor: &Samples) {
    let rate = |micros: f64| size as f64 / (1u64 << 30) as f64 / (micros / 1e6);
    let (median, least) = (samples.median(), floor.median());
    let _ = writeln!(
        table,
        "{op:<9} {:<8} {:<12} {:>5} {median:>12.2} {:>12.2} {:>8.2} {least:>10.2} {:>12.2} {:>8.2}",
        way.label(),
        label(size),
        samples.0.len(),
        samples.at(95),
        rate(median),
        rate(least),
        median / least,
    );
}

fn label(size: usize) -> String {
    if size >= MIB { format!("{} MiB", size / MIB) } else { format!("{} KiB", size / KIB) }
}
