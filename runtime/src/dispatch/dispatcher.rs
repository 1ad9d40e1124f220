//! The dispatcher: lookup order, loading, and the plans already made.

use super::flight::Flights;
use super::plan::{Choice, Plan};
use super::{Demand, Policy, Refusal, Status};
use crate::{Compiler, Device, Error, Module, Result, compile};
use flashtune_cache::{Artifact, ArtifactFiles, DeviceFingerprint, Key, Layers, Match, MatchQuality, Record, Validity};
use flashtune_codegen::{
    Arch, Error as CodegenError, Family, Kernel, Problem, Schedule, Shape, ShapeBucket, TemplateSet,
};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

/// A record whose sizes are further away than this is worth less than the model's choice for the right sizes
/// ([`ShapeBucket::distance`]; both lengths 32 times apart give 15).
const FAR: f64 = 16.0;

const SEALED_REMEDY: &str =
    "tune or build the problem where a compiler is allowed and import the bundle here, or use the policy `default`";

/// What a dispatcher works with.
pub struct DispatcherConfig {
    /// Runs the kernels.
    pub device: Arc<dyn Device>,
    /// What kernels are generated from; stored results of another set are refused.
    pub templates: Arc<TemplateSet>,
    /// What to do on a miss. [`Policy::Tune`] behaves as [`Policy::Default`] here: tuning is the caller's part.
    pub policy: Policy,
    /// Records and artifacts, in lookup order.
    pub layers: Arc<Layers>,
    /// Where kernels that were compiled on a miss are kept; nowhere when absent.
    pub artifacts: Option<ArtifactFiles>,
}

/// Chooses, loads and remembers kernels. Shared by reference between threads.
pub struct Dispatcher {
    config: DispatcherConfig,
    validity: Validity,
    plans: RwLock<HashMap<PlanKey, Arc<Plan>>>,
    modules: RwLock<HashMap<Kernel, Loaded>>,
    planning: Flights<PlanKey>,
    loading: Flights<Kernel>,
    /// Whether it was already said that compiled kernels cannot be kept.
    said_unwritable: AtomicBool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct PlanKey {
    problem: Problem,
    bucket: ShapeBucket,
    demand: Demand,
}

/// A loaded kernel and where its binary came from.
#[derive(Clone)]
struct Loaded {
    module: Arc<dyn Module>,
    binary: String,
}

/// The best choice of every rank, with what speaks against the others.
#[derive(Default)]
struct Search {
    choices: Vec<Choice>,
    refusals: Vec<Refusal>,
}

impl Dispatcher {
    /// A dispatcher with nothing in memory.
    pub fn new(config: DispatcherConfig) -> Self {
        let validity = Validity::new(config.device.fingerprint().arch, &config.templates);
        Self {
            config,
            validity,
            plans: RwLock::default(),
            modules: RwLock::default(),
            planning: Flights::default(),
            loading: Flights::default(),
            said_unwritable: AtomicBool::new(false),
        }
    }

    /// The device.
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.config.device
    }

    /// Records and artifacts.
    pub fn layers(&self) -> &Layers {
        &self.config.layers
    }

    /// What stored results must match.
    pub fn validity(&self) -> &Validity {
        &self.validity
    }

    /// The plan for a problem and sizes. A call of a known class costs one lock and one lookup and allocates nothing;
    /// the first one searches, loads and maybe compiles, once however many threads ask.
    ///
    /// # Errors
    /// Unsupported problems, [`Error::Sealed`], and whatever compiling and loading report.
    pub fn plan(&self, problem: &Problem, shape: &Shape, demand: Demand) -> Result<Arc<Plan>> {
        let key = PlanKey { problem: *problem, bucket: ShapeBucket::of(shape), demand };
        if let Some(plan) = self.known(&key) {
            return Ok(plan);
        }
        problem.validate()?;
        shape.validate()?;
        self.planning.run(&key, || {
            if let Some(plan) = self.known(&key) {
                return Ok(plan);
            }
            let plan = Arc::new(self.make(&key, shape)?);
            say(&plan);
            self.plans.write().unwrap_or_else(PoisonError::into_inner).insert(key, plan.clone());
            Ok(plan)
        })
    }

    /// The plan of a class of calls, if one was made since the last [`Dispatcher::refresh`].
    pub fn planned(&self, problem: &Problem, shape: &Shape, demand: Demand) -> Option<Arc<Plan>> {
        self.known(&PlanKey { problem: *problem, bucket: ShapeBucket::of(shape), demand })
    }

    /// Whether a record of this device and class of sizes exists that may be used: whether there is nothing to tune.
    pub fn is_tuned(&self, problem: &Problem, shape: &Shape) -> bool {
        let bucket = ShapeBucket::of(shape);
        let found = self.config.layers.find(&self.validity, self.fingerprint(), problem, &bucket);
        found.matches.iter().any(|m| m.quality == MatchQuality::Exact && is_measured(&m.record))
    }

    /// Forgets the plans and reads the user's snapshot again, after something new was published there. Loaded kernels
    /// stay.
    pub fn refresh(&self) {
        self.config.layers.refresh();
        self.plans.write().unwrap_or_else(PoisonError::into_inner).clear();
    }

    fn known(&self, key: &PlanKey) -> Option<Arc<Plan>> {
        self.plans.read().unwrap_or_else(PoisonError::into_inner).get(key).cloned()
    }

    fn fingerprint(&self) -> &DeviceFingerprint {
        self.config.device.fingerprint()
    }

    fn arch(&self) -> Arch {
        self.fingerprint().arch
    }

    /// Searches, loads, and falls from choice to choice until one serves.
    fn make(&self, key: &PlanKey, shape: &Shape) -> Result<Plan> {
        let Search { choices, mut refusals } = self.search(key)?;
        let mut tried = 0;
        for choice in choices {
            let last = choice.record.is_none();
            match self.load(&choice) {
                Ok(Loaded { module, binary }) => {
                    return Ok(Plan {
                        module,
                        bucket: key.bucket,
                        shape: *shape,
                        device: self.fingerprint().clone(),
                        policy: self.config.policy,
                        templates: self.config.templates.hash().to_owned(),
                        choice,
                        binary,
                        refusals,
                    });
                }
                // After the model's choice there is nothing left to fall to.
                Err(e) if last => return Err(e),
                Err(e) => {
                    tried += 1;
                    let what = format!("{} of {}", choice.kernel.schedule, choice.layer);
                    tracing::warn!(kernel = %choice.kernel.name(), layer = %choice.layer, error = %e, "a record cannot be used");
                    refusals.push(Refusal::new(what, e.to_string()));
                }
            }
        }
        let mut reason = match tried {
            0 => "no layer has a record of it that may be used".to_owned(),
            n => format!("none of its {n} usable record(s) has a kernel that loads"),
        };
        for Refusal { what, why } in &refusals {
            reason.push_str(&format!("; {what}: {why}"));
        }
        Err(Error::Sealed { problem: format!("{} {}", key.problem, shape), reason, remedy: SEALED_REMEDY })
    }

    /// Every usable choice, best first; the model's choice is the last one unless the policy is sealed.
    fn search(&self, key: &PlanKey) -> Result<Search> {
        let mut search = Search::default();
        let families = self.families(key, &mut search.refusals)?;
        self.search_records(key, &families, &mut search);
        if self.config.policy.may_compile() {
            search.choices.push(self.default_choice(key, &families, &mut search.refusals)?);
        } else if search.choices.is_empty() && key.demand.needs_the_plain_kernel() {
            let why = format!("it would have to be compiled for this call ({:?})", key.demand).to_lowercase();
            search.refusals.push(Refusal::new("forward/naive", why));
        }
        Ok(search)
    }

    /// The families that can serve the call, best first; why the others cannot goes to `refusals`.
    fn families(&self, key: &PlanKey, refusals: &mut Vec<Refusal>) -> Result<Vec<Family>> {
        let arch = self.arch();
        if key.demand == Demand::Weights && matches!(arch, Arch::Cpu(_)) {
            return Err(CodegenError::unsupported(
                "weights",
                "wanted",
                "only forward/naive writes the attention weights, and it runs on CUDA devices",
                "leave the weights out, or use a CUDA device",
            )
            .into());
        }
        let mut families = Family::candidates(&key.problem, arch);
        families.retain(|f| key.demand.is_met_by(*f));
        for family in Family::ALL.into_iter().filter(|f| !families.contains(f)) {
            match family.supports(&key.problem, arch) {
                Err(CodegenError::Unsupported { limit, .. }) => refusals.push(Refusal::new(family.name(), limit)),
                Err(e) => refusals.push(Refusal::new(family.name(), e.to_string())),
                Ok(()) => refusals.push(Refusal::new(family.name(), family.withheld().unwrap_or(key.demand.why_not()))),
            }
        }
        match families.is_empty() {
            true => Err(CodegenError::unsupported(
                "problem",
                key.problem,
                format!("no kernel family computes it on {arch}"),
                "use another device or dtype",
            )
            .into()),
            false => Ok(families),
        }
    }

    fn search_records(&self, key: &PlanKey, families: &[Family], search: &mut Search) {
        let found = self.config.layers.find(&self.validity, self.fingerprint(), &key.problem, &key.bucket);
        for r in found.refusals {
            let what = format!("{} record(s) of {}", r.records, r.layer);
            search.refusals.push(Refusal::new(what, format!("{}; {}", r.difference, r.difference.remedy())));
        }
        // Measured records first, however far: an untuned one only saves a compilation.
        let (measured, untuned): (Vec<_>, Vec<_>) = found.matches.into_iter().partition(|m| is_measured(&m.record));
        for m in measured.into_iter().chain(untuned) {
            let kernel = Kernel { problem: key.problem, schedule: m.record.schedule, arch: self.arch() };
            let what = || format!("{} of {}", kernel.schedule, m.layer);
            if !families.contains(&kernel.schedule.family()) {
                search
                    .refusals
                    .push(Refusal::new(what(), format!("{} cannot serve this call", kernel.schedule.family())));
                continue;
            }
            if let Err(e) = kernel.check() {
                search.refusals.push(Refusal::new(what(), e.to_string()));
                continue;
            }
            // Where a compiler may run, the model's choice for the right sizes beats what was made for very different
            // ones, and what was made for any others without being measured.
            let (bucket, distance) = (m.record.key.bucket, m.record.key.bucket.distance(&key.bucket));
            let limit = if is_measured(&m.record) { FAR } else { 0.0 };
            if self.config.policy.may_compile() && distance > limit {
                let why = format!(
                    "it was made for {bucket}, too far from {} to be preferred to the model's choice",
                    key.bucket
                );
                search.refusals.push(Refusal::new(what(), why));
                continue;
            }
            search.choices.push(choice(kernel, &m));
        }
    }

    /// The model's choice: the default schedule of the best family that fits the device.
    fn default_choice(&self, key: &PlanKey, families: &[Family], refusals: &mut Vec<Refusal>) -> Result<Choice> {
        let arch = self.arch();
        let mut error = None;
        for (i, family) in families.iter().enumerate() {
            let kernel = Schedule::default_for(*family, &key.problem, arch, &key.bucket)
                .map(|schedule| Kernel { problem: key.problem, schedule, arch })
                .and_then(|kernel| kernel.check().map(|()| kernel));
            match kernel {
                Ok(kernel) => {
                    for other in &families[i + 1..] {
                        refusals.push(Refusal::new(other.name(), format!("{family} is faster where it runs")));
                    }
                    return Ok(Choice {
                        kernel,
                        status: Status::Default,
                        because: "nothing tuned fits; this is the model's choice (run `flashtune tune`)".to_owned(),
                        layer: "none".to_owned(),
                        record: None,
                    });
                }
                Err(e) => {
                    refusals.push(Refusal::new(family.name(), e.to_string()));
                    error = Some(e);
                }
            }
        }
        Err(error.expect("families is never empty").into())
    }

    /// The loaded kernel of a choice: from memory, a layer, a file, or compiled now where that is allowed.
    fn load(&self, choice: &Choice) -> Result<Loaded> {
        let kernel = &choice.kernel;
        let known = || self.modules.read().unwrap_or_else(PoisonError::into_inner).get(kernel).cloned();
        if let Some(loaded) = known() {
            return Ok(loaded);
        }
        self.loading.run(kernel, || {
            if let Some(loaded) = known() {
                return Ok(loaded);
            }
            let (artifact, binary) = self.artifact(choice)?;
            let loaded = Loaded { module: self.config.device.load(&artifact)?, binary };
            self.modules.write().unwrap_or_else(PoisonError::into_inner).insert(*kernel, loaded.clone());
            Ok(loaded)
        })
    }

    fn artifact(&self, choice: &Choice) -> Result<(Artifact, String)> {
        let missing = match &choice.record {
            Some(record) => match self.stored(&choice.kernel, &record.artifact) {
                Ok(found) => return Ok(found),
                Err(why) => Some(why),
            },
            None => None,
        };
        if !self.config.policy.may_compile() {
            return Err(Error::Sealed {
                problem: choice.kernel.problem.to_string(),
                reason: missing.unwrap_or_else(|| "its kernel would have to be compiled".to_owned()),
                remedy: SEALED_REMEDY,
            });
        }
        if let Some(why) = missing {
            tracing::info!(kernel = %choice.kernel.name(), why, "the record's kernel is compiled again");
        }
        let compiler = self.config.device.compiler()?;
        let key = compile::recipe(&choice.kernel, &self.config.templates, compiler.id()).key();
        if let Ok(found) = self.stored(&choice.kernel, &key) {
            return Ok(found);
        }
        self.compile(&*compiler, &choice.kernel)
    }

    /// The artifact of a recipe key, if some layer has it and it is what the kernel needs; else why not.
    fn stored(&self, kernel: &Kernel, key: &Key) -> Result<(Artifact, String), String> {
        let (artifact, layer) =
            self.config.layers.artifact(key).ok_or_else(|| format!("no layer has its binary {}", &key.hex()[..12]))?;
        let recipe = &artifact.recipe;
        let found = Validity { arch: recipe.kernel.arch, templates: recipe.templates.clone(), abi: recipe.abi };
        if let Some(difference) = self.validity.difference(&found) {
            return Err(format!("the binary of {layer}: {difference}"));
        }
        if recipe.kernel != *kernel {
            return Err(format!("the binary of {layer}: kernel is {}, not {}", recipe.kernel.name(), kernel.name()));
        }
        if recipe.options != kernel.compile_options() {
            return Err(format!("the binary of {layer}: options are {:?}", recipe.options));
        }
        let from = format!("{layer} ({})", recipe.compiler);
        Ok((artifact, from))
    }

    fn compile(&self, compiler: &dyn Compiler, kernel: &Kernel) -> Result<(Artifact, String)> {
        let artifact = compile::compile_with(compiler, kernel, &self.config.templates)?;
        tracing::info!(kernel = %kernel.name(), ms = artifact.facts.compile_ms, "compiled");
        if artifact.facts.spill_bytes > 0 {
            tracing::warn!(kernel = %kernel.name(), bytes = artifact.facts.spill_bytes, "the kernel spills registers");
        }
        if let Some(files) = &self.config.artifacts
            && let Err(e) = files.put(&artifact)
            && !self.said_unwritable.swap(true, Ordering::Relaxed)
        {
            tracing::warn!(error = %e, "compiled kernels cannot be kept; they are compiled again in every process");
        }
        let from = format!("compiled now by {} in {:.0} ms", compiler.id(), artifact.facts.compile_ms);
        Ok((artifact, from))
    }
}

/// Whether a record rests on measurement; those of `flashtune build` do not.
fn is_measured(record: &Record) -> bool {
    !record.finalists.is_empty()
}

fn choice(kernel: Kernel, m: &Match) -> Choice {
    let key = &m.record.key;
    let (status, because) = if !is_measured(&m.record) {
        (Status::Untuned, format!("compiled ahead of time for {} and never measured", key.bucket))
    } else {
        match m.quality {
            MatchQuality::Exact => (Status::Tuned, format!("measured here on {}", m.record.provenance.shape)),
            MatchQuality::NearestShape { distance } => (
                Status::NearestShape,
                format!("measured here on {}, {distance:.1} doublings away", m.record.provenance.shape),
            ),
            MatchQuality::OtherDevice { .. } => (
                Status::Provisional,
                format!("measured on {} with {}; tune here to be sure", key.device, m.record.provenance.shape),
            ),
        }
    };
    Choice { kernel, status, because, layer: m.layer.clone(), record: Some(m.record.clone()) }
}

/// Says once what a class of calls runs on; louder the less is known about it.
fn say(plan: &Plan) {
    let choice = &plan.choice;
    macro_rules! event {
        ($level:ident) => {
            tracing::$level!(
                problem = %choice.kernel.problem,
                bucket = %plan.bucket,
                schedule = %choice.kernel.schedule,
                layer = %choice.layer,
                binary = %plan.binary,
                "{}: {}", choice.status, choice.because
            )
        };
    }
    match choice.status {
        Status::Tuned => event!(debug),
        Status::NearestShape => event!(info),
        Status::Provisional | Status::Untuned | Status::Default => event!(warn),
    }
}
