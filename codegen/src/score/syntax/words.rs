//! The words of the language: types, variables, operators, and what may be said about a scalar or a side tensor.

use super::range::Range;
use crate::Shape;
use std::fmt;

/// Largest number of axes of a side tensor.
pub const MAX_RANK: usize = 4;
/// Rows per head that a program is generated for: positions and lengths are known to be at most this.
pub(crate) const MAX_LEN: i64 = 1 << 30;

/// The type of a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Type {
    /// True or false.
    Bool,
    /// 64-bit two's complement; arithmetic wraps around.
    Int,
    /// fp32.
    Float,
}

impl Type {
    /// The name in texts and messages.
    pub const fn name(self) -> &'static str {
        match self {
            Type::Bool => "bool",
            Type::Int => "int",
            Type::Float => "float",
        }
    }
}

impl fmt::Display for Type {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// How the elements of a side tensor lie in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Storage {
    /// fp32.
    F32,
    /// IEEE half.
    F16,
    /// bfloat16.
    Bf16,
    /// 32-bit signed integer.
    I32,
    /// 64-bit signed integer.
    I64,
    /// One byte; anything but 0 is true.
    Bool,
}

impl Storage {
    /// Every storage.
    pub const ALL: [Storage; 6] =
        [Storage::F32, Storage::F16, Storage::Bf16, Storage::I32, Storage::I64, Storage::Bool];

    /// The type of an element once it is loaded.
    pub const fn ty(self) -> Type {
        match self {
            Storage::F32 | Storage::F16 | Storage::Bf16 => Type::Float,
            Storage::I32 | Storage::I64 => Type::Int,
            Storage::Bool => Type::Bool,
        }
    }

    /// Bytes of an element.
    pub const fn bytes(self) -> usize {
        match self {
            Storage::Bool => 1,
            Storage::F16 | Storage::Bf16 => 2,
            Storage::F32 | Storage::I32 => 4,
            Storage::I64 => 8,
        }
    }

    /// The name in declarations.
    pub const fn name(self) -> &'static str {
        match self {
            Storage::F32 => "f32",
            Storage::F16 => "f16",
            Storage::Bf16 => "bf16",
            Storage::I32 => "i32",
            Storage::I64 => "i64",
            Storage::Bool => "bool",
        }
    }

    /// The storage of a name; `int` is `i32`, `float` is `f32`.
    pub fn from_name(name: &str) -> Option<Self> {
        match name {
            "int" => Some(Storage::I32),
            "float" => Some(Storage::F32),
            _ => Self::ALL.into_iter().find(|s| s.name() == name),
        }
    }
}

/// What every program knows without declaring it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Var {
    /// The key's row, `0..kv_len`.
    Kv,
    /// The query's row, `0..q_len`.
    Q,
    /// The sequence, `0..batch`.
    B,
    /// The query head, `0..heads`.
    H,
    /// The KV head that the query head reads.
    HKv,
    /// Rows of Q per head.
    QLen,
    /// Rows of K and V per head.
    KvLen,
    /// The scaled score, in natural units: `scale * dot(Q[q], K[kv])`.
    Score,
    /// First query row of a tile; only in programs derived by [`crate::score::TileProgram`].
    QFirst,
    /// Last query row of a tile.
    QLast,
    /// First key row of a tile.
    KvFirst,
    /// Last key row of a tile.
    KvLast,
}

impl Var {
    /// The variables that a text may name.
    pub const NAMED: [Var; 8] = [Var::Kv, Var::Q, Var::B, Var::H, Var::HKv, Var::QLen, Var::KvLen, Var::Score];

    /// The name in texts.
    pub const fn name(self) -> &'static str {
        match self {
            Var::Kv => "kv",
            Var::Q => "q",
            Var::B => "b",
            Var::H => "h",
            Var::HKv => "h_kv",
            Var::QLen => "q_len",
            Var::KvLen => "kv_len",
            Var::Score => "score",
            Var::QFirst => "q_first",
            Var::QLast => "q_last",
            Var::KvFirst => "kv_first",
            Var::KvLast => "kv_last",
        }
    }

    /// The variable of a name, with the names that FlexAttention gives to the two rows.
    pub fn from_name(name: &str) -> Option<Self> {
        match name {
            "q_idx" => Some(Var::Q),
            "kv_idx" => Some(Var::Kv),
            _ => Self::NAMED.into_iter().find(|v| v.name() == name),
        }
    }

    /// Its type.
    pub const fn ty(self) -> Type {
        match self {
            Var::Score => Type::Float,
            _ => Type::Int,
        }
    }

    /// The values that it can take whatever the sizes are; all for a float.
    pub const fn range(self) -> Range {
        match self {
            Var::B | Var::H | Var::HKv => Range { lo: 0, hi: i32::MAX as i64 - 1 },
            Var::QLen | Var::KvLen => Range { lo: 0, hi: MAX_LEN },
            Var::Score => Range::FULL,
            _ => Range { lo: 0, hi: MAX_LEN - 1 },
        }
    }
}

/// How long an axis of a side tensor is. A tensor whose axis has length 1 is broadcast along it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Axis {
    /// `batch`.
    Batch,
    /// `heads`.
    Heads,
    /// `kv_heads`.
    KvHeads,
    /// `q_len`.
    QLen,
    /// `kv_len`.
    KvLen,
    /// A fixed length.
    Fixed(u32),
    /// `*`: any length.
    Any,
}

impl Axis {
    /// The lengths with a name.
    pub const NAMED: [Axis; 5] = [Axis::Batch, Axis::Heads, Axis::KvHeads, Axis::QLen, Axis::KvLen];

    /// The length for a call's sizes; none for `*`.
    pub const fn length(self, sizes: &Shape) -> Option<u32> {
        Some(match self {
            Axis::Batch => sizes.batch,
            Axis::Heads => sizes.heads,
            Axis::KvHeads => sizes.kv_heads,
            Axis::QLen => sizes.q_len,
            Axis::KvLen => sizes.kv_len,
            Axis::Fixed(n) => n,
            Axis::Any => return None,
        })
    }

    /// The name of a length that has one.
    pub const fn name(self) -> Option<&'static str> {
        match self {
            Axis::Batch => Some("batch"),
            Axis::Heads => Some("heads"),
            Axis::KvHeads => Some("kv_heads"),
            Axis::QLen => Some("q_len"),
            Axis::KvLen => Some("kv_len"),
            Axis::Fixed(_) | Axis::Any => None,
        }
    }

    /// The axis that a coordinate runs along.
    pub const fn of(var: Var) -> Option<Axis> {
        match var {
            Var::B => Some(Axis::Batch),
            Var::H => Some(Axis::Heads),
            Var::HKv => Some(Axis::KvHeads),
            Var::Q | Var::QFirst | Var::QLast => Some(Axis::QLen),
            Var::Kv | Var::KvFirst | Var::KvLast => Some(Axis::KvLen),
            _ => None,
        }
    }
}

impl fmt::Display for Axis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.name(), self) {
            (Some(name), _) => f.write_str(name),
            (None, Axis::Fixed(n)) => write!(f, "{n}"),
            (None, _) => f.write_str("*"),
        }
    }
}

/// A run-time scalar or a side tensor.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Declaration {
    /// Its name.
    pub name: String,
    /// How its elements are stored. A scalar is stored as `i64` or `f32` whatever this says of its width.
    pub storage: Storage,
    /// Its axes; `None` for a scalar.
    pub axes: Option<Vec<Axis>>,
    /// The caller's promise on the values of an integer, or on that of a float scalar.
    pub range: Option<Range>,
    /// The range is no promise: calls with another value run on kernels that know none
    /// ([`crate::score::Program::widened`]).
    pub usually: bool,
    /// The caller's promise that values do not decrease along the last axis.
    pub nondecreasing: bool,
}

impl Declaration {
    /// A run-time scalar.
    pub fn scalar(name: impl Into<String>, storage: Storage) -> Self {
        Self { name: name.into(), storage, axes: None, range: None, usually: false, nondecreasing: false }
    }

    /// A side tensor.
    pub fn tensor(name: impl Into<String>, storage: Storage, axes: &[Axis]) -> Self {
        Self { axes: Some(axes.to_vec()), ..Self::scalar(name, storage) }
    }

    /// With the promise that the values lie in a range.
    pub fn within(self, lo: i64, hi: i64) -> Self {
        Self { range: Some(Range { lo, hi }), ..self }
    }

    /// Of a float scalar, with the range that its value usually lies in.
    pub fn usually_within(self, lo: i64, hi: i64) -> Self {
        Self { usually: true, ..self.within(lo, hi) }
    }

    /// Without a range that is no promise.
    pub fn widened(self) -> Self {
        if self.usually { Self { range: None, usually: false, ..self } } else { self }
    }

    /// With the promise that the values do not decrease along the last axis.
    pub fn nondecreasing(self) -> Self {
        Self { nondecreasing: true, ..self }
    }

    /// Floats have a range as scalars alone: nobody looks at a tensor's for one.
    pub(in crate::score) fn is_float_scalar(&self) -> bool {
        self.storage == Storage::F32 && self.axes.is_none()
    }

    /// The largest magnitude that is promised of a float scalar.
    pub fn float_bound(&self) -> Option<f32> {
        let Range { lo, hi } = self.range.filter(|_| self.is_float_scalar())?;
        Some(lo.unsigned_abs().max(hi.unsigned_abs()) as f32)
    }

    /// Whether a float scalar may have a value.
    pub fn allows(&self, x: f32) -> bool {
        self.range.is_none_or(|Range { lo, hi }| lo as f32 <= x && x <= hi as f32)
    }

    /// The least or greatest value that an element can have: of bools 0 and 1.
    pub(in crate::score) fn extreme(&self, greatest: bool) -> i64 {
        let Range { lo, hi } = match self.storage.ty() {
            Type::Bool => Range { lo: 0, hi: 1 },
            _ => self.int_range(),
        };
        if greatest { hi } else { lo }
    }

    /// The integers that it can hold.
    pub fn int_range(&self) -> Range {
        match (self.range, self.storage) {
            (Some(range), storage) if storage.ty() == Type::Int => range,
            (None, Storage::I64) => Range::FULL,
            _ => Range::I32,
        }
    }
}

impl fmt::Display for Declaration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.name, self.storage.name())?;
        if let Some(axes) = &self.axes {
            let axes: Vec<String> = axes.iter().map(Axis::to_string).collect();
            write!(f, "[{}]", axes.join(", "))?;
        }
        if let Some(Range { lo, hi }) = self.range {
            let usually = if self.usually { " usually" } else { "" };
            write!(f, "{usually} in {lo}..{hi}")?;
        }
        if self.nondecreasing {
            f.write_str(" nondecreasing")?;
        }
        Ok(())
    }
}

/// The value of a run-time scalar.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Scalar {
    /// For `int`.
    Int(i64),
    /// For `float`.
    Float(f32),
}

/// A node of a [`crate::score::Graph`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Id(pub(in crate::score) u32);

impl Id {
    /// The place in [`crate::score::Graph::nodes`].
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// An operation on one value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Unary {
    /// `-x` of int or float.
    Neg,
    /// `not x`.
    Not,
    /// `abs(x)` of int or float.
    Abs,
    /// `float(x)` of int, rounded to nearest.
    ToFloat,
    /// `exp2(x)`.
    Exp2,
    /// `log2(x)`.
    Log2,
    /// `tanh(x)`.
    Tanh,
    /// `exp(x)`.
    Exp,
    /// `log(x)`, the natural logarithm.
    Log,
    /// `sqrt(x)`, rounded as IEEE 754 has it.
    Sqrt,
    /// `sigmoid(x)`: `1 / (1 + exp(-x))`.
    Sigmoid,
    /// `int_floor(x)` of a float: the greatest int that is not greater. Of these four a value beyond 64 bits gives the
    /// nearest int that there is, and NaN gives 0.
    IntFloor,
    /// `int_ceil(x)`: the least int that is not less.
    IntCeil,
    /// `int_trunc(x)`: rounded towards 0, as a cast.
    IntTrunc,
    /// `int_round(x)`: the nearest int, of two that are equally near the even one.
    IntRound,
}

/// An operation on two values of one type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Binary {
    /// `a + b`.
    Add,
    /// `a - b`.
    Sub,
    /// `a * b`.
    Mul,
    /// `a / b` of floats.
    Div,
    /// `a // b` of ints, rounded down; 0 when `b` is 0.
    FloorDiv,
    /// `a % b` of ints, with the sign of `b`; `a` when `b` is 0.
    Mod,
    /// `min(a, b)`; of a number and NaN, the number.
    Min,
    /// `max(a, b)`; of a number and NaN, the number.
    Max,
    /// `a < b`.
    Lt,
    /// `a <= b`.
    Le,
    /// `a == b`.
    Eq,
    /// `a != b`.
    Ne,
    /// `a and b`.
    And,
    /// `a or b`.
    Or,
}

impl Binary {
    /// How it is written, as an operator or as a function.
    pub const fn name(self) -> &'static str {
        match self {
            Binary::Add => "+",
            Binary::Sub => "-",
            Binary::Mul => "*",
            Binary::Div => "/",
            Binary::FloorDiv => "//",
            Binary::Mod => "%",
            Binary::Min => "min",
            Binary::Max => "max",
            Binary::Lt => "<",
            Binary::Le => "<=",
            Binary::Eq => "==",
            Binary::Ne => "!=",
            Binary::And => "and",
            Binary::Or => "or",
        }
    }

    /// Whether the result is a bool whatever the operands are.
    pub const fn is_logical(self) -> bool {
        matches!(self, Binary::Lt | Binary::Le | Binary::Eq | Binary::Ne | Binary::And | Binary::Or)
    }
}

impl Unary {
    /// Those that are written as functions.
    pub(in crate::score) const FUNCTIONS: [Unary; 13] = [
        Unary::Abs,
        Unary::Exp,
        Unary::Exp2,
        Unary::Log,
        Unary::Log2,
        Unary::Sqrt,
        Unary::Tanh,
        Unary::Sigmoid,
        Unary::ToFloat,
        Unary::IntFloor,
        Unary::IntCeil,
        Unary::IntTrunc,
        Unary::IntRound,
    ];

    /// Whether it makes a float of a float; an int is turned into one first.
    pub(in crate::score) const fn is_of_floats(self) -> bool {
        use Unary::{Exp, Exp2, Log, Log2, Sigmoid, Sqrt, Tanh};
        matches!(self, Exp | Exp2 | Log | Log2 | Sqrt | Tanh | Sigmoid)
    }

    /// Whether it rounds a float to an int.
    pub(in crate::score) const fn rounds(self) -> bool {
        matches!(self, Unary::IntFloor | Unary::IntCeil | Unary::IntTrunc | Unary::IntRound)
    }

    /// How it is written.
    pub const fn name(self) -> &'static str {
        match self {
            Unary::Neg => "-",
            Unary::Not => "not",
            Unary::Abs => "abs",
            Unary::ToFloat => "float",
            Unary::Exp2 => "exp2",
            Unary::Log2 => "log2",
            Unary::Tanh => "tanh",
            Unary::Exp => "exp",
            Unary::Log => "log",
            Unary::Sqrt => "sqrt",
            Unary::Sigmoid => "sigmoid",
            Unary::IntFloor => "int_floor",
            Unary::IntCeil => "int_ceil",
            Unary::IntTrunc => "int_trunc",
            Unary::IntRound => "int_round",
        }
    }
}
