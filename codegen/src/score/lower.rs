//! From nodes to the statements of C or CUDA C.
//!
//! Every node becomes one constant, so deep expressions are no burden for a compiler. Statements come in lists, by
//! what they change with, so that a kernel can put each outside of the loops that it does not depend on. An int is 32
//! bits wide where its range shows that it fits; what may wrap around is computed unsigned. Nothing branches: both sides
//! of a `select` are computed.
//!
//! In scope must be `b`, `h`, `h_kv`, `q`, `kv`, `q_len`, `kv_len` as 32-bit ints, `score` as `float` (or the tile's rows), a
//! pointer `side` to the tensors and scalars, and the functions of `lib/cpu/score.h` or `lib/cuda/score.cuh`.
//!
//! [`lower_fragments`] serves kernels whose threads hold the scores of some rows at fixed distances from a first key:
//! `kv` is `kv_first + offset`, and `offset` a constant once loops are unrolled; `score` is `raw * scale`. Floats that are
//! sums of multiples of `kv`, of the score and of what depends on neither then cost one multiply-add for each of both, of
//! constants that are computed once for a block, and no conversion. (Such a float may differ by a rounding or two from
//! one that is computed as it is written, and beyond 2^24 from the conversion of the whole int by one.)

use super::graph::{Depends, Graph, Id, Node};
use super::words::{Axis, Binary, Range, Storage, Type, Unary, Var};

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
    /// Addresses from which elements of fragments along the keys may be read in pairs, with the strides and the bytes of
    /// an element; `row` computes them.
    pub along_keys: Vec<(String, String, u32)>,
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
    let mut lowering = Lowering { graph, dialect, prefix, fragments, along, code: Code::default(), affine, plain };
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
}

/// The parts of a float that are there.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Affine {
    base: Option<String>,
    by_key: Option<String>,
    by_score: Option<String>,
}

impl Affine {
    fn all(&self) -> [Option<String>; 3] {
        [self.base.clone(), self.by_key.clone(), self.by_score.clone()]
    }

    fn parts(&self) -> impl Iterator<Item = &String> {
        [&self.base, &self.by_key, &self.by_score].into_iter().flatten()
    }

    fn has(&self) -> [bool; 3] {
        [&self.base, &self.by_key, &self.by_score].map(Option::is_some)
    }

    /// The float itself.
    fn value(&self) -> String {
        let of_key = match (&self.by_key, &self.base) {
            (Some(c), Some(b)) => Some(format!("fmaf({c}, (float)offset, {b})")),
            (Some(c), None) => Some(format!("{c} * (float)offset")),
            (None, b) => b.clone(),
        };
        match (&self.by_score, of_key) {
            (Some(k), Some(rest)) => format!("fmaf(raw, {k}, {rest})"),
            (Some(k), None) => format!("raw * {k}"),
            (None, rest) => rest.unwrap_or_else(|| "0.0f".to_owned()),
        }
    }
}

impl Dialect {
    fn int(self, range: Range) -> &'static str {
        if range.is_i32() { self.i32() } else { self.i64() }
    }
    fn i32(self) -> &'static str {
        if self == Dialect::C { "int32_t" } else { "int" }
    }
    fn i64(self) -> &'static str {
        if self == Dialect::C { "int64_t" } else { "i64" }
    }
    fn u64(self) -> &'static str {
        if self == Dialect::C { "uint64_t" } else { "u64" }
    }
    pub(super) fn element(self, storage: Storage) -> &'static str {
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
    /// Pointers, strides and lengths of the tensors that are read.
    fn tensors(&mut self, needed: &[bool]) {
        let p = self.prefix;
        for (i, declaration) in self.graph.declarations().iter().enumerate() {
            let loads = self.graph.ids().filter(|id| needed[id.index()]);
            let indices: Vec<&Vec<Id>> = loads
                .filter_map(|id| match self.graph.node(id) {
                    Node::Load { tensor, index } if *tensor == i => Some(index),
                    _ => None,
                })
                .collect();
            let Some(axes) = declaration.axes.as_ref().filter(|_| !indices.is_empty()) else { continue };
            let (element, t) = (self.dialect.element(declaration.storage), slot(self.graph, i));
            let (i32, i64) = (self.dialect.i32(), self.dialect.i64());
            let code = &mut self.code.inputs;
            code.push_str(&format!("const {element} *const {p}t{t} = (const {element} *)side->tensors[{t}].data;\n"));
            for (a, axis) in axes.iter().enumerate() {
                code.push_str(&format!("const {i64} {p}t{t}s{a} = side->tensors[{t}].stride[{a}];\n"));
                if indices.iter().any(|index| !index_fits(self.graph, *axis, index[a])) {
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
        rows.extend(self.code.along_keys.iter().map(|(name, _, bytes)| match bytes {
            2 => ("Halves", name.clone()),
            _ => ("Floats", name.clone()),
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

    fn find_affine(&mut self, roots: &[Id], needed: &[bool]) {
        for id in self.graph.ids().filter(|id| needed[id.index()]) {
            self.affine[id.index()] = self.affine_parts(id);
        }
        let nodes = || self.graph.ids().filter(|id| needed[id.index()]);
        for id in nodes().filter(|id| self.affine[id.index()].is_none()) {
            self.graph.node(id).operands().into_iter().for_each(|o| self.plain[o.index()] = true);
        }
        roots.iter().for_each(|r| self.plain[r.index()] = true);
    }

    /// The parts of a float that changes with the key or the score, named after it; the statements come later.
    fn affine_parts(&self, id: Id) -> Option<Affine> {
        let Depends { score, kv, .. } = self.graph.depends(id);
        if self.graph.ty(id) != Type::Float || !(score || kv) {
            return None;
        }
        let of = |x: Id| match self.is_fixed(x) {
            true => Some(Affine { base: Some(self.operand(x)), ..Affine::default() }),
            false => self.affine[x.index()].clone(),
        };
        let named = |parts: [bool; 3]| {
            let name = |part: &str| Some(format!("{}{part}", self.operand(id)));
            let [base, by_key, by_score] = parts;
            Affine {
                base: name("b").filter(|_| base),
                by_key: name("c").filter(|_| by_key),
                by_score: name("k").filter(|_| by_score),
            }
        };
        match *self.graph.node(id) {
            Node::Var(Var::Score) => Some(Affine { by_score: Some("scale".to_owned()), ..Affine::default() }),
            Node::Unary(Unary::ToFloat, x) => self.multiple_of_key(x).map(|_| named([true, true, false])),
            Node::Unary(Unary::Neg, x) => of(x).map(|x| named(x.has())),
            Node::Binary(op @ (Binary::Add | Binary::Sub), x, y) => {
                let (x, y, adds) = (of(x)?, of(y)?, op == Binary::Add);
                let (a, b) = (x.has(), y.has());
                let mut sum = named([a[0] || b[0], a[1] || b[1], a[2] || b[2]]);
                // A sum with the score itself keeps its factor: nothing is computed, and it stays recognisable.
                match (x.by_score, y.by_score) {
                    (Some(x), None) => sum.by_score = Some(x),
                    (None, Some(y)) if adds => sum.by_score = Some(y),
                    _ => {}
                }
                Some(sum)
            }
            Node::Binary(Binary::Mul, x, y) if self.is_fixed(x) => of(y).map(|y| named(y.has())),
            Node::Binary(Binary::Mul | Binary::Div, x, y) if self.is_fixed(y) => of(x).map(|x| named(x.has())),
            _ => None,
        }
    }

    /// A sum that cannot wrap, of a multiple of the key and what does not depend on it: the factor, and the sum at the
    /// first key.
    fn multiple_of_key(&self, id: Id) -> Option<(i64, String)> {
        let linear = self.graph.linear(id);
        let (of_key, rest): (Vec<_>, Vec<_>) = linear.terms.iter().partition(|(_, t)| self.graph.depends(*t).kv);
        let &[(factor, key)] = &of_key[..] else { return None };
        if *self.graph.node(key) != Node::Var(Var::Kv) || !self.graph.is_safe(&linear) {
            return None;
        }
        let wide = Range::FULL;
        let mut sum = format!("{} * kv_first", int_literal(factor, wide));
        for (c, term) in rest {
            sum.push_str(&format!(" + {} * {}", int_literal(c, wide), self.operand(term)));
        }
        Some((factor, format!("{sum} + {}", int_literal(linear.constant, wide))))
    }

    /// The statements of a float's parts, and of the float where it is read as it is.
    fn affine_statements(&mut self, id: Id, parts: &Affine) {
        let of = |x: Id| match self.is_fixed(x) {
            true => [Some(self.operand(x)), None, None],
            false => self.affine[x.index()].as_ref().map_or([None, None, None], Affine::all),
        };
        let values: [Option<String>; 3] = match *self.graph.node(id) {
            Node::Unary(Unary::ToFloat, x) => {
                let (factor, first) = self.multiple_of_key(x).expect("found to be one");
                [Some(format!("(float)({first})")), Some(format!("{:?}f", factor as f32)), None]
            }
            Node::Unary(_, x) => of(x).map(|x| x.map(|x| format!("-{x}"))),
            Node::Binary(op @ (Binary::Mul | Binary::Div), x, y) => {
                let (x, y) = if self.is_fixed(y) { (x, y) } else { (y, x) };
                let by = self.operand(y);
                of(x).map(|x| x.map(|x| format!("{x} {} {by}", op.name())))
            }
            Node::Binary(op, x, y) => {
                let minus = if op == Binary::Sub { "-" } else { "" };
                let mut of_y = of(y).into_iter();
                of(x).map(|x| match (x, of_y.next().expect("three")) {
                    (Some(x), Some(y)) => Some(format!("{x} {} {y}", op.name())),
                    (None, Some(y)) => Some(format!("{minus}{y}")),
                    (x, None) => x,
                })
            }
            _ => unreachable!("affine_parts() finds no other nodes"),
        };
        for (name, value) in parts.all().into_iter().zip(values) {
            let (Some(name), Some(value)) = (name, value) else { continue };
            if name != value {
                self.code.row.push_str(&format!("const float {name} = {value};\n"));
            }
        }
        if self.plain[id.index()] {
            let line = format!("const float {} = {};\n", self.operand(id), parts.value());
            self.code.element.push_str(&line);
        }
    }

    /// A number times the tanh of a multiple of the score: the number and the factor of the score.
    fn capped(&self, id: Id) -> Option<[String; 2]> {
        let Node::Binary(Binary::Mul, x, y) = *self.graph.node(id) else { return None };
        let (cap, of) = if self.is_fixed(x) { (x, y) } else { (y, x) };
        let Node::Unary(Unary::Tanh, x) = *self.graph.node(of) else { return None };
        let parts = self.affine[x.index()].as_ref().filter(|a| a.has() == [false, false, true])?;
        let factor = parts.by_score.clone()?;
        self.is_fixed(cap).then(|| [self.operand(cap), factor])
    }

    /// ... of which the number is written out or a scalar with a range, and the factor is the same for all rows.
    fn bounded_cap(&self, root: Id) -> Option<Capped> {
        let [cap, factor] = self.capped(root)?;
        let Node::Binary(_, x, y) = *self.graph.node(root) else { return None };
        let (of, tanh) = if self.is_fixed(x) { (x, y) } else { (y, x) };
        let bound = match self.graph.node(of) {
            Node::Float(bits) => f32::from_bits(*bits).abs(),
            Node::Scalar(i) => self.graph.declarations()[*i].float_bound()?,
            _ => return None,
        };
        let same = self.graph.node(tanh).operands().iter().all(|id| !self.graph.depends(*id).q);
        (same && bound.is_finite()).then_some(Capped { cap, factor, bound })
    }

    /// Its statements: coefficients of a polynomial of the score for the small ones (`ft_capf`).
    fn capped_statements(&mut self, id: Id, [cap, factor]: [String; 2]) {
        let name = self.operand(id);
        let line = format!("const CapSeries {name}p = cap_series({cap}, {factor});\n");
        self.code.row.push_str(&line);
        self.code.element.push_str(&format!("const float {name} = ft_capf(raw, {cap}, {factor}, {name}p);\n"));
    }

    /// A float that is read along the keys, from a tensor in which only the last index changes with them.
    fn along_keys(&self, id: Id) -> bool {
        let Node::Load { tensor, index } = self.graph.node(id) else { return false };
        let axes = self.graph.declarations()[*tensor].axes.as_deref().unwrap_or_default();
        let (Some((last, leading)), Some(axis)) = (index.split_last(), axes.last()) else { return false };
        *self.graph.node(*last) == Node::Var(Var::Kv)
            && index_fits(self.graph, *axis, *last)
            && leading.iter().all(|i| !self.graph.depends(*i).kv)
            && self.graph.ty(id) == Type::Float
    }

    fn along_statements(&mut self, id: Id) {
        let Node::Load { tensor, index } = self.graph.node(id).clone() else { return };
        let (t, storage) = (slot(self.graph, tensor), self.graph.declarations()[tensor].storage);
        let (p, name, last) = (self.prefix, self.operand(id), index.len() - 1);
        let mut places = self.places(tensor, &index);
        places[last] = format!("kv_first * {p}t{t}s{last}");
        let (element, at) = (self.dialect.element(storage), places.join(" + "));
        self.code.row.push_str(&format!("const {element} *const {name}p = {p}t{t} + ({at});\n"));
        let nth = self.code.along_keys.len();
        let read = format!("ft_along_{}({name}p, offset, {p}t{t}s{last}, {nth})", storage.name());
        self.code.element.push_str(&format!("const float {name} = {read};\n"));
        self.code.along_keys.push((format!("{name}p"), format!("{p}t{t}s{last}"), storage.bytes() as u32));
    }

    /// The first result as the score and what is added to it.
    fn shift(&mut self, roots: &[Id]) {
        let is_multiple = |r: &Id| self.affine[r.index()].as_ref().is_some_and(|a| a.has() == [false, false, true]);
        self.code.multiples = roots.iter().skip(1).all(is_multiple);
        let Some(parts) = roots.first().and_then(|r| self.affine[r.index()].clone()) else { return };
        if parts.by_score.as_deref() == Some("scale") && (parts.base.is_some() || parts.by_key.is_some()) {
            self.code.shift = Some([parts.by_key, parts.base].map(|part| part.unwrap_or_else(|| "0.0f".to_owned())));
        }
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
        let value = self.value(id);
        let ty = self.ty(id);
        let line = format!("const {ty} {}{} = {value};\n", self.prefix, id.index());
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

    /// A node where it is used.
    fn operand(&self, id: Id) -> String {
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

    fn value(&self, id: Id) -> String {
        match self.graph.node(id) {
            Node::Scalar(i) => {
                let s = slot(self.graph, *i);
                match self.graph.ty(id) {
                    Type::Float => format!("side->scalars[{s}].f"),
                    _ => format!("({})side->scalars[{s}].i", self.dialect.int(self.graph.range(id))),
                }
            }
            Node::Load { tensor, index } => self.load(id, *tensor, index),
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

    fn unary(&self, id: Id, op: Unary, x: Id) -> String {
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
    fn cast(&self, id: Id, wide: Range) -> String {
        let of = self.operand(id);
        let leaf = matches!(self.graph.node(id), Node::Int(_));
        match (self.graph.range(id).is_i32(), wide.is_i32(), leaf) {
            (true, false, true) => int_literal(self.graph.range(id).lo, wide),
            (true, false, false) => format!("({}){of}", self.dialect.i64()),
            _ => of,
        }
    }

    fn int_binary(&self, id: Id, op: Binary, x: Id, y: Id) -> String {
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
    fn places(&self, tensor: usize, index: &[Id]) -> Vec<String> {
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

    fn load(&self, id: Id, tensor: usize, index: &[Id]) -> String {
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

/// Whether an axis is indexed by the coordinate that it is declared for, or by what is known to be within it: then no
/// index is ever beyond it. (Along an axis that is broadcast the stride is 0.)
fn index_fits(graph: &Graph, axis: Axis, index: Id) -> bool {
    match (graph.node(index), axis) {
        (Node::Var(v), axis) if Axis::of(*v) == Some(axis) => true,
        (_, Axis::Fixed(n)) => Range { lo: 0, hi: n as i64 - 1 }.contains(graph.range(index)),
        _ => false,
    }
}

fn wider(a: Range, b: Range) -> Range {
    if a.is_i32() { b } else { a }
}

/// A constant of the type that holds a range.
fn int_literal(x: i64, wide: Range) -> String {
    let (suffix, least) = if wide.is_i32() { ("", i32::MIN as i64) } else { ("ll", i64::MIN) };
    match x {
        x if x == least => format!("({}{suffix} - 1)", x + 1),
        x if x < 0 => format!("({x}{suffix})"),
        x => format!("{x}{suffix}"),
    }
}
