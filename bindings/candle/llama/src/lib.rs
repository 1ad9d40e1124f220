//! A Llama of candle-transformers beside one whose attention is `candle_flash_attn::flash_attn`, on the same weights.
//!
//! The models of candle-transformers call candle-flash-attn in builds with CUDA alone (`use_flash_attn` of their
//! configuration). [`Llama`] is the same model with that call on any device, and shows what it computes on the CPU.

use candle_core::{D, DType, Device, Result, Tensor};
use candle_nn::{Embedding, Linear, Module, RmsNorm, VarBuilder, rotary_emb::rope};
pub use candle_transformers::models::llama::{Cache, Config, Llama as Original};
use std::collections::HashMap;

/// A small Llama with two query heads for each KV head.
pub fn config(use_flash_attn: bool) -> Config {
    Config {
        hidden_size: 128,
        intermediate_size: 256,
        vocab_size: 512,
        num_hidden_layers: 3,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        max_position_embeddings: 256,
        ..Config { use_flash_attn, ..Config::config_7b_v2(use_flash_attn) }
    }
}

/// Numbers that look like chance under the names that checkpoints have.
pub fn weights(config: &Config, dtype: DType, device: &Device) -> Result<VarBuilder<'static>> {
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    let mut noise = |shape: &[usize], middle: f32, reach: f32| {
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            middle + reach * ((state >> 40) as f32 / (1 << 23) as f32 - 1.0)
        };
        let data: Vec<f32> = (0..shape.iter().product()).map(|_| next()).collect();
        Tensor::from_vec(data, shape, device)?.to_dtype(dtype)
    };
    let Config { hidden_size: hidden, intermediate_size: wide, vocab_size: words, .. } = *config;
    let of_kv = hidden / config.num_attention_heads * config.num_key_value_heads;
    let mut tensors = HashMap::new();
    for name in ["model.embed_tokens", "lm_head"] {
        tensors.insert(format!("{name}.weight"), noise(&[words, hidden], 0.0, 1.0)?);
    }
    tensors.insert("model.norm.weight".to_owned(), noise(&[hidden], 1.0, 0.1)?);
    for layer in 0..config.num_hidden_layers {
        for name in ["input_layernorm", "post_attention_layernorm"] {
            tensors.insert(format!("model.layers.{layer}.{name}.weight"), noise(&[hidden], 1.0, 0.1)?);
        }
        let matrices = [
            ("self_attn.q_proj", hidden, hidden),
            ("self_attn.k_proj", of_kv, hidden),
            ("self_attn.v_proj", of_kv, hidden),
            ("self_attn.o_proj", hidden, hidden),
            ("mlp.gate_proj", wide, hidden),
            ("mlp.up_proj", wide, hidden),
            ("mlp.down_proj", hidden, wide),
        ];
        for (name, rows, columns) in matrices {
            let reach = 3.0 / (columns as f32).sqrt();
            tensors.insert(format!("model.layers.{layer}.{name}.weight"), noise(&[rows, columns], 0.0, reach)?);
        }
    }
    Ok(VarBuilder::from_tensors(tensors, dtype, device))
}

struct Layer {
    norms: [RmsNorm; 2],
    q: Linear,
    k: Linear,
    v: Linear,
    o: Linear,
    gate: Linear,
    up: Linear,
    down: Linear,
}

/// The model with attention by `candle_flash_attn::flash_attn`.
pub struct Llama {
    words: Embedding,
    layers: Vec<Layer>,
    norm: RmsNorm,
    head: Linear,
    config: Config,
    cos: Tensor,
    sin: Tensor,
    /// K and V of each layer, `[batch, rows, kv_heads, dim]`.
    cache: Vec<Option<(Tensor, Tensor)>>,
}

impl Llama {
    /// The model of these weights, with an empty cache.
    ///
    /// # Errors
    /// A weight that is missing or of another shape.
    pub fn load(vb: &VarBuilder<'_>, config: &Config) -> Result<Self> {
        let Config { hidden_size: hidden, intermediate_size: wide, vocab_size: words, .. } = *config;
        let dim = hidden / config.num_attention_heads;
        let of_kv = dim * config.num_key_value_heads;
        let linear = |name: &str, rows, columns| candle_nn::linear_no_bias(columns, rows, vb.pp(name));
        let norm = |name: &str| candle_nn::rms_norm(hidden, config.rms_norm_eps, vb.pp(name));
        let layers = (0..config.num_hidden_layers).map(|i| {
            let at = |name: &str| format!("model.layers.{i}.{name}");
            Ok(Layer {
                norms: [norm(&at("input_layernorm"))?, norm(&at("post_attention_layernorm"))?],
                q: linear(&at("self_attn.q_proj"), hidden, hidden)?,
                k: linear(&at("self_attn.k_proj"), of_kv, hidden)?,
                v: linear(&at("self_attn.v_proj"), of_kv, hidden)?,
                o: linear(&at("self_attn.o_proj"), hidden, hidden)?,
                gate: linear(&at("mlp.gate_proj"), wide, hidden)?,
                up: linear(&at("mlp.up_proj"), wide, hidden)?,
                down: linear(&at("mlp.down_proj"), hidden, wide)?,
            })
        });
        let half: Vec<f32> = (0..dim).step_by(2).map(|i| config.rope_theta.powf(-(i as f32) / dim as f32)).collect();
        let rows = config.max_position_embeddings as u32;
        let at = Tensor::arange(0, rows, vb.device())?.to_dtype(DType::F32)?.unsqueeze(1)?;
        let angles = at.matmul(&Tensor::new(half, vb.device())?.unsqueeze(0)?)?;
        Ok(Self {
            words: candle_nn::embedding(words, hidden, vb.pp("model.embed_tokens"))?,
            layers: layers.collect::<Result<_>>()?,
            norm: norm("model.norm")?,
            head: linear("lm_head", words, hidden)?,
            config: config.clone(),
            cos: angles.cos()?.to_dtype(vb.dtype())?,
            sin: angles.sin()?.to_dtype(vb.dtype())?,
            cache: vec![None; config.num_hidden_layers],
        })
    }

    /// Logits of the word after `[batch, rows]` words that stand behind the cached ones.
    ///
    /// # Errors
    /// As candle's operations.
    pub fn forward(&mut self, words: &Tensor) -> Result<Tensor> {
        let mut x = self.words.forward(words)?;
        for i in 0..self.layers.len() {
            x = (self.attend(i, &self.layers[i].norms[0].forward(&x)?)? + x)?;
            let layer = &self.layers[i];
            let inner = layer.norms[1].forward(&x)?;
            let inner = (layer.gate.forward(&inner)?.silu()? * layer.up.forward(&inner)?)?;
            x = (layer.down.forward(&inner)? + x)?;
        }
        let last = self.norm.forward(&x)?.narrow(1, x.dim(1)? - 1, 1)?.squeeze(1)?;
        self.head.forward(&last.contiguous()?)?.to_dtype(DType::F32)
    }

    fn attend(&mut self, i: usize, x: &Tensor) -> Result<Tensor> {
        let (batch, rows, hidden) = x.dims3()?;
        let Config { num_attention_heads: heads, num_key_value_heads: kv_heads, .. } = self.config;
        let dim = hidden / heads;
        let layer = &self.layers[i];
        let split = |y: Tensor, heads| y.reshape((batch, rows, heads, dim));
        let before = self.cache[i].as_ref().map_or(Ok(0), |(k, _)| k.dim(1))?;
        let (cos, sin) = (self.cos.narrow(0, before, rows)?, self.sin.narrow(0, before, rows)?);
        let turned = |y: Tensor| rope(&y.transpose(1, 2)?.contiguous()?, &cos, &sin)?.transpose(1, 2);
        let q = turned(split(layer.q.forward(x)?, heads)?)?;
        let mut k = turned(split(layer.k.forward(x)?, kv_heads)?)?;
        let mut v = split(layer.v.forward(x)?, kv_heads)?;
        if let Some((old_k, old_v)) = &self.cache[i] {
            (k, v) = (Tensor::cat(&[old_k, &k], 1)?, Tensor::cat(&[old_v, &v], 1)?);
        }
        // KV heads are not repeated: the call takes groups of heads.
        let y = candle_flash_attn::flash_attn(&q, &k, &v, 1.0 / (dim as f32).sqrt(), rows > 1)?;
        self.cache[i] = Some((k, v));
        self.layers[i].o.forward(&y.reshape((batch, rows, hidden))?)
    }
}

/// The `count` likeliest words behind a prompt, one after the other: `forward` gives the logits of the word after the
/// new ones, which stand at a position.
///
/// # Errors
/// What `forward` says.
pub fn generate(
    prompt: &[u32],
    count: usize,
    device: &Device,
    mut forward: impl FnMut(&Tensor, usize) -> Result<Tensor>,
) -> Result<Vec<u32>> {
    let (mut new, mut at, mut out) = (prompt.to_vec(), 0, Vec::with_capacity(count));
    while out.len() < count {
        let logits = forward(&Tensor::new(new.as_slice(), device)?.unsqueeze(0)?, at)?;
        at += new.len();
        let word = logits.squeeze(0)?.argmax(D::Minus1)?.to_scalar::<u32>()?;
        out.push(word);
        new = vec![word];
    }
    Ok(out)
}

/// [`generate`] by the model of candle-transformers, with its own attention or with that of candle-flash-attn (in
/// builds with CUDA alone).
///
/// # Errors
/// As candle's operations.
pub fn generate_original(vb: &VarBuilder<'_>, config: &Config, prompt: &[u32], count: usize) -> Result<Vec<u32>> {
    let model = Original::load(vb.clone(), config)?;
    let mut cache = Cache::new(true, vb.dtype(), config, vb.device())?;
    generate(prompt, count, vb.device(), |words, at| model.forward(words, at, &mut cache))
}
