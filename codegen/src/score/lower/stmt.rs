//! The form between graph and text: statements, each of which names one value.
//!
//! A [`Stmt`] says where it is computed, what it costs and what it reads, so nothing has to be read back from text.
//! Expressions are flat: operands are names or literals, at most widened, since every node of a graph is a statement.

use crate::score::syntax::range::Range;
use crate::score::syntax::words::{Id, Storage, Type, Var};

/// Where a statement is computed: each of these is inside the loops of those before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Scope {
    /// Addresses, strides and scalars, as they are passed.
    Input,
    /// Once for all scores of a head.
    Head,
    /// For every query row; for fragments, for every query row and first key.
    Row,
    /// For every key.
    Key,
    /// For every score.
    Score,
}

impl Scope {
    /// All, in an order in which each statement finds what it reads.
    pub const ALL: [Scope; 5] = [Scope::Input, Scope::Head, Scope::Row, Scope::Key, Scope::Score];
}

/// The type of a statement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Ty {
    Bool,
    I32,
    I64,
    U64,
    F32,
    /// To elements of a tensor.
    Pointer(Storage),
    /// Coefficients of the polynomial for small scores of a cap (`cap_series` in `lib/cuda/score/score.cuh`).
    CapSeries,
    /// The axes of a box of indices, and its least and greatest element (`lib/cuda/score/box.cuh`).
    BoxAxes,
    Extremes,
}

impl Ty {
    /// The narrowest int that holds a range.
    pub(crate) fn int(range: Range) -> Self {
        if range.is_i32() { Ty::I32 } else { Ty::I64 }
    }

    /// The type of a value.
    pub(crate) fn of(ty: Type, range: Range) -> Self {
        match ty {
            Type::Bool => Ty::Bool,
            Type::Int => Ty::int(range),
            Type::Float => Ty::F32,
        }
    }
}

/// What a statement computes of a node beside its value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Aspect {
    /// Of a float `base + by_key * offset + by_score * raw`: what changes with neither key nor score.
    Base,
    ByKey,
    ByScore,
    /// Of a capped score, the coefficients of its polynomial.
    Series,
    /// Of a load along the keys, the address of the first element.
    First,
    /// Of a box, its axes and its extremes.
    Axes,
    Extremes,
}

/// The name of a statement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Name {
    /// The value of a node.
    Node(Id),
    /// A part of it.
    Aspect(Aspect, Id),
    /// The elements of a tensor, by its place among the tensors.
    Data(usize),
    /// The distance of neighbours along an axis, in elements.
    Stride(usize, usize),
    /// The length of an axis.
    Length(usize, usize),
}

/// What a kernel has in scope for fragments, beside the variables of the language.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Given {
    /// The product of Q and K before it is scaled.
    Raw,
    /// What takes it to natural units.
    Scale,
    /// The first key that a thread holds, and the distance of the present one from it.
    KvFirst,
    Offset,
}

/// An operator between two operands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Op {
    Add,
    Sub,
    Mul,
    Div,
    Rem,
    /// Division of an int by a power of two, rounded down, and its remainder.
    Shift,
    LowBits,
    And,
    Or,
    Lt,
    Le,
    Gt,
    Eq,
    Ne,
}

/// A function of `lib/cpu/score.h` or `lib/cuda/score/score.cuh`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Function {
    Abs,
    Min,
    Max,
    Exp2,
    Log2,
    Tanh,
    Exp,
    Log,
    Sqrt,
    Sigmoid,
    /// A float as an int of 64 bits.
    IntFloor,
    IntCeil,
    IntTrunc,
    IntRound,
    /// Of ints of so many bits, rounded down.
    FloorDiv(u32),
    FloorMod(u32),
    /// The nearest index within a length.
    Clamp(u32),
    FromF16,
    FromBf16,
    Fma,
    CapSeries,
    Cap,
    /// Reads along the keys.
    Along(Storage),
}

impl Function {
    /// Whether it becomes a polynomial, and what takes care of its ends.
    fn is_long(self) -> bool {
        use Function::{Exp, Exp2, Log, Log2, Sigmoid, Sqrt, Tanh};
        matches!(self, Exp | Exp2 | Log | Log2 | Sqrt | Tanh | Sigmoid)
    }

    fn rounds(self) -> bool {
        matches!(self, Function::IntFloor | Function::IntCeil | Function::IntTrunc | Function::IntRound)
    }
}

/// The value of a statement.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Expr {
    Name(Name),
    Var(Var),
    Given(Given),
    Bool(bool),
    /// A constant of a type that holds it.
    Int(i64, Ty),
    /// The bits of an fp32.
    Float(u32),
    /// A run-time scalar, by its place among the scalars.
    Scalar(usize, Type),
    /// What is passed of a tensor, by its place among the tensors.
    Data(usize, Storage),
    Stride(usize, usize),
    Length(usize, usize),
    /// An element of a tensor, and its address.
    Element(Name, Box<Expr>),
    Address(Name, Box<Expr>),
    /// The least or the greatest element of a box.
    Extreme {
        of: Name,
        greatest: bool,
    },
    /// First index, last index, length and stride of each axis.
    BoxAxes(Vec<[Expr; 4]>),
    /// Looks at a box of a tensor; `unknown` are the extremes of one that is empty or too large.
    LookAtBox {
        data: Name,
        axes: Name,
        ty: Ty,
        unknown: [Box<Expr>; 2],
    },
    Cast(Ty, Box<Expr>),
    Not(Box<Expr>),
    Neg(Box<Expr>),
    Infix(Op, Box<[Expr; 2]>),
    /// Condition, value if it holds, value if not.
    Choose(Box<[Expr; 3]>),
    Call(Function, Vec<Expr>),
}

impl Expr {
    pub(crate) fn float(x: f32) -> Self {
        Expr::Float(x.to_bits())
    }

    pub(crate) fn cast(self, ty: Ty) -> Self {
        Expr::Cast(ty, Box::new(self))
    }

    pub(crate) fn neg(self) -> Self {
        Expr::Neg(Box::new(self))
    }

    pub(crate) fn infix(op: Op, x: Expr, y: Expr) -> Self {
        Expr::Infix(op, Box::new([x, y]))
    }

    pub(crate) fn choose(condition: Expr, x: Expr, y: Expr) -> Self {
        Expr::Choose(Box::new([condition, x, y]))
    }

    /// A sum, from left to right; 0 of nothing.
    pub(crate) fn sum(terms: impl IntoIterator<Item = Expr>) -> Self {
        terms.into_iter().reduce(|a, b| Expr::infix(Op::Add, a, b)).unwrap_or(Expr::Int(0, Ty::I32))
    }

    fn operands(&self) -> Vec<&Expr> {
        match self {
            Expr::Element(_, x) | Expr::Address(_, x) | Expr::Cast(_, x) | Expr::Not(x) | Expr::Neg(x) => vec![x],
            Expr::Infix(_, of) => of.iter().collect(),
            Expr::Choose(of) => of.iter().collect(),
            Expr::Call(_, of) => of.iter().collect(),
            Expr::BoxAxes(axes) => axes.iter().flatten().collect(),
            _ => Vec::new(),
        }
    }

    /// Calls a function with this expression and all that it is made of.
    pub(crate) fn visit<'a>(&'a self, f: &mut impl FnMut(&'a Expr)) {
        f(self);
        self.operands().into_iter().for_each(|x| x.visit(f));
    }

    /// The statements that it reads.
    pub(crate) fn reads(&self) -> Vec<Name> {
        let mut names = Vec::new();
        self.visit(&mut |x| match x {
            Expr::Name(name) | Expr::Extreme { of: name, .. } => names.push(*name),
            Expr::Element(name, _) | Expr::Address(name, _) => names.push(*name),
            Expr::LookAtBox { data, axes, .. } => names.extend([*data, *axes]),
            _ => {}
        });
        names
    }

    fn has(&self, is: impl Fn(&Expr) -> bool) -> bool {
        let mut found = false;
        self.visit(&mut |x| found |= is(x));
        found
    }
}

/// One statement: a constant of a type, with a name and a value.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Stmt {
    pub(crate) scope: Scope,
    pub(crate) ty: Ty,
    pub(crate) name: Name,
    pub(crate) expr: Expr,
    /// What compiling it costs, in units of a statement that calls nothing.
    pub(crate) cost: u32,
}

impl Stmt {
    pub(crate) fn new(scope: Scope, ty: Ty, name: Name, expr: Expr) -> Self {
        let mut cost = 1;
        expr.visit(&mut |x| {
            // Each becomes a polynomial, and branches.
            cost += if matches!(x, Expr::Call(f, _) if f.is_long()) { 8 } else { 0 };
        });
        Self { scope, ty, name, expr, cost }
    }

    /// Whether the value is better kept than computed again, whatever it is computed from: floats, loads and divisions.
    pub(crate) fn is_dear(&self) -> bool {
        let divides = |x: &Expr| match x {
            Expr::Element(..) => true,
            Expr::Infix(op, _) => matches!(op, Op::Div | Op::Rem | Op::Shift | Op::LowBits),
            Expr::Call(f, _) => matches!(f, Function::FloorDiv(_) | Function::FloorMod(_)) || f.rounds(),
            _ => false,
        };
        self.ty == Ty::F32 || self.expr.has(divides)
    }
}
