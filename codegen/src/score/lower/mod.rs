//! From nodes to statements, and from those to the text of C or CUDA C.
//!
//! ```text
//! Graph, roots -> lower (values, fragments) -> Code { Stmt { scope, ty, name, expr, cost } } -> Printer -> text
//!                                                -> keep: what later scopes read of earlier ones
//!                                                -> cost: what compiling it takes
//! Program -> pieces -> the words of templates/lib/{cpu/program.h, cuda/program.cuh}
//! ```
//!
//! Every node becomes one constant, so deep expressions are no burden for a compiler. Statements have a scope, by what
//! they change with, so that a kernel can put each outside of the loops that it does not depend on. An int is 32 bits
//! wide where its range shows that it fits; what may wrap around is computed unsigned. Nothing branches: both sides of
//! a `select` are computed.
//!
//! In scope must be `b`, `h`, `h_kv`, `q`, `kv`, `q_len`, `kv_len` as 32-bit ints, `score` as `float` (or the tile's
//! rows), a pointer `side` to the tensors and scalars, and the functions of `lib/cpu/score.h` or
//! `lib/cuda/score/score.cuh`.
//!
//! [`Form::Fragments`] serves kernels whose threads hold the scores of some rows at fixed distances from a first key:
//! `kv` is `kv_first + offset`, and `offset` a constant once loops are unrolled; `score` is `raw * scale`. Floats that
//! are sums of multiples of `kv`, of the score and of what depends on neither then cost one multiply-add for each of
//! both, of constants that are computed once for a block, and no conversion. (Such a float may differ by a rounding or
//! two from one that is computed as it is written, and beyond 2^24 from the conversion of the whole int by one.)

mod cost;
mod dense;
mod fragments;
mod gradient;
mod keep;
mod pieces;
mod print;
mod stmt;
mod terms;
mod values;

use crate::score::analysis::derive::Derivative;
use crate::score::graph::{Depends, Graph, Node};
use crate::score::syntax::words::Id;
use fragments::Affine;
pub(crate) use gradient::gradient_fields;
pub(crate) use pieces::{cpu_fields, cuda_fields};
pub use print::{Dialect, Printer};
pub use stmt::Scope;
use stmt::{Expr, Name, Stmt, Ty};
pub(crate) use terms::term_fields;
use values::index_fits;

/// The statements of some nodes.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Code {
    /// In each scope, operands before those that read them.
    statements: Vec<Stmt>,
    /// The name or constant of each result.
    results: Vec<Expr>,
    /// What statements of rows compute for later scopes or for a result: what a kernel keeps for each query.
    kept_of_row: Vec<(Ty, Name)>,
    /// What statements of a head compute at some cost (loads, divisions, floats) for later scopes or for a result: what
    /// a kernel keeps for a head.
    kept_of_head: Vec<(Ty, Name)>,
    /// For fragments whose first result is the score plus a multiple of the key plus what does not depend on it: the
    /// factor and the rest, which statements of rows compute.
    shift: Option<[Expr; 2]>,
    /// For fragments whose first result is bounded as a number times the tanh of a multiple of the score.
    capped: Option<Capped>,
    /// Whether the other results of fragments are multiples of the score: the magnitude of each is largest where the
    /// score's is.
    multiples: bool,
    /// Elements that fragments read along the keys.
    along_keys: Vec<AlongKeys>,
}

/// A float that is read along the keys: `first` is computed for a row, so that two may be read at once.
#[derive(Debug, Clone, PartialEq)]
struct AlongKeys {
    /// The node.
    load: Id,
    /// The address of the first element, and the distance to the next one.
    first: Name,
    stride: Name,
    /// Bytes of an element.
    bytes: u32,
}

/// `cap * tanh(factor * score)`, with a cap of which a bound is known, both the same for all rows.
#[derive(Debug, Clone, PartialEq)]
struct Capped {
    cap: Expr,
    factor: Expr,
    /// The cap's largest magnitude.
    bound: f32,
}

impl Code {
    /// The statements in a language. Names start with `prefix`, so that several pieces of code can share a scope.
    pub fn print<'a>(&'a self, dialect: Dialect, prefix: &'a str) -> Printer<'a> {
        Printer { code: self, dialect, prefix }
    }

    /// The statements of one scope.
    fn of(&self, scope: Scope) -> impl Iterator<Item = &Stmt> {
        self.statements.iter().filter(move |s| s.scope == scope)
    }
}

/// For which kernels nodes are lowered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// Every score on its own.
    Single,
    /// Scores at fixed distances from a first key: see the module.
    Fragments,
    /// The same, with floats along the keys read by `ft_along`: two in one load where they are adjacent, and maybe
    /// ahead of their use.
    AlongKeys,
}

/// Lowers some nodes, for every score on its own.
pub fn lower(graph: &Graph, roots: &[Id]) -> Code {
    run(graph, roots, Form::Single)
}

/// [`lower`] in [`Form::Fragments`].
fn lower_fragments(graph: &Graph, roots: &[Id]) -> Code {
    run(graph, roots, Form::Fragments)
}

/// [`lower`] in [`Form::AlongKeys`].
fn lower_scores(graph: &Graph, roots: &[Id]) -> Code {
    run(graph, roots, Form::AlongKeys)
}

/// Lowers a result and its derivatives together: they share what they have in common, such as the tanh of a cap.
///
/// The results of the code are the value, its derivative by the score (0 where there is none), and those of
/// [`Derivative::tensors`], in their order. With P the softmax of the value and dP its gradient, the gradient by the
/// score is `P * (dP - D) * d value / d score`, per score.
pub fn lower_derivative(derivative: &Derivative, form: Form) -> Code {
    let mut graph = derivative.graph.clone();
    let by_score = derivative.score.unwrap_or_else(|| graph.float(0.0));
    let by_tensors = derivative.tensors.iter().map(|t| t.value);
    let roots: Vec<Id> = [derivative.value, by_score].into_iter().chain(by_tensors).collect();
    run(&graph, &roots, form)
}

fn run(graph: &Graph, roots: &[Id], form: Form) -> Code {
    let count = graph.nodes().len();
    let mut needed = vec![false; count];
    roots.iter().for_each(|r| needed[r.index()] = true);
    let ids: Vec<Id> = graph.ids().collect();
    for id in ids.iter().rev().filter(|id| !is_leaf(graph, **id)) {
        if needed[id.index()] {
            graph.node(*id).operands().iter().for_each(|o| needed[o.index()] = true);
        }
    }
    let (affine, plain) = (vec![None; count], vec![false; count]);
    let mut lowering = Lowering { graph, form, code: Code::default(), affine, plain, needed };
    if form != Form::Single {
        lowering.find_affine(roots);
    }
    lowering.tensors();
    for id in ids {
        if lowering.needed[id.index()] && !is_leaf(graph, id) {
            lowering.statement(id);
        }
    }
    lowering.shift(roots);
    lowering.code.capped = roots.first().and_then(|root| lowering.bounded_cap(*root));
    lowering.code.results = roots.iter().map(|r| lowering.operand(*r)).collect();
    let mut code = lowering.code;
    code.keep();
    code
}

/// What is written where it is used.
fn is_leaf(graph: &Graph, id: Id) -> bool {
    matches!(graph.node(id), Node::Bool(_) | Node::Int(_) | Node::Float(_) | Node::Var(_))
}

/// The place of a declaration among the tensors, or among the scalars.
pub(crate) fn slot(graph: &Graph, declaration: usize) -> usize {
    let tensor = graph.declarations()[declaration].axes.is_some();
    graph.declarations()[..declaration].iter().filter(|d| d.axes.is_some() == tensor).count()
}

struct Lowering<'a> {
    graph: &'a Graph,
    form: Form,
    code: Code,
    /// Floats that are `base + by_key * offset + by_score * raw`, with all three constant for a row and a first key.
    affine: Vec<Option<Affine>>,
    /// Which of them are read as they are.
    plain: Vec<bool>,
    /// Which nodes are lowered.
    needed: Vec<bool>,
}

impl Lowering<'_> {
    fn push(&mut self, scope: Scope, ty: Ty, name: Name, expr: Expr) {
        self.code.statements.push(Stmt::new(scope, ty, name, expr));
    }

    /// Pointers, strides and lengths of the tensors that are read.
    fn tensors(&mut self) {
        let graph = self.graph;
        for (i, declaration) in graph.declarations().iter().enumerate() {
            let (mut indices, mut boxes) = (Vec::new(), false);
            for id in graph.ids().filter(|id| self.needed[id.index()]) {
                match graph.node(id) {
                    Node::Load { tensor, index } if *tensor == i => indices.push(index),
                    Node::Extreme { tensor, .. } if *tensor == i => boxes = true,
                    _ => {}
                }
            }
            let Some(axes) = declaration.axes.as_ref().filter(|_| boxes || !indices.is_empty()) else { continue };
            let (storage, t) = (declaration.storage, slot(graph, i));
            self.push(Scope::Input, Ty::Pointer(storage), Name::Data(t), Expr::Data(t, storage));
            for (a, axis) in axes.iter().enumerate() {
                self.push(Scope::Input, Ty::I64, Name::Stride(t, a), Expr::Stride(t, a));
                if boxes || indices.iter().any(|index| !index_fits(graph, *axis, index[a])) {
                    self.push(Scope::Input, Ty::I32, Name::Length(t, a), Expr::Length(t, a));
                }
            }
        }
    }

    /// Whether a node is the same for all keys.
    fn is_fixed(&self, id: Id) -> bool {
        let Depends { score, kv, .. } = self.graph.depends(id);
        !score && !kv
    }

    fn statement(&mut self, id: Id) {
        if let Some(parts) = self.affine[id.index()].clone() {
            return self.affine_statements(id, parts);
        }
        if let Some(parts) = self.capped(id) {
            return self.capped_statements(id, parts);
        }
        if self.form == Form::AlongKeys && self.is_along_keys(id) {
            return self.along_statements(id);
        }
        let Depends { score, kv, q } = self.graph.depends(id);
        let scope = match (score, q, kv) {
            (false, false, false) if matches!(self.graph.node(id), Node::Scalar(_)) => Scope::Input,
            (false, false, false) => Scope::Head,
            (false, true, false) => Scope::Row,
            // For fragments it may need what affine floats come to, which is computed for each score.
            (false, false, true) if self.form == Form::Single => Scope::Key,
            _ => Scope::Score,
        };
        self.look_at_box(id, scope);
        let ty = Ty::of(self.graph.ty(id), self.graph.range(id));
        self.push(scope, ty, Name::Node(id), self.value(id));
    }
}
