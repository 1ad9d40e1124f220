//! The expression of each node, in either language: types, widths of ints, places in tensors.

use super::super::graph::{Graph, Node};
use super::super::range::Range;
use super::super::words::{Axis, Binary, Id, Storage, Type, Unary};
use super::{Dialect, Lowering, slot};

impl Dialect {
    pub(super) fn int(self, range: Range) -> &'static str {
        if range.is_i32() { self.i32() } else { self.i64() }
    }
    pub(super) fn i32(self) -> &'static str {
        if self == Dialect::C { "int32_t" } else { "int" }
    }
    pub(super) fn i64(self) -> &'static str {
        if self == Dialect::C { "int64_t" } else { "i64" }
    }
    pub(super) fn u64(self) -> &'static str {
        if self == Dialect::C { "uint64_t" } else { "u64" }
    }
    pub(crate) fn element(self, storage: Storage) -> &'static str {
        match (storage, self) {
            (Storage::F32, _) => "float",
            (Storage::F16 | Storage::Bf16, Dialect::C) => "uint16_t",
            (Storage::F16 | Storage::Bf16, Dialect::Cuda) => "u16",
            (Storage::I32, _) => self.i32(),
            (Storage::I64, _) => self.i64(),
            (Storage::Bool, Dialect::C) => "uint8_t",
            (Storage::Bool, Dialect::Cuda) => "u8",
        }
    }
}

impl Lowering<'_> {
    /// A node where it is used.
    pub(super) fn operand(&self, id: Id) -> String {
        match self.graph.node(id) {
            Node::Bool(x) => i32::from(*x).to_string(),
            Node::Int(x) => int_literal(*x, self.graph.range(id)),
            Node::Float(bits) => match f32::from_bits(*bits) {
                x if x.is_nan() => "FT_NAN".to_owned(),
                f32::INFINITY => "FT_INF".to_owned(),
                f32::NEG_INFINITY => "(-FT_INF)".to_owned(),
                x if x.is_sign_negative() => format!("({x:?}f)"),
                x => format!("{x:?}f"),
            },
            Node::Var(v) => v.name().to_owned(),
            _ => format!("{}{}", self.prefix, id.index()),
        }
    }

    pub(super) fn value(&self, id: Id) -> String {
        match self.graph.node(id) {
            Node::Scalar(i) => {
                let s = slot(self.graph, *i);
                match self.graph.ty(id) {
                    Type::Float => format!("side->scalars[{s}].f"),
                    _ => format!("({})side->scalars[{s}].i", self.dialect.int(self.graph.range(id))),
                }
            }
            Node::Load { tensor, index } => self.load(id, *tensor, index),
            Node::Extreme { greatest, .. } => {
                format!("{}x.{}", self.box_name(id), if *greatest { "greatest" } else { "least" })
            }
            Node::Unary(op, x) => self.unary(id, *op, *x),
            Node::Binary(op, x, y) => match (op, self.graph.ty(*x)) {
                (Binary::And, _) => format!("{} & {}", self.operand(*x), self.operand(*y)),
                (Binary::Or, _) => format!("{} | {}", self.operand(*x), self.operand(*y)),
                (_, Type::Int) if op.is_logical() => {
                    let wide = wider(self.graph.range(*x), self.graph.range(*y));
                    format!("{} {} {}", self.cast(*x, wide), op.name(), self.cast(*y, wide))
                }
                (_, Type::Int) => self.int_binary(id, *op, *x, *y),
                (Binary::Min | Binary::Max, _) => {
                    format!("ft_{}f({}, {})", op.name(), self.operand(*x), self.operand(*y))
                }
                _ => format!("{} {} {}", self.operand(*x), op.name(), self.operand(*y)),
            },
            Node::Select(c, x, y) => match self.graph.ty(id) {
                Type::Int => {
                    let wide = self.graph.range(id);
                    format!("{} ? {} : {}", self.operand(*c), self.cast(*x, wide), self.cast(*y, wide))
                }
                _ => format!("{} ? {} : {}", self.operand(*c), self.operand(*x), self.operand(*y)),
            },
            _ => self.operand(id),
        }
    }

    pub(super) fn unary(&self, id: Id, op: Unary, x: Id) -> String {
        let of = self.operand(x);
        let (i64, u64) = (self.dialect.i64(), self.dialect.u64());
        match (op, self.graph.ty(x)) {
            (Unary::Not, _) => format!("!{of}"),
            (Unary::Neg, Type::Int) if self.graph.range(id) == Range::FULL => format!("({i64})(0 - ({u64}){of})"),
            (Unary::Abs, Type::Int) if self.graph.range(id) == Range::FULL => {
                format!("{of} < 0 ? ({i64})(0 - ({u64}){of}) : {of}")
            }
            (Unary::Neg, Type::Int) => format!("-{}", self.cast(x, wider(self.graph.range(id), self.graph.range(x)))),
            (Unary::Abs, Type::Int) => {
                let of = self.cast(x, wider(self.graph.range(id), self.graph.range(x)));
                format!("{of} < 0 ? -{of} : {of}")
            }
            (Unary::Neg, _) => format!("-{of}"),
            (Unary::Abs, _) => format!("ft_absf({of})"),
            (Unary::ToFloat, _) => format!("(float){of}"),
            (Unary::Exp2 | Unary::Log2 | Unary::Tanh, _) => format!("ft_{}f({of})", op.name()),
        }
    }

    /// An int, widened if its own type is narrower than that of a range.
    pub(super) fn cast(&self, id: Id, wide: Range) -> String {
        let of = self.operand(id);
        let leaf = matches!(self.graph.node(id), Node::Int(_));
        match (self.graph.range(id).is_i32(), wide.is_i32(), leaf) {
            (true, false, true) => int_literal(self.graph.range(id).lo, wide),
            (true, false, false) => format!("({}){of}", self.dialect.i64()),
            _ => of,
        }
    }

    pub(super) fn int_binary(&self, id: Id, op: Binary, x: Id, y: Id) -> String {
        let (result, a, b) = (self.graph.range(id), self.graph.range(x), self.graph.range(y));
        let wide = wider(result, wider(a, b));
        let (of_x, of_y) = (self.cast(x, wide), self.cast(y, wide));
        let narrow = |text: String| match result.is_i32() && !wide.is_i32() {
            true => format!("({})({text})", self.dialect.i32()),
            false => text,
        };
        match op {
            Binary::Add | Binary::Sub | Binary::Mul if result == Range::FULL => {
                let (i64, u64) = (self.dialect.i64(), self.dialect.u64());
                format!("({i64})(({u64}){of_x} {} ({u64}){of_y})", op.name())
            }
            Binary::Add | Binary::Sub | Binary::Mul => narrow(format!("{of_x} {} {of_y}", op.name())),
            Binary::Min => narrow(format!("{of_x} < {of_y} ? {of_x} : {of_y}")),
            Binary::Max => narrow(format!("{of_x} > {of_y} ? {of_x} : {of_y}")),
            Binary::FloorDiv | Binary::Mod => {
                let divides = op == Binary::FloorDiv;
                let by = self.graph.as_int(y).filter(|d| *d > 0);
                let bits = if wide.is_i32() { 32 } else { 64 };
                narrow(match by {
                    // Shifting and masking round down for negative numbers, too.
                    Some(d) if d & (d - 1) == 0 && divides => format!("{of_x} >> {}", d.trailing_zeros()),
                    Some(d) if d & (d - 1) == 0 => format!("{of_x} & {}", int_literal(d - 1, wide)),
                    _ if a.lo >= 0 && b.lo > 0 => format!("{of_x} {} {of_y}", if divides { "/" } else { "%" }),
                    _ => format!("ft_floor_{}{bits}({of_x}, {of_y})", if divides { "div" } else { "mod" }),
                })
            }
            _ => unreachable!("ints have no `{}`", op.name()),
        }
    }

    /// What each index adds to the place of an element.
    pub(super) fn places(&self, tensor: usize, index: &[Id]) -> Vec<String> {
        let (p, t) = (self.prefix, slot(self.graph, tensor));
        let axes = self.graph.declarations()[tensor].axes.as_deref().unwrap_or_default();
        (index.iter().zip(axes).enumerate())
            .map(|(a, (i, axis))| {
                let of = self.operand(*i);
                let bits = if self.graph.range(*i).is_i32() { 32 } else { 64 };
                match index_fits(self.graph, *axis, *i) {
                    true => format!("{of} * {p}t{t}s{a}"),
                    false => format!("ft_clamp{bits}({of}, {p}t{t}n{a}) * {p}t{t}s{a}"),
                }
            })
            .collect()
    }

    pub(super) fn load(&self, id: Id, tensor: usize, index: &[Id]) -> String {
        let (p, t) = (self.prefix, slot(self.graph, tensor));
        let declaration = &self.graph.declarations()[tensor];
        let at = format!("{p}t{t}[{}]", self.places(tensor, index).join(" + "));
        match declaration.storage {
            Storage::F32 => at,
            Storage::F16 => format!("ft_from_f16({at})"),
            Storage::Bf16 => format!("ft_from_bf16({at})"),
            // A declared range may be narrower than the storage.
            Storage::I32 | Storage::I64 => format!("({}){at}", self.dialect.int(self.graph.range(id))),
            Storage::Bool => format!("{at} != 0"),
        }
    }
}

/// Boxes of indices, whose least and greatest elements are found together by the lanes of a warp (`lib/cuda/score/box.cuh`).
impl Lowering<'_> {
    /// The first node that is about the same box: what is found there goes by its name.
    fn box_of(&self, id: Id) -> Id {
        let ends = |id: Id| match self.graph.node(id) {
            Node::Extreme { tensor, first, last, .. } => Some((tensor, first, last)),
            _ => None,
        };
        self.graph.ids().find(|other| self.needed[other.index()] && ends(*other) == ends(id)).unwrap_or(id)
    }

    pub(super) fn box_name(&self, id: Id) -> String {
        format!("{}{}", self.prefix, self.box_of(id).index())
    }

    /// The statement that looks at a box, before the first node that is about it.
    pub(super) fn look_at_box(&self, id: Id) -> String {
        let Node::Extreme { tensor, first, last, .. } = self.graph.node(id) else { return String::new() };
        if self.box_of(id) != id {
            return String::new();
        }
        let (p, t, declaration) = (self.prefix, slot(self.graph, *tensor), &self.graph.declarations()[*tensor]);
        let axes = first.iter().zip(last).enumerate().map(|(a, (first, last))| {
            format!("{{{}, {}, {p}t{t}n{a}, {p}t{t}s{a}}}", self.operand(*first), self.operand(*last))
        });
        let (ty, range) = match declaration.storage.ty() {
            Type::Bool => ("bool", Range { lo: 0, hi: 1 }),
            _ => (self.dialect.int(self.graph.range(id)), self.graph.range(id)),
        };
        let [lo, hi] = [range.lo, range.hi].map(|x| int_literal(x, range));
        let axes = axes.collect::<Vec<_>>().join(", ");
        format!(
            "const BoxAxis {p}{0}b[] = {{{axes}}};\nconst auto {p}{0}x = look_at_box({p}t{t}, {p}{0}b, Extremes<{ty}>{{{lo}, {hi}}});\n",
            id.index()
        )
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

pub(super) fn wider(a: Range, b: Range) -> Range {
    if a.is_i32() { b } else { a }
}

/// A constant of the type that holds a range.
pub(super) fn int_literal(x: i64, wide: Range) -> String {
    let (suffix, least) = if wide.is_i32() { ("", i32::MIN as i64) } else { ("ll", i64::MIN) };
    match x {
        x if x == least => format!("({}{suffix} - 1)", x + 1),
        x if x < 0 => format!("({x}{suffix})"),
        x => format!("{x}{suffix}"),
    }
}
