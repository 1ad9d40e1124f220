//! The `flashtune` command line: one file per command.

mod agenda;
mod bench;
mod build;
mod cache;
mod cases;
mod check;
mod command_line;
mod compare;
mod context;
mod debug;
mod doctor;
mod emit;
mod exit;
mod explain;
mod files;
mod help;
mod hits;
mod list;
mod lists;
mod machine;
mod merge;
mod progress;
mod ragged_sweep;
#[cfg(feature = "registry")]
mod registry;
mod relink;
mod report;
mod report_cache;
mod run;
mod shell;
mod side;
mod sign;
mod story;
mod sweep;
mod table;
mod tensors;
mod tile_map;
mod timeline;
mod transfer;
mod tune;
mod version;
mod weights;

use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use context::Context;
use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

/// Generates, tunes and ships fused attention kernels.
#[derive(Parser)]
#[command(
    name = "flashtune", version, long_version = version::LONG, after_help = help::AFTER, propagate_version = true
)]
struct Cli {
    #[command(flatten)]
    global: Global,
    #[command(subcommand)]
    command: Command,
}

/// Options of every command.
#[derive(clap::Args, Debug, Clone)]
#[command(next_help_heading = "Options of every command")]
struct Global {
    /// Where to run: auto (a GPU if there is one), cpu, cuda or cuda:N
    #[arg(long, global = true, default_value = "auto", value_name = "DEVICE")]
    device: flashtune::DeviceSpec,
    /// Folder of records and compiled kernels [env: FLASHTUNE_CACHE]
    #[arg(long, global = true, value_name = "DIR")]
    cache: Option<PathBuf>,
    /// Folder whose templates replace the built-in ones of the same path
    #[arg(long, global = true, env = "FLASHTUNE_TEMPLATES", hide_env_values = true, value_name = "DIR")]
    templates: Option<PathBuf>,
    /// When nothing tuned fits: default (the default schedule), tune, or sealed (no compiler may run)
    #[arg(long, global = true, default_value = "default", value_name = "POLICY")]
    policy: flashtune::Policy,
    /// A bundle to search after the cache; may be repeated [env: FLASHTUNE_BUNDLES, separated as in PATH]
    #[arg(long, global = true, value_name = "FILE")]
    bundle: Vec<PathBuf>,
    /// A public key, or a file of them, whose bundles are used; may be repeated [env: FLASHTUNE_TRUSTED_KEYS]
    #[arg(long, global = true, value_name = "KEY")]
    trust: Vec<String>,
    /// Use bundles that no trusted key signed [env: FLASHTUNE_ALLOW_UNSIGNED=1]
    #[arg(long, global = true)]
    allow_unsigned: bool,
    /// Take kernels of this instruction path, which no card has run; may be repeated [env: FLASHTUNE_ALLOW_PATHS]
    #[arg(long, global = true, value_name = "PATH")]
    allow_path: Vec<flashtune::InstructionPath>,
    /// Machine-readable output
    #[arg(long, global = true)]
    json: bool,
    /// Log more to stderr: -v dispatch decisions, -vv everything
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    verbose: u8,
    /// Say less on stderr: errors alone, no warnings and no progress
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    quiet: bool,
}

#[derive(Subcommand)]
enum Command {
    /// Find the fastest schedules for a set of problems on this device and keep them
    Tune(tune::Args),
    /// Compute attention over the tensors of a safetensors file
    Run(run::Args),
    /// Compare kernels with the fp64 reference over many problems and odd sizes, on this device
    Check(check::Args),
    /// Time the dispatcher's choice against the default schedule, unfused attention and the device's ceilings
    Bench(bench::Args),
    /// Render what a cache holds or a kept benchmark as one page, or compare two results
    Report(report::Args),
    /// Say which kernel would run and why
    Explain(explain::Args),
    /// Print the generated source of a kernel, its PTX, its machine code, or what it takes
    Emit(emit::Args),
    /// Keep a kernel's source, PTX, binary, machine code and compiler's log in a folder
    Debug(debug::Args),
    /// Compile kernels for an arch that need not be here
    Build(build::Args),
    /// List the records of the cache and of the named bundles
    List(list::Args),
    /// Say what the cache folder holds, check it, keep it small, empty it
    Cache(cache::Args),
    /// Write the cache's records and kernels to one bundle file
    Export(transfer::ExportArgs),
    /// Add a bundle's records and kernels to the cache
    Import(transfer::ImportArgs),
    /// Bring the bundles of several hosts together in one
    Merge(merge::Args),
    /// Put signed bundles into a registry of container images
    #[cfg(feature = "registry")]
    Push(registry::PushArgs),
    /// Take bundles from a registry, verified, into the cache or a folder
    #[cfg(feature = "registry")]
    Pull(registry::PullArgs),
    /// Make a key pair for signing bundles
    Keygen(sign::KeygenArgs),
    /// Sign a bundle, so that those who trust the key use it
    Sign(sign::SignArgs),
    /// Run candidates for a tuner; started by `tune`, not by hand
    #[command(hide = true)]
    Worker,
    /// Say what was found on this machine, and what to do about what is missing
    Doctor(doctor::Args),
    /// Print the script that completes this command in a shell
    Completions(shell::CompletionsArgs),
    /// Write manual pages; run by `cargo xtask man`
    #[command(hide = true)]
    Man(shell::ManArgs),
}

/// The command as parsers, shells and manual pages take it.
fn command() -> clap::Command {
    // What goes to a file or another program has one line an option.
    help::grouped(Cli::command()).term_width(table::columns().unwrap_or(0))
}

/// Parses the command line, runs the command, and turns its outcome into an exit code.
fn main() -> ExitCode {
    run(std::env::args_os())
}

fn run(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    let mut args: Vec<OsString> = args.into_iter().collect();
    // Clap takes what follows `help` for the name of a command.
    if args.get(1).is_some_and(|a| a == "help") && args.get(2).is_some_and(|a| a == "--help" || a == "-h") {
        args.truncate(2);
    }
    let matches = command().try_get_matches_from(args);
    let (cli, given) = match matches.and_then(|found| Ok((Cli::from_arg_matches(&found)?, given(&found)))) {
        Ok(parsed) => parsed,
        Err(e) => {
            // A closed pipe while printing the help is nobody's error.
            let _ = e.print();
            // `-V` prints the short form.
            if e.kind() == ErrorKind::DisplayVersion && e.to_string().contains(version::LONG) {
                let _ = std::io::stdout().write_all(version::details().as_bytes());
            }
            return ExitCode::from(e.exit_code() as u8);
        }
    };
    start_log(cli.global.verbose, cli.global.quiet);
    if matches!(cli.command, Command::Worker) {
        return flashtune_tuner::serve();
    }
    let mut cx = Context::new(cli.global, given);
    let outcome = match cli.command {
        Command::Tune(args) => tune::run(&mut cx, args),
        Command::Run(args) => run::run(&mut cx, args),
        Command::Check(args) => check::run(&mut cx, args),
        Command::Bench(args) => bench::run(&mut cx, args),
        Command::Report(args) => report::run(&mut cx, args),
        Command::Explain(args) => explain::run(&mut cx, args),
        Command::Emit(args) => emit::run(&mut cx, args),
        Command::Debug(args) => debug::run(&mut cx, args),
        Command::Build(args) => build::run(&mut cx, args),
        Command::List(args) => list::run(&mut cx, args),
        Command::Cache(args) => cache::run(&mut cx, args),
        Command::Export(args) => transfer::export(&mut cx, args),
        Command::Import(args) => transfer::import(&mut cx, args),
        Command::Merge(args) => merge::run(&mut cx, args),
        #[cfg(feature = "registry")]
        Command::Push(args) => registry::push(&mut cx, args),
        #[cfg(feature = "registry")]
        Command::Pull(args) => registry::pull(&mut cx, args),
        Command::Keygen(args) => sign::keygen(&mut cx, args),
        Command::Sign(args) => sign::sign(&mut cx, args),
        Command::Doctor(args) => doctor::run(&mut cx, args),
        Command::Completions(args) => shell::completions(&mut cx, &args),
        Command::Man(args) => shell::man(&args),
        Command::Worker => unreachable!("served above"),
    };
    exit::code(outcome.and_then(|()| cx.finish()))
}

/// The options that the command line itself names, before the command or after it.
fn given(matches: &clap::ArgMatches) -> BTreeSet<String> {
    let named = |id: &&clap::Id| matches.value_source(id.as_str()) == Some(ValueSource::CommandLine);
    let mut given: BTreeSet<String> = matches.ids().filter(named).map(ToString::to_string).collect();
    given.extend(matches.subcommand().into_iter().flat_map(|(_, below)| self::given(below)));
    given
}

/// Logs to stderr: warnings by default, `FLASHTUNE_LOG` or `-v` for more, `-q` for less.
fn start_log(verbose: u8, quiet: bool) {
    use tracing_subscriber::EnvFilter;
    let level = match verbose {
        _ if quiet => "error",
        0 => "warn",
        1 => "debug,sled=warn,tera=warn",
        _ => "trace,sled=info",
    };
    let filter = EnvFilter::try_from_env("FLASHTUNE_LOG").unwrap_or_else(|_| EnvFilter::new(level));
    let terminal = std::io::IsTerminal::is_terminal(&std::io::stderr());
    let colour = in_colour(terminal, std::env::var_os("NO_COLOR").as_deref());
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(colour);
    let _ = log.with_target(verbose > 1).without_time().compact().try_init();
}

/// Whether to write in colour: to terminals, unless NO_COLOR has any value (no-color.org).
fn in_colour(terminal: bool, no_color: Option<&OsStr>) -> bool {
    terminal && no_color.is_none_or(OsStr::is_empty)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colours_are_for_terminals_without_no_color() {
        let found = |terminal, value: Option<&str>| in_colour(terminal, value.map(OsStr::new));
        assert!(found(true, None) && found(true, Some("")));
        assert!(!found(true, Some("1")) && !found(true, Some("0")) && !found(false, None));
    }

    #[test]
    fn the_command_line_is_consistent() {
        command().debug_assert();
    }
}
