//! Files in the shape of well-known models, and files with errors.

use super::*;
use flashtune_codegen::{Arch, CpuIsa, DType, KvStore, Mask, PageClass, ShapeBucket, SmArch};
use proptest::prelude::*;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

const H200: Arch = Arch::Sm(SmArch { number: 90, specific: true });

fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/models").join(name)
}

fn model(name: &str) -> Model {
    read_model(&file(&format!("{name}.json"))).unwrap_or_else(|e| panic!("{name}: {e}"))
}

fn limits() -> Limits {
    Limits {
        train: false,
        arch: H200,
        max_len: None,
        batches: vec![],
        tensor_parallel: 1,
        dtype: None,
        pages: vec![PageClass::Tokens(16)],
        stores: vec![KvStore::default()],
    }
}

fn serving(name: &str) -> Serving {
    Serving::of(&model(name), &limits()).unwrap()
}

fn features(serving: &Serving) -> Vec<&str> {
    let mut features: Vec<_> = serving.all_gaps().map(|(_, g)| g.feature.as_str()).collect();
    features.dedup();
    features
}

#[test]
fn the_layers_of_known_models_are_what_their_makers_say() {
    use LayerKind::{Causal, Chunked, Sliding};
    type Row = (&'static str, (u32, u32), (u32, u32), &'static [(LayerKind, u32)]);
    let rows: &[Row] = &[
        ("llama-3.1-8b", (32, 8), (128, 128), &[(Causal, 32)]),
        ("mistral-7b", (32, 8), (128, 128), &[(Sliding(4096), 32)]),
        ("mistral-no-window", (32, 8), (128, 128), &[(Causal, 40)]),
        ("qwen2.5-7b", (28, 4), (128, 128), &[(Causal, 28)]),
        ("qwen2-window", (28, 4), (128, 128), &[(Causal, 21), (Sliding(4096), 7)]),
        ("qwen3-8b", (32, 8), (128, 128), &[(Causal, 36)]),
        ("gemma-2-9b", (16, 8), (256, 256), &[(Causal, 21), (Sliding(4096), 21)]),
        ("gemma-3-1b", (4, 1), (256, 256), &[(Causal, 4), (Sliding(512), 22)]),
        ("gemma-3-4b", (8, 4), (256, 256), &[(Causal, 5), (Sliding(1024), 29)]),
        ("phi-2", (32, 32), (80, 80), &[(Causal, 32)]),
        ("phi-3-mini", (32, 32), (96, 96), &[(Sliding(2047), 32)]),
        ("phi-3-mini-128k", (32, 32), (96, 96), &[(Causal, 32)]),
        ("gpt-oss-20b", (64, 8), (64, 64), &[(Causal, 12), (Sliding(128), 12)]),
        ("llama-4-scout", (40, 8), (128, 128), &[(Causal, 12), (Chunked(8192), 36)]),
        ("deepseek-v3", (128, 128), (192, 128), &[(Causal, 61)]),
    ];
    for (name, (heads, kv_heads), (qk, v), layers) in rows {
        let m = model(name);
        assert_eq!((m.heads, m.kv_heads, m.head_dim_qk, m.head_dim_v), (*heads, *kv_heads, *qk, *v), "{name}");
        assert_eq!(m.layers.into_iter().collect::<Vec<_>>(), *layers, "{name}");
    }
}

#[test]
fn what_the_kernels_lack_is_said_and_blocks_only_what_it_must() {
    let rows: &[(&str, &[&str], bool)] = &[
        ("llama-3.1-8b", &[], true),
        ("gemma-2-9b", &[], true),
        ("gemma-3-4b", &["vision_config", "image tokens"], true),
        ("gpt-oss-20b", &[], true),
        ("llama-4-scout", &["vision_config"], true),
        ("deepseek-v3", &["head dim"], true),
        ("linear-mix", &["linear_attention"], true),
        ("alibi", &[], true),
    ];
    for (name, gaps, tuned) in rows {
        let serving = serving(name);
        assert_eq!(features(&serving), *gaps, "{name}");
        assert_eq!(!serving.cases().is_empty(), *tuned, "{name}");
        // Layers without cases always say why.
        for need in serving.needs.iter().filter(|n| n.cases.is_empty()) {
            assert!(need.gaps.iter().chain(&serving.gaps).any(|g| g.blocks), "{name}: {}", need.attention);
        }
    }
    // A compressed cache has rows of 512 + 64, which no kernel takes.
    assert!(serving("deepseek-v3").all_gaps().any(|(_, g)| g.blocks && g.text.contains("576")));
}

#[test]
fn caps_chunks_sinks_and_alibi_are_score_programs() {
    let texts = |name: &str| -> Vec<String> {
        let serving = serving(name);
        serving
            .needs
            .iter()
            .map(|n| n.problem.and_then(|p| p.program).map_or(String::new(), |p| p.text().to_owned()))
            .collect()
    };
    assert_eq!(texts("llama-3.1-8b"), [""]);
    let part = |name: &str, layer: usize, text: &str| assert!(texts(name)[layer].contains(text), "{:?}", texts(name));
    part("gemma-2-9b", 0, "tanh");
    part("gemma-2-9b", 1, "tanh");
    part("gpt-oss-20b", 0, "sink = sinks[h]");
    part("alibi", 0, "slope[h]");
    assert_eq!(texts("llama-4-scout")[0], "");
    part("llama-4-scout", 1, "kv // 8192");
    // What a host asks for by name, with the model's number as a scalar, is what was tuned.
    let cap = flashtune_codegen::score::builtin("soft_cap").unwrap().text;
    assert_eq!(texts("gemma-2-9b")[0], flashtune_codegen::score::Program::parse(cap).unwrap().text());
    assert_eq!(serving("gemma-2-9b").needs[1].attention, "causal, window of 4096 keys, scores within 50");
}

#[test]
fn a_window_counts_the_querys_own_key() {
    let mask = serving("mistral-7b").cases()[0].shape.mask;
    assert_eq!(mask, Mask::Window { left: Some(4095), right: Some(0) });
}

#[test]
fn prompts_and_decoding_are_covered_with_few_cases() {
    for name in ["llama-3.1-8b", "gemma-3-4b", "gpt-oss-20b", "llama-4-scout", "deepseek-v3", "mistral-7b"] {
        let serving = serving(name);
        let cases = serving.cases();
        let problems: std::collections::BTreeSet<_> = cases.iter().map(|c| c.problem).collect();
        assert!(cases.len() <= 14 * serving.needs.len(), "{name}: {} cases", cases.len());
        for case in &cases {
            case.shape.validate().unwrap();
            assert_eq!(case.shape.mask.kind(), case.problem.mask);
            assert!(case.shape.kv_len <= serving.max_len);
        }
        // No prompt length of 128 and more is further than one quartering from a length that was tuned.
        for problem in problems {
            if !problem.kv.is_dense() {
                // A cache is read by steps of decoding and by chunks, at every number of sequences.
                for (used_for, batch) in [(Use::Decode, 1), (Use::Decode, 16), (Use::Chunk, 1), (Use::Chunk, 16)] {
                    let is_it = |c: &&Case| (c.problem, c.used_for, c.shape.batch) == (problem, used_for, batch);
                    let case = cases.iter().find(is_it).expect("a case");
                    assert_eq!(case.pages, PageClass::Tokens(16), "{name}");
                    assert!(
                        (case.shape.q_len == 1) == (used_for == Use::Decode) && case.shape.q_len < case.shape.kv_len
                    );
                }
                continue;
            }
            for power in 7..=serving.max_len.ilog2() {
                let near = |c: &&Case| {
                    c.problem == problem && c.used_for == Use::Prefill && c.shape.q_len.ilog2().abs_diff(power) <= 2
                };
                assert!(cases.iter().any(|c| near(&c)), "{name}: {problem} at 2^{power}");
            }
            assert!(cases.iter().any(|c| c.problem == problem && c.used_for == Use::Decode && c.shape.q_len == 1));
        }
    }
}

#[test]
fn limits_bound_lengths_batches_and_devices() {
    let m = model("llama-3.1-8b");
    let with = |change: fn(&mut Limits)| {
        let mut limits = limits();
        change(&mut limits);
        Serving::of(&m, &limits)
    };
    let one = with(|l| l.max_len = Some(100)).unwrap();
    assert_eq!(one.cases().iter().map(|c| c.shape.kv_len).max(), Some(100));
    let batched = with(|l| l.batches = vec![3, 5]).unwrap();
    let of = |used_for, dense| {
        let of = |c: &&Case| c.used_for == used_for && c.problem.kv.is_dense() == dense;
        batched.cases().iter().filter(of).map(|c| (c.shape.batch, c.shape.q_len)).collect::<Vec<_>>()
    };
    assert_eq!(of(Use::Decode, true), [(3, 1), (5, 1), (3, 1), (5, 1)]);
    assert_eq!(of(Use::Decode, false), [(3, 1), (3, 1), (5, 1), (5, 1)]);
    assert_eq!(of(Use::Chunk, false), [(3, 170), (5, 102)]);
    let dense = with(|l| l.pages = vec![]).unwrap();
    assert!(dense.cases().iter().all(|c| c.problem.kv.is_dense()));
    let split = |n| Serving::of(&m, &Limits { tensor_parallel: n, ..limits() });
    assert_eq!(split(4).map(|s| (s.heads, s.kv_heads)).unwrap(), (8, 2));
    // More devices than KV heads: they share.
    assert_eq!(split(16).map(|s| (s.heads, s.kv_heads)).unwrap(), (2, 1));
    assert_eq!(with(|l| l.dtype = Some(DType::F16)).unwrap().dtype, DType::F16);
    for (bad, word) in [
        (split(3), "--tp is 3"),
        (split(0), "--tp is 0"),
        (split(64), "--tp is 64"),
        (with(|l| l.max_len = Some(0)), "--max-len is 0"),
        (with(|l| l.max_len = Some(131_073)), "131072"),
        (with(|l| l.batches = vec![1, 0]), "--batch is 0"),
        (with(|l| l.batches = vec![1 << 20]), "--batch"),
    ] {
        let e = bad.unwrap_err().to_string();
        assert!(e.contains(word), "{e}");
    }
}

#[test]
fn lengths_beyond_what_is_tuned_in_sensible_time_are_said() {
    let serving = Serving::of(&model("llama-3.1-8b"), &Limits { arch: Arch::Cpu(CpuIsa::Avx2), ..limits() }).unwrap();
    assert_eq!(serving.max_len, 2048);
    assert!(serving.notes.iter().any(|n| n.contains("2048") && n.contains("131072") && n.contains("--max-len")));
}

#[test]
fn a_device_without_a_kernel_for_the_dtype_is_a_gap() {
    let old = Arch::Sm(SmArch { number: 70, specific: false });
    let serving = Serving::of(&model("llama-3.1-8b"), &Limits { arch: old, ..limits() }).unwrap();
    assert!(serving.cases().is_empty() && features(&serving) == ["kernel family"]);
}

#[test]
fn what_a_file_leaves_out_is_taken_from_its_model_type_and_said() {
    let m = model("gemma-3-4b");
    assert!(m.notes.iter().any(|n| n.contains("text_config.num_attention_heads") && n.contains('8')), "{:?}", m.notes);
    // A plain field that is null is no invitation to guess.
    let text = json!({"model_type": "gemma2", "num_attention_heads": 8, "num_hidden_layers": 2, "head_dim": 64,
        "max_position_embeddings": 99999, "sliding_window": null, "attn_logit_softcapping": null});
    let m = Model::from_json(&text.to_string()).unwrap();
    assert_eq!((m.soft_cap, m.layers.into_iter().collect::<Vec<_>>()), (None, vec![(LayerKind::Causal, 2)]));
}

#[test]
fn files_with_errors_name_the_field() {
    for entry in std::fs::read_dir(file("bad")).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
        let e = read_model(&path).expect_err(&name).to_string();
        let word = match name.split('-').next().unwrap() {
            "heads" => "num_attention_heads",
            "hidden" if name.ends_with("missing") => "head_dim",
            "hidden" => "hidden_size",
            "layers" => "num_hidden_layers",
            "length" => "max_position_embeddings",
            "dtype" => "torch_dtype",
            "window" => "sliding_window",
            "types" if name.ends_with("window") => "sliding_window",
            "types" => "layer_types",
            "flag" => "use_sliding_window",
            "cap" => "attn_logit_softcapping",
            "encoder" => "is_encoder_decoder",
            "nested" => "text_config",
            "latent" => "qk_nope_head_dim",
            _ => "not JSON",
        };
        assert!(e.contains(word) && e.contains("; "), "{name}: {e}");
    }
    let e = read_model(&file("absent.json")).unwrap_err().to_string();
    assert!(e.contains("absent.json"), "{e}");
    let e = read_model(&file("bad")).unwrap_err().to_string();
    assert!(e.contains("bad/config.json"), "{e}");
    assert_eq!(read_model(&file("folder")).unwrap(), read_model(&file("folder/config.json")).unwrap());
}

/// Any small JSON value.
fn anything() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        (0u64..300).prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        "[a-z_0-9]{0,12}".prop_map(Value::from),
        prop::sample::select(vec!["full_attention", "sliding_attention", "bfloat16", "gemma2", "llama4_text", "qwen2"])
            .prop_map(Value::from),
    ];
    leaf.prop_recursive(2, 24, 6, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
            prop::collection::btree_map(
                prop::sample::select(vec!["head_dim", "num_attention_heads", "num_hidden_layers"])
                    .prop_map(String::from),
                inner,
                0..3
            )
            .prop_map(|m| Value::Object(m.into_iter().collect())),
        ]
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn any_values_in_any_fields_give_a_valid_plan_or_an_error(
        start in prop::sample::select(vec!["llama-3.1-8b", "gemma-3-4b", "gpt-oss-20b", "deepseek-v3", "qwen2-window"]),
        edits in prop::collection::vec((any::<prop::sample::Index>(), anything()), 1..4),
        tensor_parallel in 0u32..9,
    ) {
        let text = std::fs::read_to_string(file(&format!("{start}.json"))).unwrap();
        let mut value: Value = serde_json::from_str(&text).unwrap();
        for (at, new) in edits {
            let top = value.as_object_mut().unwrap();
            let fields = match top.get("text_config").is_some_and(Value::is_object) {
                true => top["text_config"].as_object_mut().unwrap(),
                false => top,
            };
            let names = ["model_type", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size",
                "num_hidden_layers", "max_position_embeddings", "sliding_window", "sliding_window_pattern",
                "layer_types", "max_window_layers", "use_sliding_window", "attention_chunk_size", "no_rope_layers",
                "torch_dtype", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "attn_logit_softcapping",
                "text_config"];
            fields.insert(names[at.index(names.len())].to_owned(), new);
        }
        let Ok(model) = Model::from_json(&value.to_string()) else { return Ok(()) };
        let Ok(serving) = Serving::of(&model, &Limits { tensor_parallel, ..limits() }) else { return Ok(()) };
        for case in serving.cases() {
            prop_assert!(case.problem.validate().is_ok() && case.shape.validate().is_ok());
            prop_assert!(ShapeBucket::of(&case.shape).parallel > 0);
        }
        for need in serving.needs.iter().filter(|n| n.cases.is_empty()) {
            prop_assert!(need.gaps.iter().chain(&serving.gaps).any(|g| g.blocks));
        }
    }
}
