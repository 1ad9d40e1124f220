//! The usual masks and score changes, written in the language.
//!
//! Rows of Q are aligned with those of K and V at the bottom right: query `q` is at position `q + kv_len - q_len`.

/// A program of a name: its text with named results, and what it is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Builtin {
    /// The name on the command line.
    pub name: &'static str,
    /// The program.
    pub text: &'static str,
    /// What it does and what its scalars and tensors are.
    pub about: &'static str,
}

/// Every built-in program.
pub const BUILTINS: [Builtin; 14] = [
    Builtin { name: "causal", text: "mask = kv <= q + kv_len - q_len;", about: "keys up to the query's own position" },
    Builtin {
        name: "sliding_window",
        text: "left: int in 0..1073741823; right: int in 0..1073741823;
               distance = kv - (q + kv_len - q_len);
               mask = -left <= distance and distance <= right;",
        about: "keys from `left` before the query's position to `right` after it",
    },
    Builtin {
        name: "chunked",
        text: "chunk: int in 1..1073741824;
               mask = kv // chunk == (q + kv_len - q_len) // chunk and kv <= q + kv_len - q_len;",
        about: "keys of the query's chunk of `chunk` keys, up to its position",
    },
    Builtin {
        name: "block_local",
        text: "block: int in 1..1073741824; mask = kv // block == (q + kv_len - q_len) // block;",
        about: "keys of the query's block of `block` keys",
    },
    Builtin {
        name: "prefix_lm",
        text: "prefix: i32[batch] in 0..1073741824; mask = kv < prefix[b] or kv <= q + kv_len - q_len;",
        about: "a prefix that all queries see, causal after it",
    },
    Builtin {
        name: "document",
        text: "doc_q: i32[batch, q_len] nondecreasing; doc_kv: i32[batch, kv_len] nondecreasing;
               mask = doc_q[b, q] == doc_kv[b, kv];",
        about: "packed sequences: a query sees the keys with its own document's number",
    },
    Builtin {
        name: "document_causal",
        text: "doc_q: i32[batch, q_len] nondecreasing; doc_kv: i32[batch, kv_len] nondecreasing;
               mask = doc_q[b, q] == doc_kv[b, kv] and kv <= q + kv_len - q_len;",
        about: "packed sequences, each causal",
    },
    Builtin {
        name: "dilated",
        text: "step: int in 1..1073741824;
               distance = q + kv_len - q_len - kv;
               mask = distance >= 0 and distance % step == 0;",
        about: "every `step`-th key back from the query's position",
    },
    Builtin {
        name: "alibi",
        text: "slope: f32[heads]; score = score + slope[h] * (kv - (q + kv_len - q_len));",
        about: "a penalty that grows with the distance, by head",
    },
    Builtin {
        name: "relative_bias",
        text: "bias: f32[heads, *]; reach: int in 0..1073741823;
               score = score + bias[h, clamp(kv - (q + kv_len - q_len), -reach, reach) + reach];",
        about: "a learned bias of the relative position, the same beyond `reach`",
    },
    Builtin {
        name: "soft_cap",
        text: "cap: float usually in 0..50; score = cap * tanh(score * (1.0 / cap));",
        about: "scores bent to stay within +-`cap`; up to 50 kernels use that bound",
    },
    Builtin {
        name: "additive_bias",
        text: "bias: f32[batch, heads, q_len, kv_len]; score = score + bias[b, h, q, kv];",
        about: "a bias for every score; axes of length 1 are broadcast",
    },
    Builtin {
        name: "boolean_mask",
        text: "visible: bool[batch, heads, q_len, kv_len]; mask = visible[b, h, q, kv];",
        about: "a mask in memory; axes of length 1 are broadcast",
    },
    Builtin {
        name: "attention_sinks",
        text: "sinks: f32[heads]; sink = sinks[h];",
        about: "a learned logit for each head that takes its part of the softmax",
    },
];

/// The built-in of a name.
pub fn builtin(name: &str) -> Option<Builtin> {
    BUILTINS.into_iter().find(|b| b.name == name)
}
