//! A program from its parts: declarations, masks, scores and a sink, as texts or as expressions.

use super::{MAX_INPUTS, MAX_NODES, Program};
use crate::score::analysis::axes::MaskAxes;
use crate::score::analysis::bias::Bias;
use crate::score::analysis::dense::DenseMask;
use crate::score::analysis::rows::RowKeys;
use crate::score::analysis::window::WindowForm;
use crate::score::graph::check::Checker;
use crate::score::graph::print::print;
use crate::score::graph::{Graph, Node};
use crate::score::syntax::ast::Ast;
use crate::score::syntax::builder::Expr;
use crate::score::syntax::error::ProgramError;
use crate::score::syntax::parse::parse;
use crate::score::syntax::words::{Axis, Declaration, Id, Type, Unary, Var};

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
        Self::of(Graph::default(), None, None, None)
    }

    /// What nodes of a graph give; without a score it stays as it is.
    pub(super) fn of(mut graph: Graph, mask: Option<Id>, score: Option<Id>, sink: Option<Id>) -> Self {
        let score = score.unwrap_or_else(|| graph.var(Var::Score));
        Self { graph, mask, score, sink, infer_axes: false }
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
    /// A program of more than 32,768 nodes in normal form, or more than [`MAX_INPUTS`] tensors or scalars.
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
        let dense = mask.and_then(|mask| DenseMask::of(&graph, mask)).map(Box::new);
        let biases = score.map_or(Vec::new(), |score| Bias::all(&graph, score));
        let unmasked = match (&window, score.or(sink)) {
            (Some(_), Some(_)) => Some(Box::new(Self::of(graph.clone(), None, score, sink).build()?)),
            _ => None,
        };
        Ok(Program { graph, mask, score, sink, text, hash, window, rows, axes, biases, dense, unmasked })
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
        if new.usually && !new.is_float_scalar() {
            let expected =
                "float scalars alone have a usual range: what ints and tensors hold decides which keys are visited";
            return Err(ProgramError::new(format!("`{new}` has a usual range"), expected));
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
