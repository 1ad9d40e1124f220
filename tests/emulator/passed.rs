//! Tests whose numbered kernels passed before: all of them take 320 s of two cores, and the same kernels under the same
//! schedules of the same machine give the same results.
//!
//! A line of `tests/golden/emulated.txt` is a digest and a test's name. The digest is of the name and of everything
//! that its numbers depend on: the machine, what compilers see of all templates, and the sources of `codegen`, of
//! `runtime` (reference, cases, what programs read) and of these tests, less comments and unit tests. Where one of them
//! changes, every number is tried; where none does, one in 32 is, others in each run. `FLASHTUNE_BLESS=1` tries all
//! numbers and writes the lines of the tests that passed:
//! `FLASHTUNE_BLESS=1 cargo xtask test -p flashtune --test emulator`.

use crate::machine;
use flashtune::TEMPLATES_VARIABLE;
use flashtune_cache::Key;
use flashtune_codegen::{Family, TemplateSet};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{LazyLock, Mutex, PoisonError};

/// Sources that are no part of the machine's own fingerprint.
const SOURCES: [&str; 3] = ["tests/emulator", "codegen/src", "runtime/src"];

/// Names of tests by digest.
type Lines = BTreeMap<String, String>;

static RECORDED: LazyLock<Lines> = LazyLock::new(|| {
    let text = std::fs::read_to_string(path()).unwrap_or_default();
    let lines = text.lines().filter(|line| !line.starts_with('#')).filter_map(|line| line.split_once(' '));
    lines.map(|(digest, name)| (digest.to_owned(), name.to_owned())).collect()
});

fn path() -> PathBuf {
    root().join("tests/golden/emulated.txt")
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Whether what has a line is tried nevertheless.
pub fn tried_again() -> bool {
    rand::random_ratio(1, 32)
}

/// A test that has numbers, by the name of its thread.
pub struct Test {
    name: String,
    digest: String,
}

impl Test {
    /// The test of this thread; none where templates are brought or settings choose what is tried.
    pub fn of_this_thread() -> Option<Self> {
        let chosen = ["EMULATE_SECONDS", "EMULATE_FROM", "EMULATE_CASES", "EMULATE_PROGRAM", TEMPLATES_VARIABLE];
        if chosen.iter().any(|name| std::env::var_os(name).is_some()) {
            return None;
        }
        let name = std::thread::current().name().filter(|name| *name != "main")?.to_owned();
        let digest = Key::of(format!("{name}\n{}", &*EVERYTHING).as_bytes()).to_string()[..16].to_owned();
        Some(Self { name, digest })
    }

    /// Whether this number need not be tried again.
    pub fn leaves_out(&self) -> bool {
        RECORDED.contains_key(&self.digest) && std::env::var_os("FLASHTUNE_BLESS").is_none() && !tried_again()
    }

    /// All numbers passed.
    pub fn passed(self) {
        static NEW: Mutex<Lines> = Mutex::new(Lines::new());
        if std::env::var_os("FLASHTUNE_BLESS").is_none() {
            return;
        }
        let mut new = NEW.lock().unwrap_or_else(PoisonError::into_inner);
        new.insert(self.digest, self.name);
        // Lines of tests that are not tried now stay.
        let kept = RECORDED.iter().filter(|(_, name)| !new.values().any(|n| n == *name));
        let mut lines: Vec<_> = kept.chain(new.iter()).map(|(digest, name)| format!("{digest} {name}\n")).collect();
        lines.sort_by(|a, b| a[17..].cmp(&b[17..]));
        std::fs::write(path(), format!("# digest test (tests/emulator/passed.rs)\n{}", lines.concat()))
            .expect("a writable checkout");
    }
}

/// A digest of all that numbers depend on.
static EVERYTHING: LazyLock<String> = LazyLock::new(|| {
    let templates = TemplateSet::embedded();
    let mut text = format!("{}\n", machine::fingerprint());
    for family in Family::ALL {
        text += &format!("{} {}\n", family.name(), templates.hash_of(family));
    }
    for folder in SOURCES {
        let mut files = Vec::new();
        sources(&root().join(folder), &mut files);
        files.sort();
        for file in files {
            let content = std::fs::read_to_string(&file).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
            let name = file.strip_prefix(root()).expect("below the root").display().to_string();
            text += &format!("{name} {}\n", Key::of(code_of(&content).as_bytes()));
        }
    }
    Key::of(text.as_bytes()).to_string()
});

/// The lines of a file of Rust that are no comment, up to its unit tests.
fn code_of(text: &str) -> String {
    let before_tests = text.split_once("\n#[cfg(test)]\nmod tests {").map_or(text, |(code, _)| code);
    let lines = before_tests.lines().filter(|line| !line.trim_start().starts_with("//"));
    lines.map(|line| format!("{line}\n")).collect()
}

#[test]
fn comments_and_unit_tests_are_no_code() {
    let text = "//! Doc.\nfn f() {\n    // Why.\n    g(\"//\");\n}\n\n#[cfg(test)]\nmod tests {\n    fn t() {}\n}\n";
    assert_eq!(code_of(text), "fn f() {\n    g(\"//\");\n}\n");
    assert_ne!(code_of(&text.replace("g(", "h(")), code_of(text));
}

/// Rust below a folder, less files of unit tests.
fn sources(folder: &Path, out: &mut Vec<PathBuf>) {
    let entries = std::fs::read_dir(folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    for entry in entries {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            sources(&path, out);
        } else if path.extension().is_some_and(|e| e == "rs") && !path.to_string_lossy().ends_with("tests.rs") {
            out.push(path);
        }
    }
}
