//! The `haulier` command. What it does is in `cli`; what it does it with is the library.

use std::process::ExitCode;

mod cli;

fn main() -> ExitCode {
    cli::main()
}
