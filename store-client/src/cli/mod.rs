//! The `haulier` command: one file per command, and what they share.
//!
//! | module | what it holds |
//! |---|---|
//! | `global`, `engine` | the options that every command takes, and the connection that they describe |
//! | `exit` | exit codes and error messages |
//! | `output`, `log` | tables, JSON, progress bars; logs |
//! | `size`, `counters` | sizes as people write them, the store's counters as it writes them |
//! | `model`, `memory` | safetensors files, device buffers |
//! | `child` | processes that the command starts and ends |

use std::process::ExitCode;

use clap::{Parser, Subcommand, error::ErrorKind};

use self::exit::{Exit, Failure, Result};

mod bench;
mod child;
mod counters;
mod demo;
mod devices;
mod engine;
mod exit;
mod get;
mod global;
mod log;
mod ls;
mod memory;
mod model;
mod output;
mod put;
mod rm;
mod serve;
mod size;
mod stat;

/// Hauls tensors between accelerator memory and a key-value store.
#[derive(Debug, Parser)]
#[command(name = "haulier", version, after_help = exit::HELP, max_term_width = 120)]
struct Cli {
    #[command(flatten)]
    global: global::Global,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Demo(demo::Args),
    Serve(serve::Args),
    Put(put::Args),
    Get(get::Args),
    Ls(ls::Args),
    Rm(rm::Args),
    Stat(stat::Args),
    Devices(devices::Args),
    Bench(bench::Args),
    #[command(hide = true)]
    DemoRole(demo::RoleArgs),
    #[command(hide = true)]
    BenchEcho,
}

/// Runs the command that the command line asks for.
pub(crate) fn main() -> ExitCode {
    let (outcome, json) = match Cli::try_parse() {
        Ok(cli) => (run(&cli), cli.global.json),
        Err(e) => {
            let json = std::env::args_os().any(|arg| arg == "--json");
            (wanted_text(&e).and_then(|text| output::write(text.as_bytes())), json)
        }
    };
    let exit = match outcome {
        Ok(()) => Exit::Ok,
        Err(failure) => {
            failure.report(json);
            failure.exit
        }
    };
    ExitCode::from(exit as u8)
}

fn run(cli: &Cli) -> Result<()> {
    let global = &cli.global;
    // Dropped before a failure is reported, which is to be the last line.
    let _logs = global.start_logging(matches!(cli.command, Command::Serve(_)))?;
    global.follow_parent()?;
    match &cli.command {
        Command::Demo(args) => demo::run(global, args),
        Command::Serve(args) => serve::run(global, args),
        Command::Put(args) => put::run(global, args),
        Command::Get(args) => get::run(global, args),
        Command::Ls(args) => ls::run(global, args),
        Command::Rm(args) => rm::run(global, args),
        Command::Stat(args) => stat::run(global, args),
        Command::Devices(args) => devices::run(global, args),
        Command::Bench(args) => bench::run(global, args),
        Command::DemoRole(args) => demo::run_role(global, args),
        Command::BenchEcho => bench::echo(),
    }
}

/// What clap has to say instead of a command: help and versions are results, everything else is a failure.
fn wanted_text(e: &clap::Error) -> Result<String> {
    match e.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => Ok(e.to_string()),
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            Err(Failure::usage(format!("a command is missing\n\n{e}")))
        }
        _ => Err(Failure::usage(e.to_string().trim_start_matches("error: ").trim_end())),
    }
}

#[cfg(test)]
mod tests {
    use std::{ffi::OsStr, os::unix::ffi::OsStrExt};

    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn a_wrong_command_line_is_a_usage_failure_and_help_is_not() {
        let parse = |args: &[&str]| Cli::try_parse_from([&["haulier"], args].concat()).unwrap_err();
        for args in
            [&["nonsense"][..], &["serve", "--pool", "big"], &["put"], &["--timeout", "-1", "stat"], &[]]
        {
            assert_eq!(wanted_text(&parse(args)).unwrap_err().exit, Exit::Usage, "{args:?}");
        }
        let other_bytes = OsStr::from_bytes(b"\xff");
        for args in
            [&["haulier".as_ref(), other_bytes][..], &["haulier".as_ref(), "rm".as_ref(), other_bytes]]
        {
            assert_eq!(wanted_text(&Cli::try_parse_from(args).unwrap_err()).unwrap_err().exit, Exit::Usage);
        }
        assert!(wanted_text(&parse(&["--help"])).unwrap().contains("Exit codes:"));
    }
}
