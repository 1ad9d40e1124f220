//! A score program: a mask, a change of the score and a sink, over declared scalars and tensors.

use super::ast::Ast;
use super::axes::MaskAxes;
use super::bias::Bias;
use super::builder::Expr;
use super::check::Checker;
use super::error::ProgramError;
use super::graph::{Graph, Node};
use super::lower::{compiling_cost, lower_fragments};
use super::parse::parse;
use super::print::print;
use super::rows::RowKeys;
use super::window::WindowForm;
use super::words::{Axis, Binary, Declaration, Id, Type, Unary, Var};
use std::fmt;

/// Nodes that a program may have.
pub const MAX_NODES: usize = 1 << 15;
/// Programs of fewer nodes cost compilers little.
const SHORT: usize = 100;
/// Side tensors that a program may read, and run-time scalars: they are passed to kernels by value.
pub const MAX_INPUTS: usize = 32;

/// A checked program in normal form.
///
/// - `mask`: bool; a key whose mask is false is not attended to, whatever its score is, NaN and infinity included.
/// - `score`: float; what goes into the softmax in place of `score`, in natural units.
/// - `sink`: float, the same for all keys of a row; the logit of a key without a value, which takes its part of the
///   softmax and adds nothing to O. The LSE takes it in. A row with a sink and no key has O = 0.
///
/// Two programs are equal if their texts are, and programs of the same meaning mostly have the same text
/// ([`super::normal`]).
#[derive(Debug, Clone)]
pub struct Program {
    graph: Graph,
    mask: Option<Id>,
    score: Option<Id>,
    sink: Option<Id>,
    text: String,
    hash: [u8; 32],
    window: Option<WindowForm>,
    rows: Option<RowKeys>,
    axes: Option<MaskAxes>,
    cost_of_a_score: [usize; 2],
    biases: Vec<Bias>,
    /// What is left of a program whose mask is a window.
    unmasked: Option<Box<Program>>,
}

impl PartialEq for Program {
    fn eq(&self, other: &Self) -> bool {
        self.text == other.text
    }
}

impl Eq for Program {}

impl std::hash::Hash for Program {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.hash.hash(state);
    }
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::str::FromStr for Program {
    type Err = ProgramError;
    fn from_str(text: &str) -> Result<Self, ProgramError> {
        ProgramBuilder::new().text(text)?.build()
    }
}

impl Program {
    /// Reads a whole program: declarations, names, and `mask = ...;`, `score = ...;`, `sink = ...;`.
    ///
    /// # Errors
    /// What cannot be read or does not fit together, with its place.
    pub fn parse(text: &str) -> Result<Self, ProgramError> {
        text.parse()
    }

    /// A mask alone, which may come after its declarations.
    ///
    /// # Errors
    /// As [`Program::parse`].
    pub fn mask_of(text: &str) -> Result<Self, ProgramError> {
        ProgramBuilder::new().mask(text)?.build()
    }

    /// A score alone, which may come after its declarations.
    ///
    /// # Errors
    /// As [`Program::parse`].
    pub fn score_of(text: &str) -> Result<Self, ProgramError> {
        ProgramBuilder::new().score(text)?.build()
    }

    /// The nodes of all results.
    pub fn graph(&self) -> &Graph {
        &self.graph
    }

    /// The mask; `None` when every key is visible.
    pub fn mask(&self) -> Option<Id> {
        self.mask
    }

    /// What takes the place of the score; `None` when it stays as it is.
    pub fn score(&self) -> Option<Id> {
        self.score
    }

    /// The sink's logit, if there is one.
    pub fn sink(&self) -> Option<Id> {
        self.sink
    }

    /// The scalars and tensors that the program reads, sorted by name: what a call has to bring.
    pub fn declarations(&self) -> &[Declaration] {
        self.graph.declarations()
    }

    /// The canonical text; [`Program::parse`] of it gives an equal program.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The hash of the canonical text.
    pub fn hash(&self) -> &[u8; 32] {
        &self.hash
    }

    /// The first 12 hex digits of the hash: the program's name in kernel names.
    pub fn name(&self) -> String {
        self.hash[..6].iter().map(|b| format!("{b:02x}")).collect()
    }

    /// The mask of this program alone.
    ///
    /// # Errors
    /// None that reading the program has not found.
    pub fn mask_only(&self) -> Result<Self, ProgramError> {
        let mut graph = self.graph.clone();
        let score = graph.var(Var::Score);
        ProgramBuilder { graph, mask: self.mask, score, sink: None, infer_axes: false }.build()
    }

    /// This program, and the mask of another beside its own.
    ///
    /// # Errors
    /// A name that both declare, and not in the same way.
    pub fn with_mask_of(&self, other: &Program) -> Result<Self, ProgramError> {
        ProgramBuilder::new().text(other.mask_only()?.text())?.text(self.text())?.build()
    }

    /// What the mask is as a window, if it says no more than one does.
    pub fn window(&self) -> Option<&WindowForm> {
        self.window.as_ref()
    }

    /// The score and the sink of a program whose mask is a window; `None` when it has neither.
    pub fn unmasked(&self) -> Option<&Program> {
        self.unmasked.as_deref()
    }

    /// The run of keys that the mask leaves each query, if that is what it does.
    pub fn rows(&self) -> Option<&RowKeys> {
        self.rows.as_ref()
    }

    /// What the runs change with, for a mask whose rows had better find theirs in memory: those that are searched for, or
    /// come in no order.
    pub fn runs(&self) -> Option<MaskAxes> {
        self.axes.filter(|_| self.rows.as_ref().is_some_and(|r| !r.searches.is_empty() || !r.nondecreasing))
    }

    /// What lists of key blocks change with, for a mask that does not leave each query one run of keys.
    pub fn lists(&self) -> Option<MaskAxes> {
        self.axes.filter(|_| self.rows.is_none())
    }

    /// The tensors of which a tile of scores reads a tile; at most [`super::MAX_BIASES`].
    pub fn biases(&self) -> &[Bias] {
        &self.biases
    }

    /// What a kernel that masks by runs of keys, or by bits, still computes for every score.
    pub fn of_scores(&self) -> OfScores {
        let mut needed = vec![false; self.graph.nodes().len()];
        self.score.iter().for_each(|root| needed[root.index()] = true);
        let biases_alone = self.score.is_some_and(|score| Bias::are_alone(&self.graph, score, &self.biases));
        let mut found = OfScores { score: self.score.is_some(), biases_alone, ..OfScores::default() };
        for id in self.graph.ids().collect::<Vec<_>>().into_iter().rev() {
            if !needed[id.index()] {
                continue;
            }
            let node = self.graph.node(id);
            node.operands().iter().for_each(|o| needed[o.index()] = true);
            match node {
                Node::Unary(Unary::Tanh, _) => found.tanh = true,
                Node::Load { tensor, index } => {
                    let Some((last, leading)) = index.split_last() else { continue };
                    let by_key = *self.graph.node(*last) == Node::Var(Var::Kv)
                        && self.graph.ty(id) == Type::Float
                        && leading.iter().all(|i| !self.graph.depends(*i).kv);
                    found.reads_along_keys |= self.graph.depends(id).kv;
                    found.gathers |= self.graph.depends(id).kv && !by_key;
                    let halves = self.graph.declarations()[*tensor].storage.bytes() == 2;
                    found.reads_of_halves += u32::from(by_key && halves);
                }
                Node::Binary(Binary::FloorDiv | Binary::Mod, _, by) => {
                    found.divides_at_run_time |= self.graph.as_int(*by).is_none();
                }
                _ => {}
            }
        }
        found
    }

    /// What compiling the mask and the change of the score costs a CUDA kernel for each score that a thread holds, in
    /// statements: see [`compiling_cost`]. 0 for short programs.
    pub fn cost_of_a_score(&self) -> [usize; 2] {
        self.cost_of_a_score
    }

    /// Nothing is masked, changed or added.
    pub fn is_plain(&self) -> bool {
        self.mask.is_none() && self.score.is_none() && self.sink.is_none()
    }
}

/// What a kernel computes for every score.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct OfScores {
    /// The change of the score.
    pub score: bool,
    /// Elements of tensors that change with the key are read.
    pub reads_along_keys: bool,
    /// ... by an index that is not the key itself, or that are no floats.
    pub gathers: bool,
    /// How many reads along the keys are of floats of two bytes.
    pub reads_of_halves: u32,
    /// With query and key nothing changes but biases ([`Program::biases`]), of which there are some.
    pub biases_alone: bool,
    /// Ints are divided by what is known at run time alone.
    pub divides_at_run_time: bool,
    /// A tanh is taken: of small numbers in one way, of others in another.
    pub tanh: bool,
}

/// Collects the parts of a [`Program`].
#[derive(Debug, Clone)]
pub struct ProgramBuilder {
    graph: Graph,
    mask: Option<Id>,
    /// What the softmax takes so far.
    score: Id,
    sink: Option<Id>,
    infer_axes: bool,
}

impl Default for ProgramBuilder {
    fn default() -> Self {
        Self::new()
    }
}

impl ProgramBuilder {
    /// A program that masks and changes nothing.
    pub fn new() -> Self {
        let mut graph = Graph::default();
        let score = graph.var(Var::Score);
        Self { graph, mask: None, score, sink: None, infer_axes: false }
    }

    /// Makes a scalar or a tensor known. Declaring the same thing twice is no error.
    ///
    /// # Errors
    /// A name that means something else already, or promises that the storage cannot hold.
    pub fn declare(mut self, declaration: Declaration) -> Result<Self, ProgramError> {
        self.add(declaration)?;
        Ok(self)
    }

    /// Adds a text with named results.
    ///
    /// # Errors
    /// As [`Program::parse`].
    pub fn text(self, text: &str) -> Result<Self, ProgramError> {
        self.add_text(text, None)
    }

    /// Adds a mask; a key must be visible in every mask that is added.
    ///
    /// # Errors
    /// As [`Program::parse`].
    pub fn mask(self, text: &str) -> Result<Self, ProgramError> {
        self.add_text(text, Some("mask"))
    }

    /// Adds a change of the score, in which `score` is the outcome of those added before.
    ///
    /// # Errors
    /// As [`Program::parse`].
    pub fn score(self, text: &str) -> Result<Self, ProgramError> {
        self.add_text(text, Some("score"))
    }

    /// Sets the sink's logit.
    ///
    /// # Errors
    /// As [`Program::parse`].
    pub fn sink(self, text: &str) -> Result<Self, ProgramError> {
        self.add_text(text, Some("sink"))
    }

    /// [`ProgramBuilder::mask`] from an expression.
    ///
    /// # Errors
    /// Names and types that do not fit.
    pub fn mask_expr(self, mask: &Expr) -> Result<Self, ProgramError> {
        self.add_expr("mask", mask)
    }

    /// [`ProgramBuilder::score`] from an expression.
    ///
    /// # Errors
    /// Names and types that do not fit.
    pub fn score_expr(self, score: &Expr) -> Result<Self, ProgramError> {
        self.add_expr("score", score)
    }

    /// [`ProgramBuilder::sink`] from an expression.
    ///
    /// # Errors
    /// Names and types that do not fit.
    pub fn sink_expr(self, sink: &Expr) -> Result<Self, ProgramError> {
        self.add_expr("sink", sink)
    }

    /// Gives every axis that was declared to have any length, and that only one coordinate ever indexes, the length of
    /// that coordinate's: for tensors of which nothing but the number of axes is known.
    pub fn infer_axes(self) -> Self {
        Self { infer_axes: true, ..self }
    }

    /// The program.
    ///
    /// # Errors
    /// A program of more than [`MAX_NODES`] nodes, or more than [`MAX_INPUTS`] tensors or scalars.
    pub fn build(self) -> Result<Program, ProgramError> {
        let Self { graph, mask, score, sink, .. } = self;
        let mask = mask.filter(|m| graph.as_bool(*m) != Some(true));
        let score = Some(score).filter(|s| *graph.node(*s) != Node::Var(Var::Score));
        let roots: Vec<(&str, Id)> = [("mask", mask), ("score", score), ("sink", sink)]
            .into_iter()
            .filter_map(|(name, id)| Some((name, id?)))
            .collect();
        let ids: Vec<Id> = roots.iter().map(|(_, id)| *id).collect();
        let (mut graph, ids) = graph.pruned(&ids, false);
        if graph.nodes().len() > MAX_NODES {
            let message = format!("the program has {} nodes in normal form", graph.nodes().len());
            return Err(ProgramError::new(
                message,
                format!("at most {MAX_NODES} are taken; put tables into a side tensor"),
            ));
        }
        for (what, tensors) in [("side tensors", true), ("run-time scalars", false)] {
            let count = graph.declarations().iter().filter(|d| d.axes.is_some() == tensors).count();
            if count > MAX_INPUTS {
                let expected = format!("at most {MAX_INPUTS} are passed to a kernel; join some in one tensor");
                return Err(ProgramError::new(format!("the program reads {count} {what}"), expected));
            }
        }
        if self.infer_axes {
            infer_axes(&mut graph);
        }
        let results: Vec<(&str, Id)> = roots.iter().map(|(name, _)| *name).zip(ids).collect();
        let text = print(&graph, &results);
        let hash = *blake3::hash(text.as_bytes()).as_bytes();
        let find = |name| results.iter().find(|(n, _)| *n == name).map(|(_, id)| *id);
        let (mask, score, sink) = (find("mask"), find("score"), find("sink"));
        let window = mask.and_then(|mask| WindowForm::of(&graph, mask));
        let rows = mask.and_then(|mask| RowKeys::of(&graph, mask));
        let axes = mask.map(|mask| MaskAxes::of(&graph, mask));
        let biases = score.map_or(Vec::new(), |score| Bias::all(&graph, score));
        let unmasked = match (&window, score.or(sink)) {
            (Some(_), Some(_)) => {
                let mut graph = graph.clone();
                let score = score.unwrap_or_else(|| graph.var(Var::Score));
                let rest = ProgramBuilder { graph, mask: None, score, sink, infer_axes: false };
                Some(Box::new(rest.build()?))
            }
            _ => None,
        };
        let cost_of_a_score = match graph.nodes().len() {
            ..SHORT => [0; 2],
            _ => [mask, score]
                .map(|root| root.map_or(0, |root| compiling_cost(&lower_fragments(&graph, &[root], "x").element))),
        };
        Ok(Program { graph, mask, score, sink, text, hash, window, rows, axes, biases, cost_of_a_score, unmasked })
    }

    fn add(&mut self, new: Declaration) -> Result<(), ProgramError> {
        if let Some(old) = self.graph.declarations().iter().find(|d| d.name == new.name) {
            if *old == new {
                return Ok(());
            }
            return Err(ProgramError::new(
                format!("`{}` is declared twice", new.name),
                format!("first `{old}`, then `{new}`; declare it once"),
            ));
        }
        if let Some(range) = new.range {
            let storage = Declaration { range: None, ..new.clone() }.int_range();
            // Scalars are passed in 64 bits.
            if new.axes.is_some() && !storage.contains(range) {
                return Err(ProgramError::new(
                    format!("`{new}` promises values that {} cannot hold", new.storage.name()),
                    format!("they are from {} to {}", storage.lo, storage.hi),
                ));
            }
        }
        self.graph.declarations_mut().push(new);
        Ok(())
    }

    fn add_text(mut self, text: &str, result: Option<&'static str>) -> Result<Self, ProgramError> {
        let parsed = parse(text, result)?;
        for (declaration, span) in parsed.declarations {
            self.add(declaration).map_err(|e| ProgramError::at(text, &span, e.message, e.expected))?;
        }
        let ids = Checker::new(&mut self.graph, self.score, text).run(&parsed.ast)?;
        if let Some(name) = result.filter(|name| !parsed.results.iter().any(|(n, _)| n == name)) {
            let end = text.len()..text.len();
            return Err(ProgramError::at(
                text,
                &end,
                format!("the text has no {name}"),
                format!("end it with the {name}"),
            ));
        }
        for (name, id) in &parsed.results {
            self.set(name, ids[*id])
                .map_err(|e| ProgramError::at(text, &parsed.ast.spans[*id], e.message, e.expected))?;
        }
        Ok(self)
    }

    fn add_expr(mut self, name: &str, expr: &Expr) -> Result<Self, ProgramError> {
        let mut ast = Ast::default();
        let root = expr.lower(&mut ast);
        let ids = Checker::new(&mut self.graph, self.score, "").run(&ast)?;
        self.set(name, ids[root])?;
        Ok(self)
    }

    fn set(&mut self, name: &str, mut id: Id) -> Result<(), ProgramError> {
        let found = self.graph.ty(id);
        let wanted = if name == "mask" { Type::Bool } else { Type::Float };
        if (wanted, found) == (Type::Float, Type::Int) {
            id = self.graph.unary(Unary::ToFloat, id);
        } else if wanted != found {
            let expected = match name {
                "mask" => "a mask is a bool: write a comparison, such as `kv <= q`".to_owned(),
                _ => format!("a {name} is a float"),
            };
            return Err(ProgramError::new(
                format!("this is {} {found}", if found == Type::Int { "an" } else { "a" }),
                expected,
            ));
        }
        let depends = self.graph.depends(id);
        if name != "score" && depends.score {
            return Err(ProgramError::new(format!("the {name} reads `score`"), "only a score may"));
        }
        match name {
            "mask" => {
                let before = self.mask;
                self.mask = Some(before.map_or(id, |m| self.graph.and(m, id)));
            }
            "score" => self.score = id,
            _ if depends.kv => {
                let expected = "a sink is one logit of a row: it may read b, h, h_kv, q and the lengths";
                return Err(ProgramError::new("the sink changes with `kv`", expected));
            }
            _ if self.sink.is_some() => return Err(ProgramError::new("a second sink", "a row has one sink")),
            _ => self.sink = Some(id),
        }
        Ok(())
    }
}

/// An axis of any length that only one coordinate ever indexes is as long as that coordinate's.
fn infer_axes(graph: &mut Graph) {
    for tensor in 0..graph.declarations().len() {
        let Some(mut axes) = graph.declarations()[tensor].axes.clone() else { continue };
        for (i, axis) in axes.iter_mut().enumerate().filter(|(_, a)| **a == Axis::Any) {
            let mut indices = graph.nodes().iter().filter_map(|n| match n {
                Node::Load { tensor: t, index } if *t == tensor => Some(index[i]),
                _ => None,
            });
            let first = indices.next();
            if let (Some(Node::Var(v)), true) = (first.map(|f| graph.node(f)), indices.all(|x| Some(x) == first)) {
                *axis = Axis::of(*v).unwrap_or(Axis::Any);
            }
        }
        graph.declarations_mut()[tensor].axes = Some(axes);
    }
}
