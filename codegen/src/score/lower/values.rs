//! The value of each node as an expression: widths of ints, places in tensors.

use super::stmt::{Aspect, Expr, Function, Name, Op, Scope, Stmt, Ty};
use super::{Lowering, slot};
use crate::score::graph::{Graph, Node};
use crate::score::syntax::range::Range;
use crate::score::syntax::words::{Axis, Binary, Id, Storage, Type, Unary};

impl Lowering<'_> {
    /// A node where it is used.
    pub(super) fn operand(&self, id: Id) -> Expr {
        match self.graph.node(id) {
            Node::Bool(x) => Expr::Bool(*x),
            Node::Int(x) => Expr::Int(*x, Ty::int(self.graph.range(id))),
            Node::Float(bits) => Expr::Float(*bits),
            Node::Var(v) => Expr::Var(*v),
            _ => Expr::Name(Name::Node(id)),
        }
    }

    pub(super) fn value(&self, id: Id) -> Expr {
        match self.graph.node(id) {
            Node::Scalar(i) => {
                let (s, ty) = (slot(self.graph, *i), self.graph.ty(id));
                let scalar = Expr::Scalar(s, ty);
                if ty == Type::Float { scalar } else { scalar.cast(Ty::int(self.graph.range(id))) }
            }
            Node::Load { tensor, index } => self.load(id, *tensor, index),
            Node::Extreme { greatest, .. } => {
                Expr::Extreme { of: Name::Aspect(Aspect::Extremes, self.box_of(id)), greatest: *greatest }
            }
            Node::Unary(op, x) => self.unary(id, *op, *x),
            Node::Binary(op, x, y) => self.binary(id, *op, *x, *y),
            Node::Select(c, x, y) => match self.graph.ty(id) {
                Type::Int => {
                    let wide = self.graph.range(id);
                    Expr::choose(self.operand(*c), self.widened(*x, wide), self.widened(*y, wide))
                }
                _ => Expr::choose(self.operand(*c), self.operand(*x), self.operand(*y)),
            },
            _ => self.operand(id),
        }
    }

    fn unary(&self, id: Id, op: Unary, x: Id) -> Expr {
        let of = self.operand(x);
        let call = |f, of| Expr::Call(f, vec![of]);
        let zero = || Expr::Int(0, Ty::I32);
        let is_negative = |of: &Expr| Expr::infix(Op::Lt, of.clone(), zero());
        // Of the least int there is, which has no negative: unsigned, it wraps around.
        let wrapped = |of: &Expr| Expr::infix(Op::Sub, zero(), of.clone().cast(Ty::U64)).cast(Ty::I64);
        let (result, operand) = (self.graph.range(id), self.graph.range(x));
        match (op, self.graph.ty(x)) {
            (Unary::Not, _) => Expr::Not(Box::new(of)),
            (Unary::Neg, Type::Int) if result == Range::FULL => wrapped(&of),
            (Unary::Abs, Type::Int) if result == Range::FULL => Expr::choose(is_negative(&of), wrapped(&of), of),
            (Unary::Neg, Type::Int) => self.widened(x, wider(result, operand)).neg(),
            (Unary::Abs, Type::Int) => {
                let of = self.widened(x, wider(result, operand));
                Expr::choose(is_negative(&of), of.clone().neg(), of)
            }
            (Unary::Neg, _) => of.neg(),
            (Unary::Abs, _) => call(Function::Abs, of),
            (Unary::ToFloat, _) => of.cast(Ty::F32),
            (Unary::Exp2, _) => call(Function::Exp2, of),
            (Unary::Log2, _) => call(Function::Log2, of),
            (Unary::Tanh, _) => call(Function::Tanh, of),
            (Unary::Exp, _) => call(Function::Exp, of),
            (Unary::Log, _) => call(Function::Log, of),
            (Unary::Sqrt, _) => call(Function::Sqrt, of),
            (Unary::Sigmoid, _) => call(Function::Sigmoid, of),
            (Unary::IntFloor, _) => call(Function::IntFloor, of),
            (Unary::IntCeil, _) => call(Function::IntCeil, of),
            (Unary::IntTrunc, _) => call(Function::IntTrunc, of),
            (Unary::IntRound, _) => call(Function::IntRound, of),
        }
    }

    fn binary(&self, id: Id, op: Binary, x: Id, y: Id) -> Expr {
        let (of_x, of_y) = (self.operand(x), self.operand(y));
        match (operator(op), self.graph.ty(x)) {
            (Some(op @ (Op::And | Op::Or)), _) => Expr::infix(op, of_x, of_y),
            (Some(op), Type::Int) if is_comparison(op) => {
                let wide = wider(self.graph.range(x), self.graph.range(y));
                Expr::infix(op, self.widened(x, wide), self.widened(y, wide))
            }
            (_, Type::Int) => self.int_binary(id, op, x, y),
            (Some(op), _) => Expr::infix(op, of_x, of_y),
            (None, _) if op == Binary::Min => Expr::Call(Function::Min, vec![of_x, of_y]),
            (None, _) if op == Binary::Max => Expr::Call(Function::Max, vec![of_x, of_y]),
            (None, _) => unreachable!("floats have no `{}`", op.name()),
        }
    }

    /// An int, widened if its own type is narrower than that of a range.
    fn widened(&self, id: Id, wide: Range) -> Expr {
        let (of, own) = (self.operand(id), self.graph.range(id));
        match (&of, own.is_i32(), wide.is_i32()) {
            (Expr::Int(x, _), true, false) => Expr::Int(*x, Ty::I64),
            (_, true, false) => of.cast(Ty::I64),
            _ => of,
        }
    }

    fn int_binary(&self, id: Id, op: Binary, x: Id, y: Id) -> Expr {
        let (result, a, b) = (self.graph.range(id), self.graph.range(x), self.graph.range(y));
        let wide = wider(result, wider(a, b));
        let (of_x, of_y) = (self.widened(x, wide), self.widened(y, wide));
        let narrow = |e: Expr| if result.is_i32() && !wide.is_i32() { e.cast(Ty::I32) } else { e };
        let extreme = |op| Expr::choose(Expr::infix(op, of_x.clone(), of_y.clone()), of_x.clone(), of_y.clone());
        match (op, operator(op)) {
            (Binary::Add | Binary::Sub | Binary::Mul, Some(op)) if result == Range::FULL => {
                Expr::infix(op, of_x.cast(Ty::U64), of_y.cast(Ty::U64)).cast(Ty::I64)
            }
            (Binary::Add | Binary::Sub | Binary::Mul, Some(op)) => narrow(Expr::infix(op, of_x, of_y)),
            (Binary::Min, _) => narrow(extreme(Op::Lt)),
            (Binary::Max, _) => narrow(extreme(Op::Gt)),
            (Binary::FloorDiv | Binary::Mod, _) => {
                let divides = op == Binary::FloorDiv;
                let by = self.graph.as_int(y).filter(|d| *d > 0);
                let bits = if wide.is_i32() { 32 } else { 64 };
                narrow(match by {
                    // Shifting and masking round down for negative numbers, too.
                    Some(d) if d & (d - 1) == 0 && divides => {
                        Expr::infix(Op::Shift, of_x, Expr::Int(d.trailing_zeros().into(), Ty::I32))
                    }
                    Some(d) if d & (d - 1) == 0 => Expr::infix(Op::LowBits, of_x, Expr::Int(d - 1, Ty::int(wide))),
                    _ if a.lo >= 0 && b.lo > 0 => Expr::infix(if divides { Op::Div } else { Op::Rem }, of_x, of_y),
                    _ if divides => Expr::Call(Function::FloorDiv(bits), vec![of_x, of_y]),
                    _ => Expr::Call(Function::FloorMod(bits), vec![of_x, of_y]),
                })
            }
            _ => unreachable!("ints have no `{}`", op.name()),
        }
    }

    /// What each index adds to the place of an element.
    pub(super) fn places(&self, tensor: usize, index: &[Id]) -> Vec<Expr> {
        let t = slot(self.graph, tensor);
        let axes = self.graph.declarations()[tensor].axes.as_deref().unwrap_or_default();
        let place = |(a, (i, axis)): (usize, (&Id, &Axis))| {
            let of = self.operand(*i);
            let bits = if self.graph.range(*i).is_i32() { 32 } else { 64 };
            let of = match index_fits(self.graph, *axis, *i) {
                true => of,
                false => Expr::Call(Function::Clamp(bits), vec![of, Expr::Name(Name::Length(t, a))]),
            };
            Expr::infix(Op::Mul, of, Expr::Name(Name::Stride(t, a)))
        };
        index.iter().zip(axes).enumerate().map(place).collect()
    }

    fn load(&self, id: Id, tensor: usize, index: &[Id]) -> Expr {
        let data = Name::Data(slot(self.graph, tensor));
        let element = Expr::Element(data, Box::new(Expr::sum(self.places(tensor, index))));
        match self.graph.declarations()[tensor].storage {
            Storage::F32 => element,
            Storage::F16 => Expr::Call(Function::FromF16, vec![element]),
            Storage::Bf16 => Expr::Call(Function::FromBf16, vec![element]),
            // A declared range may be narrower than the storage.
            Storage::I32 | Storage::I64 => element.cast(Ty::int(self.graph.range(id))),
            Storage::Bool => Expr::infix(Op::Ne, element, Expr::Int(0, Ty::I32)),
        }
    }
}

/// Boxes of indices, whose least and greatest elements the lanes of a warp find together (`lib/cuda/score/box.cuh`).
impl Lowering<'_> {
    /// The first node over the same box: it names what is found there.
    fn box_of(&self, id: Id) -> Id {
        let ends = |id: Id| match self.graph.node(id) {
            Node::Extreme { tensor, first, last, .. } => Some((tensor, first, last)),
            _ => None,
        };
        self.graph.ids().find(|other| self.needed[other.index()] && ends(*other) == ends(id)).unwrap_or(id)
    }

    /// The statements that look at a box, before the first node over it.
    pub(super) fn look_at_box(&mut self, id: Id, scope: Scope) {
        let Node::Extreme { tensor, first, last, .. } = self.graph.node(id) else { return };
        if self.box_of(id) != id {
            return;
        }
        let (t, declaration) = (slot(self.graph, *tensor), &self.graph.declarations()[*tensor]);
        let axis = |(a, (first, last)): (usize, (&Id, &Id))| {
            [self.operand(*first), self.operand(*last), Expr::Name(Name::Length(t, a)), Expr::Name(Name::Stride(t, a))]
        };
        let axes = Expr::BoxAxes(first.iter().zip(last).enumerate().map(axis).collect());
        let (ty, range) = match declaration.storage.ty() {
            Type::Bool => (Ty::Bool, Range { lo: 0, hi: 1 }),
            _ => (Ty::int(self.graph.range(id)), self.graph.range(id)),
        };
        let unknown = [range.lo, range.hi].map(|x| Box::new(Expr::Int(x, Ty::int(range))));
        let [named_axes, extremes] = [Aspect::Axes, Aspect::Extremes].map(|part| Name::Aspect(part, id));
        let look = Expr::LookAtBox { data: Name::Data(t), axes: named_axes, ty, unknown };
        self.code.statements.push(Stmt::new(scope, Ty::BoxAxes, named_axes, axes));
        self.code.statements.push(Stmt::new(scope, Ty::Extremes, extremes, look));
    }
}

/// Whether an axis is indexed by the coordinate that it is declared for, or by what is known to be within it: then no
/// index is ever beyond it. (Along an axis that is broadcast the stride is 0.)
pub(super) fn index_fits(graph: &Graph, axis: Axis, index: Id) -> bool {
    match (graph.node(index), axis) {
        (Node::Var(v), axis) if Axis::of(*v) == Some(axis) => true,
        (_, Axis::Fixed(n)) => Range { lo: 0, hi: n as i64 - 1 }.contains(graph.range(index)),
        _ => false,
    }
}

fn wider(a: Range, b: Range) -> Range {
    if a.is_i32() { b } else { a }
}

/// The operator of an operation, where it is one for ints and floats alike.
pub(super) fn operator(op: Binary) -> Option<Op> {
    match op {
        Binary::Add => Some(Op::Add),
        Binary::Sub => Some(Op::Sub),
        Binary::Mul => Some(Op::Mul),
        Binary::Div => Some(Op::Div),
        Binary::Lt => Some(Op::Lt),
        Binary::Le => Some(Op::Le),
        Binary::Eq => Some(Op::Eq),
        Binary::Ne => Some(Op::Ne),
        Binary::And => Some(Op::And),
        Binary::Or => Some(Op::Or),
        Binary::FloorDiv | Binary::Mod | Binary::Min | Binary::Max => None,
    }
}

fn is_comparison(op: Op) -> bool {
    matches!(op, Op::Lt | Op::Le | Op::Eq | Op::Ne)
}
