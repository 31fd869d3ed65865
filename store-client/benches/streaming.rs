//! What a copy past the caches gains on this machine, from 64 KiB to 256 MiB, and from which size on: see
//! `src/streaming.rs`. All copies take turns, and time is that of this thread alone.

use std::{hint::black_box, time::Duration};

use rustix::time::{ClockId, clock_gettime};

#[allow(dead_code, unused_imports, reason = "its tests and its choice of a size are the library's")]
#[path = "../src/streaming.rs"]
mod streaming;

/// So many bytes that a place is out of every cache when it comes again.
const POOL: usize = 1 << 30;

/// Runs of one copy: of the put, and of the get of the same bytes behind it.
#[derive(Default)]
struct Samples {
    put: Vec<Duration>,
    get: Vec<Duration>,
}

fn main() {
    println!(
        "{:>10} {:>14} {:>14} {:>9} {:>17}",
        "BYTES", "PLAIN PUT US", "PLAIN GET US", "x PUT", "x PUT AND GET"
    );
    let mut pool = vec![1u8; POOL];
    for size in [64 << 10, 256 << 10, 1 << 20, 2 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20] {
        let (source, mut target) = (vec![7u8; size], vec![1u8; size]);
        let (mut plain, mut streamed) = (Samples::default(), Samples::default());
        let mut places = (0..POOL / size).cycle().map(|place| place * size);
        for _ in 0..(POOL / size).clamp(8, 300) {
            for (samples, streams) in [(&mut plain, false), (&mut streamed, true)] {
                let at = places.next().unwrap_or_default();
                let place = &mut pool[at..at + size];
                samples.put.push(timed(|| match (streams, black_box(&source)) {
                    (false, source) => place.copy_from_slice(source),
                    // Also below the size from which on the store does so.
                    // SAFETY: two slices of one length, of which one is exclusive.
                    (true, source) => unsafe { streaming::stream(source.as_ptr(), place.as_mut_ptr(), size) },
                }));
                samples.get.push(timed(|| black_box(&mut target).copy_from_slice(black_box(place))));
            }
        }
        let [plain, streamed] = [plain, streamed].map(|samples| (median(samples.put), median(samples.get)));
        println!(
            "{size:>10} {:>14.1} {:>14.1} {:>9.2} {:>17.2}",
            plain.0,
            plain.1,
            streamed.0 / plain.0,
            (streamed.0 + streamed.1) / (plain.0 + plain.1),
        );
    }
    println!("values are streamed from {} bytes on", streaming::LEAST);
}

fn timed(work: impl FnOnce()) -> Duration {
    let now = || {
        let now = clock_gettime(ClockId::ThreadCPUTime);
        Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
    };
    let start = now();
    work();
    now() - start
}

/// In microseconds.
fn median(mut samples: Vec<Duration>) -> f64 {
    samples.sort_unstable();
    samples[samples.len() / 2].as_secs_f64() * 1e6
}
