//! Problems and sizes on the command line: lists of values, all combinations.

use super::exit::usage;
use super::lists::{MaskChoice, Masks, ScoreChange, Sizes, joined, masks, sizes, whole};
use anyhow::Result;
use flashtune::{DType, Mask, Problem, Shape};
use flashtune_codegen::score::ProgramRef;
use flashtune_codegen::{
    Arch, CallSizes, Family, KvElement, KvKind, KvScales, KvStore, PageClass, Paths, Precision, ScaleUnits, ShapeBucket,
};
use std::str::FromStr;

/// One thing to compute.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Case {
    /// What a kernel is specialised to.
    pub problem: Problem,
    /// The sizes; of a ragged batch those of a usual sequence.
    pub shape: Shape,
    /// How keys lie, where the batch is ragged.
    pub pages: PageClass,
}

impl Case {
    /// A problem at some sizes.
    pub(crate) fn new(problem: Problem, sizes: impl Into<CallSizes>) -> Self {
        let CallSizes { shape, pages } = sizes.into();
        Self { problem, shape, pages }
    }

    /// What a kernel is chosen by.
    pub(crate) fn sizes(&self) -> CallSizes {
        CallSizes { shape: self.shape, pages: self.pages }
    }

    /// The class of sizes that results are filed under on a device of so many multiprocessors or cores.
    pub(crate) fn bucket(&self, units: u32) -> ShapeBucket {
        ShapeBucket::of_call(&self.problem, &self.sizes(), units)
    }
}

/// Options that make cases ragged batches: sequences of different lengths over a KV store.
#[derive(clap::Args, Debug, Clone, Default)]
pub(crate) struct RaggedArgs {
    /// Ragged batches, whose sequences have --q-len rows and --kv-len keys on average: the tokens of a page of their KV
    /// store, or `packed` for sequences in one piece each
    #[arg(long, value_delimiter = ',', value_name = "LIST")]
    pub pages: Vec<PageClass>,
    /// Elements of the KV store of ragged batches: same (as the queries), e4m3, e5m2, int8, each of the last three with
    /// `:token` behind it where every token has a scale; in pages of 16 unless --pages says otherwise
    #[arg(long, value_delimiter = ',', value_name = "LIST")]
    pub kv_dtype: Vec<StoreChoice>,
}

/// A kind of KV store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StoreChoice(pub KvStore);

impl FromStr for StoreChoice {
    type Err = flashtune_codegen::Error;

    fn from_str(s: &str) -> Result<Self, Self::Err> {
        let bad = || {
            let known = "same, e4m3, e5m2 or int8, the last three perhaps with `:token` for scales of tokens";
            flashtune_codegen::Error::parse("KV store", s, known)
        };
        let (element, scales) = match s.split_once(':') {
            None => (s, KvScales::PerHead),
            Some((element, "token")) if element != "same" => (element, KvScales::PerToken),
            Some(_) => return Err(bad()),
        };
        let all = [
            ("same", KvElement::Same),
            ("e4m3", KvElement::E4m3),
            ("e5m2", KvElement::E5m2),
            ("int8", KvElement::Int8),
        ];
        let element = all.into_iter().find(|(name, _)| *name == element).ok_or_else(bad)?.1;
        Ok(Self(KvStore { element, scales, v_columns: false }))
    }
}

/// Tokens of a page where a store is named and no page: what most hosts have.
const USUAL_PAGE: PageClass = PageClass::Tokens(16);

impl RaggedArgs {
    /// Whether no option was given.
    pub(crate) fn is_empty(&self) -> bool {
        self.pages.is_empty() && self.kv_dtype.is_empty()
    }

    /// The classes of pages and the stores that are meant.
    pub(crate) fn choices(&self) -> (Vec<PageClass>, Vec<KvStore>) {
        let pages = if self.pages.is_empty() { vec![USUAL_PAGE] } else { self.pages.clone() };
        let stores = match self.kv_dtype.as_slice() {
            [] => vec![KvStore::default()],
            some => some.iter().map(|choice| choice.0).collect(),
        };
        (pages, stores)
    }

    /// Every case as a ragged batch of every kind that was named; as it is where none was.
    pub(crate) fn apply(&self, cases: Vec<Case>) -> Result<Vec<Case>> {
        if self.is_empty() {
            return Ok(cases);
        }
        let (pages, stores) = self.choices();
        let mut ragged = Vec::new();
        for case in cases {
            if case.problem.dropout && pages.iter().any(|pages| pages.tokens().is_some()) {
                return Err(usage("--dropout: packed keys drop scores, pages do not; give --pages packed alone"));
            }
            for &store in &stores {
                if store.element != KvElement::Same && case.problem.dtype == DType::F32 {
                    return Err(usage(
                        "--kv-dtype: quantised stores are read beside f16, bf16 and e4m3 queries; name one by --dtype",
                    ));
                }
                let element = store.element.beside(case.problem.dtype);
                let problem = case.problem.with_kv(KvKind::Ragged(KvStore { element, ..store }));
                problem.validate()?;
                // What of a score program's mask is a window at these sizes may be none at others.
                ragged.extend(pages.iter().map(|pages| Case { problem, pages: *pages, ..case }));
            }
        }
        Ok(ragged)
    }
}

/// Options that name problems and sizes. Lists give every combination.
#[derive(clap::Args, Debug, Clone, Default)]
pub(crate) struct CaseArgs {
    /// Element types: f16, bf16, f32; for forward passes also e4m3
    #[arg(long, value_delimiter = ',', value_name = "LIST")]
    pub dtype: Vec<DType>,
    /// How products of f32 are computed: exact, or by TF32 products of tensor cores, tf32x3 (as when absent, where a
    /// GPU has them) or tf32
    #[arg(long, value_name = "PRECISION")]
    pub precision: Option<Precision>,
    /// What shares a scale in e4m3 operands: head, or some of q_rows, k_rows and v_channel, as in q_rows-k_rows
    #[arg(hide_short_help = true, long, value_name = "UNITS")]
    pub scales: Option<ScaleUnits>,
    /// Element type of O beside e4m3: bf16 when absent, f16, f32 or e4m3
    #[arg(hide_short_help = true, long, value_name = "DTYPE")]
    pub o_dtype: Option<DType>,
    /// Head dims of Q and K: 1 to 256; a GPU pads those that are no multiples of 8
    #[arg(long, visible_alias = "head-dims", value_parser = whole, value_delimiter = ',', value_name = "LIST")]
    pub head_dim: Vec<u32>,
    /// Head dims of V and O; the same as --head-dim when absent
    #[arg(long, value_parser = whole, value_delimiter = ',', value_name = "LIST")]
    pub head_dim_v: Vec<u32>,
    /// full, causal, window:LEFT,RIGHT with - for an unbounded side, or several with commas between; or a score
    /// program: the name of a built-in one (chunked, document, ...) or its text ("kv <= q and q - kv < 1024")
    #[arg(long, visible_alias = "masks", value_name = "LIST")]
    pub mask: Vec<Masks>,
    /// What goes into the softmax in place of the score: the name of a built-in program (alibi, soft_cap, ...) or a
    /// text ("score + 0.1 * (kv - q)")
    #[arg(long, value_name = "PROGRAM")]
    pub score: Option<ScoreChange>,
    /// Scores are dropped behind the softmax
    #[arg(hide_short_help = true, long)]
    pub dropout: bool,
    /// Numbers of sequences
    #[arg(long, value_parser = whole, value_delimiter = ',', value_name = "LIST")]
    pub batch: Vec<u32>,
    /// Numbers of query heads
    #[arg(long, value_parser = whole, value_delimiter = ',', value_name = "LIST")]
    pub heads: Vec<u32>,
    /// Numbers of key/value heads; the same as --heads when absent
    #[arg(long, value_parser = whole, value_delimiter = ',', value_name = "LIST")]
    pub kv_heads: Vec<u32>,
    /// Rows of Q per head: numbers, 16k, or 512..16k for every doubling
    #[arg(long, visible_alias = "seq-lens", value_delimiter = ',', value_name = "LIST")]
    pub q_len: Vec<Sizes>,
    /// Rows of K and V per head, as --q-len; the same as --q-len when absent
    #[arg(long, value_delimiter = ',', value_name = "LIST")]
    pub kv_len: Vec<Sizes>,
}

impl CaseArgs {
    /// Whether no option was given.
    pub(crate) fn is_empty(&self) -> bool {
        let Self { dtype, precision, scales, o_dtype, head_dim, head_dim_v, mask, score, dropout, .. } = self;
        let Self { batch, heads, kv_heads, q_len, kv_len, .. } = self;
        let lists = [head_dim, head_dim_v, batch, heads, kv_heads];
        let lengths = [q_len, kv_len];
        dtype.is_empty()
            && precision.is_none()
            && scales.is_none()
            && o_dtype.is_none()
            && mask.is_empty()
            && score.is_none()
            && !dropout
            && lists.iter().all(|l| l.is_empty())
            && lengths.iter().all(|l| l.is_empty())
    }

    /// Every combination; what was not given is taken from `defaults`. Checked: a combination that no kernel can
    /// compute is an error, not left out.
    pub(crate) fn cases(&self, defaults: &Case) -> Result<Vec<Case>> {
        fn or<T: Clone>(given: &[T], default: T) -> Vec<T> {
            if given.is_empty() { vec![default] } else { given.to_vec() }
        }
        let d = defaults;
        let mut cases = Vec::new();
        for dtype in or(&self.dtype, d.problem.dtype) {
            for head_dim in or(&self.head_dim, d.problem.head_dim_qk) {
                for head_dim_v in or(&self.head_dim_v, head_dim) {
                    for choice in or(&masks(&self.mask), MaskChoice::Window(d.shape.mask)) {
                        let (mask, program) = match choice {
                            MaskChoice::Window(mask) => (mask, None),
                            MaskChoice::Program(program) => (Mask::Full, Some(program)),
                        };
                        let programs: Vec<ProgramRef> = program.into_iter().chain(self.score.map(|s| s.0)).collect();
                        let problem = Problem::forward_qk_v(dtype, head_dim, head_dim_v, mask.kind())?
                            .with_program(joined(&programs)?);
                        let problem = problem.in_precision(self.precision.unwrap_or_default());
                        let problem = problem.with_scales(self.scales.unwrap_or_default()).with_dropout(self.dropout);
                        let problem = self.o_dtype.map_or(problem, |output| problem.with_output(output));
                        problem.validate()?;
                        for batch in or(&self.batch, d.shape.batch) {
                            for heads in or(&self.heads, d.shape.heads) {
                                for kv_heads in or(&self.kv_heads, heads) {
                                    for q_len in or(&sizes(&self.q_len), d.shape.q_len) {
                                        for kv_len in or(&sizes(&self.kv_len), q_len) {
                                            let shape = Shape { batch, heads, kv_heads, q_len, kv_len, mask };
                                            shape.validate()?;
                                            let (problem, shape) = problem.with_windows(shape);
                                            cases.push(Case::new(problem, &shape));
                                        }
                                    }
                                }
                            }
                        }
                    }
                }
            }
        }
        Ok(cases)
    }

    /// Cases as the arch computes them: in its own precision where none was named.
    pub(crate) fn on(&self, arch: Arch, mut cases: Vec<Case>) -> Vec<Case> {
        if self.precision.is_none() {
            cases.iter_mut().for_each(|case| case.problem = case.problem.in_default_precision(arch));
        }
        cases
    }

    /// The one case that the options name.
    pub(crate) fn single(&self, defaults: &Case) -> Result<Case> {
        only(self.cases(defaults)?)
    }
}

/// The one case that was named.
pub(crate) fn only(cases: Vec<Case>) -> Result<Case> {
    match cases.as_slice() {
        [case] => Ok(*case),
        many => Err(usage(format!("{} combinations were named where one is needed; give one value each", many.len()))),
    }
}

/// The case that a command looks at when nothing is said: bf16, head dim 128, causal, 8 heads, 1024 rows.
pub(crate) fn default_case() -> Case {
    let mask = Mask::Causal;
    let problem = Problem::forward(DType::Bf16, 128, mask.kind()).expect("a supported problem");
    Case::new(problem, &Shape { batch: 1, heads: 8, kv_heads: 8, q_len: 1024, kv_len: 1024, mask })
}

/// Case of a name and sizes that the program itself states.
pub(crate) fn fixed(dtype: DType, head_dim: u32, mask: Mask, batch: u32, heads: (u32, u32), len: u32) -> Case {
    let problem = Problem::forward(dtype, head_dim, mask.kind()).expect("a supported problem");
    Case::new(problem, &Shape { batch, heads: heads.0, kv_heads: heads.1, q_len: len, kv_len: len, mask })
}

/// The family of a name, or the best one for the problem at such sizes whose instruction path is taken.
pub(crate) fn family(
    name: Option<&str>,
    problem: &Problem,
    arch: Arch,
    bucket: &ShapeBucket,
    paths: &Paths,
) -> Result<Family> {
    let Some(name) = name else {
        let mut untried = None;
        for family in Family::candidates_for(problem, arch, bucket) {
            match paths.admit(family, problem, arch) {
                Ok(()) => return Ok(family),
                Err(e) => untried = untried.or(Some(e)),
            }
        }
        if let Some(e) = untried {
            return Err(e.into());
        }
        let why = || Family::ALL.into_iter().filter_map(|f| f.supports(problem, arch).err()).map(|e| e.to_string());
        return Err(usage(format!(
            "no kernel family computes {problem} on {arch}: {}",
            why().collect::<Vec<_>>().join("; ")
        )));
    };
    let family = family_named(name)?;
    family.supports(problem, arch)?;
    Ok(family)
}

/// The family of a name, or of its last part where that is one family's alone.
pub(crate) fn family_named(name: &str) -> Result<Family> {
    Family::by_name(name).ok_or_else(|| {
        let known: Vec<_> = Family::ALL.iter().map(|f| f.name()).collect();
        usage(format!("there is no kernel family `{name}`; the families are {}", known.join(", ")))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_multiply_and_absent_ones_follow_their_partner() {
        let args = CaseArgs {
            head_dim: vec![64, 128],
            mask: vec![Masks([Mask::Full, Mask::Causal].map(MaskChoice::Window).to_vec())],
            q_len: vec![Sizes(vec![7])],
            heads: vec![4],
            ..Default::default()
        };
        let cases = args.cases(&default_case()).unwrap();
        assert_eq!(cases.len(), 4);
        assert!(cases.iter().all(|c| c.shape.kv_len == 7 && c.shape.kv_heads == 4));
        assert!(args.single(&default_case()).is_err());
    }

    #[test]
    fn ragged_options_multiply_cases_by_pages_and_stores() {
        let list = |args: &RaggedArgs, dtype| {
            let cases = CaseArgs { dtype: vec![dtype], ..Default::default() }.cases(&default_case()).unwrap();
            args.apply(cases)
        };
        let named = |pages: &[&str], stores: &[&str]| RaggedArgs {
            pages: pages.iter().map(|s| s.parse().unwrap()).collect(),
            kv_dtype: stores.iter().map(|s| s.parse().unwrap()).collect(),
        };
        assert!(list(&named(&[], &[]), DType::F32).unwrap()[0].problem.kv.is_dense());
        let all = list(&named(&["packed", "16", "1"], &["same", "e4m3:token"]), DType::Bf16).unwrap();
        let names: Vec<String> = all.iter().map(|c| format!("{} {}", c.problem, c.sizes())).collect();
        assert_eq!(
            (all.len(), all[0].problem.kv, all[4].pages),
            (6, KvKind::RAGGED, PageClass::Tokens(16)),
            "{names:?}"
        );
        assert!(names[5].contains("raggede4m3token") && names[5].ends_with("pages of 1"), "{names:?}");
        let [only] = list(&named(&[], &["int8"]), DType::F16).unwrap().try_into().unwrap();
        assert_eq!(only.pages, USUAL_PAGE);
        assert!(list(&named(&[], &["e5m2"]), DType::F32).unwrap_err().to_string().contains("--dtype"));
        for bad in ["", "fp8", "same:token", "int8:head"] {
            assert!(bad.parse::<StoreChoice>().unwrap_err().to_string().contains("e4m3"), "{bad}");
        }
    }

    #[test]
    fn a_combination_that_cannot_be_computed_is_an_error() {
        let bad = CaseArgs { head_dim: vec![64, 264], ..Default::default() };
        assert!(bad.cases(&default_case()).unwrap_err().to_string().contains("head_dim_qk"));
        let bad = CaseArgs { kv_heads: vec![3], ..Default::default() };
        assert!(bad.cases(&default_case()).unwrap_err().to_string().contains("heads"));
    }
}
