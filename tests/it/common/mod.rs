//! What the end-to-end tests share: the command with a cache of its own, and tensor files.

pub(crate) mod compiled;
pub(crate) mod compiler;
pub(crate) mod counted;
pub(crate) mod faults;
pub(crate) mod paper;
pub(crate) mod planted;

use assert_cmd::Command;
use flashtune::{DType, Distribution, HostTensor, Layout};
use flashtune_codegen::{Arch, CpuIsa};
use safetensors::tensor::{Dtype, TensorView};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use tempfile::TempDir;

/// The checkout: these tests are of the package in `cli/`.
pub(crate) const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");

/// A name that no file has.
pub(crate) const NOWHERE: &str = "/nonexistent/flashtune";

/// The command, by its path: what starts test programs, with a `CC` of their own, would start it as well by its name.
pub(crate) fn command() -> Command {
    Command::new(assert_cmd::cargo::cargo_bin("flashtune"))
}

/// A folder for one test, with a cache in it.
pub(crate) struct Place {
    dir: TempDir,
}

impl Place {
    pub(crate) fn new() -> Self {
        Self { dir: tempfile::tempdir().expect("a temporary folder") }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(crate) fn cache(&self) -> PathBuf {
        self.path("cache")
    }

    /// A program of this text.
    pub(crate) fn program(&self, name: &str, text: &str) -> PathBuf {
        let program = self.path(name);
        write_program(&program, text);
        program
    }

    /// The command on the cpu, with this place's cache and nothing of the user's.
    pub(crate) fn flashtune(&self, args: &[&str]) -> Command {
        let mut command = command();
        let variables =
            ["FLASHTUNE_TEMPLATES", "FLASHTUNE_BUNDLES", "FLASHTUNE_LOG", "FLASHTUNE_CACHE", "FLASHTUNE_TRUSTED_KEYS"];
        for name in variables {
            command.env_remove(name);
        }
        // What signatures are good for is a test of its own.
        command.env("FLASHTUNE_ALLOW_UNSIGNED", "1");
        command.arg("--cache").arg(self.cache()).args(["--device", "cpu"]).args(args);
        command
    }

    /// Runs a command that must succeed and parses what it prints. One that tunes is run until the machine is quiet
    /// enough for a result: that nothing is stored when it is not is another test's matter.
    pub(crate) fn json(&self, args: &[&str]) -> serde_json::Value {
        for _ in 0..4 {
            let output = self.flashtune(args).arg("--json").output().expect("the command starts");
            let said = String::from_utf8_lossy(&output.stderr);
            if output.status.success() {
                return serde_json::from_slice(&output.stdout).expect("JSON");
            }
            assert!(said.contains("nothing was stored"), "{args:?}: {}\n{said}", output.status);
        }
        panic!("the machine is too busy for {args:?}");
    }

    /// Tunes one small problem: a few schedules, a few seconds.
    pub(crate) fn tune_small(&self) -> serde_json::Value {
        self.tune(&[SMALL, &["--trials", "4", "--budget-s", "10"]].concat())
    }

    /// Runs `tune`.
    pub(crate) fn tune(&self, args: &[&str]) -> serde_json::Value {
        self.json(&[&["tune"], args].concat())
    }

    /// Writes q, k, v of these shapes to a file, and gives the tensors.
    pub(crate) fn inputs(&self, name: &str, dtype: DType, q: [usize; 4], kv: [usize; 4]) -> (PathBuf, [HostTensor; 3]) {
        let tensor = |shape, seed| HostTensor::random(dtype, shape, Layout::Bhsd, seed, Distribution::Normal);
        let tensors = [tensor(q, 1), tensor(kv, 2), tensor(kv, 3)];
        let path = self.path(name);
        let named: Vec<_> = ["q", "k", "v"].into_iter().zip(&tensors).collect();
        write_tensors(&path, &named);
        (path, tensors)
    }
}

/// Writes a program, for those who start it meanwhile in one step. Another process does: a child that some other test
/// starts would inherit this one's open file, and a program that is open for writing cannot be started.
pub(crate) fn write_program(path: &Path, text: &str) {
    let [source, unfinished] = ["text", "new"].map(|end| path.with_extension(format!("{}.{end}", std::process::id())));
    std::fs::write(&source, text).expect("a writable folder");
    let copied = std::process::Command::new("install").args(["-m", "755"]).args([&source, &unfinished]).status();
    assert!(copied.expect("install(1)").success());
    std::fs::rename(unfinished, path).expect("a writable folder");
    std::fs::remove_file(source).expect("a writable folder");
}

/// Held by tests that keep every core busy and by those that look at times: each would be noise to the others.
pub(crate) fn alone() -> MutexGuard<'static, ()> {
    static STAGE: Mutex<()> = Mutex::new(());
    STAGE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The problem that [`Place::tune_small`] tunes.
pub(crate) const SMALL: &[&str] =
    &["--dtype", "f32", "--head-dim", "32", "--mask", "causal", "--heads", "2", "--q-len", "128"];

/// Standard output of a command that must succeed, as JSON.
pub(crate) fn json(command: &mut Command) -> serde_json::Value {
    let output = command.output().expect("the command starts");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{command:?}: {}\n{}", output.status, text(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {}", text(&output.stdout)))
}

/// Runs a command that must fail with this exit code and one line `error: ...` that has all of `words`; gives stderr.
#[track_caller]
pub(crate) fn fails(command: &mut Command, code: i32, words: &[&str]) -> String {
    let output = command.output().expect("the command starts");
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(code), "{command:?}\n{stderr}");
    assert!(stderr.lines().any(|l| l.starts_with("error: ")), "no error line: {stderr}");
    assert!(!stderr.contains("panicked"), "{stderr}");
    for word in words {
        assert!(stderr.contains(word), "`{word}` is not in: {stderr}");
    }
    stderr
}

/// Writes tensors in `[batch, heads, rows, dim]` order.
pub(crate) fn write_tensors(path: &Path, tensors: &[(&str, &HostTensor)]) {
    let views = tensors.iter().map(|(name, t)| {
        let dtype = match t.dtype() {
            DType::F16 => Dtype::F16,
            DType::Bf16 => Dtype::BF16,
            DType::F32 => Dtype::F32,
            DType::E4m3 => Dtype::F8_E4M3,
        };
        (*name, TensorView::new(dtype, t.shape().to_vec(), t.bytes()).expect("a contiguous tensor"))
    });
    let bytes = safetensors::serialize(views, None).expect("encodable tensors");
    std::fs::write(path, bytes).expect("a writable folder");
}

/// The arch of this host's cpu device.
pub(crate) fn host_arch() -> Arch {
    flashtune_runtime::open(flashtune::DeviceSpec::Cpu).expect("the cpu device").fingerprint().arch
}

/// A cpu arch that this host is not.
pub(crate) fn other_cpu_arch() -> Arch {
    match host_arch() {
        Arch::Cpu(CpuIsa::Generic) => Arch::Cpu(CpuIsa::Avx2),
        _ => Arch::Cpu(CpuIsa::Generic),
    }
}

/// The folder with NVRTC, or `None` with a printed reason; a failure where CI must have it.
pub(crate) fn nvrtc_or_skip(test: &str) -> Option<()> {
    match flashtune_runtime::compile::Nvrtc::find() {
        Ok(_) => Some(()),
        Err(e) if std::env::var("CI").is_ok_and(|v| v == "true") => panic!("{test} needs NVRTC on CI: {e}"),
        Err(e) => {
            println!("skipped {test}: {e} (`cargo xtask test` installs it)");
            None
        }
    }
}
