//! What kernels keep from one scope for later ones.

use super::Code;
use super::stmt::{Aspect, Expr, Name, Scope, Stmt};
use std::collections::{HashMap, HashSet};

impl Code {
    /// Finds what each query keeps for its scores, and a head for all.
    pub(super) fn keep(&mut self) {
        let scopes: HashMap<Name, Scope> = self.statements.iter().map(|s| (s.name, s.scope)).collect();
        let dear = self.dear();
        // With the first node that reads it, which orders parts of sums.
        let (mut rows, mut heads) = (HashMap::new(), HashSet::new());
        let mut read = |name: Name, by: Option<&Stmt>| match scopes.get(&name) {
            Some(Scope::Row) if by.is_none_or(|s| takes_along(s, name)) => {
                rows.entry(name).or_insert(by.map(|s| s.name));
            }
            // One that is cheap is computed again where it is read, and so needs what it reads.
            Some(Scope::Head) if dear.contains(&name) && by.is_none_or(|s| !dear.contains(&s.name)) => {
                heads.insert(name);
            }
            _ => {}
        };
        for s in &self.statements {
            s.expr.reads().into_iter().for_each(|name| read(name, Some(s)));
        }
        let cap = self.capped.iter().flat_map(|c| [&c.cap, &c.factor]);
        for x in self.results.iter().chain(self.shift.iter().flatten()).chain(cap) {
            x.reads().into_iter().for_each(|name| read(name, None));
        }
        let mut of_row: Vec<&Stmt> = self.statements.iter().filter(|s| rows.contains_key(&s.name)).collect();
        // Nodes, then parts of sums by the sum, caps, and addresses.
        of_row.sort_by_key(|s| match s.name {
            Name::Aspect(Aspect::Series, id) => (2, Some(Name::Node(id)), s.name),
            Name::Aspect(Aspect::First, id) => (3, Some(Name::Node(id)), s.name),
            Name::Aspect(..) => (1, rows[&s.name], s.name),
            _ => (0, None, s.name),
        });
        let of_head = self.statements.iter().filter(|s| heads.contains(&s.name));
        self.kept_of_head = of_head.map(|s| (s.ty, s.name)).collect();
        self.kept_of_row = of_row.into_iter().map(|s| (s.ty, s.name)).collect();
    }

    /// The statements of a head that are better kept than computed again, for themselves or for what they are computed
    /// from.
    fn dear(&self) -> HashSet<Name> {
        let mut dear = HashSet::new();
        for s in self.of(Scope::Head) {
            if s.is_dear() || s.expr.reads().iter().any(|name| dear.contains(name)) {
                dear.insert(s.name);
            }
        }
        dear
    }
}

/// Whether a statement takes a value of its row along to a later scope.
///
/// Parts that are computed ahead for a sum, a cap or an address count as the node that they belong to, although that
/// one reads no other node's value: compilers drop it, but without it they order the instructions of 4 of 84 kernels of
/// random programs otherwise. Converted ints are statements of their own.
fn takes_along(s: &Stmt, name: Name) -> bool {
    let is_ahead = matches!((s.name, name), (Name::Aspect(..), Name::Node(_))) && !matches!(s.expr, Expr::Cast(..));
    s.scope != Scope::Row || is_ahead
}
