//! `cargo xtask semver`: whether the public interface of a published library changed in a way that its version does not
//! say. cargo-semver-checks compares; it is installed by who publishes, and by nothing here: it takes minutes to build.

use super::crates::libraries;
use anyhow::{Context, Result, bail};
use std::path::Path;
use std::process::{Command, Stdio};

/// Compares with a revision; with the last release when none is named.
pub(crate) fn main(root: &Path, args: &[String]) -> Result<()> {
    let baseline = match args {
        [] => last_release(root)?,
        [revision] if !revision.starts_with('-') => revision.clone(),
        _ => bail!("give one revision to compare with, or none for the last release"),
    };
    let mut there = super::cargo();
    there.args(["semver-checks", "--version"]).stdout(Stdio::null()).stderr(Stdio::null());
    if !there.status().is_ok_and(|status| status.success()) {
        bail!("cargo-semver-checks is not installed: `cargo install --locked cargo-semver-checks`");
    }
    let mut check = super::cargo();
    // Versions of CUDA are features of which there is one.
    check.current_dir(root).args(["semver-checks", "check-release", "--default-features", "--baseline-rev", &baseline]);
    for name in libraries() {
        check.args(["--package", name]);
    }
    super::run(check)
}

/// The newest tag of a version that is in this one's history.
fn last_release(root: &Path) -> Result<String> {
    let mut git = Command::new("git");
    git.current_dir(root).args(["describe", "--tags", "--abbrev=0", "--match", "v[0-9]*"]).stderr(Stdio::null());
    let output = git.output().context("cannot run git")?;
    let tag = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    if !output.status.success() || tag.is_empty() {
        bail!("no release has a tag `vX.Y.Z` yet; name a revision: `cargo xtask semver REVISION`");
    }
    Ok(tag)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_release_is_the_last_tag_of_a_version() {
        let tmp = tempfile::tempdir().unwrap();
        let git = |args: &[&str]| {
            let mut git = Command::new("git");
            git.current_dir(tmp.path()).args(["-c", "user.name=a", "-c", "user.email=a@example.com"]).args(args);
            // The workspace's own repository, where a hook runs this, is none of the test's.
            git.env_remove("GIT_DIR").env_remove("GIT_INDEX_FILE").env_remove("GIT_WORK_TREE");
            assert!(git.output().unwrap().status.success(), "{args:?}");
        };
        git(&["init", "--quiet"]);
        git(&["commit", "--quiet", "--allow-empty", "-m", "first"]);
        assert!(last_release(tmp.path()).unwrap_err().to_string().contains("name a revision"));
        git(&["tag", "v0.1.0"]);
        git(&["commit", "--quiet", "--allow-empty", "-m", "second"]);
        git(&["tag", "nightly"]);
        assert_eq!(last_release(tmp.path()).unwrap(), "v0.1.0");
    }

    #[test]
    fn all_published_packages_but_the_command_are_compared() {
        let names: Vec<_> = libraries().collect();
        assert!(names.contains(&"flashtune") && !names.contains(&"flashtune-cli"), "{names:?}");
        let e = main(Path::new("."), &["--all".to_owned()]).unwrap_err().to_string();
        assert!(e.contains("one revision"), "{e}");
    }
}
