//! From tokens to [`Ast`]: operator precedence with a stack of its own, so that no depth of nesting overflows.
//!
//! ```text
//! text        := { statement ";" } [ statement ]
//! statement   := name ":" storage [ "[" axis { "," axis } "]" ] { "in" int ".." int | "nondecreasing" }
//!              | name "=" expression          a name for a value; `mask`, `score` and `sink` are the results
//!              | expression                   the result that the text is for, in its last statement
//! expression  := comparison of sums of products with `and`, `or`, `not`, `a if c else b`, as in Python
//! ```

use super::ast::{Ast, AstId, AstNode};
use super::error::ProgramError;
use super::lex::{Token, tokens};
use super::near::nearest_name;
use super::words::{Binary, Declaration, Storage, Unary, Var};
use std::collections::HashMap;
use std::ops::Range;

/// Operations that a text may hold.
pub(crate) const MAX_OPERATIONS: usize = 1 << 18;

/// Names of results.
pub(crate) const RESULTS: [&str; 3] = ["mask", "score", "sink"];

/// Words that are no names.
const KEYWORDS: [&str; 9] = ["and", "or", "not", "if", "else", "true", "false", "inf", "nan"];

/// Functions with their number of arguments (the least number, for `min` and `max`).
const FUNCTIONS: [(&str, usize); 17] = [
    ("min", 2),
    ("max", 2),
    ("clamp", 3),
    ("select", 3),
    ("abs", 1),
    ("exp", 1),
    ("exp2", 1),
    ("log", 1),
    ("log2", 1),
    ("sqrt", 1),
    ("tanh", 1),
    ("sigmoid", 1),
    ("float", 1),
    ("int_floor", 1),
    ("int_ceil", 1),
    ("int_trunc", 1),
    ("int_round", 1),
];

/// What a text says.
#[derive(Debug, Default)]
pub(crate) struct Parsed {
    /// Scalars and tensors with the place of each.
    pub declarations: Vec<(Declaration, Range<usize>)>,
    /// All expressions.
    pub ast: Ast,
    /// Results by name, in the order of the text.
    pub results: Vec<(&'static str, AstId)>,
}

/// Reads a text. `result` is what an expression without a name is.
///
/// # Errors
/// The first place that cannot be read, and what was expected there.
pub(crate) fn parse(text: &str, result: Option<&'static str>) -> Result<Parsed, ProgramError> {
    let parser = Parser { text, tokens: tokens(text)?, at: 0, names: HashMap::new(), out: Parsed::default() };
    parser.text(result)
}

/// What waits on the stack for its right side.
enum Frame {
    Prefix(Unary, usize),
    Infix(Binary, u8, bool),
    Group(usize),
    Call(&'static str, usize, Vec<AstId>),
    Index(String, usize, Vec<AstId>),
    /// `a if`: waits for the condition.
    If(AstId),
    /// `a if c else`: waits for the other value.
    Else(AstId, AstId),
}

const CONDITIONAL: u8 = 0;
const NOT: u8 = 3;
const COMPARE: u8 = 4;
const NEGATE: u8 = 7;

/// The operator of a sign, its precedence, and whether its operands are swapped.
fn infix(token: &Token) -> Option<(Binary, u8, bool)> {
    let word = match token {
        Token::Sign(s) => *s,
        Token::Name(n) => n.as_str(),
        _ => return None,
    };
    Some(match word {
        "or" => (Binary::Or, 1, false),
        "and" => (Binary::And, 2, false),
        "<" => (Binary::Lt, COMPARE, false),
        "<=" => (Binary::Le, COMPARE, false),
        ">" => (Binary::Lt, COMPARE, true),
        ">=" => (Binary::Le, COMPARE, true),
        "==" => (Binary::Eq, COMPARE, false),
        "!=" => (Binary::Ne, COMPARE, false),
        "+" => (Binary::Add, 5, false),
        "-" => (Binary::Sub, 5, false),
        "*" => (Binary::Mul, 6, false),
        "/" => (Binary::Div, 6, false),
        "//" => (Binary::FloorDiv, 6, false),
        "%" => (Binary::Mod, 6, false),
        _ => return None,
    })
}

/// Whether a name has a meaning in every program, so that nothing can be declared by it.
pub(in crate::score) fn is_word(name: &str) -> bool {
    let is_function = FUNCTIONS.iter().any(|(f, _)| *f == name);
    let is_other = KEYWORDS.contains(&name) || RESULTS.contains(&name) || Storage::from_name(name).is_some();
    is_function || is_other || Var::from_name(name).is_some()
}

pub(in crate::score) struct Parser<'a> {
    text: &'a str,
    tokens: Vec<(Token, Range<usize>)>,
    pub(in crate::score) at: usize,
    names: HashMap<String, AstId>,
    pub(in crate::score) out: Parsed,
}

impl Parser<'_> {
    fn text(mut self, result: Option<&'static str>) -> Result<Parsed, ProgramError> {
        while *self.peek() != Token::End {
            match (self.peek().clone(), self.peek_after(1).clone()) {
                (Token::Name(name), Token::Sign(":")) => self.declaration(name)?,
                (Token::Name(name), Token::Sign("=")) => self.binding(&name)?,
                _ => self.bare(result)?,
            }
            if !self.take(";") && *self.peek() != Token::End {
                return Err(self.unexpected("expected an operator or `;`"));
            }
        }
        Ok(self.out)
    }

    fn bare(&mut self, result: Option<&'static str>) -> Result<(), ProgramError> {
        let start = self.span().start;
        let value = self.expression()?;
        let Some(name) = result else {
            let expected = "a program names its results: `mask = ...`, `score = ...` or `sink = ...`";
            return Err(self.error(start..self.end(), "this value has no name", expected));
        };
        self.result(name, value, start)?;
        let trailing = *self.peek() == Token::Sign(";") && *self.peek_after(1) != Token::End;
        if trailing {
            self.at += 1;
            return Err(self.unexpected(format!("the {name} is the last statement")));
        }
        Ok(())
    }

    fn binding(&mut self, name: &str) -> Result<(), ProgramError> {
        let span = self.span();
        self.at += 2;
        let value = self.expression()?;
        if let Some(result) = RESULTS.iter().find(|r| **r == name) {
            return self.result(result, value, span.start);
        }
        self.check_new_name(name, span)?;
        self.names.insert(name.to_owned(), value);
        Ok(())
    }

    fn result(&mut self, name: &'static str, value: AstId, start: usize) -> Result<(), ProgramError> {
        if self.out.results.iter().any(|(n, _)| *n == name) {
            let expected = format!("give one {name}; join masks with `and`");
            return Err(self.error(start..self.end(), format!("a second {name}"), expected));
        }
        self.out.results.push((name, value));
        Ok(())
    }

    /// A name that may be given to something new.
    pub(in crate::score) fn check_new_name(&self, name: &str, span: Range<usize>) -> Result<(), ProgramError> {
        if is_word(name) {
            return Err(self.error(span, format!("`{name}` is a word of the language"), "choose another name"));
        }
        if self.names.contains_key(name) || self.out.declarations.iter().any(|(d, _)| d.name == name) {
            return Err(self.error(span, format!("`{name}` has a meaning already"), "choose another name"));
        }
        Ok(())
    }

    fn expression(&mut self) -> Result<AstId, ProgramError> {
        let mut frames: Vec<Frame> = Vec::new();
        let mut values: Vec<AstId> = Vec::new();
        loop {
            self.operand(&mut frames, &mut values)?;
            if self.out.ast.nodes.len() > MAX_OPERATIONS {
                let expected = format!("at most {MAX_OPERATIONS} are taken; put tables into a side tensor");
                return Err(self.error(self.span(), "the program has too many operations", expected));
            }
            if !self.after_operand(&mut frames, &mut values)? {
                return Ok(values.pop().expect("an operand was read"));
            }
        }
    }

    /// Reads prefixes and opening brackets up to a value, which it pushes.
    fn operand(&mut self, frames: &mut Vec<Frame>, values: &mut Vec<AstId>) -> Result<(), ProgramError> {
        loop {
            let span = self.span();
            let node = match self.peek().clone() {
                Token::Int(x) => AstNode::Int(x),
                Token::Float(x) => AstNode::Float(x),
                Token::Sign("-") => {
                    frames.push(Frame::Prefix(Unary::Neg, span.start));
                    self.at += 1;
                    continue;
                }
                Token::Sign("(") => {
                    frames.push(Frame::Group(span.start));
                    self.at += 1;
                    continue;
                }
                Token::Name(n) if n == "not" => {
                    frames.push(Frame::Prefix(Unary::Not, span.start));
                    self.at += 1;
                    continue;
                }
                Token::Name(n) if n == "true" || n == "false" => AstNode::Bool(n == "true"),
                Token::Name(n) if n == "inf" => AstNode::Float(f32::INFINITY),
                Token::Name(n) if n == "nan" => AstNode::Float(f32::NAN),
                Token::Name(n) if !KEYWORDS.contains(&n.as_str()) => match self.peek_after(1) {
                    Token::Sign("(") => {
                        frames.push(Frame::Call(self.function(&n)?, span.start, Vec::new()));
                        self.at += 2;
                        continue;
                    }
                    Token::Sign("[") => {
                        frames.push(Frame::Index(n, span.start, Vec::new()));
                        self.at += 2;
                        continue;
                    }
                    _ => {
                        if let Some(value) = self.names.get(&n) {
                            values.push(*value);
                            self.at += 1;
                            return Ok(());
                        }
                        AstNode::Name(n)
                    }
                },
                _ => return Err(self.unexpected("expected a value: a number, a name, a function, `(`, `-` or `not`")),
            };
            self.at += 1;
            values.push(self.out.ast.push(node, span));
            return Ok(());
        }
    }

    fn function(&self, name: &str) -> Result<&'static str, ProgramError> {
        FUNCTIONS.iter().map(|(f, _)| *f).find(|f| *f == name).ok_or_else(|| {
            let names: Vec<&str> = FUNCTIONS.iter().map(|(f, _)| *f).collect();
            let expected = match name {
                "where" => "write `select(condition, a, b)`".to_owned(),
                "int" => "say how it is rounded: `int_floor`, `int_ceil`, `int_trunc` or `int_round`".to_owned(),
                "floor" | "ceil" | "trunc" | "round" => {
                    format!("write `int_{name}(x)`, or `float(int_{name}(x))` for a float")
                }
                // Short names are near to one another.
                _ => match nearest_name(name, names.iter().copied()).filter(|_| name.len() > 3) {
                    Some(near) => format!("did you mean `{near}`? The functions are {}", names.join(", ")),
                    None => format!("the functions are {}", names.join(", ")),
                },
            };
            self.error(self.span(), format!("unknown function `{name}`"), expected)
        })
    }

    /// Reads an operator, or what closes brackets. False when the expression is over.
    fn after_operand(&mut self, frames: &mut Vec<Frame>, values: &mut Vec<AstId>) -> Result<bool, ProgramError> {
        loop {
            let (token, span) = self.tokens[self.at].clone();
            if let Some((op, precedence, swapped)) = infix(&token) {
                // Comparisons do not associate: one that is still waiting makes a chain.
                self.reduce(frames, values, if precedence == COMPARE { COMPARE + 1 } else { precedence });
                if precedence == COMPARE && matches!(frames.last(), Some(Frame::Infix(_, COMPARE, ..))) {
                    let expected = "write `a < b and b < c`, or put brackets around one";
                    return Err(self.error(span, "comparisons cannot be chained", expected));
                }
                frames.push(Frame::Infix(op, precedence, swapped));
                self.at += 1;
                return Ok(true);
            }
            match token {
                Token::Name(n) if n == "if" => {
                    self.reduce(frames, values, CONDITIONAL + 1);
                    frames.push(Frame::If(values.pop().expect("an operand")));
                    self.at += 1;
                    return Ok(true);
                }
                Token::Name(n) if n == "else" => {
                    self.reduce(frames, values, CONDITIONAL);
                    let Some(Frame::If(then)) = frames.pop_if(|f| matches!(f, Frame::If(_))) else {
                        return Err(self.unexpected("an `else` belongs to `VALUE if CONDITION else VALUE`"));
                    };
                    frames.push(Frame::Else(then, values.pop().expect("an operand")));
                    self.at += 1;
                    return Ok(true);
                }
                Token::Sign(")" | "]" | ",") => {
                    self.reduce(frames, values, CONDITIONAL);
                    if self.close(frames, values)? {
                        return Ok(true);
                    }
                }
                Token::Sign(";") | Token::End => {
                    self.reduce(frames, values, CONDITIONAL);
                    return match frames.last() {
                        None => Ok(false),
                        Some(Frame::If(..)) => Err(self.unexpected("expected an operator or `else`")),
                        Some(Frame::Index(..)) => Err(self.unexpected("expected an operator, `,` or `]`")),
                        Some(Frame::Call(..)) => Err(self.unexpected("expected an operator, `,` or `)`")),
                        Some(_) => Err(self.unexpected("expected an operator or `)`")),
                    };
                }
                _ => return Err(self.unexpected("expected an operator")),
            }
        }
    }

    /// Handles `)`, `]` or `,`. True when a value is expected next.
    fn close(&mut self, frames: &mut Vec<Frame>, values: &mut Vec<AstId>) -> Result<bool, ProgramError> {
        let Token::Sign(sign) = *self.peek() else { unreachable!("the caller saw it") };
        let end = self.span().end;
        let value = *values.last().expect("an operand");
        match (frames.pop(), sign) {
            (Some(Frame::Group(start)), ")") => {
                // A name's own place stays: its value may be used elsewhere.
                if self.out.ast.spans[value].start > start {
                    self.out.ast.spans[value] = start..end;
                }
            }
            (Some(Frame::Call(name, start, mut arguments)), "," | ")") => {
                arguments.push(values.pop().expect("an operand"));
                if sign == "," {
                    frames.push(Frame::Call(name, start, arguments));
                    self.at += 1;
                    return Ok(true);
                }
                values.push(self.call(name, start..end, &arguments)?);
            }
            (Some(Frame::Index(name, start, mut index)), "," | "]") => {
                index.push(values.pop().expect("an operand"));
                if sign == "," {
                    frames.push(Frame::Index(name, start, index));
                    self.at += 1;
                    return Ok(true);
                }
                values.push(self.out.ast.push(AstNode::Index(name, index), start..end));
            }
            (Some(Frame::Group(_)), _) => return Err(self.unexpected("expected an operator or `)`")),
            (Some(Frame::Call(..)), _) => return Err(self.unexpected("expected an operator, `,` or `)`")),
            (Some(Frame::Index(..)), _) => return Err(self.unexpected("expected an operator, `,` or `]`")),
            (Some(Frame::If(..)), _) => return Err(self.unexpected("expected an operator or `else`")),
            _ => return Err(self.unexpected("expected an operator; no bracket is open")),
        }
        self.at += 1;
        Ok(false)
    }

    fn call(&mut self, name: &'static str, span: Range<usize>, arguments: &[AstId]) -> Result<AstId, ProgramError> {
        let (_, arity) = FUNCTIONS.iter().find(|(f, _)| *f == name).expect("known");
        let many = matches!(name, "min" | "max");
        if arguments.len() != *arity && !(many && arguments.len() > *arity) {
            let expected = format!("it takes {}{arity}", if many { "at least " } else { "" });
            return Err(self.error(span, format!("{name} was given {} values", arguments.len()), expected));
        }
        let ast = &mut self.out.ast;
        let mut fold = |op, values: &[AstId]| {
            let (first, rest) = values.split_first().expect("at least one");
            rest.iter().fold(*first, |a, b| ast.push(AstNode::Binary(op, a, *b), span.clone()))
        };
        Ok(match name {
            "min" => fold(Binary::Min, arguments),
            "max" => fold(Binary::Max, arguments),
            "clamp" => {
                let least = fold(Binary::Max, &arguments[..2]);
                fold(Binary::Min, &[least, arguments[2]])
            }
            "select" => ast.push(AstNode::Select(arguments[0], arguments[1], arguments[2]), span),
            _ => {
                let op = Unary::FUNCTIONS.into_iter().find(|u| u.name() == name).expect("a function of one value");
                ast.push(AstNode::Unary(op, arguments[0]), span)
            }
        })
    }

    /// Applies the operators on the stack that bind at least as tightly.
    fn reduce(&mut self, frames: &mut Vec<Frame>, values: &mut Vec<AstId>, precedence: u8) {
        let ast = &mut self.out.ast;
        loop {
            let binds = match frames.last() {
                Some(Frame::Prefix(Unary::Not, _)) => NOT,
                Some(Frame::Prefix(..)) => NEGATE,
                Some(Frame::Infix(_, p, ..)) => *p,
                Some(Frame::Else(..)) => CONDITIONAL,
                _ => return,
            };
            if binds < precedence {
                return;
            }
            let last = values.pop().expect("every operator has its operands");
            let end = ast.spans[last].end;
            let value = match frames.pop() {
                Some(Frame::Prefix(op, start)) => ast.push(AstNode::Unary(op, last), start..end.max(start)),
                Some(Frame::Infix(op, _, swapped)) => {
                    let first = values.pop().expect("every operator has its operands");
                    let start = ast.spans[first].start;
                    let (a, b) = if swapped { (last, first) } else { (first, last) };
                    ast.push(AstNode::Binary(op, a, b), start..end.max(start))
                }
                Some(Frame::Else(then, condition)) => {
                    let start = ast.spans[then].start;
                    ast.push(AstNode::Select(condition, then, last), start..end.max(start))
                }
                _ => unreachable!("only operators bind"),
            };
            values.push(value);
        }
    }

    pub(in crate::score) fn peek(&self) -> &Token {
        self.peek_after(0)
    }

    pub(in crate::score) fn peek_after(&self, n: usize) -> &Token {
        &self.tokens[(self.at + n).min(self.tokens.len() - 1)].0
    }

    pub(in crate::score) fn span(&self) -> Range<usize> {
        self.tokens[self.at].1.clone()
    }

    /// Where the last token that was read ends.
    pub(in crate::score) fn end(&self) -> usize {
        self.tokens[self.at.saturating_sub(1)].1.end
    }

    pub(in crate::score) fn take(&mut self, sign: &str) -> bool {
        let found = matches!(self.peek(), Token::Sign(s) if *s == sign);
        self.at += usize::from(found);
        found
    }

    pub(in crate::score) fn error(
        &self,
        span: Range<usize>,
        message: impl Into<String>,
        expected: impl Into<String>,
    ) -> ProgramError {
        ProgramError::at(self.text, &span, message, expected)
    }

    pub(in crate::score) fn unexpected(&self, expected: impl Into<String>) -> ProgramError {
        let message = match self.peek() {
            Token::End => "the text ends here".to_owned(),
            token => format!("{} is unexpected", token.describe()),
        };
        self.error(self.span(), message, expected)
    }
}
