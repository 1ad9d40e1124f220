//! Masks that say no more than causal or a window does: kernels have those built in, so such a program needs none of
//! its own, and shares their tuned records.

use crate::score::graph::{Graph, Node};
use crate::score::syntax::words::{Binary, Id, Type, Var};
use crate::{Mask, Shape};

/// One side of a window, as a program states it: `reach = kv * kv_len + q * q_len + constant`, counted from the query's
/// position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Reach {
    kv_len: i64,
    q_len: i64,
    constant: i64,
}

/// A mask whose conditions all bound the distance of a key from its query, by what the lengths say.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct WindowForm {
    left: Vec<Reach>,
    right: Vec<Reach>,
}

/// No sum of terms below this, times lengths below 2^30, leaves 64 bits.
const LARGEST: i64 = 1 << 31;

impl WindowForm {
    /// The form of a mask, if it has one.
    pub(in crate::score) fn of(graph: &Graph, mask: Id) -> Option<Self> {
        let mut form = Self { left: Vec::new(), right: Vec::new() };
        for condition in graph.chain(Binary::And, mask) {
            let Node::Binary(Binary::Le, a, b) = *graph.node(condition) else { return None };
            if graph.ty(a) != Type::Int {
                return None;
            }
            let (a, b) = (graph.linear(a), graph.linear(b));
            if !graph.is_safe(&a) || !graph.is_safe(&b) {
                return None;
            }
            // What holds is `difference <= 0`.
            let difference = graph.sum_of(&a, &b.scaled(-1));
            let (mut kv, mut q, mut kv_len, mut q_len) = (0, 0, 0, 0);
            for (factor, term) in &difference.terms {
                match graph.node(*term) {
                    Node::Var(Var::Kv) => kv = *factor,
                    Node::Var(Var::Q) => q = *factor,
                    Node::Var(Var::KvLen) => kv_len = *factor,
                    Node::Var(Var::QLen) => q_len = *factor,
                    _ => return None,
                }
            }
            let constant = difference.constant;
            if [kv_len, q_len, constant].iter().any(|x| x.abs() >= LARGEST) {
                return None;
            }
            match (kv, q) {
                // kv <= q - rest, and the position is q + kv_len - q_len.
                (1, -1) => form.right.push(Reach { kv_len: -kv_len - 1, q_len: 1 - q_len, constant: -constant }),
                // kv >= q + rest.
                (-1, 1) => form.left.push(Reach { kv_len: 1 - kv_len, q_len: -1 - q_len, constant: -constant }),
                _ => return None,
            }
        }
        Some(form)
    }

    /// The same at all lengths, joined with another mask: `None` where a side depends on the lengths, as `kv <= q`
    /// does, which counts rows and keys from the first.
    pub(crate) fn at_all_lengths(&self, mask: Mask) -> Option<Mask> {
        let constant = |r: &Reach| r.kv_len == 0 && r.q_len == 0;
        let sizes = Shape { batch: 1, heads: 1, kv_heads: 1, q_len: 1, kv_len: 1, mask };
        self.left.iter().chain(&self.right).all(constant).then(|| self.at(&sizes))?
    }

    /// The mask that this is at these sizes, joined with that of the shape; `None` where a side reaches less than to
    /// the query's own position, which no window does.
    pub(crate) fn at(&self, sizes: &Shape) -> Option<Mask> {
        let (mut left, mut right) = sizes.mask.window();
        for (side, reaches) in [(&mut left, &self.left), (&mut right, &self.right)] {
            for r in reaches {
                let reach = r.kv_len * sizes.kv_len as i64 + r.q_len * sizes.q_len as i64 + r.constant;
                let reach = u32::try_from(reach.min(u32::MAX as i64)).ok()?;
                *side = Some(side.map_or(reach, |x| x.min(reach)));
            }
        }
        Some(match (left, right) {
            (None, None) => Mask::Full,
            (None, Some(0)) => Mask::Causal,
            (left, right) => Mask::Window { left, right },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::score::{At, Bound, Precision, Program, SideData};

    #[test]
    fn what_is_a_window_is_found_and_nothing_else() {
        let mut found = 0;
        for text in [
            "kv <= q + kv_len - q_len",
            "kv <= q",
            "kv < q",
            "kv <= q and q - kv < 9",
            "q >= kv and kv + 9 > q and kv <= q + 3",
            "q + kv_len - q_len - kv <= 12 and kv - 2 <= q + kv_len - q_len",
            "kv <= q + 5 or kv < 3",
            "2 * kv <= 2 * q",
            "kv <= 2 * q",
            "kv % 2 == 0 and kv <= q",
        ] {
            let program = Program::mask_of(text).unwrap();
            for (q_len, kv_len) in [(20, 20), (12, 30), (30, 12), (1, 7)] {
                for mask in [Mask::Full, Mask::Causal, Mask::Window { left: Some(4), right: Some(6) }] {
                    let sizes = Shape { batch: 1, heads: 1, kv_heads: 1, q_len, kv_len, mask };
                    let Some(window) = program.window().and_then(|w| w.at(&sizes)) else { continue };
                    found += 1;
                    let data = SideData::default();
                    let mut bound = Bound::new(&program, &sizes, &data, Precision::F32).unwrap();
                    for q in 0..q_len {
                        let live = window.live(q as u64, q_len as u64, kv_len as u64);
                        let shape = mask.live(q as u64, q_len as u64, kv_len as u64);
                        for kv in 0..kv_len {
                            let want = shape.contains(&(kv as u64)) && bound.visible(At { b: 0, h: 0, q, kv });
                            assert_eq!(live.contains(&(kv as u64)), want, "{text} as {window} at {q} {kv}");
                        }
                    }
                }
            }
        }
        assert!(found > 40, "{found}");
        let form = |text: &str| Program::mask_of(text).unwrap().window().is_some();
        assert!(form("kv <= q") && !form("kv <= q or kv < 3") && !form("kv % 2 == 0 and kv <= q"));
    }

    #[test]
    fn lengths_of_their_own_leave_windows_that_are_counted_from_the_ends() {
        let of = |text: &str, mask| Program::mask_of(text).unwrap().window().and_then(|w| w.at_all_lengths(mask));
        let window = |left, right| Some(Mask::Window { left: Some(left), right: Some(right) });
        assert_eq!(of("kv <= q + kv_len - q_len", Mask::Full), Some(Mask::Causal));
        assert_eq!(of("q + kv_len - q_len - kv <= 12 and kv - 2 <= q + kv_len - q_len", Mask::Full), window(12, 2));
        assert_eq!(of("q + kv_len - q_len - kv < 12", Mask::Causal), window(11, 0));
        for text in ["kv <= q", "q >= kv and kv + 9 > q", "kv < q + kv_len - q_len", "kv <= q + kv_len"] {
            assert_eq!(of(text, Mask::Full), None, "{text}");
        }
    }
}
