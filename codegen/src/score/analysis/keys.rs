//! Which keys a block of queries can see at all: the bounds of a kernel's loop, as expressions over the block's rows.

use super::tile::{Analysis, Image};
use crate::score::graph::Node;
use crate::score::graph::linear::Linear;
use crate::score::syntax::range::Range;
use crate::score::syntax::words::{Binary, Id, Type, Var};

impl Analysis<'_> {
    /// The first key that any query of the tile can see, and the one after the last, from the conditions that bound
    /// the key; `None` where none does.
    pub(in crate::score) fn keys(&mut self, mask: Id) -> (Option<Id>, Option<Id>) {
        let mut keys: Vec<(Option<Id>, Option<Id>)> = vec![(None, None); self.source.nodes().len()];
        for id in self.source.ids() {
            if !self.needed[id.index()] || self.source.ty(id) != Type::Bool {
                continue;
            }
            keys[id.index()] = match *self.source.node(id) {
                Node::Binary(op @ (Binary::And | Binary::Or), a, b) => {
                    let (x, y) = (keys[a.index()], keys[b.index()]);
                    let (begin, end) =
                        if op == Binary::And { (Binary::Max, Binary::Min) } else { (Binary::Min, Binary::Max) };
                    let mut join = |how, x: Option<Id>, y: Option<Id>| match (x, y) {
                        (Some(x), Some(y)) => Some(self.target.binary(how, x, y)),
                        // Both hold, so either bound does; of alternatives, both are needed.
                        (x, y) if op == Binary::And => x.or(y),
                        _ => None,
                    };
                    (join(begin, x.0, y.0), join(end, x.1, y.1))
                }
                Node::Binary(op @ (Binary::Le | Binary::Eq), a, b) if self.source.ty(a) == Type::Int => {
                    self.solve(op, a, b)
                }
                _ => (None, None),
            };
        }
        keys[mask.index()]
    }

    /// The bounds of the key in `a <= b` or `a == b`, where one side is the key, or a quotient of it, and a constant.
    fn solve(&mut self, op: Binary, a: Id, b: Id) -> (Option<Id>, Option<Id>) {
        let (left, right) = (self.source.linear(a), self.source.linear(b));
        if !self.source.is_safe(&left) || !self.source.is_safe(&right) {
            return (None, None);
        }
        let has_key = |l: &Linear| l.terms.iter().any(|(_, t)| self.source.depends(*t).kv);
        let (key_left, key_right) = (has_key(&left), has_key(&right));
        let (mut begin, mut end) = (None, None);
        if key_left && !key_right {
            let (lo, hi) = self.int(b);
            end = self.key_limit(&left, hi, true);
            if op == Binary::Eq {
                begin = self.key_limit(&left, lo, false);
            }
        } else if key_right && !key_left && op == Binary::Le {
            let (lo, _) = self.int(a);
            begin = self.key_limit(&right, lo, false);
        }
        (begin, end)
    }

    /// From `side <= limit` the key after the last one, from `side >= limit` the first one.
    fn key_limit(&mut self, side: &Linear, limit: Id, upper: bool) -> Option<Id> {
        let &[(1, term)] = &side.terms[..] else { return None };
        let g = &mut self.target;
        let one = g.int(1);
        let constant = g.int(side.constant);
        let limit = g.binary(Binary::Sub, limit, constant);
        match *self.source.node(term) {
            Node::Var(Var::Kv) if upper => Some(g.binary(Binary::Add, limit, one)),
            Node::Var(Var::Kv) => Some(limit),
            Node::Binary(Binary::FloorDiv, x, d) => {
                let Image::Point(d) = self.images[d.index()] else { return None };
                // x // d <= y is x < (y + 1) * d, and x // d >= y is x >= y * d.
                let (inner, range) = (self.source.linear(x), g.range(d));
                let next = if upper { g.binary(Binary::Add, limit, one) } else { limit };
                let limit = g.binary(Binary::Mul, next, d);
                let simple = matches!(&inner.terms[..], [(1, t)] if *self.source.node(*t) == Node::Var(Var::Kv));
                if !simple || range.lo <= 0 || g.range(limit) == Range::FULL {
                    return None;
                }
                let constant = g.int(inner.constant);
                let limit = g.binary(Binary::Sub, limit, constant);
                (g.range(limit) != Range::FULL).then_some(limit)
            }
            _ => None,
        }
    }
}
