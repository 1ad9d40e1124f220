//! The tests of bindings/candle, a workspace of its own: candle's 190 dependencies are no part of the root's lock file,
//! lints and builds.

use super::{cargo, cc, in_ci, root, run, target};
use anyhow::Result;
use std::process::{Child, Command, Stdio};

/// Builds and runs them.
pub(crate) fn test(args: &[String]) -> Result<()> {
    let mut command = cargo();
    command.current_dir(root().join("bindings/candle"));
    command.args(["test", "--workspace"]).args(args).envs(cc::runner(&target())?);
    run(command)
}

/// A build beside other steps, which ends with this.
pub(crate) struct Ahead(Child);

impl Drop for Ahead {
    fn drop(&mut self) {
        // It has ended where the tests were reached.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// In CI, begins to build the tests beside the steps before them, by the time that those leave: of 350 s in which the
/// workspace is built a fifth of two cores, and building candle takes 230 s of one. What fails here is tried again, and
/// told, when it is wanted.
pub(crate) fn build_ahead() -> Option<Ahead> {
    if !in_ci() {
        return None;
    }
    let mut command = Command::new("nice");
    command.args(["-n", "19"]).arg(cargo().get_program()).args(["test", "--workspace", "--no-run"]);
    command.current_dir(root().join("bindings/candle"));
    cc::as_built(&mut command);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().ok().map(Ahead)
}
