//! Link arguments of the simulated runtime, and the C++ libraries beside it.

use std::{
    env,
    path::{Path, PathBuf},
    process::Command,
};

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=cpp");
    // The name that the runtime has, so that a later dlopen of that name finds the one that is loaded.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libascendcl.so");
    // Streams have threads that run its code: it must stay when a prober closes it again.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");

    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    if let Err(why) = cplusplus(&out) {
        // Only tests that install them need them, and those say so.
        println!("cargo:warning=no libllm_datadist.so and libmetadef.so for tests with Mooncake: {why}");
    }
}

/// What crosses their boundary are C++ objects, which only a C++ compiler lays out as the callers do.
fn cplusplus(out: &Path) -> Result<(), String> {
    let link = out.join("link");
    std::fs::create_dir_all(&link).map_err(|e| e.to_string())?;
    // At run time they find the simulated runtime under this name; its functions are looked up then.
    compile("cpp/nothing.cpp", &link.join("libascendcl.so"), &[])?;
    let search = format!("-L{}", link.display());
    compile("cpp/metadef.cpp", &out.join("libmetadef.so"), &[])?;
    compile(
        "cpp/llm_datadist.cpp",
        &out.join("libllm_datadist.so"),
        &[&search, "-Wl,--no-as-needed", "-l:libascendcl.so", "-Wl,-rpath,$ORIGIN"],
    )
}

fn compile(source: &str, library: &Path, more: &[&str]) -> Result<(), String> {
    let name = library.file_name().expect("a file").to_string_lossy();
    let status = Command::new("g++")
        .args(["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared"])
        .arg(format!("-Wl,-soname,{name}"))
        .arg("-o")
        .arg(library)
        .arg(source)
        .args(more)
        .status();
    match status {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("g++ on {source}: {status}")),
        Err(e) => Err(format!("g++, of Debian's build-essential: {e}")),
    }
}
