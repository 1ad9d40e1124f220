//! Masks in memory: a tensor of bools by (q, kv), maybe beside other conditions. A row of a tile reads bools that lie
//! side by side, so a kernel that looks for live blocks may read many of them at once.

use crate::score::graph::{Depends, Graph, Node};
use crate::score::syntax::words::{Axis, Binary, Id, Storage, Unary, Var};

/// A mask that is `t[..., q, kv]`, or not that, and whatever else is joined to it by `and`.
#[derive(Debug, Clone)]
pub struct DenseMask {
    /// The mask's nodes, and that of `rest`.
    pub graph: Graph,
    /// The tensor, by its place among the declarations.
    pub tensor: usize,
    /// The indices besides query and key, at most two: what a head knows.
    pub leading: Vec<Id>,
    /// Whether it is true for the keys that are left out.
    pub negated: bool,
    /// The other conditions, if there are any.
    pub rest: Option<Id>,
}

impl DenseMask {
    /// The first such tensor of a mask; `None` where none is a condition of its own.
    pub(in crate::score) fn of(graph: &Graph, mask: Id) -> Option<Self> {
        let (mut conditions, mut left) = (Vec::new(), vec![mask]);
        while let Some(id) = left.pop() {
            match *graph.node(id) {
                Node::Binary(Binary::And, a, b) => left.extend([b, a]),
                _ => conditions.push(id),
            }
        }
        let (at, (tensor, leading, negated)) =
            conditions.iter().enumerate().find_map(|(at, id)| Some((at, read(graph, *id)?)))?;
        conditions.remove(at);
        let mut graph = graph.clone();
        let rest = conditions.into_iter().reduce(|a, b| graph.and(a, b));
        Some(Self { graph, tensor, leading, negated, rest })
    }
}

/// The tensor that a condition reads, its leading indices, and whether the condition is that it is false.
fn read(graph: &Graph, condition: Id) -> Option<(usize, Vec<Id>, bool)> {
    let (load, negated) = match *graph.node(condition) {
        Node::Unary(Unary::Not, x) => (x, true),
        _ => (condition, false),
    };
    let Node::Load { tensor, index } = graph.node(load) else { return None };
    let declaration = &graph.declarations()[*tensor];
    let (&[ref leading @ .., q, kv], Some(axes)) = (&index[..], &declaration.axes) else { return None };
    let by_both = *graph.node(q) == Node::Var(Var::Q) && *graph.node(kv) == Node::Var(Var::Kv);
    // As long as queries and keys are, or of length 1: no index is beyond such an axis.
    let whole = axes.ends_with(&[Axis::QLen, Axis::KvLen]);
    let same = |id: &Id| graph.depends(*id) == Depends { score: false, q: false, kv: false };
    let is_dense = declaration.storage == Storage::Bool && by_both && whole && leading.iter().all(same);
    is_dense.then(|| (*tensor, leading.to_vec(), negated))
}

#[cfg(test)]
mod tests {
    use crate::score::Program;

    #[test]
    fn bools_by_query_and_key_are_found_among_conditions() {
        let of = |text: &str| {
            let program = Program::parse(text).unwrap();
            program.dense_mask().map(|d| (d.leading.len(), d.negated, d.rest.is_some()))
        };
        for (text, found) in [
            ("t: bool[q_len, kv_len]; mask = t[q, kv];", Some((0, false, false))),
            ("t: bool[batch, *, q_len, kv_len]; mask = t[b, 0, q, kv];", Some((2, false, false))),
            ("t: bool[heads, q_len, kv_len]; mask = not t[h, q, kv];", Some((1, true, false))),
            ("t: bool[q_len, kv_len]; mask = t[q, kv] and kv <= q;", Some((0, false, true))),
            (
                "t: bool[q_len, kv_len]; p: bool[batch, kv_len]; mask = p[b, kv] and not t[q, kv] and kv <= q;",
                Some((0, true, true)),
            ),
            // Joined by `or`, turned round, moved, of another type, of any length, another for each query.
            ("t: bool[q_len, kv_len]; mask = t[q, kv] or kv % 7 == 0;", None),
            ("t: bool[kv_len, q_len]; mask = t[kv, q];", None),
            ("t: bool[q_len, kv_len]; mask = t[q, kv - 1];", None),
            ("t: i32[q_len, kv_len]; mask = t[q, kv] == 1;", None),
            ("t: bool[*, *]; mask = t[q, kv];", None),
            ("t: bool[*, q_len, kv_len]; mask = t[q // 2, q, kv];", None),
            ("p: bool[batch, kv_len]; mask = p[b, kv];", None),
            ("t: bool[q_len, kv_len]; score = select(t[q, kv], score, 0.0);", None),
        ] {
            assert_eq!(of(text), found, "{text}");
        }
    }

    #[test]
    fn of_two_tensors_the_other_is_among_the_rest() {
        let text = "t: bool[q_len, kv_len]; u: bool[heads, q_len, kv_len]; mask = t[q, kv] and u[h, q, kv];";
        let program = Program::parse(text).unwrap();
        let dense = program.dense_mask().unwrap();
        let rest = dense.graph.node(dense.rest.unwrap());
        assert!(matches!(rest, crate::score::Node::Load { tensor, .. } if *tensor != dense.tensor), "{rest:?}");
    }
}
