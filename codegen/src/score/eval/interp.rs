//! The interpreter: what a program means, one score at a time. Every kernel is held against it.

use super::data::{Elements, SideData, SideTensor};
use crate::Shape;
use crate::score::graph::arith;
use crate::score::graph::{Depends, Graph, Node};
use crate::score::program::Program;
use crate::score::syntax::error::ProgramError;
use crate::score::syntax::words::{Binary, Id, Scalar, Type, Unary, Var};

/// How floats are rounded. Masks always take fp32, since a mask is what the kernel sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Precision {
    /// After every operation to fp32, as in the kernels.
    F32,
    /// Not at all beyond fp64: the oracle for scores.
    F64,
}

/// Where a score is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct At {
    /// Sequence.
    pub b: u32,
    /// Query head.
    pub h: u32,
    /// Query row.
    pub q: u32,
    /// Key row.
    pub kv: u32,
}

/// A value; ints and bools in the first field, floats in the second.
#[derive(Debug, Clone, Copy, Default)]
struct Value {
    int: i64,
    float: f64,
}

/// Nodes with sizes and side data: evaluates any of them. What does not change from one place to the next is kept.
pub struct Evaluator<'a> {
    graph: &'a Graph,
    sizes: Shape,
    precision: Precision,
    scalars: Vec<Value>,
    tensors: Vec<Option<&'a SideTensor>>,
    /// The nodes that are needed, operands first, with what they change with.
    order: Vec<(Id, Depends)>,
    values: Vec<Value>,
    seen: Option<(At, [i64; 4])>,
}

impl<'a> Evaluator<'a> {
    /// An evaluator of some nodes of a graph.
    ///
    /// The data must have been checked against the declarations; what is missing reads as 0.
    pub fn new(graph: &'a Graph, roots: &[Id], sizes: &Shape, data: &'a SideData, precision: Precision) -> Self {
        let mut needed = vec![false; graph.nodes().len()];
        roots.iter().for_each(|r| needed[r.index()] = true);
        let ids: Vec<Id> = graph.ids().collect();
        for id in ids.iter().rev() {
            if needed[id.index()] {
                graph.node(*id).operands().iter().for_each(|o| needed[o.index()] = true);
            }
        }
        let scalars = graph.declarations().iter().map(|d| match data.scalars.get(&d.name) {
            Some(Scalar::Int(x)) => Value { int: *x, float: f64::from(*x as f32) },
            Some(Scalar::Float(x)) => Value { int: 0, float: *x as f64 },
            None => Value::default(),
        });
        let order = ids.into_iter().filter(|id| needed[id.index()]).map(|id| (id, graph.depends(id)));
        Self {
            graph,
            sizes: *sizes,
            precision,
            scalars: scalars.collect(),
            tensors: graph.declarations().iter().map(|d| data.tensors.get(&d.name)).collect(),
            order: order.collect(),
            values: vec![Value::default(); graph.nodes().len()],
            seen: None,
        }
    }

    /// Moves to a place, with the score there and the tile around it (first and last query, first and last key).
    pub fn go(&mut self, at: At, tile: [i64; 4], score: f64) {
        let fresh = self.seen.is_none_or(|(s, _)| (s.b, s.h) != (at.b, at.h));
        let new_q = fresh || self.seen.is_none_or(|(s, t)| s.q != at.q || t[..2] != tile[..2]);
        let new_kv = fresh || self.seen.is_none_or(|(s, t)| s.kv != at.kv || t[2..] != tile[2..]);
        self.seen = Some((at, tile));
        for i in 0..self.order.len() {
            let (id, depends) = self.order[i];
            if fresh || depends.score || (depends.q && new_q) || (depends.kv && new_kv) {
                self.values[id.index()] = self.value(id, at, tile, score);
            }
        }
    }

    /// The value of a bool node where it is.
    pub fn bool(&self, id: Id) -> bool {
        self.values[id.index()].int != 0
    }

    /// The value of an int node where it is.
    pub fn int(&self, id: Id) -> i64 {
        self.values[id.index()].int
    }

    /// The value of a float node where it is.
    pub fn float(&self, id: Id) -> f64 {
        self.values[id.index()].float
    }

    fn value(&self, id: Id, at: At, tile: [i64; 4], score: f64) -> Value {
        let of = |id: &Id| self.values[id.index()];
        let int = |int: i64| Value { int, float: 0.0 };
        let float = |x: f64| match self.precision {
            Precision::F32 => Value { int: 0, float: x as f32 as f64 },
            Precision::F64 => Value { int: 0, float: x },
        };
        match self.graph.node(id) {
            Node::Bool(x) => int(i64::from(*x)),
            Node::Int(x) => int(*x),
            Node::Float(bits) => float(f32::from_bits(*bits) as f64),
            Node::Var(var) => match var {
                Var::Score => float(score),
                Var::Kv => int(at.kv.into()),
                Var::Q => int(at.q.into()),
                Var::B => int(at.b.into()),
                Var::H => int(at.h.into()),
                Var::HKv => int((at.h / self.sizes.group()).into()),
                Var::QLen => int(self.sizes.q_len.into()),
                Var::KvLen => int(self.sizes.kv_len.into()),
                Var::QFirst => int(tile[0]),
                Var::QLast => int(tile[1]),
                Var::KvFirst => int(tile[2]),
                Var::KvLast => int(tile[3]),
            },
            Node::Scalar(i) => self.scalars[*i],
            Node::Load { tensor, index } => {
                let Some(tensor) = self.tensors[*tensor] else { return Value::default() };
                let Some(place) = tensor.place(index.iter().map(|i| of(i).int)) else { return Value::default() };
                match &tensor.elements {
                    Elements::Bool(x) => int(i64::from(x[place])),
                    Elements::Int(x) => int(x[place]),
                    Elements::Float(x) => float(x[place] as f64),
                }
            }
            Node::Extreme { tensor, first, last, greatest } => {
                let unknown = self.graph.declarations()[*tensor].extreme(*greatest);
                let Some(data) = self.tensors[*tensor] else { return int(unknown) };
                let ends = first.iter().zip(last).map(|(a, b)| (of(a).int, of(b).int));
                int(data.extreme(ends, *greatest).unwrap_or(unknown))
            }
            Node::Unary(op, a) => match (op, self.graph.ty(*a)) {
                (Unary::Not, _) => int(1 - of(a).int),
                (Unary::ToFloat, _) => match self.precision {
                    Precision::F32 => float((of(a).int as f32) as f64),
                    Precision::F64 => float(of(a).int as f64),
                },
                (op, _) if op.rounds() => int(arith::rounded(*op, of(a).float)),
                (Unary::Neg, Type::Int) => int(of(a).int.wrapping_neg()),
                (_, Type::Int) => int(of(a).int.wrapping_abs()),
                _ => float(arith::float_unary(*op, of(a).float)),
            },
            Node::Binary(op, a, b) => match (op, self.graph.ty(*a)) {
                (Binary::And, _) => int(of(a).int & of(b).int),
                (Binary::Or, _) => int(of(a).int | of(b).int),
                (_, Type::Float) if op.is_logical() => int(i64::from(arith::compare(*op, of(a).float, of(b).float))),
                (_, Type::Float) => float(arith::float(*op, of(a).float, of(b).float)),
                _ if op.is_logical() => int(i64::from(arith::compare(*op, of(a).int, of(b).int))),
                _ => int(arith::int(*op, of(a).int, of(b).int)),
            },
            Node::Select(c, a, b) => {
                if of(c).int != 0 {
                    of(a)
                } else {
                    of(b)
                }
            }
        }
    }
}

/// A program with sizes and side data: the mask, the score and the sink at any place.
pub struct Bound<'a> {
    mask: Option<(Evaluator<'a>, Id)>,
    score: Option<(Evaluator<'a>, Id)>,
    sink: Option<(Evaluator<'a>, Id)>,
    precision: Precision,
}

/// The place outside of any tile.
pub(in crate::score) const NO_TILE: [i64; 4] = [0; 4];

impl<'a> Bound<'a> {
    /// Checks the data and gets ready to evaluate.
    ///
    /// # Errors
    /// As [`SideData::check`].
    pub fn new(
        program: &'a Program,
        sizes: &Shape,
        data: &'a SideData,
        precision: Precision,
    ) -> Result<Self, ProgramError> {
        data.check(program, sizes)?;
        Ok(Self::of_checked(program, sizes, data, precision))
    }

    /// [`Bound::new`] with data that was checked before.
    pub fn of_checked(program: &'a Program, sizes: &Shape, data: &'a SideData, precision: Precision) -> Self {
        let evaluator = |id: Option<Id>, precision| {
            id.map(|id| (Evaluator::new(program.graph(), &[id], sizes, data, precision), id))
        };
        Self {
            mask: evaluator(program.mask(), Precision::F32),
            score: evaluator(program.score(), precision),
            sink: evaluator(program.sink(), precision),
            precision,
        }
    }

    /// Whether a query attends to a key.
    pub fn visible(&mut self, at: At) -> bool {
        self.mask.as_mut().is_none_or(|(e, id)| {
            e.go(at, NO_TILE, 0.0);
            e.bool(*id)
        })
    }

    /// What takes the place of a score.
    pub fn score(&mut self, at: At, score: f64) -> f64 {
        let score = if self.precision == Precision::F32 { score as f32 as f64 } else { score };
        self.score.as_mut().map_or(score, |(e, id)| {
            e.go(at, NO_TILE, score);
            e.float(*id)
        })
    }

    /// The sink's logit of a row.
    pub fn sink(&mut self, b: u32, h: u32, q: u32) -> Option<f64> {
        self.sink.as_mut().map(|(e, id)| {
            e.go(At { b, h, q, kv: 0 }, NO_TILE, 0.0);
            e.float(*id)
        })
    }

    /// The mask of one head, `[q_len, kv_len]`.
    pub fn mask_matrix(&mut self, sizes: &Shape, b: u32, h: u32) -> Vec<bool> {
        let places = (0..sizes.q_len).flat_map(|q| (0..sizes.kv_len).map(move |kv| At { b, h, q, kv }));
        places.map(|at| self.visible(at)).collect()
    }
}
