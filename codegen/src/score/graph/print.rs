//! The text of a graph: what is shown, hashed and stored. Reading it gives the same graph.

use super::{Graph, Node};
use crate::score::syntax::words::{Binary, Id, Unary};
use std::fmt::Write;

/// Declarations and named results as statements. A node that is used more than once gets a name of its own, so the text
/// grows with the graph and not with the tree that it stands for.
pub(crate) fn print(graph: &Graph, results: &[(&str, Id)]) -> String {
    let mut uses = graph.uses();
    for (_, id) in results {
        uses[id.index()] += 1;
    }
    let mut out = String::new();
    for declaration in graph.declarations() {
        let _ = writeln!(out, "{declaration};");
    }
    let mut names: Vec<Option<u32>> = vec![None; graph.nodes().len()];
    let mut count = 0;
    for id in graph.ids() {
        let leaf =
            matches!(graph.node(id), Node::Bool(_) | Node::Int(_) | Node::Float(_) | Node::Var(_) | Node::Scalar(_));
        if !leaf && uses[id.index()] > 1 {
            let _ = write!(out, "_{count} = ");
            expression(graph, id, &names, &mut out);
            out.push_str(";\n");
            names[id.index()] = Some(count);
            count += 1;
        }
    }
    for (name, id) in results {
        let _ = write!(out, "{name} = ");
        expression(graph, *id, &names, &mut out);
        out.push_str(";\n");
    }
    out
}

/// What is still to be printed.
/// What is still to be printed.
enum Pending {
    Text(&'static str),
    /// A node, in brackets if it binds less tightly.
    Node(Id, u8),
}

fn expression(graph: &Graph, root: Id, names: &[Option<u32>], out: &mut String) {
    let mut parts = vec![Pending::Node(root, 0)];
    while let Some(part) = parts.pop() {
        let (id, around) = match part {
            Pending::Text(text) => {
                out.push_str(text);
                continue;
            }
            Pending::Node(id, around) => (id, around),
        };
        if let Some(n) = names[id.index()] {
            let _ = write!(out, "_{n}");
            continue;
        }
        // What follows is pushed in reverse.
        match graph.node(id) {
            Node::Bool(x) => _ = write!(out, "{x}"),
            Node::Int(i64::MIN) => _ = write!(out, "({} - 1)", i64::MIN + 1),
            Node::Int(x) => number(out, &x.to_string(), around),
            Node::Float(bits) => match f32::from_bits(*bits) {
                x if x.is_nan() => out.push_str("nan"),
                x => number(out, &format!("{x:?}"), around),
            },
            Node::Var(v) => out.push_str(v.name()),
            Node::Scalar(i) => out.push_str(&graph.declarations()[*i].name),
            Node::Load { tensor, index } => {
                let _ = write!(out, "{}[", graph.declarations()[*tensor].name);
                parts.push(Pending::Text("]"));
                list(&mut parts, index);
            }
            Node::Extreme { tensor, first, last, greatest } => {
                let which = if *greatest { "greatest" } else { "least" };
                let _ = write!(out, "{which}({}[", graph.declarations()[*tensor].name);
                parts.push(Pending::Text("])"));
                list(&mut parts, last);
                parts.push(Pending::Text(" to "));
                list(&mut parts, first);
            }
            Node::Unary(op @ (Unary::Neg | Unary::Not), a) => {
                let (text, binds) = if *op == Unary::Neg { ("-", 7) } else { ("not ", 3) };
                if binds < around {
                    parts.push(Pending::Text(")"));
                    out.push('(');
                }
                // `- 5` would be read as a number, and `--x` is hard to read.
                parts.push(Pending::Node(*a, binds + 1));
                out.push_str(text);
            }
            Node::Unary(op, a) => {
                let _ = write!(out, "{}(", op.name());
                parts.extend([Pending::Text(")"), Pending::Node(*a, 0)]);
            }
            Node::Binary(op @ (Binary::Min | Binary::Max), a, b) => {
                let _ = write!(out, "{}(", op.name());
                parts.push(Pending::Text(")"));
                list(&mut parts, &[*a, *b]);
            }
            Node::Binary(op, a, b) => {
                let binds = match op {
                    Binary::Or => 1,
                    Binary::And => 2,
                    Binary::Lt | Binary::Le | Binary::Eq | Binary::Ne => 4,
                    Binary::Add | Binary::Sub => 5,
                    _ => 6,
                };
                if binds < around {
                    parts.push(Pending::Text(")"));
                    out.push('(');
                }
                // Comparisons do not associate; the others do to the left.
                let left = if binds == 4 { 5 } else { binds };
                parts.extend([Pending::Node(*b, binds + 1), Pending::Text(" "), Pending::Text(op.name())]);
                parts.extend([Pending::Text(" "), Pending::Node(*a, left)]);
            }
            Node::Select(c, a, b) => {
                out.push_str("select(");
                parts.push(Pending::Text(")"));
                list(&mut parts, &[*c, *a, *b]);
            }
        }
    }
}

fn list(parts: &mut Vec<Pending>, ids: &[Id]) {
    for (i, id) in ids.iter().enumerate().rev() {
        parts.push(Pending::Node(*id, 0));
        if i > 0 {
            parts.push(Pending::Text(", "));
        }
    }
}

/// A number; in brackets where a minus sign would bind to something else.
fn number(out: &mut String, text: &str, around: u8) {
    match text.starts_with('-') && around > 7 {
        true => _ = write!(out, "({text})"),
        false => out.push_str(text),
    }
}
