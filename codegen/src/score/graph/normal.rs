//! The constructors of nodes: they fold constants, flatten and sort sums, `and` and `or`, and bring every comparison of
//! integers to one form, so that `q >= kv`, `kv < q + 1` and `kv - q <= 0` are all `kv <= q`.
//!
//! Integers form a ring (64 bits, wrapping around), so sums may be rearranged at will. Comparisons may only where no
//! side can wrap, which the ranges of the operands show. Floats keep their order of evaluation: only the operands of
//! one sum or product change places.

use super::arith;
use super::linear::Linear;
use super::{Graph, Node};
use crate::score::syntax::range::Range;
use crate::score::syntax::words::{Binary, Id, Type, Unary, Var};

/// Terms of a sum, and operands of an `and` or an `or`, that are kept in one list; longer ones are nested. This bounds
/// what normalising costs for each node.
pub(in crate::score) const MAX_TERMS: usize = 16;
/// Sums of magnitudes below this cannot wrap, nor can the difference of two.
const SAFE: u128 = 1 << 62;

/// Constructors; operands have the types that the operation needs, which [`super::check`] ensures.
impl Graph {
    /// A bool constant.
    pub(crate) fn boolean(&mut self, x: bool) -> Id {
        self.intern(Node::Bool(x), Range::FULL, None, None)
    }

    /// An int constant.
    pub(crate) fn int(&mut self, x: i64) -> Id {
        self.intern(Node::Int(x), Range::point(x), None, None)
    }

    /// A float constant.
    pub(crate) fn float(&mut self, x: f32) -> Id {
        let bits = if x.is_nan() { f32::NAN.to_bits() & 0x7fff_ffff } else { x.to_bits() };
        self.intern(Node::Float(bits), Range::FULL, None, None)
    }

    /// A variable.
    pub(crate) fn var(&mut self, var: Var) -> Id {
        self.intern(Node::Var(var), var.range(), None, None)
    }

    /// A run-time scalar, by its place among the declarations.
    pub(crate) fn scalar(&mut self, i: usize) -> Id {
        let range = self.declarations()[i].int_range();
        self.intern(Node::Scalar(i), range, None, None)
    }

    /// An element of a side tensor, by its place among the declarations.
    pub(crate) fn load(&mut self, tensor: usize, index: Vec<Id>) -> Id {
        let range = self.declarations()[tensor].int_range();
        self.intern(Node::Load { tensor, index }, range, None, None)
    }

    /// The least or the greatest of a side tensor's elements in a box of indices.
    pub(in crate::score) fn extreme(&mut self, tensor: usize, first: Vec<Id>, last: Vec<Id>, greatest: bool) -> Id {
        if first == last {
            return self.load(tensor, first);
        }
        let range = self.declarations()[tensor].int_range();
        self.intern(Node::Extreme { tensor, first, last, greatest }, range, None, None)
    }

    /// An operation on one node.
    pub(crate) fn unary(&mut self, op: Unary, a: Id) -> Id {
        match (op, self.ty(a)) {
            (Unary::Not, _) => self.not(a),
            (Unary::Neg, Type::Int) => {
                let negative = self.linear(a).scaled(-1);
                self.sum(negative)
            }
            (Unary::Abs, Type::Int) => self.abs_int(a),
            (Unary::ToFloat, Type::Int) => match self.as_int(a) {
                Some(x) => self.float(x as f32),
                None => self.intern(Node::Unary(op, a), Range::FULL, None, None),
            },
            (Unary::ToFloat, _) => a,
            (Unary::Neg, _) => match (self.as_float(a), self.node(a)) {
                (Some(x), _) => self.float(-x),
                (_, Node::Unary(Unary::Neg, x)) => *x,
                _ => self.intern(Node::Unary(op, a), Range::FULL, None, None),
            },
            (Unary::Abs, _) => match (self.as_float(a), self.node(a)) {
                (Some(x), _) => self.float(x.abs()),
                (_, Node::Unary(Unary::Abs, _)) => a,
                _ => self.intern(Node::Unary(op, a), Range::FULL, None, None),
            },
            // Exact on every machine.
            _ if op.rounds() => match self.as_float(a) {
                Some(x) => self.int(arith::rounded(op, x.into())),
                // A float that was an int of 24 bits is that int again.
                None => match *self.node(a) {
                    Node::Unary(Unary::ToFloat, x) if self.range(x).magnitude() <= 1 << f32::MANTISSA_DIGITS => x,
                    _ => self.intern(Node::Unary(op, a), Range::FULL, None, None),
                },
            },
            (Unary::Sqrt, _) => match self.as_float(a) {
                Some(x) => self.float(x.sqrt()),
                None => self.intern(Node::Unary(op, a), Range::FULL, None, None),
            },
            // Not folded: the last digit would be that of the machine that folds.
            _ => self.intern(Node::Unary(op, a), Range::FULL, None, None),
        }
    }

    /// An operation on two nodes of one type.
    pub(crate) fn binary(&mut self, op: Binary, a: Id, b: Id) -> Id {
        match (op, self.ty(a)) {
            (Binary::And | Binary::Or, _) => self.and_or(op, a, b),
            (Binary::Ne, _) => {
                let equal = self.binary(Binary::Eq, a, b);
                self.not(equal)
            }
            (Binary::Eq, Type::Bool) => self.equal_bools(a, b),
            (Binary::Lt | Binary::Le | Binary::Eq, Type::Int) => self.compare_ints(op, a, b),
            (_, Type::Int) => self.int_binary(op, a, b),
            _ => self.float_binary(op, a, b),
        }
    }

    /// `a` where the condition holds, else `b`.
    pub(crate) fn select(&mut self, condition: Id, a: Id, b: Id) -> Id {
        match (self.as_bool(condition), self.node(condition)) {
            (Some(c), _) => return if c { a } else { b },
            (_, Node::Unary(Unary::Not, c)) => return self.select(*c, b, a),
            _ if a == b => return a,
            _ => {}
        }
        if self.ty(a) == Type::Bool {
            let yes = self.and(condition, a);
            let no = self.not(condition);
            let no = self.and(no, b);
            return self.or(yes, no);
        }
        let (x, y) = (self.range(a), self.range(b));
        let range = Range { lo: x.lo.min(y.lo), hi: x.hi.max(y.hi) };
        self.intern(Node::Select(condition, a, b), range, None, None)
    }

    /// `a and b`.
    pub(crate) fn and(&mut self, a: Id, b: Id) -> Id {
        self.and_or(Binary::And, a, b)
    }

    /// `a or b`.
    pub(crate) fn or(&mut self, a: Id, b: Id) -> Id {
        self.and_or(Binary::Or, a, b)
    }

    /// `not a`.
    pub(crate) fn not(&mut self, a: Id) -> Id {
        match *self.node(a) {
            Node::Bool(x) => self.boolean(!x),
            Node::Unary(Unary::Not, x) => x,
            Node::Binary(Binary::Eq, x, y) => self.intern(Node::Binary(Binary::Ne, x, y), Range::FULL, None, None),
            Node::Binary(Binary::Ne, x, y) => self.intern(Node::Binary(Binary::Eq, x, y), Range::FULL, None, None),
            // NaN compares with nothing, so a float's comparison has no opposite.
            Node::Binary(Binary::Le, x, y) if self.ty(x) == Type::Int => self.compare_ints(Binary::Lt, y, x),
            Node::Binary(Binary::Lt, x, y) if self.ty(x) == Type::Int => self.compare_ints(Binary::Le, y, x),
            _ => self.intern(Node::Unary(Unary::Not, a), Range::FULL, None, None),
        }
    }

    /// The node of a sum: positive terms, then negative ones, then the constant.
    pub(crate) fn sum(&mut self, linear: Linear) -> Id {
        if linear.terms.is_empty() {
            return self.int(linear.constant);
        }
        let (positive, negative): (Vec<_>, Vec<_>) = linear.terms.iter().copied().partition(|(c, _)| *c > 0);
        let mut so_far = Linear::default();
        let mut node: Option<Id> = None;
        for (c, term) in positive {
            so_far = self.sum_of(&so_far, &Linear { terms: vec![(c, term)], constant: 0 });
            let scaled = self.scaled(c, term);
            node = Some(match node {
                None => scaled,
                Some(n) => self.intern_sum(Node::Binary(Binary::Add, n, scaled), &so_far),
            });
        }
        let mut constant = linear.constant;
        if node.is_none() && constant > 0 {
            so_far.constant = constant;
            node = Some(self.int(std::mem::take(&mut constant)));
        }
        for (c, term) in negative {
            so_far = self.sum_of(&so_far, &Linear { terms: vec![(c, term)], constant: 0 });
            let scaled = self.scaled(c.wrapping_neg(), term);
            let next = match node {
                None => Node::Unary(Unary::Neg, scaled),
                Some(n) => Node::Binary(Binary::Sub, n, scaled),
            };
            node = Some(self.intern_sum(next, &so_far));
        }
        let node = node.expect("there is a term");
        if constant == 0 {
            return node;
        }
        so_far.constant = constant;
        let (op, magnitude) = match constant {
            i64::MIN => (Binary::Add, constant),
            c if c < 0 => (Binary::Sub, -c),
            c => (Binary::Add, c),
        };
        let constant = self.int(magnitude);
        self.intern_sum(Node::Binary(op, node, constant), &so_far)
    }

    /// `constant + sum of coefficient * node`, for nodes in any order.
    pub(crate) fn weighted_sum(&mut self, constant: i64, parts: impl IntoIterator<Item = (i64, Id)>) -> Id {
        let mut so_far = Linear { terms: Vec::new(), constant };
        for (c, node) in parts {
            let part = self.linear(node).scaled(c);
            let next = self.sum_of(&so_far, &part);
            if next.terms.len() <= MAX_TERMS {
                so_far = next;
                continue;
            }
            let (a, b) = (self.sum(so_far), self.sum(part));
            let both = self.int_binary(Binary::Add, a, b);
            so_far = self.linear(both);
        }
        self.sum(so_far)
    }

    fn scaled(&mut self, c: i64, term: Id) -> Id {
        if c == 1 {
            return term;
        }
        let factor = self.int(c);
        self.intern_sum(Node::Binary(Binary::Mul, term, factor), &Linear { terms: vec![(c, term)], constant: 0 })
    }

    fn intern_sum(&mut self, node: Node, linear: &Linear) -> Id {
        let (lo, hi) = self.bounds(linear);
        self.intern(node, Range::checked(lo, hi), Some(linear.clone()), None)
    }

    /// The least and greatest value of a sum, if nothing wrapped.
    pub(in crate::score) fn bounds(&self, linear: &Linear) -> (i128, i128) {
        linear.terms.iter().fold((linear.constant as i128, linear.constant as i128), |(lo, hi), (c, t)| {
            let Range { lo: a, hi: b } = self.range(*t);
            let (x, y) = ((a as i128).saturating_mul(*c as i128), (b as i128).saturating_mul(*c as i128));
            (lo.saturating_add(x.min(y)), hi.saturating_add(x.max(y)))
        })
    }

    /// Whether neither the sum nor any part of it can wrap, nor the difference of two such sums.
    pub(crate) fn is_safe(&self, linear: &Linear) -> bool {
        let terms = linear
            .terms
            .iter()
            .map(|(c, t)| (c.unsigned_abs() as u128).saturating_mul(self.range(*t).magnitude() as u128));
        terms.fold(linear.constant.unsigned_abs() as u128, u128::saturating_add) < SAFE
    }

    fn int_binary(&mut self, op: Binary, a: Id, b: Id) -> Id {
        if let (Some(x), Some(y)) = (self.as_int(a), self.as_int(b)) {
            return self.int(arith::int(op, x, y));
        }
        match op {
            Binary::Add | Binary::Sub => {
                let right = self.linear(b).scaled(if op == Binary::Add { 1 } else { -1 });
                let sum = self.sum_of(&self.linear(a), &right);
                if sum.terms.len() <= MAX_TERMS {
                    return self.sum(sum);
                }
                let (a, b) = if op == Binary::Add { self.sorted(a, b) } else { (a, b) };
                let (x, y) = (self.range(a), self.range(b));
                let wide = |f: fn(i128, i128) -> i128, y: Range| {
                    Range::checked(f(x.lo as i128, y.lo as i128), f(x.hi as i128, y.hi as i128))
                };
                let range = match op {
                    Binary::Add => wide(|a, b| a + b, y),
                    _ => wide(|a, b| a - b, Range { lo: y.hi, hi: y.lo }),
                };
                self.intern(Node::Binary(op, a, b), range, None, None)
            }
            Binary::Mul => self.product(a, b),
            Binary::FloorDiv => self.floor_div(a, b),
            Binary::Mod => self.floor_mod(a, b),
            _ => self.extremum(op, a, b),
        }
    }

    fn product(&mut self, a: Id, b: Id) -> Id {
        match (self.as_int(a), self.as_int(b)) {
            (Some(c), _) => {
                let sum = self.linear(b).scaled(c);
                self.sum(sum)
            }
            (_, Some(c)) => {
                let sum = self.linear(a).scaled(c);
                self.sum(sum)
            }
            _ => {
                let (a, b) = self.sorted(a, b);
                let (x, y) = (self.range(a), self.range(b));
                let corners = [(x.lo, y.lo), (x.lo, y.hi), (x.hi, y.lo), (x.hi, y.hi)];
                let products = corners.map(|(x, y)| x as i128 * y as i128);
                let (lo, hi) = (products.iter().min().expect("four"), products.iter().max().expect("four"));
                let mut range = Range::checked(*lo, *hi);
                if a == b && range != Range::FULL {
                    range.lo = range.lo.max(0);
                }
                self.intern(Node::Binary(Binary::Mul, a, b), range, None, None)
            }
        }
    }

    fn floor_div(&mut self, a: Id, b: Id) -> Id {
        match self.as_int(b) {
            Some(0) => return self.int(0),
            Some(1) => return a,
            _ => {}
        }
        let (x, d) = (self.range(a), self.range(b));
        let range = if d.lo > 0 {
            let corners = [(x.lo, d.lo), (x.lo, d.hi), (x.hi, d.lo), (x.hi, d.hi)];
            let quotients = corners.map(|(x, d)| arith::floor_div(x, d));
            Range { lo: quotients.into_iter().min().expect("four"), hi: quotients.into_iter().max().expect("four") }
        } else {
            // No quotient, and no 0, is larger than what was divided.
            let m = x.magnitude() as i128;
            Range::checked(-m, m)
        };
        self.intern_int(Node::Binary(Binary::FloorDiv, a, b), range)
    }

    fn floor_mod(&mut self, a: Id, b: Id) -> Id {
        let (x, d) = (self.range(a), self.range(b));
        match self.as_int(b) {
            Some(0) => return a,
            Some(1 | -1) => return self.int(0),
            _ if d.lo > 0 && x.lo >= 0 && x.hi < d.lo => return a,
            _ => {}
        }
        let mut range = Range { lo: d.lo.saturating_add(1).min(0), hi: d.hi.saturating_sub(1).max(0) };
        if d.lo <= 0 && d.hi >= 0 {
            range = Range { lo: range.lo.min(x.lo), hi: range.hi.max(x.hi) };
        } else if x.lo >= 0 && d.lo > 0 {
            range.hi = range.hi.min(x.hi);
        }
        self.intern_int(Node::Binary(Binary::Mod, a, b), range)
    }

    fn extremum(&mut self, op: Binary, a: Id, b: Id) -> Id {
        let (x, y) = (self.range(a), self.range(b));
        let least = op == Binary::Min;
        if a == b || (least && x.hi <= y.lo) || (!least && x.lo >= y.hi) {
            return a;
        }
        if (least && y.hi <= x.lo) || (!least && y.lo >= x.hi) {
            return b;
        }
        let (a, b) = self.sorted(a, b);
        let range = match least {
            true => Range { lo: x.lo.min(y.lo), hi: x.hi.min(y.hi) },
            false => Range { lo: x.lo.max(y.lo), hi: x.hi.max(y.hi) },
        };
        self.intern(Node::Binary(op, a, b), range, None, None)
    }

    fn abs_int(&mut self, a: Id) -> Id {
        let x = self.range(a);
        if x.lo >= 0 {
            return a;
        }
        if x.hi <= 0 && x.lo != i64::MIN {
            return self.unary(Unary::Neg, a);
        }
        if let Some(x) = self.as_int(a) {
            return self.int(x.wrapping_abs());
        }
        let range = match x.lo {
            i64::MIN => Range::FULL,
            _ => Range { lo: 0, hi: x.magnitude() as i64 },
        };
        self.intern(Node::Unary(Unary::Abs, a), range, None, None)
    }

    /// A node whose range may show it to be a constant.
    fn intern_int(&mut self, node: Node, range: Range) -> Id {
        if range.is_point() {
            return self.int(range.lo);
        }
        self.intern(node, range, None, None)
    }

    fn float_binary(&mut self, op: Binary, a: Id, b: Id) -> Id {
        match (self.as_float(a), self.as_float(b)) {
            (Some(x), Some(y)) if op.is_logical() => {
                let x = arith::compare(op, x, y);
                return self.boolean(x);
            }
            (Some(x), Some(y)) => {
                let x = arith::float(op, x as f64, y as f64) as f32;
                return self.float(x);
            }
            (Some(1.0), None) if op == Binary::Mul => return b,
            (None, Some(1.0)) if matches!(op, Binary::Mul | Binary::Div) => return a,
            (None, Some(0.0)) if op == Binary::Sub => return a,
            // Exact, and a product costs less.
            (None, Some(y)) if op == Binary::Div && is_power_of_two(y) && is_power_of_two(1.0 / y) => {
                let inverse = self.float(1.0 / y);
                return self.float_binary(Binary::Mul, a, inverse);
            }
            _ => {}
        }
        if a == b && matches!(op, Binary::Min | Binary::Max) {
            return a;
        }
        let sorts = matches!(op, Binary::Add | Binary::Mul | Binary::Min | Binary::Max | Binary::Eq);
        let (a, b) = if sorts { self.sorted(a, b) } else { (a, b) };
        self.intern(Node::Binary(op, a, b), Range::FULL, None, None)
    }

    fn equal_bools(&mut self, a: Id, b: Id) -> Id {
        match (self.as_bool(a), self.as_bool(b)) {
            (Some(x), _) => return if x { b } else { self.not(b) },
            (_, Some(y)) => return if y { a } else { self.not(a) },
            _ if a == b => return self.boolean(true),
            _ => {}
        }
        let (a, b) = self.sorted(a, b);
        self.intern(Node::Binary(Binary::Eq, a, b), Range::FULL, None, None)
    }

    fn and_or(&mut self, op: Binary, a: Id, b: Id) -> Id {
        // `false and x` is false and `true and x` is x; for `or` the other way round.
        let decides = op == Binary::Or;
        for (x, y) in [(a, b), (b, a)] {
            match self.as_bool(x) {
                Some(value) if value == decides => return x,
                Some(_) => return y,
                None => {}
            }
        }
        let mut operands = self.chain(op, a);
        operands.extend(self.chain(op, b));
        operands.sort_by_key(|i| self.key(*i));
        operands.dedup();
        if operands.len() > MAX_TERMS {
            let (a, b) = self.sorted(a, b);
            return self.intern(Node::Binary(op, a, b), Range::FULL, None, None);
        }
        let mut node = operands[0];
        for i in 1..operands.len() {
            let chain = Some(operands[..=i].to_vec());
            node = self.intern(Node::Binary(op, node, operands[i]), Range::FULL, None, chain);
        }
        node
    }

    pub(in crate::score) fn sorted(&self, a: Id, b: Id) -> (Id, Id) {
        if self.key(a) <= self.key(b) { (a, b) } else { (b, a) }
    }
}

fn is_power_of_two(x: f32) -> bool {
    x.is_normal() && x.to_bits() & 0x007f_ffff == 0
}
