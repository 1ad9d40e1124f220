//! Scales of `e4m3` operands, as the host hands them over.

use crate::ragged::{RaggedCall, Scales};
use crate::tensor::error;
use crate::{ForwardCall, Result, TensorView};
use flashtune_codegen::{DType, Problem, ScaleUnit, ScaleUnits, Shape};
use std::fmt;

/// Scales of Q, K and V of `e4m3`: what an element is multiplied by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Descales {
    /// Of Q; 1 when absent.
    pub q: Option<Descale>,
    /// Of K; 1 when absent.
    pub k: Option<Descale>,
    /// Of V; 1 when absent.
    pub v: Option<Descale>,
}

/// Which elements of an `e4m3` operand share a scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ScaleKind {
    /// Those of a KV head of a sequence, of Q those of all its query heads: scales `[batch, kv_heads, 1]`. Strides of 0
    /// repeat one.
    #[default]
    Head,
    /// All of the tensor, as [`ScaleKind::Head`] with one number.
    Tensor,
    /// Of Q and K, so many rows of a head that follow each other, a power of two: `[batch, heads, rows / n]`, rounded
    /// up, with the operand's own heads.
    Block(u32),
    /// Of Q and K, a row of a head: `[batch, heads, rows]`.
    Token,
    /// Of V, a column of a KV head: `[batch, kv_heads, head_dim_v]`.
    Channel,
}

impl ScaleKind {
    /// Rows of a head that share a scale, of kinds by rows.
    pub(crate) fn rows(self) -> Option<u32> {
        match self {
            ScaleKind::Block(rows) => Some(rows),
            ScaleKind::Token => Some(1),
            ScaleKind::Head | ScaleKind::Tensor | ScaleKind::Channel => None,
        }
    }

    /// What kernels are specialised to.
    pub(crate) fn unit(self) -> ScaleUnit {
        match self {
            ScaleKind::Head | ScaleKind::Tensor => ScaleUnit::Head,
            ScaleKind::Block(_) | ScaleKind::Token => ScaleUnit::Rows,
            ScaleKind::Channel => ScaleUnit::Channel,
        }
    }

    /// Sizes of the scales of an operand `[batch, heads, rows, dim]` beside so many KV heads.
    pub fn sizes(self, [batch, heads, rows, dim]: [u64; 4], kv_heads: u64) -> [u64; 3] {
        match (self.rows(), self) {
            (Some(of), _) => [batch, heads, rows.div_ceil(u64::from(of).max(1))],
            (None, ScaleKind::Channel) => [batch, kv_heads, dim],
            (None, _) => [batch, kv_heads, 1],
        }
    }

    /// Refuses what no kernel has scales for, of an operand of such a name: rows of V, channels of others, and blocks
    /// that are no power of two.
    pub(crate) fn check(self, name: &'static str) -> Result<()> {
        let of_v = name.starts_with('v');
        if let Some(rows) = self.rows()
            && of_v
        {
            let expected = "V has scales of heads, of the tensor, or of channels";
            let remedy = "quantise V by channel: scales of its rows would be multiplied into P before it is rounded";
            return Err(error(name, "rows of a scale", rows, expected, remedy));
        }
        if self == ScaleKind::Channel && !of_v {
            let expected = "Q and K have scales of heads, of the tensor, of blocks of rows, or of rows";
            return Err(error(name, "kind", "by channel", expected, "take K's mean away, or quantise by row"));
        }
        match self {
            ScaleKind::Block(rows) if !rows.is_power_of_two() || rows > MOST_ROWS => {
                let expected = format!("a power of two from 1 to {MOST_ROWS}");
                Err(error(name, "rows of a block", rows, expected, "use 64 or 128, or a scale for each row"))
            }
            _ => Ok(()),
        }
    }
}

/// Most rows that share a scale by blocks.
const MOST_ROWS: u32 = 1 << 20;

/// A tensor of scales on a device, fp32.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Descale {
    /// Device address of the first; a multiple of 4.
    pub address: u64,
    /// Which elements share one.
    pub kind: ScaleKind,
    /// Sizes, as [`ScaleKind`] says them.
    pub shape: [u64; 3],
    /// Distances in elements, which may be 0 where scales are read.
    pub strides: [i64; 3],
}

impl Descale {
    /// Scales of heads, `[batch, kv_heads]`.
    pub const fn heads(address: u64, [batch, kv_heads]: [u64; 2], [of_batch, of_head]: [i64; 2]) -> Self {
        let (shape, strides) = ([batch, kv_heads, 1], [of_batch, of_head, 0]);
        Self { address, kind: ScaleKind::Head, shape, strides }
    }

    /// As a tensor of f32 with one more axis, and strides of 0 where there is no second element.
    pub(crate) fn view(&self) -> TensorView {
        let [batch, heads, scale_units] = self.shape;
        let [a, b, c] = [0, 1, 2].map(|i| if self.shape[i] > 1 { self.strides[i] } else { 0 });
        TensorView {
            address: self.address,
            dtype: DType::F32,
            shape: [batch, heads, scale_units, 1],
            strides: [a, b, c, 1],
        }
    }
}

impl ForwardCall {
    /// The same call with scales of `e4m3` operands.
    ///
    /// # Errors
    /// [`crate::Error::Tensor`] for scales beside another dtype, of another shape, of parts that no kernel has scales
    /// for, with negative strides, or at an address that is null or no multiple of 4.
    pub fn with_descales(mut self, descales: &Descales) -> Result<Self> {
        let Shape { batch, heads, kv_heads, q_len, kv_len, .. } = self.shape;
        let (qk, v) = (self.problem.head_dim_qk, self.problem.head_dim_v);
        let check = |name: &'static str, scale: &Descale, sizes: [u32; 4]| -> Result<()> {
            if self.problem.dtype != DType::E4m3 {
                let expected = "scales belong to e4m3";
                return Err(error(name, "dtype of Q, K and V", self.problem.dtype, expected, "leave the scales out"));
            }
            scale.kind.check(name)?;
            let shape = scale.kind.sizes(sizes.map(u64::from), kv_heads.into());
            if scale.shape != shape {
                let expected = format!("{shape:?}: {}", scale.kind);
                let remedy = "give scales as the quantisation made them; strides of 0 repeat one";
                return Err(error(name, "shape", format!("{:?}", scale.shape), expected, remedy));
            }
            if scale.strides.iter().zip(shape).any(|(stride, n)| n > 1 && *stride < 0) {
                let found = format!("{:?}", scale.strides);
                return Err(error(name, "strides", found, "strides are not negative", "make the tensor contiguous"));
            }
            if shape.contains(&0) { Ok(()) } else { check_fp32(name, scale.address) }
        };
        let all = [
            ("q_descale", descales.q, [batch, heads, q_len, qk]),
            ("k_descale", descales.k, [batch, kv_heads, kv_len, qk]),
            ("v_descale", descales.v, [batch, kv_heads, kv_len, v]),
        ];
        for (name, scale, sizes) in all {
            if let Some(scale) = &scale {
                check(name, scale, sizes)?;
            }
        }
        let unit = |scale: Option<Descale>| scale.map_or(ScaleUnit::Head, |scale| scale.kind.unit());
        let (q, k, v) = (unit(descales.q), unit(descales.k), unit(descales.v));
        self.problem = self.problem.with_scales(ScaleUnits { q, k, v });
        let [q, k, v] = all.map(|(_, scale, _)| {
            let strides = scale.map_or([0; 4], |scale| scale.view().strides);
            (scale.map_or(0, |scale| scale.address), [strides[0], strides[1]], strides[2])
        });
        (self.args.q_descale, self.args.q_descale_stride) = (q.0, q.1);
        (self.args.k_descale, self.args.k_descale_stride) = (k.0, k.1);
        (self.args.v_descale, self.args.v_descale_stride) = (v.0, v.1);
        self.args.scale_stride = [q.2, k.2, v.2];
        let log2 = |scale: Option<Descale>| scale.and_then(|s| s.kind.rows()).unwrap_or(1).ilog2() as i32;
        self.args.scale_rows_log2 = [log2(descales.q), log2(descales.k)];
        Ok(self)
    }

    /// The same call with what O is multiplied by before it is rounded to `e4m3`: the address of an fp32 on the device.
    ///
    /// # Errors
    /// [`crate::Error::Tensor`] beside another O, and for an address that is null or no multiple of 4.
    pub fn with_output_scale(mut self, address: u64) -> Result<Self> {
        self.args.o_scale = output_scale(&self.problem, address)?;
        Ok(self)
    }
}

impl RaggedCall {
    /// The same call with what an element of `e4m3` queries is multiplied by.
    ///
    /// # Errors
    /// [`crate::Error::Tensor`] beside other queries, and for scales of tokens, negative strides, or an address that is
    /// null or no multiple of 4.
    pub fn with_query_scale(mut self, scale: Scales) -> Result<Self> {
        const NAME: &str = "q_scale";
        let (address, strides) = match scale {
            Scales::One => return Ok(self),
            Scales::PerHead { address, strides } => (address, strides),
            Scales::PerToken { .. } => {
                let expected = "Q has a scale for each sequence and KV head, or fewer";
                return Err(error(NAME, "kind", "by token", expected, "quantise Q by head"));
            }
        };
        if self.problem.dtype != DType::E4m3 {
            let expected = "scales belong to e4m3";
            return Err(error(NAME, "dtype of Q", self.problem.dtype, expected, "leave the scale out"));
        }
        if strides.iter().any(|stride| *stride < 0) {
            let found = format!("{strides:?}");
            return Err(error(NAME, "strides", found, "strides are not negative", "make the tensor contiguous"));
        }
        check_fp32(NAME, address)?;
        let outer = |n: u32, stride| if n > 1 { stride } else { 0 };
        self.args.q_scale = address;
        self.args.q_scale_stride = [outer(self.shape.batch, strides[0]), outer(self.shape.kv_heads, strides[1])];
        Ok(self)
    }

    /// As [`ForwardCall::with_output_scale`].
    ///
    /// # Errors
    /// As there.
    pub fn with_output_scale(mut self, address: u64) -> Result<Self> {
        self.args.o_scale = output_scale(&self.problem, address)?;
        Ok(self)
    }
}

/// The address of what O of a problem is multiplied by, checked.
fn output_scale(problem: &Problem, address: u64) -> Result<u64> {
    let output = problem.output_dtype();
    if output != DType::E4m3 {
        let remedy = "leave the scale out, or give an output of e4m3";
        return Err(error("o_scale", "dtype of O", output, "an O of e4m3 is multiplied by a scale", remedy));
    }
    check_fp32("o_scale", address)?;
    Ok(address)
}

/// Refuses an address at which no fp32 can lie.
fn check_fp32(name: &'static str, address: u64) -> Result<()> {
    if address == 0 || !address.is_multiple_of(4) {
        let expected = "a multiple of 4 bytes, not null";
        return Err(error(name, "address", format!("{address:#x}"), expected, "allocate it first"));
    }
    Ok(())
}

impl fmt::Display for ScaleKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ScaleKind::Head | ScaleKind::Tensor => f.write_str("a scale for each sequence and KV head"),
            ScaleKind::Block(rows) => write!(f, "a scale for each {rows} rows of each head"),
            ScaleKind::Token => f.write_str("a scale for each row of each head"),
            ScaleKind::Channel => f.write_str("a scale for each column of each KV head"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ForwardTensors, forward_call};
    use flashtune_codegen::Mask;

    fn call(dtype: DType) -> ForwardCall {
        call_to(dtype, if dtype == DType::E4m3 { DType::F32 } else { dtype })
    }

    fn call_to(dtype: DType, o: DType) -> ForwardCall {
        let t = |dtype, heads, rows, dim| TensorView::bhsd(64, dtype, [2, heads, rows, dim]);
        let (q, k, v) = (t(dtype, 4, 7, 32), t(dtype, 2, 100, 32), t(dtype, 2, 100, 48));
        forward_call(&ForwardTensors { q, k, v, o: t(o, 4, 7, 48), lse: None }, Mask::Causal, None).unwrap()
    }

    fn scales(kind: ScaleKind, shape: [u64; 3]) -> Option<Descale> {
        let [_, heads, scale_units] = shape.map(|n| n as i64);
        Some(Descale { address: 64, kind, shape, strides: [heads * scale_units, scale_units, 1] })
    }

    #[test]
    fn what_shares_a_scale_becomes_part_of_the_problem_and_of_the_arguments() {
        let finest = Descales {
            q: scales(ScaleKind::Token, [2, 4, 7]),
            k: scales(ScaleKind::Block(64), [2, 2, 2]),
            v: scales(ScaleKind::Channel, [2, 2, 48]),
        };
        let made = call(DType::E4m3).with_descales(&finest).unwrap();
        assert_eq!(made.problem.to_string(), "forward-e4m3-f32-q_rows-k_rows-v_channel-d32v48-causal");
        assert_eq!((made.args.scale_stride, made.args.scale_rows_log2), ([1, 1, 1], [0, 6]));
        assert_eq!((made.args.q_descale_stride, made.args.v_descale_stride), ([28, 7], [96, 48]));
        let heads = Some(Descale::heads(64, [2, 2], [0, 0]));
        let plain = call(DType::E4m3).with_descales(&Descales { q: heads, k: heads, v: heads }).unwrap();
        assert_eq!(plain.problem, call(DType::E4m3).problem);
    }

    #[test]
    fn an_output_of_e4m3_alone_has_a_scale() {
        let made = call_to(DType::E4m3, DType::E4m3).with_output_scale(64).unwrap();
        assert_eq!((made.problem.to_string().as_str(), made.args.o_scale), ("forward-e4m3-d32v48-causal", 64));
        for (call, address, words) in [
            (call_to(DType::E4m3, DType::E4m3), 0, ["o_scale", "null"]),
            (call_to(DType::E4m3, DType::E4m3), 66, ["o_scale", "a multiple of 4 bytes"]),
            (call(DType::E4m3), 64, ["o_scale", "an output of e4m3"]),
            (call(DType::F16), 64, ["o_scale", "leave the scale out"]),
        ] {
            let e = call.with_output_scale(address).unwrap_err().to_string();
            assert!(words.iter().all(|word| e.contains(word)), "{e}");
        }
    }

    #[test]
    fn scales_that_no_kernel_reads_are_refused_with_a_remedy() {
        let of_q = |scale| Descales { q: scale, ..Descales::default() };
        let of_v = |scale| Descales { v: scale, ..Descales::default() };
        for (descales, words) in [
            (of_v(scales(ScaleKind::Token, [2, 2, 100])), ["v_descale", "quantise V by channel"]),
            (of_q(scales(ScaleKind::Channel, [2, 2, 32])), ["q_descale", "quantise by row"]),
            (of_q(scales(ScaleKind::Token, [2, 2, 7])), ["q_descale", "[2, 4, 7]"]),
            (of_q(scales(ScaleKind::Block(3), [2, 4, 3])), ["q_descale", "a power of two"]),
            (of_q(Some(Descale::heads(0, [2, 2], [2, 1]))), ["q_descale", "null"]),
            (of_q(Some(Descale::heads(64, [2, 2], [-2, 1]))), ["q_descale", "negative"]),
        ] {
            let e = call(DType::E4m3).with_descales(&descales).unwrap_err().to_string();
            assert!(words.iter().all(|word| e.contains(word)), "{e}");
        }
        let e = call(DType::F16).with_descales(&of_q(scales(ScaleKind::Token, [2, 4, 7]))).unwrap_err().to_string();
        assert!(e.contains("leave the scales out"), "{e}");
    }
}
