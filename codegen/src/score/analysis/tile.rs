//! Which tiles a mask leaves out, which it leaves whole, and which keys a block of queries can see at all.
//!
//! Interval arithmetic, done on expressions and not on numbers: every int of the mask gets two expressions for its
//! least and greatest value over a tile, every bool gets two for whether it can be true and can be false. The outcome
//! is a program of the same language over `q_first`, `q_last`, `kv_first` and `kv_last`: the interpreter evaluates it
//! to draw a map, and kernels compile it to bound their loops.
//!
//! A comparison of sums is exact, since every coordinate occurs in it once. Where a mask joins several conditions with
//! `and`, bounds that they put on the same sum of coordinates are joined before the rest is looked at, which makes
//! windows, chunks and dilated masks exact too. What depends on the elements of a tensor is exact if its indices are
//! fixed over the tile, or if it is declared not to decrease; else the declared range of the elements is all that is
//! known, or the least and the greatest of those that the tile reads, for kernels that look at them
//! ([`TileProgram::by_elements`]). Floats that change within the tile are followed in masks with certain functions
//! alone ([`super::floats`]). All of these leave a tile mixed, never wrong.

use super::floats::{Span, is_followed};
use crate::score::graph::linear::{Linear, gcd};
use crate::score::graph::{Graph, Node};
use crate::score::syntax::range::Range;
use crate::score::syntax::words::{Binary, Id, Type, Unary, Var};
use std::collections::HashMap;

/// What the mask does to a tile.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TileKind {
    /// No query attends to any key: the tile is not even loaded.
    Masked,
    /// Some do, as far as is known: the mask is evaluated for each.
    Mixed,
    /// Every query attends to every key: no mask code.
    Visible,
}

/// The expressions that classify a tile.
#[derive(Debug, Clone)]
pub struct TileProgram {
    /// All expressions, over the program's declarations and the tile's first and last rows.
    pub graph: Graph,
    /// Bool: no query of the tile attends to any of its keys.
    pub all_masked: Id,
    /// Bool: every query of the tile attends to every one of its keys.
    pub all_visible: Id,
    /// Int: no query of the tile attends to a key before this one. Knows no keys of the tile; may be negative.
    pub kv_begin: Id,
    /// Int: no query of the tile attends to this key or a later one; may be beyond `kv_len`, or before `kv_begin`.
    pub kv_end: Id,
}

impl TileProgram {
    /// The classification of a mask. `by_elements`: the kernel looks at the elements of tensors that a tile reads, so
    /// what depends on them lies between their least and greatest.
    pub(in crate::score) fn of(graph: &Graph, mask: Option<Id>, by_elements: bool) -> Self {
        let mut target = Graph::new(graph.declarations().to_vec());
        let zero = target.int(0);
        let kv_len = target.var(Var::KvLen);
        let (yes, no) = (target.boolean(true), target.boolean(false));
        let (mut all_masked, mut all_visible, mut kv_begin, mut kv_end) = (no, yes, zero, kv_len);
        if let Some(mask) = mask {
            let mut analysis = Analysis::new(graph, target, mask, by_elements);
            (all_masked, all_visible) = analysis.verdict(mask);
            let keys = analysis.keys(mask);
            target = analysis.target;
            kv_begin = keys.0.map_or(zero, |begin| target.binary(Binary::Max, begin, zero));
            kv_end = keys.1.map_or(kv_len, |end| target.binary(Binary::Min, end, kv_len));
        }
        // The program's declarations stay, so that both read the same side data.
        let (graph, ids) = target.pruned(&[all_masked, all_visible, kv_begin, kv_end], true);
        Self { graph, all_masked: ids[0], all_visible: ids[1], kv_begin: ids[2], kv_end: ids[3] }
    }

    /// The canonical text, for people and tests.
    pub fn text(&self) -> String {
        let results = [
            ("all_masked", self.all_masked),
            ("all_visible", self.all_visible),
            ("kv_begin", self.kv_begin),
            ("kv_end", self.kv_end),
        ];
        crate::score::graph::print::print(&self.graph, &results)
    }
}

/// What a tile makes of a node.
#[derive(Debug, Clone, Copy)]
pub(in crate::score) enum Image {
    /// An int between two expressions, both included.
    Int(Id, Id),
    /// A bool: whether it can be false, and can be true.
    Bool(Id, Id),
    /// A float between two bounds.
    Float(Span),
    /// A value that is the same all over the tile.
    Point(Id),
    /// Nothing is known.
    Unknown,
}

/// A sum of what changes within the tile, without common factor and with a positive first coefficient.
pub(in crate::score) type Form = Vec<(i64, Id)>;

/// Bounds in the target graph, for some forms.
pub(in crate::score) type Bounds = HashMap<Form, (Option<Id>, Option<Id>)>;

pub(in crate::score) struct Analysis<'a> {
    pub(in crate::score) source: &'a Graph,
    pub(in crate::score) target: Graph,
    pub(in crate::score) needed: Vec<bool>,
    pub(in crate::score) images: Vec<Image>,
    /// What the conditions joined with `and` say of a form; empty where that may not be used.
    pub(in crate::score) bounds: Bounds,
    /// Whether elements of tensors are looked at.
    looks: bool,
    /// Whether floats are followed.
    floats: bool,
}

impl<'a> Analysis<'a> {
    fn new(source: &'a Graph, target: Graph, mask: Id, looks: bool) -> Self {
        let mut needed = vec![false; source.nodes().len()];
        needed[mask.index()] = true;
        for i in (0..=mask.index()).rev() {
            if needed[i] {
                match sum_of(source, Id(i as u32)) {
                    Some(linear) => linear.terms.iter().for_each(|(_, t)| needed[t.index()] = true),
                    None => source.nodes()[i].operands().iter().for_each(|o| needed[o.index()] = true),
                }
            }
        }
        let images = vec![Image::Unknown; source.nodes().len()];
        let floats = source.nodes().iter().zip(&needed).any(|(node, needed)| *needed && is_followed(node));
        let mut analysis = Self { source, target, needed, images, bounds: Bounds::new(), looks, floats };
        analysis.run();
        analysis
    }

    /// All masked, all visible.
    fn verdict(&mut self, mask: Id) -> (Id, Id) {
        let (can_be_false, can_be_true) = self.bool(mask);
        let (mut all_masked, mut all_visible) = (self.target.not(can_be_true), self.target.not(can_be_false));
        // A visible key satisfies all conditions that `and` joins, a masked one violates all that `or` joins.
        if let Some(never) = self.impossible(mask, Binary::And) {
            all_masked = self.target.or(all_masked, never);
        }
        if let Some(never) = self.impossible(mask, Binary::Or) {
            all_visible = self.target.or(all_visible, never);
        }
        (all_masked, all_visible)
    }

    pub(in crate::score) fn run(&mut self) {
        for id in self.source.ids() {
            if self.needed[id.index()] {
                self.images[id.index()] = self.image(id);
            }
        }
    }

    /// A node that is the same all over the tile, in the target graph.
    fn copy(&mut self, id: Id) -> Option<Id> {
        let point = |o: Id| match self.images[o.index()] {
            Image::Point(p) => Some(p),
            _ => None,
        };
        let node = self.source.node(id).clone();
        let operands: Option<Vec<Id>> = node.operands().into_iter().map(point).collect();
        let o = operands?;
        let g = &mut self.target;
        Some(match node {
            Node::Bool(x) => g.boolean(x),
            Node::Int(x) => g.int(x),
            Node::Float(bits) => g.float(f32::from_bits(bits)),
            Node::Var(Var::Q | Var::Kv | Var::Score) => return None,
            Node::Var(v) => g.var(v),
            Node::Scalar(i) => g.scalar(i),
            Node::Load { tensor, .. } => g.load(tensor, o),
            Node::Extreme { .. } => return None,
            Node::Unary(op, _) => g.unary(op, o[0]),
            Node::Binary(op, ..) => g.binary(op, o[0], o[1]),
            Node::Select(..) => g.select(o[0], o[1], o[2]),
        })
    }

    fn image(&mut self, id: Id) -> Image {
        if let Some(linear) = sum_of(self.source, id) {
            let (form, factor, rest) = self.split(&linear);
            if form.is_empty() {
                return Image::Point(rest);
            }
            let (lo, hi) = self.sum_range(form, factor, rest);
            return Image::Int(lo, hi);
        }
        if let Some(point) = self.copy(id) {
            return Image::Point(point);
        }
        match self.source.ty(id) {
            Type::Float if self.floats => self.float_image(id).map_or(Image::Unknown, Image::Float),
            Type::Float => Image::Unknown,
            Type::Bool => self.bool_image(id),
            Type::Int => {
                let mut range = self.int_image(id);
                if let Some(bounds) = self.bounds.get(&vec![(1, id)]).copied() {
                    range = self.tighten(range, bounds);
                }
                Image::Int(range.0, range.1)
            }
        }
    }

    /// Least and greatest value of an int.
    pub(in crate::score) fn int(&mut self, id: Id) -> (Id, Id) {
        match self.images[id.index()] {
            Image::Int(lo, hi) => (lo, hi),
            Image::Point(p) => (p, p),
            _ => self.declared(id),
        }
    }

    /// Whether a bool can be false, and can be true.
    pub(in crate::score) fn bool(&mut self, id: Id) -> (Id, Id) {
        match self.images[id.index()] {
            Image::Bool(f, t) => (f, t),
            Image::Point(p) => (self.target.not(p), p),
            _ => {
                let yes = self.target.boolean(true);
                (yes, yes)
            }
        }
    }

    /// What is known of an int wherever it is.
    fn declared(&mut self, id: Id) -> (Id, Id) {
        let Range { lo, hi } = self.source.range(id);
        (self.target.int(lo), self.target.int(hi))
    }

    fn int_image(&mut self, id: Id) -> (Id, Id) {
        match *self.source.node(id) {
            Node::Var(Var::Q) => (self.target.var(Var::QFirst), self.target.var(Var::QLast)),
            Node::Var(Var::Kv) => (self.target.var(Var::KvFirst), self.target.var(Var::KvLast)),
            Node::Load { tensor, ref index } => self.load_range(id, tensor, &index.clone()),
            Node::Unary(op, x) if op.rounds() => match self.rounded_image(op, x) {
                Some(range) => range,
                None => self.declared(id),
            },
            // A range that wrapped around says nothing.
            _ if self.source.range(id) == Range::FULL => self.declared(id),
            Node::Unary(_, a) => {
                let (lo, hi) = self.int(a);
                let g = &mut self.target;
                let (minus_lo, zero) = (g.unary(Unary::Neg, lo), g.int(0));
                let minus_hi = g.unary(Unary::Neg, hi);
                let gap = g.binary(Binary::Max, lo, minus_hi);
                (g.binary(Binary::Max, gap, zero), g.binary(Binary::Max, hi, minus_lo))
            }
            Node::Binary(op @ (Binary::Min | Binary::Max), a, b) => {
                let ((a, b), (x, y)) = (self.int(a), self.int(b));
                (self.target.binary(op, a, x), self.target.binary(op, b, y))
            }
            Node::Binary(Binary::Mul, a, b) => self.product_range(a, b),
            Node::Binary(Binary::FloorDiv, a, d) => self.quotient_range(id, a, d),
            Node::Binary(Binary::Mod, a, d) => self.rest_range(id, a, d),
            Node::Select(c, a, b) => {
                let (can_be_false, can_be_true) = self.bool(c);
                let ((a, b), (x, y)) = (self.int(a), self.int(b));
                let g = &mut self.target;
                let mut either = |op, a, x| {
                    let both = g.binary(op, a, x);
                    let maybe = g.select(can_be_false, both, a);
                    g.select(can_be_true, maybe, x)
                };
                (either(Binary::Min, a, x), either(Binary::Max, b, y))
            }
            // Sums that are not safe among others.
            _ => self.declared(id),
        }
    }

    /// `factor * form + rest`, with what is known of the form as a whole.
    fn sum_range(&mut self, form: Form, factor: i64, rest: Id) -> (Id, Id) {
        let mut range = self.form_range(&form);
        if let Some(bounds) = self.bounds.get(&form).copied() {
            range = self.tighten(range, bounds);
        }
        let (lo, hi) = if factor < 0 { (range.1, range.0) } else { range };
        let mut end = |x| self.target.weighted_sum(0, [(factor, x), (1, rest)]);
        (end(lo), end(hi))
    }

    /// `linear = factor * form + rest`, the rest in the target graph.
    pub(in crate::score) fn split(&mut self, linear: &Linear) -> (Form, i64, Id) {
        let (mut form, mut points) = (Form::new(), Vec::new());
        for &(c, term) in &linear.terms {
            match self.images[term.index()] {
                Image::Point(p) => points.push((c, p)),
                _ => form.push((c, term)),
            }
        }
        let rest = self.target.weighted_sum(linear.constant, points);
        let mut factor = form.iter().fold(0, |g, (c, _)| gcd(g, c.unsigned_abs())) as i64;
        if form.first().is_some_and(|(c, _)| *c < 0) {
            factor = -factor;
        }
        form.iter_mut().for_each(|(c, _)| *c /= factor);
        (form, factor, rest)
    }

    pub(in crate::score) fn form_range(&mut self, form: &Form) -> (Id, Id) {
        let (mut least, mut greatest) = (Vec::new(), Vec::new());
        for &(c, term) in form {
            let (lo, hi) = self.int(term);
            let (lo, hi) = if c < 0 { (hi, lo) } else { (lo, hi) };
            least.push((c, lo));
            greatest.push((c, hi));
        }
        (self.target.weighted_sum(0, least), self.target.weighted_sum(0, greatest))
    }

    pub(in crate::score) fn tighten(
        &mut self,
        (lo, hi): (Id, Id),
        (least, greatest): (Option<Id>, Option<Id>),
    ) -> (Id, Id) {
        let lo = least.map_or(lo, |x| self.target.binary(Binary::Max, lo, x));
        let hi = greatest.map_or(hi, |x| self.target.binary(Binary::Min, hi, x));
        (lo, hi)
    }

    fn load_range(&mut self, id: Id, tensor: usize, index: &[Id]) -> (Id, Id) {
        let declaration = &self.source.declarations()[tensor];
        let rank = declaration.axes.as_ref().map_or(0, Vec::len);
        let nondecreasing = declaration.nondecreasing;
        let fixed: Vec<Option<Id>> = index
            .iter()
            .map(|i| match self.images[i.index()] {
                Image::Point(p) => Some(p),
                _ => None,
            })
            .collect();
        let leading: Option<Vec<Id>> = fixed[..rank.saturating_sub(1)].iter().copied().collect();
        let (Some(leading), true) = (leading, nondecreasing) else {
            return if self.looks { self.extremes(tensor, index) } else { self.declared(id) };
        };
        let (lo, hi) = self.int(index[rank - 1]);
        let mut at = |last: Id| self.target.load(tensor, leading.iter().copied().chain([last]).collect());
        (at(lo), at(hi))
    }

    /// The least and the greatest element that a tile reads of a tensor.
    fn extremes(&mut self, tensor: usize, index: &[Id]) -> (Id, Id) {
        let (first, last): (Vec<Id>, Vec<Id>) = index.iter().map(|i| self.int(*i)).unzip();
        let least = self.target.extreme(tensor, first.clone(), last.clone(), false);
        (least, self.target.extreme(tensor, first, last, true))
    }

    fn product_range(&mut self, a: Id, b: Id) -> (Id, Id) {
        let ((a, b), (x, y)) = (self.int(a), self.int(b));
        let g = &mut self.target;
        let mut products = vec![g.binary(Binary::Mul, a, x), g.binary(Binary::Mul, a, y)];
        products.extend([g.binary(Binary::Mul, b, x), g.binary(Binary::Mul, b, y)]);
        let mut least = |op| products.iter().copied().reduce(|p, q| g.binary(op, p, q)).expect("four");
        (least(Binary::Min), least(Binary::Max))
    }

    /// `a // d`, which never turns round for a fixed `d`.
    fn quotient_range(&mut self, id: Id, a: Id, d: Id) -> (Id, Id) {
        let Image::Point(d) = self.images[d.index()] else { return self.declared(id) };
        let (lo, hi) = self.int(a);
        let g = &mut self.target;
        let (p, q) = (g.binary(Binary::FloorDiv, lo, d), g.binary(Binary::FloorDiv, hi, d));
        if g.range(d).lo >= 0 {
            return (p, q);
        }
        (g.binary(Binary::Min, p, q), g.binary(Binary::Max, p, q))
    }

    /// `a % d`: it grows as `a` does as long as the quotient stays the same.
    fn rest_range(&mut self, id: Id, a: Id, d: Id) -> (Id, Id) {
        let Image::Point(d) = self.images[d.index()] else { return self.declared(id) };
        let (lo, hi) = self.int(a);
        let g = &mut self.target;
        let (p, q) = (g.binary(Binary::FloorDiv, lo, d), g.binary(Binary::FloorDiv, hi, d));
        let same = g.binary(Binary::Eq, p, q);
        let (first, last) = (g.binary(Binary::Mod, lo, d), g.binary(Binary::Mod, hi, d));
        let (zero, one) = (g.int(0), g.int(1));
        let (above, below) = (g.binary(Binary::Add, d, one), g.binary(Binary::Sub, d, one));
        let (least, greatest) = (g.binary(Binary::Min, above, zero), g.binary(Binary::Max, below, zero));
        (g.select(same, first, least), g.select(same, last, greatest))
    }

    fn bool_image(&mut self, id: Id) -> Image {
        match *self.source.node(id) {
            Node::Load { tensor, ref index } if self.looks => {
                let (all, any) = self.extremes(tensor, &index.clone());
                Image::Bool(self.target.not(all), any)
            }
            Node::Unary(Unary::Not, a) => {
                let (f, t) = self.bool(a);
                Image::Bool(t, f)
            }
            Node::Binary(op @ (Binary::And | Binary::Or), a, b) => {
                let ((af, at), (bf, bt)) = (self.bool(a), self.bool(b));
                let other = if op == Binary::And { Binary::Or } else { Binary::And };
                Image::Bool(self.target.binary(other, af, bf), self.target.binary(op, at, bt))
            }
            Node::Binary(op, a, b) => match self.source.ty(a) {
                Type::Float => match self.compared_floats(op, a, b) {
                    Some((f, t)) if self.floats => Image::Bool(f, t),
                    _ => Image::Unknown,
                },
                Type::Bool => {
                    let ((af, at), (bf, bt)) = (self.bool(a), self.bool(b));
                    let g = &mut self.target;
                    let mut either = |a, b, x, y| {
                        let (p, q) = (g.and(a, b), g.and(x, y));
                        g.or(p, q)
                    };
                    let (same, differ) = (either(at, bt, af, bf), either(at, bf, af, bt));
                    if op == Binary::Eq { Image::Bool(differ, same) } else { Image::Bool(same, differ) }
                }
                Type::Int => {
                    let ((a, b), (x, y)) = (self.int(a), self.int(b));
                    let g = &mut self.target;
                    match op {
                        Binary::Le => Image::Bool(g.binary(Binary::Lt, x, b), g.binary(Binary::Le, a, y)),
                        Binary::Lt => Image::Bool(g.binary(Binary::Le, x, b), g.binary(Binary::Lt, a, y)),
                        _ => {
                            let (p, q) = (g.binary(Binary::Le, a, y), g.binary(Binary::Le, x, b));
                            let same = g.and(p, q);
                            let (p, q) = (g.binary(Binary::Ne, a, y), g.binary(Binary::Ne, x, b));
                            let differ = g.or(p, q);
                            if op == Binary::Eq { Image::Bool(differ, same) } else { Image::Bool(same, differ) }
                        }
                    }
                }
            },
            _ => Image::Unknown,
        }
    }
}

/// An int that is a sum which cannot wrap, as that sum.
fn sum_of(graph: &Graph, id: Id) -> Option<Linear> {
    if graph.ty(id) != Type::Int || graph.as_int(id).is_some() {
        return None;
    }
    let linear = graph.linear(id);
    (linear.terms != [(1, id)] && graph.is_safe(&linear)).then_some(linear)
}
