//! Bounds that the conditions of one `and` or `or` put together on the same sum of coordinates: they make windows,
//! chunks and dilated masks exact, whose conditions each leave a tile mixed.

use super::tile::{Analysis, Bounds, Form};
use crate::score::graph::{Graph, Node};
use crate::score::syntax::words::{Binary, Id, Type, Unary};

impl Analysis<'_> {
    /// Whether the conditions that `and` joins cannot all hold anywhere in the tile, or those that `or` joins cannot
    /// all fail, by what they say together of the sums that they have in common.
    pub(in crate::score) fn impossible(&mut self, mask: Id, joined_by: Binary) -> Option<Id> {
        let conditions = self.source.chain(joined_by, mask);
        if conditions.len() < 2 {
            return None;
        }
        let hold = joined_by == Binary::And;
        let bounds = self.joint_bounds(&conditions, hold);
        let mut never = self.target.boolean(false);
        let mut forms: Vec<&Form> = bounds.keys().collect();
        forms.sort();
        for form in forms {
            let range = self.form_range(form);
            let (lo, hi) = self.tighten(range, bounds[form]);
            let empty = self.target.binary(Binary::Lt, hi, lo);
            never = self.target.or(never, empty);
        }
        // Everything once more, with these bounds.
        self.bounds = bounds;
        self.run();
        let (can_be_false, can_be_true) = self.bool(mask);
        let cannot = self.target.not(if hold { can_be_true } else { can_be_false });
        self.bounds.clear();
        self.run();
        Some(self.target.or(never, cannot))
    }

    /// The bounds that conditions put on forms if all of them hold, or if all of them fail.
    fn joint_bounds(&mut self, conditions: &[Id], hold: bool) -> Bounds {
        let mut bounds = Bounds::new();
        for &condition in conditions {
            let Node::Binary(op, a, b) = *self.source.node(condition) else { continue };
            // What holds if the condition does, or if it does not: `a <= b` or `a == b`, where `not a <= b` is `b + 1
            // <= a`.
            let (op, a, b, more) = match (op, hold) {
                (Binary::Le, true) | (Binary::Eq, true) => (op, a, b, 0),
                (Binary::Ne, false) => (Binary::Eq, a, b, 0),
                (Binary::Le, false) => (Binary::Le, b, a, 1),
                _ => continue,
            };
            if self.source.ty(a) != Type::Int {
                continue;
            }
            let (a, b) = (self.source.linear(a), self.source.linear(b));
            if !self.source.is_safe(&a) || !self.source.is_safe(&b) {
                continue;
            }
            // factor * form + rest <= 0, or == 0.
            let mut difference = self.source.sum_of(&a, &b.scaled(-1));
            difference.constant += more;
            let (form, factor, rest) = self.split(&difference);
            if form.is_empty() {
                continue;
            }
            let g = &mut self.target;
            let magnitude = g.int(factor.abs());
            let minus = g.unary(Unary::Neg, rest);
            let down = g.binary(Binary::FloorDiv, minus, magnitude);
            let up = g.binary(Binary::FloorDiv, rest, magnitude);
            let up = g.unary(Unary::Neg, up);
            // form <= -rest / |factor| rounded down, or form >= rest / |factor| rounded up, by the factor's sign.
            let (least, greatest) = match (op, factor > 0) {
                (Binary::Le, true) => (None, Some(down)),
                (Binary::Le, false) => {
                    let up = g.binary(Binary::FloorDiv, minus, magnitude);
                    (Some(g.unary(Unary::Neg, up)), None)
                }
                (_, true) => (Some(up), Some(down)),
                (_, false) => {
                    let down = g.binary(Binary::FloorDiv, rest, magnitude);
                    let up = g.binary(Binary::FloorDiv, minus, magnitude);
                    (Some(g.unary(Unary::Neg, up)), Some(down))
                }
            };
            let joined = bounds.entry(form).or_insert((None, None));
            let both = |g: &mut Graph, op, old: Option<Id>, new: Option<Id>| match (old, new) {
                (Some(x), Some(y)) => Some(g.binary(op, x, y)),
                (x, y) => x.or(y),
            };
            joined.0 = both(g, Binary::Max, joined.0, least);
            joined.1 = both(g, Binary::Min, joined.1, greatest);
        }
        bounds
    }
}
