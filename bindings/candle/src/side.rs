//! What masks and changes the scores beside a window: a score program with the numbers and tensors that it reads.

use crate::memory::{Operand, Place, Source};
use crate::{Error, error::Result};
use candle_core::{DType, Tensor};
use flashtune::score::Axis;
use flashtune::{Program, ProgramRef, Scalar, SideInputs};
use std::collections::HashMap;
use std::fmt::Write;
use std::sync::{LazyLock, PoisonError, RwLock};

/// A score program and what it reads.
#[derive(Clone, Default)]
pub(crate) struct Side {
    pub program: Option<ProgramRef>,
    pub scalars: Vec<(String, Scalar)>,
    pub tensors: Vec<(String, Tensor)>,
}

/// The programs of this process by their texts, so that a text is read once.
static PROGRAMS: LazyLock<RwLock<HashMap<String, ProgramRef>>> = LazyLock::new(RwLock::default);

fn program(text: &str) -> Result<ProgramRef> {
    if let Some(known) = PROGRAMS.read().unwrap_or_else(PoisonError::into_inner).get(text) {
        return Ok(*known);
    }
    let parsed = Program::parse(text).map_err(|e| flashtune::Error::from(e))?;
    let program = ProgramRef::new(parsed);
    PROGRAMS.write().unwrap_or_else(PoisonError::into_inner).insert(text.to_owned(), program);
    Ok(program)
}

/// Ranges that `mm_prefix_ranges` may have for a sequence: each is written out in the program.
const MOST_RANGES: usize = 16;

/// What the functions of candle-flash-attn say of the scores.
#[derive(Default)]
pub(crate) struct Changes<'a> {
    pub softcap: Option<f32>,
    /// `[heads]` or `[batch, heads]`.
    pub slopes: Option<&'a Tensor>,
    /// `[batch, ranges, 2]`, and the reach of the window to the left and to the right: keys of a range see each other
    /// whatever the window says.
    pub ranges: Option<(&'a Tensor, [u32; 2])>,
}

impl Side {
    /// The cap comes first, then the slopes, as in flash-attention.
    pub fn of(changes: &Changes<'_>) -> Result<Self> {
        let mut side = Self::default();
        let (mut declared, mut score) = (String::new(), "score".to_owned());
        if let Some(cap) = changes.softcap.filter(|&cap| cap != 0.0) {
            if !(cap > 0.0 && cap.is_finite()) {
                return Err(Error::argument("softcap", cap, "a cap is a positive number", "pass 0 for none"));
            }
            // As the built-in `soft_cap`: one kernel for all caps up to 50, with a bound that it knows.
            declared += "cap: float usually in 0..50; ";
            score = "cap * tanh(score * (1.0 / cap))".to_owned();
            side.scalars.push(("cap".to_owned(), Scalar::Float(cap)));
        }
        if let Some(slopes) = changes.slopes {
            if slopes.dtype() != DType::F32 {
                let expected = "slopes are f32";
                return Err(Error::tensor("alibi_slopes", "dtype", slopes.dtype(), expected, "convert them"));
            }
            let (axes, at) = match slopes.rank() {
                1 => ("heads", "h"),
                2 => ("batch, heads", "b, h"),
                _ => return Err(crate::memory::wrong_rank("alibi_slopes", slopes.dims(), "[heads] or [batch, heads]")),
            };
            let _ = write!(declared, "slope: f32[{axes}]; ");
            let _ = write!(score, " - slope[{at}] * abs(q + kv_len - q_len - kv)");
            side.tensors.push(("slope".to_owned(), slopes.clone()));
        }
        let mut text = declared;
        if let Some((ranges, reach)) = changes.ranges {
            text += &side.add_ranges(ranges, reach)?;
        }
        if score != "score" {
            let _ = write!(text, "score = {score};");
        }
        if !text.is_empty() {
            side.program = Some(program(&text)?);
        }
        Ok(side)
    }

    fn add_ranges(&mut self, ranges: &Tensor, [left, right]: [u32; 2]) -> Result<String> {
        const NAME: &str = "mm_prefix_ranges";
        if !matches!(ranges.dtype(), DType::I32 | DType::U32) {
            return Err(Error::tensor(NAME, "dtype", ranges.dtype(), "ranges are i32", "convert them"));
        }
        let &[_, count, 2] = ranges.dims() else {
            return Err(crate::memory::wrong_rank(NAME, ranges.dims(), "[batch, ranges, 2]"));
        };
        if count > MOST_RANGES {
            let expected = format!("a sequence has at most {MOST_RANGES}");
            let remedy = "pass as many as the longest list of this batch has";
            return Err(Error::argument("ranges of mm_prefix_ranges", count, expected, remedy));
        }
        self.scalars.push(("left".to_owned(), Scalar::Int(left.into())));
        self.scalars.push(("right".to_owned(), Scalar::Int(right.into())));
        self.tensors.push(("ranges".to_owned(), ranges.clone()));
        let mut text = "left: int in 0..1073741824; right: int in 0..1073741824; ranges: i32[batch, *, 2]; \
                        at = q + kv_len - q_len; mask = (kv <= at + right and at - kv <= left)"
            .to_owned();
        for i in 0..count {
            let inside = |x: &str| format!("ranges[b, {i}, 0] <= {x} and {x} < ranges[b, {i}, 1]");
            let _ = write!(text, " or ({} and {})", inside("at"), inside("kv"));
        }
        text += "; ";
        Ok(text)
    }

    /// Gradients of what a program reads are not computed: better none than a silent zero.
    pub fn refuse_gradients(&self) -> Result<()> {
        match self.tensors.iter().find(|(_, tensor)| tensor.track_op()) {
            None => Ok(()),
            Some((name, _)) => {
                let remedy = "detach it: gradients are those of q, k and v";
                Err(Error::Gradient { of: format!("by `{name}`, which the scores are changed by"), remedy })
            }
        }
    }

    /// The same for one sequence of a batch.
    pub fn of_sequence(&self, i: usize) -> candle_core::Result<Self> {
        let Some(program) = self.program else { return Ok(self.clone()) };
        let mut side = self.clone();
        for (name, tensor) in &mut side.tensors {
            let declared = program.declarations().iter().find(|d| d.name == *name);
            let axes = declared.and_then(|d| d.axes.as_deref()).unwrap_or_default();
            for (dim, _) in axes.iter().enumerate().filter(|(_, axis)| **axis == Axis::Batch) {
                if tensor.dim(dim)? > 1 {
                    *tensor = tensor.narrow(dim, i, 1)?;
                }
            }
        }
        Ok(side)
    }

    /// Calls `f` with everything as a launch takes it.
    pub fn with<R>(&self, place: &Place, f: impl FnOnce(&SideInputs<'_>) -> Result<R>) -> Result<R> {
        let locked: Vec<_> = self.tensors.iter().map(|(_, tensor)| tensor.storage_and_layout()).collect();
        let mut operands = Vec::with_capacity(locked.len());
        for ((name, _), (storage, layout)) in self.tensors.iter().zip(&locked) {
            operands.push(Operand::read(name, place, Source::of(storage)?, layout)?);
        }
        let mut tensors = Vec::with_capacity(operands.len());
        for ((name, _), operand) in self.tensors.iter().zip(&operands) {
            tensors.push((name.as_str(), operand.side(name)?));
        }
        let scalars: Vec<_> = self.scalars.iter().map(|(name, value)| (name.as_str(), *value)).collect();
        f(&SideInputs { scalars: &scalars, tensors: &tensors })
    }
}
