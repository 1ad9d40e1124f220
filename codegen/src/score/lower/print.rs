//! Statements as text, in either language. The one place that knows how C and CUDA C spell a type or a function.

use super::Code;
use super::stmt::{Aspect, Expr, Function, Given, Name, Op, Scope, Stmt, Ty};
use crate::score::syntax::words::{Storage, Type};

/// The language of the statements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Dialect {
    /// C11.
    C,
    /// CUDA C++, as NVRTC takes it.
    Cuda,
}

impl Dialect {
    fn ty(self, ty: Ty) -> &'static str {
        match (ty, self) {
            (Ty::Bool | Ty::I32, Dialect::C) => "int32_t",
            (Ty::I64, Dialect::C) => "int64_t",
            (Ty::U64, Dialect::C) => "uint64_t",
            (Ty::Bool, Dialect::Cuda) => "bool",
            (Ty::I32, Dialect::Cuda) => "int",
            (Ty::I64, Dialect::Cuda) => "i64",
            (Ty::U64, Dialect::Cuda) => "u64",
            (Ty::F32, _) => "float",
            (Ty::Pointer(storage), _) if storage.bytes() == 2 => "Halves",
            (Ty::Pointer(_), _) => "Floats",
            (Ty::CapSeries, _) => "CapSeries",
            (Ty::BoxAxes, _) => "BoxAxis",
            (Ty::Extremes, _) => "auto",
        }
    }

    pub(crate) fn element(self, storage: Storage) -> &'static str {
        match (storage, self) {
            (Storage::F32, _) => "float",
            (Storage::F16 | Storage::Bf16, Dialect::C) => "uint16_t",
            (Storage::F16 | Storage::Bf16, Dialect::Cuda) => "u16",
            (Storage::I32, _) => self.ty(Ty::I32),
            (Storage::I64, _) => self.ty(Ty::I64),
            (Storage::Bool, Dialect::C) => "uint8_t",
            (Storage::Bool, Dialect::Cuda) => "u8",
        }
    }
}

/// Statements in a language. Names start with a prefix, so that several pieces of code can share a scope.
#[derive(Clone, Copy)]
pub struct Printer<'a> {
    pub(super) code: &'a Code,
    pub(super) dialect: Dialect,
    pub(super) prefix: &'a str,
}

impl Printer<'_> {
    /// All statements, in an order in which each finds what it reads; each ends a line.
    pub fn all(&self) -> String {
        Scope::ALL.map(|scope| self.scope(scope)).concat()
    }

    /// The statements of one scope.
    pub fn scope(&self, scope: Scope) -> String {
        self.code.of(scope).map(|s| self.statement(s)).collect()
    }

    /// The name or constant of each result.
    pub fn results(&self) -> Vec<String> {
        self.code.results.iter().map(|x| self.expr(x)).collect()
    }

    /// The first result, if there is one.
    pub(crate) fn result(&self) -> Option<String> {
        self.code.results.first().map(|x| self.expr(x))
    }

    /// The statements of a head that are computed again, not kept.
    pub(crate) fn cheap(&self) -> String {
        let kept = |s: &&Stmt| !self.code.kept_of_head.iter().any(|(_, name)| *name == s.name);
        self.code.of(Scope::Head).filter(kept).map(|s| self.statement(s)).collect()
    }

    /// Type and name of what is kept for each head or row.
    pub(crate) fn kept(&self, kept: &[(Ty, Name)]) -> Vec<(&'static str, String)> {
        kept.iter().map(|(ty, name)| (self.dialect.ty(*ty), self.name(*name))).collect()
    }

    fn statement(&self, s: &Stmt) -> String {
        let (name, value) = (self.name(s.name), self.expr(&s.expr));
        match s.ty {
            Ty::Pointer(storage) => format!("const {} *const {name} = {value};\n", self.dialect.element(storage)),
            Ty::BoxAxes => format!("const BoxAxis {name}[] = {value};\n"),
            ty => format!("const {} {name} = {value};\n", self.dialect.ty(ty)),
        }
    }

    pub(crate) fn name(&self, name: Name) -> String {
        let p = self.prefix;
        match name {
            Name::Node(id) => format!("{p}{}", id.index()),
            Name::Aspect(part, id) => {
                let suffix = match part {
                    Aspect::Base | Aspect::Axes => "b",
                    Aspect::ByKey => "c",
                    Aspect::ByScore => "k",
                    Aspect::Series | Aspect::First => "p",
                    Aspect::Extremes => "x",
                };
                format!("{p}{}{suffix}", id.index())
            }
            Name::Data(t) => format!("{p}t{t}"),
            Name::Stride(t, a) => format!("{p}t{t}s{a}"),
            Name::Length(t, a) => format!("{p}t{t}n{a}"),
        }
    }

    pub(crate) fn expr(&self, expr: &Expr) -> String {
        match expr {
            Expr::Name(name) => self.name(*name),
            Expr::Var(v) => v.name().to_owned(),
            Expr::Given(Given::Raw) => "raw".to_owned(),
            Expr::Given(Given::Scale) => "scale".to_owned(),
            Expr::Given(Given::KvFirst) => "kv_first".to_owned(),
            Expr::Given(Given::Offset) => "offset".to_owned(),
            Expr::Bool(x) => i32::from(*x).to_string(),
            Expr::Int(x, ty) => int_literal(*x, *ty),
            Expr::Float(bits) => float_literal(f32::from_bits(*bits)),
            Expr::Scalar(s, Type::Float) => format!("side->scalars[{s}].f"),
            Expr::Scalar(s, _) => format!("side->scalars[{s}].i"),
            Expr::Data(t, storage) => format!("(const {} *)side->tensors[{t}].data", self.dialect.element(*storage)),
            Expr::Stride(t, a) => format!("side->tensors[{t}].stride[{a}]"),
            Expr::Length(t, a) => format!("side->tensors[{t}].length[{a}]"),
            Expr::Element(data, at) => format!("{}[{}]", self.name(*data), self.expr(at)),
            Expr::Address(data, at) => format!("{} + ({})", self.name(*data), self.expr(at)),
            Expr::Extreme { of, greatest: true } => format!("{}.greatest", self.name(*of)),
            Expr::Extreme { of, greatest: false } => format!("{}.least", self.name(*of)),
            Expr::BoxAxes(axes) => {
                let axis = |axis: &[Expr; 4]| format!("{{{}}}", self.list(axis));
                format!("{{{}}}", axes.iter().map(axis).collect::<Vec<_>>().join(", "))
            }
            Expr::LookAtBox { data, axes, ty, unknown: [least, greatest] } => {
                let (data, axes, ty) = (self.name(*data), self.name(*axes), self.dialect.ty(*ty));
                format!("look_at_box({data}, {axes}, Extremes<{ty}>{{{}, {}}})", self.expr(least), self.expr(greatest))
            }
            Expr::Cast(ty, of) => match **of {
                Expr::Infix(..) | Expr::Choose(..) | Expr::Call(..) => {
                    format!("({})({})", self.dialect.ty(*ty), self.expr(of))
                }
                _ => format!("({}){}", self.dialect.ty(*ty), self.expr(of)),
            },
            Expr::Not(of) => format!("!{}", self.expr(of)),
            Expr::Neg(of) => format!("-{}", self.expr(of)),
            Expr::Infix(op, of) => format!("{} {} {}", self.expr(&of[0]), operator(*op), self.expr(&of[1])),
            Expr::Choose(of) => format!("{} ? {} : {}", self.expr(&of[0]), self.expr(&of[1]), self.expr(&of[2])),
            Expr::Call(f, of) => format!("{}({})", function(*f), self.list(of)),
        }
    }

    fn list(&self, of: &[Expr]) -> String {
        of.iter().map(|x| self.expr(x)).collect::<Vec<_>>().join(", ")
    }
}

fn operator(op: Op) -> &'static str {
    match op {
        Op::Add => "+",
        Op::Sub => "-",
        Op::Mul => "*",
        Op::Div => "/",
        Op::Rem => "%",
        Op::Shift => ">>",
        Op::LowBits | Op::And => "&",
        Op::Or => "|",
        Op::Lt => "<",
        Op::Le => "<=",
        Op::Gt => ">",
        Op::Eq => "==",
        Op::Ne => "!=",
    }
}

fn function(f: Function) -> String {
    match f {
        Function::Abs => "ft_absf".to_owned(),
        Function::Min => "ft_minf".to_owned(),
        Function::Max => "ft_maxf".to_owned(),
        Function::Exp2 => "ft_exp2f".to_owned(),
        Function::Log2 => "ft_log2f".to_owned(),
        Function::Tanh => "ft_tanhf".to_owned(),
        Function::Exp => "ft_expf".to_owned(),
        Function::Log => "ft_logf".to_owned(),
        Function::Sqrt => "ft_sqrtf".to_owned(),
        Function::Sigmoid => "ft_sigmoidf".to_owned(),
        Function::IntFloor => "ft_int_floor".to_owned(),
        Function::IntCeil => "ft_int_ceil".to_owned(),
        Function::IntTrunc => "ft_int_trunc".to_owned(),
        Function::IntRound => "ft_int_round".to_owned(),
        Function::FloorDiv(bits) => format!("ft_floor_div{bits}"),
        Function::FloorMod(bits) => format!("ft_floor_mod{bits}"),
        Function::Clamp(bits) => format!("ft_clamp{bits}"),
        Function::FromF16 => "ft_from_f16".to_owned(),
        Function::FromBf16 => "ft_from_bf16".to_owned(),
        Function::Fma => "fmaf".to_owned(),
        Function::CapSeries => "cap_series".to_owned(),
        Function::Cap => "ft_capf".to_owned(),
        Function::Along(storage) => format!("ft_along_{}", storage.name()),
    }
}

/// Negative constants in parentheses, so that they can stand wherever a name can.
fn int_literal(x: i64, ty: Ty) -> String {
    let (suffix, least) = if ty == Ty::I64 { ("ll", i64::MIN) } else { ("", i32::MIN as i64) };
    match x {
        x if x == least => format!("({}{suffix} - 1)", x + 1),
        x if x < 0 => format!("({x}{suffix})"),
        x => format!("{x}{suffix}"),
    }
}

fn float_literal(x: f32) -> String {
    match x {
        x if x.is_nan() => "FT_NAN".to_owned(),
        f32::INFINITY => "FT_INF".to_owned(),
        f32::NEG_INFINITY => "(-FT_INF)".to_owned(),
        x if x.is_sign_negative() => format!("({x:?}f)"),
        x => format!("{x:?}f"),
    }
}
