//! What every command has: the global options, the output, and device, templates and engine when they are asked for.

use super::Global;
use super::exit::usage;
use anyhow::{Context as _, Result};
use flashtune::{Builder, Engine, InstructionPath, allowed_paths_from_env, read_templates};
use flashtune_cache::{CacheDir, Launches, Layers, Levels, Needed, Trust, bundles_from_env};
use flashtune_codegen::{Arch, Paths, TemplateSet};
use flashtune_runtime::Device;
use flashtune_tuner::{Runner, WorkerCommand};
use serde::Serialize;
use std::collections::BTreeSet;
use std::io::{BufWriter, Write};
use std::path::PathBuf;
use std::sync::Arc;

/// The version of what `--json` prints. Fields are added without a new one; one that goes or means something else has
/// one.
const SCHEMA: u32 = 1;

/// The state of one command.
pub(crate) struct Context {
    global: Global,
    given: BTreeSet<String>,
    /// Where results go. Errors are passed on, so that a closed pipe ends the command quietly.
    pub out: BufWriter<std::io::Stdout>,
    device: Option<Arc<dyn Device>>,
    templates: Option<Arc<TemplateSet>>,
}

impl Context {
    /// `given`: the identifiers of what the command line names.
    pub(crate) fn new(global: Global, given: BTreeSet<String>) -> Self {
        Self { global, given, out: BufWriter::new(std::io::stdout()), device: None, templates: None }
    }

    /// The options that every command has.
    pub(crate) fn global(&self) -> &Global {
        &self.global
    }

    /// Whether the command line itself names an option, by its identifier; a variable or a default does not count.
    pub(crate) fn is_given(&self, option: &str) -> bool {
        self.given.contains(option)
    }

    /// Writes what is still buffered.
    pub(crate) fn finish(&mut self) -> Result<()> {
        self.out.flush().context("cannot write to standard output")
    }

    /// Whether the output is for a script.
    pub(crate) fn json(&self) -> bool {
        self.global.json
    }

    /// The folder of results as options of a command that goes on with it.
    pub(crate) fn cache_option(&self) -> String {
        let quoted = |cache: &PathBuf| format!(" --cache {}", super::command_line::quoted(&cache.to_string_lossy()));
        self.global.cache.as_ref().map_or(String::new(), quoted)
    }

    /// Whether no progress is shown: the output is for a script, or the user wants none.
    pub(crate) fn hides_progress(&self) -> bool {
        self.global.json || self.global.quiet
    }

    /// The device that the command line names, opened once.
    pub(crate) fn device(&mut self) -> Result<Arc<dyn Device>> {
        if let Some(device) = &self.device {
            return Ok(device.clone());
        }
        let device = flashtune_runtime::open(self.global.device)?;
        Ok(self.device.insert(device).clone())
    }

    /// Where `tune` runs candidates: in processes of this same program, unless the user wants them in this one.
    pub(crate) fn runner(&mut self, in_process: bool) -> Result<Runner> {
        if in_process {
            return Ok(Runner::in_this_process(self.device()?));
        }
        Ok(Runner::worker(own_worker()?, self.global.device).map_err(flashtune::Error::from)?)
    }

    /// The templates in force, read once.
    pub(crate) fn templates(&mut self) -> Result<Arc<TemplateSet>> {
        if let Some(templates) = &self.templates {
            return Ok(templates.clone());
        }
        let set = match self.templates_folder() {
            Some(folder) => read_templates(folder)?,
            None => TemplateSet::embedded(),
        };
        Ok(self.templates.insert(Arc::new(set)).clone())
    }

    /// The folder of template overrides.
    pub(crate) fn templates_folder(&self) -> Option<&PathBuf> {
        self.global.templates.as_ref().filter(|t| !t.as_os_str().is_empty())
    }

    /// The cache folder. It need not exist.
    pub(crate) fn cache_dir(&self) -> Result<CacheDir> {
        Ok(CacheDir::resolve(self.global.cache.as_deref())?)
    }

    /// The instruction paths that the command line and the environment allow.
    pub(crate) fn allowed(&self) -> Result<Vec<InstructionPath>> {
        Ok(self.global.allow_path.iter().copied().chain(allowed_paths_from_env()?).collect())
    }

    /// Which instruction paths are taken on an arch: those and what cards of it have raised in the cache folder.
    pub(crate) fn paths(&mut self, arch: Arch) -> Result<Paths> {
        let (allowed, templates) = (Paths::allowing(self.allowed()?), self.templates()?);
        let needed = Needed::new(arch, &templates);
        Ok(self.cache_dir().map_or(allowed.clone(), |dir| Levels::new(&dir).apply(allowed, &needed)))
    }

    /// The bundles of the command line and of the environment.
    pub(crate) fn bundles(&self) -> Vec<PathBuf> {
        self.global.bundle.iter().cloned().chain(bundles_from_env()).collect()
    }

    /// Whose bundles are used, by the command line and the environment.
    pub(crate) fn trust(&self) -> Result<Trust> {
        let mut trust = Trust::from_env()?.allow_unsigned(self.global.allow_unsigned);
        for key in &self.global.trust {
            trust.add(key)?;
        }
        Ok(trust)
    }

    /// All stored results. Whoever names bundles needs no cache folder.
    pub(crate) fn layers(&self) -> Result<Layers> {
        let bundles = self.bundles();
        match CacheDir::resolve(self.global.cache.as_deref()) {
            Ok(dir) => Ok(Layers::open_with(Some(&dir), &bundles, None, &self.trust()?)?),
            Err(flashtune_cache::Error::NoFolder) if !bundles.is_empty() => {
                Ok(Layers::open_with(None, &bundles, None, &self.trust()?)?)
            }
            Err(e) => Err(e.into()),
        }
    }

    /// What stored results must match on the device.
    pub(crate) fn needed(&mut self) -> Result<Needed> {
        Ok(Needed::new(self.device()?.fingerprint().arch, &*self.templates()?))
    }

    /// An engine with the options of the command line.
    pub(crate) fn engine(&mut self) -> Result<Engine> {
        self.engine_for(None)
    }

    /// The same, for calls that are launched so; as the environment says when not said.
    pub(crate) fn engine_for(&mut self, launches: Option<Launches>) -> Result<Engine> {
        self.engine_with(|builder| match launches {
            Some(launches) => builder.launches(launches),
            None => builder,
        })
    }

    /// The same, with options of the caller's.
    pub(crate) fn engine_with(&mut self, options: impl FnOnce(Builder) -> Builder) -> Result<Engine> {
        let mut builder = Engine::builder()
            .on(self.device()?)
            .policy(self.global.policy)
            .trust(self.trust()?)
            .worker(own_worker()?)
            // What a command prints and measures is the kernel itself.
            .quick_first(false);
        if let Some(cache) = &self.global.cache {
            builder = builder.cache_dir(cache);
        }
        if let Some(templates) = self.templates_folder() {
            builder = builder.templates(templates);
        }
        for bundle in &self.global.bundle {
            builder = builder.bundle(bundle);
        }
        for path in &self.global.allow_path {
            builder = builder.allow_path(*path);
        }
        Ok(options(builder).build()?)
    }

    /// Prints a value as one JSON document. An object says first which version of the output it is, and so does each
    /// object of a list.
    pub(crate) fn print_json(&mut self, value: &impl Serialize) -> Result<()> {
        writeln!(self.out, "{}", with_schema(&serde_json::to_string_pretty(value)?))?;
        Ok(())
    }
}

/// Texts of JSON have no line breaks in them: a line that is a brace alone, and not further in, opens an object of the
/// document.
fn with_schema(text: &str) -> String {
    let (opening, indent) = if text.starts_with('[') { ("  {", "    ") } else { ("{", "  ") };
    let line = |line: &str| match line == opening {
        true => format!("{line}\n{indent}\"schema\": {SCHEMA},"),
        false => line.to_owned(),
    };
    text.lines().map(line).collect::<Vec<_>>().join("\n")
}

/// This program as its own worker.
pub(crate) fn own_worker() -> Result<WorkerCommand> {
    Ok(WorkerCommand::flashtune(std::env::current_exe().context("this program's own path cannot be read")?))
}

/// Seconds since the Unix epoch.
pub(crate) fn unix_time() -> u64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

/// When what is being built says that it was made: `SOURCE_DATE_EPOCH` where it is set, so that the same build gives
/// the same bytes.
pub(crate) fn made_at() -> Result<u64> {
    match std::env::var("SOURCE_DATE_EPOCH") {
        Ok(text) if !text.is_empty() => text
            .parse()
            .map_err(|_| usage(format!("SOURCE_DATE_EPOCH = `{text}` is not a number of seconds since 1970"))),
        _ => Ok(unix_time()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    #[test]
    fn documents_and_objects_of_lists_have_a_schema() {
        let told = |value: Value| -> Value {
            serde_json::from_str(&with_schema(&serde_json::to_string_pretty(&value).unwrap())).unwrap()
        };
        let object = told(json!({ "a": { "b": [{ "c": "x\n  {\n" }] } }));
        assert_eq!(object, json!({ "schema": SCHEMA, "a": { "b": [{ "c": "x\n  {\n" }] } }));
        let list = told(json!([{ "a": {}, "b": [{ "c": 1 }] }, { "a": [] }]));
        assert_eq!(list, json!([{ "schema": SCHEMA, "a": {}, "b": [{ "c": 1 }] }, { "schema": SCHEMA, "a": [] }]));
        assert_eq!([told(json!([])), told(json!(["x"])), told(json!(3))], [json!([]), json!(["x"]), json!(3)]);
    }
}
