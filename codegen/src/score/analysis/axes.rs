//! Which of batch, head and KV head the precomputed metadata of a mask (block lists, key ranges) depends on.

use crate::Shape;
use crate::score::graph::{Graph, Node};
use crate::score::syntax::words::{Id, Var};

/// What a mask changes with besides query rows and keys: tiles that agree in these share metadata.
///
/// A mask that leaves each query one run of keys, whose ends follow from the row by arithmetic, needs no metadata.
/// Where ends are searched for in a tensor, or come in no order, a kernel launched before `forward/sm90` writes all of
/// them. Any other mask may leave blocks out anywhere, and by what it reads only memory tells which: it then has lists
/// of blocks written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MaskAxes {
    /// The sequence.
    pub batch: bool,
    /// The query head.
    pub head: bool,
    /// The KV head, and not the query head.
    pub kv_head: bool,
}

impl MaskAxes {
    pub(in crate::score) fn of(graph: &Graph, mask: Id) -> Self {
        let mut needed = vec![false; mask.index() + 1];
        needed[mask.index()] = true;
        let (mut batch, mut head, mut kv_head) = (false, false, false);
        for id in graph.ids().take(mask.index() + 1).collect::<Vec<_>>().into_iter().rev() {
            if needed[id.index()] {
                let node = graph.node(id);
                node.operands().iter().for_each(|o| needed[o.index()] = true);
                batch |= *node == Node::Var(Var::B);
                head |= *node == Node::Var(Var::H);
                kv_head |= *node == Node::Var(Var::HKv);
            }
        }
        Self { batch, head, kv_head: kv_head && !head }
    }

    /// How many masks there are: of the sequences and heads that are told apart.
    pub fn masks(&self, shape: &Shape) -> u64 {
        let heads = match (self.head, self.kv_head) {
            (true, _) => shape.heads,
            (false, true) => shape.kv_heads,
            (false, false) => 1,
        };
        if self.batch { shape.batch as u64 * heads as u64 } else { heads.into() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Mask;
    use crate::score::Program;

    fn flags(axes: Option<MaskAxes>) -> Option<(bool, bool, bool)> {
        axes.map(|l| (l.batch, l.head, l.kv_head))
    }

    fn axes(text: &str) -> Option<(bool, bool, bool)> {
        flags(Program::parse(text).unwrap().lists())
    }

    #[test]
    fn lists_are_shared_by_all_that_a_mask_does_not_tell_apart() {
        assert_eq!(axes("mask = kv <= q;"), None);
        assert_eq!(axes("score = score * 2.0;"), None);
        assert_eq!(axes("mask = (q - kv) % 7 == 0;"), Some((false, false, false)));
        assert_eq!(axes("s: bool[batch, q_len, kv_len]; mask = s[b, q, kv];"), Some((true, false, false)));
        assert_eq!(axes("s: bool[heads, q_len, kv_len]; mask = s[h, q, kv];"), Some((false, true, false)));
        assert_eq!(axes("mask = (q + h_kv) % (kv + 2) == b;"), Some((true, false, true)));
        assert_eq!(axes("mask = (q + h_kv) % (kv + 2) == h;"), Some((false, true, false)));
        // What the score reads has no part in it.
        assert_eq!(axes("mask = (q - kv) % 7 == 0; score = score * h;"), Some((false, false, false)));
    }

    #[test]
    fn runs_are_found_ahead_where_arithmetic_does_not_tell_them_in_order() {
        let runs = |text: &str| {
            let program = Program::parse(text).unwrap();
            (flags(program.runs()), program.lists().is_some())
        };
        assert_eq!(runs("mask = kv <= q and q - kv < 70;"), (None, false));
        assert_eq!(runs("mask = (q - kv) % 7 == 0;"), (None, true));
        // Ends in no order.
        assert_eq!(runs("mask = kv <= abs(q - 100) + 40;"), (Some((false, false, false)), false));
        let documents = "d: i32[batch, q_len]; e: i32[batch, kv_len] nondecreasing; mask = d[b, q] == e[b, kv]";
        assert_eq!(runs(&format!("{documents};")), (Some((true, false, false)), false));
        assert_eq!(runs(&format!("{documents} and kv <= q + h;")), (Some((true, true, false)), false));
    }

    #[test]
    fn units_count_what_a_mask_tells_apart() {
        let shape = Shape { batch: 3, heads: 8, kv_heads: 2, q_len: 1, kv_len: 1, mask: Mask::Full };
        let masks = |batch, head, kv_head| MaskAxes { batch, head, kv_head }.masks(&shape);
        assert_eq!([masks(false, false, false), masks(true, false, false)], [1, 3]);
        assert_eq!([masks(true, true, false), masks(true, false, true), masks(false, false, true)], [24, 6, 2]);
    }
}
