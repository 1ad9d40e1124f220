//! The one form that every comparison of ints is brought to.

use super::arith;
use super::linear::{Linear, gcd};
use super::normal::MAX_TERMS;
use super::{Graph, Node};
use crate::score::syntax::range::Range;
use crate::score::syntax::words::{Binary, Id};

impl Graph {
    /// `a < b`, `a <= b` or `a == b`. What changes with the key goes to one side (failing that, what changes with the
    /// query), with a positive first coefficient and without a common factor; a strict comparison becomes a loose one.
    pub(in crate::score) fn compare_ints(&mut self, op: Binary, a: Id, b: Id) -> Id {
        if let (Some(x), Some(y)) = (self.as_int(a), self.as_int(b)) {
            return self.boolean(arith::compare(op, x, y));
        }
        let (left, right) = (self.linear(a), self.linear(b));
        if a == b {
            return self.boolean(op != Binary::Lt);
        }
        let difference = self.sum_of(&left, &right.scaled(-1));
        if !self.is_safe(&left) || !self.is_safe(&right) || difference.terms.len() > MAX_TERMS {
            let (a, b) = if op == Binary::Eq { self.sorted(a, b) } else { (a, b) };
            return self.intern(Node::Binary(op, a, b), Range::FULL, None, None);
        }
        // a - b <= 0, or == 0.
        let mut difference = difference;
        if op == Binary::Lt {
            difference.constant += 1;
        }
        let factor = difference.terms.iter().fold(0, |g, (c, _)| gcd(g, c.unsigned_abs())) as i64;
        if factor > 1 {
            if op == Binary::Eq && difference.constant % factor != 0 {
                return self.boolean(false);
            }
            difference.terms.iter_mut().for_each(|(c, _)| *c /= factor);
            difference.constant = -arith::floor_div(-difference.constant, factor);
        }
        let (lo, hi) = self.bounds(&difference);
        match op {
            Binary::Eq if lo > 0 || hi < 0 => return self.boolean(false),
            Binary::Eq if lo == 0 && hi == 0 => return self.boolean(true),
            Binary::Eq => {}
            _ if hi <= 0 => return self.boolean(true),
            _ if lo > 0 => return self.boolean(false),
            _ => {}
        }
        let moves: Box<dyn Fn(usize, Id) -> bool> = if difference.terms.iter().any(|(_, t)| self.depends(*t).kv) {
            Box::new(|_, t| self.depends(t).kv)
        } else if difference.terms.iter().any(|(_, t)| self.depends(*t).q) {
            Box::new(|_, t| self.depends(t).q)
        } else {
            Box::new(|i, _| i == 0)
        };
        let mut moving = Linear::default();
        let mut rest = Linear { terms: Vec::new(), constant: difference.constant };
        for (i, (c, t)) in difference.terms.iter().enumerate() {
            let side = if moves(i, *t) { &mut moving } else { &mut rest };
            side.terms.push((*c, *t));
        }
        drop(moves);
        let positive = moving.terms[0].0 > 0;
        let (moving, rest) = match positive {
            true => (moving, rest.scaled(-1)),
            false => (moving.scaled(-1), rest),
        };
        let (moving, rest) = (self.sum(moving), self.sum(rest));
        match op {
            Binary::Eq => self.intern(Node::Binary(op, moving, rest), Range::FULL, None, None),
            _ if positive => self.intern(Node::Binary(Binary::Le, moving, rest), Range::FULL, None, None),
            _ => self.intern(Node::Binary(Binary::Le, rest, moving), Range::FULL, None, None),
        }
    }
}
