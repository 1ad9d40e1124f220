//! What kernels compiled to before: compiling all that `nvrtc.rs` names takes 640 s of a core, and equal tokens with
//! an equal compiler give equal machine code.
//!
//! A line of `tests/golden/compiled.txt` is a digest of compiler, options and tokens, the registers of a thread, the
//! bytes that it spills, and the kernel's name. Whatever has no line is compiled. So is one kernel in 32 that has one,
//! others in each run, and must be what its line says. `FLASHTUNE_BLESS=1` compiles what has no line and writes
//! those of all that there is: `FLASHTUNE_BLESS=1 cargo test -p flashtune-cli --test it nvrtc::`.

use super::ROOT;
use flashtune_cache::{CompilerId, Key};
use flashtune_codegen::Source;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{LazyLock, Mutex};

/// What of a kernel's facts is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Compiled {
    pub(crate) registers: u32,
    pub(crate) spill_bytes: u32,
}

/// By digest. Names are for who reads the file.
type Lines = BTreeMap<String, (Compiled, String)>;

static RECORDED: LazyLock<Lines> = LazyLock::new(|| {
    let text = std::fs::read_to_string(path()).unwrap_or_default();
    text.lines().filter(|line| !line.starts_with('#')).map(parse).collect()
});

fn path() -> PathBuf {
    [ROOT, "tests/golden/compiled.txt"].iter().collect()
}

fn parse(line: &str) -> (String, (Compiled, String)) {
    let words: Vec<&str> = line.split(' ').collect();
    let [digest, registers, spill_bytes, name] = words[..] else { panic!("compiled.txt: `{line}`") };
    let number = |word: &str| word.parse().unwrap_or_else(|_| panic!("compiled.txt: `{line}`"));
    let compiled = Compiled { registers: number(registers), spill_bytes: number(spill_bytes) };
    (digest.to_owned(), (compiled, name.to_owned()))
}

/// Of everything that the machine code depends on.
fn digest(compiler: &CompilerId, source: &Source) -> String {
    let key = Key::of(format!("{compiler}\n{}\n{}", source.options.join(" "), source.tokens()).as_bytes());
    key.to_string()[..16].to_owned()
}

/// What a source compiles to: as recorded or, of one in 32, by `compile`, which must say the same.
pub(crate) fn compiled(
    compiler: &CompilerId,
    source: &Source,
    compile: impl FnOnce() -> Result<Compiled, String>,
) -> Result<Compiled, String> {
    let digest = digest(compiler, source);
    let recorded = RECORDED.get(&digest).map(|(recorded, _)| *recorded);
    if std::env::var_os("FLASHTUNE_BLESS").is_some() {
        let compiled = recorded.map_or_else(compile, Ok)?;
        bless(digest, compiled, &source.name);
        return Ok(compiled);
    }
    match recorded {
        Some(recorded) if !rand::random_ratio(1, 32) => Ok(recorded),
        Some(recorded) => match compile()? {
            same if same == recorded => Ok(same),
            other => Err(format!("compiled.txt says {recorded:?}, and the compiler {other:?}")),
        },
        None => compile(),
    }
}

/// Writes the lines of this process: of one test alone, those of the others are lost.
fn bless(digest: String, compiled: Compiled, name: &str) {
    static NEW: Mutex<Lines> = Mutex::new(Lines::new());
    let mut lines = NEW.lock().expect("no panic");
    lines.insert(digest, (compiled, name.to_owned()));
    let mut text = "# digest registers spilled_bytes kernel (tests/it/common/compiled.rs)\n".to_owned();
    for (digest, (Compiled { registers, spill_bytes }, name)) in &*lines {
        text += &format!("{digest} {registers} {spill_bytes} {name}\n");
    }
    std::fs::write(path(), text).expect("a writable checkout");
}
