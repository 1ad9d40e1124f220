//! From a model to the problems and shapes that serving it needs.

use super::config::{Latent, Model};
use super::gap::Gap;
use super::{Error, LayerKind};
use flashtune_codegen::score::{ProgramBuilder, ProgramError, ProgramRef, builtin};
use flashtune_codegen::{
    Arch, CallSizes, DType, Family, KvElement, KvKind, KvStore, Mask, PageClass, Problem, Shape, ShapeBucket,
};
use serde::Serialize;
use std::collections::BTreeSet;
use std::fmt;

/// Lengths of prompts that are timed: the longest, and quarters of it.
const PREFILL_LENGTHS: usize = 4;
/// No prompt shorter than this is timed: the nearest longer one answers for it.
const PREFILL_MIN: u32 = 128;
/// Contexts of decoding that are timed: the longest and this part of it.
const CONTEXT_PART: u32 = 8;
/// Rows that a step has of all chunks together, and those of one at least.
const CHUNK: u32 = 512;
const CHUNK_MIN: u32 = 16;
/// Largest batch, so that a slip of the finger is an error.
const BATCH_MAX: u32 = 1 << 16;

/// What the plan is made for.
#[derive(Debug, Clone, PartialEq)]
pub struct Limits {
    /// The device's code-generation target.
    pub arch: Arch,
    /// Longest sequence; by default the model's, or what a device of this kind tunes in sensible time if that is less.
    pub max_len: Option<u32>,
    /// Numbers of sequences that are decoded together, or trained on; empty means the default.
    pub batches: Vec<u32>,
    /// Devices that the heads are split over.
    pub tensor_parallel: u32,
    /// Element type in place of the file's.
    pub dtype: Option<DType>,
    /// How the keys of the KV cache lie; empty leaves ragged batches out.
    pub pages: Vec<PageClass>,
    /// What the KV cache is made of.
    pub stores: Vec<KvStore>,
    /// Whether it is trained, and not served: `batches` are then those of whole sequences, and gradients are computed.
    pub train: bool,
}

/// What a shape is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Use {
    /// A prompt: as many queries as keys.
    Prefill,
    /// One new query per sequence.
    Decode,
    /// A part of each sequence's prompt beside what the cache has of it.
    Chunk,
    /// The forward pass of a step of training, with the log-sum-exp.
    Train,
    /// Its gradients.
    Gradients,
}

/// One problem at one size.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Case {
    /// What a kernel is specialised to.
    pub problem: Problem,
    /// The sizes; of a ragged batch those of a usual sequence.
    pub shape: Shape,
    /// How keys lie, where the batch is ragged.
    pub pages: PageClass,
    /// Prompt or decoding.
    pub used_for: Use,
}

impl Case {
    /// What a kernel is chosen by.
    pub fn sizes(&self) -> CallSizes {
        CallSizes { shape: self.shape, pages: self.pages }
    }
}

/// Layers that share a problem.
#[derive(Debug, Clone, PartialEq)]
pub struct Need {
    /// How many layers.
    pub layers: u32,
    /// What their queries attend to.
    pub attention: String,
    /// The problem, if the kernels can compute it.
    pub problem: Option<Problem>,
    /// What to tune; empty when a gap blocks it.
    pub cases: Vec<Case>,
    /// What the kernels do not do for these layers.
    pub gaps: Vec<Gap>,
}

/// Everything that serving a model needs.
#[derive(Debug, Clone, PartialEq)]
pub struct Serving {
    /// The layers by problem.
    pub needs: Vec<Need>,
    /// What no layer says.
    pub gaps: Vec<Gap>,
    /// What the reader should know.
    pub notes: Vec<String>,
    /// Longest sequence that is planned for.
    pub max_len: u32,
    /// Element type.
    pub dtype: DType,
    /// Query heads on one device.
    pub heads: u32,
    /// KV heads on one device.
    pub kv_heads: u32,
}

impl fmt::Display for Use {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Use::Prefill => "prefill",
            Use::Decode => "decode",
            Use::Chunk => "chunk",
            Use::Train => "train",
            Use::Gradients => "gradients",
        })
    }
}

impl Serving {
    /// The plan for a model.
    ///
    /// # Errors
    /// [`Error::Limit`] for limits that the model cannot be held to.
    pub fn of(model: &Model, limits: &Limits) -> Result<Serving, Error> {
        let mut notes = model.notes.clone();
        let max_len = max_len(model, limits, &mut notes)?;
        let (heads, kv_heads) = split(model, limits.tensor_parallel, &mut notes)?;
        let dtype = limits.dtype.or(model.dtype).unwrap_or_else(|| {
            notes.push("the file states no dtype: bf16 is taken; --dtype changes it".into());
            DType::Bf16
        });
        let batches = batches(limits)?;
        let (arch, pages, stores) = (limits.arch, &limits.pages, &limits.stores);
        let train = limits.train;
        let planner = Planner { model, arch, max_len, batches, heads, kv_heads, dtype, pages, stores, train };
        let mut needs: Vec<Need> = model.layers.iter().map(|(kind, layers)| planner.need(kind, *layers)).collect();
        if let Some(latent) = model.latent {
            needs.push(planner.latent(latent));
        }
        Ok(Serving { needs, gaps: model.gaps.clone(), notes, max_len, dtype, heads, kv_heads })
    }

    /// What to tune: one case for each problem and bucket, in the order of the layers.
    pub fn cases(&self) -> Vec<Case> {
        let mut seen = BTreeSet::new();
        let all = self.needs.iter().flat_map(|n| &n.cases);
        // Classes of ragged batches go by the device's units; those of one unit are as many.
        all.filter(|c| seen.insert((c.problem, ShapeBucket::of_call(&c.problem, &c.sizes(), 1)))).copied().collect()
    }

    /// Everything that is missing, with the layers that miss it.
    pub fn all_gaps(&self) -> impl Iterator<Item = (Option<&Need>, &Gap)> {
        let of_layers = self.needs.iter().flat_map(|n| n.gaps.iter().map(move |g| (Some(n), g)));
        of_layers.chain(self.gaps.iter().map(|g| (None, g)))
    }
}

/// The longest sequence to plan for.
fn max_len(model: &Model, limits: &Limits, notes: &mut Vec<String>) -> Result<u32, Error> {
    match limits.max_len {
        Some(0) => Err(Error::limit("--max-len", "is 0", "name a length of at least 1")),
        Some(n) if n > model.max_len => Err(Error::limit(
            "--max-len",
            format!("is {n}, but the model's longest sequence has {}", model.max_len),
            "name a smaller length",
        )),
        Some(n) => Ok(n),
        None => {
            let sensible = match limits.arch {
                Arch::Cpu(_) => 2048,
                Arch::Sm(_) => 32_768,
            };
            if model.max_len > sensible {
                notes.push(format!(
                    "lengths up to {sensible} of the model's {} are tuned; --max-len changes it",
                    model.max_len
                ));
            }
            Ok(model.max_len.min(sensible))
        }
    }
}

/// Query and KV heads of one of `n` devices.
fn split(model: &Model, n: u32, notes: &mut Vec<String>) -> Result<(u32, u32), Error> {
    let Model { heads, kv_heads, .. } = *model;
    let whole = |a: u32, b: u32| b != 0 && a.is_multiple_of(b);
    if !whole(heads, n) || !(whole(kv_heads, n) || whole(n, kv_heads)) {
        let problem = format!("is {n}, which does not split {heads} query heads and {kv_heads} KV heads evenly");
        return Err(Error::limit("--tp", problem, "name a number of devices that divides both"));
    }
    if n > kv_heads {
        notes.push(format!("{kv_heads} KV heads over {n} devices: each holds a copy of one"));
    }
    Ok((heads / n, (kv_heads / n).max(1)))
}

fn batches(limits: &Limits) -> Result<Vec<u32>, Error> {
    if let Some(bad) = limits.batches.iter().find(|b| !(1..=BATCH_MAX).contains(*b)) {
        return Err(Error::limit("--batch", format!("is {bad}"), format!("name sizes from 1 to {BATCH_MAX}")));
    }
    Ok(match (limits.batches.as_slice(), limits.arch) {
        ([], Arch::Cpu(_)) => vec![1],
        ([], Arch::Sm(_)) if !limits.train => vec![1, 16],
        ([], Arch::Sm(_)) => vec![1],
        (given, _) => given.to_vec(),
    })
}

struct Planner<'a> {
    model: &'a Model,
    arch: Arch,
    max_len: u32,
    batches: Vec<u32>,
    heads: u32,
    kv_heads: u32,
    dtype: DType,
    pages: &'a [PageClass],
    stores: &'a [KvStore],
    train: bool,
}

impl Planner<'_> {
    fn need(&self, kind: &LayerKind, layers: u32) -> Need {
        let mut gaps = self.gaps(kind);
        if let LayerKind::Other(name) = kind {
            return Need { layers, attention: name.clone(), problem: None, cases: Vec::new(), gaps };
        }
        let program = match self.program(kind) {
            Ok(program) => program,
            Err(e) => {
                gaps.push(Gap::blocking("score program", e.to_string()));
                None
            }
        };
        let mask = match *kind {
            LayerKind::Causal | LayerKind::Other(_) => Mask::Causal,
            LayerKind::Sliding(window) => Mask::Window { left: Some(window - 1), right: Some(0) },
            // The program's mask says it all.
            LayerKind::Chunked(_) => Mask::Full,
        };
        let problem = self.problem(self.model.head_dim_qk, self.model.head_dim_v, mask, program, &mut gaps);
        let blocked = gaps.iter().chain(&self.model.gaps).any(|g| g.blocks);
        let untrained = problem.filter(|p| self.train && Family::candidates(&p.backward(), self.arch).is_empty());
        if let Some(problem) = untrained {
            let text = format!("none computes {} on {}", problem.backward(), self.arch);
            gaps.push(Gap::blocking("kernel family", text));
        }
        let blocked = blocked || untrained.is_some();
        let cases = problem.filter(|_| !blocked).map_or(Vec::new(), |p| self.cases(p, mask));
        let changes = [
            self.model.soft_cap.map(|cap| format!("scores within {cap}")),
            self.model.alibi.then(|| "ALiBi".to_owned()),
            self.model.sinks.then(|| "sinks".to_owned()),
        ];
        let attention = changes.into_iter().flatten().fold(kind.to_string(), |all, change| format!("{all}, {change}"));
        Need { layers, attention, problem, cases, gaps }
    }

    /// Decoding on a cache of compressed rows, which all heads share.
    fn latent(&self, Latent { rank, rope }: Latent) -> Need {
        let mut gaps = Vec::new();
        let problem = self.problem(rank + rope, rank, Mask::Causal, None, &mut gaps);
        if problem.is_some() {
            gaps.push(Gap::blocking("latent cache", "K and V share their rows in it, which is not planned for yet"));
        }
        let layers = self.model.layer_count();
        Need { layers, attention: "decoding on the latent cache".into(), problem, cases: Vec::new(), gaps }
    }

    /// The score program of layers of this kind: the texts that hosts pass by the built-ins' names, and a chunk's
    /// length.
    fn program(&self, kind: &LayerKind) -> Result<Option<ProgramRef>, ProgramError> {
        let text = |name: &str| builtin(name).expect("a built-in").text.to_owned();
        let mut texts = Vec::new();
        if let LayerKind::Chunked(chunk) = kind {
            let position = "q + kv_len - q_len";
            texts.push(format!("mask = kv // {chunk} == ({position}) // {chunk} and kv <= {position};"));
        }
        let Model { soft_cap, alibi, sinks, .. } = *self.model;
        for (on, name) in [(soft_cap.is_some(), "soft_cap"), (alibi, "alibi"), (sinks, "attention_sinks")] {
            texts.extend(on.then(|| text(name)));
        }
        if texts.is_empty() {
            return Ok(None);
        }
        let program = texts.iter().try_fold(ProgramBuilder::new(), |builder, text| builder.text(text))?;
        Ok(Some(ProgramRef::new(program.build()?)))
    }

    /// What the kernels do not do for layers of this kind.
    fn gaps(&self, kind: &LayerKind) -> Vec<Gap> {
        match kind {
            LayerKind::Other(name) => vec![Gap::blocking(name.clone(), "no kernel computes layers of this type")],
            _ => Vec::new(),
        }
    }

    /// The problem, or a gap that says why there is none.
    fn problem(
        &self,
        qk: u32,
        v: u32,
        mask: Mask,
        program: Option<ProgramRef>,
        gaps: &mut Vec<Gap>,
    ) -> Option<Problem> {
        match Problem::forward_qk_v(self.dtype, qk, v, mask.kind()).map(|p| Problem { program, ..p }) {
            Ok(problem) if Family::candidates(&problem, self.arch).is_empty() => {
                gaps.push(Gap::blocking("kernel family", format!("none computes {problem} on {}", self.arch)));
                Some(problem)
            }
            Ok(problem) => Some(problem),
            Err(e) => {
                gaps.push(Gap::blocking("head dim", e.to_string()));
                None
            }
        }
    }

    fn cases(&self, problem: Problem, mask: Mask) -> Vec<Case> {
        let longest = self.max_len;
        let shape =
            |batch, q_len, kv_len| Shape { batch, heads: self.heads, kv_heads: self.kv_heads, q_len, kv_len, mask };
        let mut cases = Vec::new();
        if self.train {
            for &batch in &self.batches {
                let (shape, pages) = (shape(batch, longest, longest), PageClass::Dense);
                cases.push(Case { problem, shape, pages, used_for: Use::Train });
                cases.push(Case { problem: problem.backward(), shape, pages, used_for: Use::Gradients });
            }
            return cases;
        }
        for len in prefill_lengths(longest) {
            cases.push(Case { problem, shape: shape(1, len, len), pages: PageClass::Dense, used_for: Use::Prefill });
        }
        for context in contexts(longest, mask) {
            for &batch in &self.batches {
                let shape = shape(batch, 1, context);
                cases.push(Case { problem, shape, pages: PageClass::Dense, used_for: Use::Decode });
            }
        }
        cases.extend(self.ragged_cases(problem, mask, &shape));
        cases
    }

    /// The same over a KV cache: decoding, and chunks of prompts, of which a step has so many rows.
    fn ragged_cases(&self, problem: Problem, mask: Mask, shape: &dyn Fn(u32, u32, u32) -> Shape) -> Vec<Case> {
        let mut cases = Vec::new();
        for store in self.stores {
            let problem = problem.with_kv(KvKind::Ragged(*store));
            let is_served = !Family::candidates(&problem, self.arch).is_empty();
            if !is_served || store.element != KvElement::Same && self.dtype == DType::F32 {
                continue;
            }
            for (&pages, &batch) in self.pages.iter().flat_map(|pages| self.batches.iter().map(move |b| (pages, b))) {
                let mut add = |q_len, kv_len, used_for| {
                    cases.push(Case { problem, shape: shape(batch, q_len, kv_len), pages, used_for });
                };
                for context in contexts(self.max_len, mask) {
                    add(1, context, Use::Decode);
                }
                let chunk = (CHUNK / batch).max(CHUNK_MIN);
                if chunk < self.max_len {
                    add(chunk, self.max_len, Use::Chunk);
                }
            }
        }
        cases
    }
}

/// The longest prompt, and powers of two below it, each a quarter of the one before. Buckets are powers of two and the
/// nearest one answers for what lies between.
fn prefill_lengths(longest: u32) -> Vec<u32> {
    let mut lengths = vec![longest];
    let mut next = floor_power(longest) / 4;
    while lengths.len() < PREFILL_LENGTHS && next >= PREFILL_MIN {
        lengths.push(next);
        next /= 4;
    }
    lengths
}

/// Contexts of decoding. Within a window the work does not grow with the context.
fn contexts(longest: u32, mask: Mask) -> Vec<u32> {
    let short = floor_power(longest) / CONTEXT_PART;
    let distinct = short >= PREFILL_MIN && mask.window().0.is_none_or(|left| short <= left);
    if distinct { vec![longest, short] } else { vec![longest] }
}

fn floor_power(n: u32) -> u32 {
    1 << n.max(1).ilog2()
}
