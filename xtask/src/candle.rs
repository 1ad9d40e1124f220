//! The tests of bindings/candle, a workspace of its own: candle's 190 dependencies are no part of the root's lock file,
//! lints and builds.

use super::{cargo, cc, root, target};
use anyhow::Result;
use std::process::Command;

/// Builds, which takes 230 s of one core, and runs them.
pub(crate) fn tests(args: &[String]) -> Result<Command> {
    let mut command = cargo();
    command.current_dir(root().join("bindings/candle"));
    command.args(["test", "--workspace"]).args(args).envs(cc::runner(&target())?);
    Ok(command)
}
