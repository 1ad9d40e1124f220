//! From nodes to the statements of C or CUDA C.
//!
//! Every node becomes one constant, so deep expressions are no burden for a compiler. Statements come in lists, by
//! what they change with, so that a kernel can put each outside of the loops that it does not depend on. An int is 32
//! bits wide where its range shows that it fits; what may wrap around is computed unsigned. Nothing branches: both sides
//! of a `select` are computed.
//!
//! In scope must be `b`, `h`, `h_kv`, `q`, `kv`, `q_len`, `kv_len` as 32-bit ints, `score` as `float` (or the tile's rows), a
//! pointer `side` to the tensors and scalars, and the functions of `lib/cpu/score.h` or `lib/cuda/score/score.cuh`.
//!
//! [`lower_fragments`] serves kernels whose threads hold the scores of some rows at fixed distances from a first key:
//! `kv` is `kv_first + offset`, and `offset` a constant once loops are unrolled; `score` is `raw * scale`. Floats that are
//! sums of multiples of `kv`, of the score and of what depends on neither then cost one multiply-add for each of both, of
//! constants that are computed once for a block, and no conversion. (Such a float may differ by a rounding or two from
//! one that is computed as it is written, and beyond 2^24 from the conversion of the whole int by one.)

mod fragments;
mod values;

use super::graph::{Depends, Graph, Node};
use super::words::{Binary, Id, Type};
use fragments::Affine;

use values::index_fits;

/// The language of the statements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Dialect {
    /// C11.
    C,
    /// CUDA C++, as NVRTC takes it.
    Cuda,
}

/// Statements for some nodes, each ending a line.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Code {
    /// Addresses, strides and scalars, as they are passed.
    pub inputs: String,
    /// Once for all scores of a head.
    pub uniform: String,
    /// For every query row; of fragments, for every query row and first key.
    pub row: String,
    /// For every key.
    pub column: String,
    /// For every score.
    pub element: String,
    /// The name or constant of each result.
    pub results: Vec<String>,
    /// Type and name of what `row` computes for `element` or for a result: what a kernel keeps for each query.
    pub row_live: Vec<(&'static str, String)>,
    /// Type and name of what `uniform` computes at some cost (loads, divisions, floats) for the other lists or for a
    /// result: what a kernel keeps for a head.
    pub uniform_live: Vec<(&'static str, String)>,
    /// Of the first result of fragments, if it is the score plus a multiple of the key plus what does not depend on it: the
    /// factor and the rest, which `row` computes.
    pub shift: Option<[String; 2]>,
    /// Of the first result of fragments, if it is bounded as a number times the tanh of a multiple of the score.
    pub capped: Option<Capped>,
    /// Whether the other results of fragments are multiples of the score: of none is the magnitude larger than where the
    /// score's is largest.
    pub multiples: bool,
    /// Elements of fragments that are read along the keys.
    pub along_keys: Vec<AlongKeys>,
}

/// A float that is read along the keys: `row` computes from where on, so that two may be read at once.
#[derive(Debug, Clone, PartialEq)]
pub struct AlongKeys {
    /// The node.
    pub load: Id,
    /// The address of the first one.
    pub first: String,
    /// The distance to the next.
    pub stride: String,
    /// Bytes of one.
    pub bytes: u32,
}

/// `cap * tanh(factor * score)`, with a cap of which a bound is known, both the same for all rows.
#[derive(Debug, Clone, PartialEq)]
pub struct Capped {
    /// The cap.
    pub cap: String,
    /// What the score is multiplied by.
    pub factor: String,
    /// The cap's largest magnitude.
    pub bound: f32,
}

impl Code {
    /// All statements, in an order in which each finds what it needs.
    pub fn all(&self) -> String {
        [&self.inputs, &self.uniform, &self.row, &self.column, &self.element].map(String::as_str).concat()
    }
}

/// Lowers some nodes. Names start with `prefix`, so that several pieces of code can share a scope.
pub fn lower(graph: &Graph, roots: &[Id], dialect: Dialect, prefix: &str) -> Code {
    run(graph, roots, dialect, prefix, false, false)
}

/// [`lower_fragments`] that reads floats along the keys by `ft_along`: two in one load where they lie side by side, and maybe
/// ahead of their use.
pub fn lower_scores(graph: &Graph, roots: &[Id], prefix: &str) -> Code {
    run(graph, roots, Dialect::Cuda, prefix, true, true)
}

/// [`lower`] to CUDA C for threads that hold scores at fixed distances from a first key: see the module.
pub fn lower_fragments(graph: &Graph, roots: &[Id], prefix: &str) -> Code {
    run(graph, roots, Dialect::Cuda, prefix, true, false)
}

fn run(graph: &Graph, roots: &[Id], dialect: Dialect, prefix: &str, fragments: bool, along: bool) -> Code {
    let mut needed = vec![false; graph.nodes().len()];
    roots.iter().for_each(|r| needed[r.index()] = true);
    let ids: Vec<Id> = graph.ids().collect();
    for id in ids.iter().rev().filter(|id| !is_leaf(graph, **id)) {
        if needed[id.index()] {
            graph.node(*id).operands().iter().for_each(|o| needed[o.index()] = true);
        }
    }
    let count = graph.nodes().len();
    let (affine, plain) = (vec![None; count], vec![false; count]);
    let code = Code::default();
    let mut lowering =
        Lowering { graph, dialect, prefix, fragments, along, code, affine, plain, needed: needed.clone() };
    if fragments {
        lowering.find_affine(roots, &needed);
    }
    lowering.tensors(&needed);
    for id in ids {
        if needed[id.index()] && !is_leaf(graph, id) {
            lowering.statement(id);
        }
    }
    lowering.shift(roots);
    lowering.code.capped = roots.first().and_then(|root| lowering.bounded_cap(*root));
    lowering.live(roots, &needed);
    lowering.code.results = roots.iter().map(|r| lowering.operand(*r)).collect();
    lowering.code
}

/// What is written where it is used.
fn is_leaf(graph: &Graph, id: Id) -> bool {
    matches!(graph.node(id), Node::Bool(_) | Node::Int(_) | Node::Float(_) | Node::Var(_))
}

/// What optimising statements costs a compiler, in units of one that calls nothing.
pub fn compiling_cost(statements: &str) -> usize {
    let calls: usize = ["tanh", "exp2", "log2"].iter().map(|f| statements.matches(f).count()).sum();
    statements.lines().count() + 8 * calls
}

/// The place of a declaration among the tensors, or among the scalars.
pub fn slot(graph: &Graph, declaration: usize) -> usize {
    let tensor = graph.declarations()[declaration].axes.is_some();
    graph.declarations()[..declaration].iter().filter(|d| d.axes.is_some() == tensor).count()
}

struct Lowering<'a> {
    graph: &'a Graph,
    dialect: Dialect,
    prefix: &'a str,
    fragments: bool,
    along: bool,
    code: Code,
    /// Floats that are `base + by_key * offset + by_score * raw`, with all three constant for a row and a first key.
    affine: Vec<Option<Affine>>,
    /// Which of them are read as they are.
    plain: Vec<bool>,
    /// Which nodes are lowered.
    needed: Vec<bool>,
}

impl Lowering<'_> {
    /// Pointers, strides and lengths of the tensors that are read.
    fn tensors(&mut self, needed: &[bool]) {
        let p = self.prefix;
        for (i, declaration) in self.graph.declarations().iter().enumerate() {
            let (mut indices, mut boxes) = (Vec::new(), false);
            for id in self.graph.ids().filter(|id| needed[id.index()]) {
                match self.graph.node(id) {
                    Node::Load { tensor, index } if *tensor == i => indices.push(index),
                    Node::Extreme { tensor, .. } if *tensor == i => boxes = true,
                    _ => {}
                }
            }
            let Some(axes) = declaration.axes.as_ref().filter(|_| boxes || !indices.is_empty()) else { continue };
            let (element, t) = (self.dialect.element(declaration.storage), slot(self.graph, i));
            let (i32, i64) = (self.dialect.i32(), self.dialect.i64());
            let code = &mut self.code.inputs;
            code.push_str(&format!("const {element} *const {p}t{t} = (const {element} *)side->tensors[{t}].data;\n"));
            for (a, axis) in axes.iter().enumerate() {
                code.push_str(&format!("const {i64} {p}t{t}s{a} = side->tensors[{t}].stride[{a}];\n"));
                if boxes || indices.iter().any(|index| !index_fits(self.graph, *axis, index[a])) {
                    code.push_str(&format!("const {i32} {p}t{t}n{a} = side->tensors[{t}].length[{a}];\n"));
                }
            }
        }
    }

    /// The type of a node in the statements.
    fn ty(&self, id: Id) -> &'static str {
        match (self.graph.ty(id), self.dialect) {
            (Type::Float, _) => "float",
            (Type::Int, _) => self.dialect.int(self.graph.range(id)),
            (Type::Bool, Dialect::C) => "int32_t",
            (Type::Bool, Dialect::Cuda) => "bool",
        }
    }

    /// Finds what each query keeps for its scores, and a head for all.
    fn live(&mut self, roots: &[Id], needed: &[bool]) {
        let graph = self.graph;
        let of_row = |id: Id| {
            let Depends { score, kv, q } = graph.depends(id);
            q && !kv && !score && !is_leaf(graph, id)
        };
        let of_head = |id: Id| {
            let Depends { score, kv, q } = graph.depends(id);
            !q && !kv && !score && self.costs(id)
        };
        let found = |of: &dyn Fn(Id) -> bool| {
            let mut live: Vec<Id> = roots.iter().copied().filter(|r| of(*r)).collect();
            for id in graph.ids().filter(|id| needed[id.index()] && !of(*id)) {
                live.extend(graph.node(id).operands().into_iter().filter(|o| of(*o)));
            }
            live.sort();
            live.dedup();
            live.into_iter().map(|id| (self.ty(id), self.operand(id))).collect::<Vec<_>>()
        };
        let (mut rows, heads) = (found(&of_row), found(&of_head));
        for id in graph.ids().filter(|id| self.plain[id.index()]) {
            rows.extend(self.affine[id.index()].iter().flat_map(Affine::parts).map(|part| ("float", part.clone())));
        }
        for id in graph.ids().filter(|id| needed[id.index()]) {
            let Some([cap, factor]) = self.capped(id) else { continue };
            rows.push(("CapSeries", format!("{}p", self.operand(id))));
            rows.extend([cap, factor].map(|part| ("float", part)));
        }
        rows.extend(self.code.along_keys.iter().map(|read| match read.bytes {
            2 => ("Halves", read.first.clone()),
            _ => ("Floats", read.first.clone()),
        }));
        rows.extend(self.code.shift.iter().flatten().map(|part| ("float", part.clone())));
        // Some parts belong to several floats, are kept for the head, or are what everyone has.
        let mut seen: std::collections::HashSet<&str> = heads.iter().map(|(_, name)| name.as_str()).collect();
        seen.insert("scale");
        let assigned = |line: &str| Some(line.split_once(" = ")?.0.rsplit([' ', '*']).next()?.to_owned());
        let computed: std::collections::HashSet<String> = self.code.row.lines().filter_map(assigned).collect();
        let kept: Vec<bool> = rows.iter().map(|(_, name)| computed.contains(name) && seen.insert(name)).collect();
        let mut kept = kept.into_iter();
        rows.retain(|_| kept.next().expect("as many"));
        (self.code.row_live, self.code.uniform_live) = (rows, heads);
    }

    /// Whether a node of a head is better kept than computed again.
    fn costs(&self, id: Id) -> bool {
        match self.graph.node(id) {
            Node::Scalar(_) => false,
            _ if is_leaf(self.graph, id) => false,
            Node::Load { .. } | Node::Binary(Binary::FloorDiv | Binary::Mod, ..) => true,
            _ if self.graph.ty(id) == Type::Float => true,
            node => node.operands().into_iter().any(|o| self.costs(o)),
        }
    }

    /// Whether a float is the same for all keys.
    fn is_fixed(&self, id: Id) -> bool {
        let Depends { score, kv, .. } = self.graph.depends(id);
        !score && !kv
    }

    fn statement(&mut self, id: Id) {
        if let Some(parts) = self.affine[id.index()].clone() {
            return self.affine_statements(id, &parts);
        }
        if let Some(parts) = self.capped(id) {
            return self.capped_statements(id, parts);
        }
        if self.along && self.along_keys(id) {
            return self.along_statements(id);
        }
        let looked_at = self.look_at_box(id);
        let value = self.value(id);
        let ty = self.ty(id);
        let line = format!("{looked_at}const {ty} {}{} = {value};\n", self.prefix, id.index());
        let Depends { score, kv, q } = self.graph.depends(id);
        let list = match (score, q, kv) {
            (false, false, false) if matches!(self.graph.node(id), Node::Scalar(_)) => &mut self.code.inputs,
            (false, false, false) => &mut self.code.uniform,
            (false, true, false) => &mut self.code.row,
            // Of fragments it may need what affine floats come to, which is computed for each score.
            (false, false, true) if !self.fragments => &mut self.code.column,
            _ => &mut self.code.element,
        };
        list.push_str(&line);
    }
}
