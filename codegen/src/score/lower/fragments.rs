//! For threads that hold scores at fixed distances from a first key: floats as sums of multiples of key and score, caps
//! of the score, reads along the keys.

use super::stmt::{Aspect, Expr, Function, Given, Name, Op, Scope, Ty};
use super::values::index_fits;
use super::{AlongKeys, Capped, Lowering, slot};
use crate::score::graph::{Depends, Node};
use crate::score::syntax::words::{Binary, Id, Type, Unary, Var};

/// A float as `base + by_key * offset + by_score * raw`: the parts that are there.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Affine {
    pub(super) base: Option<Expr>,
    pub(super) by_key: Option<Expr>,
    pub(super) by_score: Option<Expr>,
}

impl Affine {
    fn has(&self) -> [bool; 3] {
        [&self.base, &self.by_key, &self.by_score].map(Option::is_some)
    }

    /// It is a multiple of the score, and nothing else.
    fn is_multiple(&self) -> bool {
        self.has() == [false, false, true]
    }

    fn into_parts(self) -> [Option<Expr>; 3] {
        [self.base, self.by_key, self.by_score]
    }

    /// The float itself.
    fn value(&self) -> Expr {
        let [raw, offset] = [Given::Raw, Given::Offset].map(Expr::Given);
        let offset = offset.cast(Ty::F32);
        let of_key = match (self.by_key.clone(), self.base.clone()) {
            (Some(c), Some(b)) => Some(Expr::Call(Function::Fma, vec![c, offset, b])),
            (Some(c), None) => Some(Expr::infix(Op::Mul, c, offset)),
            (None, base) => base,
        };
        match (self.by_score.clone(), of_key) {
            (Some(k), Some(rest)) => Expr::Call(Function::Fma, vec![raw, k, rest]),
            (Some(k), None) => Expr::infix(Op::Mul, raw, k),
            (None, rest) => rest.unwrap_or(Expr::float(0.0)),
        }
    }
}

impl Lowering<'_> {
    pub(super) fn find_affine(&mut self, roots: &[Id]) {
        let graph = self.graph;
        let needed: Vec<Id> = graph.ids().filter(|id| self.needed[id.index()]).collect();
        for id in &needed {
            self.affine[id.index()] = self.affine_parts(*id);
        }
        for id in needed.into_iter().filter(|id| self.affine[id.index()].is_none()) {
            graph.node(id).operands().into_iter().for_each(|o| self.plain[o.index()] = true);
        }
        roots.iter().for_each(|r| self.plain[r.index()] = true);
    }

    /// The parts of a float that changes with the key or the score, named after it; the statements come later.
    fn affine_parts(&self, id: Id) -> Option<Affine> {
        let Depends { score, kv, .. } = self.graph.depends(id);
        if self.graph.ty(id) != Type::Float || !(score || kv) {
            return None;
        }
        let of = |x: Id| match self.is_fixed(x) {
            true => Some(Affine { base: Some(self.operand(x)), ..Affine::default() }),
            false => self.affine[x.index()].clone(),
        };
        let named = |[base, by_key, by_score]: [bool; 3]| {
            let part = |part, is_there: bool| is_there.then_some(Expr::Name(Name::Aspect(part, id)));
            Affine {
                base: part(Aspect::Base, base),
                by_key: part(Aspect::ByKey, by_key),
                by_score: part(Aspect::ByScore, by_score),
            }
        };
        match *self.graph.node(id) {
            Node::Var(Var::Score) => Some(Affine { by_score: Some(Expr::Given(Given::Scale)), ..Affine::default() }),
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
    fn multiple_of_key(&self, id: Id) -> Option<(i64, Expr)> {
        let linear = self.graph.linear(id);
        let (of_key, rest): (Vec<_>, Vec<_>) = linear.terms.iter().partition(|(_, t)| self.graph.depends(*t).kv);
        let &[(factor, key)] = &of_key[..] else { return None };
        if *self.graph.node(key) != Node::Var(Var::Kv) || !self.graph.is_safe(&linear) {
            return None;
        }
        let wide = |x| Expr::Int(x, Ty::I64);
        let first = Expr::infix(Op::Mul, wide(factor), Expr::Given(Given::KvFirst));
        let rest = rest.into_iter().map(|(c, term)| Expr::infix(Op::Mul, wide(c), self.operand(term)));
        Some((factor, Expr::sum([first].into_iter().chain(rest).chain([wide(linear.constant)]))))
    }

    /// The statements of a float's parts, and of the float where it is read as it is.
    pub(super) fn affine_statements(&mut self, id: Id, parts: Affine) {
        let of = |x: Id| match self.is_fixed(x) {
            true => [Some(self.operand(x)), None, None],
            false => self.affine[x.index()].clone().map_or([None, None, None], Affine::into_parts),
        };
        let values: [Option<Expr>; 3] = match *self.graph.node(id) {
            Node::Unary(Unary::ToFloat, x) => {
                let (factor, first) = self.multiple_of_key(x).expect("found to be one");
                let by_key = Expr::float((factor as f32).abs());
                [Some(first.cast(Ty::F32)), Some(if factor < 0 { by_key.neg() } else { by_key }), None]
            }
            Node::Unary(_, x) => of(x).map(|x| x.map(Expr::neg)),
            Node::Binary(op @ (Binary::Mul | Binary::Div), x, y) => {
                let (x, y) = if self.is_fixed(y) { (x, y) } else { (y, x) };
                let (op, by) = (if op == Binary::Mul { Op::Mul } else { Op::Div }, self.operand(y));
                of(x).map(|x| x.map(|x| Expr::infix(op, x, by.clone())))
            }
            Node::Binary(op, x, y) => {
                let minus = op == Binary::Sub;
                let mut of_y = of(y).into_iter();
                of(x).map(|x| match (x, of_y.next().expect("three")) {
                    (Some(x), Some(y)) => Some(Expr::infix(if minus { Op::Sub } else { Op::Add }, x, y)),
                    (None, Some(y)) => Some(if minus { y.neg() } else { y }),
                    (x, None) => x,
                })
            }
            _ => unreachable!("affine_parts() finds no other nodes"),
        };
        let plain = self.plain[id.index()].then(|| parts.value());
        for (part, value) in parts.into_parts().into_iter().zip(values) {
            match (part, value) {
                // A part that another float has already.
                (Some(part), Some(value)) if part == value => {}
                (Some(Expr::Name(name)), Some(value)) => self.push(Scope::Row, Ty::F32, name, value),
                _ => {}
            }
        }
        if let Some(value) = plain {
            self.push(Scope::Score, Ty::F32, Name::Node(id), value);
        }
    }

    /// A number times the tanh of a multiple of the score: the number and the factor of the score.
    pub(super) fn capped(&self, id: Id) -> Option<[Expr; 2]> {
        let Node::Binary(Binary::Mul, x, y) = *self.graph.node(id) else { return None };
        let (cap, of) = if self.is_fixed(x) { (x, y) } else { (y, x) };
        let Node::Unary(Unary::Tanh, x) = *self.graph.node(of) else { return None };
        let parts = self.affine[x.index()].as_ref().filter(|a| a.is_multiple())?;
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
    pub(super) fn capped_statements(&mut self, id: Id, [cap, factor]: [Expr; 2]) {
        let series = Name::Aspect(Aspect::Series, id);
        let coefficients = Expr::Call(Function::CapSeries, vec![cap.clone(), factor.clone()]);
        let value = Expr::Call(Function::Cap, vec![Expr::Given(Given::Raw), cap, factor, Expr::Name(series)]);
        self.push(Scope::Row, Ty::CapSeries, series, coefficients);
        self.push(Scope::Score, Ty::F32, Name::Node(id), value);
    }

    /// A float that is read along the keys, from a tensor in which only the last index changes with them.
    pub(super) fn is_along_keys(&self, id: Id) -> bool {
        let Node::Load { tensor, index } = self.graph.node(id) else { return false };
        let axes = self.graph.declarations()[*tensor].axes.as_deref().unwrap_or_default();
        let (Some((last, leading)), Some(axis)) = (index.split_last(), axes.last()) else { return false };
        *self.graph.node(*last) == Node::Var(Var::Kv)
            && index_fits(self.graph, *axis, *last)
            && leading.iter().all(|i| !self.graph.depends(*i).kv)
            && self.graph.ty(id) == Type::Float
    }

    pub(super) fn along_statements(&mut self, id: Id) {
        let Node::Load { tensor, index } = self.graph.node(id) else { return };
        let (t, storage) = (slot(self.graph, *tensor), self.graph.declarations()[*tensor].storage);
        let (first, stride) = (Name::Aspect(Aspect::First, id), Name::Stride(t, index.len() - 1));
        let mut places = self.places(*tensor, index);
        places.pop();
        places.push(Expr::infix(Op::Mul, Expr::Given(Given::KvFirst), Expr::Name(stride)));
        let nth = Expr::Int(self.code.along_keys.len() as i64, Ty::I32);
        let read = vec![Expr::Name(first), Expr::Given(Given::Offset), Expr::Name(stride), nth];
        let address = Expr::Address(Name::Data(t), Box::new(Expr::sum(places)));
        self.push(Scope::Row, Ty::Pointer(storage), first, address);
        self.push(Scope::Score, Ty::F32, Name::Node(id), Expr::Call(Function::Along(storage), read));
        self.code.along_keys.push(AlongKeys { load: id, first, stride, bytes: storage.bytes() as u32 });
    }

    /// The first result as the score and what is added to it.
    pub(super) fn shift(&mut self, roots: &[Id]) {
        let is_multiple = |r: &Id| self.affine[r.index()].as_ref().is_some_and(Affine::is_multiple);
        self.code.multiples = roots.iter().skip(1).all(is_multiple);
        let Some(parts) = roots.first().and_then(|r| self.affine[r.index()].clone()) else { return };
        let is_score = parts.by_score == Some(Expr::Given(Given::Scale));
        if is_score && (parts.base.is_some() || parts.by_key.is_some()) {
            self.code.shift = Some([parts.by_key, parts.base].map(|part| part.unwrap_or(Expr::float(0.0))));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::lower_scores;
    use crate::score::Program;

    #[test]
    fn caps_are_bounded_by_what_is_written_or_promised() {
        let bound = |text: &str| {
            let program = Program::parse(text).unwrap();
            lower_scores(program.graph(), &[program.score().unwrap()]).capped.map(|c| c.bound)
        };
        assert_eq!(bound("score = 30.0 * tanh(score / 30.0);"), Some(30.0));
        assert_eq!(bound("score = tanh(score) * -4.0;"), Some(4.0));
        assert_eq!(bound("cap: float in -50..20; score = cap * tanh(score / cap);"), Some(50.0));
        assert_eq!(bound("cap: float; score = cap * tanh(score / cap);"), None);
        // The range of another scalar is no bound, nor is one of a cap that a row changes.
        assert_eq!(bound("cap: float; by: float in 0..1; score = cap * tanh(score * by);"), None);
        assert_eq!(bound("s: float[q_len]; score = 30.0 * tanh(score * s[q]);"), None);
        assert_eq!(bound("score = 30.0 * tanh(score / 30.0) + 1.0;"), None);
    }
}
