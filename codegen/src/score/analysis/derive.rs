//! Derivatives of what a program makes of the score: by the score itself, by the elements of side tensors, and by
//! scalars.

use crate::score::graph::{Graph, Node};
use crate::score::syntax::words::{Binary, Id, Type, Unary, Var};

/// The derivatives of one result of a program, for the backward pass.
///
/// With `g` the gradient of the loss by the result, the gradient by the score is `g * score`, and each tensor in
/// `tensors` gains `g * value` at its `index`, summed over all scores.
///
/// At a kink it is what PyTorch's autograd has: 0 for `abs` at 0, half to each operand of `min` and `max` where they
/// are equal, all to the value that is clamped where it is at a bound, and nothing to what only a condition reads.
/// `clamp(x, low, high)` is `min(max(x, low), high)` of an `x` that changes with the score and bounds that do not, or,
/// where nothing does, of an `x` that reads a float tensor and bounds that read none: a text that spells it so means
/// the same. Of NaN and a number the number is taken, and its derivative.
#[derive(Debug, Clone)]
pub struct Derivative {
    /// The program's nodes and those of the derivatives.
    pub graph: Graph,
    /// The result itself.
    pub value: Id,
    /// By the score; `None` when it is 0.
    pub score: Option<Id>,
    /// By elements of float tensors and by float scalars: one entry for every place where one is read.
    pub tensors: Vec<ByTensor>,
}

/// The derivative by the element of a tensor that one load reads, or by a scalar.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ByTensor {
    /// The tensor or scalar, by its place among the declarations.
    pub tensor: usize,
    /// Which element, one int per axis; none of a scalar.
    pub index: Vec<Id>,
    /// The derivative.
    pub value: Id,
    /// How each axis of the tensor's gradient is reached.
    pub axes: Vec<GradientAxis>,
    /// The coordinates that are summed over: the gradient's shape is that of all scores, `[b, h, q, kv]`, without them.
    pub summed: Vec<Var>,
}

/// How an axis of a tensor's gradient is reached from the coordinates of a score.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GradientAxis {
    /// It is a coordinate: every element of a tile has its own place.
    Coordinate(Var),
    /// It is computed: elements of a tile may meet, and have to be added one by one.
    Scattered,
}

impl ByTensor {
    /// The coordinate that an axis is indexed by, if it is one.
    pub fn coordinate(&self, axis: usize) -> Option<Var> {
        match self.axes.get(axis) {
            Some(GradientAxis::Coordinate(var)) => Some(*var),
            _ => None,
        }
    }
}

impl Derivative {
    /// The derivatives of a float node.
    pub(in crate::score) fn of(graph: Graph, root: Id) -> Self {
        let loads = graph.ids().filter(|id| matches!(graph.node(*id), Node::Load { .. } | Node::Scalar(_)));
        let loads: Vec<Id> = loads.filter(|id| graph.ty(*id) == Type::Float).collect();
        let mut graph = graph;
        let score_node = graph.var(Var::Score);
        let score = derive(&mut graph, root, score_node);
        let mut tensors = Vec::new();
        for load in loads {
            let Some(value) = derive(&mut graph, root, load) else { continue };
            let (tensor, index) = match graph.node(load).clone() {
                Node::Load { tensor, index } => (tensor, index),
                Node::Scalar(scalar) => (scalar, Vec::new()),
                _ => continue,
            };
            let axis = |i: &Id| match graph.node(*i) {
                Node::Var(v @ (Var::B | Var::H | Var::HKv | Var::Q | Var::Kv)) => GradientAxis::Coordinate(*v),
                _ => GradientAxis::Scattered,
            };
            let axes: Vec<GradientAxis> = index.iter().map(axis).collect();
            let kept = |v: &Var| axes.contains(&GradientAxis::Coordinate(*v));
            let summed = [Var::B, Var::H, Var::Q, Var::Kv].into_iter().filter(|v| !kept(v)).collect();
            tensors.push(ByTensor { tensor, index, value, axes, summed });
        }
        Self { graph, value: root, score, tensors }
    }
}

/// The derivative of a node by a float node; `None` when it is 0 everywhere.
fn derive(graph: &mut Graph, root: Id, by: Id) -> Option<Id> {
    let nodes = root.index() + 1;
    let mut derivatives: Vec<Option<Id>> = vec![None; nodes.max(by.index() + 1)];
    let ids: Vec<Id> = graph.ids().take(nodes).collect();
    let mut changes: Vec<Changes> = Vec::with_capacity(nodes);
    ids.iter().for_each(|id| changes.push(Changes::of(graph, *id, &changes)));
    for id in ids {
        derivatives[id.index()] = match id == by {
            true => Some(graph.float(1.0)),
            false => step(graph, id, &derivatives, &changes),
        };
    }
    derivatives[root.index()]
}

/// What a value changes with, which tells apart what is clamped and what it is clamped to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Changes {
    /// Neither of these.
    No,
    /// Elements of a float tensor.
    WithTensors,
    /// The score.
    WithScore,
}

impl Changes {
    fn of(g: &Graph, id: Id, known: &[Self]) -> Self {
        match g.node(id) {
            Node::Load { .. } if g.ty(id) == Type::Float && !g.depends(id).score => Changes::WithTensors,
            _ if g.depends(id).score => Changes::WithScore,
            node => node.operands().iter().map(|x| known[x.index()]).max().unwrap_or(Changes::No),
        }
    }
}

/// The derivative of one operation from those of its operands.
fn step(g: &mut Graph, id: Id, known: &[Option<Id>], changes: &[Changes]) -> Option<Id> {
    if g.ty(id) != Type::Float {
        return None;
    }
    let of = |x: Id| known[x.index()];
    match *g.node(id) {
        Node::Unary(op, x) => {
            let dx = of(x)?;
            let factor = match op {
                Unary::Neg => return Some(g.unary(Unary::Neg, dx)),
                Unary::Abs => {
                    let (zero, one, minus) = (g.float(0.0), g.float(1.0), g.float(-1.0));
                    let (below, above) = (g.binary(Binary::Lt, x, zero), g.binary(Binary::Lt, zero, x));
                    let positive = g.select(above, one, zero);
                    g.select(below, minus, positive)
                }
                Unary::Exp2 => {
                    let ln2 = g.float(std::f32::consts::LN_2);
                    g.binary(Binary::Mul, id, ln2)
                }
                Unary::Log2 => {
                    let log2e = g.float(std::f32::consts::LOG2_E);
                    g.binary(Binary::Div, log2e, x)
                }
                Unary::Tanh => {
                    let (one, square) = (g.float(1.0), g.binary(Binary::Mul, id, id));
                    g.binary(Binary::Sub, one, square)
                }
                Unary::Exp => id,
                Unary::Log => {
                    let one = g.float(1.0);
                    g.binary(Binary::Div, one, x)
                }
                // Infinite at 0.
                Unary::Sqrt => {
                    let half = g.float(0.5);
                    g.binary(Binary::Div, half, id)
                }
                Unary::Sigmoid => {
                    let one = g.float(1.0);
                    let rest = g.binary(Binary::Sub, one, id);
                    g.binary(Binary::Mul, id, rest)
                }
                // Floats of ints, which change by leaps.
                _ => return None,
            };
            Some(g.binary(Binary::Mul, factor, dx))
        }
        Node::Binary(Binary::Add, a, b) => match (of(a), of(b)) {
            (Some(x), Some(y)) => Some(g.binary(Binary::Add, x, y)),
            (x, y) => x.or(y),
        },
        Node::Binary(Binary::Sub, a, b) => match (of(a), of(b)) {
            (Some(x), Some(y)) => Some(g.binary(Binary::Sub, x, y)),
            (x, None) => x,
            (None, Some(y)) => Some(g.unary(Unary::Neg, y)),
        },
        Node::Binary(Binary::Mul, a, b) => {
            let x = of(a).map(|da| g.binary(Binary::Mul, da, b));
            let y = of(b).map(|db| g.binary(Binary::Mul, a, db));
            match (x, y) {
                (Some(x), Some(y)) => Some(g.binary(Binary::Add, x, y)),
                (x, y) => x.or(y),
            }
        }
        Node::Binary(Binary::Div, a, b) => {
            // (da - (a / b) * db) / b
            let above = match (of(a), of(b)) {
                (None, None) => return None,
                (Some(da), None) => da,
                (da, Some(db)) => {
                    let less = g.binary(Binary::Mul, id, db);
                    match da {
                        Some(da) => g.binary(Binary::Sub, da, less),
                        None => g.unary(Unary::Neg, less),
                    }
                }
            };
            Some(g.binary(Binary::Div, above, b))
        }
        Node::Binary(op @ (Binary::Min | Binary::Max), a, b) => match clamped(g, changes, op, a, b) {
            Some(clamp) => {
                let inner = match op {
                    Binary::Min => Binary::Max,
                    _ => Binary::Min,
                };
                let beyond = is_second(g, op, clamp.inner, clamp.outer_bound);
                let before = is_second(g, inner, clamp.value, clamp.inner_bound);
                let within = choose(g, before, of(clamp.inner_bound), of(clamp.value));
                choose(g, beyond, of(clamp.outer_bound), within)
            }
            None => {
                let second = is_second(g, op, a, b);
                let one = choose(g, second, of(b), of(a))?;
                let equal = g.binary(Binary::Eq, a, b);
                let both = match (of(a), of(b)) {
                    (Some(x), Some(y)) => g.binary(Binary::Add, x, y),
                    (x, y) => x.or(y)?,
                };
                let half = g.float(0.5);
                let half = g.binary(Binary::Mul, half, both);
                Some(g.select(equal, half, one))
            }
        },
        Node::Select(c, a, b) => choose(g, c, of(a), of(b)),
        _ => None,
    }
}

/// Whether the least or greatest of two is the second and not the first; of NaN and a number, the number is.
fn is_second(g: &mut Graph, op: Binary, a: Id, b: Id) -> Id {
    let second = match op {
        Binary::Min => g.binary(Binary::Lt, b, a),
        _ => g.binary(Binary::Lt, a, b),
    };
    let nan = g.binary(Binary::Ne, a, a);
    g.or(second, nan)
}

/// A value between two bounds: that of the least and that of the greatest, in the order in which they are applied.
struct Clamp {
    value: Id,
    inner: Id,
    inner_bound: Id,
    outer_bound: Id,
}

/// `min(max(value, bound), bound)`, or the other way round, of a value that changes with more than its bounds do.
fn clamped(g: &Graph, changes: &[Changes], op: Binary, a: Id, b: Id) -> Option<Clamp> {
    let apart = |a: Id, b: Id| match changes[a.index()].cmp(&changes[b.index()]) {
        std::cmp::Ordering::Greater => Some((a, b)),
        std::cmp::Ordering::Less => Some((b, a)),
        std::cmp::Ordering::Equal => None,
    };
    let (inner, outer_bound) = apart(a, b)?;
    let Node::Binary(of, a, b) = *g.node(inner) else { return None };
    if !matches!((op, of), (Binary::Min, Binary::Max) | (Binary::Max, Binary::Min)) {
        return None;
    }
    let (value, inner_bound) = apart(a, b)?;
    Some(Clamp { value, inner, inner_bound, outer_bound })
}

fn choose(g: &mut Graph, condition: Id, a: Option<Id>, b: Option<Id>) -> Option<Id> {
    if a.is_none() && b.is_none() {
        return None;
    }
    let zero = g.float(0.0);
    Some(g.select(condition, a.unwrap_or(zero), b.unwrap_or(zero)))
}
