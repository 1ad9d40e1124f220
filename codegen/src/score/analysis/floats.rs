//! Floats that change within a tile: between which values they lie.
//!
//! Followed in masks that take `exp`, `log`, `sqrt`, `sigmoid` or round a float to an int, whose tiles would otherwise
//! all stay mixed. Kernels compute floats a rounding or two apart from each other: they take factors out of sums,
//! contract, and have approximations of functions. So every step widens the bounds by far more than that.

use super::tile::{Analysis, Image};
use crate::score::graph::{Graph, Node};
use crate::score::syntax::words::{Binary, Id, Type, Unary};

/// By what part of the larger operand a step widens: 64 roundings of fp32.
const WIDER: f32 = 1.0 / (1 << 18) as f32;
/// What it widens a function by beside that: `log`, `log2` and `tanh` are absolutely near where they come near 0, the
/// others may lose what is below the least normal number.
const WIDER_NEAR_ZERO: f32 = WIDER;
const WIDER_AT_ZERO: f32 = 1e-30;
/// Up to this sum of magnitudes ints are floats without rounding.
const EXACT: f32 = (1 << f32::MANTISSA_DIGITS) as f32;
/// Ints of bounds within this are far from the ends of 64 bits.
const FITS: f32 = (1u64 << 62) as f32;

/// Where a float of a tile lies, as expressions of the target graph.
#[derive(Debug, Clone, Copy)]
pub(in crate::score) struct Span {
    lo: Id,
    hi: Id,
    /// Bool: the bounds hold, and no element is NaN.
    known: Id,
}

/// Whether a node makes floats worth to be followed.
pub(in crate::score) fn is_followed(node: &Node) -> bool {
    use Unary::{Exp, Log, Sigmoid, Sqrt};
    matches!(node, Node::Unary(op, _) if op.rounds() || matches!(op, Exp | Log | Sqrt | Sigmoid))
}

impl Analysis<'_> {
    fn span(&mut self, id: Id) -> Option<Span> {
        match self.images[id.index()] {
            Image::Float(span) => Some(span),
            Image::Point(p) => Some(Span { lo: p, hi: p, known: self.target.binary(Binary::Eq, p, p) }),
            _ => None,
        }
    }

    pub(in crate::score) fn float_image(&mut self, id: Id) -> Option<Span> {
        match *self.source.node(id) {
            Node::Unary(Unary::ToFloat, x) => {
                let (lo, hi) = self.int(x);
                let g = &mut self.target;
                let (lo, hi, known) = (g.unary(Unary::ToFloat, lo), g.unary(Unary::ToFloat, hi), g.boolean(true));
                let (size, exact, zero) = (magnitude(g, &[lo, hi]), g.float(EXACT), g.float(0.0));
                let (is_exact, by) = (g.binary(Binary::Le, size, exact), part(g, size));
                let by = g.select(is_exact, zero, by);
                Some(widened(g, lo, hi, by, known))
            }
            Node::Unary(op, x) => {
                let span = self.span(x)?;
                Some(self.function(op, span))
            }
            Node::Binary(op, a, b) => {
                let (a, b) = (self.span(a)?, self.span(b)?);
                Some(self.operation(op, a, b))
            }
            Node::Select(_, a, b) => {
                let (a, b) = (self.span(a)?, self.span(b)?);
                Some(hull(&mut self.target, a, b))
            }
            _ => None,
        }
    }

    fn function(&mut self, op: Unary, Span { lo, hi, known }: Span) -> Span {
        let g = &mut self.target;
        let zero = g.float(0.0);
        let near_zero = match op {
            Unary::Neg => return Span { lo: g.unary(op, hi), hi: g.unary(op, lo), known },
            Unary::Abs => {
                let (minus_lo, minus_hi) = (g.unary(Unary::Neg, lo), g.unary(Unary::Neg, hi));
                let (gap, hi) = (g.binary(Binary::Max, lo, minus_hi), g.binary(Binary::Max, hi, minus_lo));
                return Span { lo: g.binary(Binary::Max, gap, zero), hi, known };
            }
            Unary::Log | Unary::Log2 | Unary::Tanh => WIDER_NEAR_ZERO,
            _ => WIDER_AT_ZERO,
        };
        // The others grow with what they are taken of, and these are NaN below 0.
        let known = match op {
            Unary::Log | Unary::Log2 | Unary::Sqrt => {
                let positive = g.binary(Binary::Le, zero, lo);
                g.and(known, positive)
            }
            _ => known,
        };
        let (lo, hi) = (g.unary(op, lo), g.unary(op, hi));
        let (size, least) = (magnitude(g, &[lo, hi]), g.float(near_zero));
        let by = part(g, size);
        let by = g.binary(Binary::Add, by, least);
        let known = finite(g, &[lo, hi], known);
        widened(g, lo, hi, by, known)
    }

    fn operation(&mut self, op: Binary, a: Span, b: Span) -> Span {
        let g = &mut self.target;
        let mut known = g.and(a.known, b.known);
        let (lo, hi) = match op {
            // Of numbers, which `known` says they are.
            Binary::Min | Binary::Max => {
                return Span { lo: g.binary(op, a.lo, b.lo), hi: g.binary(op, a.hi, b.hi), known };
            }
            Binary::Add => (g.binary(op, a.lo, b.lo), g.binary(op, a.hi, b.hi)),
            Binary::Sub => (g.binary(op, a.lo, b.hi), g.binary(op, a.hi, b.lo)),
            _ => {
                let corners = [(a.lo, b.lo), (a.lo, b.hi), (a.hi, b.lo), (a.hi, b.hi)];
                let corners = corners.map(|(x, y)| g.binary(op, x, y));
                let mut extreme = |op| corners.into_iter().reduce(|x, y| g.binary(op, x, y)).expect("four");
                (extreme(Binary::Min), extreme(Binary::Max))
            }
        };
        if op == Binary::Div {
            let zero = g.float(0.0);
            let (above, below) = (g.binary(Binary::Lt, zero, b.lo), g.binary(Binary::Lt, b.hi, zero));
            let apart = g.or(above, below);
            known = g.and(known, apart);
        }
        // What sums cancel is as far off as their operands are.
        let of_operands =
            if matches!(op, Binary::Add | Binary::Sub) { [a.lo, a.hi, b.lo, b.hi] } else { [lo, hi, lo, hi] };
        let size = magnitude(g, &of_operands);
        let by = part(g, size);
        let known = finite(g, &[a.lo, a.hi, b.lo, b.hi, lo, hi], known);
        widened(g, lo, hi, by, known)
    }

    /// The ints that a float is rounded to.
    pub(in crate::score) fn rounded_image(&mut self, op: Unary, x: Id) -> Option<(Id, Id)> {
        let Span { lo, hi, known } = self.span(x)?;
        let g = &mut self.target;
        let (least, most) = (g.float(-FITS), g.float(FITS));
        let (low, high) = (g.binary(Binary::Lt, least, lo), g.binary(Binary::Lt, hi, most));
        let fits = g.and(low, high);
        let fits = g.and(fits, known);
        let (least, most) = (g.int(i64::MIN), g.int(i64::MAX));
        let (lo, hi) = (g.unary(op, lo), g.unary(op, hi));
        Some((g.select(fits, lo, least), g.select(fits, hi, most)))
    }

    /// Whether a comparison of floats can be false, and can be true.
    pub(in crate::score) fn compared_floats(&mut self, op: Binary, a: Id, b: Id) -> Option<(Id, Id)> {
        let (a, b) = (self.span(a)?, self.span(b)?);
        let g = &mut self.target;
        let known = g.and(a.known, b.known);
        let unknown = g.not(known);
        let (always, never) = match op {
            Binary::Lt => (g.binary(Binary::Lt, a.hi, b.lo), g.binary(Binary::Le, b.hi, a.lo)),
            Binary::Le => (g.binary(Binary::Le, a.hi, b.lo), g.binary(Binary::Lt, b.hi, a.lo)),
            _ => {
                let (below, above) = (g.binary(Binary::Lt, a.hi, b.lo), g.binary(Binary::Lt, b.hi, a.lo));
                let (apart, no) = (g.or(below, above), g.boolean(false));
                if op == Binary::Eq { (no, apart) } else { (apart, no) }
            }
        };
        let (not_always, not_never) = (g.not(always), g.not(never));
        Some((g.or(unknown, not_always), g.or(unknown, not_never)))
    }
}

fn hull(g: &mut Graph, a: Span, b: Span) -> Span {
    let known = g.and(a.known, b.known);
    Span { lo: g.binary(Binary::Min, a.lo, b.lo), hi: g.binary(Binary::Max, a.hi, b.hi), known }
}

/// The sum of magnitudes.
fn magnitude(g: &mut Graph, of: &[Id]) -> Id {
    let each: Vec<Id> = of.iter().map(|x| g.unary(Unary::Abs, *x)).collect();
    each.into_iter().reduce(|x, y| g.binary(Binary::Add, x, y)).expect("not empty")
}

fn part(g: &mut Graph, size: Id) -> Id {
    let wider = g.float(WIDER);
    g.binary(Binary::Mul, size, wider)
}

fn widened(g: &mut Graph, lo: Id, hi: Id, by: Id, known: Id) -> Span {
    debug_assert_eq!(g.ty(lo), Type::Float);
    Span { lo: g.binary(Binary::Sub, lo, by), hi: g.binary(Binary::Add, hi, by), known }
}

/// `known`, where all are finite: then nothing between them is NaN.
fn finite(g: &mut Graph, of: &[Id], known: Id) -> Id {
    let most = g.float(f32::MAX);
    of.iter().fold(known, |known, x| {
        let size = g.unary(Unary::Abs, *x);
        let is_finite = g.binary(Binary::Le, size, most);
        g.and(known, is_finite)
    })
}
