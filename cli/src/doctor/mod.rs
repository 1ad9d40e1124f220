//! `flashtune doctor`: what was found, what to do about what is missing, and all that a report of a fault needs.

mod facts;
mod redact;

use super::context::Context;
use anyhow::Result;
use facts::Facts;
use flashtune_cache::CacheDir;
use flashtune_codegen::Arch;
use flashtune_runtime::compile::{Cc, Nvrtc};
use flashtune_runtime::{self as runtime, Compiler, DeviceSpec};
use redact::Redactor;
use serde::Serialize;
use serde_json::Value;
use std::io::Write;
use std::path::{Path, PathBuf};

/// Options of `doctor`.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Leave out folders, the names of user and machine, and keys: for a report that strangers read
    #[arg(long)]
    redact: bool,
    /// The Python whose packages are looked at
    #[arg(long, value_name = "PROGRAM", default_value = "python3")]
    python: PathBuf,
}

/// One thing that was looked at.
#[derive(Serialize)]
struct Finding {
    what: &'static str,
    ok: bool,
    /// What was found, or what is wrong with what to do about it.
    text: String,
}

#[derive(Default)]
struct Findings(Vec<Finding>);

impl Findings {
    fn add(&mut self, what: &'static str, outcome: Result<String, String>) {
        let (ok, text) = match outcome {
            Ok(text) => (true, text),
            Err(text) => (false, text),
        };
        self.0.push(Finding { what, ok, text });
    }
}

pub(crate) fn run(cx: &mut Context, args: Args) -> Result<()> {
    let mut found = Findings::default();
    let nvrtc = Nvrtc::find();
    let cc = Cc::find();

    found.add(
        "cuda driver",
        match runtime::cuda::device_count() {
            Ok(0) => Err("the driver works, but sees no device; check CUDA_VISIBLE_DEVICES and nvidia-smi".to_owned()),
            Ok(n) => Ok(format!("{n} device(s)")),
            Err(e) => Err(e.to_string()),
        },
    );
    // A kernel can be used where its device opens and either its compiler or a stored kernel is there.
    let mut usable = false;
    let templates = cx.templates();
    let layers = cx.layers();
    for (spec, device) in runtime::all_devices() {
        let what = if spec == DeviceSpec::Cpu { "cpu" } else { "gpu" };
        found.add(
            what,
            match device {
                Ok(device) => {
                    let f = device.fingerprint();
                    let stored = layers.as_ref().is_ok_and(|layers| {
                        layers.records().iter().any(|(_, _, v)| {
                            v.arch == f.arch && templates.as_ref().is_ok_and(|t| v.templates == t.hash_of(v.family))
                        })
                    });
                    usable |= stored
                        || match f.arch {
                            Arch::Cpu(_) => cc.is_ok(),
                            Arch::Sm(_) => nvrtc.is_ok(),
                        };
                    let mib = |bytes: u64| bytes >> 20;
                    Ok(format!(
                        "{spec}: {f}, {} MiB memory, {} MiB cache, driver {}",
                        mib(f.memory_bytes),
                        mib(f.cache_bytes),
                        f.driver
                    ))
                }
                Err(e) => Err(format!("{spec}: {e}")),
            },
        );
    }
    found.add(
        "nvrtc",
        nvrtc.as_ref().map(|n| format!("{} at {}", n.id(), n.path().display())).map_err(|e| e.to_string()),
    );
    found.add(
        "c compiler",
        cc.as_ref().map(|c| format!("{} at {}", c.id(), c.command().display())).map_err(|e| e.to_string()),
    );
    found.add(
        "templates",
        match (&templates, cx.templates_folder()) {
            (Ok(set), None) => Ok(format!("{} (built in)", set.hash())),
            (Ok(set), Some(folder)) => Ok(format!("{} (with {})", set.hash(), folder.display())),
            (Err(e), _) => Err(format!("{e:#}")),
        },
    );
    let dir = cx.cache_dir();
    found.add(
        "cache",
        match &dir {
            Ok(dir) => writable(dir).map(|()| format!("{} is writable", dir.root().display())),
            Err(e) => Err(format!("{e:#}")),
        },
    );
    match &layers {
        Ok(layers) => {
            let info = layers.info();
            if info.is_empty() {
                found.add("records", Err("none yet; `flashtune tune` makes some".to_owned()));
            }
            for layer in info {
                let text = format!("{} in {}, {} kernels", layer.records, layer.name, layer.artifacts);
                found.add("records", Ok(text));
            }
        }
        Err(e) => found.add("records", Err(format!("{e:#}"))),
    }

    let facts = Facts::collect(cx, &args.python);
    if cx.json() {
        let mut report = serde_json::to_value(&facts)?;
        report["usable"] = usable.into();
        report["findings"] = serde_json::to_value(&found.0)?;
        let report = if args.redact { Redactor::new().value(report) } else { report };
        cx.print_json(&report)?;
    } else {
        let mut lines: Vec<String> = Vec::new();
        for Finding { what, ok, text } in &found.0 {
            lines.push(format!("{} {what:<12} {text}", if *ok { "ok     " } else { "missing" }));
        }
        lines.extend(told(&facts));
        let redactor = args.redact.then(Redactor::new);
        for line in lines {
            writeln!(cx.out, "{}", redactor.as_ref().map_or(line.clone(), |r| r.text(&line)))?;
        }
        writeln!(cx.out, "{}", if usable { "ready" } else { "nothing here can run a kernel" })?;
    }
    match usable {
        true => Ok(()),
        false => Err(runtime::Error::Missing {
            what: "a device together with its compiler or a stored kernel for it",
            searched: "see above".to_owned(),
            remedy: "install a C compiler for the cpu device, or NVRTC and a driver for a GPU",
        }
        .into()),
    }
}

/// Facts for people.
fn told(facts: &Facts) -> Vec<String> {
    let mut lines = Vec::new();
    for (name, version) in &facts.versions {
        lines.push(format!("version {name:<14} {version}"));
    }
    for setting in &facts.settings {
        lines.push(format!("setting {:<16} {} [{}]", setting.name, setting.value, setting.from));
    }
    // What is set shows in the settings as well; what is not known shows here alone.
    for name in &facts.unknown_variables {
        lines.push(format!("unknown {name} is set, and flashtune has no variable of this name"));
    }
    for (name, value) in &facts.variables {
        lines.push(format!("set     {name}={value}"));
    }
    for key in &facts.trusted_keys {
        lines.push(format!("key     {key} is trusted"));
    }
    for bundle in &facts.bundles {
        let state = match (&bundle.error, &bundle.signer) {
            (Some(error), _) => format!("not used: {error}"),
            (None, Some(key)) => format!("signed by {key}"),
            (None, None) => "not signed".to_owned(),
        };
        let (path, records, kernels) = (bundle.path.display(), bundle.records, bundle.kernels);
        lines.push(format!("bundle  {path} [{}]: {records} records, {kernels} kernels, {state}", bundle.from));
    }
    lines.extend(of_python(&facts.python));
    lines
}

fn of_python(python: &Value) -> Vec<String> {
    let text = |value: &Value| value.as_str().unwrap_or("?").to_owned();
    if let Some(error) = python["error"].as_str() {
        return vec![format!("python  {error}")];
    }
    let mut lines = vec![format!("python  {} at {}", text(&python["python"]), text(&python["program"]))];
    let package = &python["flashtune"];
    lines.push(match package {
        Value::Null => "python  the package flashtune is not installed".to_owned(),
        _ if package["error"].is_string() => format!("python  flashtune: {}", text(&package["error"])),
        _ => format!("python  flashtune {} with library {}", text(&package["version"]), text(&package["library"])),
    });
    for (name, version) in python["packages"].as_object().into_iter().flatten() {
        lines.push(format!("python  {name} {}", text(version)));
    }
    lines
}

/// Tries to make a file where the cache is or would be, and leaves nothing.
fn writable(dir: &CacheDir) -> Result<(), String> {
    dir.check_private().map_err(|e| e.to_string())?;
    let base = dir.base();
    if base.is_dir() {
        return dir.check_writable().map_err(|e| e.to_string());
    }
    let existing = base.ancestors().find(|p| p.exists()).unwrap_or(Path::new("."));
    let remedy = "make it writable, or set FLASHTUNE_CACHE to a folder that is";
    if !existing.is_dir() {
        return Err(format!("{} is not a folder; {remedy}", existing.display()));
    }
    match tempfile::NamedTempFile::new_in(existing) {
        Ok(_) => Ok(()),
        Err(e) => Err(format!("{} cannot be written ({e}); {remedy}", existing.display())),
    }
}
