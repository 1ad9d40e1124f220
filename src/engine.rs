//! What a host holds: a device, the layers of stored results, and a policy.

use crate::awaited::Awaited;
use crate::builder::{Builder, Candidates};
use crate::call_log::CallLog;
use crate::padding::{self, Padding};
use crate::{Error, Result};
use flashtune_cache::{CacheDir, Launches, Layers, Levels, RecordKey};
use flashtune_codegen::score::ProgramRef;
use flashtune_codegen::{
    CallSizes, Constraint, Constraints, Dropout, Family, InstructionPath, Mask, Paths, Precision, Problem, Shape,
    ShapeBucket, TemplateSet, has_loose_biases, is_addressable,
};
use flashtune_runtime::dispatch::{Dispatcher, Explanation, Plan, Policy};
use flashtune_runtime::{
    BlockMask, Descales, Device, Error as RuntimeError, ForwardCall, ForwardTensors, MaskSizes, SideInputs, SideTable,
    Stream, TensorView, forward_call,
};
use flashtune_tuner::{Event, Job, Observer, Outcome, Runner, WorkerCommand};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// How long a call under the policy `tune` waits for another process that is tuning the same.
const PATIENCE: Duration = Duration::from_secs(600);

/// One forward pass over device memory: O = softmax(scale * Q K^T + mask) V, or what a score program makes of the
/// scores.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Forward<'a> {
    /// Q, `[batch, heads, q_len, head_dim_qk]`.
    pub q: TensorView,
    /// K, `[batch, kv_heads, kv_len, head_dim_qk]`; `heads` is a multiple of `kv_heads`.
    pub k: TensorView,
    /// V, `[batch, kv_heads, kv_len, head_dim_v]`.
    pub v: TensorView,
    /// O, `[batch, heads, q_len, head_dim_v]`, of Q's dtype, or beside `e4m3` of any; written.
    pub o: TensorView,
    /// Address of the log-sum-exp (natural log), fp32, contiguous `[batch, heads, q_len]`; written when given.
    pub lse: Option<u64>,
    /// What O loses when it is rounded to 16 bits, bf16 of O's shape, for a backward pass over rows that attend
    /// mostly to one key ([`crate::Backward::residual`]); written when given. Of f16 and bf16.
    pub residual: Option<TensorView>,
    /// Which scores are dropped behind the softmax; none by default. Gradients take the same
    /// ([`crate::Backward::dropout`]).
    pub dropout: Dropout,
    /// Address of the attention weights, fp32, contiguous `[batch, heads, q_len, kv_len]`; written when given. On
    /// CUDA by the plain kernel alone: for inspection, not for speed.
    pub weights: Option<u64>,
    /// Which keys a query attends to.
    pub mask: Mask,
    /// Factor of the scores; `1 / sqrt(head_dim_qk)` when absent.
    pub scale: Option<f32>,
    /// How products of f32 are computed; as [`Problem::in_default_precision`] has it when absent, exactly where weights
    /// are asked for. Others than [`Precision::Exact`] are refused for other dtypes, on the CPU and on GPUs before
    /// sm_80. A pass whose gradients will be asked for names [`Precision::Exact`], as they are computed.
    pub precision: Option<Precision>,
    /// What elements of `e4m3` operands are multiplied by; 1 where absent. For other dtypes there are none.
    pub descales: Descales,
    /// Address of what O is multiplied by before it is rounded to `e4m3`, one fp32 on the device; 1 where absent. For
    /// an O of another dtype there is none.
    pub o_scale: Option<u64>,
    /// What else masks and changes the scores; its mask holds beside `mask`.
    pub program: Option<ProgramRef>,
    /// What the program reads.
    pub side: SideInputs<'a>,
    /// The program's mask, prepared: what kernels have found of it before. The program then has the same mask or none,
    /// or is absent, and what the mask reads need not be brought again.
    pub block_mask: Option<&'a BlockMask>,
}

impl<'a> Forward<'a> {
    /// A call without mask and program, with the default scale, and without LSE and weights.
    pub fn new(q: TensorView, k: TensorView, v: TensorView, o: TensorView) -> Self {
        let (mask, side) = (Mask::Full, SideInputs::default());
        let (lse, residual, weights, scale, precision, o_scale, program, block_mask) =
            (None, None, None, None, None, None, None, None);
        let (descales, dropout) = (Descales::default(), Dropout::default());
        Self {
            q,
            k,
            v,
            o,
            lse,
            residual,
            dropout,
            weights,
            mask,
            scale,
            precision,
            descales,
            o_scale,
            program,
            side,
            block_mask,
        }
    }

    /// The same call with a score program and what it reads.
    pub fn with_program(self, program: ProgramRef, side: SideInputs<'a>) -> Self {
        Self { program: Some(program), side, ..self }
    }

    /// The same call with a mask that was prepared before.
    pub fn with_block_mask(self, block_mask: &'a BlockMask) -> Self {
        Self { block_mask: Some(block_mask), ..self }
    }

    /// The score program that these scalars run on, with the mask of the block mask.
    fn whole_program(&self) -> Result<Option<ProgramRef>> {
        let of_mask = self.block_mask.map_or(SideInputs::default(), BlockMask::side);
        let program = self.program.map(|p| p.admitting(|name| of_mask.scalar(name).or_else(|| self.side.scalar(name))));
        match self.block_mask {
            None => Ok(program),
            Some(block_mask) => Ok(Some(block_mask.program_of(program)?)),
        }
    }
}

/// The kernel that one call runs on, and the call's sizes.
#[derive(Debug, Clone)]
pub struct Dispatch {
    /// The kernel, with the account of how it was chosen.
    pub plan: Arc<Plan>,
    /// The sizes of the call; the plan may have been made for others of its class.
    pub shape: Shape,
    /// What the call copies beside its kernel, which then computes over padded rows.
    pub padding: Option<Padding>,
}

impl Dispatch {
    /// Which kernel runs these sizes, from which layer, and why no other does.
    pub fn explain(&self) -> Explanation {
        let mut explanation = Explanation { shape: self.shape.to_string(), ..self.plan.explain() };
        explanation.notes.extend(self.padding.map(|padding| padding.to_string()));
        explanation
    }

    pub(crate) fn new(plan: Arc<Plan>, shape: Shape) -> Self {
        Self { plan, shape, padding: None }
    }

    /// The same of a call over rows that were padded for it.
    pub(crate) fn padded(self, padding: Padding) -> Self {
        Self { padding: Some(padding), ..self }
    }
}

/// Attention on one device. `Send + Sync`: one engine serves all threads of a host.
pub struct Engine {
    pub(crate) dispatcher: Dispatcher,
    pub(crate) templates: Arc<TemplateSet>,
    pub(crate) cache: Option<CacheDir>,
    /// The folder that was named and cannot be used.
    pub(crate) unused_cache: Option<CacheDir>,
    /// Instruction paths that are allowed by name.
    pub(crate) allowed: Vec<InstructionPath>,
    pub(crate) policy: Policy,
    pub(crate) launches: Launches,
    pub(crate) candidates: Candidates,
    /// Whether a call waits for another process that tunes what it needs.
    pub(crate) wait_for_tuners: bool,
    /// Whether a quick schedule answers calls while their own is being compiled.
    pub(crate) quick_first: bool,
    /// Most bytes of scratch memory of a backward pass.
    pub(crate) scratch_limit: u64,
    /// What other processes are tuning, as far as a call met it.
    pub(crate) awaited: Awaited,
    /// One tuning at a time: two at once would disturb each other's measurements.
    pub(crate) tuning: Mutex<()>,
    /// Where distinct calls are noted, if anywhere.
    pub(crate) call_log: Option<CallLog>,
    /// Where the classes that were met untuned go when the engine is dropped.
    pub(crate) untuned_file: Option<PathBuf>,
}

impl Drop for Engine {
    fn drop(&mut self) {
        let Some(file) = &self.untuned_file else { return };
        if let Err(e) = self.write_untuned(file) {
            tracing::warn!("the untuned shapes are not kept: {e}");
        }
    }
}

impl Engine {
    /// Settings for a new engine.
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// The device.
    pub fn device(&self) -> &Arc<dyn Device> {
        self.dispatcher.device()
    }

    /// The templates that kernels are generated from.
    pub fn templates(&self) -> &TemplateSet {
        &self.templates
    }

    /// Records and artifacts, in lookup order.
    pub fn layers(&self) -> &Layers {
        self.dispatcher.layers()
    }

    /// Which instruction paths are taken beside those that a card is known to have executed.
    pub fn paths(&self) -> Arc<Paths> {
        self.dispatcher.paths()
    }

    /// The policy.
    pub fn policy(&self) -> Policy {
        self.policy
    }

    /// How the host launches.
    pub fn launches(&self) -> Launches {
        self.launches
    }

    /// The folder of records and compiled kernels, if one can be named.
    pub fn cache_dir(&self) -> Option<&CacheDir> {
        self.cache.as_ref()
    }

    /// Computes on the caller's stream and returns at once (on the CPU when done). A warm call allocates nothing (but
    /// for masks of which something is found first: memory for that, in the stream's order); the first of its class
    /// searches the layers and may compile or tune, by policy. Gives back what runs; does nothing, and gives nothing
    /// back, when O has no element.
    ///
    /// # Safety
    /// Every address in `call` must be valid on the engine's device for the extent that its shape and strides describe,
    /// and stay so until the work is done; O, LSE and weights must not overlap anything else in the call. `stream` must
    /// be a stream of the device's context. The elements of what a block mask reads must be those that they were when
    /// it was first used, and graphs that were captured with it are not replayed once it is dropped.
    ///
    /// # Errors
    /// Tensors that do not fit each other, or what the score program reads and is not given, a block mask of something
    /// else, problems that no kernel computes, [`flashtune_runtime::Error::Sealed`], and what compilers and drivers
    /// report. Nothing has been launched then.
    pub unsafe fn forward(&self, call: &Forward<'_>, stream: Stream) -> Result<Option<Dispatch>> {
        // SAFETY: the caller's promise is this function's own.
        unsafe { self.forward_resolved(call, self.resolve(call)?, stream) }
    }

    /// [`Engine::forward`] for a call that was resolved.
    ///
    /// # Safety
    /// As [`Engine::forward`], at the addresses of `resolved`.
    pub(crate) unsafe fn forward_resolved(
        &self,
        call: &Forward<'_>,
        resolved: ForwardCall,
        stream: Stream,
    ) -> Result<Option<Dispatch>> {
        if let Some(log) = &self.call_log {
            self.log_forward(log, call, &resolved);
        }
        if call.weights.is_none() && !resolved.shape.is_empty() && self.pads(&resolved.problem, resolved.aligned) {
            let make = |base| padding::forward(&resolved, base);
            // SAFETY: the caller's promise is this function's own; what is launched is the same call over copies.
            return unsafe {
                self.with_padding(&resolved.problem, stream, make, |padded| self.launch_any(call, padded, stream))
            };
        }
        // SAFETY: the caller's promise is this function's own.
        unsafe { self.launch_any(call, resolved, stream) }
    }

    /// [`Engine::forward_resolved`] on rows that the kernel takes where they lie.
    ///
    /// # Safety
    /// As [`Engine::forward_resolved`].
    unsafe fn launch_any(&self, call: &Forward<'_>, resolved: ForwardCall, stream: Stream) -> Result<Option<Dispatch>> {
        match resolved.problem.program {
            // SAFETY: the caller's promise is this function's own.
            None => unsafe { self.launch(call, resolved, None, stream) },
            // SAFETY: as above.
            Some(_) => unsafe { self.launch_program(call, resolved, stream) },
        }
    }

    /// # Safety
    /// As [`Engine::forward`], and `side` in the arguments is 0 or the address of what the score program reads.
    unsafe fn launch(
        &self,
        call: &Forward<'_>,
        mut resolved: ForwardCall,
        side: Option<&SideTable>,
        stream: Stream,
    ) -> Result<Option<Dispatch>> {
        let haste = || self.quick_first && !self.device().is_capturing(stream);
        let Some(dispatch) = self.dispatch(call, &mut resolved, side, haste)? else { return Ok(None) };
        let Dispatch { plan, shape, .. } = &dispatch;
        plan.count_call();
        tracing::debug!(
            problem = %plan.kernel().problem, %shape, schedule = %plan.kernel().schedule, status = %plan.status(),
            "dispatch"
        );
        // SAFETY: the caller's promise about the addresses is the one that the launch asks for, the sizes were checked
        // against the tensors, and what a score program reads lives until the launch returns.
        unsafe {
            let findings = call.block_mask.and_then(BlockMask::findings);
            self.device().launch_shape_with(plan.module(), shape, &resolved.args, findings, stream)?
        };
        Ok(Some(dispatch))
    }

    /// The same with the tables of a score program. They are large: other calls do not carry them along.
    ///
    /// # Safety
    /// As [`Engine::forward`].
    #[inline(never)]
    unsafe fn launch_program(
        &self,
        call: &Forward<'_>,
        mut resolved: ForwardCall,
        stream: Stream,
    ) -> Result<Option<Dispatch>> {
        let table = side_table(call, &resolved)?;
        let args = table.as_ref().map(SideTable::args);
        resolved.args.side = args.as_ref().map_or(0, |args| std::ptr::from_ref(args) as u64);
        // SAFETY: the caller's promise is this function's own; the tables live until the launch returns.
        unsafe { self.launch(call, resolved, table.as_ref(), stream) }
    }

    /// A mask for many calls on this device: what its kernels find of it is found by the first call of each geometry of
    /// kernels, and later calls go by that ([`Forward::with_block_mask`]). `program` is a mask alone; what it reads
    /// must stay as it is for as long as the block mask is used. Touches no tensor.
    ///
    /// # Errors
    /// As [`BlockMask::new`].
    pub fn create_block_mask(&self, program: ProgramRef, side: &SideInputs<'_>, sizes: MaskSizes) -> Result<BlockMask> {
        Ok(BlockMask::new(self.device().as_ref(), program, side, sizes)?)
    }

    /// All that comes before the launch of [`Engine::forward`], with the kernel itself and no quick one in its place:
    /// afterwards such a call compiles and tunes nothing, and may be captured. Touches no tensor.
    ///
    /// # Errors
    /// As [`Engine::forward`].
    pub fn prepare(&self, call: &Forward<'_>) -> Result<Option<Dispatch>> {
        let mut resolved = self.resolve(call)?;
        let side = side_table(call, &resolved)?;
        if call.weights.is_none() && !resolved.shape.is_empty() && self.pads(&resolved.problem, resolved.aligned) {
            let prepare = |mut padded| self.dispatch(call, &mut padded, side.as_ref(), || false);
            return self.prepare_padding(&resolved.problem, padding::forward(&resolved, 1 << 12)?, prepare);
        }
        self.dispatch(call, &mut resolved, side.as_ref(), || false)
    }

    /// The plan that [`Engine::forward`] uses for these sizes, made now if need be: of head dims whose rows are padded
    /// on the device, that of the padded ones; for a ragged problem that of [`Engine::forward_ragged`], by the sizes of
    /// a usual sequence and its class of pages.
    ///
    /// # Errors
    /// As [`Engine::forward`], without those of tensors and launches.
    pub fn plan(&self, problem: &Problem, sizes: impl Into<CallSizes>) -> Result<Arc<Plan>> {
        let CallSizes { shape, pages } = sizes.into();
        problem.validate_on(self.device().arch())?;
        let problem = &self.computed(problem);
        let shape = *crate::append::class_of(problem, &shape);
        self.plan_for(problem, &CallSizes { shape, pages }, Constraints::NONE, || false)
    }

    /// Which kernel runs for these sizes, from which layer, and why no other does.
    ///
    /// # Errors
    /// As [`Engine::plan`].
    pub fn explain(&self, problem: &Problem, sizes: impl Into<CallSizes>) -> Result<Explanation> {
        let mut explanation = self.plan(problem, sizes)?.explain();
        let computed = self.computed(problem);
        if computed != *problem {
            explanation.notes.push(format!(
                "{problem} is computed over rows that pad/cuda copies to {} and {} elements before the kernel, and the \
                 output back: two more launches, and every operand moved once more",
                computed.head_dim_qk, computed.head_dim_v
            ));
        }
        Ok(explanation)
    }

    /// Tunes a problem on this device, keeps the result, and uses it from now on. Answers from the cache when it is
    /// already there.
    ///
    /// # Errors
    /// [`Error::Tuner`], an unwritable cache, a missing compiler.
    pub fn tune(&self, problem: &Problem, sizes: impl Into<CallSizes>) -> Result<Outcome> {
        self.tune_job(&Job { launches: self.launches, ..Job::of_call(*problem, sizes.into()) }, &())
    }

    /// [`Engine::tune`] with limits and an observer. What bundles below the user's own results serve is tried too.
    ///
    /// # Errors
    /// As [`Engine::tune`].
    pub fn tune_job(&self, job: &Job, observer: &dyn Observer) -> Result<Outcome> {
        if self.dispatcher.sealed().is_some() {
            return Err(Error::Runtime(RuntimeError::Sealed {
                problem: job.problem.to_string(),
                reason: "a sealed engine does not tune".to_owned(),
                remedy: "tune in another process, ship the result as a bundle, and open a new engine",
            }));
        }
        let dir = match (&self.cache, &self.unused_cache) {
            (Some(dir), _) => dir,
            (None, Some(dir)) => {
                // Says what is wrong with it; where that was put right since, the next engine reads what is kept now.
                dir.create()?;
                dir
            }
            (None, None) => return Err(flashtune_cache::Error::NoFolder.into()),
        };
        job.problem.validate_on(self.device().arch())?;
        job.shape.validate()?;
        // Rows that are padded have the kernels of the padded ones.
        let job = &Job { problem: self.computed(&job.problem), ..job.clone() };
        let device = self.device().fingerprint().clone();
        let bucket = job.bucket(&device);
        let wanted = RecordKey { device, problem: job.problem, bucket, launches: job.launches };
        let mut job = job.clone();
        job.allowed.extend(&self.allowed);
        job.rivals.extend(self.layers().rivals(self.dispatcher.needed(), &wanted));
        let _one_at_a_time = self.tuning.lock().unwrap_or_else(PoisonError::into_inner);
        let outcome = flashtune_tuner::tune(&mut self.runner()?, &self.templates, dir, &job, observer)?;
        let allowed = Paths::allowing(self.allowed.iter().copied());
        self.dispatcher.set_paths(Levels::new(dir).apply(allowed, self.dispatcher.needed()));
        self.dispatcher.refresh();
        Ok(outcome)
    }

    pub(crate) fn dispatcher(&self) -> &Dispatcher {
        &self.dispatcher
    }

    /// Where candidates run.
    fn runner(&self) -> Result<Runner> {
        let named = || std::env::var_os(crate::WORKER_VARIABLE).filter(|v| !v.is_empty()).map(WorkerCommand::flashtune);
        let command = match &self.candidates {
            Candidates::InThisProcess => return Ok(Runner::in_this_process(self.device().clone())),
            Candidates::InWorker(command) => Some(command.clone()),
            Candidates::Unsaid => named(),
        };
        let why = match (command, self.device().spec()) {
            (Some(command), Some(device)) => {
                let runner = Runner::worker(command, device)?;
                if runner.fingerprint() == self.device().fingerprint() {
                    return Ok(runner);
                }
                format!("the worker sees {} as {device}", runner.fingerprint())
            }
            (Some(_), None) => "a worker cannot open this device by name".to_owned(),
            (None, _) => format!("no worker is named (Builder::worker, {})", crate::WORKER_VARIABLE),
        };
        tracing::warn!("tuning in the host's own process, which a faulty candidate would end: {why}");
        Ok(Runner::in_this_process(self.device().clone()))
    }

    /// Checks the tensors and says what they ask for.
    pub(crate) fn resolve(&self, call: &Forward<'_>) -> Result<ForwardCall> {
        let [batch, heads, q_len, _] = call.q.shape;
        let lse = call.lse.map(|address| TensorView::rows(address, [batch, heads, q_len]));
        let tensors = ForwardTensors { q: call.q, k: call.k, v: call.v, o: call.o, lse };
        let resolved = forward_call(&tensors, call.mask, call.scale)?;
        let resolved = resolved.with_descales(&call.descales)?;
        let resolved = call.o_scale.map_or(Ok(resolved), |at| resolved.with_output_scale(at))?;
        let resolved = call.residual.map_or(Ok(resolved), |residual| resolved.with_residual(&residual))?;
        let resolved = resolved.with_dropout(&call.dropout)?;
        if resolved.problem.dropout && call.weights.is_some() {
            let limit = "weights are those before any is dropped";
            let remedy = "ask for weights in a call without dropout";
            return Err(flashtune_codegen::Error::unsupported("weights", "beside dropout", limit, remedy).into());
        }
        if let Some(block_mask) = call.block_mask {
            block_mask.admit(self.device().fingerprint(), &resolved.shape, &call.side)?;
        }
        let program = call.whole_program()?.filter(|p| !p.is_plain());
        let mut resolved = program.map_or(resolved, |program| resolved.with_program(program));
        let arch = self.device().arch();
        match call.precision {
            Some(Precision::Exact) => {}
            Some(precision) => {
                resolved.problem.precision = precision;
                resolved.problem.validate_on(arch)?;
            }
            None if call.weights.is_some() => {}
            None => resolved.problem = resolved.problem.in_default_precision(arch),
        }
        Ok(resolved)
    }

    /// Kernel and sizes of a call; none when there is nothing to compute. `haste` is whether a quick schedule may stand
    /// in for one that must be compiled.
    fn dispatch(
        &self,
        call: &Forward<'_>,
        resolved: &mut ForwardCall,
        side: Option<&SideTable>,
        haste: impl Fn() -> bool,
    ) -> Result<Option<Dispatch>> {
        let ForwardCall { problem, shape, args, aligned } = resolved;
        if shape.is_empty() {
            return Ok(None);
        }
        args.weights = call.weights.unwrap_or(0);
        let loose = side.is_some_and(|side| has_loose_biases(problem, args, side.tensors()));
        let demands = Constraints::NONE
            .with_if(Constraint::Weights, call.weights.is_some())
            .with_if(Constraint::Unaligned, !*aligned)
            .with_if(Constraint::Strided, *aligned && !is_addressable(args))
            .with_if(Constraint::LooseBiases, loose);
        let plan = self.plan_for(problem, &CallSizes::from(&*shape), demands, haste)?;
        Ok(Some(Dispatch::new(plan, *shape)))
    }

    pub(crate) fn plan_for(
        &self,
        problem: &Problem,
        sizes: &CallSizes,
        demands: Constraints,
        haste: impl Fn() -> bool,
    ) -> Result<Arc<Plan>> {
        let shape = &sizes.shape;
        let tunable = self.policy == Policy::Tune
            && problem.is_tuned()
            && self.dispatcher.sealed().is_none()
            && Family::is_tunable(demands, self.device().arch())
            && !shape.is_empty()
            && shape.kv_len > 0;
        if tunable && self.awaited.is_due(|| self.class(problem, sizes)) {
            self.dispatcher.forget(problem, *sizes);
        }
        if tunable && self.dispatcher.planned(problem, *sizes, demands).is_none() {
            self.tune_missing(problem, sizes)?;
        }
        Ok(self.dispatcher.plan_in_haste(problem, *sizes, demands, haste)?)
    }

    /// What calls share a tuning result with.
    fn class(&self, problem: &Problem, sizes: &CallSizes) -> (Problem, ShapeBucket) {
        (*problem, self.dispatcher.bucket(problem, sizes))
    }

    /// Tunes unless some layer already has a measured record of this device and class of sizes.
    fn tune_missing(&self, problem: &Problem, sizes: &CallSizes) -> Result<()> {
        if self.dispatcher.is_tuned(problem, *sizes) {
            return Ok(());
        }
        tracing::info!(%problem, %sizes, "nothing tuned fits: tuning now");
        // Threads that come second wait for the first inside, and are answered from the store.
        let patience = if self.wait_for_tuners { PATIENCE } else { Duration::ZERO };
        match self.tune_job(&Job { patience, launches: self.launches, ..Job::of_call(*problem, *sizes) }, &Waits) {
            Ok(_) => Ok(()),
            // The next best choice serves until the other process is done.
            Err(Error::Tuner(e @ flashtune_tuner::Error::Busy { .. })) => {
                tracing::info!("{e}; the next best choice is taken meanwhile");
                self.awaited.add(self.class(problem, sizes));
                Ok(())
            }
            // Nowhere to keep a result, or no compiler: what else there is may serve, as under the other policies. That
            // no kernel came through its checks is not of this kind.
            Err(Error::Runtime(e @ (RuntimeError::Cache(_) | RuntimeError::Missing { .. }))) => {
                tracing::warn!(%problem, %sizes, error = %e, "it cannot be tuned here; the next best choice is taken");
                Ok(())
            }
            Err(Error::Tuner(e @ flashtune_tuner::Error::Noise { .. })) => {
                tracing::warn!("{e}; the next best choice is taken");
                Ok(())
            }
            Err(e) => Err(e),
        }
    }
}

/// Tells the log of a call that waits for other processes.
struct Waits;

impl Observer for Waits {
    fn event(&self, event: &Event<'_>) {
        match event {
            Event::Waiting { what, holder: Some(holder), .. } => {
                tracing::warn!("a call waits: {what} by {holder}; {}", holder.remedy());
            }
            Event::Waiting { what, holder: None, .. } => tracing::warn!("a call waits: {what} by another process"),
            _ => {}
        }
    }
}

/// What the score program of a call reads, checked.
fn side_table(call: &Forward<'_>, resolved: &ForwardCall) -> Result<Option<SideTable>> {
    let Some(program) = resolved.problem.program else { return Ok(None) };
    let of_mask = call.block_mask.map(BlockMask::side).unwrap_or_default();
    let table = SideTable::of_all(&program, &resolved.shape, &[of_mask, call.side]);
    Ok(Some(table.map_err(flashtune_codegen::Error::from)?))
}

// A host shares one engine between its threads.
const _: () = {
    const fn shared<T: Send + Sync>() {}
    shared::<Engine>();
    shared::<Error>();
};
