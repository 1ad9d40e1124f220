//! Reading declarations: `name: storage[axis, ...] usually in LOW..HIGH nondecreasing`.

use super::error::ProgramError;
use super::lex::Token;
use super::parse::Parser;
use super::range::Range;
use super::words::{Axis, Declaration, MAX_RANK, Storage, Type};

impl Parser<'_> {
    pub(in crate::score) fn declaration(&mut self, name: String) -> Result<(), ProgramError> {
        let span = self.span();
        self.check_new_name(&name, span.clone())?;
        if name.starts_with('_') || !name.is_ascii() {
            let expected = "names of scalars and tensors are ASCII and start with a letter";
            return Err(self.error(span, format!("`{name}` cannot be declared"), expected));
        }
        self.at += 2;
        let kinds = "expected int, float, bool, f32, f16, bf16, i32 or i64";
        let Token::Name(kind) = self.peek().clone() else { return Err(self.unexpected(kinds)) };
        let storage = Storage::from_name(&kind).ok_or_else(|| self.unexpected(kinds))?;
        self.at += 1;
        let mut declaration = Declaration::scalar(name, storage);
        if self.take("[") {
            declaration.axes = Some(self.axes()?);
        }
        loop {
            match self.peek().clone() {
                Token::Name(n) if n == "in" && (storage.ty() == Type::Int || declaration.is_float_scalar()) => {
                    self.at += 1;
                    declaration.range = Some(self.range()?);
                }
                // Of floats alone: what ints may be decides which keys are visited.
                Token::Name(n) if n == "usually" && declaration.is_float_scalar() => {
                    self.at += 1;
                    if *self.peek() != Token::Name("in".to_owned()) {
                        return Err(self.unexpected("expected `in LOW..HIGH`"));
                    }
                    declaration.usually = true;
                }
                Token::Name(n) if n == "nondecreasing" && declaration.axes.is_some() && storage != Storage::Bool => {
                    self.at += 1;
                    declaration.nondecreasing = true;
                }
                Token::Sign(";") | Token::End => break,
                _ => {
                    let expected = match (storage.ty(), &declaration.axes) {
                        (Type::Int, Some(_)) => "expected `in LOW..HIGH`, `nondecreasing` or `;`",
                        (Type::Int, None) => "expected `[`, `in LOW..HIGH` or `;`",
                        (_, Some(_)) => "expected `;`",
                        (_, None) => "expected `[`, `in LOW..HIGH`, `usually in LOW..HIGH` or `;`",
                    };
                    return Err(self.unexpected(expected));
                }
            }
        }
        if !matches!(storage, Storage::I32 | Storage::I64 | Storage::F32) && declaration.axes.is_none() {
            let expected = "run-time scalars are int or float; compare an int with 0";
            return Err(self.error(
                span,
                format!("`{}` is a scalar of {}", declaration.name, storage.name()),
                expected,
            ));
        }
        let span = span.start..self.end();
        self.out.declarations.push((declaration, span));
        Ok(())
    }

    fn axes(&mut self) -> Result<Vec<Axis>, ProgramError> {
        let mut axes = Vec::new();
        loop {
            let expected = "expected batch, heads, kv_heads, q_len, kv_len, a length from 1 on, or `*` for any";
            let axis = match self.peek() {
                Token::Sign("*") => Some(Axis::Any),
                Token::Int(n) => u32::try_from(*n).ok().filter(|n| (1..=1 << 30).contains(n)).map(Axis::Fixed),
                Token::Name(n) => Axis::NAMED.into_iter().find(|a| a.name() == Some(n)),
                _ => None,
            };
            axes.push(axis.ok_or_else(|| self.unexpected(expected))?);
            if axes.len() > MAX_RANK {
                return Err(self.unexpected(format!("a side tensor has at most {MAX_RANK} axes")));
            }
            self.at += 1;
            if self.take("]") {
                return Ok(axes);
            }
            if !self.take(",") {
                return Err(self.unexpected("expected `,` or `]`"));
            }
        }
    }

    fn range(&mut self) -> Result<Range, ProgramError> {
        let start = self.span().start;
        let lo = self.signed()?;
        if !self.take("..") {
            return Err(self.unexpected("expected `..`"));
        }
        let hi = self.signed()?;
        if lo > hi {
            return Err(self.error(start..self.end(), "the range is empty", "write it as LOW..HIGH, both included"));
        }
        Ok(Range { lo, hi })
    }

    fn signed(&mut self) -> Result<i64, ProgramError> {
        let negative = self.take("-");
        let Token::Int(n) = *self.peek() else { return Err(self.unexpected("expected a whole number")) };
        self.at += 1;
        Ok(if negative { -n } else { n })
    }
}
