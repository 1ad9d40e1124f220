//! `cargo xtask browser`: the tests of the pages in a real browser, `report/src/browser.rs`.
//!
//! Chromium takes 300 MB, so nothing installs it: where there is none, this says so and is done.

use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A program by its name or path, instead of those that are looked for.
const VARIABLE: &str = "CHROMIUM";
const NAMES: [&str; 6] = [
    "chromium",
    "chromium-browser",
    "chrome-headless-shell",
    "google-chrome-stable",
    "google-chrome",
    "microsoft-edge",
];

/// The command: pages that were made elsewhere are looked at as well, and drawn when a folder for pictures is named.
pub(crate) fn main(root: &Path, args: &[String]) -> Result<()> {
    let (mut pages, mut pictures) = (Vec::new(), None);
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--pictures" => {
                let folder = std::path::absolute(args.next().context("--pictures needs a folder")?)?;
                std::fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
                pictures = Some(folder);
            }
            option if option.starts_with('-') => bail!("there is no option `{option}`; give pages, or --pictures DIR"),
            page => pages.push(std::path::absolute(page)?),
        }
    }
    if let Some(page) = pages.iter().find(|page| !page.is_file()) {
        bail!("{} is no file", page.display());
    }
    let browser = find().with_context(missing)?;
    run(root, &browser, &pages, pictures)
}

/// The step of the tests, skipped where there is no browser.
pub(crate) fn test(root: &Path) -> Result<()> {
    match find() {
        Some(browser) => run(root, &browser, &[], None),
        None => {
            eprintln!("skipped the tests of pages: {}", missing());
            Ok(())
        }
    }
}

fn missing() -> String {
    format!("no Chromium on PATH ({}); install one, or name it in {VARIABLE}", NAMES.join(", "))
}

/// A program that says its version.
fn find() -> Option<PathBuf> {
    let named = std::env::var_os(VARIABLE).filter(|name| !name.is_empty()).map(PathBuf::from);
    let starts = |program: &PathBuf| {
        let mut command = Command::new(program);
        command.arg("--version").stdin(Stdio::null()).stderr(Stdio::null());
        command.output().is_ok_and(|output| output.status.success())
    };
    named.into_iter().chain(NAMES.map(PathBuf::from)).find(starts)
}

fn run(root: &Path, browser: &Path, pages: &[PathBuf], pictures: Option<PathBuf>) -> Result<()> {
    let mut cargo = super::cargo();
    cargo.current_dir(root).args(["test", "--package", "flashtune-report", "--lib", "browser::", "--"]);
    cargo.args(["--ignored", "--nocapture"]).env("FLASHTUNE_TEST_CHROMIUM", browser);
    if !pages.is_empty() {
        cargo.env("FLASHTUNE_TEST_PAGES", std::env::join_paths(pages)?);
    }
    if let Some(pictures) = pictures {
        cargo.env("FLASHTUNE_TEST_PICTURES", pictures);
    }
    super::run(cargo)
}
