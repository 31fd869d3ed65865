//! Proves a backend on the hardware of this machine. See `haulier_tests::proof`.

fn main() -> std::process::ExitCode {
    haulier_tests::proof::main()
}
