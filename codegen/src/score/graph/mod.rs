//! Expressions as a graph of shared, normalised nodes.
//!
//! Every node is made by a constructor that folds constants, orders operands and interns the result
//! ([`normal`]), so two expressions of the same normal form are one node. A node's operands come before it:
//! every pass is a loop over ids, and no depth of nesting overflows the stack.

pub(in crate::score) mod arith;
pub(in crate::score) mod check;
mod compare;
pub(in crate::score) mod linear;
mod normal;
pub(in crate::score) mod print;

use crate::score::syntax::range::Range;
use crate::score::syntax::words::{Binary, Declaration, Id, Type, Unary, Var};
use linear::Linear;
use std::collections::HashMap;

/// What a node computes.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Node {
    /// A constant.
    Bool(bool),
    /// A constant.
    Int(i64),
    /// A constant, as the bits of an fp32; one NaN stands for all.
    Float(u32),
    /// A variable of the language.
    Var(Var),
    /// A run-time scalar, by its place among the declarations.
    Scalar(usize),
    /// An element of a side tensor. An index beyond an axis reads the nearest element.
    Load {
        /// The tensor, by its place among the declarations.
        tensor: usize,
        /// One int per axis.
        index: Vec<Id>,
    },
    /// The least or the greatest of a side tensor's elements in a box of indices; only in programs derived by
    /// [`crate::score::TileProgram`]. Of an empty box, and of one that is too large to look at, what the declaration
    /// allows. For bools: whether all are true, or any is.
    Extreme {
        /// The tensor, by its place among the declarations.
        tensor: usize,
        /// The least index of each axis.
        first: Vec<Id>,
        /// The greatest index of each axis.
        last: Vec<Id>,
        /// Which of the two.
        greatest: bool,
    },
    /// An operation on one node.
    Unary(Unary, Id),
    /// An operation on two nodes of one type.
    Binary(Binary, Id, Id),
    /// The second if the first holds, else the third.
    Select(Id, Id, Id),
}

impl Node {
    /// The operands.
    pub fn operands(&self) -> Vec<Id> {
        match self {
            Node::Load { index, .. } => index.clone(),
            Node::Extreme { first, last, .. } => [&first[..], last].concat(),
            Node::Unary(_, a) => vec![*a],
            Node::Binary(_, a, b) => vec![*a, *b],
            Node::Select(c, a, b) => vec![*c, *a, *b],
            _ => Vec::new(),
        }
    }

    /// The same operation on other operands.
    pub(super) fn with_operands(&self, map: impl Fn(Id) -> Id) -> Node {
        match self {
            Node::Load { tensor, index } => {
                Node::Load { tensor: *tensor, index: index.iter().map(|i| map(*i)).collect() }
            }
            Node::Extreme { tensor, first, last, greatest } => {
                let ends = [first, last].map(|ids| ids.iter().map(|i| map(*i)).collect());
                let [first, last] = ends;
                Node::Extreme { tensor: *tensor, first, last, greatest: *greatest }
            }
            Node::Unary(op, a) => Node::Unary(*op, map(*a)),
            Node::Binary(op, a, b) => Node::Binary(*op, map(*a), map(*b)),
            Node::Select(c, a, b) => Node::Select(map(*c), map(*a), map(*b)),
            leaf => leaf.clone(),
        }
    }
}

/// Which coordinates a value changes with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) struct Depends {
    /// The score.
    pub score: bool,
    /// The key's row.
    pub kv: bool,
    /// The query's row.
    pub q: bool,
}

impl Depends {
    fn and(self, other: Self) -> Self {
        Self { score: self.score || other.score, kv: self.kv || other.kv, q: self.q || other.q }
    }
}

/// What is known of a node.
#[derive(Debug, Clone)]
pub(super) struct Info {
    pub ty: Type,
    /// Values of an int, whatever the sizes are.
    pub range: Range,
    pub depends: Depends,
    /// Sorts operands, the same for the same expression in every graph.
    pub key: (u8, u128),
    /// The node as a sum, for a sum.
    pub linear: Option<Linear>,
    /// The operands of a chain of `and` or of `or`, for a chain.
    pub chain: Option<Vec<Id>>,
}

/// Interned nodes over a list of declarations.
#[derive(Debug, Clone, Default)]
pub struct Graph {
    declarations: Vec<Declaration>,
    nodes: Vec<Node>,
    pub(super) infos: Vec<Info>,
    interned: HashMap<Node, Id>,
}

impl Graph {
    /// An empty graph over some scalars and tensors.
    pub fn new(declarations: Vec<Declaration>) -> Self {
        Self { declarations, ..Self::default() }
    }

    /// The scalars and tensors that nodes refer to.
    pub fn declarations(&self) -> &[Declaration] {
        &self.declarations
    }

    pub(super) fn declarations_mut(&mut self) -> &mut Vec<Declaration> {
        &mut self.declarations
    }

    /// All nodes, operands before those that use them.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// Every id.
    pub fn ids(&self) -> impl Iterator<Item = Id> + use<> {
        (0..self.nodes.len() as u32).map(Id)
    }

    /// What a node computes.
    pub fn node(&self, id: Id) -> &Node {
        &self.nodes[id.index()]
    }

    /// Its type.
    pub fn ty(&self, id: Id) -> Type {
        self.infos[id.index()].ty
    }

    /// The values that an int can take whatever the sizes are.
    pub fn range(&self, id: Id) -> Range {
        self.infos[id.index()].range
    }

    /// Which coordinates it changes with.
    pub(crate) fn depends(&self, id: Id) -> Depends {
        self.infos[id.index()].depends
    }

    /// Whether a node is the score and what does not depend on it, added up.
    pub(crate) fn adds_to_score(&self, mut id: Id) -> bool {
        let fixed = |id: Id| !self.depends(id).score;
        loop {
            id = match *self.node(id) {
                Node::Binary(Binary::Add | Binary::Sub, x, y) if fixed(y) => x,
                Node::Binary(Binary::Add, x, y) if fixed(x) => y,
                Node::Var(Var::Score) => return true,
                _ => return false,
            };
        }
    }

    /// What operands are sorted by: variables in a fixed order, then scalars, tensors, and the rest by their content.
    pub(crate) fn key(&self, id: Id) -> (u8, u128) {
        self.infos[id.index()].key
    }

    /// The value of an int constant.
    pub fn as_int(&self, id: Id) -> Option<i64> {
        match self.node(id) {
            Node::Int(x) => Some(*x),
            _ => None,
        }
    }

    /// The value of a float constant.
    pub fn as_float(&self, id: Id) -> Option<f32> {
        match self.node(id) {
            Node::Float(bits) => Some(f32::from_bits(*bits)),
            _ => None,
        }
    }

    /// The value of a bool constant.
    pub fn as_bool(&self, id: Id) -> Option<bool> {
        match self.node(id) {
            Node::Bool(x) => Some(*x),
            _ => None,
        }
    }

    /// An int as a sum; of itself alone if it is none.
    pub(crate) fn linear(&self, id: Id) -> Linear {
        match (&self.infos[id.index()].linear, self.node(id)) {
            (Some(linear), _) => linear.clone(),
            (None, Node::Int(x)) => Linear { terms: Vec::new(), constant: *x },
            (None, _) => Linear { terms: vec![(1, id)], constant: 0 },
        }
    }

    /// The operands of a chain of `and` or of `or`, sorted; the node itself if it is none.
    pub(crate) fn chain(&self, op: Binary, id: Id) -> Vec<Id> {
        match (&self.infos[id.index()].chain, self.node(id)) {
            (Some(chain), Node::Binary(o, ..)) if *o == op => chain.clone(),
            _ => vec![id],
        }
    }

    /// The sum of two sums of nodes.
    pub(crate) fn sum_of(&self, a: &Linear, b: &Linear) -> Linear {
        let mut terms = Vec::with_capacity(a.terms.len() + b.terms.len());
        let constant = a.constant.wrapping_add(b.constant);
        let (mut a, mut b) = (a.terms.iter().copied().peekable(), b.terms.iter().copied().peekable());
        loop {
            let term = match (a.peek(), b.peek()) {
                (None, None) => break,
                (Some((c, x)), Some((d, y))) if x == y => {
                    let both = (c.wrapping_add(*d), *x);
                    b.next();
                    a.next();
                    both
                }
                (Some((_, x)), Some((_, y))) if self.key(*x) > self.key(*y) => b.next().expect("peeked"),
                (Some(_), _) => a.next().expect("peeked"),
                (None, Some(_)) => b.next().expect("peeked"),
            };
            if term.0 != 0 {
                terms.push(term);
            }
        }
        Linear { terms, constant }
    }

    /// Interns a node that is in normal form already. `range`, `linear` and `chain` say what is known beyond it.
    pub(super) fn intern(&mut self, node: Node, range: Range, linear: Option<Linear>, chain: Option<Vec<Id>>) -> Id {
        if let Some(id) = self.interned.get(&node) {
            return *id;
        }
        let ty = self.type_of(&node);
        let depends = match &node {
            Node::Var(Var::Score) => Depends { score: true, ..Depends::default() },
            Node::Var(Var::Kv | Var::KvFirst | Var::KvLast) => Depends { kv: true, ..Depends::default() },
            Node::Var(Var::Q | Var::QFirst | Var::QLast) => Depends { q: true, ..Depends::default() },
            _ => node.operands().iter().fold(Depends::default(), |d, i| d.and(self.depends(*i))),
        };
        let key = self.key_of(&node);
        let id = Id(u32::try_from(self.nodes.len()).expect("programs are limited to far fewer nodes"));
        self.infos.push(Info { ty, range, depends, key, linear, chain });
        self.nodes.push(node.clone());
        self.interned.insert(node, id);
        id
    }

    fn type_of(&self, node: &Node) -> Type {
        match node {
            Node::Bool(_) => Type::Bool,
            Node::Int(_) => Type::Int,
            Node::Float(_) => Type::Float,
            Node::Var(v) => v.ty(),
            Node::Scalar(i) => self.declarations[*i].storage.ty(),
            Node::Load { tensor, .. } | Node::Extreme { tensor, .. } => self.declarations[*tensor].storage.ty(),
            Node::Unary(Unary::Not, _) => Type::Bool,
            Node::Unary(Unary::ToFloat, _) => Type::Float,
            Node::Unary(op, _) if op.is_of_floats() => Type::Float,
            Node::Unary(op, _) if op.rounds() => Type::Int,
            // A sign or a magnitude.
            Node::Unary(_, a) => self.ty(*a),
            Node::Binary(op, ..) if op.is_logical() => Type::Bool,
            Node::Binary(_, a, _) => self.ty(*a),
            Node::Select(_, a, _) => self.ty(*a),
        }
    }

    fn key_of(&self, node: &Node) -> (u8, u128) {
        let rank = match node {
            Node::Var(v) => return (*v as u8, 0),
            Node::Scalar(_) => 20,
            Node::Load { .. } => 21,
            Node::Extreme { .. } | Node::Unary(..) | Node::Binary(..) | Node::Select(..) => 22,
            Node::Bool(_) | Node::Int(_) | Node::Float(_) => 23,
        };
        let mut digest = Digest(0);
        match node {
            Node::Scalar(i) | Node::Load { tensor: i, .. } => digest.text(&self.declarations[*i].name),
            Node::Extreme { tensor, greatest, .. } => {
                digest.text(if *greatest { "greatest" } else { "least" });
                digest.text(&self.declarations[*tensor].name);
            }
            Node::Unary(op, _) => digest.text(op.name()),
            // The same sign stands for one operation of ints and one of floats, told apart by the operands.
            Node::Binary(op, ..) => digest.text(op.name()),
            Node::Select(..) => digest.text("select"),
            Node::Bool(x) => digest.number(u64::from(*x)),
            Node::Int(x) => digest.number(*x as u64),
            Node::Float(x) => digest.number(u64::from(*x)),
            Node::Var(_) => {}
        }
        for operand in node.operands() {
            let (rank, key) = self.key(operand);
            digest.number(u64::from(rank));
            digest.number(key as u64);
            digest.number((key >> 64) as u64);
        }
        (rank, digest.0)
    }

    /// How often each node is an operand.
    pub(crate) fn uses(&self) -> Vec<u32> {
        let mut uses = vec![0; self.nodes.len()];
        for node in &self.nodes {
            for operand in node.operands() {
                uses[operand.index()] += 1;
            }
        }
        uses
    }

    /// The nodes that some roots need, and nothing else, in an order that depends on the roots alone, and the
    /// declarations sorted by name: all of them, or only those that are used.
    pub(crate) fn pruned(&self, roots: &[Id], all_declarations: bool) -> (Graph, Vec<Id>) {
        let mut used = vec![all_declarations; self.declarations.len()];
        let mut order = Vec::new();
        let mut seen = vec![false; self.nodes.len()];
        let mut stack: Vec<(Id, bool)> = roots.iter().rev().map(|r| (*r, false)).collect();
        while let Some((id, done)) = stack.pop() {
            if done {
                order.push(id);
                continue;
            }
            if std::mem::replace(&mut seen[id.index()], true) {
                continue;
            }
            if let Node::Scalar(i) | Node::Load { tensor: i, .. } | Node::Extreme { tensor: i, .. } = self.node(id) {
                used[*i] = true;
            }
            stack.push((id, true));
            stack.extend(self.node(id).operands().into_iter().rev().map(|o| (o, false)));
        }

        let mut kept: Vec<usize> = (0..self.declarations.len()).filter(|i| used[*i]).collect();
        kept.sort_by(|a, b| self.declarations[*a].name.cmp(&self.declarations[*b].name));
        let place = |old: usize| kept.iter().position(|k| *k == old).expect("a used declaration is kept");
        let mut graph = Graph::new(kept.iter().map(|k| self.declarations[*k].clone()).collect());
        let mut map: HashMap<Id, Id> = HashMap::new();
        for id in order {
            let node = match self.node(id).with_operands(|o| map[&o]) {
                Node::Scalar(i) => Node::Scalar(place(i)),
                Node::Load { tensor, index } => Node::Load { tensor: place(tensor), index },
                Node::Extreme { tensor, first, last, greatest } => {
                    Node::Extreme { tensor: place(tensor), first, last, greatest }
                }
                node => node,
            };
            let Info { range, linear, chain, .. } = &self.infos[id.index()];
            let new = graph.intern(node, *range, None, None);
            let linear = linear
                .as_ref()
                .map(|l| Linear { terms: l.terms.iter().map(|(c, t)| (*c, map[t])).collect(), constant: l.constant });
            let chain = chain.as_ref().map(|c| c.iter().map(|i| map[i]).collect());
            graph.infos[new.index()].linear = linear;
            graph.infos[new.index()].chain = chain;
            map.insert(id, new);
        }
        (graph, roots.iter().map(|r| map[r]).collect())
    }
}

/// A hash that is the same everywhere, to sort by: two nodes with the same one would merely keep the order in which
/// they were made.
struct Digest(u128);

impl Digest {
    fn number(&mut self, x: u64) {
        // The multiplier of a 128-bit congruential generator; what was mixed into the high half comes back to the low.
        self.0 = (self.0 ^ (x as u128 + 1)).wrapping_mul(0x2360_ed05_1fc6_5da4_4385_df64_9fcc_f645);
        self.0 ^= self.0 >> 67;
    }

    fn text(&mut self, text: &str) {
        text.bytes().for_each(|b| self.number(u64::from(b)));
        self.number(u64::MAX - 1);
    }
}
