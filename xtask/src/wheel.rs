//! `cargo xtask wheel`: the Python package with the library and the `flashtune` command in it, for `pip install`.
//!
//! The Python in it is the same for all versions, and what is compiled talks to it through the C ABI: one wheel for
//! each platform, `py3-none-manylinux_2_28_x86_64`. Its oldest glibc is what the linker of zig aims at, since that of
//! the machine links to the machine's own; auditwheel says what the result really asks for.

use super::{package, pip};
use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

const USAGE: &str = "usage: cargo xtask wheel [--out DIR] [--profile NAME] [--glibc VERSION|host] [--check]

  --out DIR        where the wheel goes; target/wheels when absent
  --profile NAME   the cargo profile; dist (optimised and stripped) when absent
  --glibc VERSION  the oldest glibc that it runs with: 2.28 when absent, `host` for that of this machine
  --check          install it into a clean environment, and run it there on the CPU";

/// What makes wheels, and an environment to try one in.
const TOOLS: [&str; 4] = ["setuptools>=77", "wheel>=0.40", "auditwheel>=6", "virtualenv>=20"];
/// A linker for other versions of glibc than the machine's, 400 MB.
const LINKER: [&str; 2] = ["cargo-zigbuild>=0.20", "ziglang>=0.13"];

/// What somebody does first: a result that is compared, from the package and from the command.
const TRIAL: &str = r#"
import numpy as np, flashtune
rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal((1, 100, 2, 64), dtype=np.float32) for _ in range(3))
out = flashtune.flash_attn_func(q, k, v, causal=True)
s = np.einsum("bqhd,bkhd->bhqk", q, k) / 8
s[..., ~np.tri(100, dtype=bool)] = -np.inf
p = np.exp(s - s.max(-1, keepdims=True))
want = np.einsum("bhqk,bkhd->bqhd", p / p.sum(-1, keepdims=True), v)
error = float(np.abs(out - want).max())
assert error < 1e-5, error
print(f"flashtune {flashtune.__version__} from {flashtune.__file__}: largest error {error:.1e}")
"#;

struct Options {
    out: PathBuf,
    profile: String,
    /// None is what the machine has.
    glibc: Option<String>,
    check: bool,
}

/// The command.
pub(crate) fn main(root: &Path, args: impl Iterator<Item = String>) -> ExitCode {
    match Options::parse(root, args) {
        Ok(Some(options)) => super::exit_code(make(root, &options)),
        Ok(None) => {
            println!("{USAGE}");
            ExitCode::SUCCESS
        }
        Err(e) => {
            eprintln!("error: {e:#}\n\n{USAGE}");
            ExitCode::from(2)
        }
    }
}

/// The wheel of what the tests have built, tried in a clean environment.
pub(crate) fn test() -> Result<Command> {
    let out = super::target().join("tmp/wheels");
    // By its name: the tests' own build has put another file in the place of the one that runs.
    let mut command = Command::new(std::env::args_os().next().context("this program has no name")?);
    command.args(["wheel", "--profile", "dev", "--glibc", "host", "--check", "--out"]).arg(out);
    Ok(command)
}

impl Options {
    /// `None` when help was asked for.
    fn parse(root: &Path, mut args: impl Iterator<Item = String>) -> Result<Option<Self>> {
        let out = root.join("target/wheels");
        let mut options = Self { out, profile: "dist".into(), glibc: Some("2.28".into()), check: false };
        while let Some(arg) = args.next() {
            let mut value = || args.next().with_context(|| format!("{arg} needs a value"));
            match arg.as_str() {
                "--out" => options.out = value()?.into(),
                "--profile" => options.profile = value()?,
                "--glibc" => options.glibc = Some(value()?).filter(|v| v != "host"),
                "--check" => options.check = true,
                "-h" | "--help" => return Ok(None),
                other => bail!("there is no option `{other}`"),
            }
        }
        Ok(Some(options))
    }
}

fn make(root: &Path, options: &Options) -> Result<()> {
    let tools = Tools::ensure(root)?;
    let built = match &options.glibc {
        None => package::build(root, &options.profile)?,
        Some(version) => build_for(root, &tools, &options.profile, version)?,
    };
    let stage = tempfile::tempdir()?;
    let (source, pure, open) = (stage.path().join("source"), stage.path().join("pure"), stage.path().join("open"));
    package::copy_folder(&root.join("bindings/python"), &source, &[])?;
    let library = source.join("flashtune/lib").join(package::LIBRARY);
    package::copy(&built.join(package::LIBRARY), &library)?;
    strip(&library);
    let mut wheel = tools.module("pip");
    wheel.args(["wheel", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation", "--wheel-dir"]);
    super::run(quietly(wheel.arg(&pure).arg(&source)))?;

    // setuptools takes scripts of text alone, and does not know that there is a library among the files.
    let mut unpack = tools.module("wheel");
    super::run(quietly(unpack.args(["unpack", "--dest"]).arg(&open).arg(only(&pure)?)))?;
    let folder = only(&open)?;
    let scripts = folder.join(format!("flashtune-{}.data/scripts", env!("CARGO_PKG_VERSION")));
    let command = scripts.join("flashtune");
    package::copy(&built.join("flashtune"), &command)?;
    strip(&command);
    let info = folder.join(format!("flashtune-{}.dist-info", env!("CARGO_PKG_VERSION")));
    let (bill, texts) = package::parts(root, &package::rustc()?.0)?;
    // Where PEP 770 has them, and beside the metadata.
    std::fs::create_dir_all(info.join("sboms"))?;
    std::fs::write(info.join("sboms").join(package::BILL), bill)?;
    std::fs::write(info.join(package::TEXTS), texts)?;
    let about = info.join("WHEEL");
    let text = std::fs::read_to_string(&about)?.replace("Root-Is-Purelib: true", "Root-Is-Purelib: false");
    std::fs::write(&about, text)?;

    let packed = stage.path().join("packed");
    std::fs::create_dir_all(&packed)?;
    super::run(quietly(tools.module("wheel").args(["pack", "--dest-dir"]).arg(&packed).arg(&folder)))?;
    // auditwheel looks at what says it is for some Linux.
    tools.tag(&packed, &format!("linux_{}", std::env::consts::ARCH))?;
    let tag = tools.least_platform(&only(&packed)?)?;
    tools.tag(&packed, &tag)?;
    if let Some(version) = &options.glibc {
        let (asked, got) = (glibc_of(&format!("manylinux_{}_", version.replace('.', "_"))), glibc_of(&tag));
        if got > asked {
            bail!("the wheel is {tag}, and glibc {version} was asked for");
        }
    }
    std::fs::create_dir_all(&options.out).with_context(|| format!("cannot make {}", options.out.display()))?;
    let made = only(&packed)?;
    let to = options.out.join(made.file_name().context("a wheel has a name")?);
    package::copy(&made, &to)?;
    println!("{} ({:.1} MB)", to.display(), std::fs::metadata(&to)?.len() as f64 / 1e6);
    if options.check { tools.check(root, &to) } else { Ok(()) }
}

/// As [`package::build`], for machines with this version of glibc and later ones.
fn build_for(root: &Path, tools: &Tools, profile: &str, glibc: &str) -> Result<PathBuf> {
    let target = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    let folder = root.join(".toolchain/linker");
    if !folder.join("bin/cargo-zigbuild").exists() {
        pip::install(&root.join(".toolchain"), &folder, &LINKER, "pass `--glibc host` for this machine's own glibc")?;
    }
    let mut command = Command::new(folder.join("bin/cargo-zigbuild"));
    command.current_dir(root).args(["zigbuild", "--profile", profile, "--target", &format!("{target}.{glibc}")]);
    command.args(["--package", "flashtune-cli", "--package", "flashtune-c"]);
    // It asks Python for zig.
    command.env("PYTHONPATH", &folder).env("CARGO_ZIGBUILD_PYTHON_PATH", &tools.python);
    super::run(command)?;
    let profile = if profile == "dev" { "debug" } else { profile };
    Ok(package::target_folder(root).join(target).join(profile))
}

struct Tools {
    python: PathBuf,
    folder: PathBuf,
}

impl Tools {
    fn ensure(root: &Path) -> Result<Self> {
        let python = pip::python().context("no python3 on PATH; install Python to make a wheel")?;
        let tools = Self { python, folder: root.join(".toolchain/wheel") };
        let mut import = Command::new(&tools.python);
        import.args(["-c", "import pip, setuptools, wheel, auditwheel, virtualenv"]).env("PYTHONPATH", &tools.folder);
        if !pip::quiet(&mut import) {
            let packages: Vec<&str> = std::iter::once("pip").chain(TOOLS).collect();
            pip::install(&root.join(".toolchain"), &tools.folder, &packages, "install them for this Python")?;
        }
        Ok(tools)
    }

    /// `python -m NAME`.
    fn module(&self, name: &str) -> Command {
        let mut command = Command::new(&self.python);
        command.args(["-m", name]).env("PYTHONPATH", &self.folder);
        command
    }

    /// Says of the only wheel of a folder which platform it is for.
    fn tag(&self, folder: &Path, platform: &str) -> Result<()> {
        let mut command = self.module("wheel");
        command.args(["tags", "--remove", "--platform-tag", platform]).arg(only(folder)?);
        super::run(quietly(&mut command))
    }

    /// The oldest platform that has all the symbols that the wheel's files ask for.
    fn least_platform(&self, wheel: &Path) -> Result<String> {
        let out = self.module("auditwheel").arg("show").arg(wheel).output().context("cannot run auditwheel")?;
        let text = String::from_utf8_lossy(&out.stdout).replace('\n', " ");
        let tag = text.split('"').find(|word| word.starts_with("manylinux_") || word.starts_with("linux_"));
        match tag {
            Some(tag) if tag.starts_with("manylinux_") => Ok(tag.to_owned()),
            _ => {
                bail!("auditwheel finds the wheel fit for no manylinux: {text}{}", String::from_utf8_lossy(&out.stderr))
            }
        }
    }

    /// Installs a wheel where nothing else is, and runs the command and the package on the CPU.
    fn check(&self, root: &Path, wheel: &Path) -> Result<()> {
        let place = tempfile::tempdir()?;
        let clean = place.path().join("clean");
        super::run(quietly(self.module("virtualenv").arg("--quiet").arg(&clean)))?;
        let python = clean.join("bin/python");
        let mut install = Command::new(&python);
        install.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]).arg(wheel);
        super::run(install)?;
        let alone = |command: &mut Command| {
            command.env("FLASHTUNE_CACHE", place.path().join("cache")).current_dir(place.path());
            command.env_remove("FLASHTUNE_LIBRARY").env_remove("PYTHONPATH");
        };
        let mut version = Command::new(clean.join("bin/flashtune"));
        alone(version.arg("--version"));
        super::run(version)?;
        let mut check = Command::new(clean.join("bin/flashtune"));
        alone(check.args(["--device", "cpu", "check", "--problem", "bf16-d64-causal", "--schedules", "0"]));
        super::run(check)?;
        let mut trial = Command::new(&python);
        // NumPy is the caller's own.
        alone(trial.args(["-c", TRIAL]));
        let numpy = root.join(".toolchain/python");
        if numpy.exists() {
            trial.env("PYTHONPATH", numpy);
        } else {
            let mut numpy = Command::new(&python);
            numpy.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "numpy>=1.26"]);
            super::run(numpy)?;
        }
        super::run(trial)
    }
}

/// The version of glibc in a platform's name, to compare by.
fn glibc_of(platform: &str) -> Vec<u32> {
    platform.trim_start_matches("manylinux_").split('_').map_while(|n| n.parse().ok()).take(2).collect()
}

/// What a folder holds, which is one file or folder.
fn only(folder: &Path) -> Result<PathBuf> {
    let mut entries = std::fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    let entry = entries.next().with_context(|| format!("nothing is in {}", folder.display()))??;
    match entries.next() {
        None => Ok(entry.path()),
        Some(_) => bail!("{} holds more than one file", folder.display()),
    }
}

/// Debug information is most of a file that the tests have built; without `strip` it goes along.
fn strip(file: &Path) {
    pip::quiet(Command::new("strip").arg("--strip-debug").arg(file));
}

/// A command of which nothing is read; what goes wrong is on stderr.
fn quietly(command: &mut Command) -> Command {
    let mut quiet = Command::new(command.get_program());
    quiet.args(command.get_args()).stdout(std::process::Stdio::null());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => quiet.env(name, value),
            None => quiet.env_remove(name),
        };
    }
    quiet
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_of_glibc_are_compared_as_numbers() {
        assert!(glibc_of("manylinux_2_5_x86_64") < glibc_of("manylinux_2_28_x86_64"));
        assert_eq!(glibc_of("manylinux_2_28_aarch64"), [2, 28]);
    }

    #[test]
    fn a_folder_of_two_is_refused() {
        let tmp = tempfile::tempdir().unwrap();
        assert!(only(tmp.path()).unwrap_err().to_string().contains("nothing is in"));
        std::fs::write(tmp.path().join("a"), "").unwrap();
        assert_eq!(only(tmp.path()).unwrap(), tmp.path().join("a"));
        std::fs::write(tmp.path().join("b"), "").unwrap();
        assert!(only(tmp.path()).unwrap_err().to_string().contains("more than one"));
    }
}
