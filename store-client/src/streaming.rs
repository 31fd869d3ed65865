//! A copy past the caches, for large values on their way into the store.
//!
//! A place in the store is rarely in a cache when it is written, and a plain copy reads each line that it overwrites.
//! Streaming stores do not. `cargo bench --bench streaming` tells what that gains, as parts of a plain copy into such a
//! place; on a Sapphire Rapids guest (2 MiB of second-level cache, glibc 2.36), medians:
//!
//! | bytes | put | put, and a get right behind it |
//! |---|---|---|
//! | 64 KiB | 0.8 | 1.3 |
//! | 256 KiB | 0.8 | 1.3 |
//! | 1 MiB | 0.7 | 1.06 |
//! | 2 MiB | 0.65 | 0.93 |
//! | 16 MiB | 0.7 | 0.85 |
//! | 64 MiB and more, where a plain copy streams by itself | 0.9 | 0.96 |
//!
//! So [`LEAST`]: from there on nobody loses. Towards memory that is warm, as a get's, streaming loses, and is not used.

use std::ptr;

/// The least bytes that are streamed.
pub(crate) const LEAST: usize = 2 << 20;

/// As [`ptr::copy_nonoverlapping`], for a target that will not be read soon. Done when it returns, also for who reads
/// the target on another thread.
///
/// # Safety
/// As there.
pub(crate) unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    if len < LEAST {
        // SAFETY: what the caller promises.
        return unsafe { ptr::copy_nonoverlapping(from, to, len) };
    }
    // SAFETY: what the caller promises.
    unsafe { stream(from, to, len) }
}

/// On other processors `memcpy` knows better.
#[cfg(not(target_arch = "x86_64"))]
pub(crate) unsafe fn stream(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: what the caller promises.
    unsafe { ptr::copy_nonoverlapping(from, to, len) }
}

/// With the stores of SSE2, which every x86-64 has: those of AVX2 and AVX-512 measured the same. Eight pages at a time:
/// memory answers a walk along one page at a time more slowly than `memcpy` is.
#[cfg(target_arch = "x86_64")]
pub(crate) unsafe fn stream(from: *const u8, to: *mut u8, len: usize) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};

    const PAGE: usize = 4096;
    const PAGES: usize = 8;
    const LINE: usize = 64;
    /// What is copied of one page before the next page has its turn.
    const TURN: usize = 2 * LINE;
    const WORD: usize = size_of::<__m128i>();

    let head = to.align_offset(LINE).min(len);
    // SAFETY: the caller's promise, for a part.
    unsafe { ptr::copy_nonoverlapping(from, to, head) };
    let mut done = head;
    while len - done >= PAGES * PAGE {
        for turn in (0..PAGE).step_by(TURN) {
            for page in 0..PAGES {
                let at = done + page * PAGE + turn;
                // SAFETY: `at + TURN` is at most `len`, so both are within what the caller promised. The target is aligned
                // to a line, because `to + head` is and everything else is a multiple of one.
                unsafe {
                    let (from, to) = (from.add(at).cast::<__m128i>(), to.add(at).cast::<__m128i>());
                    let words: [_; TURN / WORD] = std::array::from_fn(|i| _mm_loadu_si128(from.add(i)));
                    for (i, word) in words.into_iter().enumerate() {
                        _mm_stream_si128(to.add(i), word);
                    }
                }
            }
        }
        done += PAGES * PAGE;
    }
    // SAFETY: the caller's promise, for a part.
    unsafe { ptr::copy_nonoverlapping(from.add(done), to.add(done), len - done) };
    // Streaming stores are weakly ordered: without this, whoever learns that the value is there might not see it.
    // SAFETY: the instruction is part of SSE, which every x86-64 has.
    unsafe { _mm_sfence() };
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Copies with `copy` from and to memory that starts so many bytes behind a line, and looks at what is around it.
    fn exact(copy: unsafe fn(*const u8, *mut u8, usize), len: usize, source: usize, target: usize) {
        const FRAME: usize = 64;
        let from: Vec<u8> = (0..source + len).map(|i| (i * 31 % 251) as u8).collect();
        let mut to = vec![0xEE; FRAME + target + len + FRAME];
        // SAFETY: parts of two vectors of this test.
        unsafe { copy(from[source..].as_ptr(), to[FRAME + target..].as_mut_ptr(), len) };
        let (before, rest) = to.split_at(FRAME + target);
        let (copied, behind) = rest.split_at(len);
        assert!(copied == &from[source..], "{len} bytes from {source} to {target}");
        assert!(
            before.iter().chain(behind).all(|byte| *byte == 0xEE),
            "{len} bytes from {source} to {target}"
        );
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]
        #[test]
        fn every_byte_arrives_and_no_other_is_touched(
            len in 0usize..100_000,
            source in 0usize..64,
            target in 0usize..64,
        ) {
            exact(stream, len, source, target);
        }
    }

    #[test]
    fn so_it_is_at_every_alignment_and_around_every_boundary() {
        for target in 0..64 {
            exact(stream, 70_000, (target * 7) % 64, target);
        }
        for len in [0, 1, 63, 64, 65, 32_767, 32_768, 32_769, 32_831, 32_832, 65_535, 65_536, 65_600] {
            exact(stream, len, 1, 0);
            exact(stream, len, 0, 63);
        }
        for len in [LEAST - 1, LEAST, LEAST + 1] {
            exact(copy, len, 3, 5);
        }
    }
}
