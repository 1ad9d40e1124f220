//! How an engine is made: every setting, what the environment says of those that a host leaves out, and opening.

use crate::engine::Engine;
use crate::{Result, read_templates};
use flashtune_cache::{ArtifactFiles, CacheDir, Launches, Layers, Levels, Needed, Trust, bundles_from_env};
use flashtune_codegen::{InstructionPath, Paths, SCRATCH_LIMIT, TemplateSet};
use flashtune_runtime::dispatch::{Dispatcher, DispatcherConfig, Policy};
use flashtune_runtime::{CpuDevice, Device, DeviceSpec, Threads, no_graphs};
use flashtune_tuner::WorkerCommand;
use std::path::PathBuf;
use std::sync::Arc;

/// How an [`Engine`] is made.
#[derive(Default)]
pub struct Builder {
    spec: DeviceSpec,
    device: Option<Arc<dyn Device>>,
    policy: Policy,
    launches: Option<Launches>,
    cache_dir: Option<PathBuf>,
    bundles: Vec<PathBuf>,
    embedded: Option<&'static [u8]>,
    trust: Option<Trust>,
    templates: Option<PathBuf>,
    candidates: Candidates,
    default_meanwhile: bool,
    quick_first: Option<bool>,
    scratch_limit: Option<u64>,
    allowed: Vec<InstructionPath>,
    threads: Threads,
}

/// Where candidates run when the engine tunes.
#[derive(Default)]
pub(crate) enum Candidates {
    /// In the worker that the environment names, else in this process with a warning.
    #[default]
    Unsaid,
    InWorker(WorkerCommand),
    InThisProcess,
}

impl Builder {
    /// Which device to open; a GPU if there is one, else the CPU, when not said.
    pub fn device(mut self, spec: DeviceSpec) -> Self {
        self.spec = spec;
        self
    }

    /// Uses a device that is already open.
    pub fn on(mut self, device: Arc<dyn Device>) -> Self {
        self.device = Some(device);
        self
    }

    /// Which threads run kernels where the engine opens the CPU; [`Threads::Own`] when not said. Another device takes
    /// no note of it.
    pub fn threads(mut self, threads: Threads) -> Self {
        self.threads = threads;
        self
    }

    /// What to do when nothing tuned fits; [`Policy::Default`] when not said.
    pub fn policy(mut self, policy: Policy) -> Self {
        self.policy = policy;
        self
    }

    /// How the host launches; what `FLASHTUNE_LAUNCHES` says when not said, else eagerly. What was measured so goes
    /// before what was measured otherwise, and is what the engine tunes for.
    pub fn launches(mut self, launches: Launches) -> Self {
        self.launches = Some(launches);
        self
    }

    /// The folder of records and compiled kernels; `FLASHTUNE_CACHE` or the user's cache folder when not said.
    pub fn cache_dir(mut self, folder: impl Into<PathBuf>) -> Self {
        self.cache_dir = Some(folder.into());
        self
    }

    /// A bundle file to search after the user's own results; may be called again. Those of `FLASHTUNE_BUNDLES` follow.
    /// It must be signed by a trusted key, see [`Builder::trust`].
    pub fn bundle(mut self, file: impl Into<PathBuf>) -> Self {
        self.bundles.push(file.into());
        self
    }

    /// A bundle inside the host's binary (`include_bytes!`), searched last.
    pub fn embedded(mut self, bundle: &'static [u8]) -> Self {
        self.embedded = Some(bundle);
        self
    }

    /// Whose bundles are used; what `FLASHTUNE_TRUSTED_KEYS` and `FLASHTUNE_ALLOW_UNSIGNED` say when not said.
    pub fn trust(mut self, trust: Trust) -> Self {
        self.trust = Some(trust);
        self
    }

    /// A folder whose templates replace the built-in ones; `FLASHTUNE_TEMPLATES` when not said.
    pub fn templates(mut self, folder: impl Into<PathBuf>) -> Self {
        self.templates = Some(folder.into());
        self
    }

    /// Candidates run in processes of this program when the engine tunes, so that none of them can end the host:
    /// [`WorkerCommand::flashtune`] with the path of the `flashtune` command, or the host itself if its `main` may call
    /// [`flashtune_tuner::serve`]. That of `FLASHTUNE_WORKER` when not said.
    pub fn worker(mut self, command: WorkerCommand) -> Self {
        self.candidates = Candidates::InWorker(command);
        self
    }

    /// Candidates run in the host's process when the engine tunes: one that faults ends the host, one that never ends
    /// hangs it. Without a worker this happens too, but not without a warning.
    pub fn tune_in_this_process(mut self) -> Self {
        self.candidates = Candidates::InThisProcess;
        self
    }

    /// Under the policy `tune`, a call that needs what another process is tuning takes the next best choice instead of
    /// waiting for it (ten minutes at most). Once the other is done, within a second, its result is used.
    pub fn default_meanwhile(mut self) -> Self {
        self.default_meanwhile = true;
        self
    }

    /// Whether calls of a kernel that must be compiled first are answered by a schedule that compiles in a quarter of
    /// the time ([`Status::Quick`](flashtune_runtime::Status)), with the same bits, while their own is compiled on a
    /// thread of the engine; then that one takes over. What `FLASHTUNE_QUICK_FIRST` says (`1` or `0`) when not said,
    /// else yes. Never in a capture, nor for [`Engine::prepare`], [`Engine::plan`] and [`Engine::preload`], which wait
    /// for the kernel itself. A process that ends meanwhile waits for the compiler.
    pub fn quick_first(mut self, yes: bool) -> Self {
        self.quick_first = Some(yes);
        self
    }

    /// Most bytes of scratch memory that a backward pass takes on a GPU beside the gradients; 1 GiB when not said. A
    /// pass that would take more runs in waves of KV heads, one head of one sequence at a time at least, with the same
    /// bytes as results.
    pub fn scratch_limit(mut self, bytes: u64) -> Self {
        self.scratch_limit = Some(bytes);
        self
    }

    /// Takes kernels of an instruction path that no card is known to have executed (its level is `emulated` or
    /// `compiled`, as [`Engine::explain`] says), for calls and for tuning; may be called again. Those of
    /// `FLASHTUNE_ALLOW_PATHS` are allowed beside. A `flashtune check` or a tuning that passes on the card makes this
    /// unnecessary there.
    pub fn allow_path(mut self, path: InstructionPath) -> Self {
        self.allowed.push(path);
        self
    }

    /// Opens device and layers. Compiles no kernel and writes nothing; where nothing is stored, a GPU's compiler is
    /// loaded beside.
    ///
    /// # Errors
    /// An unknown path in `FLASHTUNE_ALLOW_PATHS`, a device that is not there, a bundle that cannot be read or that
    /// nobody trusted signed, templates that do not parse, graphs on a device that has none.
    pub fn build(self) -> Result<Engine> {
        let quick_first = match self.quick_first {
            Some(yes) => yes,
            None => quick_first_from_env()?,
        };
        let mut allowed = self.allowed;
        allowed.extend(allowed_paths_from_env()?);
        let templates = match self.templates.or_else(templates_from_env) {
            Some(folder) => read_templates(&folder)?,
            None => TemplateSet::embedded(),
        };
        let templates = Arc::new(templates);
        let cache = match CacheDir::resolve(self.cache_dir.as_deref()) {
            Ok(dir) => Some(dir),
            // A process without a home still computes; it keeps nothing.
            Err(flashtune_cache::Error::NoFolder) => {
                tracing::warn!("{}; nothing will be kept", flashtune_cache::Error::NoFolder);
                None
            }
            Err(e) => return Err(e.into()),
        };
        let mut bundles = self.bundles;
        bundles.extend(bundles_from_env());
        let trust = match self.trust {
            Some(trust) => trust,
            None => Trust::from_env()?,
        };
        let layers = Arc::new(Layers::open_with(cache.as_ref(), &bundles, self.embedded, &trust)?);
        let (named, cache) = (cache, layers.own().cloned());
        let unused_cache = named.filter(|_| cache.is_none());
        let device = match self.device {
            Some(device) => device,
            None => {
                // With nothing stored the first call compiles for certain.
                let compiles = self.policy.may_compile() && is_empty(&layers);
                let open = if compiles { flashtune_runtime::open_to_compile } else { flashtune_runtime::open };
                match (open(self.spec)?, self.threads) {
                    (device, Threads::Own) => device,
                    (device, threads) if device.spec() == Some(DeviceSpec::Cpu) => CpuDevice::open_with(threads)?,
                    (device, _) => device,
                }
            }
        };
        let launches = match self.launches {
            Some(launches) => launches,
            None => launches_from_env()?,
        };
        if launches == Launches::Graph && !device.has_graphs() {
            return Err(no_graphs().into());
        }
        let needed = Needed::new(device.fingerprint().arch, &templates);
        let paths = Paths::allowing(allowed.iter().copied());
        let paths = match &cache {
            Some(dir) => Levels::new(dir).apply(paths, &needed),
            None => paths,
        };
        let dispatcher = Dispatcher::new(DispatcherConfig {
            device,
            launches,
            templates: templates.clone(),
            policy: self.policy,
            layers,
            paths,
            artifacts: cache.as_ref().map(ArtifactFiles::new),
        });
        Ok(Engine {
            dispatcher,
            templates,
            cache,
            unused_cache,
            allowed,
            policy: self.policy,
            launches,
            candidates: self.candidates,
            wait_for_tuners: !self.default_meanwhile,
            quick_first,
            scratch_limit: self.scratch_limit.unwrap_or(SCRATCH_LIMIT),
            awaited: Default::default(),
            tuning: Default::default(),
            call_log: crate::call_log::CallLog::from_env(),
            untuned_file: std::env::var_os(crate::UNTUNED_VARIABLE).filter(|v| !v.is_empty()).map(PathBuf::from),
        })
    }
}

fn is_empty(layers: &Layers) -> bool {
    layers.records().is_empty() && !layers.own().is_some_and(|dir| dir.has_kernels())
}

fn launches_from_env() -> Result<Launches> {
    match std::env::var(crate::LAUNCHES_VARIABLE) {
        Ok(text) if !text.is_empty() => Ok(text.parse()?),
        _ => Ok(Launches::Eager),
    }
}

fn templates_from_env() -> Option<PathBuf> {
    std::env::var_os(crate::TEMPLATES_VARIABLE).filter(|v| !v.is_empty()).map(PathBuf::from)
}

/// The instruction paths that `FLASHTUNE_ALLOW_PATHS` names.
///
/// # Errors
/// A name that no family has.
pub fn allowed_paths_from_env() -> Result<Vec<InstructionPath>> {
    let text = std::env::var(crate::ALLOW_PATHS_VARIABLE).unwrap_or_default();
    let names = text.split(',').map(str::trim).filter(|name| !name.is_empty());
    Ok(names.map(str::parse).collect::<std::result::Result<_, _>>()?)
}

fn quick_first_from_env() -> Result<bool> {
    match std::env::var(crate::QUICK_FIRST_VARIABLE).as_deref() {
        Err(_) | Ok("" | "1") => Ok(true),
        Ok("0") => Ok(false),
        Ok(other) => Err(flashtune_codegen::Error::parse(crate::QUICK_FIRST_VARIABLE, other, "1 or 0").into()),
    }
}
