//! What the store client's types keep from being written: each case in `proofs/` must fail to compile, for the reason
//! beside it.
//!
//! The expected words are those of the workspace's toolchain without its `rust-src` component. After a change that is
//! meant, run once with `TRYBUILD=overwrite` and read the difference.

#[test]
fn misuse_does_not_compile() {
    trybuild::TestCases::new().compile_fail("tests/proofs/*.rs");
}

/// What would let somebody write a source while a put reads it, although the put borrows it (P62).
#[test]
fn borrowed_memory_has_no_second_way_in() {
    trybuild::TestCases::new().compile_fail("tests/proofs/shared/*.rs");
}
