//! `flashtune completions` and `flashtune man`: what shells and manual readers take from the command's own definition.

use super::context::Context;
use anyhow::{Context as _, Result};
use std::io::Write;
use std::path::PathBuf;

/// Options of `completions`.
#[derive(clap::Args, Debug)]
#[command(
    after_help = "For example: flashtune completions bash > ~/.local/share/bash-completion/completions/flashtune"
)]
pub(crate) struct CompletionsArgs {
    /// The shell
    shell: clap_complete::Shell,
}

/// Prints the script that completes this command in a shell.
pub(crate) fn completions(cx: &mut Context, args: &CompletionsArgs) -> Result<()> {
    // The generator panics where it cannot write.
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut super::command(), "flashtune", &mut script);
    cx.out.write_all(&script)?;
    Ok(())
}

/// Options of `man`.
#[derive(clap::Args, Debug)]
pub(crate) struct ManArgs {
    /// The folder, made if need be
    folder: PathBuf,
}

/// Writes a manual page of the command and one of each of its commands.
pub(crate) fn man(args: &ManArgs) -> Result<()> {
    let written =
        std::fs::create_dir_all(&args.folder).and_then(|()| clap_mangen::generate_to(super::command(), &args.folder));
    written.with_context(|| format!("cannot write manual pages to {}", args.folder.display()))
}
