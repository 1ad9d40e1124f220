//! Random programs with an evaluator of their own, which knows nothing of normal forms.

#![allow(dead_code, reason = "each program uses its own part")]

use flashtune_codegen::score::{At, Elements, Scalar, SideData};
use flashtune_codegen::{Mask, Shape};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// What random programs may read.
pub(crate) const DECLARATIONS: &str = "
    w: int in -4..20; any: int; cap: float;
    slope: float[heads]; bias: float[heads, q_len, kv_len];
    doc_q: int[batch, q_len] in 0..9 nondecreasing; doc_kv: int[batch, kv_len] in 0..9 nondecreasing;
    prefix: int[batch] in 0..30; table: int[*] in -50..50; wide: i64[kv_len]; flag: bool[batch, kv_len];
";

/// Functions whose last digit is the machine's own.
pub(crate) const FUNCTIONS: [&str; 6] = ["tanh", "exp2", "log2", "exp", "log", "sigmoid"];

/// Whether a text calls one of them.
pub(crate) fn has_functions(text: &str) -> bool {
    FUNCTIONS.iter().any(|f| text.contains(&format!("{f}(")))
}

/// A typed expression as it is written.
#[derive(Debug, Clone)]
pub(crate) enum Tree {
    Leaf(String),
    Load(&'static str, Vec<Tree>),
    Call(&'static str, Vec<Tree>),
    Infix(&'static str, Box<Tree>, Box<Tree>),
    If(Box<Tree>, Box<Tree>, Box<Tree>),
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Value {
    Bool(bool),
    Int(i64),
    Float(f64),
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Bool,
    Int,
    Float,
}

impl Tree {
    pub(crate) fn text(&self) -> String {
        let list = |items: &[Tree]| items.iter().map(Tree::text).collect::<Vec<_>>().join(", ");
        match self {
            Tree::Leaf(text) => text.clone(),
            Tree::Load(name, index) => format!("{name}[{}]", list(index)),
            Tree::Call(name @ ("not" | "-"), of) => format!("({name} {})", of[0].text()),
            Tree::Call(name, of) => format!("{name}({})", list(of)),
            Tree::Infix(op, a, b) => format!("({} {op} {})", a.text(), b.text()),
            Tree::If(c, a, b) => format!("({} if {} else {})", a.text(), c.text(), b.text()),
        }
    }

    /// The value at a place, floats rounded to fp32 after each operation.
    pub(crate) fn value(&self, at: At, score: f64, sizes: &Shape, data: &SideData) -> Value {
        let of = |t: &Tree| t.value(at, score, sizes, data);
        let int = |t: &Tree| match of(t) {
            Value::Int(x) => x,
            other => panic!("{} is {other:?}", t.text()),
        };
        let bool = |t: &Tree| of(t) == Value::Bool(true);
        let float = |v: Value| match v {
            Value::Int(x) => (x as f32) as f64,
            Value::Float(x) => x,
            Value::Bool(_) => panic!("a bool where a number is needed"),
        };
        let round = |x: f64| Value::Float(x as f32 as f64);
        match self {
            Tree::Leaf(name) => match (name.as_str(), data.scalars.get(name)) {
                (_, Some(Scalar::Int(x))) => Value::Int(*x),
                (_, Some(Scalar::Float(x))) => Value::Float(*x as f64),
                ("b", _) => Value::Int(at.b.into()),
                ("h", _) => Value::Int(at.h.into()),
                ("h_kv", _) => Value::Int((at.h / (sizes.heads / sizes.kv_heads)).into()),
                ("q", _) => Value::Int(at.q.into()),
                ("kv", _) => Value::Int(at.kv.into()),
                ("q_len", _) => Value::Int(sizes.q_len.into()),
                ("kv_len", _) => Value::Int(sizes.kv_len.into()),
                ("score", _) => Value::Float(score as f32 as f64),
                ("true", _) => Value::Bool(true),
                ("false", _) => Value::Bool(false),
                (number, _) => match number.parse() {
                    Ok(x) => Value::Int(x),
                    Err(_) => round(number.parse::<f32>().unwrap() as f64),
                },
            },
            Tree::Load(name, index) => {
                let tensor = &data.tensors[*name];
                let mut place = 0;
                for (i, n) in index.iter().zip(&tensor.shape) {
                    place = place * n + int(i).clamp(0, *n as i64 - 1) as usize;
                }
                match &tensor.elements {
                    Elements::Bool(x) => Value::Bool(x[place]),
                    Elements::Int(x) => Value::Int(x[place]),
                    Elements::Float(x) => Value::Float(x[place] as f64),
                }
            }
            Tree::If(c, a, b) => {
                let (x, y) = (of(a), of(b));
                let float_too = matches!(x, Value::Float(_)) || matches!(y, Value::Float(_));
                let chosen = if bool(c) { x } else { y };
                if float_too { Value::Float(float(chosen)) } else { chosen }
            }
            Tree::Call(name, operands) => match (*name, of(&operands[0])) {
                ("not", Value::Bool(x)) => Value::Bool(!x),
                ("-", Value::Int(x)) => Value::Int(x.wrapping_neg()),
                ("abs", Value::Int(x)) => Value::Int(x.wrapping_abs()),
                ("-", x) => Value::Float(-float(x)),
                ("abs", x) => Value::Float(float(x).abs()),
                ("float", x) => Value::Float(float(x)),
                ("exp2", x) => round(float(x).exp2()),
                ("tanh", x) => round(float(x).tanh()),
                ("log2", x) => round(float(x).log2()),
                ("exp", x) => round(float(x).exp()),
                ("log", x) => round(float(x).ln()),
                ("sqrt", x) => round(float(x).sqrt()),
                ("sigmoid", x) => round(1.0 / (1.0 + (-float(x)).exp())),
                ("int_floor", x) => Value::Int(float(x).floor() as i64),
                ("int_ceil", x) => Value::Int(float(x).ceil() as i64),
                ("int_trunc", x) => Value::Int(float(x) as i64),
                ("int_round", x) => Value::Int(float(x).round_ties_even() as i64),
                ("min" | "max", x) => {
                    let least = *name == "min";
                    match (x, of(&operands[1])) {
                        (Value::Int(x), Value::Int(y)) => Value::Int(if least { x.min(y) } else { x.max(y) }),
                        (x, y) => {
                            let (x, y) = (float(x) as f32, float(y) as f32);
                            Value::Float(if least { x.min(y) } else { x.max(y) } as f64)
                        }
                    }
                }
                other => panic!("{other:?}"),
            },
            Tree::Infix(op, a, b) => match (of(a), of(b)) {
                (Value::Bool(x), Value::Bool(y)) => Value::Bool(match *op {
                    "and" => x && y,
                    "or" => x || y,
                    "==" => x == y,
                    _ => x != y,
                }),
                (Value::Int(x), Value::Int(y)) if *op != "/" => match *op {
                    "+" => Value::Int(x.wrapping_add(y)),
                    "-" => Value::Int(x.wrapping_sub(y)),
                    "*" => Value::Int(x.wrapping_mul(y)),
                    "//" if y == 0 => Value::Int(0),
                    "%" if y == 0 => Value::Int(x),
                    // The quotient in wide integers.
                    "//" => Value::Int(
                        (x as i128 - (x as i128).rem_euclid((y as i128).abs())
                            + if y < 0 && (x as i128).rem_euclid((y as i128).abs()) != 0 {
                                (y as i128).abs()
                            } else {
                                0
                            })
                        .checked_div(y as i128)
                        .unwrap() as i64,
                    ),
                    "%" => {
                        let rest = (x as i128).rem_euclid((y as i128).abs());
                        Value::Int(if y < 0 && rest != 0 { rest + y as i128 } else { rest } as i64)
                    }
                    _ => Value::Bool(compare(op, x, y)),
                },
                (x, y) => {
                    let (x, y) = (float(x), float(y));
                    match *op {
                        "+" => round(x + y),
                        "-" => round(x - y),
                        "*" => round(x * y),
                        "/" => round(x / y),
                        _ => Value::Bool(compare(op, x, y)),
                    }
                }
            },
        }
    }
}

fn compare<T: PartialOrd>(op: &str, x: T, y: T) -> bool {
    match op {
        "<" => x < y,
        "<=" => x <= y,
        ">" => x > y,
        ">=" => x >= y,
        "==" => x == y,
        "!=" => x != y,
        _ => panic!("{op}"),
    }
}

/// Makes programs, sizes and data; the same for the same seed.
pub(crate) struct Generator {
    pub rng: StdRng,
    /// Whether floats may occur in masks, and functions whose last digit a C library may round otherwise.
    pub functions: bool,
}

impl Generator {
    pub(crate) fn new(seed: u64) -> Self {
        Self { rng: StdRng::seed_from_u64(seed), functions: true }
    }

    fn pick<T: Clone>(&mut self, of: &[T]) -> T {
        of[self.rng.random_range(0..of.len())].clone()
    }

    pub(crate) fn mask(&mut self, depth: u32) -> Tree {
        self.tree(Kind::Bool, depth, false)
    }

    pub(crate) fn score(&mut self, depth: u32) -> Tree {
        self.tree(Kind::Float, depth, true)
    }

    fn tree(&mut self, kind: Kind, depth: u32, score: bool) -> Tree {
        let d = depth.saturating_sub(1 + self.rng.random_range(0..2));
        let leaf = depth == 0;
        match kind {
            Kind::Int => match if leaf { self.rng.random_range(0..4) } else { self.rng.random_range(0..15) } {
                0 => {
                    let n = self.pick(&[0i64, 1, 2, 3, 5, 8, 16, 31, 100, 1 << 30, i64::MAX]);
                    Tree::Leaf(n.to_string())
                }
                1..4 => Tree::Leaf(
                    self.pick(&["q", "kv", "q", "kv", "q", "kv", "b", "h", "h_kv", "q_len", "kv_len", "w", "any"])
                        .into(),
                ),
                4..9 => self.infix(&["+", "-", "+", "-", "*", "//", "%"], Kind::Int, d, score),
                9 => Tree::Call("-", vec![self.tree(Kind::Int, d, score)]),
                10 => Tree::Call("abs", vec![self.tree(Kind::Int, d, score)]),
                11 => {
                    let name = self.pick(&["min", "max"]);
                    Tree::Call(name, vec![self.tree(Kind::Int, d, score), self.tree(Kind::Int, d, score)])
                }
                12 => self.conditional(Kind::Int, d, score),
                // Of what every machine computes to the last digit.
                13 => {
                    let name = self.pick(&["int_floor", "int_ceil", "int_trunc", "int_round"]);
                    let functions = std::mem::replace(&mut self.functions, false);
                    let of = self.tree(Kind::Float, d, score);
                    self.functions = functions;
                    Tree::Call(name, vec![Tree::Infix("*", Box::new(of), Box::new(Tree::Leaf("0.37".into())))])
                }
                _ => {
                    let usual = |names: &[&str]| names.iter().map(|n| Tree::Leaf((*n).into())).collect::<Vec<_>>();
                    match self.rng.random_range(0..6) {
                        0 => Tree::Load("doc_q", usual(&["b", "q"])),
                        1 => Tree::Load("doc_kv", usual(&["b", "kv"])),
                        2 => Tree::Load("prefix", usual(&["b"])),
                        3 => Tree::Load("wide", vec![self.tree(Kind::Int, d, score)]),
                        4 => Tree::Load("doc_kv", vec![Tree::Leaf("b".into()), self.tree(Kind::Int, d, score)]),
                        _ => Tree::Load("table", vec![self.tree(Kind::Int, d, score)]),
                    }
                }
            },
            Kind::Bool => match if leaf { self.rng.random_range(0..3) } else { self.rng.random_range(0..12) } {
                0 if self.rng.random_range(0..4) == 0 => Tree::Leaf(self.pick(&["true", "false"]).into()),
                0..3 => self.infix(&["<", "<=", ">", ">=", "==", "!=", "<=", "<"], Kind::Int, d, score),
                3..8 => self.infix(&["and", "or", "and", "or", "and", "==", "!="], Kind::Bool, d, score),
                8 => Tree::Call("not", vec![self.tree(Kind::Bool, d, score)]),
                9 => self.infix(&["<", "<=", "==", ">", "!="], Kind::Float, d, score),
                10 => self.conditional(Kind::Bool, d, score),
                _ => Tree::Load("flag", vec![Tree::Leaf("b".into()), self.tree(Kind::Int, d, score)]),
            },
            Kind::Float => match if leaf { self.rng.random_range(0..4) } else { self.rng.random_range(0..12) } {
                0 => Tree::Leaf(self.pick(&["0.5", "2.0", "1.0", "0.1", "30.0", "-1.5", "cap"]).into()),
                1 if score => Tree::Leaf("score".into()),
                1 | 2 => Tree::Call("float", vec![self.tree(Kind::Int, d.min(1), score)]),
                3 => Tree::Load("slope", vec![Tree::Leaf("h".into())]),
                4..8 => self.infix(&["+", "-", "*", "/"], Kind::Float, d, score),
                8 => {
                    let name = self.pick(&["-", "abs", "sqrt"]);
                    Tree::Call(name, vec![self.tree(Kind::Float, d, score)])
                }
                9 => {
                    let name = self.pick(&["min", "max"]);
                    Tree::Call(name, vec![self.tree(Kind::Float, d, score), self.tree(Kind::Float, d, score)])
                }
                10 => self.conditional(Kind::Float, d, score),
                _ if self.functions && self.rng.random_bool(0.5) => {
                    let name = self.pick(&FUNCTIONS);
                    Tree::Call(name, vec![self.tree(Kind::Float, d, score)])
                }
                _ => Tree::Load("bias", ["h", "q", "kv"].map(|n| Tree::Leaf(n.into())).to_vec()),
            },
        }
    }

    fn infix(&mut self, ops: &[&'static str], kind: Kind, d: u32, score: bool) -> Tree {
        let op = self.pick(ops);
        Tree::Infix(op, Box::new(self.tree(kind, d, score)), Box::new(self.tree(kind, d, score)))
    }

    fn conditional(&mut self, kind: Kind, d: u32, score: bool) -> Tree {
        let c = self.tree(Kind::Bool, d, score);
        Tree::If(Box::new(c), Box::new(self.tree(kind, d, score)), Box::new(self.tree(kind, d, score)))
    }

    /// Small sizes, one row and one key among them.
    pub(crate) fn sizes(&mut self) -> Shape {
        let group = self.rng.random_range(1..3);
        let kv_heads = self.rng.random_range(1..3);
        let length = |rng: &mut StdRng| match rng.random_range(0..4) {
            0 => 1,
            _ => rng.random_range(1..40),
        };
        Shape {
            batch: self.rng.random_range(1..3),
            heads: group * kv_heads,
            kv_heads,
            q_len: length(&mut self.rng),
            kv_len: length(&mut self.rng),
            mask: Mask::Full,
        }
    }

    /// Data for [`DECLARATIONS`]; some axes are broadcast.
    pub(crate) fn data(&mut self, sizes: &Shape) -> SideData {
        let [batch, heads, q_len, kv_len] = [sizes.batch, sizes.heads, sizes.q_len, sizes.kv_len].map(|n| n as usize);
        let rng = &mut self.rng;
        let mut ints = |n: usize, lo: i64, hi: i64| -> Vec<i64> { (0..n).map(|_| rng.random_range(lo..=hi)).collect() };
        let sorted = |mut x: Vec<i64>, row: usize| {
            x.chunks_mut(row).for_each(|r| r.sort());
            Elements::Int(x)
        };
        let any = [-7, 0, 1, 2, 5, i32::MAX as i64, i32::MIN as i64][ints(1, 0, 6)[0] as usize];
        let w = ints(1, -4, 20)[0];
        let table = ints(1, 1, 9)[0] as usize;
        let bias_rows = if ints(1, 0, 1)[0] == 0 { 1 } else { q_len };
        let wide = ints(kv_len, i64::MIN, i64::MAX);
        let wide = wide.into_iter().map(|x| if x % 3 == 0 { x } else { x % 50 }).collect();
        let docs_q = sorted(ints(batch * q_len, 0, 9), q_len);
        let docs_kv = sorted(ints(kv_len, 0, 9), kv_len);
        let prefix = ints(batch, 0, 30);
        let flags = ints(batch * kv_len, 0, 1).into_iter().map(|x| x == 1).collect();
        let table_values = ints(table, -50, 50);
        let mut floats = |n: usize| Elements::Float((0..n).map(|_| rng.random_range(-2.0..2.0)).collect());
        let (slope, bias) = (floats(heads), floats(heads * bias_rows * kv_len));
        SideData::default()
            .scalar("w", Scalar::Int(w))
            .scalar("any", Scalar::Int(any))
            .scalar("cap", Scalar::Float(20.0))
            .tensor("slope", &[heads], slope)
            .tensor("bias", &[heads, bias_rows, kv_len], bias)
            .tensor("doc_q", &[batch, q_len], docs_q)
            .tensor("doc_kv", &[1, kv_len], docs_kv)
            .tensor("prefix", &[batch], Elements::Int(prefix))
            .tensor("table", &[table], Elements::Int(table_values))
            .tensor("wide", &[kv_len], Elements::Int(wide))
            .tensor("flag", &[batch, kv_len], Elements::Bool(flags))
    }

    /// A place in the sizes.
    pub(crate) fn place(&mut self, sizes: &Shape) -> At {
        let mut below = |n: u32| self.rng.random_range(0..n);
        At { b: below(sizes.batch), h: below(sizes.heads), q: below(sizes.q_len), kv: below(sizes.kv_len) }
    }
}
