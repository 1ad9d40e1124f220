//! Backward calls over packed sequences: rows of different lengths one after the other.

use super::BackwardCall;
use crate::Result;
use crate::ragged::Ints;
use crate::ragged::layout::{LONGEST, MOST, common_words, number, span};
use crate::tensor::{error, windows};
use flashtune_codegen::abi::BackwardArgs;
use flashtune_codegen::{KvKind, Shape};

/// Which rows of the tensors belong to which sequence. The tensors have a batch of one, whose rows are those of all
/// sequences, `[1, heads, total, head_dim]`; the log-sum-exp is `[heads, total_q]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Packed {
    /// Sequences.
    pub batch: u64,
    /// First row of each sequence in Q, O, dO, dQ and the log-sum-exp, and the end of the last one's, `[batch + 1]`.
    pub q_begin: Ints,
    /// The same of K, V, dK and dV.
    pub kv_begin: Ints,
    /// Rows of each sequence in Q that are used, `[batch]`: those behind are neither read nor written. All where
    /// absent.
    pub q_used: Option<Ints>,
    /// The same of K.
    pub kv_used: Option<Ints>,
    /// Rows of Q that a sequence has at most: what is longer is cut, and no gradient of the rest is written.
    pub max_q: u64,
    /// The same of K.
    pub max_kv: u64,
}

impl Packed {
    /// The arrays by name, with the number of their elements.
    pub fn arrays(&self) -> impl Iterator<Item = (&'static str, Ints, u64)> {
        let Self { batch, q_begin, kv_begin, q_used, kv_used, .. } = *self;
        let used = [("q_used", q_used), ("kv_used", kv_used)];
        let used = used.into_iter().filter_map(move |(name, ints)| Some((name, ints?, batch)));
        [("q_begin", q_begin, batch + 1), ("kv_begin", kv_begin, batch + 1)].into_iter().chain(used)
    }
}

impl BackwardCall {
    /// The call over the sequences that the rows of its only batch entry are. Looks at no memory of the device.
    ///
    /// # Errors
    /// [`crate::Error::Tensor`] naming what the tensors or arrays are not; [`crate::Error::Codegen`] for more sequences
    /// than kernels count.
    pub fn packed(self, packed: &Packed) -> Result<Self> {
        if self.shape.batch != 1 {
            let expected = "rows of all sequences are one entry of the batch, [1, heads, total, head_dim]";
            return Err(error("q", "batch", self.shape.batch, expected, "pass packed tensors, or dense ones alone"));
        }
        for (name, ints, count) in packed.arrays() {
            span(name, ints.address, &[], count, ints.kind.bytes())?;
        }
        let [q_words, kv_words] = [
            [Some(("q_begin", packed.q_begin)), packed.q_used.map(|used| ("q_used", used))],
            [Some(("kv_begin", packed.kv_begin)), packed.kv_used.map(|used| ("kv_used", used))],
        ]
        .map(common_words);
        let batch = number("batch", packed.batch, MOST, "split the batch")?;
        // A sequence has no more rows than the pack, whatever was promised.
        let most = |promised: u64, all: u32| promised.min(LONGEST).min(all.into()) as u32;
        let [q_len, kv_len] = [most(packed.max_q, self.shape.q_len), most(packed.max_kv, self.shape.kv_len)];
        let shape = Shape { batch, q_len, kv_len, ..self.shape };
        shape.validate()?;
        let [window_left, window_right] = windows(&shape);
        let address = |ints: Option<Ints>| ints.map_or(0, |ints| ints.address);
        let args = BackwardArgs {
            batch: shape.batch as i32,
            q_len: shape.q_len as i32,
            kv_len: shape.kv_len as i32,
            window_left,
            window_right,
            q_begin: packed.q_begin.address,
            kv_begin: packed.kv_begin.address,
            q_lengths: address(packed.q_used),
            kv_lengths: address(packed.kv_used),
            q_rows: self.shape.q_len.into(),
            kv_rows: self.shape.kv_len.into(),
            q_words: q_words?,
            kv_words: kv_words?,
            ..self.args
        };
        Ok(Self { problem: self.problem.with_kv(KvKind::RAGGED), shape, args, ..self })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{BackwardTensors, Error, TensorView, backward_call};
    use flashtune_codegen::{DType, Mask};

    fn call(batch: u64, mask: Mask) -> BackwardCall {
        let t = |heads, rows, dim| TensorView::bshd(64, DType::Bf16, [batch, rows, heads, dim]);
        let (of_q, of_k, of_o) = (t(4, 70, 64), t(2, 90, 64), t(4, 70, 64));
        let lse = TensorView::rows(64, [batch, 4, 70]);
        let (v, dlse) = (of_k, None);
        let tensors =
            BackwardTensors { dout: of_o, q: of_q, k: of_k, v, o: of_o, lse, dlse, dq: of_q, dk: of_k, dv: v };
        backward_call(&tensors, mask, None).unwrap()
    }

    fn packed() -> Packed {
        let (q_begin, kv_begin) = (Ints::i32(0x1000), Ints::i64(0x2000));
        Packed { batch: 3, q_begin, kv_begin, q_used: Some(Ints::i32(0x3000)), kv_used: None, max_q: 40, max_kv: 1000 }
    }

    #[test]
    fn packed_rows_become_sequences_within_their_bounds() {
        let call = call(1, Mask::Window { left: Some(60), right: Some(60) }).packed(&packed()).unwrap();
        assert_eq!(call.problem.to_string(), "backward-bf16-d64-window-ragged");
        assert_eq!((call.shape.batch, call.shape.q_len, call.shape.kv_len), (3, 40, 90));
        let args = call.args;
        assert_eq!((args.q_rows, args.kv_rows, args.q_words, args.kv_words), (70, 90, 1, 2));
        assert_eq!((args.q_lengths, args.kv_lengths, args.q_stride), (0x3000, 0, [0, 64, 256]));
        assert_eq!((args.window_left, args.window_right), (60, 40));
    }

    #[test]
    fn arrays_and_tensors_that_do_not_fit_are_told_by_name() {
        let wide = Some(Ints::i64(0x3000));
        let cases = [
            ("q_begin", 1, Packed { q_begin: Ints::i32(0), ..packed() }),
            ("kv_begin", 1, Packed { kv_begin: Ints::i64(0x2004), ..packed() }),
            ("q_used", 1, Packed { q_used: wide, ..packed() }),
            ("kv_used", 1, Packed { kv_used: Some(Ints::i32(3)), ..packed() }),
            ("q", 2, packed()),
        ];
        for (name, batch, packed) in cases {
            match call(batch, Mask::Causal).packed(&packed) {
                Err(Error::Tensor { tensor, .. }) => assert_eq!(tensor, name),
                other => panic!("{name}: {other:?}"),
            }
        }
        let many = Packed { batch: 1 << 31, ..packed() };
        assert!(call(1, Mask::Full).packed(&many).unwrap_err().to_string().contains("batch"));
    }
}
