//! From [`Ast`] to typed nodes: names are resolved, types checked, ints turned into floats where the two meet.

use super::Graph;
use crate::score::syntax::ast::{Ast, AstId, AstNode};
use crate::score::syntax::builtin::BUILTINS;
use crate::score::syntax::error::ProgramError;
use crate::score::syntax::near::nearest_name;
use crate::score::syntax::parse::is_word;
use crate::score::syntax::words::{Axis, Binary, Id, Type, Unary, Var};
use std::ops::Range;

/// Nodes that checking a text may make, those that normalising leaves behind among them.
const MAX_MADE: usize = 1 << 22;

/// Adds every operation of an [`Ast`] to a graph; the result gives the node of each.
pub(crate) struct Checker<'a> {
    graph: &'a mut Graph,
    /// What `score` stands for.
    score: Id,
    /// The text, for messages; empty for an expression that was built.
    text: &'a str,
    ids: Vec<Id>,
}

impl<'a> Checker<'a> {
    /// A checker of what was written in a text.
    pub(crate) fn new(graph: &'a mut Graph, score: Id, text: &'a str) -> Self {
        Self { graph, score, text, ids: Vec::new() }
    }

    /// The node of every operation.
    ///
    /// # Errors
    /// The first operation whose names or types do not fit.
    pub(crate) fn run(mut self, ast: &Ast) -> Result<Vec<Id>, ProgramError> {
        for (node, span) in ast.nodes.iter().zip(&ast.spans) {
            let id = self.node(ast, node, span)?;
            self.ids.push(id);
            if self.graph.nodes().len() > MAX_MADE {
                return Err(self.error(span, "the program is too large", "put tables into a side tensor"));
            }
        }
        Ok(self.ids)
    }

    fn node(&mut self, ast: &Ast, node: &AstNode, span: &Range<usize>) -> Result<Id, ProgramError> {
        Ok(match node {
            AstNode::Int(x) => self.graph.int(*x),
            AstNode::Float(x) => self.graph.float(*x),
            AstNode::Bool(x) => self.graph.boolean(*x),
            AstNode::Name(name) => self.name(name, span)?,
            AstNode::Index(name, index) => self.index(ast, name, index, span)?,
            AstNode::Unary(op, a) => {
                let operand = self.ids[*a];
                match (op, self.graph.ty(operand)) {
                    (Unary::Not, Type::Bool) | (Unary::Neg | Unary::Abs, Type::Int | Type::Float) => {}
                    (Unary::ToFloat, Type::Int | Type::Float) => {}
                    (op, Type::Float) if op.is_of_floats() || op.rounds() => {}
                    (op, Type::Int) if op.is_of_floats() => {
                        let operand = self.graph.unary(Unary::ToFloat, operand);
                        return Ok(self.graph.unary(*op, operand));
                    }
                    // An int is whole as it is, however it is rounded.
                    (op, Type::Int) if op.rounds() => return Ok(operand),
                    (Unary::Not, found) => return Err(self.mismatch(ast, *a, "`not` takes a bool", found)),
                    (_, found) => {
                        let wants = format!("`{}` takes an int or a float", op.name());
                        return Err(self.mismatch(ast, *a, &wants, found));
                    }
                }
                self.graph.unary(*op, operand)
            }
            AstNode::Binary(op, a, b) => self.binary(ast, *op, *a, *b)?,
            AstNode::Select(c, a, b) => {
                let condition = self.ids[*c];
                if self.graph.ty(condition) != Type::Bool {
                    return Err(self.mismatch(ast, *c, "a condition is a bool", self.graph.ty(condition)));
                }
                let (x, y) = self.meet(self.ids[*a], self.ids[*b]).ok_or_else(|| {
                    let expected = format!("both are of one type, but the first is {}", self.graph.ty(self.ids[*a]));
                    self.mismatch(ast, *b, &expected, self.graph.ty(self.ids[*b]))
                })?;
                self.graph.select(condition, x, y)
            }
        })
    }

    fn binary(&mut self, ast: &Ast, op: Binary, a: AstId, b: AstId) -> Result<Id, ProgramError> {
        let (x, y) = (self.ids[a], self.ids[b]);
        let wants = |what: &str| format!("`{}` takes {what}", op.name());
        let want = |ok: &dyn Fn(Type) -> bool, what: &str| {
            let wrong = [(a, x), (b, y)].into_iter().find(|(_, id)| !ok(self.graph.ty(*id)));
            wrong.map_or(Ok(()), |(at, id)| Err(self.mismatch(ast, at, &wants(what), self.graph.ty(id))))
        };
        match op {
            Binary::And | Binary::Or => want(&|t| t == Type::Bool, "bools; write a comparison")?,
            Binary::FloorDiv | Binary::Mod => want(&|t| t == Type::Int, "ints")?,
            Binary::Eq | Binary::Ne => {
                let (x, y) = self.meet(x, y).ok_or_else(|| {
                    let expected = wants(&format!("values of one type, and the first is {}", self.graph.ty(x)));
                    self.mismatch(ast, b, &expected, self.graph.ty(y))
                })?;
                return Ok(self.graph.binary(op, x, y));
            }
            _ => want(&|t| t != Type::Bool, "ints and floats")?,
        }
        if op == Binary::Div {
            let (x, y) = (self.graph.unary(Unary::ToFloat, x), self.graph.unary(Unary::ToFloat, y));
            return Ok(self.graph.binary(op, x, y));
        }
        let (x, y) = self.meet(x, y).expect("numbers meet");
        Ok(self.graph.binary(op, x, y))
    }

    /// Two values as one type: an int that meets a float becomes one.
    fn meet(&mut self, a: Id, b: Id) -> Option<(Id, Id)> {
        match (self.graph.ty(a), self.graph.ty(b)) {
            (x, y) if x == y => Some((a, b)),
            (Type::Int, Type::Float) => Some((self.graph.unary(Unary::ToFloat, a), b)),
            (Type::Float, Type::Int) => Some((a, self.graph.unary(Unary::ToFloat, b))),
            _ => None,
        }
    }

    fn name(&mut self, name: &str, span: &Range<usize>) -> Result<Id, ProgramError> {
        match Var::from_name(name) {
            Some(Var::Score) => return Ok(self.score),
            Some(var) => return Ok(self.graph.var(var)),
            None => {}
        }
        let found = self.graph.declarations().iter().position(|d| d.name == name);
        let Some(i) = found else {
            if is_word(name) {
                let expected = "expected a value: a number, a name, or a function with its arguments in brackets";
                return Err(self.error(span, format!("`{name}` is a word of the language"), expected));
            }
            let expected = self.suggestion(name, false).unwrap_or_else(|| format!("declare it first: `{name}: int;`"));
            return Err(self.error(span, format!("unknown name `{name}`"), expected));
        };
        if let Some(axes) = &self.graph.declarations()[i].axes {
            let expected = format!("index it: `{name}[...]` with {} values", axes.len());
            return Err(self.error(span, format!("`{name}` is a tensor"), expected));
        }
        Ok(self.graph.scalar(i))
    }

    /// A known name that differs in a letter or two.
    fn suggestion(&self, name: &str, tensor: bool) -> Option<String> {
        let variables = Var::NAMED.iter().map(|v| v.name()).filter(|_| !tensor);
        let declared = self.graph.declarations().iter().filter(|d| d.axes.is_some() == tensor);
        // A text of one word is rather a misspelt built-in.
        let builtins = BUILTINS.iter().map(|b| b.name).filter(|_| !tensor && self.text.trim() == name);
        let near = nearest_name(name, variables.chain(declared.map(|d| d.name.as_str())).chain(builtins))?;
        Some(format!("did you mean `{near}`?"))
    }

    fn index(&mut self, ast: &Ast, name: &str, index: &[AstId], span: &Range<usize>) -> Result<Id, ProgramError> {
        let found = self.graph.declarations().iter().position(|d| d.name == name);
        let Some(tensor) = found else {
            // The axes that the indices suggest; the type cannot be guessed.
            let axis = |i: &AstId| match self.graph.node(self.ids[*i]) {
                super::Node::Var(v) => Axis::of(*v).unwrap_or(Axis::Any),
                _ => Axis::Any,
            };
            let axes: Vec<String> = index.iter().map(|i| axis(i).to_string()).collect();
            let declare = format!("declare it first: `{name}: float[{}];` (or int, bool, bf16, ...)", axes.join(", "));
            let expected = match Var::from_name(name) {
                Some(_) => "it is a number and has no elements".to_owned(),
                None => self.suggestion(name, true).unwrap_or(declare),
            };
            return Err(self.error(span, format!("`{name}` is no tensor"), expected));
        };
        let Some(axes) = &self.graph.declarations()[tensor].axes else {
            return Err(self.error(span, format!("`{name}` is a scalar"), "write it without brackets"));
        };
        if axes.len() != index.len() {
            let axes: Vec<String> = axes.iter().map(Axis::to_string).collect();
            let message = format!("`{name}` was given {} indices", index.len());
            return Err(self.error(span, message, format!("its axes are [{}]", axes.join(", "))));
        }
        for i in index {
            let found = self.graph.ty(self.ids[*i]);
            if found != Type::Int {
                return Err(self.mismatch(ast, *i, "an index is an int", found));
            }
        }
        let index = index.iter().map(|i| self.ids[*i]).collect();
        Ok(self.graph.load(tensor, index))
    }

    fn mismatch(&self, ast: &Ast, at: AstId, wants: &str, found: Type) -> ProgramError {
        self.error(&ast.spans[at], format!("this is {} {found}", if found == Type::Int { "an" } else { "a" }), wants)
    }

    fn error(&self, span: &Range<usize>, message: impl Into<String>, expected: impl Into<String>) -> ProgramError {
        match self.text.is_empty() {
            true => ProgramError::new(message, expected),
            false => ProgramError::at(self.text, span, message, expected),
        }
    }
}
