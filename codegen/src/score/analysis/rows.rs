//! Masks that leave each query one run of keys: its ends, as expressions over the query's row.
//!
//! Causal masks, windows, chunks, prefixes and documents are of this kind. A kernel then finds two numbers per row once
//! for a tile, in place of a condition per score: tiles are classified by them, exactly, and a block that is cut is
//! masked by a comparison with constants. Where a condition bounds an element of a tensor that is declared not to
//! decrease along the keys, the end of the run is the place where the elements pass a value, which is searched for at
//! run time.

use super::floats::is_followed;
use crate::score::graph::linear::Linear;
use crate::score::graph::{Graph, Node};
use crate::score::syntax::range::Range;
use crate::score::syntax::words::{Axis, Binary, Id, Type, Unary, Var};

/// More searches than this for a row are left to conditions per score.
const MAX_SEARCHES: usize = 4;

/// The run of keys of each query: from the greatest of `begin` and what is searched for, to the least of `end` and what
/// is searched for. Ends may lie outside of the keys, and the last before the first.
#[derive(Debug, Clone)]
pub struct RowKeys {
    /// The nodes of the program, and those of the ends.
    pub graph: Graph,
    /// Int: no earlier key is visible.
    pub begin: Id,
    /// Int: neither this key nor a later one is visible.
    pub end: Id,
    /// Ends that depend on the elements of tensors.
    pub searches: Vec<KeySearch>,
    /// Neither end ever comes before that of the row before: first and last row bound those between.
    pub nondecreasing: bool,
    /// Every run begins with the first key.
    pub from_first: bool,
    /// As a causal mask: runs begin with the first key, and end later from row to row.
    pub widens: bool,
    /// A handful of instructions finds both ends, without a search, a division or a load that changes with the row: to
    /// compute them again costs less than to keep them.
    pub is_cheap: bool,
}

/// The first key whose element is at least a value or, for an end, greater; `kv_len` if there is none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeySearch {
    /// The tensor, by its place among the declarations; it does not decrease along its last axis, which the key
    /// indexes.
    pub tensor: usize,
    /// The other indices.
    pub leading: Vec<Id>,
    /// Int.
    pub value: Id,
    /// It bounds the end of the run, not the begin.
    pub is_end: bool,
}

/// A run of keys; an end that is not there is that of all keys.
#[derive(Debug, Clone, Default)]
struct Run {
    begin: Option<Id>,
    end: Option<Id>,
    searches: Vec<KeySearch>,
}

impl RowKeys {
    /// The runs of a mask, if it is of this kind.
    pub(in crate::score) fn of(graph: &Graph, mask: Id) -> Option<Self> {
        let mut finder = Finder { graph: graph.clone() };
        let mut runs: Vec<Option<Run>> = Vec::with_capacity(mask.index() + 1);
        for id in graph.ids().take(mask.index() + 1) {
            let run = match *graph.node(id) {
                _ if graph.ty(id) != Type::Bool => None,
                _ if !graph.depends(id).kv => Some(finder.all_or_nothing(id)),
                Node::Binary(op @ (Binary::And | Binary::Or), a, b) => {
                    match (runs[a.index()].clone(), runs[b.index()].clone()) {
                        (Some(a), Some(b)) if op == Binary::And => finder.both(a, b),
                        (Some(a), Some(b)) => finder.either(a, b),
                        _ => None,
                    }
                }
                Node::Binary(op @ (Binary::Le | Binary::Eq), a, b) if graph.ty(a) == Type::Int => {
                    finder.comparison(op, a, b)
                }
                _ => None,
            };
            runs.push(run);
        }
        let run = runs.pop().flatten()?;
        let Finder { mut graph } = finder;
        let begin = run.begin.unwrap_or_else(|| graph.int(0));
        let end = run.end.unwrap_or_else(|| graph.var(Var::KvLen));
        let trends = trends(&graph);
        let grows = |id: &Id| matches!(trends[id.index()], Trend::Same | Trend::Up);
        let fixed = |id: &Id| trends[id.index()] == Trend::Same;
        let nondecreasing = [begin, end].iter().all(grows)
            && run.searches.iter().all(|s| grows(&s.value) && s.leading.iter().all(fixed));
        let from_first = graph.as_int(begin).is_some_and(|first| first <= 0) && run.searches.iter().all(|s| s.is_end);
        let widens = from_first && run.searches.is_empty() && trends[end.index()] == Trend::Up;
        let is_cheap = run.searches.is_empty() && is_cheap(&graph, [begin, end]);
        Some(Self { graph, begin, end, searches: run.searches, nondecreasing, from_first, widens, is_cheap })
    }
}

struct Finder {
    graph: Graph,
}

impl Finder {
    /// A condition that is the same for all keys.
    fn all_or_nothing(&mut self, condition: Id) -> Run {
        let g = &mut self.graph;
        if g.as_bool(condition) == Some(true) {
            return Run::default();
        }
        let (all, none) = (g.var(Var::KvLen), g.int(0));
        Run { end: Some(g.select(condition, all, none)), ..Run::default() }
    }

    fn both(&mut self, a: Run, b: Run) -> Option<Run> {
        let g = &mut self.graph;
        let mut join = |op, x: Option<Id>, y: Option<Id>| match (x, y) {
            (Some(x), Some(y)) => Some(g.binary(op, x, y)),
            (x, y) => x.or(y),
        };
        let (begin, end) = (join(Binary::Max, a.begin, b.begin), join(Binary::Min, a.end, b.end));
        let mut searches = a.searches;
        b.searches.into_iter().for_each(|s| {
            if !searches.contains(&s) {
                searches.push(s);
            }
        });
        (searches.len() <= MAX_SEARCHES).then_some(Run { begin, end, searches })
    }

    /// Two runs are one where both start with the first key, or both end with the last.
    fn either(&mut self, a: Run, b: Run) -> Option<Run> {
        if !a.searches.is_empty() || !b.searches.is_empty() {
            return None;
        }
        let g = &mut self.graph;
        match (a, b) {
            (Run { begin: None, end: None, .. }, _) | (_, Run { begin: None, end: None, .. }) => Some(Run::default()),
            (Run { begin: None, end: Some(x), .. }, Run { begin: None, end: Some(y), .. }) => {
                Some(Run { end: Some(g.binary(Binary::Max, x, y)), ..Run::default() })
            }
            (Run { begin: Some(x), end: None, .. }, Run { begin: Some(y), end: None, .. }) => {
                Some(Run { begin: Some(g.binary(Binary::Min, x, y)), ..Run::default() })
            }
            _ => None,
        }
    }

    /// `a <= b` or `a == b`.
    fn comparison(&mut self, op: Binary, a: Id, b: Id) -> Option<Run> {
        let (left, right) = (self.graph.linear(a), self.graph.linear(b));
        if !self.graph.is_safe(&left) || !self.graph.is_safe(&right) {
            // Nothing may be moved from one side to the other.
            return match (self.graph.depends(a).kv, self.graph.depends(b).kv) {
                (true, false) => self.bounded(a, (op == Binary::Eq).then_some(b), Some(b)),
                (false, true) => self.bounded(b, Some(a), (op == Binary::Eq).then_some(a)),
                _ => None,
            };
        }
        let difference = self.graph.sum_of(&left, &right.scaled(-1));
        self.sum_against_zero(op, &difference)
    }

    /// `sum <= 0` or `sum == 0`.
    fn sum_against_zero(&mut self, op: Binary, sum: &Linear) -> Option<Run> {
        if !self.graph.is_safe(sum) {
            return None;
        }
        let (factor, term, rest) = self.key_term(sum)?;
        // factor * term <= -rest.
        let g = &mut self.graph;
        let magnitude = g.int(factor.abs());
        if op == Binary::Eq {
            if factor.abs() != 1 {
                return None;
            }
            let value = g.sum(rest.scaled(-factor));
            return self.bounded(term, Some(value), Some(value));
        }
        if factor > 0 {
            let limit = g.sum(rest.scaled(-1));
            let limit = g.binary(Binary::FloorDiv, limit, magnitude);
            self.bounded(term, None, Some(limit))
        } else {
            let limit = g.sum(rest.scaled(-1));
            let limit = g.binary(Binary::FloorDiv, limit, magnitude);
            let limit = g.unary(Unary::Neg, limit);
            self.bounded(term, Some(limit), None)
        }
    }

    /// The only term that changes with the key, its factor, and the rest.
    fn key_term(&self, sum: &Linear) -> Option<(i64, Id, Linear)> {
        let (of_key, rest): (Vec<_>, Vec<_>) = sum.terms.iter().partition(|(_, t)| self.graph.depends(*t).kv);
        let &[(factor, term)] = &of_key[..] else { return None };
        Some((factor, term, Linear { terms: rest, constant: sum.constant }))
    }

    /// The keys for which a term is at least one value and at most another.
    fn bounded(&mut self, term: Id, least: Option<Id>, most: Option<Id>) -> Option<Run> {
        match self.graph.node(term).clone() {
            Node::Var(Var::Kv) => {
                let end = match most {
                    Some(most) => Some(self.plus(most, 1)?),
                    None => None,
                };
                Some(Run { begin: least, end, ..Run::default() })
            }
            Node::Binary(Binary::FloorDiv, x, d) => {
                let inner = self.graph.linear(x);
                let (1, key, rest) = self.key_term(&inner)? else { return None };
                let known = !self.graph.depends(d).kv && self.graph.range(d).lo > 0 && self.graph.is_safe(&inner);
                if *self.graph.node(key) != Node::Var(Var::Kv) || !known {
                    return None;
                }
                // x // d >= y is x >= y * d, and x // d <= y is x < (y + 1) * d.
                let begin = match least {
                    Some(y) => Some(self.quotient_limit(y, d, &rest)?),
                    None => None,
                };
                let end = match most {
                    Some(y) => {
                        let next = self.plus(y, 1)?;
                        Some(self.quotient_limit(next, d, &rest)?)
                    }
                    None => None,
                };
                Some(Run { begin, end, ..Run::default() })
            }
            Node::Unary(Unary::Abs, x) if least.is_none() => {
                let (inner, most) = (self.graph.linear(x), self.graph.linear(most?));
                if !self.graph.is_safe(&inner) || !self.graph.is_safe(&most) {
                    return None;
                }
                let most = most.scaled(-1);
                let (up, down) = (self.graph.sum_of(&inner, &most), self.graph.sum_of(&inner.scaled(-1), &most));
                let (up, down) = (self.sum_against_zero(Binary::Le, &up)?, self.sum_against_zero(Binary::Le, &down)?);
                self.both(up, down)
            }
            Node::Load { tensor, index } => {
                let declaration = &self.graph.declarations()[tensor];
                let (&last, leading) = index.split_last()?;
                let by_key = *self.graph.node(last) == Node::Var(Var::Kv)
                    && matches!(declaration.axes.as_ref()?.last()?, Axis::KvLen | Axis::Any)
                    && leading.iter().all(|i| !self.graph.depends(*i).kv);
                if !by_key || !declaration.nondecreasing {
                    return None;
                }
                let search = |value, is_end| KeySearch { tensor, leading: leading.to_vec(), value, is_end };
                let searches = least.map(|x| search(x, false)).into_iter().chain(most.map(|x| search(x, true)));
                Some(Run { searches: searches.collect(), ..Run::default() })
            }
            _ => None,
        }
    }

    /// A sum that cannot wrap.
    fn plus(&mut self, x: Id, constant: i64) -> Option<Id> {
        if self.graph.range(x) == Range::FULL {
            return None;
        }
        let constant = self.graph.int(constant);
        let sum = self.graph.binary(Binary::Add, x, constant);
        (self.graph.range(sum) != Range::FULL).then_some(sum)
    }

    /// `y * d - rest`.
    fn quotient_limit(&mut self, y: Id, d: Id, rest: &Linear) -> Option<Id> {
        let g = &mut self.graph;
        let product = g.binary(Binary::Mul, y, d);
        let product = (g.range(product) != Range::FULL).then(|| g.linear(product))?;
        let limit = g.sum_of(&product, &rest.scaled(-1));
        if !g.is_safe(&product) || !g.is_safe(&limit) {
            return None;
        }
        Some(g.sum(limit))
    }
}

/// Whether nodes are few, and neither load with the row nor divide but by a power of two.
fn is_cheap(graph: &Graph, roots: [Id; 2]) -> bool {
    let mut left = roots.to_vec();
    let mut seen = vec![false; graph.nodes().len()];
    while let Some(id) = left.pop() {
        if std::mem::replace(&mut seen[id.index()], true) {
            continue;
        }
        match *graph.node(id) {
            Node::Load { .. } if graph.depends(id).q => return false,
            ref node if is_followed(node) => return false,
            Node::Binary(Binary::FloorDiv | Binary::Mod, _, by)
                if !graph.as_int(by).is_some_and(|by| by > 0 && by & (by - 1) == 0) =>
            {
                return false;
            }
            _ => {}
        }
        left.extend(graph.node(id).operands());
    }
    // What a handful of instructions compute.
    seen.iter().filter(|seen| **seen).count() <= 24
}

/// How an int changes from one query row to the next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Trend {
    Same,
    Up,
    Down,
    Unknown,
}

impl Trend {
    fn turned(self) -> Self {
        match self {
            Trend::Up => Trend::Down,
            Trend::Down => Trend::Up,
            other => other,
        }
    }

    fn and(self, other: Self) -> Self {
        match (self, other) {
            (Trend::Same, x) | (x, Trend::Same) => x,
            (x, y) if x == y => x,
            _ => Trend::Unknown,
        }
    }
}

/// The trend of every node; unknown for what is no int and changes.
fn trends(graph: &Graph) -> Vec<Trend> {
    let mut trends: Vec<Trend> = Vec::with_capacity(graph.nodes().len());
    for id in graph.ids() {
        let of = |x: Id| trends[x.index()];
        let wraps = graph.range(id) == Range::FULL;
        let trend = match graph.node(id) {
            _ if !graph.depends(id).q => Trend::Same,
            Node::Var(Var::Q) => Trend::Up,
            _ if graph.ty(id) != Type::Int => Trend::Unknown,
            Node::Load { tensor, index } => {
                let (last, leading) = index.split_last().expect("a tensor has an axis");
                let along = graph.declarations()[*tensor].nondecreasing;
                match leading.iter().all(|i| of(*i) == Trend::Same) && along && of(*last) == Trend::Up {
                    true => Trend::Up,
                    false => Trend::Unknown,
                }
            }
            _ if wraps => Trend::Unknown,
            Node::Unary(Unary::Neg, x) => of(*x).turned(),
            Node::Binary(Binary::Add | Binary::Min | Binary::Max, x, y) => of(*x).and(of(*y)),
            Node::Binary(Binary::Sub, x, y) => of(*x).and(of(*y).turned()),
            Node::Binary(Binary::Mul, x, y) => match (of(*x), of(*y), graph.range(*x), graph.range(*y)) {
                (t, Trend::Same, _, by) | (Trend::Same, t, by, _) if by.lo >= 0 => t,
                (t, Trend::Same, _, by) | (Trend::Same, t, by, _) if by.hi <= 0 => t.turned(),
                _ => Trend::Unknown,
            },
            Node::Binary(Binary::FloorDiv, x, d) if of(*d) == Trend::Same && graph.range(*d).lo > 0 => of(*x),
            _ => Trend::Unknown,
        };
        trends.push(trend);
    }
    trends
}
