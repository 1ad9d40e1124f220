//! An expression as it was written, before names and types are resolved.

use super::words::{Binary, Unary};
use std::ops::Range;

/// A place in an [`Ast`].
pub(crate) type AstId = usize;

/// One operation as it was written.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum AstNode {
    /// A whole number.
    Int(i64),
    /// A float.
    Float(f32),
    /// `true` or `false`.
    Bool(bool),
    /// A variable or a scalar.
    Name(String),
    /// `name[index, ...]`.
    Index(String, Vec<AstId>),
    /// A unary operator or a function of one value.
    Unary(Unary, AstId),
    /// A binary operator, or `min` or `max` of two values.
    Binary(Binary, AstId, AstId),
    /// Condition, value if it holds, value if not.
    Select(AstId, AstId, AstId),
}

/// Operations, operands first, each with its bytes in the text it came from.
#[derive(Debug, Clone, Default)]
pub(crate) struct Ast {
    /// The operations.
    pub nodes: Vec<AstNode>,
    /// Where each was written; empty ranges for one that was built and not written.
    pub spans: Vec<Range<usize>>,
}

impl Ast {
    /// Appends an operation.
    pub(crate) fn push(&mut self, node: AstNode, span: Range<usize>) -> AstId {
        self.nodes.push(node);
        self.spans.push(span);
        self.nodes.len() - 1
    }
}
