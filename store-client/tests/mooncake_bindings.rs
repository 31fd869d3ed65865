//! The bindings are those that bindgen makes from our header: a change of one without the other is found here.
//!
//! Needs libclang, which the build of the engine does not. `HAULIER_BLESS=1` writes the file anew.

use std::{env, fs, path::Path};

use bindgen::{Builder, Formatter, RustEdition, RustTarget};

fn generate(header: &Path) -> String {
    let bindings = Builder::default()
        .header(header.to_str().expect("the path is text"))
        .allowlist_function("mooncake_store_.*")
        .allowlist_type("mooncake_.*")
        // All of them or none: there is one version of this ABI.
        .dynamic_library_name("Mooncake")
        .dynamic_link_require_all(true)
        .rust_target(RustTarget::stable(85, 0).expect("bindgen knows it"))
        .rust_edition(RustEdition::Edition2024)
        .formatter(Formatter::Prettyplease)
        .wrap_unsafe_ops(true)
        .disable_header_comment()
        .generate()
        .expect("libclang is there and takes the header; on Debian: apt-get install libclang1-14");
    format!(
        "// Made by bindgen from mooncake.h; see tests/mooncake_bindings.rs. Not to be edited.\n\n{bindings}"
    )
}

#[test]
fn the_bindings_are_those_of_the_header() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/engine/mooncake/ffi");
    let (made, file) = (generate(&folder.join("mooncake.h")), folder.join("bindings.rs"));
    if env::var_os("HAULIER_BLESS").is_some() {
        fs::write(&file, &made).unwrap();
    }
    let committed = fs::read_to_string(&file).unwrap();
    let line =
        made.lines().zip(committed.lines()).take_while(|(made, committed)| made == committed).count() + 1;
    assert!(
        made == committed,
        "bindings.rs is not what the header gives, from line {line} on; run this test with HAULIER_BLESS=1"
    );
}
