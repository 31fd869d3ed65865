//! Link arguments of the simulated driver.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // The name that the driver has, so that a later dlopen("libcuda.so.1") finds the one that is loaded.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
    // Streams have threads that run its code: it must stay when a prober closes it again.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
