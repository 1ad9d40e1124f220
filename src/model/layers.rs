//! Which layers attend to what.

use super::Error;
use super::fields::Fields;
use std::collections::BTreeMap;
use std::fmt;

/// Largest length and window that a configuration may state.
pub(super) const LENGTH_MAX: u32 = 1 << 30;

/// What the queries of a layer may attend to.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum LayerKind {
    /// All keys up to the query's own.
    Causal,
    /// This many keys up to the query's own, itself included.
    Sliding(u32),
    /// The keys up to the query's own that lie in the same chunk of this many.
    Chunked(u32),
    /// Something that is not attention over K and V, by the name that the file gives it.
    Other(String),
}

impl fmt::Display for LayerKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LayerKind::Causal => f.write_str("causal"),
            LayerKind::Sliding(window) => write!(f, "causal, window of {window} keys"),
            LayerKind::Chunked(chunk) => write!(f, "causal, chunks of {chunk} keys"),
            LayerKind::Other(name) => f.write_str(name),
        }
    }
}

/// The number of layers of each kind. `notes` takes what a reader of the file may wonder about.
pub(super) fn layer_kinds(
    fields: &Fields<'_>,
    model_type: &str,
    layers: u32,
    max_len: u32,
    notes: &mut Vec<String>,
) -> Result<BTreeMap<LayerKind, u32>, Error> {
    let window = fields.number("sliding_window", 1..=LENGTH_MAX)?;
    let chunk = fields.number("attention_chunk_size", 1..=LENGTH_MAX)?;
    let kinds = match fields.per_layer("layer_types", layers, "a text", |v| v.as_str())? {
        Some(types) => {
            let kind = |name: &str| match name {
                "full_attention" | "attention" => Ok(LayerKind::Causal),
                "sliding_attention" => window.map(LayerKind::Sliding).ok_or_else(|| fields.missing("sliding_window")),
                "chunked_attention" => {
                    chunk.map(LayerKind::Chunked).ok_or_else(|| fields.missing("attention_chunk_size"))
                }
                other => Ok(LayerKind::Other(other.to_owned())),
            };
            types.into_iter().map(kind).collect::<Result<Vec<_>, _>>()?
        }
        None => by_rule(fields, model_type, layers, window, chunk)?,
    };
    let mut counts = BTreeMap::new();
    for kind in kinds {
        // A limit that no sequence reaches is none.
        let kind = match kind {
            LayerKind::Sliding(n) | LayerKind::Chunked(n) if n >= max_len => {
                let note = format!("{kind}: no sequence of at most {max_len} reaches that far, so it is plain causal");
                if !notes.contains(&note) {
                    notes.push(note);
                }
                LayerKind::Causal
            }
            kind => kind,
        };
        *counts.entry(kind).or_insert(0) += 1;
    }
    Ok(counts)
}

/// The rules of the model types, for files that do not list their layers.
fn by_rule(
    fields: &Fields<'_>,
    model_type: &str,
    layers: u32,
    window: Option<u32>,
    chunk: Option<u32>,
) -> Result<Vec<LayerKind>, Error> {
    let each = |kind: &dyn Fn(u32) -> LayerKind| Ok((0..layers).map(kind).collect());
    if let Some(chunk) = chunk {
        // Layers without rotary positions see the whole sequence.
        let listed = fields.per_layer("no_rope_layers", layers, "0 or 1", |v| v.as_u64().filter(|n| *n < 2))?;
        let interval = match listed {
            Some(_) => None,
            None => fields.number("no_rope_layer_interval", 1..=10_000)?,
        };
        return each(&|i| {
            let chunked = match (&listed, interval) {
                (Some(listed), _) => listed[i as usize] == 1,
                (None, Some(interval)) => !(i + 1).is_multiple_of(interval),
                (None, None) => true,
            };
            if chunked { LayerKind::Chunked(chunk) } else { LayerKind::Causal }
        });
    }
    // Qwen's files state a window that is not in use unless this flag is set.
    let optional = model_type.starts_with("qwen2") || model_type.starts_with("qwen3");
    let used = fields.flag("use_sliding_window")?.unwrap_or(!optional);
    let first_sliding = fields.number("max_window_layers", 0..=10_000)?;
    let pattern = fields.number("sliding_window_pattern", 1..=10_000)?;
    let Some(window) = window.filter(|_| used) else { return each(&|_| LayerKind::Causal) };
    each(&|i| {
        let sliding = match (model_type, first_sliding, pattern) {
            ("gemma2" | "gpt_oss", _, None) => i % 2 == 0,
            (_, _, Some(pattern)) => !(i + 1).is_multiple_of(pattern),
            (_, Some(first), None) if optional => i >= first,
            _ => true,
        };
        if sliding { LayerKind::Sliding(window) } else { LayerKind::Causal }
    })
}
