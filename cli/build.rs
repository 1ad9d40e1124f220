//! Tells the program which commit it is built from: `FLASHTUNE_COMMIT` where it is set, else what git says.

use std::process::Command;

fn main() {
    println!("cargo:rerun-if-env-changed=FLASHTUNE_COMMIT");
    let commit = std::env::var("FLASHTUNE_COMMIT").ok().or_else(|| {
        // Written by every commit and checkout.
        let log = git(&["rev-parse", "--path-format=absolute", "--git-path", "logs/HEAD"])?;
        println!("cargo:rerun-if-changed={log}");
        git(&["rev-parse", "--short=12", "HEAD"])
    });
    println!("cargo:rustc-env=FLASHTUNE_COMMIT={}", commit.as_deref().unwrap_or("unknown commit"));
}

/// The first line that git prints, if there is git and a repository.
fn git(args: &[&str]) -> Option<String> {
    let output = Command::new("git").args(args).current_dir(env!("CARGO_MANIFEST_DIR")).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim().to_owned()).filter(|t| !t.is_empty())
}
