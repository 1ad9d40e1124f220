//! Biases: tensors indexed by (q, kv). A tile of scores reads one tile of each, so a kernel may load it by TMA, as it
//! loads K.

use crate::score::graph::{Depends, Graph, Node};
use crate::score::syntax::words::{Axis, Id, Storage, Unary, Var};

/// More biases than this in one program are read element by element.
pub const MAX_BIASES: usize = 2;

/// An element of a tensor of two-byte floats, by query and key and by what is the same for all scores of a head:
/// `[..., q, kv]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bias {
    /// The node that reads it.
    pub load: Id,
    /// The tensor, by its place among the declarations.
    pub tensor: usize,
    /// The other indices, at most two.
    pub leading: Vec<Id>,
}

impl Bias {
    /// The biases of a score; none where there are too many, or where a tanh is taken: kernels go over the scores more
    /// than once then.
    pub(in crate::score) fn all(graph: &Graph, score: Id) -> Vec<Self> {
        let mut needed = vec![false; graph.nodes().len()];
        needed[score.index()] = true;
        let mut found = Vec::new();
        for id in graph.ids().collect::<Vec<_>>().into_iter().rev() {
            if !needed[id.index()] {
                continue;
            }
            let node = graph.node(id);
            node.operands().iter().for_each(|o| needed[o.index()] = true);
            match node {
                Node::Unary(Unary::Tanh, _) => return Vec::new(),
                Node::Load { tensor, index } => found.extend(Self::of(graph, id, *tensor, index)),
                _ => {}
            }
        }
        // In the order of the nodes.
        found.reverse();
        if found.len() > MAX_BIASES { Vec::new() } else { found }
    }

    /// Whether there are some, and a score changes with query and key by them alone.
    pub(in crate::score) fn are_alone(graph: &Graph, score: Id, biases: &[Self]) -> bool {
        let mut seen = vec![false; graph.nodes().len()];
        let mut left = vec![score];
        while let Some(id) = left.pop() {
            if std::mem::replace(&mut seen[id.index()], true) || biases.iter().any(|b| b.load == id) {
                continue;
            }
            if let Node::Var(Var::Q | Var::Kv) = graph.node(id) {
                return false;
            }
            left.extend(graph.node(id).operands());
        }
        !biases.is_empty()
    }

    fn of(graph: &Graph, load: Id, tensor: usize, index: &[Id]) -> Option<Self> {
        let declaration = &graph.declarations()[tensor];
        let (&[ref leading @ .., q, kv], Some(axes)) = (index, &declaration.axes) else { return None };
        let halves = matches!(declaration.storage, Storage::F16 | Storage::Bf16);
        let by_both = *graph.node(q) == Node::Var(Var::Q) && *graph.node(kv) == Node::Var(Var::Kv);
        let whole = axes.ends_with(&[Axis::QLen, Axis::KvLen]);
        let same = |id: &Id| graph.depends(*id) == Depends { score: false, q: false, kv: false };
        let is_bias = halves && by_both && whole && leading.iter().all(same);
        is_bias.then(|| Self { load, tensor, leading: leading.to_vec() })
    }
}

#[cfg(test)]
mod tests {
    use crate::score::Program;

    #[test]
    fn biases_are_read_by_query_and_key_and_by_what_a_head_knows() {
        let of = |text: &str| {
            let program = Program::parse(text).unwrap();
            (program.biases().iter().map(|b| b.leading.len()).collect::<Vec<_>>(), program.score_facts().biases_alone)
        };
        for (text, leading, alone) in [
            ("t: bf16[heads, q_len, kv_len]; score = score + t[h, q, kv];", &[1][..], true),
            ("t: f16[q_len, kv_len]; s: f32[heads]; score = s[h] * score + t[q, kv];", &[0], true),
            ("t: bf16[batch, *, q_len, kv_len]; score = score * t[b, h % 3, q, kv];", &[2], true),
            (
                "t: bf16[batch, 1, q_len, kv_len]; u: f16[q_len, kv_len]; score = score + t[b, 0, q, kv] + u[q, kv];",
                &[0, 2],
                true,
            ),
            ("t: bf16[q_len, kv_len]; score = score + t[q, kv] * (kv - q);", &[0], false),
            ("t: bf16[q_len, kv_len]; u: f32[kv_len]; score = score + t[q, kv] * u[kv];", &[0], false),
            // Of four bytes, turned round, moved, another for each query, of any length; in a mask alone; beside a
            // tanh.
            ("t: f32[q_len, kv_len]; score = score + t[q, kv];", &[], false),
            ("t: bf16[kv_len, q_len]; score = score + t[kv, q];", &[], false),
            ("t: bf16[q_len, kv_len]; score = score + t[q, kv - 1];", &[], false),
            ("t: bf16[*, q_len, kv_len]; score = score + t[q // 2, q, kv];", &[], false),
            ("t: bf16[*, *]; score = score + t[q, kv];", &[], false),
            ("t: bf16[q_len, kv_len]; mask = t[q, kv] > 0.0;", &[], false),
            ("t: bf16[q_len, kv_len]; score = 9.0 * tanh(score) + t[q, kv];", &[], false),
        ] {
            assert_eq!(of(text), (leading.to_vec(), alone), "{text}");
        }
        let three = "t: bf16[4, q_len, kv_len]; score = score + t[0, q, kv] + t[1, q, kv] + t[2, q, kv];";
        assert_eq!(of(three), (vec![], false));
    }
}
