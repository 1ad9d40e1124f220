//! Developer commands: `cargo xtask test`, `cargo xtask ci`.
//!
//! The tests compile CUDA kernels, for which they need NVRTC but neither a GPU nor a CUDA toolkit. `cargo xtask test`
//! puts the NVRTC wheel into `.toolchain/` once and points the tests at it, and NumPy for the tests of the Python
//! package.

mod header;
mod nvrtc;
mod package;
mod pip;
mod python;
mod torch;

use anyhow::{Context, Result, bail};
use std::path::PathBuf;
use std::process::{Command, ExitCode};

const USAGE: &str = "usage: cargo xtask COMMAND

commands:
  test [ARGS]   install what the tests need, then `cargo test --workspace ARGS`; without ARGS also `python` and `candle`
  python [ARGS] the tests of bindings/python: `python -m unittest discover ARGS`
  candle [ARGS] the tests of bindings/candle, a workspace of its own: `cargo test --workspace ARGS` there
  ci            `cargo fmt --check`, `cargo clippy` with warnings denied, then test
  package       one folder or tar to copy to a machine that has no Rust; `cargo xtask package --help`
  cubins ARGS   fingerprints of the default kernels' machine code: `write FILE [--sample N]`, `compare OLD NEW`
  man [DIR]     write the manual pages of the `flashtune` command, to target/man when no folder is named
  setup         only install what the tests need, and print where it is
  header        write bindings/c/include/flashtune.h from the sources";

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    let outcome = match args.next().as_deref() {
        Some("test") => test(&args.collect::<Vec<_>>()),
        Some("python") => python::test(&root(), &args.collect::<Vec<_>>()),
        Some("candle") => candle(&args.collect::<Vec<_>>()),
        Some("ci") => ci(),
        Some("package") => return package::main(&root(), args),
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

/// The cargo that runs this program.
fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root());
    command
}

fn run(mut command: Command) -> Result<()> {
    let status = command.status().with_context(|| format!("cannot start {command:?}"))?;
    if !status.success() {
        bail!("{command:?} ended with {status}");
    }
    Ok(())
}

fn test(args: &[String]) -> Result<()> {
    let nvrtc = nvrtc::ensure(&root())?;
    let mut command = cargo();
    command.args(["test", "--workspace"]).args(args).env("FLASHTUNE_NVRTC", nvrtc);
    command.env("FLASHTUNE_OLDEST_NVRTC", nvrtc::ensure_oldest(&root())?);
    run(command)?;
    match args {
        [] => python::test(&root(), &[]).and_then(|()| candle(&[])),
        // Whoever names tests names those of cargo.
        _ => Ok(()),
    }
}

/// candle's 190 dependencies are no part of the root's lock file, lints and builds.
fn candle(args: &[String]) -> Result<()> {
    let mut command = cargo();
    command.current_dir(root().join("bindings/candle"));
    command.args(["test", "--workspace"]).args(args);
    run(command)
}

/// Runs `examples/cubins.rs`: NVRTC takes nearly all of its time.
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

fn ci() -> Result<()> {
    let mut fmt = cargo();
    fmt.args(["fmt", "--all", "--check"]);
    run(fmt)?;
    let mut fmt = cargo();
    fmt.args(["fmt", "--all", "--check", "--manifest-path", "bindings/candle/Cargo.toml"]);
    run(fmt)?;
    let mut clippy = cargo();
    clippy.args(["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"]);
    run(clippy)?;
    test(&[])
}
