//! Tensors as the host hands them over, and their way into kernel arguments.
//!
//! Everything that a kernel takes for granted (matching sizes, a contiguous last dim, 16-byte vectors) is checked here,
//! once, with an error that names the tensor.

use crate::{Error, Result};
use bytemuck::Zeroable;
use flashtune_codegen::abi::ForwardArgs;
use flashtune_codegen::score::ProgramRef;
use flashtune_codegen::{DType, Mask, Problem, Shape};

/// A tensor on a device: where it is and how it is laid out. Owns nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorView {
    /// Device address of element `[0, 0, 0, 0]`.
    pub address: u64,
    /// Element type.
    pub dtype: DType,
    /// Batch, heads, rows, elements of a row.
    pub shape: [u64; 4],
    /// Distance in elements between neighbours along each dimension of `shape`.
    pub strides: [i64; 4],
}

impl TensorView {
    /// A contiguous `[batch, heads, rows, dim]` tensor.
    pub fn bhsd(address: u64, dtype: DType, shape: [u64; 4]) -> Self {
        let [_, h, s, d] = shape.map(to_stride);
        let strides = [h.saturating_mul(s).saturating_mul(d), s.saturating_mul(d), d, 1];
        Self { address, dtype, shape, strides }
    }

    /// A contiguous `[batch, rows, heads, dim]` tensor. `shape` is in memory order; the view's is batch, heads, rows,
    /// dim as everywhere.
    pub fn bshd(address: u64, dtype: DType, shape: [u64; 4]) -> Self {
        let [b, s, h, d] = shape;
        let [_, sh, hh, dh] = shape.map(to_stride);
        let strides = [sh.saturating_mul(hh).saturating_mul(dh), dh, hh.saturating_mul(dh), 1];
        Self { address, dtype, shape: [b, h, s, d], strides }
    }

    /// A contiguous fp32 `[batch, heads, rows]` tensor, as the log-sum-exp is: a view whose last dim is 1.
    pub fn rows(address: u64, [b, h, s]: [u64; 3]) -> Self {
        Self::bhsd(address, DType::F32, [b, h, s, 1])
    }

    /// The same tensor with other strides (in elements: batch, head, row, element).
    pub fn with_strides(self, strides: [i64; 4]) -> Self {
        Self { strides, ..self }
    }

    /// Whether the tensor has no element.
    pub fn is_empty(&self) -> bool {
        self.shape.contains(&0)
    }

    /// Bytes from the first element's start to the last element's end, or `None` when that exceeds 64 bits or a stride
    /// is negative.
    pub fn extent_bytes(&self) -> Option<u64> {
        if self.is_empty() {
            return Some(0);
        }
        let mut last = 0u64;
        for (n, stride) in self.shape.iter().zip(self.strides).filter(|(n, _)| **n > 1) {
            last = last.checked_add((n - 1).checked_mul(u64::try_from(stride).ok()?)?)?;
        }
        last.checked_add(1)?.checked_mul(self.dtype.bytes() as u64)
    }
}

fn to_stride(n: u64) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}

/// The tensors of one forward call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ForwardTensors {
    /// Q, `[batch, heads, q_len, head_dim_qk]`.
    pub q: TensorView,
    /// K, `[batch, kv_heads, kv_len, head_dim_qk]`.
    pub k: TensorView,
    /// V, `[batch, kv_heads, kv_len, head_dim_v]`.
    pub v: TensorView,
    /// O, `[batch, heads, q_len, head_dim_v]`; written.
    pub o: TensorView,
    /// Log-sum-exp, contiguous fp32 `[batch, heads, q_len, 1]` ([`TensorView::rows`]); written when given.
    pub lse: Option<TensorView>,
}

/// What a forward call comes down to.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ForwardCall {
    /// What the kernel must be specialised to.
    pub problem: Problem,
    /// The sizes.
    pub shape: Shape,
    /// The kernel's arguments (`weights` is 0).
    pub args: ForwardArgs,
    /// Whether every row starts at a multiple of 16 bytes, as the fast CUDA kernels need.
    pub aligned: bool,
}

impl ForwardCall {
    /// The same call with a score program beside its mask. As much of the program's mask as is a window at these sizes
    /// becomes the call's own mask, since kernels have windows built in.
    #[must_use]
    pub fn with_program(self, program: ProgramRef) -> Self {
        let (problem, shape) = Problem { program: Some(program), ..self.problem }.with_windows(self.shape);
        let [window_left, window_right] = windows(&shape);
        Self { problem, shape, args: ForwardArgs { window_left, window_right, ..self.args }, ..self }
    }

    /// The same call on tensors at other addresses, aligned alike: Q, K, V and O.
    #[must_use]
    pub fn at(self, [q, k, v, o]: [u64; 4], lse: Option<u64>) -> Self {
        Self { args: ForwardArgs { q, k, v, o, lse: lse.unwrap_or(0), ..self.args }, ..self }
    }
}

/// How far the mask reaches to the left and to the right, as kernels take it: a row sees at most `kv_len` keys to its
/// left and `q_len` to its right (bottom-right alignment).
pub(crate) fn windows(shape: &Shape) -> [i32; 2] {
    let (left, right) = shape.mask.window();
    let reach = |side: Option<u32>, len: u32| side.map_or(i32::MAX, |n| n.min(len).min((1 << 30) - 1) as i32);
    [reach(left, shape.kv_len), reach(right, shape.q_len)]
}

/// Checks the tensors against each other and against what kernels take, and builds the arguments.
///
/// `scale` defaults to `1 / sqrt(head_dim_qk)`. Sizes of zero are legal. Window reaches beyond the lengths are clamped
/// to them, which changes nothing and keeps the kernels' 32-bit sums in range.
///
/// # Errors
/// [`Error::Tensor`] naming the tensor, the field and the remedy; [`Error::Codegen`] for head dims, head counts and
/// lengths that no kernel supports.
pub fn forward_call(tensors: &ForwardTensors, mask: Mask, scale: Option<f32>) -> Result<ForwardCall> {
    let ForwardTensors { q, k, v, o, lse } = tensors;
    let [batch, heads, q_len, head_dim_qk] = q.shape;
    let [_, kv_heads, kv_len, _] = k.shape;
    let head_dim_v = v.shape[3];

    // Sizes of V are checked against K, those of K and O against Q: the message names the tensor that differs.
    same_dtype("k", k, q.dtype)?;
    same_dtype("v", v, q.dtype)?;
    // O of e4m3 operands is of any.
    let output = if q.dtype == DType::E4m3 { o.dtype } else { q.dtype };
    same_dtype("o", o, output)?;
    same_shape(
        "k",
        k,
        [batch, kv_heads, kv_len, head_dim_qk],
        "[batch, kv_heads, kv_len, head_dim_qk] with Q's batch and head dim",
    )?;
    same_shape(
        "v",
        v,
        [batch, kv_heads, kv_len, head_dim_v],
        "[batch, kv_heads, kv_len, head_dim_v] with K's batch, heads and length",
    )?;
    same_shape(
        "o",
        o,
        [batch, heads, q_len, head_dim_v],
        "[batch, heads, q_len, head_dim_v] with Q's sizes and V's head dim",
    )?;
    let problem = Problem::forward_qk_v(
        q.dtype,
        small("q", "head dim", head_dim_qk)?,
        small("v", "head dim", head_dim_v)?,
        mask.kind(),
    )?
    .with_output(output);
    let shape = Shape {
        batch: small("q", "batch", batch)?,
        heads: small("q", "heads", heads)?,
        kv_heads: small("k", "heads", kv_heads)?,
        q_len: small("q", "rows", q_len)?,
        kv_len: small("k", "rows", kv_len)?,
        mask,
    };
    shape.validate()?;
    // Without an output element nothing is launched and no memory is touched.
    if !o.is_empty() {
        for (name, tensor) in [("q", q), ("k", k), ("v", v), ("o", o)] {
            check_layout(name, tensor)?;
        }
    }
    let aligned = [q, k, v, o].into_iter().all(rows_are_aligned);
    check_output_rows("o", o)?;
    if let Some(lse) = lse {
        same_dtype("lse", lse, DType::F32)?;
        same_shape("lse", lse, [batch, heads, q_len, 1], "[batch, heads, q_len] with Q's sizes")?;
        check_contiguous("lse", lse)?;
    }

    let scale = finite_scale(&problem, scale)?;
    let [window_left, window_right] = windows(&shape);
    let args = ForwardArgs {
        q: q.address,
        k: k.address,
        v: v.address,
        o: o.address,
        lse: lse.map_or(0, |l| l.address),
        weights: 0,
        q_stride: outer(q),
        k_stride: outer(k),
        v_stride: outer(v),
        o_stride: outer(o),
        batch: shape.batch as i32,
        heads: shape.heads as i32,
        kv_heads: shape.kv_heads as i32,
        q_len: shape.q_len as i32,
        kv_len: shape.kv_len as i32,
        window_left,
        window_right,
        scale,
        side: 0,
        ..ForwardArgs::zeroed()
    };
    Ok(ForwardCall { problem, shape, args, aligned })
}

/// Whether two tensors share an element, as far as addresses tell: those that begin at one address, and those of which
/// one has all elements of its range and the other begins there. Of interleaved rows, which share a range and no
/// element, nothing is said.
pub fn certainly_overlap(a: &TensorView, b: &TensorView) -> bool {
    let range = |t: &TensorView| {
        let bytes = if t.is_empty() || t.address == 0 { 0 } else { t.extent_bytes().unwrap_or(0) };
        // Nothing was checked of the sizes yet.
        let dense = t.shape.iter().fold(t.dtype.bytes() as u64, |bytes, n| bytes.saturating_mul(*n));
        (t.address..t.address.saturating_add(bytes), bytes == dense)
    };
    let ((of_a, all_of_a), (of_b, all_of_b)) = (range(a), range(b));
    if of_a.is_empty() || of_b.is_empty() {
        return false;
    }
    of_a.start == of_b.start || all_of_a && of_a.contains(&of_b.start) || all_of_b && of_b.contains(&of_a.start)
}

/// The softmax scale of a call.
pub(crate) fn finite_scale(problem: &Problem, scale: Option<f32>) -> Result<f32> {
    let scale = scale.unwrap_or_else(|| problem.default_scale());
    if scale.is_finite() {
        return Ok(scale);
    }
    let limit = "the softmax scale is a finite number";
    Err(flashtune_codegen::Error::unsupported("scale", scale, limit, "leave it out for 1 / sqrt(head_dim)").into())
}

/// Batch, head and row strides; 0 for a dimension that has no second element, whatever the caller wrote there.
pub(crate) fn outer(t: &TensorView) -> [i64; 3] {
    std::array::from_fn(|i| if t.shape[i] > 1 { t.strides[i] } else { 0 })
}

#[cold]
pub(crate) fn error(
    tensor: &'static str,
    field: &'static str,
    found: impl ToString,
    expected: impl Into<String>,
    remedy: &'static str,
) -> Error {
    Error::Tensor { tensor, field, found: found.to_string(), expected: expected.into(), remedy }
}

pub(crate) fn same_dtype(name: &'static str, t: &TensorView, want: DType) -> Result<()> {
    if t.dtype == want {
        return Ok(());
    }
    let rule = if name.ends_with("lse") { "the log-sum-exp is fp32".to_owned() } else { format!("Q is {want}") };
    Err(error(name, "dtype", t.dtype, rule, "convert it: Q, K, V and O share one dtype, the LSE is f32"))
}

#[inline]
pub(crate) fn same_shape(name: &'static str, t: &TensorView, want: [u64; 4], rule: &str) -> Result<()> {
    if t.shape == want {
        return Ok(());
    }
    Err(other_shape(name, t, want, rule))
}

#[cold]
fn other_shape(name: &'static str, t: &TensorView, want: [u64; 4], rule: &str) -> Error {
    let expected = format!("{want:?} is needed: {rule}");
    error(
        name,
        "shape",
        format!("{:?}", t.shape),
        expected,
        "shapes are [batch, heads, rows, head_dim] (rows before heads is expressed by strides)",
    )
}

/// Batch, head counts and lengths end up in `i32` fields.
pub(crate) fn small(name: &'static str, field: &'static str, n: u64) -> Result<u32> {
    match i32::try_from(n) {
        Ok(n) => Ok(n as u32),
        Err(_) => Err(error(name, field, n, "sizes are below 2^31", "split the call")),
    }
}

/// Whether every row of a tensor starts at a multiple of 16 bytes; an empty one has none that does not.
pub(crate) fn rows_are_aligned(t: &TensorView) -> bool {
    let aligned = |bytes: i64| bytes % 16 == 0;
    let size = t.dtype.bytes() as i64;
    t.is_empty() || (t.address.is_multiple_of(16) && outer(t).into_iter().all(|s| aligned(s.wrapping_mul(size))))
}

/// Strides and alignment that every kernel takes for granted.
pub(crate) fn check_layout(name: &'static str, t: &TensorView) -> Result<()> {
    if t.is_empty() {
        return Ok(());
    }
    let contiguous = "make the tensor contiguous";
    if t.address == 0 {
        return Err(error(name, "address", "null", "a tensor with elements has memory", "allocate it first"));
    }
    if t.shape[3] > 1 && t.strides[3] != 1 {
        return Err(error(
            name,
            "stride of the last dim",
            t.strides[3],
            "elements of a row are contiguous (stride 1)",
            contiguous,
        ));
    }
    if !t.address.is_multiple_of(t.dtype.bytes() as u64) {
        let expected = format!("elements of {} are read whole", t.dtype);
        let remedy = "slice the tensor at a whole element";
        return Err(error(name, "address", format!("{:#x}", t.address), expected, remedy));
    }
    let names = ["batch stride", "head stride", "row stride"];
    for (field, (&n, &stride)) in names.into_iter().zip(t.shape.iter().zip(&t.strides)) {
        if n >= 2 && stride < 0 {
            return Err(error(name, field, stride, "strides are not negative", contiguous));
        }
    }
    if t.extent_bytes().and_then(|n| t.address.checked_add(n)).is_none() {
        return Err(error(
            name,
            "extent",
            format!("{:?} by {:?}", t.shape, t.strides),
            "the tensor ends within 64-bit addresses",
            "check shape and strides",
        ));
    }
    Ok(())
}

/// Rows of an output that share memory would be written by several workers: each dimension's stride must step over all
/// that the dimensions with smaller strides span.
pub(crate) fn check_output_rows(name: &'static str, o: &TensorView) -> Result<()> {
    if o.is_empty() {
        return Ok(());
    }
    let names = ["batch stride", "head stride", "row stride"];
    let mut order = [0, 1, 2];
    order.sort_by_key(|&i| o.strides[i]);
    let mut span = o.shape[3] as i128;
    for i in order.into_iter().filter(|&i| o.shape[i] > 1) {
        if (o.strides[i] as i128) < span {
            let expected = format!("it must be at least {span} elements so that no two rows of the output overlap");
            return Err(error(
                name,
                names[i],
                o.strides[i],
                expected,
                "give an output with memory of its own for every row",
            ));
        }
        span += (o.shape[i] as i128 - 1) * o.strides[i] as i128;
    }
    Ok(())
}

pub(crate) fn check_contiguous(name: &'static str, t: &TensorView) -> Result<()> {
    if t.is_empty() {
        return Ok(());
    }
    if t.address == 0 || !t.address.is_multiple_of(4) {
        return Err(error(
            name,
            "address",
            format!("{:#x}", t.address),
            "a multiple of 4 bytes, not null",
            "allocate it first",
        ));
    }
    let want = TensorView::bhsd(0, t.dtype, t.shape).strides;
    for i in 0..4 {
        if t.shape[i] > 1 && t.strides[i] != want[i] {
            return Err(error(
                name,
                "strides",
                format!("{:?}", t.strides),
                format!("it is contiguous ({want:?})"),
                "give a contiguous tensor",
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
