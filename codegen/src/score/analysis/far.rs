//! Scores far from zero: float masks leave keys out by a large negative number, such as the least of a dtype.
//!
//! A row of which all keys are left out so has equal scores, and attends to all keys alike. Kernels that multiply
//! scores by log2(e) before they subtract the row's maximum lose that: from 2^104 on what the product rounds off is
//! more than any exponent, and beyond 2^127 / 1.44 it overflows. So they subtract first, where a program can reach so
//! far.

use crate::score::graph::{Graph, Node};
use crate::score::syntax::words::{Binary, Declaration, Id, Storage, Type, Unary};

/// Below this magnitude a score by log2(e) is rounded by 2^-8 at most. Elements of f16 are below it.
const FAR: f32 = (1 << 17) as f32;

/// Whether a score may be a finite number beyond [`FAR`] by what it reads of each query or key, or by a number that is
/// written out or passed and added or chosen. What multiplies the score is taken to keep it near, and so is what a head
/// has (the slopes of `ALiBi`), or a passed number that is a factor (a cap).
pub(super) fn reaches_far(graph: &Graph, score: Id) -> bool {
    let mut far = vec![false; graph.nodes().len()];
    // Operands come before what reads them.
    for id in graph.ids().filter(|id| *id <= score && graph.ty(*id) == Type::Float) {
        far[id.index()] = is_far(graph, id, &far);
    }
    far[score.index()]
}

fn is_far(graph: &Graph, id: Id, far: &[bool]) -> bool {
    let of = |x: Id| far[x.index()];
    match *graph.node(id) {
        Node::Float(bits) => is_number_far(f32::from_bits(bits)),
        Node::Scalar(i) => scalar_reaches(&graph.declarations()[i]),
        Node::Load { tensor, .. } => {
            let by = graph.depends(id);
            let wide = matches!(graph.declarations()[tensor].storage, Storage::F32 | Storage::Bf16);
            wide && (by.q || by.kv)
        }
        Node::Unary(Unary::Neg | Unary::Abs, x) => of(x),
        Node::Binary(Binary::Add | Binary::Sub | Binary::Min | Binary::Max, x, y) | Node::Select(_, x, y) => {
            of(x) || of(y)
        }
        Node::Binary(Binary::Mul | Binary::Div, x, y) => {
            let scores = [x, y].map(|x| graph.depends(x).score);
            [x, y].into_iter().zip(scores).any(|(x, score)| {
                let is_scalar = matches!(graph.node(x), Node::Scalar(_));
                of(x) && !is_scalar && (score || scores == [false; 2])
            })
        }
        _ => false,
    }
}

fn is_number_far(x: f32) -> bool {
    x.is_finite() && x.abs() >= FAR
}

fn scalar_reaches(scalar: &Declaration) -> bool {
    scalar.float_bound().is_none_or(|bound| bound >= FAR)
}

#[cfg(test)]
mod tests {
    use crate::score::Program;

    #[test]
    fn float_masks_reach_far_and_what_is_near_by_its_form_does_not() {
        for (text, far) in [
            ("t: bf16[q_len, kv_len]; score = score + t[q, kv];", true),
            ("t: f32[batch, kv_len]; score = score + t[b, kv];", true),
            ("t: f32[batch, q_len]; score = score - t[b, q];", true),
            ("t: f32[q_len, kv_len]; score = 30.0 * tanh(score / 30.0) + t[q, kv];", true),
            ("t: i32[kv_len]; score = score + (1 - t[kv]) * -10000000.0;", true),
            ("score = select(kv < 7, score, -3.0e38);", true),
            ("fill: float; score = select(kv < 7, score, fill);", true),
            ("fill: float in -1000..0; score = select(kv < 7, score, fill);", false),
            ("score = select(kv < 7, score, -10000.0);", false),
            ("score = select(kv < 7, score, -inf);", false),
            ("t: f16[q_len, kv_len]; score = score + t[q, kv];", false),
            ("s: f32[heads]; score = score + s[h] * (kv - q);", false),
            ("s: f32[q_len]; score = score * s[q];", false),
            ("by: float; score = score * by;", false),
            ("cap: float; score = cap * tanh(score / cap);", false),
            ("t: bf16[q_len, kv_len]; mask = t[q, kv] > 0.0;", false),
        ] {
            assert_eq!(Program::parse(text).unwrap().score_facts().far, far, "{text}");
        }
    }
}
