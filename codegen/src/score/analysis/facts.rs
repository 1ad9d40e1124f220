//! What the change of a score takes for each score: counts of nodes of the graph. What they are worth in registers or
//! time is for each kernel family to judge.

use super::bias::Bias;
use super::far::reaches_far;
use super::floats::is_followed;
use crate::score::graph::{Graph, Node};
use crate::score::syntax::words::{Binary, Id, Type, Unary, Var};

/// What a program computes for every score beside the mask. Counts are of nodes, each computed once for a score at
/// most.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct ScoreFacts {
    /// The score changes; else all of this is 0.
    pub changes: bool,
    /// The change is to add what does not depend on the score.
    pub adds: bool,
    /// Nothing but biases ([`crate::score::Program::biases`]) changes with query and key, and there are some.
    pub biases_alone: bool,
    /// The score may be a finite number so far from zero that its product with log2(e) overflows, or is rounded by more
    /// than exponents are off otherwise.
    pub far: bool,
    /// Loads of elements of tensors that change with the key.
    pub loads_by_key: u32,
    /// Those by an index that is not the key itself, or of elements that are no floats.
    pub gathers: u32,
    /// Loads of floats of two bytes by the key itself: two of them make one register.
    pub halves_along_keys: u32,
    /// Divisions of ints by what is known at run time alone.
    pub divisions: u32,
    /// Calls of `tanh`.
    pub tanhs: u32,
    /// Calls of `exp`, `log`, `sqrt` and `sigmoid`, and floats as ints: each takes some registers beside its operand.
    pub functions: u32,
}

impl ScoreFacts {
    pub(in crate::score) fn of(graph: &Graph, score: Id, biases: &[Bias]) -> Self {
        let mut needed = vec![false; graph.nodes().len()];
        needed[score.index()] = true;
        let (adds, biases_alone) = (graph.adds_to_score(score), Bias::are_alone(graph, score, biases));
        let far = reaches_far(graph, score);
        let mut facts = Self { changes: true, adds, biases_alone, far, ..Self::default() };
        for id in graph.ids().collect::<Vec<_>>().into_iter().rev().filter(|id| *id <= score) {
            if !needed[id.index()] {
                continue;
            }
            let node = graph.node(id);
            node.operands().iter().for_each(|o| needed[o.index()] = true);
            match node {
                Node::Unary(Unary::Tanh, _) => facts.tanhs += 1,
                node if is_followed(node) => facts.functions += 1,
                Node::Load { tensor, index } => facts.load(graph, id, *tensor, index),
                Node::Binary(Binary::FloorDiv | Binary::Mod, _, by) if graph.as_int(*by).is_none() => {
                    facts.divisions += 1;
                }
                _ => {}
            }
        }
        facts
    }

    fn load(&mut self, graph: &Graph, id: Id, tensor: usize, index: &[Id]) {
        let Some((last, leading)) = index.split_last() else { return };
        if !graph.depends(id).kv {
            return;
        }
        let along_keys = *graph.node(*last) == Node::Var(Var::Kv)
            && graph.ty(id) == Type::Float
            && leading.iter().all(|i| !graph.depends(*i).kv);
        let halves = graph.declarations()[tensor].storage.bytes() == 2;
        self.loads_by_key += 1;
        self.gathers += u32::from(!along_keys);
        self.halves_along_keys += u32::from(along_keys && halves);
    }
}

#[cfg(test)]
mod tests {
    use super::ScoreFacts;
    use crate::score::Program;

    fn facts(text: &str) -> ScoreFacts {
        Program::parse(text).unwrap().score_facts()
    }

    #[test]
    fn loads_divisions_and_functions_are_counted() {
        let nothing = ScoreFacts::default();
        assert_eq!(facts("mask = kv // 3 <= q;"), nothing);
        let none = ScoreFacts { changes: true, adds: true, ..nothing };
        assert_eq!(facts("s: f32[heads]; score = score + s[h] * (kv - q);"), none);
        let half = "t: bf16[kv_len]; u: f32[heads, kv_len]; score = score + t[kv] * u[h, kv];";
        assert_eq!(facts(half), ScoreFacts { far: true, loads_by_key: 2, halves_along_keys: 1, ..none });
        let gather = "t: bf16[*]; i: i32[kv_len]; score = score + t[kv - 1] + i[kv];";
        assert_eq!(facts(gather), ScoreFacts { far: true, loads_by_key: 2, gathers: 2, ..none });
        let divides = "w: int; mask = kv // w == 1; score = score + (kv // w) + kv // 7 + q % w;";
        assert_eq!(facts(divides), ScoreFacts { divisions: 2, ..none });
        let functions = "mask = exp(0.5 * kv) < 9.5; score = sigmoid(score) + sqrt(abs(score)) + int_floor(0.1 * kv);";
        assert_eq!(facts(functions), ScoreFacts { functions: 3, adds: false, ..none });
        let tanh = "mask = tanh(0.5 * kv) < 0.5; score = tanh(score) + tanh(0.1 * kv);";
        assert_eq!(facts(tanh), ScoreFacts { tanhs: 2, adds: false, ..none });
    }

    #[test]
    fn a_change_that_adds_is_distinguished() {
        for (text, adds) in [
            ("t: bf16[q_len, kv_len]; score = score + t[q, kv];", true),
            ("t: bf16[q_len, kv_len]; score = 2.0 * t[q, kv] - 0.5 * kv + score - 1.0;", true),
            ("t: bf16[q_len, kv_len]; score = (score + select(kv > q, t[q, kv], -inf)) - exp2(t[q, kv]);", true),
            ("t: bf16[q_len, kv_len]; score = t[q, kv] - score;", false),
            ("t: bf16[q_len, kv_len]; score = 2.0 * score + t[q, kv];", false),
            ("t: bf16[q_len, kv_len]; score = score + score + t[q, kv];", false),
            ("t: bf16[q_len, kv_len]; score = max(score, t[q, kv]);", false),
            ("t: bf16[q_len, kv_len]; score = t[q, kv];", false),
            ("mask = kv <= q;", false),
        ] {
            assert_eq!(facts(text).adds, adds, "{text}");
        }
        // As deep as a program may be.
        let deep = format!("t: bf16[q_len, kv_len]; score = score{};", " + t[q, kv] * kv".repeat(1500));
        assert!(facts(&deep).adds);
    }
}
