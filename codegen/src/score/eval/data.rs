//! Side tensors and scalars on the host, checked against what a program declares.

use crate::Shape;
use crate::score::program::Program;
use crate::score::syntax::error::ProgramError;
use crate::score::syntax::range::Range;
use crate::score::syntax::words::{Axis, Declaration, Scalar, Type};
use std::collections::BTreeMap;

/// Elements of a side tensor, in the type that they have once loaded.
#[derive(Debug, Clone, PartialEq)]
pub enum Elements {
    /// For bool.
    Bool(Vec<bool>),
    /// For i32 and i64.
    Int(Vec<i64>),
    /// For f32, f16 and bf16.
    Float(Vec<f32>),
}

impl Elements {
    /// The type of an element.
    pub fn ty(&self) -> Type {
        match self {
            Elements::Bool(_) => Type::Bool,
            Elements::Int(_) => Type::Int,
            Elements::Float(_) => Type::Float,
        }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            Elements::Bool(x) => x.len(),
            Elements::Int(x) => x.len(),
            Elements::Float(x) => x.len(),
        }
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A side tensor in host memory, contiguous with the last axis fastest.
#[derive(Debug, Clone, PartialEq)]
pub struct SideTensor {
    /// Length of each axis.
    pub shape: Vec<usize>,
    /// The elements.
    pub elements: Elements,
}

/// What a call brings for a program, by name.
#[derive(Debug, Clone, Default)]
pub struct SideData {
    /// Scalars.
    pub scalars: BTreeMap<String, Scalar>,
    /// Tensors.
    pub tensors: BTreeMap<String, SideTensor>,
}

impl SideData {
    /// With a scalar.
    pub fn scalar(mut self, name: &str, value: Scalar) -> Self {
        self.scalars.insert(name.to_owned(), value);
        self
    }

    /// With a tensor.
    pub fn tensor(mut self, name: &str, shape: &[usize], elements: Elements) -> Self {
        self.tensors.insert(name.to_owned(), SideTensor { shape: shape.to_vec(), elements });
        self
    }

    /// Checks that everything a program declares is there, of the type and shape that it declares, and keeps the
    /// promises that it makes.
    ///
    /// # Errors
    /// The first thing that does not fit, by name.
    pub fn check(&self, program: &Program, sizes: &Shape) -> Result<(), ProgramError> {
        for d in program.declarations() {
            match &d.axes {
                None => self.check_scalar(d)?,
                Some(axes) => {
                    let tensor = self.tensors.get(&d.name).ok_or_else(|| missing(d))?;
                    check_shape(d, axes, &tensor.shape, sizes)?;
                    tensor.check(d)?;
                }
            }
        }
        Ok(())
    }

    fn check_scalar(&self, d: &Declaration) -> Result<(), ProgramError> {
        match (self.scalars.get(&d.name).ok_or_else(|| missing(d))?, d.storage.ty()) {
            (Scalar::Int(x), Type::Int) => check_range(d, *x),
            (Scalar::Float(x), Type::Float) => check_float(d, *x),
            // A whole number serves where a float is declared.
            (Scalar::Int(x), Type::Float) => check_float(d, *x as f32),
            (found, wanted) => Err(ProgramError::new(
                format!("the scalar `{}` is {found:?}", d.name),
                format!("the program declares it as {wanted}"),
            )),
        }
    }
}

fn missing(d: &Declaration) -> ProgramError {
    let what = if d.axes.is_some() { "tensor" } else { "scalar" };
    ProgramError::new(
        format!("the {what} `{}` is missing", d.name),
        format!("the program declares `{d}`; give it a value"),
    )
}

fn check_range(d: &Declaration, x: i64) -> Result<(), ProgramError> {
    let Range { lo, hi } = d.int_range();
    if (lo..=hi).contains(&x) {
        return Ok(());
    }
    Err(ProgramError::new(
        format!("`{}` holds {x}", d.name),
        format!("the program relies on values from {lo} to {hi} (`{d}`)"),
    ))
}

/// Refuses a float scalar outside of its declared range.
///
/// # Errors
/// The scalar, with the range.
pub fn check_float(d: &Declaration, x: f32) -> Result<(), ProgramError> {
    match d.range {
        Some(Range { lo, hi }) if !d.allows(x) => Err(ProgramError::new(
            format!("the scalar `{}` is {x}", d.name),
            format!("the program relies on values from {lo} to {hi} (`{d}`)"),
        )),
        _ => Ok(()),
    }
}

/// Checks the lengths of a tensor's axes: those that are declared, or 1 for an axis along which it is broadcast.
///
/// # Errors
/// The axis that differs, with both lengths.
pub fn check_shape(d: &Declaration, axes: &[Axis], shape: &[usize], sizes: &Shape) -> Result<(), ProgramError> {
    if axes.len() != shape.len() {
        return Err(ProgramError::new(
            format!("the tensor `{}` has shape {shape:?}", d.name),
            format!("the program declares {} axes (`{d}`)", axes.len()),
        ));
    }
    for (i, (axis, &length)) in axes.iter().zip(shape).enumerate() {
        let wanted = match axis.length(sizes) {
            Some(wanted) => wanted as usize,
            None if (1..=1 << 30).contains(&length) => continue,
            None => 1,
        };
        if length != wanted && length != 1 {
            return Err(ProgramError::new(
                format!("axis {i} of the tensor `{}` has length {length}", d.name),
                format!("it is indexed along {axis}, which is {wanted} here; 1 would broadcast it"),
            ));
        }
    }
    Ok(())
}

impl SideTensor {
    fn check(&self, d: &Declaration) -> Result<(), ProgramError> {
        let error = |message: String, expected: String| Err(ProgramError::new(message, expected));
        let (found, wanted) = (self.elements.ty(), d.storage.ty());
        if found != wanted {
            return error(format!("the tensor `{}` is of {found}", d.name), format!("the program declares `{d}`"));
        }
        let count: usize = self.shape.iter().product();
        if self.elements.len() != count {
            let message = format!("the tensor `{}` has {} elements", d.name, self.elements.len());
            return error(message, format!("shape {:?} has {count}", self.shape));
        }
        if let Elements::Int(x) = &self.elements {
            x.iter().try_for_each(|x| check_range(d, *x))?;
        }
        let falls = |row: usize| -> bool {
            match &self.elements {
                Elements::Bool(_) => false,
                Elements::Int(x) => x.chunks(row).any(|r| !r.is_sorted()),
                Elements::Float(x) => x.chunks(row).any(|r| !r.is_sorted()),
            }
        };
        if d.nondecreasing && falls(self.shape.last().map_or(1, |n| (*n).max(1))) {
            let expected = format!("the program relies on `{d}`; sort it or take the promise back");
            return error(format!("`{}` decreases along its last axis", d.name), expected);
        }
        Ok(())
    }

    /// The least or the greatest of the ints or bools in a box of indices, each from one to the other; every index is
    /// taken to the nearest that there is. `None` for an empty box or tensor, and for floats.
    pub(in crate::score) fn extreme(&self, ends: impl Iterator<Item = (i64, i64)>, greatest: bool) -> Option<i64> {
        let ends: Vec<(i64, i64)> = ends.collect();
        if ends.iter().any(|(first, last)| first > last) {
            return None;
        }
        let clamp = |i: i64, n: usize| i.clamp(0, n as i64 - 1) as usize;
        let mut places = vec![0];
        for (&n, (first, last)) in self.shape.iter().zip(ends) {
            let of_axis = if n == 0 { return None } else { clamp(first, n)..=clamp(last, n) };
            places = places.into_iter().flat_map(|at| of_axis.clone().map(move |i| at * n + i)).collect();
        }
        let pick = |values: &mut dyn Iterator<Item = i64>| if greatest { values.max() } else { values.min() };
        match &self.elements {
            Elements::Bool(x) => pick(&mut places.into_iter().map(|at| i64::from(x[at]))),
            Elements::Int(x) => pick(&mut places.into_iter().map(|at| x[at])),
            Elements::Float(_) => None,
        }
    }

    /// The place of an element; every index is taken to the nearest that there is. `None` for an empty tensor.
    pub fn place(&self, index: impl Iterator<Item = i64>) -> Option<usize> {
        let mut at = 0;
        for (&n, i) in self.shape.iter().zip(index) {
            let last = n.checked_sub(1)?;
            at = at * n + (i.max(0) as u64).min(last as u64) as usize;
        }
        Some(at)
    }
}
