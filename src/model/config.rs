//! A model's attention as its configuration states it.

use super::Error;
use super::fields::Fields;
use super::gap::Gap;
use super::layers::{LENGTH_MAX, LayerKind, layer_kinds};
use flashtune_codegen::DType;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

/// Configurations are small; what is larger is something else.
const FILE_MAX: u64 = 16 << 20;
/// Largest number of heads and largest head dim that a configuration may state.
const COUNT_MAX: u32 = 1 << 16;
const LAYERS_MAX: u32 = 10_000;

/// Objects inside a multimodal model's file that hold the language model.
const LANGUAGE: [&str; 3] = ["text_config", "llm_config", "language_config"];
/// Objects that hold encoders of other kinds of input.
const ENCODERS: [&str; 3] = ["vision_config", "audio_config", "speech_config"];
/// Model types whose files are known; the layers of others are read by the common rules, with a note.
const KNOWN: [&str; 24] = [
    "llama",
    "llama4",
    "llama4_text",
    "mistral",
    "mistral3",
    "mixtral",
    "qwen2",
    "qwen2_moe",
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3",
    "qwen3_moe",
    "gemma",
    "gemma2",
    "gemma3",
    "gemma3_text",
    "phi",
    "phi3",
    "gpt_oss",
    "deepseek_v2",
    "deepseek_v3",
    "cohere2",
    "starcoder2",
    "olmo2",
];
/// Fields that change the scores or the heads in ways that are not read here.
const FOREIGN: [(&str, &str); 3] = [
    ("multi_query", "its way of stating KV heads is not read here; name the sizes with the other options"),
    ("blocksparse_block_size", "block-sparse masks are not supported yet"),
    (
        "attn_config",
        "its attention is stated in an object that is not read here; name the sizes with the other options",
    ),
];

/// A latent KV cache (multi-head latent attention).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Latent {
    /// Length of a cached row without the rotary part.
    pub rank: u32,
    /// Length of the rotary part.
    pub rope: u32,
}

/// What a configuration says about attention.
#[derive(Debug, Clone, PartialEq)]
pub struct Model {
    /// The `model_type` of the language model.
    pub model_type: String,
    /// Element type of the weights, if stated.
    pub dtype: Option<DType>,
    /// Query heads.
    pub heads: u32,
    /// KV heads.
    pub kv_heads: u32,
    /// Length of a row of Q and K.
    pub head_dim_qk: u32,
    /// Length of a row of V.
    pub head_dim_v: u32,
    /// Longest sequence.
    pub max_len: u32,
    /// How many layers attend to what.
    pub layers: BTreeMap<LayerKind, u32>,
    /// Scores pass through `cap * tanh(score / cap)`.
    pub soft_cap: Option<f64>,
    /// Every head has a learned score without a key.
    pub sinks: bool,
    /// A bias that falls with the distance, by head, is added to the scores.
    pub alibi: bool,
    /// The cache holds compressed rows.
    pub latent: Option<Latent>,
    /// What the model needs besides, and is not read or not supported.
    pub gaps: Vec<Gap>,
    /// What a reader of the plan should know.
    pub notes: Vec<String>,
}

/// Reads a configuration from a `config.json` or from the folder that holds it.
///
/// # Errors
/// [`Error::File`], and those of [`Model::from_json`].
pub fn read_model(path: &Path) -> Result<Model, Error> {
    let path = if path.is_dir() { path.join("config.json") } else { path.to_owned() };
    let fail = |message: String| Error::File { path: path.clone(), message };
    let metadata = std::fs::metadata(&path).map_err(|e| fail(e.to_string()))?;
    if !metadata.is_file() {
        return Err(fail("it is no file".into()));
    }
    if metadata.len() > FILE_MAX {
        return Err(fail(format!("it has {} MiB, configurations have a few KiB", metadata.len() >> 20)));
    }
    let bytes = std::fs::read(&path).map_err(|e| fail(e.to_string()))?;
    let text = String::from_utf8(bytes).map_err(|_| fail("it is no text".into()))?;
    Model::from_json(&text)
}

impl Model {
    /// Reads a configuration's text.
    ///
    /// # Errors
    /// [`Error::Json`] and [`Error::Field`].
    pub fn from_json(text: &str) -> Result<Model, Error> {
        // Some editors put a byte order mark in front.
        let value: Value =
            serde_json::from_str(text.trim_start_matches('\u{feff}')).map_err(|e| Error::Json(e.to_string()))?;
        let top = value.as_object().ok_or_else(|| Error::Json("it is no object".into()))?;
        let top = Fields::new(top, "");
        for name in LANGUAGE {
            // Files of plain models may have an empty one.
            if let Some(inner) = top.object(name)?.filter(|o| !o.is_empty()) {
                return read(&top, &Fields::new(inner, format!("{name}.")));
            }
        }
        read(&top, &top)
    }

    /// Number of layers.
    pub fn layer_count(&self) -> u32 {
        self.layers.values().sum()
    }
}

/// Reads the language model's fields; `top` is the whole file.
fn read(top: &Fields<'_>, fields: &Fields<'_>) -> Result<Model, Error> {
    let model_type = match fields.text("model_type")? {
        Some(name) => name,
        None => top.text("model_type")?.unwrap_or("unknown"),
    };
    if top.flag("is_encoder_decoder")? == Some(true) {
        let remedy = "name the sizes with the other options; only decoders are read";
        return Err(Error::field("is_encoder_decoder", "is true", remedy));
    }
    let mut notes = Vec::new();
    if !KNOWN.contains(&model_type) {
        notes.push(format!("the model type `{model_type}` is not a known one: it is read as a causal decoder"));
    }
    let heads = fields.required("num_attention_heads", 1..=COUNT_MAX)?;
    let kv_heads = fields.number("num_key_value_heads", 1..=COUNT_MAX)?.unwrap_or(heads);
    if !heads.is_multiple_of(kv_heads) {
        let problem = format!("is {heads}, no multiple of num_key_value_heads = {kv_heads}");
        return Err(Error::field(
            fields.name("num_attention_heads"),
            problem,
            "every KV head serves as many query heads",
        ));
    }
    let (head_dim_qk, head_dim_v, latent) = head_dims(fields, heads)?;
    // Rows of a latent cache expand to one KV head for each query head.
    let kv_heads = if latent.is_some() { heads } else { kv_heads };
    let layer_count = fields.required("num_hidden_layers", 1..=LAYERS_MAX)?;
    let max_len = fields.required("max_position_embeddings", 1..=LENGTH_MAX)?;
    let layers = layer_kinds(fields, model_type, layer_count, max_len, &mut notes)?;
    let soft_cap = match (fields.positive("attn_logit_softcapping")?, model_type) {
        // What the type's files mean when they leave it out.
        (None, "gemma2") if !fields.states("attn_logit_softcapping") => Some(50.0),
        (cap, _) => cap,
    };
    if let Some(scalar) = fields.positive("query_pre_attn_scalar")? {
        notes.push(format!(
            "its scores are scaled by 1/sqrt({scalar}): pass that with every call, the kernels take any"
        ));
    }
    notes.extend(fields.assumed());
    Ok(Model {
        model_type: model_type.to_owned(),
        dtype: dtype(top, fields)?,
        heads,
        kv_heads,
        head_dim_qk,
        head_dim_v,
        max_len,
        layers,
        soft_cap,
        sinks: model_type == "gpt_oss",
        alibi: is_set(fields, "alibi"),
        latent,
        gaps: other_gaps(top, fields),
        notes,
    })
}

/// Row lengths of Q and K, of V, and the latent cache if there is one.
fn head_dims(fields: &Fields<'_>, heads: u32) -> Result<(u32, u32, Option<Latent>), Error> {
    let dim = |name| fields.number(name, 1..=COUNT_MAX);
    if let Some(rank) = dim("kv_lora_rank")? {
        let nope = fields.required("qk_nope_head_dim", 1..=COUNT_MAX)?;
        let rope = fields.required("qk_rope_head_dim", 1..=COUNT_MAX)?;
        let v = fields.required("v_head_dim", 1..=COUNT_MAX)?;
        return Ok((nope + rope, v, Some(Latent { rank, rope })));
    }
    if let Some(dim) = dim("head_dim")? {
        return Ok((dim, dim, None));
    }
    let Some(hidden) = fields.number("hidden_size", 1..=1 << 24)? else { return Err(fields.missing("head_dim")) };
    if !hidden.is_multiple_of(heads) {
        let problem = format!("is {hidden}, no multiple of num_attention_heads = {heads}");
        return Err(Error::field(fields.name("hidden_size"), problem, "state head_dim where the two do not divide"));
    }
    Ok((hidden / heads, hidden / heads, None))
}

/// The element type; both names are in use, and multimodal files may state it outside.
fn dtype(top: &Fields<'_>, fields: &Fields<'_>) -> Result<Option<DType>, Error> {
    for (place, name) in [(fields, "dtype"), (fields, "torch_dtype"), (top, "dtype"), (top, "torch_dtype")] {
        let Some(text) = place.text(name)?.filter(|t| *t != "auto") else { continue };
        let text = text.strip_prefix("torch.").unwrap_or(text);
        // Weights may be of eight bits, but not what the layers compute in.
        return match text.parse() {
            Ok(dtype) if dtype != DType::E4m3 => Ok(Some(dtype)),
            _ => {
                let remedy = "state float16, bfloat16 or float32";
                Err(Error::field(place.name(name), format!("is `{text}`, in which no model computes"), remedy))
            }
        };
    }
    Ok(None)
}

/// Whether the file has a field that is not `false`.
fn is_set(fields: &Fields<'_>, name: &str) -> bool {
    fields.get(name).is_some_and(|v| !matches!(v, Value::Bool(false)))
}

/// What the file mentions and the plan cannot hold.
fn other_gaps(top: &Fields<'_>, fields: &Fields<'_>) -> Vec<Gap> {
    let mut gaps = Vec::new();
    for (name, text) in FOREIGN {
        if is_set(fields, name) {
            gaps.push(Gap::blocking(name, text));
        }
    }
    for name in ENCODERS {
        if top.get(name).is_some() {
            let text = "the attention of this encoder is not read; tune it by its sizes, with --mask full";
            gaps.push(Gap::partial(name, text));
        }
    }
    if top.get("vision_config").is_some() && fields.name("").starts_with("text_config") && is_gemma3(top) {
        let text = "image tokens attend to each other both ways, a mask that is not supported yet; text is served";
        gaps.push(Gap::partial("image tokens", text));
    }
    gaps
}

fn is_gemma3(top: &Fields<'_>) -> bool {
    matches!(top.text("model_type"), Ok(Some("gemma3")))
}
