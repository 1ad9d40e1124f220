//! Expressions from Rust: values with operators, checked when they become part of a program.
//!
//! ```
//! use flashtune_codegen::score::{Axis, Declaration, Expr, ProgramBuilder, Storage};
//! let (q, kv, h) = (Expr::q(), Expr::kv(), Expr::h());
//! let causal = kv.clone().le(q.clone());
//! let alibi = Expr::score() + Expr::load("slope", [h]) * (kv - q);
//! let program = ProgramBuilder::new()
//!     .declare(Declaration::tensor("slope", Storage::F32, &[Axis::Heads]))?
//!     .mask_expr(&causal)?
//!     .score_expr(&alibi)?
//!     .build()?;
//! assert!(program.text().contains("mask = kv <= q;"));
//! # Ok::<(), flashtune_codegen::score::ProgramError>(())
//! ```

use super::ast::{Ast, AstId, AstNode};
use super::words::{Binary, Unary, Var};
use std::collections::HashMap;
use std::ops;
use std::sync::Arc;

/// A value of the language. Cloning shares it.
#[derive(Debug, Clone)]
pub struct Expr(Arc<ExprNode>);

#[derive(Debug)]
struct ExprNode {
    /// The operation, without its operands.
    shape: Shape,
    operands: Vec<Expr>,
}

#[derive(Debug, Clone)]
enum Shape {
    Int(i64),
    Float(f32),
    Bool(bool),
    Name(String),
    Load(String),
    Unary(Unary),
    Binary(Binary),
    Select,
}

macro_rules! variables {
    ($($name:ident $var:ident $doc:literal;)*) => {
        $(#[doc = $doc] pub fn $name() -> Self { Self::leaf(Shape::Name(Var::$var.name().to_owned())) })*
    };
}

macro_rules! binary {
    ($($name:ident $op:ident $doc:literal;)*) => {
        $(#[doc = $doc] pub fn $name(self, other: impl Into<Expr>) -> Self {
            Self::node(Shape::Binary(Binary::$op), vec![self, other.into()])
        })*
    };
}

macro_rules! unary {
    ($($name:ident $op:ident $doc:literal;)*) => {
        $(#[doc = $doc] pub fn $name(self) -> Self { Self::node(Shape::Unary(Unary::$op), vec![self]) })*
    };
}

impl Expr {
    variables! {
        score Score "The scaled score.";
        b B "The sequence.";
        h H "The query head.";
        h_kv HKv "The KV head.";
        q Q "The query's row.";
        kv Kv "The key's row.";
        q_len QLen "Rows of Q.";
        kv_len KvLen "Rows of K and V.";
    }

    binary! {
        floor_div FloorDiv "The quotient of ints, rounded down; 0 for a division by 0.";
        modulo Mod "The rest of [`Expr::floor_div`].";
        min Min "The lesser.";
        max Max "The greater.";
        lt Lt "Whether it is less.";
        le Le "Whether it is less or equal.";
        eq Eq "Whether both are equal.";
        ne Ne "Whether they differ.";
    }

    unary! {
        abs Abs "The magnitude.";
        to_float ToFloat "An int as a float.";
        exp2 Exp2 "2 to the power of it.";
        log2 Log2 "The logarithm in base 2.";
        tanh Tanh "The hyperbolic tangent.";
        exp Exp "e to the power of it.";
        log Log "The natural logarithm.";
        sqrt Sqrt "The square root.";
        sigmoid Sigmoid "`1 / (1 + exp(-x))`.";
        int_floor IntFloor "A float as an int, rounded down.";
        int_ceil IntCeil "A float as an int, rounded up.";
        int_trunc IntTrunc "A float as an int, rounded towards 0.";
        int_round IntRound "A float as the nearest int, of two the even one.";
    }

    /// Whether it is greater.
    pub fn gt(self, other: impl Into<Expr>) -> Self {
        other.into().lt(self)
    }

    /// Whether it is greater or equal.
    pub fn ge(self, other: impl Into<Expr>) -> Self {
        other.into().le(self)
    }

    /// A declared scalar.
    pub fn scalar(name: &str) -> Self {
        Self::leaf(Shape::Name(name.to_owned()))
    }

    /// An element of a declared tensor.
    pub fn load(name: &str, index: impl IntoIterator<Item = Expr>) -> Self {
        Self::node(Shape::Load(name.to_owned()), index.into_iter().collect())
    }

    /// One value where it holds, another where it does not.
    pub fn select(self, then: impl Into<Expr>, other: impl Into<Expr>) -> Self {
        Self::node(Shape::Select, vec![self, then.into(), other.into()])
    }

    fn leaf(shape: Shape) -> Self {
        Self::node(shape, Vec::new())
    }

    fn node(shape: Shape, operands: Vec<Expr>) -> Self {
        Self(Arc::new(ExprNode { shape, operands }))
    }

    /// Appends the operations to an [`Ast`], each shared one once.
    pub(in crate::score) fn lower(&self, ast: &mut Ast) -> AstId {
        let mut done: HashMap<*const ExprNode, AstId> = HashMap::new();
        let mut stack = vec![(self, false)];
        while let Some((expr, ready)) = stack.pop() {
            let key = Arc::as_ptr(&expr.0);
            if done.contains_key(&key) {
                continue;
            }
            if !ready {
                stack.push((expr, true));
                stack.extend(expr.0.operands.iter().rev().map(|o| (o, false)));
                continue;
            }
            let at = |i: usize| done[&Arc::as_ptr(&expr.0.operands[i].0)];
            let node = match &expr.0.shape {
                Shape::Int(x) => AstNode::Int(*x),
                Shape::Float(x) => AstNode::Float(*x),
                Shape::Bool(x) => AstNode::Bool(*x),
                Shape::Name(name) => AstNode::Name(name.clone()),
                Shape::Load(name) => AstNode::Index(name.clone(), (0..expr.0.operands.len()).map(at).collect()),
                Shape::Unary(op) => AstNode::Unary(*op, at(0)),
                Shape::Binary(op) => AstNode::Binary(*op, at(0), at(1)),
                Shape::Select => AstNode::Select(at(0), at(1), at(2)),
            };
            let id = ast.push(node, 0..0);
            done.insert(key, id);
        }
        done[&Arc::as_ptr(&self.0)]
    }
}

impl Drop for ExprNode {
    /// Without recursion: an expression may be deeper than the stack.
    fn drop(&mut self) {
        let mut rest = std::mem::take(&mut self.operands);
        while let Some(expr) = rest.pop() {
            if let Some(mut part) = Arc::into_inner(expr.0) {
                rest.append(&mut part.operands);
            }
        }
    }
}

impl From<i64> for Expr {
    fn from(x: i64) -> Self {
        Self::leaf(Shape::Int(x))
    }
}

impl From<f32> for Expr {
    fn from(x: f32) -> Self {
        Self::leaf(Shape::Float(x))
    }
}

impl From<bool> for Expr {
    fn from(x: bool) -> Self {
        Self::leaf(Shape::Bool(x))
    }
}

macro_rules! operators {
    ($($trait:ident $method:ident $op:ident;)*) => {
        $(impl<T: Into<Expr>> ops::$trait<T> for Expr {
            type Output = Expr;
            fn $method(self, other: T) -> Expr {
                Expr::node(Shape::Binary(Binary::$op), vec![self, other.into()])
            }
        })*
    };
}

operators! {
    Add add Add;
    Sub sub Sub;
    Mul mul Mul;
    Div div Div;
    Rem rem Mod;
    BitAnd bitand And;
    BitOr bitor Or;
}

impl ops::Neg for Expr {
    type Output = Expr;
    fn neg(self) -> Expr {
        Expr::node(Shape::Unary(Unary::Neg), vec![self])
    }
}

impl ops::Not for Expr {
    type Output = Expr;
    fn not(self) -> Expr {
        Expr::node(Shape::Unary(Unary::Not), vec![self])
    }
}
