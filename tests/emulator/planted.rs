//! Planted faults that were seen before: seeing all of them takes 272 s of two cores, and what an equal kernel does on
//! an equal machine is the same.
//!
//! A line of `tests/golden/planted.txt` is a digest and the fault's name. The digest is of the name, the machine, and
//! the text of the family with the fault in it, less comments: a template that changes has all faults of its families
//! planted again. So is one in 32 of those that have a line, others in each run. What the digest leaves out is the
//! test's own: schedules, sizes and data. Who changes those deletes the file first. `FLASHTUNE_BLESS=1` plants what
//! has no line and writes the lines of all that there is:
//! `FLASHTUNE_BLESS=1 cargo test -p flashtune --test emulator faults`.

use crate::{machine, passed};
use flashtune_cache::Key;
use flashtune_codegen::{Family, TemplateSet};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{LazyLock, Mutex};

/// Digests of faults that were seen.
static RECORDED: LazyLock<BTreeSet<String>> = LazyLock::new(|| {
    let text = std::fs::read_to_string(path()).unwrap_or_default();
    text.lines().filter_map(|line| line.split_once(' ')).map(|(digest, _)| digest.to_owned()).collect()
});

fn path() -> PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "tests/golden/planted.txt"].iter().collect()
}

/// What `see` says of a fault by this name, or that it was seen before. `faulted` are the templates with the fault in
/// the text of `family`.
pub fn unless_seen(
    family: Family,
    name: &str,
    faulted: &TemplateSet,
    see: impl FnOnce() -> Result<(), String>,
) -> Result<(), String> {
    let text = format!("{name}\n{}\n{}", machine::fingerprint(), faulted.hash_of(family));
    let digest = Key::of(text.as_bytes()).to_string()[..16].to_owned();
    let (recorded, blessed) = (RECORDED.contains(&digest), std::env::var_os("FLASHTUNE_BLESS").is_some());
    // A family tried alone is tried whole.
    let chosen = std::env::var_os("EMULATE_FAMILY").is_some() || !blessed && passed::tried_again();
    if !recorded || chosen {
        see()?;
    }
    if blessed {
        bless(digest, name);
    }
    Ok(())
}

/// Writes the lines of this process: of one test alone, those of the others are lost.
fn bless(digest: String, name: &str) {
    static NEW: Mutex<BTreeMap<String, String>> = Mutex::new(BTreeMap::new());
    let mut lines = NEW.lock().expect("no panic");
    lines.insert(digest, name.to_owned());
    let mut text = "# digest fault (tests/emulator/planted.rs)\n".to_owned();
    for (digest, name) in &*lines {
        text += &format!("{digest} {name}\n");
    }
    std::fs::write(path(), text).expect("a writable checkout");
}
