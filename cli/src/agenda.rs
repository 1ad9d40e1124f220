//! What a tuning is going to do: the cases of a model, of the options, or of the built-in set.

use super::cases::{Case, CaseArgs, RaggedArgs, default_case, fixed};
use super::context::Context;
use super::exit::usage;
use super::table::table;
use anyhow::Result;
use flashtune::model::{Limits, Model, Need, Serving, Use, read_model};
use flashtune::{DType, Mask, read_manifest};
use flashtune_cache::DeviceFingerprint;
use flashtune_codegen::Arch;
use flashtune_runtime::require_room;
use serde_json::{Value, json};
use std::io::Write;
use std::path::PathBuf;

/// Seconds for the whole built-in set.
const CPU_BUDGET: f64 = 90.0;
const CUDA_BUDGET: f64 = 400.0;
/// Seconds for each case that the options name.
const CASE_BUDGET: f64 = 60.0;
/// Seconds for each case of a model, which has many.
const CPU_MODEL_BUDGET: f64 = 12.0;
const CUDA_MODEL_BUDGET: f64 = 45.0;

/// Options that name a model.
#[derive(clap::Args, Debug)]
pub(crate) struct ModelArgs {
    /// Tune what serving a model needs: its Hugging Face config.json, or the folder that holds it. Of the options
    /// below,
    /// --batch then names the numbers of sequences that are decoded together, and --dtype replaces the file's
    #[arg(long, value_name = "PATH")]
    model: Option<PathBuf>,
    #[command(flatten)]
    service: ServiceArgs,
    /// Tune what a file lists: the shapes that a host met untuned (`Engine::write_untuned`), most called first; may be
    /// repeated
    #[arg(long, value_name = "FILE", conflicts_with = "model")]
    from: Vec<PathBuf>,
}

/// Options that say what a model is for.
#[derive(clap::Args, Debug)]
pub(crate) struct ServiceArgs {
    /// What training the model needs, and not serving it: forward passes with the log-sum-exp and gradients, of --batch
    /// sequences of --max-len
    #[arg(long, requires = "model")]
    train: bool,
    /// Longest sequence that the model will serve
    #[arg(long, value_name = "N", requires = "model")]
    max_len: Option<u32>,
    /// Number of devices that the model's heads are split over (tensor parallelism)
    #[arg(long, value_name = "N", requires = "model")]
    tp: Option<u32>,
}

impl ServiceArgs {
    /// What a plan for the model is made for.
    pub(crate) fn limits(&self, arch: Arch, dtype: Option<DType>, batches: &[u32], ragged: &RaggedArgs) -> Limits {
        let (pages, stores) = if self.train { (Vec::new(), Vec::new()) } else { ragged.choices() };
        let (max_len, tensor_parallel) = (self.max_len, self.tp.unwrap_or(1));
        Limits { arch, max_len, batches: batches.to_vec(), tensor_parallel, dtype, pages, stores, train: self.train }
    }
}

/// A model's cases as they are tuned on a device, each with what it is for.
pub(crate) fn cases_of_model(serving: &Serving, arch: Arch) -> Vec<(Use, Case)> {
    let of_need = |need: &flashtune::model::Case| {
        // Gradients are exact ones, of exact forward passes.
        let trains = need.used_for == Use::Train;
        let problem = if trains { need.problem } else { need.problem.in_default_precision(arch) };
        (need.used_for, Case::new(problem, need.sizes()))
    };
    serving.cases().iter().map(of_need).collect()
}

/// What is tuned of the problems that the options name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum TunedOp {
    /// Attention
    Forward,
    /// Gradients of Q, K and V
    Backward,
}

/// Options that say what of a problem is computed.
#[derive(clap::Args, Debug, Default)]
pub(crate) struct OpArgs {
    /// What is tuned: forward (when absent) or backward
    #[arg(long, value_name = "OPERATION")]
    op: Option<TunedOp>,
    /// For `precise=True`: forward passes also write what O loses by rounding, and gradients read it; f16 and bf16
    #[arg(long)]
    precise: bool,
}

impl OpArgs {
    /// An agenda of what the options say.
    fn apply(&self, mut agenda: Agenda) -> Result<Agenda> {
        for case in &mut agenda.cases {
            if self.op == Some(TunedOp::Backward) {
                case.problem = case.problem.backward();
            }
            case.problem = case.problem.with_residual(self.precise);
            case.problem.validate()?;
        }
        Ok(agenda)
    }
}

/// What is going to be tuned.
pub(crate) struct Agenda {
    pub cases: Vec<Case>,
    /// The model that they serve.
    pub model: Option<(Model, Serving)>,
    /// Cases that this device has no room for, with the reason.
    pub left_out: Vec<String>,
    pub default_budget_s: f64,
    /// Multiprocessors or cores of the device.
    units: u32,
}

impl Agenda {
    /// What the options ask for on this device.
    pub(crate) fn new(
        model: &ModelArgs,
        args: &CaseArgs,
        ragged: &RaggedArgs,
        op: &OpArgs,
        device: &DeviceFingerprint,
    ) -> Result<Self> {
        let arch = device.arch;
        if (model.model.is_some() || !model.from.is_empty()) && op.op.is_some() {
            return Err(usage("--op: a model or a file says what is computed (--train: gradients, too); leave it out"));
        }
        if let Some(path) = &model.model {
            let limits = limits(model, args, ragged, arch)?;
            let model = read_model(path)?;
            let serving = Serving::of(&model, &limits)?;
            let mut agenda = Self::of_model(model, serving, device);
            agenda.cases.iter_mut().for_each(|case| case.problem = case.problem.with_dropout(args.dropout));
            return op.apply(agenda);
        }
        if !model.from.is_empty() {
            return Self::of_files(&model.from, args.is_empty() && ragged.is_empty(), device.units);
        }
        if op.op == Some(TunedOp::Backward) && !ragged.is_empty() {
            return Err(usage(
                "--op backward: gradients of packed sequences are not tuned; leave --pages and --kv-dtype out",
            ));
        }
        let (cases, default_budget_s) = match (args.is_empty() && ragged.is_empty() && op.op.is_none(), arch) {
            (true, Arch::Cpu(_)) => (common_cases(arch), CPU_BUDGET),
            (true, Arch::Sm(_)) => (common_cases(arch), CUDA_BUDGET),
            (false, _) => {
                let cases = args.on(arch, ragged.apply(args.cases(&default_case())?)?);
                cases.iter().try_for_each(|case| case.problem.validate_on(arch))?;
                let budget = CASE_BUDGET * cases.len() as f64;
                (cases, budget)
            }
        };
        if let Some(empty) = cases.iter().find(|c| c.shape.is_empty() || c.shape.kv_len == 0) {
            return Err(usage(format!("there is nothing to time in {}; name sizes of at least 1", empty.sizes())));
        }
        op.apply(Self { cases, model: None, left_out: Vec::new(), default_budget_s, units: device.units })
    }

    /// What files list.
    fn of_files(files: &[PathBuf], is_all: bool, units: u32) -> Result<Self> {
        if !is_all {
            return Err(usage("--from says the problems and sizes; no option that names some may be given beside it"));
        }
        let (mut cases, mut left_out): (Vec<Case>, Vec<String>) = Default::default();
        for entry in files.iter().map(|f| read_manifest(f)).collect::<Result<Vec<_>, _>>()?.concat() {
            let case = Case::new(entry.problem, entry.sizes());
            let class = (case.problem, case.bucket(units));
            if case.shape.is_empty() || case.shape.kv_len == 0 {
                left_out.push(format!("{} {}: there is nothing to tune", case.problem, case.shape));
            } else if !cases.iter().any(|c| (c.problem, c.bucket(units)) == class) {
                cases.push(case);
            }
        }
        let default_budget_s = CASE_BUDGET * cases.len() as f64;
        Ok(Self { cases, model: None, left_out, default_budget_s, units })
    }

    fn of_model(model: Model, serving: Serving, device: &DeviceFingerprint) -> Self {
        let (mut cases, mut left_out) = (Vec::new(), Vec::new());
        for (_, case) in cases_of_model(&serving, device.arch) {
            match require_room(device, &case.problem, &case.shape) {
                Ok(()) => cases.push(case),
                Err(e) => left_out.push(format!("{} {}: {e}", case.problem, case.sizes())),
            }
        }
        let each = match device.arch {
            Arch::Cpu(_) => CPU_MODEL_BUDGET,
            Arch::Sm(_) => CUDA_MODEL_BUDGET,
        };
        let default_budget_s = each * cases.len() as f64;
        Self { cases, model: Some((model, serving)), left_out, default_budget_s, units: device.units }
    }

    /// The agenda for a script.
    pub(crate) fn summary(&self) -> Value {
        let cases: Vec<_> = self.cases.iter().map(|c| case_summary(c, self.units, None)).collect();
        let mut summary = json!({ "cases": cases, "left_out": self.left_out });
        if let Some((model, serving)) = &self.model {
            let unsupported: Vec<_> = serving
                .all_gaps()
                .map(|(need, gap)| {
                    json!({
                        "feature": gap.feature,
                        "text": gap.text,
                        "blocks": gap.blocks,
                        "layers": need.map(|n| n.layers),
                        "attention": need.map(|n| n.attention.clone()),
                    })
                })
                .collect();
            summary["model_type"] = model.model_type.clone().into();
            summary["layers"] = model.layer_count().into();
            summary["heads"] = serving.heads.into();
            summary["kv_heads"] = serving.kv_heads.into();
            summary["dtype"] = serving.dtype.name().into();
            summary["max_len"] = serving.max_len.into();
            summary["needs"] = serving.needs.iter().map(|need| need_summary(need, self.units)).collect();
            summary["unsupported"] = unsupported.into();
            summary["notes"] = serving.notes.clone().into();
        }
        summary
    }
}

fn limits(model: &ModelArgs, args: &CaseArgs, ragged: &RaggedArgs, arch: Arch) -> Result<Limits> {
    if args.dropout && !model.service.train {
        return Err(usage("--dropout: serving drops nothing; leave it out, or add --train"));
    }
    let rest = CaseArgs { dtype: Vec::new(), batch: Vec::new(), dropout: false, ..args.clone() };
    if !rest.is_empty() {
        return Err(usage(
            "--model says the head dims, masks, heads and lengths; beside it only --dtype and --batch, \
             --pages, --kv-dtype, --max-len, --tp and, with --train, --dropout may be given",
        ));
    }
    let dtype = match args.dtype.as_slice() {
        [] => None,
        [one] => Some(*one),
        _ => return Err(usage("--dtype: a model is served in one dtype; name one")),
    };
    Ok(model.service.limits(arch, dtype, &args.batch, ragged))
}

fn need_summary(need: &Need, units: u32) -> Value {
    let cases =
        need.cases.iter().map(|c| case_summary(&Case::new(c.problem, c.sizes()), units, Some(&c.used_for.to_string())));
    json!({
        "layers": need.layers,
        "attention": need.attention,
        "problem": need.problem.map(|p| p.to_string()),
        "supported": !need.cases.is_empty(),
        "unsupported": need.gaps,
        "cases": cases.collect::<Vec<_>>(),
    })
}

fn case_summary(case: &Case, units: u32, used_for: Option<&str>) -> Value {
    let mut summary = json!({
        "problem": case.problem.to_string(),
        "shape": case.sizes().to_string(),
        "bucket": case.bucket(units).to_string(),
        "sizes": case.shape,
    });
    if !case.pages.is_dense() {
        summary["pages"] = case.pages.to_string().into();
    }
    if let Some(used_for) = used_for {
        summary["use"] = used_for.into();
    }
    summary
}

/// The whole agenda: `tune --dry-run`.
pub(crate) fn print(cx: &mut Context, agenda: &Agenda) -> Result<()> {
    if cx.json() {
        return cx.print_json(&agenda.summary());
    }
    if let Some((model, serving)) = &agenda.model {
        let Serving { heads, kv_heads, dtype, max_len, .. } = serving;
        let Model { model_type, head_dim_qk, head_dim_v, .. } = model;
        let dims =
            if head_dim_qk == head_dim_v { head_dim_qk.to_string() } else { format!("{head_dim_qk} and {head_dim_v}") };
        let layers = model.layer_count();
        writeln!(
            cx.out,
            "{model_type}: {layers} layers, {heads} query heads, {kv_heads} KV heads, head dim {dims}, {dtype}, \
             lengths up to {max_len}"
        )?;
        let mut rows = table(&["layers", "attention", "problem", "use", "shape"]);
        for need in &serving.needs {
            let problem = need.problem.map_or("-".to_owned(), |p| p.to_string());
            let start = [need.layers.to_string(), need.attention.clone(), problem];
            if need.cases.is_empty() {
                rows.add_row(start.iter().cloned().chain(["not supported yet".into(), "-".into()]));
            }
            for case in &need.cases {
                let [layers, attention, _] = start.clone();
                let problem = case.problem.to_string();
                rows.add_row([layers, attention, problem, case.used_for.to_string(), case.sizes().to_string()]);
            }
        }
        writeln!(cx.out, "{rows}")?;
    } else {
        let mut rows = table(&["problem", "shape"]);
        for case in &agenda.cases {
            rows.add_row([case.problem.to_string(), case.sizes().to_string()]);
        }
        writeln!(cx.out, "{rows}")?;
    }
    writeln!(
        cx.out,
        "{} cases to tune, {:.0} s unless --budget-s says otherwise",
        agenda.cases.len(),
        agenda.default_budget_s
    )?;
    print_gaps(cx, agenda)
}

/// What is not tuned, and what else the user of a model should know.
pub(crate) fn print_gaps(cx: &mut Context, agenda: &Agenda) -> Result<()> {
    for reason in &agenda.left_out {
        writeln!(cx.out, "left out: {reason}")?;
    }
    let Some((_, serving)) = &agenda.model else { return Ok(()) };
    for (need, gap) in serving.all_gaps() {
        let of = need.map_or(String::new(), |n| format!(" ({} layers, {})", n.layers, n.attention));
        let verdict = if gap.blocks { "not supported yet" } else { "not in the kernels yet" };
        writeln!(cx.out, "{verdict}: {}{of}: {}", gap.feature, gap.text)?;
    }
    for note in &serving.notes {
        writeln!(cx.out, "note: {note}")?;
    }
    Ok(())
}

/// The built-in set: what a user's first run tunes.
fn common_cases(arch: Arch) -> Vec<Case> {
    use DType::{Bf16, F16, F32};
    use Mask::{Causal, Full};
    match arch {
        Arch::Cpu(_) => vec![
            fixed(F32, 64, Full, 1, (8, 8), 1024),
            fixed(F32, 64, Causal, 1, (8, 8), 1024),
            fixed(F32, 128, Causal, 1, (8, 2), 1024),
            fixed(Bf16, 64, Causal, 1, (8, 8), 1024),
            fixed(Bf16, 128, Full, 1, (8, 8), 1024),
            fixed(Bf16, 128, Causal, 1, (8, 2), 2048),
            fixed(F32, 64, Full, 1, (8, 8), 128),
            fixed(Bf16, 128, Causal, 1, (8, 2), 128),
        ],
        Arch::Sm(_) => vec![
            fixed(Bf16, 64, Full, 4, (16, 16), 4096),
            fixed(Bf16, 64, Causal, 4, (16, 16), 4096),
            fixed(Bf16, 128, Full, 4, (32, 8), 4096),
            fixed(Bf16, 128, Causal, 4, (32, 8), 4096),
            fixed(Bf16, 128, Causal, 1, (32, 8), 16384),
            fixed(Bf16, 256, Causal, 2, (16, 8), 4096),
            fixed(Bf16, 128, Causal, 8, (32, 8), 512),
            fixed(F16, 64, Causal, 4, (16, 16), 4096),
            fixed(F16, 128, Causal, 4, (32, 8), 4096),
        ],
    }
}
