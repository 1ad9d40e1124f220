//! What threads that hold scores at fixed distances from a first key get: floats as sums of multiples of key and score, caps of
//! the score, reads along the keys.

use super::values::{index_fits, int_literal};
use super::{AlongKeys, Capped, Lowering, slot};
use crate::score::graph::{Depends, Node};
use crate::score::syntax::range::Range;
use crate::score::syntax::words::{Binary, Id, Type, Unary, Var};

/// The parts of a float that are there.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Affine {
    pub(super) base: Option<String>,
    pub(super) by_key: Option<String>,
    pub(super) by_score: Option<String>,
}

impl Affine {
    pub(super) fn all(&self) -> [Option<String>; 3] {
        [self.base.clone(), self.by_key.clone(), self.by_score.clone()]
    }

    pub(super) fn parts(&self) -> impl Iterator<Item = &String> {
        [&self.base, &self.by_key, &self.by_score].into_iter().flatten()
    }

    pub(super) fn has(&self) -> [bool; 3] {
        [&self.base, &self.by_key, &self.by_score].map(Option::is_some)
    }

    /// The float itself.
    pub(super) fn value(&self) -> String {
        let of_key = match (&self.by_key, &self.base) {
            (Some(c), Some(b)) => Some(format!("fmaf({c}, (float)offset, {b})")),
            (Some(c), None) => Some(format!("{c} * (float)offset")),
            (None, b) => b.clone(),
        };
        match (&self.by_score, of_key) {
            (Some(k), Some(rest)) => format!("fmaf(raw, {k}, {rest})"),
            (Some(k), None) => format!("raw * {k}"),
            (None, rest) => rest.unwrap_or_else(|| "0.0f".to_owned()),
        }
    }
}

impl Lowering<'_> {
    pub(super) fn find_affine(&mut self, roots: &[Id], needed: &[bool]) {
        for id in self.graph.ids().filter(|id| needed[id.index()]) {
            self.affine[id.index()] = self.affine_parts(id);
        }
        let nodes = || self.graph.ids().filter(|id| needed[id.index()]);
        for id in nodes().filter(|id| self.affine[id.index()].is_none()) {
            self.graph.node(id).operands().into_iter().for_each(|o| self.plain[o.index()] = true);
        }
        roots.iter().for_each(|r| self.plain[r.index()] = true);
    }

    /// The parts of a float that changes with the key or the score, named after it; the statements come later.
    pub(super) fn affine_parts(&self, id: Id) -> Option<Affine> {
        let Depends { score, kv, .. } = self.graph.depends(id);
        if self.graph.ty(id) != Type::Float || !(score || kv) {
            return None;
        }
        let of = |x: Id| match self.is_fixed(x) {
            true => Some(Affine { base: Some(self.operand(x)), ..Affine::default() }),
            false => self.affine[x.index()].clone(),
        };
        let named = |parts: [bool; 3]| {
            let name = |part: &str| Some(format!("{}{part}", self.operand(id)));
            let [base, by_key, by_score] = parts;
            Affine {
                base: name("b").filter(|_| base),
                by_key: name("c").filter(|_| by_key),
                by_score: name("k").filter(|_| by_score),
            }
        };
        match *self.graph.node(id) {
            Node::Var(Var::Score) => Some(Affine { by_score: Some("scale".to_owned()), ..Affine::default() }),
            Node::Unary(Unary::ToFloat, x) => self.multiple_of_key(x).map(|_| named([true, true, false])),
            Node::Unary(Unary::Neg, x) => of(x).map(|x| named(x.has())),
            Node::Binary(op @ (Binary::Add | Binary::Sub), x, y) => {
                let (x, y, adds) = (of(x)?, of(y)?, op == Binary::Add);
                let (a, b) = (x.has(), y.has());
                let mut sum = named([a[0] || b[0], a[1] || b[1], a[2] || b[2]]);
                // A sum with the score itself keeps its factor: nothing is computed, and it stays recognisable.
                match (x.by_score, y.by_score) {
                    (Some(x), None) => sum.by_score = Some(x),
                    (None, Some(y)) if adds => sum.by_score = Some(y),
                    _ => {}
                }
                Some(sum)
            }
            Node::Binary(Binary::Mul, x, y) if self.is_fixed(x) => of(y).map(|y| named(y.has())),
            Node::Binary(Binary::Mul | Binary::Div, x, y) if self.is_fixed(y) => of(x).map(|x| named(x.has())),
            _ => None,
        }
    }

    /// A sum that cannot wrap, of a multiple of the key and what does not depend on it: the factor, and the sum at the
    /// first key.
    pub(super) fn multiple_of_key(&self, id: Id) -> Option<(i64, String)> {
        let linear = self.graph.linear(id);
        let (of_key, rest): (Vec<_>, Vec<_>) = linear.terms.iter().partition(|(_, t)| self.graph.depends(*t).kv);
        let &[(factor, key)] = &of_key[..] else { return None };
        if *self.graph.node(key) != Node::Var(Var::Kv) || !self.graph.is_safe(&linear) {
            return None;
        }
        let wide = Range::FULL;
        let mut sum = format!("{} * kv_first", int_literal(factor, wide));
        for (c, term) in rest {
            sum.push_str(&format!(" + {} * {}", int_literal(c, wide), self.operand(term)));
        }
        Some((factor, format!("{sum} + {}", int_literal(linear.constant, wide))))
    }

    /// The statements of a float's parts, and of the float where it is read as it is.
    pub(super) fn affine_statements(&mut self, id: Id, parts: &Affine) {
        let of = |x: Id| match self.is_fixed(x) {
            true => [Some(self.operand(x)), None, None],
            false => self.affine[x.index()].as_ref().map_or([None, None, None], Affine::all),
        };
        let values: [Option<String>; 3] = match *self.graph.node(id) {
            Node::Unary(Unary::ToFloat, x) => {
                let (factor, first) = self.multiple_of_key(x).expect("found to be one");
                [Some(format!("(float)({first})")), Some(format!("{:?}f", factor as f32)), None]
            }
            Node::Unary(_, x) => of(x).map(|x| x.map(|x| format!("-{x}"))),
            Node::Binary(op @ (Binary::Mul | Binary::Div), x, y) => {
                let (x, y) = if self.is_fixed(y) { (x, y) } else { (y, x) };
                let by = self.operand(y);
                of(x).map(|x| x.map(|x| format!("{x} {} {by}", op.name())))
            }
            Node::Binary(op, x, y) => {
                let minus = if op == Binary::Sub { "-" } else { "" };
                let mut of_y = of(y).into_iter();
                of(x).map(|x| match (x, of_y.next().expect("three")) {
                    (Some(x), Some(y)) => Some(format!("{x} {} {y}", op.name())),
                    (None, Some(y)) => Some(format!("{minus}{y}")),
                    (x, None) => x,
                })
            }
            _ => unreachable!("affine_parts() finds no other nodes"),
        };
        for (name, value) in parts.all().into_iter().zip(values) {
            let (Some(name), Some(value)) = (name, value) else { continue };
            if name != value {
                self.code.row.push_str(&format!("const float {name} = {value};\n"));
            }
        }
        if self.plain[id.index()] {
            let line = format!("const float {} = {};\n", self.operand(id), parts.value());
            self.code.element.push_str(&line);
        }
    }

    /// A number times the tanh of a multiple of the score: the number and the factor of the score.
    pub(super) fn capped(&self, id: Id) -> Option<[String; 2]> {
        let Node::Binary(Binary::Mul, x, y) = *self.graph.node(id) else { return None };
        let (cap, of) = if self.is_fixed(x) { (x, y) } else { (y, x) };
        let Node::Unary(Unary::Tanh, x) = *self.graph.node(of) else { return None };
        let parts = self.affine[x.index()].as_ref().filter(|a| a.has() == [false, false, true])?;
        let factor = parts.by_score.clone()?;
        self.is_fixed(cap).then(|| [self.operand(cap), factor])
    }

    /// ... of which the number is written out or a scalar with a range, and the factor is the same for all rows.
    pub(super) fn bounded_cap(&self, root: Id) -> Option<Capped> {
        let [cap, factor] = self.capped(root)?;
        let Node::Binary(_, x, y) = *self.graph.node(root) else { return None };
        let (of, tanh) = if self.is_fixed(x) { (x, y) } else { (y, x) };
        let bound = match self.graph.node(of) {
            Node::Float(bits) => f32::from_bits(*bits).abs(),
            Node::Scalar(i) => self.graph.declarations()[*i].float_bound()?,
            _ => return None,
        };
        let same = self.graph.node(tanh).operands().iter().all(|id| !self.graph.depends(*id).q);
        (same && bound.is_finite()).then_some(Capped { cap, factor, bound })
    }

    /// Its statements: coefficients of a polynomial of the score for the small ones (`ft_capf`).
    pub(super) fn capped_statements(&mut self, id: Id, [cap, factor]: [String; 2]) {
        let name = self.operand(id);
        let line = format!("const CapSeries {name}p = cap_series({cap}, {factor});\n");
        self.code.row.push_str(&line);
        self.code.element.push_str(&format!("const float {name} = ft_capf(raw, {cap}, {factor}, {name}p);\n"));
    }

    /// A float that is read along the keys, from a tensor in which only the last index changes with them.
    pub(super) fn along_keys(&self, id: Id) -> bool {
        let Node::Load { tensor, index } = self.graph.node(id) else { return false };
        let axes = self.graph.declarations()[*tensor].axes.as_deref().unwrap_or_default();
        let (Some((last, leading)), Some(axis)) = (index.split_last(), axes.last()) else { return false };
        *self.graph.node(*last) == Node::Var(Var::Kv)
            && index_fits(self.graph, *axis, *last)
            && leading.iter().all(|i| !self.graph.depends(*i).kv)
            && self.graph.ty(id) == Type::Float
    }

    pub(super) fn along_statements(&mut self, id: Id) {
        let Node::Load { tensor, index } = self.graph.node(id).clone() else { return };
        let (t, storage) = (slot(self.graph, tensor), self.graph.declarations()[tensor].storage);
        let (p, name, last) = (self.prefix, self.operand(id), index.len() - 1);
        let mut places = self.places(tensor, &index);
        places[last] = format!("kv_first * {p}t{t}s{last}");
        let (element, at) = (self.dialect.element(storage), places.join(" + "));
        self.code.row.push_str(&format!("const {element} *const {name}p = {p}t{t} + ({at});\n"));
        let nth = self.code.along_keys.len();
        let read = format!("ft_along_{}({name}p, offset, {p}t{t}s{last}, {nth})", storage.name());
        self.code.element.push_str(&format!("const float {name} = {read};\n"));
        let (first, stride) = (format!("{name}p"), format!("{p}t{t}s{last}"));
        self.code.along_keys.push(AlongKeys { load: id, first, stride, bytes: storage.bytes() as u32 });
    }

    /// The first result as the score and what is added to it.
    pub(super) fn shift(&mut self, roots: &[Id]) {
        let is_multiple = |r: &Id| self.affine[r.index()].as_ref().is_some_and(|a| a.has() == [false, false, true]);
        self.code.multiples = roots.iter().skip(1).all(is_multiple);
        let Some(parts) = roots.first().and_then(|r| self.affine[r.index()].clone()) else { return };
        if parts.by_score.as_deref() == Some("scale") && (parts.base.is_some() || parts.by_key.is_some()) {
            self.code.shift = Some([parts.by_key, parts.base].map(|part| part.unwrap_or_else(|| "0.0f".to_owned())));
        }
    }
}
