//! The system C compiler.

use super::leash;
use crate::{Compiler, Error, Result};
use flashtune_cache::{CompilerId, Facts, TemporaryFolder, reap};
use flashtune_codegen::{Language, Source};
use std::collections::HashMap;
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Arc, Mutex, Once};
use std::time::Instant;

/// The system C compiler: `$CC`, or the first of cc, gcc, clang that answers.
#[derive(Debug)]
pub struct Cc {
    id: CompilerId,
    command: PathBuf,
    /// Words of `$CC` after the command (`CC="ccache gcc"`).
    arguments: Vec<String>,
}

/// What the names of compilation folders start with.
const FOLDER: &str = "flashtune-cc-";
/// What the names in them start with: the source, the library, and what compilers write beside these until they are
/// done.
const FILE: &str = "kernel";

const TEMPORARY_REMEDY: &str = "set TMPDIR to a folder with space that can be written";
const REMEDY: &str = "install one (Debian and Ubuntu: apt install gcc) or set CC to its path";

impl Cc {
    /// Finds the compiler. The answer is kept for the process as long as `CC` does not change.
    ///
    /// # Errors
    /// [`Error::Missing`] when none answers; a `CC` that does not work is not replaced by another compiler in silence.
    pub fn find() -> Result<Arc<Cc>> {
        static FOUND: Mutex<Option<HashMap<Option<OsString>, Arc<Cc>>>> = Mutex::new(None);
        let wanted = std::env::var_os("CC").filter(|v| !v.is_empty());
        let mut found = FOUND.lock().unwrap_or_else(|e| e.into_inner());
        let found = found.get_or_insert_default();
        if let Some(cc) = found.get(&wanted) {
            return Ok(cc.clone());
        }
        let cc = Arc::new(Self::search(wanted.as_ref())?);
        found.insert(wanted, cc.clone());
        Ok(cc)
    }

    /// The command that is run.
    pub fn command(&self) -> &Path {
        &self.command
    }

    fn search(wanted: Option<&OsString>) -> Result<Cc> {
        let candidates = match wanted {
            Some(cc) => vec![cc.to_string_lossy().into_owned()],
            None => ["cc", "gcc", "clang"].map(str::to_owned).to_vec(),
        };
        let mut tried = Vec::new();
        for candidate in &candidates {
            match Self::ask(candidate) {
                Ok(cc) => return Ok(cc),
                Err(why) => tried.push(format!("{candidate}: {why}")),
            }
        }
        let origin = if wanted.is_some() { "from CC" } else { "on PATH" };
        Err(Error::Missing {
            what: "a C compiler",
            searched: format!("{origin}; {}", tried.join("; ")),
            remedy: REMEDY,
        })
    }

    /// Runs `candidate --version`; on failure tells why it does not serve.
    fn ask(candidate: &str) -> Result<Cc, String> {
        let mut words = candidate.split_whitespace().map(str::to_owned);
        let command = PathBuf::from(words.next().ok_or("empty")?);
        let arguments: Vec<String> = words.collect();
        let out = run(Command::new(&command).args(&arguments).arg("--version")).map_err(|e| e.to_string())?;
        let text = String::from_utf8_lossy(&out.stdout);
        let version = text.lines().next().unwrap_or_default().trim();
        if !out.status.success() || version.is_empty() {
            return Err(format!("`--version` failed with {}", out.status));
        }
        let mut name = command.file_name().unwrap_or(command.as_os_str()).to_string_lossy().into_owned();
        // The arguments decide the binary as much as the version does, so they are part of its key.
        for word in &arguments {
            name.push(' ');
            name.push_str(word);
        }
        // Kernels are compiled in a folder of their own, where a relative path leads elsewhere.
        let command =
            if command.components().count() > 1 { std::path::absolute(&command).unwrap_or(command) } else { command };
        Ok(Cc { id: CompilerId { name, version: version.to_owned() }, command, arguments })
    }
}

/// What went wrong in the folder for temporary files.
fn temporary(e: flashtune_cache::Error) -> Error {
    match e {
        flashtune_cache::Error::Io { action, path, source, .. } => {
            Error::Io { action, path: path.display().to_string(), source, remedy: TEMPORARY_REMEDY }
        }
        e => e.into(),
    }
}

/// Runs a command with messages in English and nothing on its stdin; it ends with this process.
fn run(command: &mut Command) -> io::Result<Output> {
    leash::run(command.env("LC_ALL", "C"))
}

impl Compiler for Cc {
    fn id(&self) -> &CompilerId {
        &self.id
    }

    fn compile(&self, source: &Source) -> Result<(Vec<u8>, Facts)> {
        let refused = |log: String| Error::Compile { compiler: self.id.to_string(), kernel: source.name.clone(), log };
        if source.language != Language::C {
            return Err(refused("the source is CUDA; NVRTC compiles it".to_owned()));
        }
        // Processes that were killed while they compiled could not clean up. Once for each process is enough.
        static REAPED: Once = Once::new();
        REAPED.call_once(|| {
            reap(&std::env::temp_dir(), FOLDER, FILE);
        });
        let start = Instant::now();
        let folder = TemporaryFolder::new(&std::env::temp_dir(), FOLDER, FILE).map_err(temporary)?;
        // Relative names: no random path can find its way into the binary.
        folder.write("kernel.c", source.text.as_bytes()).map_err(temporary)?;
        let out = run(Command::new(&self.command)
            .args(&self.arguments)
            .args(&source.options)
            .args(["-o", "kernel.so", "kernel.c"])
            .current_dir(folder.path()))
        .map_err(|source| Error::Io {
            action: "running",
            path: self.command.display().to_string(),
            source,
            remedy: TEMPORARY_REMEDY,
        })?;
        if !out.status.success() {
            let log = String::from_utf8_lossy(&out.stderr);
            return Err(refused(format!("{}\n{}", out.status, log.trim_end())));
        }
        // A program that is no compiler may answer `--version` and succeed at everything.
        let bytes =
            folder.read("kernel.so").map_err(|e| refused(format!("it succeeded without an output ({e}); check CC")))?;
        let facts = Facts { compile_ms: start.elapsed().as_secs_f64() * 1e3, ..Facts::default() };
        Ok((bytes, facts))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(text: &str) -> Source {
        Source {
            name: "test".into(),
            entry: "ft_tile".into(),
            language: Language::C,
            options: ["-O1", "-shared", "-fPIC"].map(str::to_owned).to_vec(),
            text: text.into(),
        }
    }

    #[test]
    fn the_same_source_gives_the_same_bytes() {
        let cc = Cc::find().unwrap();
        let a = cc.compile(&source("int f(int x) { return x + 1; }")).unwrap();
        let b = cc.compile(&source("int f(int x) { return x + 1; }")).unwrap();
        assert!(a.0.starts_with(b"\x7fELF"));
        assert!(a.0 == b.0, "temporary paths leak into the binary");
        assert!(a.1.compile_ms > 0.0);
        assert!(!cc.id().version.is_empty());
    }

    #[test]
    fn a_broken_source_gives_the_log() {
        let e = Cc::find().unwrap().compile(&source("int f( { return undeclared; }")).unwrap_err();
        let Error::Compile { log, kernel, .. } = &e else { panic!("{e}") };
        assert!(kernel == "test" && log.contains("error") && log.contains("kernel.c:1"), "{e}");
    }

    #[test]
    fn a_cc_that_is_not_there_is_an_error_and_not_replaced() {
        let e = Cc::search(Some(&"/nonexistent/cc".into())).unwrap_err();
        let Error::Missing { searched, .. } = &e else { panic!("{e}") };
        assert!(searched.contains("/nonexistent/cc") && searched.contains("CC"), "{e}");
        assert!(Cc::search(Some(&"false".into())).is_err(), "a program that is no compiler");
    }

    #[test]
    fn a_program_that_does_nothing_and_succeeds_is_told_by_its_missing_output() {
        let e = Cc::search(Some(&"echo".into())).unwrap().compile(&source("int f;")).unwrap_err();
        assert!(matches!(&e, Error::Compile { log, .. } if log.contains("CC")), "{e}");
    }

    #[test]
    fn words_after_the_command_in_cc_are_arguments() {
        let cc = Cc::search(Some(&"cc -DANSWER=42".into())).unwrap();
        let (bytes, _) = cc.compile(&source("int f(void) { return ANSWER; }")).unwrap();
        assert!(bytes.starts_with(b"\x7fELF"));
    }

    #[test]
    fn arguments_in_cc_are_part_of_the_compilers_identity() {
        let of = |cc: &str| Cc::search(Some(&cc.into())).unwrap().id().clone();
        assert_eq!(of("cc -O0"), of(" cc  -O0 "));
        assert_ne!(of("cc"), of("cc -O0"));
    }

    #[test]
    fn a_relative_path_in_cc_is_one_from_where_the_program_was_started() {
        let here = std::env::current_dir().unwrap();
        let up: PathBuf = here.components().skip(1).map(|_| "..").collect();
        let found =
            std::env::split_paths(&std::env::var_os("PATH").unwrap()).map(|p| p.join("cc")).find(|p| p.is_file());
        let relative = up.join(found.expect("cc is on PATH").strip_prefix("/").unwrap());
        let cc = Cc::search(Some(&relative.into())).unwrap();
        assert!(cc.compile(&source("int f(void) { return 1; }")).unwrap().0.starts_with(b"\x7fELF"));
    }
}
