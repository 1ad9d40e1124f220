//! Developer commands: `cargo xtask test`, `cargo xtask ci`.
//!
//! The tests compile CUDA kernels, for which they need NVRTC but neither a GPU nor a CUDA toolkit. `cargo xtask test`
//! puts the NVRTC wheel into `.toolchain/` once and points the tests at it, and NumPy for the tests of the Python
//! package.

mod beside;
mod browser;
mod candle;
mod cc;
mod crates;
mod header;
mod licences;
mod metadata;
mod nvrtc;
mod package;
mod pip;
mod python;
mod registry;
mod sbom;
mod semver;
mod steps;
mod tidy;
mod timed;
mod torch;
mod wheel;

use anyhow::{Context, Result, bail};
use std::path::PathBuf;
use std::process::{Command, ExitCode};

const USAGE: &str = "usage: cargo xtask COMMAND

commands:
  test [ARGS]   install what the tests need, then `cargo test --workspace ARGS`; without ARGS also `python`,
                `wheel --check`, `candle` and, where there is a Chromium, `browser`
  python [ARGS] the tests of bindings/python: `python -m unittest discover ARGS`
  candle [ARGS] the tests of bindings/candle, a workspace of its own: `cargo test --workspace ARGS` there
  browser       the tests of HTML pages, in a Chromium that is there; `browser [--pictures DIR] [PAGE...]` looks at
                pages that were made elsewhere as well
  lint          formatting, `tidy`, `crates`, `cargo clippy` and `cargo doc` with warnings denied, and a check of the
                features that hosts choose
  tidy          columns, names of tests and links of pages; `--lower` writes the counts of xtask/tidy.txt that fell
  crates        whether every package could be published: manifest, files, order, the Rust that it asks for
  semver [REV]  what changed in the libraries' interfaces since a revision, or the last release, against their versions
  msrv          compile what hosts take with the oldest Rust that the workspace promises, which rustup must have
  ci            what must pass before a change goes in, as `.ci/run`: lint, then test; says how long each step took
  package       one folder or tar to copy to a machine that has no Rust; `cargo xtask package --help`
  wheel         the Python package with library and command for `pip install`; `cargo xtask wheel --help`
  cubins ARGS   fingerprints of the default kernels' machine code: `write FILE [--sample N]`, `compare OLD NEW`
  man [DIR]     write the manual pages of the `flashtune` command, to target/man when no folder is named
  setup         only install what the tests need, and print where it is
  header        write bindings/c/include/flashtune.h from the sources";

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    let outcome = match args.next().as_deref() {
        Some("test") => test(&args.collect::<Vec<_>>()),
        Some("python") => python::test(&root(), &args.collect::<Vec<_>>()),
        Some("candle") => candle::tests(&args.collect::<Vec<_>>()).and_then(run),
        Some("browser") => browser::main(&root(), &args.collect::<Vec<_>>()),
        Some("lint") => steps::run(&steps::lints()),
        Some("tidy") => tidy::main(&root(), &args.collect::<Vec<_>>()),
        Some("crates") => crates::check(&root()),
        Some("semver") => semver::main(&root(), &args.collect::<Vec<_>>()),
        Some("msrv") => crates::compile_with_oldest(&root()),
        Some("ci") => ahead().and_then(|_ahead| steps::run(&steps::all())),
        Some("package") => return package::main(&root(), args),
        Some("wheel") => return wheel::main(&root(), args),
        Some("header") => header::write(&root()),
        Some("man") => man(args.next().map_or_else(|| root().join("target/man"), PathBuf::from)),
        Some("cubins") => cubins(&args.collect::<Vec<_>>()),
        Some("setup") => nvrtc::ensure(&root()).map(|dir| println!("{}", dir.display())),
        Some("help" | "-h" | "--help") => {
            println!("{USAGE}");
            Ok(())
        }
        Some(other) => {
            eprintln!("error: there is no command `{other}`\n\n{USAGE}");
            return ExitCode::from(2);
        }
        None => {
            eprintln!("{USAGE}");
            return ExitCode::from(2);
        }
    };
    exit_code(outcome)
}

fn exit_code(outcome: Result<()>) -> ExitCode {
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("error: {e:#}");
            ExitCode::FAILURE
        }
    }
}

/// The workspace's root folder.
fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask/ lies in the workspace").to_owned()
}

/// The folder that cargo builds in.
fn target() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), |dir| root().join(dir))
}

/// The cargo that runs this program.
fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root());
    cc::as_built(&mut command);
    command
}

fn run(mut command: Command) -> Result<()> {
    let status = command.status().with_context(|| format!("cannot start {command:?}"))?;
    if !status.success() {
        bail!("{command:?} ended with {status}");
    }
    Ok(())
}

/// Whether this machine is one of CI.
fn in_ci() -> bool {
    std::env::var("CI").is_ok_and(|v| v == "true")
}

/// In CI, begins what later steps of the tests need; held until they have ended.
fn ahead() -> Result<beside::Guard> {
    python::install_ahead(root());
    beside::begin(steps::CANDLE, || candle::tests(&[]))?;
    Ok(beside::Guard)
}

fn test(args: &[String]) -> Result<()> {
    match args {
        [] => ahead().and_then(|_ahead| steps::run(&steps::tests())),
        // Whoever names tests names those of cargo.
        _ => rust(args),
    }
}

/// The tests of the workspace.
fn rust(args: &[String]) -> Result<()> {
    registry::ensure(&root());
    let (newest, oldest) = (nvrtc::ensure(&root())?, nvrtc::ensure_oldest(&root())?);
    let runner = cc::runner(&target())?;
    let test = |args: &[&str]| {
        let mut command = cargo();
        command.envs(runner.clone());
        command.arg("test").args(args).env("FLASHTUNE_NVRTC", &newest).env("FLASHTUNE_OLDEST_NVRTC", &oldest);
        command
    };
    match args {
        [] => timed::run(test),
        // Whoever names tests is told of every failure.
        _ => run(test(&[&["--workspace"], &*args.iter().map(String::as_str).collect::<Vec<_>>()].concat())),
    }
}

/// Runs `benches/host/cubins.rs`: NVRTC takes nearly all of its time.
fn cubins(args: &[String]) -> Result<()> {
    let mut command = cargo();
    command.args(["run", "--quiet", "--example", "cubins", "--"]).args(args);
    command.env("FLASHTUNE_NVRTC", nvrtc::ensure(&root())?);
    run(command)
}

/// The command writes the pages itself, from its own definition.
fn man(folder: PathBuf) -> Result<()> {
    let mut command = cargo();
    // Relative to where the user is, and not to the root.
    let folder = std::path::absolute(folder)?;
    command.args(["run", "--quiet", "--bin", "flashtune", "--", "man"]).arg(&folder);
    run(command)?;
    println!("{}", folder.display());
    Ok(())
}
