//! Attention with any score program.

use crate::dense::{self, Settings};
use crate::side::Side;
use crate::windows;
use candle_core::{Tensor, WithDType};
use flashtune::{Explanation, Mask, Program, ProgramRef, Scalar};

/// What a score program reads under a name.
#[derive(Debug, Clone)]
pub enum Value {
    /// A tensor on the device of q, of any strides.
    Tensor(Tensor),
    /// A whole number.
    Int(i64),
    /// A float.
    Float(f32),
}

impl From<&Tensor> for Value {
    fn from(tensor: &Tensor) -> Self {
        Value::Tensor(tensor.clone())
    }
}
impl From<i64> for Value {
    fn from(x: i64) -> Self {
        Value::Int(x)
    }
}
impl From<f32> for Value {
    fn from(x: f32) -> Self {
        Value::Float(x)
    }
}

/// A call to be made: mask, scale, score program, and what it reads.
///
/// ```no_run
/// use flashtune_candle::{Attention, Program};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let x = candle_core::Tensor::zeros((1, 16, 4, 64), candle_core::DType::F32, &candle_core::Device::Cpu)?;
/// # let (q, k, v) = (x.clone(), x.clone(), x);
/// # let slopes = candle_core::Tensor::zeros(4, candle_core::DType::F32, &candle_core::Device::Cpu)?;
/// let program = Program::parse("slope: f32[heads]; n: int; score = score + slope[h] * (kv - q); mask = q - kv < n;")?;
/// let call = Attention::new().causal().program(&program).value("slope", &slopes).value("n", 1024);
/// let out = call.forward(&q, &k, &v)?; // [batch, rows, heads, dim], as q, k and v
/// # let _ = out;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
#[must_use]
pub struct Attention {
    settings: Settings,
}

impl Default for Attention {
    fn default() -> Self {
        Self::new()
    }
}

impl Attention {
    /// Every query sees every key; the scale is `1 / sqrt(dim)`.
    pub fn new() -> Self {
        Self { settings: Settings { mask: Mask::Full, scale: None, side: Side::default() } }
    }

    /// The factor of the scores.
    pub fn scale(mut self, scale: f32) -> Self {
        self.settings.scale = Some(scale);
        self
    }

    /// A query sees the keys up to its own position; the last query stands at the last key.
    pub fn causal(mut self) -> Self {
        self.settings.mask = Mask::Causal;
        self
    }

    /// A query sees so many keys before its own position and behind it; all where `None`.
    pub fn window(mut self, left: Option<usize>, right: Option<usize>) -> Self {
        self.settings.mask = windows::mask(left, right, usize::MAX);
        self
    }

    /// What else masks and changes the scores; its mask holds beside the window.
    pub fn program(mut self, program: &Program) -> Self {
        self.settings.side.program = Some(ProgramRef::new(program.clone()));
        self
    }

    /// What the program reads under a name.
    pub fn value(mut self, name: &str, value: impl Into<Value>) -> Self {
        match value.into() {
            Value::Tensor(tensor) => self.settings.side.tensors.push((name.to_owned(), tensor)),
            Value::Int(x) => self.settings.side.scalars.push((name.to_owned(), Scalar::Int(x))),
            Value::Float(x) => self.settings.side.scalars.push((name.to_owned(), Scalar::Float(x))),
        }
        self
    }

    /// O, `[batch, q_len, heads, dim_v]`, of q `[batch, q_len, heads, dim]`, k `[batch, kv_len, kv_heads, dim]` and v
    /// `[batch, kv_len, kv_heads, dim_v]`: f16, bf16 or f32, with any strides, on the CPU or on CUDA. `heads` is a
    /// multiple of `kv_heads`. Gradients of q, k and v go through it.
    ///
    /// # Errors
    /// [`crate::Error`] inside of candle's, which [`crate::error_of`] finds: tensors that do not fit, what the program
    /// reads and is not given, head dims above 256, and what the engine says.
    pub fn forward(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> candle_core::Result<Tensor> {
        Ok(dense::forward([q, k, v], self.settings.clone(), false)?.0)
    }

    /// O and the log-sum-exp of the scores, natural, f32 `[batch, heads, q_len]`, which gradients do not go through.
    ///
    /// # Errors
    /// As [`Attention::forward`].
    pub fn forward_with_lse(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> candle_core::Result<(Tensor, Tensor)> {
        windows::both(dense::forward([q, k, v], self.settings.clone(), true)?)
    }

    /// Which kernel computes such a call, from where it comes, and why no other does; nothing where O has no element.
    /// Reads no element of the tensors; compiles what is not there yet.
    ///
    /// # Errors
    /// As [`Attention::forward`].
    pub fn explain(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> candle_core::Result<Option<Explanation>> {
        dense::explain([q, k, v], self.settings.clone())
    }
}

/// [`Attention::forward`] of a program with the tensors that it reads by name, with the scale `1 / sqrt(dim)`. A tensor
/// without axes is a number.
///
/// # Errors
/// As [`Attention::forward`].
pub fn attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    program: &Program,
    tensors: &[(&str, &Tensor)],
) -> candle_core::Result<Tensor> {
    let mut call = Attention::new().program(program);
    for (name, tensor) in tensors {
        call = call.value(name, of_tensor(tensor)?);
    }
    call.forward(q, k, v)
}

/// A tensor, or the number that it is.
fn of_tensor(tensor: &Tensor) -> candle_core::Result<Value> {
    if tensor.rank() > 0 {
        return Ok(tensor.into());
    }
    if tensor.dtype().is_int() {
        return Ok(Value::Int(tensor.to_dtype(i64::DTYPE)?.to_scalar()?));
    }
    Ok(Value::Float(tensor.to_dtype(f32::DTYPE)?.to_scalar()?))
}
