//! What is computed, independent of sizes: the thing that a kernel is specialised to.

use crate::omitted::is_default;
use crate::score::{Declaration, Program, ProgramRef};
use crate::{Arch, DType, Error, KvElement, KvKind, MaskKind, Precision, Result, ScaleUnit, ScaleUnits, Shape};
use serde::{Deserialize, Serialize};
use std::fmt;

/// Smallest head dim that families on tensor cores take; rows that are shorter are padded for them.
pub const HEAD_DIM_MIN: u32 = 16;
/// Largest supported head dim.
pub const HEAD_DIM_MAX: u32 = 256;
/// Head dims of families on tensor cores are multiples of this, so that every row is made of whole 16-byte vectors of a
/// 16-bit dtype.
pub const HEAD_DIM_STEP: u32 = 8;

/// What is computed of attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Serialize, Deserialize)]
pub enum Op {
    /// O and optionally the log-sum-exp from Q, K, V. Decode is this, with a schedule that splits the keys.
    #[default]
    Forward,
    /// dQ, dK and dV from Q, K, V, O, dO and the log-sum-exp.
    Backward,
    /// The gradient of one float tensor or scalar that a score program reads, from the same.
    Gradient,
    /// New rows of K and V into a cache, rotated and quantised where asked for.
    Append,
    /// Low-precision operands with their scales, from 16-bit ones.
    Quantise,
    /// Rows of 16-bit elements copied into rows of another length and place, zeros behind the shorter ones.
    Pad,
}

impl Op {
    /// The word in names of problems and families.
    pub const fn name(self) -> &'static str {
        match self {
            Op::Forward => "forward",
            Op::Backward => "backward",
            Op::Gradient => "gradient",
            Op::Append => "append",
            Op::Quantise => "quantise",
            Op::Pad => "pad",
        }
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// One attention problem: operation, dtype, head dims, the sides of the mask that are bounded, and the score program.
///
/// Numbers of heads, lengths, strides, window lengths, the scalars and tensors of the program, the softmax scale and
/// whether the LSE is wanted are run-time values ([`crate::Shape`], [`crate::abi::ForwardArgs`]): they do not change
/// the generated code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(from = "Stored", into = "Stored")]
pub struct Problem {
    /// What is computed.
    pub op: Op,
    /// Element type of Q, K, V and, unless `output` says otherwise, O.
    pub dtype: DType,
    /// Length of a row of Q and K.
    pub head_dim_qk: u32,
    /// Length of a row of V and O.
    pub head_dim_v: u32,
    /// Bounded sides of the mask.
    pub mask: MaskKind,
    /// What else masks and changes the scores; `None` for nothing. Its mask holds beside `mask`.
    pub program: Option<ProgramRef>,
    /// Where K and V are found.
    pub kv: KvKind,
    /// Of [`Op::Gradient`], by what: the place of a tensor or scalar among the program's declarations.
    pub by: Option<u16>,
    /// How products of f32 are computed; `Exact` for other dtypes.
    pub precision: Precision,
    /// Element type of O where it is another, as beside `e4m3` it may be.
    pub output: Option<DType>,
    /// Whether a forward pass also writes what O lost when it was rounded to 16 bits, in bf16, and gradients read it:
    /// D = rowsum(dO O) is wrong by that rounding, which rows that attend mostly to one key multiply.
    pub residual: bool,
    /// Whether scores are dropped at random after the softmax, by [`crate::Dropout`]: forward passes and gradients of
    /// training.
    pub dropout: bool,
    /// What shares a scale in `e4m3` operands.
    pub scales: ScaleUnits,
}

/// A problem as it is stored: without what is at its default.
#[derive(Serialize, Deserialize)]
#[serde(rename = "Problem", deny_unknown_fields)]
struct Stored {
    #[serde(default, skip_serializing_if = "is_default")]
    op: Op,
    dtype: DType,
    head_dim_qk: u32,
    /// That of Q and K.
    #[serde(default, skip_serializing_if = "is_default")]
    head_dim_v: Option<u32>,
    #[serde(default, skip_serializing_if = "is_default")]
    mask: MaskKind,
    #[serde(default, skip_serializing_if = "is_default")]
    program: Option<ProgramRef>,
    #[serde(default, skip_serializing_if = "is_default")]
    kv: KvKind,
    #[serde(default, skip_serializing_if = "is_default")]
    by: Option<u16>,
    #[serde(default, skip_serializing_if = "is_default")]
    precision: Precision,
    #[serde(default, skip_serializing_if = "is_default")]
    output: Option<DType>,
    #[serde(default, skip_serializing_if = "is_default")]
    residual: bool,
    #[serde(default, skip_serializing_if = "is_default")]
    dropout: bool,
    #[serde(default, skip_serializing_if = "is_default")]
    scales: ScaleUnits,
}

impl From<Problem> for Stored {
    fn from(problem: Problem) -> Self {
        let Problem { op, dtype, head_dim_qk, head_dim_v, mask, program, kv, by, precision, output, .. } = problem;
        let Problem { residual, dropout, scales, .. } = problem;
        let head_dim_v = (head_dim_v != head_dim_qk).then_some(head_dim_v);
        Self { op, dtype, head_dim_qk, head_dim_v, mask, program, kv, by, precision, output, residual, dropout, scales }
    }
}

impl From<Stored> for Problem {
    fn from(stored: Stored) -> Self {
        let Stored { op, dtype, head_dim_qk, head_dim_v, mask, program, kv, by, precision, output, .. } = stored;
        let Stored { residual, dropout, scales, .. } = stored;
        let head_dim_v = head_dim_v.unwrap_or(head_dim_qk);
        Self { op, dtype, head_dim_qk, head_dim_v, mask, program, kv, by, precision, output, residual, dropout, scales }
    }
}

impl Problem {
    /// A forward problem with equal head dims, checked.
    pub fn forward(dtype: DType, head_dim: u32, mask: MaskKind) -> Result<Self> {
        Self::forward_qk_v(dtype, head_dim, head_dim, mask)
    }

    /// A forward problem whose V rows differ in length from the Q and K rows, checked.
    pub fn forward_qk_v(dtype: DType, head_dim_qk: u32, head_dim_v: u32, mask: MaskKind) -> Result<Self> {
        let (op, kv, precision) = (Op::Forward, KvKind::Dense, Precision::Exact);
        // Half as many bytes as O would take in f32, and no range that scales of V could leave.
        let output = (dtype == DType::E4m3).then_some(DType::Bf16);
        let (program, by, residual, dropout, scales) = (None, None, false, false, ScaleUnits::default());
        let p = Self {
            op,
            dtype,
            head_dim_qk,
            head_dim_v,
            mask,
            program,
            kv,
            by,
            precision,
            output,
            residual,
            dropout,
            scales,
        };
        p.validate()?;
        Ok(p)
    }

    /// The element type of O.
    pub fn output_dtype(&self) -> DType {
        self.output.unwrap_or(self.dtype)
    }

    /// Bytes of an element of Q, K and V, and of one of O.
    pub fn element_bytes(&self) -> [usize; 2] {
        [self.dtype, self.output_dtype()].map(DType::bytes)
    }

    /// The same problem with O of an element type.
    pub fn with_output(self, dtype: DType) -> Self {
        Self { output: (dtype != self.dtype).then_some(dtype), ..self }
    }

    /// The same problem with or without a residual of O.
    pub fn with_residual(self, residual: bool) -> Self {
        Self { residual, ..self }
    }

    /// The same problem with or without dropout.
    pub fn with_dropout(self, dropout: bool) -> Self {
        Self { dropout, ..self }
    }

    /// The same problem with scales of other parts of its operands.
    pub fn with_scales(self, scales: ScaleUnits) -> Self {
        Self { scales, ..self }
    }

    /// The same problem for K and V that are found another way.
    pub fn with_kv(self, kv: KvKind) -> Self {
        Self { kv, ..self }
    }

    /// The same problem with a score program; one that does nothing is left out.
    pub fn with_program(self, program: Program) -> Self {
        Self { program: (!program.is_plain()).then(|| ProgramRef::new(program)), ..self }
    }

    /// The same computation with as much of the program's mask in `mask` as fits there at these sizes, whose own mask
    /// is then `Shape::mask`: kernels know windows without a program. Of a ragged batch, whose sizes are bounds, what
    /// fits there at all lengths.
    pub fn with_windows(self, shape: Shape) -> (Self, Shape) {
        let mask_of = |p: ProgramRef| match self.kv {
            KvKind::Dense => p.window()?.at(&shape),
            KvKind::Ragged(_) => p.window()?.at_all_lengths(shape.mask),
        };
        let found = self.program.and_then(|p| Some((p, mask_of(p)?)));
        let Some((program, mask)) = found else { return (self, shape) };
        (Self { mask: mask.kind(), program: program.unmasked(), ..self }, Shape { mask, ..shape })
    }

    /// Whether the score program has a mask, beside the sides of `mask`.
    pub fn masks_by_program(&self) -> bool {
        self.program.is_some_and(|p| p.mask().is_some())
    }

    /// Whether scores may be far from zero, as float masks make them: what gradients keep of a query is more then.
    pub(crate) fn reaches_far(&self) -> bool {
        self.program.is_some_and(|p| p.score_facts().far)
    }

    /// Whether there are schedules to choose between, by records of the tuner: of forward passes, and of gradients of
    /// dense tensors. Those with dropout take the default schedules.
    pub fn is_tuned(&self) -> bool {
        !self.dropout && (self.op == Op::Forward || self.op == Op::Backward && self.kv.is_dense())
    }

    /// Whether nothing is to be written at these sizes: a backward pass without a query still writes zeros for every
    /// key.
    pub fn has_no_output(&self, shape: &Shape) -> bool {
        match self.op {
            // Of Q, and of K and V.
            Op::Backward | Op::Quantise => {
                let none = |heads: u32, rows: u32| heads == 0 || rows == 0;
                shape.batch == 0 || none(shape.heads, shape.q_len) && none(shape.kv_heads, shape.kv_len)
            }
            // The tensor may have elements that nobody reads: zeros are written.
            Op::Gradient => false,
            _ => shape.is_empty(),
        }
    }

    /// The gradients of the same problem, which are exact ones.
    pub fn backward(self) -> Self {
        Self { op: Op::Backward, precision: Precision::Exact, ..self }
    }

    /// The gradient of what the score program declares under a name; `None` when it reads nothing of that name.
    pub fn gradient_by(self, name: &str) -> Option<Self> {
        let at = self.program?.declarations().iter().position(|d| d.name == name)?;
        Some(Self { op: Op::Gradient, by: u16::try_from(at).ok(), precision: Precision::Exact, ..self })
    }

    /// By what a problem of [`Op::Gradient`] derives.
    pub fn derives_by(&self) -> Option<&'static Declaration> {
        self.program?.kept().declarations().get(usize::from(self.by?))
    }

    /// Whether any key may be masked, by either.
    pub fn masks(&self) -> bool {
        self.mask.any() || self.masks_by_program()
    }

    /// Checks the head dims against what plain families and those of the CPU support, and the precision against the
    /// dtype.
    pub fn validate(&self) -> Result<()> {
        if !self.admits(self.precision) {
            let limit = "forward passes of f32 over dense tensors alone have another than `exact`";
            return Err(Error::unsupported("precision", self.precision, limit, "leave the precision at `exact`"));
        }
        self.check_output()?;
        self.check_residual()?;
        self.check_dropout()?;
        self.check_scales()?;
        for (field, d) in [("head_dim_qk", self.head_dim_qk), ("head_dim_v", self.head_dim_v)] {
            if !(1..=HEAD_DIM_MAX).contains(&d) {
                let limit = format!("head dims are numbers from 1 to {HEAD_DIM_MAX}");
                return Err(Error::unsupported(field, d, limit, "split the heads"));
            }
        }
        Ok(())
    }

    /// Checks the element type of O, and that `e4m3` is asked for where it is computed.
    fn check_output(&self) -> Result<()> {
        if self.dtype != DType::E4m3 {
            return match self.output {
                None => Ok(()),
                Some(output) => {
                    let limit = format!("O of {} inputs is {}", self.dtype, self.dtype);
                    Err(Error::unsupported("output", output, limit, "give an output of that dtype, and convert it"))
                }
            };
        }
        if self.op != Op::Forward {
            let limit = "e4m3 is computed in forward passes";
            return Err(Error::unsupported("dtype", self.dtype, limit, "convert Q, K and V to bf16 or f16"));
        }
        if self.kv.store().is_some_and(|store| store.element == KvElement::Same) {
            let limit = "the store of a ragged batch with e4m3 queries says its own elements: e4m3, e5m2 or int8";
            return Err(Error::unsupported("kv", self.kv, limit, "name the elements of K and V"));
        }
        Ok(())
    }

    /// Checks that scales finer than a head's are asked for of `e4m3` alone, and of parts that kernels have them for.
    fn check_scales(&self) -> Result<()> {
        let ScaleUnits { q, k, v } = self.scales;
        if self.scales == ScaleUnits::default() {
            return Ok(());
        }
        if self.dtype != DType::E4m3 || !self.kv.is_dense() {
            let limit = "scales belong to e4m3 operands of forward passes over dense tensors";
            return Err(Error::unsupported("scales", self.scales, limit, "leave the scales out"));
        }
        for (field, unit) in [("q_descale", q), ("k_descale", k)] {
            if unit == ScaleUnit::Channel {
                let limit = "Q and K have scales of heads, of rows, or of blocks of rows";
                let remedy = "multiply the columns of Q by K's scales of channels before Q is quantised";
                return Err(Error::unsupported(field, unit.name(), limit, remedy));
            }
        }
        if v == ScaleUnit::Rows {
            // They would have to be multiplied into P before it is rounded, whose range they would leave.
            let limit = "V has scales of heads or of channels";
            return Err(Error::unsupported("v_descale", v.name(), limit, "quantise V by channel or by head"));
        }
        Ok(())
    }

    /// Checks that a residual is asked for where O is rounded to 16 bits, and where it is written and read.
    fn check_residual(&self) -> Result<()> {
        if !self.residual {
            return Ok(());
        }
        let refused = |value: &dyn fmt::Display, limit: &str, remedy: &str| {
            Err(Error::unsupported("residual", format!("of {value}"), limit, remedy))
        };
        match self.op {
            Op::Forward | Op::Backward | Op::Gradient if !matches!(self.dtype, DType::F16 | DType::Bf16) => {
                let limit = "a residual is what O of f16 or bf16 tensors lost by rounding";
                refused(&self.dtype, limit, "leave the residual out: f32 loses nothing; convert e4m3 to bf16 or f16")
            }
            Op::Forward if !self.kv.is_dense() => {
                let limit = "forward passes over dense tensors write a residual";
                refused(&self.kv, limit, "leave the residual out, or call each sequence by itself")
            }
            Op::Forward | Op::Backward | Op::Gradient => Ok(()),
            _ => refused(&self.op, "forward passes write a residual, and gradients read it", "leave it out"),
        }
    }

    /// Checks that scores are dropped where kernels do so.
    fn check_dropout(&self) -> Result<()> {
        if !self.dropout {
            return Ok(());
        }
        let refused = |value: &dyn fmt::Display, limit: &str, remedy: &str| {
            Err(Error::unsupported("dropout", format!("of {value}"), limit, remedy))
        };
        match self.op {
            _ if self.dtype == DType::E4m3 => {
                let limit = "scores of f16, bf16 and f32 tensors are dropped";
                refused(&self.dtype, limit, "convert Q, K and V to bf16 or f16, or pass a dropout of 0")
            }
            Op::Forward if self.kv.store().is_some_and(|store| store != Default::default()) => {
                let limit = "forward passes over dense tensors and packs in the dtype of Q drop scores";
                refused(&self.kv, limit, "pass a dropout of 0: decoding and serving drop nothing")
            }
            Op::Gradient => {
                let limit = "gradients of what a score program reads know no dropout";
                refused(&self.op, limit, "pass a dropout of 0, or ask for dQ, dK and dV alone")
            }
            Op::Forward | Op::Backward => Ok(()),
            _ => refused(&self.op, "forward passes drop scores, and gradients know which", "leave it out"),
        }
    }

    /// Checks that rows are whole 16-byte vectors, as families on tensor cores read them.
    pub(crate) fn check_vectors(&self, family: &'static str) -> Result<()> {
        for (field, d) in [("head_dim_qk", self.head_dim_qk), ("head_dim_v", self.head_dim_v)] {
            if padded_head_dim(d) != d {
                let limit =
                    format!("{family} takes multiples of {HEAD_DIM_STEP} from {HEAD_DIM_MIN} to {HEAD_DIM_MAX}");
                return Err(Error::unsupported(field, d, limit, "pad the rows with zeros to the next such length"));
            }
        }
        Ok(())
    }

    /// The problem that computes the same over rows that are padded with zeros: one whose head dims families on tensor
    /// cores take. The softmax scale stays that of this one. Rows of e4m3 are not copied: elements of 16 and 32 bits
    /// are.
    pub fn padded(self) -> Self {
        if self.dtype == DType::E4m3 {
            return self;
        }
        let [head_dim_qk, head_dim_v] = [self.head_dim_qk, self.head_dim_v].map(padded_head_dim);
        Self { head_dim_qk, head_dim_v, ..self }
    }

    /// Whether the kernels of an arch for this problem are those on tensor cores, which take rows of whole vectors.
    pub fn is_on_tensor_cores(&self, arch: Arch) -> bool {
        let by_dtype = self.dtype != DType::F32 || self.precision != Precision::Exact;
        matches!(arch, Arch::Sm(sm) if sm.number >= 80) && by_dtype
    }

    /// Whether a call of this problem on an arch pads its rows: dense tensors and packs whose rows are no whole
    /// vectors, on a GPU with tensor cores for them. Stores are not padded: a call would copy all of them.
    pub fn pads(&self, arch: Arch) -> bool {
        let fast = self.is_on_tensor_cores(arch);
        // Copies know of no residual: such rows go to the kernels that take any.
        let copied = matches!(self.op, Op::Forward | Op::Backward) && self.kv.is_dense() && !self.residual;
        fast && copied && self.padded() != *self
    }

    /// The softmax scale that applies when the caller states none: `1 / sqrt(head_dim_qk)`.
    pub fn default_scale(&self) -> f32 {
        1.0 / (self.head_dim_qk as f32).sqrt()
    }
}

/// The least length of rows that are whole vectors and hold rows of this one.
pub fn padded_head_dim(d: u32) -> u32 {
    d.next_multiple_of(HEAD_DIM_STEP).max(HEAD_DIM_MIN)
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.op, self.dtype)?;
        if let Some(output) = self.output {
            write!(f, "-{output}")?;
        }
        if self.precision != Precision::Exact {
            write!(f, "-{}", self.precision)?;
        }
        if self.residual {
            f.write_str("-residual")?;
        }
        if self.dropout {
            f.write_str("-dropout")?;
        }
        if self.scales != ScaleUnits::default() {
            write!(f, "-{}", self.scales)?;
        }
        write!(f, "-d{}", self.head_dim_qk)?;
        if self.head_dim_v != self.head_dim_qk {
            write!(f, "v{}", self.head_dim_v)?;
        }
        write!(f, "-{}", self.mask)?;
        if !self.kv.is_dense() {
            write!(f, "-{}", self.kv)?;
        }
        if let Some(program) = self.program {
            write!(f, "-s{}", program.name())?;
        }
        match self.derives_by() {
            Some(by) => write!(f, "-by-{}", by.name),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::KvStore;

    #[test]
    fn head_dims_outside_the_range_name_the_field_and_the_remedy() {
        for d in [0, 257, 264] {
            let e = Problem::forward(DType::F16, d, MaskKind::FULL).unwrap_err().to_string();
            assert!(e.contains("head_dim_qk") && e.contains("split the heads"), "{e}");
        }
        assert!(Problem::forward_qk_v(DType::F16, 192, 128, MaskKind::FULL).is_ok());
    }

    #[test]
    fn rows_are_padded_to_whole_vectors_for_tensor_cores_alone() {
        let of = |dtype, d, v| Problem::forward_qk_v(dtype, d, v, MaskKind::FULL).unwrap();
        let (sm90, sm75, cpu) = ("sm_90a".parse().unwrap(), "sm_75".parse().unwrap(), "cpu-avx512".parse().unwrap());
        for (d, padded) in [(1, 16), (15, 16), (16, 16), (17, 24), (59, 64), (111, 112), (250, 256), (256, 256)] {
            let problem = of(DType::Bf16, d, 128);
            assert_eq!((problem.padded().head_dim_qk, problem.padded().head_dim_v), (padded, 128));
            assert_eq!(problem.check_vectors("a family").is_ok(), d == padded);
            assert_eq!(problem.pads(sm90), d != padded);
            assert_eq!(problem.backward().pads(sm90), d != padded);
            for other in [problem.with_kv(KvKind::RAGGED), of(DType::F32, d, 128)] {
                assert!(!other.pads(sm90), "{other}");
            }
            assert!(!problem.pads(sm75) && !problem.pads(cpu));
        }
        assert!(of(DType::F16, 64, 59).pads(sm90));
    }

    #[test]
    fn e4m3_is_of_forward_passes_and_its_output_is_of_any_dtype() {
        let e4m3 = Problem::forward(DType::E4m3, 128, MaskKind::CAUSAL).unwrap();
        assert_eq!((e4m3.output_dtype(), e4m3.to_string().as_str()), (DType::Bf16, "forward-e4m3-bf16-d128-causal"));
        assert_eq!(e4m3.with_output(DType::E4m3).to_string(), "forward-e4m3-d128-causal");
        for output in DType::OUTPUTS_OF_E4M3 {
            let problem = e4m3.with_output(output);
            problem.validate().unwrap();
            assert_eq!(problem.output_dtype(), output);
            assert_eq!(serde_json::from_str::<Problem>(&serde_json::to_string(&problem).unwrap()).unwrap(), problem);
        }
        let program = Program::parse("score = score * 2.0;").unwrap();
        e4m3.with_program(program).validate().unwrap();
        let store = |element| KvKind::Ragged(KvStore { element, ..KvStore::default() });
        for element in [KvElement::E4m3, KvElement::E5m2, KvElement::Int8] {
            e4m3.with_kv(store(element)).validate().unwrap();
        }
        let finer = ScaleUnits { q: ScaleUnit::Rows, ..ScaleUnits::default() };
        let bf16 = Problem::forward(DType::Bf16, 128, MaskKind::CAUSAL).unwrap();
        for (problem, field) in [
            (bf16.with_output(DType::F32), "output"),
            (e4m3.backward(), "dtype"),
            // A store says its own elements.
            (e4m3.with_kv(KvKind::RAGGED), "kv"),
            (e4m3.with_kv(store(KvElement::E4m3)).with_scales(finer), "scales"),
            (e4m3.with_kv(store(KvElement::E4m3)).with_dropout(true), "dropout"),
        ] {
            let e = problem.validate().unwrap_err().to_string();
            assert!(e.contains(field), "{problem}: {e}");
        }
        assert!(!serde_json::to_string(&bf16).unwrap().contains("output"));
        assert!(!Problem { head_dim_qk: 59, ..e4m3 }.pads("sm_90a".parse().unwrap()));
    }

    #[test]
    fn finer_scales_are_of_e4m3_and_of_parts_that_kernels_have_them_for() {
        let e4m3 = Problem::forward(DType::E4m3, 64, MaskKind::FULL).unwrap();
        let mut names: Vec<String> = ScaleUnits::ALL
            .into_iter()
            .map(|scales| {
                let problem = e4m3.with_scales(scales);
                problem.validate().unwrap();
                let stored = serde_json::to_string(&problem).unwrap();
                assert_eq!(stored.contains("scales"), scales != ScaleUnits::default());
                assert_eq!(serde_json::from_str::<Problem>(&stored).unwrap(), problem);
                problem.to_string()
            })
            .collect();
        assert_eq!(names[3], "forward-e4m3-bf16-q_rows-k_rows-v_channel-d64-full");
        names.sort();
        names.dedup();
        assert_eq!(names.len(), 8);
        let of = |q, k, v| ScaleUnits { q, k, v };
        use ScaleUnit::{Channel, Head, Rows};
        for (scales, field) in [
            (of(Channel, Head, Head), "q_descale"),
            (of(Head, Channel, Head), "k_descale"),
            (of(Head, Head, Rows), "v_descale"),
        ] {
            let e = e4m3.with_scales(scales).validate().unwrap_err().to_string();
            assert!(e.contains(field) && e.contains("quantise"), "{e}");
        }
        let bf16 = Problem::forward(DType::Bf16, 64, MaskKind::FULL).unwrap().with_scales(of(Rows, Rows, Head));
        assert!(bf16.validate().unwrap_err().to_string().contains("leave the scales out"));
    }

    #[test]
    fn display_is_unique_per_field() {
        let p = |d, v, m| Problem::forward_qk_v(DType::Bf16, d, v, m).unwrap().to_string();
        assert_eq!(p(128, 128, MaskKind::CAUSAL), "forward-bf16-d128-causal");
        assert_eq!(p(192, 128, MaskKind::FULL), "forward-bf16-d192v128-full");
        let ragged = Problem::forward(DType::F16, 64, MaskKind::FULL).unwrap().with_kv(KvKind::RAGGED);
        assert_eq!(ragged.to_string(), "forward-f16-d64-full-ragged");
        let with = |text: &str| {
            let problem = Problem::forward(DType::Bf16, 64, MaskKind::CAUSAL).unwrap();
            problem.with_program(Program::parse(text).unwrap()).to_string()
        };
        assert_eq!(with("score = score;"), "forward-bf16-d64-causal");
        assert!(with("score = score * 2.0;").starts_with("forward-bf16-d64-causal-s"));
        assert_ne!(with("score = score * 2.0;"), with("score = score * 3.0;"));
    }
}
