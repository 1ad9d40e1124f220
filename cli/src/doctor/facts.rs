//! What a report of a fault needs beside what was found: versions, settings with where each comes from, variables,
//! bundles with their keys, and the Python package.

use super::super::context::Context;
use super::super::version;
use flashtune_cache::{self as cache, BUNDLE_FORMAT, BUNDLES_VARIABLE, Bundle, CACHE_VARIABLE, LIMIT_VARIABLE};
use flashtune_codegen::abi::ABI_VERSION;
use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Variables of others that decide what is found and used here.
const OF_OTHERS: [&str; 12] = [
    "CC",
    "CUDA_HOME",
    "CUDA_MODULE_LOADING",
    "CUDA_VISIBLE_DEVICES",
    "HOME",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "NO_COLOR",
    "PYTHONPATH",
    "SOURCE_DATE_EPOCH",
    "VIRTUAL_ENV",
    "XDG_CACHE_HOME",
];

/// How long the interpreter may take: a package that hangs must not hold up the report.
const PATIENCE: Duration = Duration::from_secs(20);

/// Asks for versions without importing what takes seconds to import.
const OF_PYTHON: &str = r#"
import importlib.metadata as metadata, importlib.util, json, sys
found = {"python": sys.version.split()[0], "program": sys.executable, "packages": {}}
names = "torch numpy transformers triton nvidia-cuda-nvrtc nvidia-cuda-nvrtc-cu12 flash-attn vllm"
for name in names.split():
    try:
        found["packages"][name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
try:
    spec = importlib.util.find_spec("flashtune")
    if spec is not None:
        import flashtune
        found["flashtune"] = {"version": flashtune.__version__, "path": spec.origin}
        found["flashtune"]["library"] = flashtune.version()
except Exception as e:
    found.setdefault("flashtune", {})["error"] = str(e)
print(json.dumps(found))
"#;

#[derive(Serialize)]
pub(crate) struct Facts {
    pub versions: BTreeMap<&'static str, String>,
    pub settings: Vec<Setting>,
    /// Those that are set.
    pub variables: BTreeMap<String, String>,
    /// Variables of this program's prefix that it does not know.
    pub unknown_variables: Vec<String>,
    pub bundles: Vec<BundleFacts>,
    pub trusted_keys: Vec<String>,
    /// What the interpreter says, or why it says nothing.
    pub python: Value,
}

/// A value and where it comes from: an option, a variable, or what holds without both.
#[derive(Serialize)]
pub(crate) struct Setting {
    pub name: &'static str,
    pub value: String,
    pub from: String,
}

#[derive(Serialize)]
pub(crate) struct BundleFacts {
    pub path: PathBuf,
    pub from: String,
    /// The root hash, in hexadecimal digits.
    pub root: Option<String>,
    pub signer: Option<String>,
    pub records: usize,
    pub kernels: usize,
    /// Why it is not used.
    pub error: Option<String>,
}

impl Facts {
    pub(crate) fn collect(cx: &mut Context, python: &Path) -> Self {
        let variables: BTreeMap<String, String> = std::env::vars_os()
            .map(|(name, value)| (name.to_string_lossy().into_owned(), value.to_string_lossy().into_owned()))
            .filter(|(name, _)| name.starts_with("FLASHTUNE_") || OF_OTHERS.contains(&name.as_str()))
            .collect();
        let known = super::super::help::variables();
        let unknown = |name: &&String| name.starts_with("FLASHTUNE_") && !known.contains(name.as_str());
        let unknown_variables = variables.keys().filter(unknown).cloned().collect();
        Self {
            versions: versions(cx),
            settings: settings(cx),
            unknown_variables,
            variables,
            bundles: bundles(cx),
            trusted_keys: cx.trust().map(|t| t.keys().map(ToString::to_string).collect()).unwrap_or_default(),
            python: ask(python).unwrap_or_else(|reason| serde_json::json!({ "error": reason })),
        }
    }
}

fn versions(cx: &mut Context) -> BTreeMap<&'static str, String> {
    let mut versions = BTreeMap::from([
        ("flashtune", version::LONG.to_owned()),
        ("kernel ABI", ABI_VERSION.to_string()),
        ("bundle format", BUNDLE_FORMAT.to_string()),
        ("platform", format!("{} {}", std::env::consts::ARCH, std::env::consts::OS)),
    ]);
    if let Ok(templates) = cx.templates() {
        versions.insert("templates", templates.hash().to_string());
    }
    if let Ok(kernel) = std::fs::read_to_string("/proc/sys/kernel/osrelease") {
        versions.insert("kernel", kernel.trim().to_owned());
    }
    if let Ok(release) = std::fs::read_to_string("/etc/os-release")
        && let Some(name) = release.lines().find_map(|line| line.strip_prefix("PRETTY_NAME="))
    {
        versions.insert("system", name.trim_matches('"').to_owned());
    }
    versions
}

fn settings(cx: &Context) -> Vec<Setting> {
    let global = cx.global();
    let set = |name: &str| std::env::var(name).ok().filter(|v| !v.is_empty());
    let option = |name: &'static str, value: String| Setting {
        name,
        value,
        from: if cx.is_given(name) { format!("--{name}") } else { "default".to_owned() },
    };
    let mut settings = vec![
        option("device", global.device.to_string()),
        option("policy", global.policy.to_string()),
        Setting {
            name: "cache",
            value: cx.cache_dir().map_or_else(|e| format!("{e:#}"), |dir| dir.root().display().to_string()),
            from: match [CACHE_VARIABLE, "XDG_CACHE_HOME", "HOME"].into_iter().find(|name| set(name).is_some()) {
                _ if global.cache.is_some() => "--cache".to_owned(),
                Some(variable) => variable.to_owned(),
                None => "nothing names one".to_owned(),
            },
        },
        Setting {
            name: "templates",
            value: cx.templates_folder().map_or("built in".to_owned(), |folder| folder.display().to_string()),
            from: match cx.templates_folder() {
                None => "default".to_owned(),
                Some(_) if cx.is_given("templates") => "--templates".to_owned(),
                Some(_) => flashtune::TEMPLATES_VARIABLE.to_owned(),
            },
        },
        Setting {
            name: "unsigned bundles",
            value: cx.trust().is_ok_and(|trust| trust.allows_unsigned()).to_string(),
            from: match global.allow_unsigned {
                true => "--allow-unsigned".to_owned(),
                false => from_variable(cache::ALLOW_UNSIGNED_VARIABLE, &set),
            },
        },
    ];
    for (name, variable, default) in [
        ("cache limit", LIMIT_VARIABLE, "2048"),
        ("launches", flashtune::LAUNCHES_VARIABLE, "eager"),
        ("quick first", flashtune::QUICK_FIRST_VARIABLE, "1"),
    ] {
        let value = set(variable).unwrap_or_else(|| default.to_owned());
        settings.push(Setting { name, value, from: from_variable(variable, &set) });
    }
    settings
}

fn from_variable(variable: &str, set: &impl Fn(&str) -> Option<String>) -> String {
    set(variable).map_or("default".to_owned(), |_| variable.to_owned())
}

fn bundles(cx: &Context) -> Vec<BundleFacts> {
    let of_options = cx.global().bundle.len();
    let trust = cx.trust();
    let facts = |(n, path): (usize, PathBuf)| {
        let from = if n < of_options { "--bundle" } else { BUNDLES_VARIABLE }.to_owned();
        let none = BundleFacts { path, from, root: None, signer: None, records: 0, kernels: 0, error: None };
        let bundle = match Bundle::map(&none.path) {
            Ok(bundle) => bundle,
            Err(e) => return BundleFacts { error: Some(e.to_string()), ..none },
        };
        BundleFacts {
            root: Some(bundle.root().hex()),
            signer: bundle.signer().map(|key| key.to_string()),
            records: bundle.record_count(),
            kernels: bundle.artifact_count(),
            error: trust.as_ref().ok().and_then(|trust| trust.check(&bundle).err()).map(|e| e.to_string()),
            ..none
        }
    };
    cx.bundles().into_iter().enumerate().map(facts).collect()
}

/// What a Python interpreter says of itself and of what is installed for it.
fn ask(program: &Path) -> Result<Value, String> {
    let mut command = Command::new(program);
    command.args(["-B", "-c", OF_PYTHON]).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().map_err(|e| format!("{} cannot be started: {e}", program.display()))?;
    let start = Instant::now();
    // It prints less than a pipe holds, so that nobody need read meanwhile.
    while child.try_wait().map_err(|e| e.to_string())?.is_none() {
        if start.elapsed() > PATIENCE {
            let _ = child.kill();
            let _ = child.wait();
            return Err(format!("{} gave no answer in {} s", program.display(), PATIENCE.as_secs()));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let output = child.wait_with_output().map_err(|e| e.to_string())?;
    serde_json::from_slice(&output.stdout).map_err(|_| format!("{} ended with {}", program.display(), output.status))
}
