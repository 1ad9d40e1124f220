//! The dispatcher: lookup order, loading, and the plans already made.

use super::binaries::Binaries;
use super::flight::Flights;
use super::job::Job;
use super::key::{ByClass, PlanKey};
use super::load::Served;
use super::plan::{Choice, Loaded, Plan};
use super::policy::SEALED_REMEDY;
use super::sealed::Sealed;
use super::tally::{Counters, Tally, Untuned};
use super::{Policy, Refusal, Status};
use crate::sync::{Mutex, OnceLock, RwLock};
use crate::{Device, Error, Result};
use flashtune_cache::{
    ArtifactFiles, DeviceFingerprint, Found, Launches, Layers, Match, MatchQuality, Needed, Record, RecordKey,
};
use flashtune_codegen::{
    Arch, CallSizes, Constraint, Constraints, Error as CodegenError, Family, Kernel, Paths, Problem, Purpose, Schedule,
    Shape, ShapeBucket, TemplateSet,
};
use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

/// A record whose sizes are further away than this is worth less than the default schedule for the right sizes
/// ([`ShapeBucket::distance`]; both lengths 32 times apart give 15).
const FAR: f64 = 16.0;

/// What a dispatcher works with.
pub struct DispatcherConfig {
    /// Runs the kernels.
    pub device: Arc<dyn Device>,
    /// What kernels are generated from; stored results of a family whose templates differ are refused.
    pub templates: Arc<TemplateSet>,
    /// What to do on a miss. [`Policy::Tune`] behaves as [`Policy::Default`] here: tuning is the caller's part.
    pub policy: Policy,
    /// How the host launches: what was measured for this goes first.
    pub launches: Launches,
    /// Records and artifacts, in lookup order.
    pub layers: Arc<Layers>,
    /// Which instruction paths are taken beside those that a card is known to have executed.
    pub paths: Paths,
    /// Where kernels that were compiled on a miss are kept; nowhere when absent.
    pub artifacts: Option<ArtifactFiles>,
}

/// Chooses, loads and remembers kernels. Shared by reference between threads.
pub struct Dispatcher {
    pub(super) config: Config,
    paths: RwLock<Arc<Paths>>,
    pub(super) binaries: Arc<Binaries>,
    pub(super) plans: RwLock<ByClass<Arc<Plan>>>,
    /// What answers once it is there: without a lock.
    pub(super) sealed: OnceLock<Sealed>,
    /// Held by who seals: one that finds nothing to seal opens again what it closed.
    pub(super) sealing: Mutex<()>,
    pub(super) tallies: RwLock<ByClass<Arc<Tally>>>,
    pub(super) modules: RwLock<HashMap<Kernel, Loaded>>,
    pub(super) planning: Flights<PlanKey>,
    pub(super) loading: Flights<Kernel>,
    /// Compilations in the background whose result nobody has taken.
    pub(super) jobs: Mutex<HashMap<Kernel, Arc<Job>>>,
}

/// What stays of a [`DispatcherConfig`].
pub(super) struct Config {
    pub device: Arc<dyn Device>,
    launches: Launches,
    policy: Policy,
    /// The demands that make a difference on the device.
    demands: Constraints,
}

/// The best choice of every rank, with what speaks against the others.
#[derive(Default)]
struct FamilySearch {
    choices: Vec<Choice>,
    refusals: Vec<Refusal>,
    /// What speaks against the families that the default is not of: of interest where it serves.
    against_others: Vec<Refusal>,
    /// Why the families that can serve are not taken without a measurement, where all are so.
    untried: Option<CodegenError>,
}

impl Dispatcher {
    /// A dispatcher with nothing in memory.
    pub fn new(config: DispatcherConfig) -> Self {
        let DispatcherConfig { device, launches, templates, policy, layers, paths, artifacts } = config;
        let demands = Family::demands_of(device.fingerprint().arch);
        let needed = Needed::new(device.fingerprint().arch, &templates);
        Self {
            config: Config { device, launches, policy, demands },
            paths: RwLock::new(Arc::new(paths)),
            binaries: Arc::new(Binaries::new(templates, layers, needed, policy, artifacts)),
            plans: RwLock::default(),
            sealed: OnceLock::new(),
            sealing: Mutex::default(),
            tallies: RwLock::default(),
            modules: RwLock::default(),
            planning: Flights::default(),
            loading: Flights::default(),
            jobs: Mutex::default(),
        }
    }

    /// The device.
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.config.device
    }

    /// Records and artifacts.
    pub fn layers(&self) -> &Layers {
        &self.binaries.layers
    }

    /// What stored results must match.
    pub fn needed(&self) -> &Needed {
        &self.binaries.needed
    }

    /// The plan for a problem and sizes; of a ragged batch those of a usual sequence. A call of a known class costs one
    /// lookup and allocates nothing; once sealed ([`Dispatcher::seal`]) it takes no lock either. The first one
    /// searches, loads and maybe compiles, once however many threads ask.
    ///
    /// # Errors
    /// Unsupported problems, [`Error::Sealed`], and whatever compiling and loading report.
    pub fn plan(&self, problem: &Problem, sizes: impl Into<CallSizes>, demands: Constraints) -> Result<Arc<Plan>> {
        self.plan_in_haste(problem, sizes, demands, || false)
    }

    /// As [`Dispatcher::plan`], but where the kernel would have to be compiled, and while it is, a quick schedule may
    /// stand in for it ([`Status::Quick`]). `may` is asked before that.
    ///
    /// # Errors
    /// As [`Dispatcher::plan`].
    pub fn plan_in_haste(
        &self,
        problem: &Problem,
        sizes: impl Into<CallSizes>,
        demands: Constraints,
        may: impl Fn() -> bool,
    ) -> Result<Arc<Plan>> {
        let sizes = sizes.into();
        let (key, shape) = (self.key(problem, &sizes, demands), &sizes.shape);
        let known =
            |may: &dyn Fn() -> bool| self.known(&key).filter(|plan| plan.is_settled() || plan.is_awaiting() && may());
        if let Some(plan) = known(&may) {
            return Ok(plan);
        }
        problem.validate()?;
        shape.validate()?;
        let made = match self.sealed.get() {
            Some(sealed) => self.sealed_miss(sealed, key, shape),
            None => self.planning.run(&key, || {
                let haste = may();
                if let Some(plan) = known(&|| haste) {
                    return Ok(plan);
                }
                let plan = Arc::new(self.ready(self.make(&key, shape, haste)?));
                self.plans.write().unwrap_or_else(PoisonError::into_inner).insert(key, plan.clone());
                Ok(plan)
            }),
        };
        if let Err(Error::Sealed { .. }) = &made {
            self.binaries.work.refused.fetch_add(1, Ordering::Relaxed);
        }
        made
    }

    /// The numbers so far.
    pub fn counters(&self) -> Counters {
        let mut counters = Counters::of(&self.binaries.work, self.sealed.get().is_some());
        for tally in self.tallies.read().unwrap_or_else(PoisonError::into_inner).values() {
            tally.add_to(&mut counters);
        }
        counters
    }

    /// The classes that were met and that tuning would help, most called first.
    pub fn untuned(&self) -> Vec<Untuned> {
        let tallies = self.tallies.read().unwrap_or_else(PoisonError::into_inner);
        let mut untuned: Vec<Untuned> = tallies.values().filter_map(|t| t.untuned()).collect();
        untuned.sort_by(|a, b| {
            b.calls.cmp(&a.calls).then_with(|| (a.problem, a.shape.q_len).cmp(&(b.problem, b.shape.q_len)))
        });
        untuned
    }

    /// Where the calls of a class are counted.
    pub(super) fn tally(&self, key: &PlanKey, shape: &Shape) -> Arc<Tally> {
        let mut tallies = self.tallies.write().unwrap_or_else(PoisonError::into_inner);
        let tunable = key.problem.is_tuned() && Family::is_tunable(key.demands, self.arch());
        let sizes = CallSizes { shape: *shape, pages: key.bucket.pages };
        tallies.entry(*key).or_insert_with(|| Arc::new(Tally::new(key.problem, sizes, tunable))).clone()
    }

    /// Says and notes what a class of calls runs on from now on.
    pub(super) fn ready(&self, plan: Plan) -> Plan {
        say(&plan);
        plan.tally.planned(plan.choice.status, plan.choice.distance);
        plan
    }

    /// Whether a compiler may run.
    pub(super) fn may_compile(&self) -> bool {
        self.binaries.may_compile()
    }

    /// The plan of a class of calls, if one was made since the last [`Dispatcher::refresh`].
    pub fn planned(&self, problem: &Problem, sizes: impl Into<CallSizes>, demands: Constraints) -> Option<Arc<Plan>> {
        self.known(&self.key(problem, &sizes.into(), demands))
    }

    /// Whether a record of this device and class of sizes exists that may be used: whether there is nothing to tune.
    pub fn is_tuned(&self, problem: &Problem, sizes: impl Into<CallSizes>) -> bool {
        let found = self.find(problem, self.bucket(problem, &sizes.into()));
        found.matches.iter().any(|m| m.quality == MatchQuality::Exact && is_measured(&m.record))
    }

    /// Forgets the plans of one class of calls, and reads the user's snapshot again if another one was published.
    pub fn forget(&self, problem: &Problem, sizes: impl Into<CallSizes>) {
        self.binaries.layers.refresh();
        let bucket = self.bucket(problem, &sizes.into());
        let mut plans = self.plans.write().unwrap_or_else(PoisonError::into_inner);
        plans.retain(|key, _| key.problem != *problem || key.bucket != bucket);
    }

    /// Says anew which instruction paths are taken: after a check or a tuning has raised the level of one. Plans that
    /// are made already stay until [`Dispatcher::refresh`].
    pub fn set_paths(&self, paths: Paths) {
        *self.paths.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(paths);
    }

    /// Which instruction paths are taken.
    pub fn paths(&self) -> Arc<Paths> {
        self.paths.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Forgets the plans and reads the user's snapshot again, after something new was published there. Loaded kernels
    /// stay. Does nothing once sealed.
    pub fn refresh(&self) {
        if self.sealed.get().is_some() {
            return;
        }
        self.binaries.layers.refresh();
        self.plans.write().unwrap_or_else(PoisonError::into_inner).clear();
    }

    fn known(&self, key: &PlanKey) -> Option<Arc<Plan>> {
        if let Some(sealed) = self.sealed.get() {
            return sealed.get(key).cloned();
        }
        self.plans.read().unwrap_or_else(PoisonError::into_inner).get(key).cloned()
    }

    pub(super) fn fingerprint(&self) -> &DeviceFingerprint {
        self.config.device.fingerprint()
    }

    /// The class of a call.
    fn key(&self, problem: &Problem, sizes: &CallSizes, demands: Constraints) -> PlanKey {
        let demands = demands.among(self.config.demands);
        PlanKey { problem: *problem, bucket: self.bucket(problem, sizes), demands }
    }

    /// The class of sizes that tuning results are filed under.
    pub fn bucket(&self, problem: &Problem, sizes: &CallSizes) -> ShapeBucket {
        ShapeBucket::of_call(problem, sizes, self.fingerprint().units)
    }

    /// What the layers have of a problem.
    fn find(&self, problem: &Problem, bucket: ShapeBucket) -> Found {
        let (device, launches) = (self.fingerprint().clone(), self.config.launches);
        self.binaries.layers.find(&self.binaries.needed, &RecordKey { device, problem: *problem, bucket, launches })
    }

    fn arch(&self) -> Arch {
        self.fingerprint().arch
    }

    /// Searches, loads, and falls from choice to choice until one serves.
    fn make(&self, key: &PlanKey, shape: &Shape, haste: bool) -> Result<Plan> {
        let FamilySearch { choices, mut refusals, against_others, untried } = self.search(key)?;
        let of_model = choices.last().filter(|c| c.record.is_none()).map(|c| c.kernel.schedule);
        let mut tried = 0;
        for choice in choices {
            let last = choice.record.is_none();
            match self.load(&choice, haste) {
                Ok(Served { choice, loaded: Loaded { module, artifact, binary }, awaited }) => {
                    match of_model.filter(|s| choice.record.is_some() && *s != choice.kernel.schedule) {
                        Some(schedule) => {
                            let what = format!("{schedule} of {}", schedule.family());
                            refusals
                                .push(Refusal::new(what, "it is the default schedule, and a record goes before it"));
                        }
                        None if choice.record.is_none() => refusals.extend(against_others),
                        None => {}
                    }
                    return Ok(Plan {
                        module,
                        artifact,
                        bucket: key.bucket,
                        shape: *shape,
                        device: Arc::new(self.fingerprint().clone()),
                        policy: self.config.policy,
                        templates: self.binaries.needed.templates(choice.kernel.schedule.family()).into(),
                        paths: self.paths(),
                        choice,
                        binary,
                        refusals,
                        tally: self.tally(key, shape),
                        awaited,
                    });
                }
                // After the default schedule there is nothing left to fall to.
                Err(e) if last => return Err(e),
                Err(e) => {
                    tried += 1;
                    let what = format!("{} of {}", choice.kernel.schedule, choice.layer);
                    tracing::warn!(
                        kernel = %choice.kernel.name(), layer = %choice.layer, error = %e,
                        "a record cannot be used"
                    );
                    refusals.push(Refusal::new(what, e.to_string()));
                }
            }
        }
        if let Some(e) = untried {
            return Err(e.into());
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

    /// Every usable choice, best first; the default schedule is the last one unless the policy is sealed.
    fn search(&self, key: &PlanKey) -> Result<FamilySearch> {
        let mut search = FamilySearch::default();
        let families = self.families(key, &mut search.refusals)?;
        let (families, untried) = self.admitted(key, families);
        self.search_records(key, &families, &untried, &mut search);
        for (family, e) in &untried {
            search.refusals.push(Refusal::new(family.name(), e.to_string()));
        }
        search.untried = untried.first().filter(|_| families.is_empty()).map(|(_, e)| self.untried(e, key));
        if search.untried.is_some() {
            // What was measured on such a card serves, if anything was.
        } else if self.may_compile() {
            search.choices.push(self.default_choice(key, &families, &mut search.against_others)?);
        } else if let (true, [only]) = (search.choices.is_empty(), &families[..])
            && only.purpose() == Purpose::Plain
            && !key.demands.is_empty()
        {
            let why = format!("it would have to be compiled for this call ({})", key.demands);
            search.refusals.push(Refusal::new(only.name(), why));
        }
        Ok(search)
    }

    /// The families that can serve the call, best first; why the others cannot goes to `refusals`.
    fn families(&self, key: &PlanKey, refusals: &mut Vec<Refusal>) -> Result<Vec<Family>> {
        let arch = self.arch();
        // Families of another operation or kind of K and V are no choice that was passed over.
        let of_op = |f: &Family| f.op() == key.problem.op && f.reads(key.problem.kv);
        let writes = |f: &Family| of_op(f) && f.unmet(Constraint::Weights.into()).is_none();
        if key.demands.has(Constraint::Weights) && !Family::ALL.iter().any(|f| writes(f) && f.runs_on(arch)) {
            let families: Vec<_> = Family::ALL.into_iter().filter(writes).map(Family::name).collect();
            let limit = format!("only {} writes the attention weights, and not on {arch}", families.join(", "));
            let remedy = "leave the weights out, or use a CUDA device";
            return Err(CodegenError::unsupported("weights", "wanted", limit, remedy).into());
        }
        let mut families = Family::candidates_for(&key.problem, arch, &key.bucket);
        families.retain(|f| f.unmet(key.demands).is_none());
        for family in Family::ALL.into_iter().filter(|f| of_op(f) && !families.contains(f)) {
            match family.supports(&key.problem, arch) {
                Err(CodegenError::Unsupported { limit, .. }) => refusals.push(Refusal::new(family.name(), limit)),
                Err(e) => refusals.push(Refusal::new(family.name(), e.to_string())),
                Ok(()) => {
                    let why = family.unmet(key.demands).map_or("it can", |(_, why)| why);
                    refusals.push(Refusal::new(family.name(), why));
                }
            }
        }
        match families.is_empty() {
            true => {
                let why: Vec<_> = refusals.iter().map(|r| format!("{} {}", r.what, r.why)).collect();
                let limit = format!("no kernel family computes it on {arch}: {}", why.join("; "));
                Err(CodegenError::unsupported("problem", key.problem, limit, "use another device, dtype or program")
                    .into())
            }
            false => Ok(families),
        }
    }

    /// Of the families that can serve a call those whose instruction paths are taken without a measurement, and the
    /// others, each with what to do about it.
    fn admitted(&self, key: &PlanKey, families: Vec<Family>) -> (Vec<Family>, Vec<(Family, CodegenError)>) {
        let (paths, mut admitted, mut untried) = (self.paths(), Vec::new(), Vec::new());
        for family in families {
            match paths.admit(family, &key.problem, self.arch()) {
                Ok(()) => admitted.push(family),
                Err(e) => untried.push((family, e)),
            }
        }
        (admitted, untried)
    }

    /// Why a call is refused that untried families alone can serve: with what the call asks of the others.
    fn untried(&self, e: &CodegenError, key: &PlanKey) -> CodegenError {
        let CodegenError::Unsupported { field, value, limit, remedy } = e else { return e.clone() };
        let others = Family::candidates_for(&key.problem, self.arch(), &key.bucket).into_iter();
        let unmet = others.filter_map(|f| f.unmet(key.demands).map(|(_, why)| format!("; {f}: {why}")));
        let limit = unmet.fold(limit.clone(), |limit, why| limit + &why);
        CodegenError::unsupported(field, value, limit, remedy.clone())
    }

    /// Records of families that serve; of those that are `untried`, records that were measured, for a card of this arch
    /// has then given the right results by it.
    fn search_records(
        &self,
        key: &PlanKey,
        families: &[Family],
        untried: &[(Family, CodegenError)],
        search: &mut FamilySearch,
    ) {
        let may_compile = self.may_compile();
        let found = self.find(&key.problem, key.bucket);
        for r in found.refusals {
            let what = format!("{} record(s) of {}", r.records, r.layer);
            search.refusals.push(Refusal::new(what, format!("{}; {}", r.difference, r.difference.remedy())));
        }
        // Measured records first, however far: an untuned one only saves a compilation.
        let (measured, untuned): (Vec<_>, Vec<_>) = found.matches.into_iter().partition(|m| is_measured(&m.record));
        for m in measured.into_iter().chain(untuned) {
            let kernel = Kernel { problem: key.problem, schedule: m.record.schedule, arch: self.arch() };
            let what = || format!("{} of {}", kernel.schedule, m.layer);
            let family = kernel.schedule.family();
            let has_run = is_measured(&m.record) && untried.iter().any(|(f, _)| *f == family);
            if !families.contains(&family) && !has_run {
                search.refusals.push(Refusal::new(what(), format!("{family} cannot serve this call")));
                continue;
            }
            if let Err(e) = kernel.check() {
                search.refusals.push(Refusal::new(what(), e.to_string()));
                continue;
            }
            // Another schedule of its family is better for this call; where nothing may be compiled it serves.
            if let Some((_, why)) = kernel.schedule.unfit(key.demands).filter(|_| may_compile) {
                search.refusals.push(Refusal::new(what(), why));
                continue;
            }
            // Where a compiler may run, the default schedule for the right sizes beats what was made for very different
            // ones, and what was made for any others without being measured.
            let (bucket, distance) = (m.record.key.bucket, m.record.key.bucket.distance(&key.bucket));
            let limit = if is_measured(&m.record) { FAR } else { 0.0 };
            if may_compile && distance > limit {
                let why = format!(
                    "it was made for {bucket}, too far from {} to be preferred to the default schedule",
                    key.bucket
                );
                search.refusals.push(Refusal::new(what(), why));
                continue;
            }
            search.choices.push(choice(kernel, &m, distance, self.config.launches));
        }
    }

    /// The default schedule of the best family that fits the device.
    fn default_choice(&self, key: &PlanKey, families: &[Family], refusals: &mut Vec<Refusal>) -> Result<Choice> {
        let arch = self.arch();
        let mut error = None;
        for (i, family) in families.iter().enumerate() {
            let units = self.fingerprint().units;
            let within = |demands| Schedule::default_within(*family, &key.problem, arch, &key.bucket, demands, units);
            let (schedule, usual) = (within(key.demands), within(Constraints::NONE).ok());
            let unfit = usual.and_then(|usual| usual.unfit(key.demands));
            let kernel = schedule
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
                        because: match unfit {
                            Some((demand, _)) => format!(
                                "the default of the family is not for calls with {}; this is its choice for them",
                                demand.name()
                            ),
                            None => {
                                "nothing tuned fits; this is the default schedule (run `flashtune tune`)".to_owned()
                            }
                        }
                        .into(),
                        layer: "none".into(),
                        distance: 0.0,
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
}

/// Whether a record rests on measurement; those of `flashtune build` do not.
fn is_measured(record: &Record) -> bool {
    !record.finalists.is_empty()
}

fn choice(kernel: Kernel, m: &Match, distance: f64, launches: Launches) -> Choice {
    let key = &m.record.key;
    // How it was launched is said wherever it was not as this host does.
    let how = match key.launches {
        same if same == launches => "",
        Launches::Eager => " by launches of their own",
        Launches::Graph => " by replays of a graph",
    };
    let (status, because) = if !is_measured(&m.record) {
        (Status::Untuned, format!("compiled ahead of time for {} and never measured", key.bucket))
    } else {
        match m.quality {
            MatchQuality::Exact => (Status::Tuned, format!("measured here on {}", m.record.sizes())),
            MatchQuality::OtherLaunches => (
                Status::Provisional,
                format!("measured here on {}{how}; tune for {launches} launches to be sure", m.record.sizes()),
            ),
            MatchQuality::NearestShape { distance } => (
                Status::NearestShape,
                format!("measured here on {}{how}, {distance:.1} doublings away", m.record.sizes()),
            ),
            MatchQuality::OtherDevice { .. } => (
                Status::Provisional,
                format!("measured on {} with {}{how}; tune here to be sure", key.device, m.record.sizes()),
            ),
        }
    };
    Choice {
        kernel,
        status,
        because: because.into(),
        layer: m.layer.as_str().into(),
        distance,
        record: Some(m.record.clone()),
    }
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
        Status::NearestShape | Status::Quick => event!(info),
        Status::Provisional | Status::Untuned | Status::Default => event!(warn),
    }
}
