//! Gradients are tuned on the CPU: what `tune` finds serves backward passes of other processes, an engine that tunes
//! finds its own, and a candidate whose gradients are wrong wins nowhere.

use crate::common::counted::{counted, engine};
use crate::common::{Place, SMALL, alone, fails};
use flashtune::{
    Backward, DType, Distribution, Dropout, Engine, Forward, HostTensor, Layout, Mask, Policy, Problem, SideInputs,
    Status, Stream,
};
use flashtune_codegen::Op;
use std::sync::atomic::Ordering;

/// Tensors of the problem that [`SMALL`] names, and what a call of theirs comes to.
struct Tensors {
    dropout: Dropout,
    read: [HostTensor; 4],
    o: HostTensor,
    lse: Vec<f32>,
    written: [HostTensor; 3],
}

impl Tensors {
    fn new(dtype: DType, rows: usize) -> Self {
        let shape = [1, 2, rows, 32];
        let read = [1, 2, 3, 4].map(|seed| HostTensor::random(dtype, shape, Layout::Bhsd, seed, Distribution::Normal));
        let empty = || HostTensor::poisoned(dtype, shape, Layout::Bhsd);
        let dropout = Dropout::default();
        Self { dropout, read, o: empty(), lse: vec![f32::NAN; 2 * rows], written: [empty(), empty(), empty()] }
    }

    fn run(&self, engine: &Engine) -> flashtune::Dispatch {
        let [q, k, v, dout] = self.read.each_ref().map(HostTensor::view);
        let [dq, dk, dv] = self.written.each_ref().map(HostTensor::view);
        let (lse, mask) = (self.lse.as_ptr() as u64, Mask::Causal);
        let dropout = self.dropout;
        let forward = Forward { lse: Some(lse), mask, dropout, ..Forward::new(q, k, v, self.o.view()) };
        let backward = Backward {
            dout,
            q,
            k,
            v,
            o: self.o.view(),
            lse,
            dlse: None,
            residual: None,
            dropout,
            dq,
            dk,
            dv,
            mask,
            scale: None,
            program: None,
            side: SideInputs::default(),
            packed: None,
            gradients: &[],
        };
        // SAFETY: the tensors live until the calls return, and outputs overlap nothing.
        unsafe {
            engine.forward(&forward, Stream(0)).unwrap();
            engine.backward(&backward, Stream(0)).unwrap().expect("there is something to compute")
        }
    }
}

fn backward(more: &[&'static str]) -> Vec<&'static str> {
    [SMALL, &["--op", "backward"], more].concat()
}

#[test]
fn tuned_gradients_serve_another_process() {
    let _alone = alone();
    let place = Place::new();
    let tuned = place.tune(&backward(&["--trials", "4", "--budget-s", "20"]));
    let of = &tuned["tuned"][0];
    assert_eq!(of["problem"], "backward-f32-d32-causal");
    assert!(of["trials"].as_array().is_some_and(|trials| trials.len() >= 2), "{of}");
    let opened = Engine::builder().cache_dir(place.cache()).on(counted()).build().unwrap();
    let tensors = Tensors::new(DType::F32, 128);
    let dispatch = tensors.run(&opened);
    assert_eq!(dispatch.plan.status(), Status::Tuned, "{}", dispatch.explain());
    assert_eq!(dispatch.plan.kernel().schedule.to_string(), of["schedule"].as_str().unwrap());
    assert!(tensors.written.iter().all(|t| t.values().iter().all(|x| x.is_finite())));
    // Twice is once.
    let again = place.tune(&backward(&["--trials", "4", "--budget-s", "20"]));
    assert_eq!(again["tuned"][0]["cached"], true);
    let listed = place.flashtune(&["list"]).output().unwrap();
    assert!(String::from_utf8_lossy(&listed.stdout).contains("backward-f32-d32-causal"));
}

/// Forward passes and gradients with dropout have records of their own.
#[test]
fn what_is_tuned_with_dropout_serves_calls_with_dropout() {
    let _alone = alone();
    let place = Place::new();
    let more = ["--dropout", "--trials", "3", "--budget-s", "20"];
    place.tune(&backward(&more));
    let tuned = place.tune(&[SMALL, &more].concat());
    assert_eq!(tuned["tuned"][0]["problem"], "forward-f32-dropout-d32-causal");
    let opened = Engine::builder().cache_dir(place.cache()).on(counted()).build().unwrap();
    let mut tensors = Tensors::new(DType::F32, 128);
    assert_ne!(tensors.run(&opened).plan.status(), Status::Tuned);
    tensors.dropout = Dropout::new(0.2, 3, 4);
    let dispatch = tensors.run(&opened);
    assert_eq!(dispatch.plan.status(), Status::Tuned, "{}", dispatch.explain());
    let forward = Problem { op: Op::Forward, ..dispatch.plan.kernel().problem };
    assert_eq!(opened.plan(&forward, &dispatch.shape).unwrap().status(), Status::Tuned);
    fails(&mut place.flashtune(&["tune", "--dropout", "--pages", "16", "--dry-run"]), 2, &["dropout", "packed"]);
    fails(&mut place.flashtune(&["bench", "--dropout", "--kv-lens", "3x50"]), 2, &["--dropout"]);
    for op in ["forward", "backward"] {
        let timed = [&["bench", "--op", op, "--dropout", "--rounds", "2"], SMALL].concat();
        let report = place.json(&timed);
        assert_eq!(report["points"][0]["case"]["mask"], "causal with dropout");
        assert!(report["checks"].as_array().is_some_and(|c| !c.is_empty() && c.iter().all(|c| c["passed"] == true)));
    }
}

#[test]
fn an_engine_that_tunes_tunes_its_gradients() {
    let _alone = alone();
    let (place, device) = (Place::new(), counted());
    let engine = engine(&place, &device, Policy::Tune);
    let tensors = Tensors::new(DType::F32, 96);
    let dispatch = tensors.run(&engine);
    let compiles = device.compiles.load(Ordering::SeqCst);
    assert!(matches!(dispatch.plan.status(), Status::Tuned), "{}", dispatch.explain());
    assert!(compiles > 4, "{compiles} kernels were compiled");
    tensors.run(&engine);
    assert_eq!(device.compiles.load(Ordering::SeqCst), compiles, "it was tuned twice");
}

#[test]
fn what_is_said_of_training_is_what_is_tuned() {
    let place = Place::new();
    let config = r#"{"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "hidden_size": 256, "max_position_embeddings": 512, "torch_dtype": "bfloat16"}"#;
    let file = place.path("config.json");
    std::fs::write(&file, config).unwrap();
    let model = file.to_str().unwrap();
    let said = place.json(&["tune", "--model", model, "--train", "--batch", "2,8", "--dry-run"]);
    let cases: Vec<(&str, &str)> = said["cases"]
        .as_array()
        .unwrap()
        .iter()
        .map(|c| (c["problem"].as_str().unwrap(), c["shape"].as_str().unwrap()))
        .collect();
    let (forward, backward) = ("forward-bf16-d64-causal", "backward-bf16-d64-causal");
    let [two, eight] = ["b2 h4/2 512x512 causal", "b8 h4/2 512x512 causal"];
    assert_eq!(cases, [(forward, two), (backward, two), (forward, eight), (backward, eight)]);
    let precise = place.json(&["tune", "--model", model, "--train", "--precise", "--dry-run"]);
    assert_eq!(precise["cases"][1]["problem"], "backward-bf16-residual-d64-causal");
    let dropped = place.json(&["tune", "--model", model, "--train", "--dropout", "--dry-run"]);
    assert_eq!(dropped["cases"][0]["problem"], "forward-bf16-dropout-d64-causal");
    fails(&mut place.flashtune(&["tune", "--model", model, "--dropout", "--dry-run"]), 2, &["--train"]);
    fails(&mut place.flashtune(&["tune", "--train"]), 2, &["--model"]);
    fails(&mut place.flashtune(&["tune", "--op", "backward", "--pages", "16", "--dry-run"]), 2, &["not tuned"]);
    fails(&mut place.flashtune(&["tune", "--model", model, "--op", "backward", "--dry-run"]), 2, &["--op"]);
    fails(
        &mut place.flashtune(&["tune", "--precise", "--dtype", "f32", "--dry-run"]),
        2,
        &["residual", "f32 loses nothing"],
    );
}

/// A fault in the template that small cases or the sizes themselves show costs the candidates that have it.
#[test]
fn candidates_with_wrong_gradients_are_refused() {
    let _alone = alone();
    for (from, to, word) in [
        // Only blocks that are not the default's.
        ("g < group; g++", "g < group - (BLOCK_KV != 64); g++", "dK["),
        (
            "narrow_row(to + i * stride, row, dim)",
            "narrow_row(to + i * stride, row, dim + 8 * (BLOCK_Q != 64))",
            "written",
        ),
    ] {
        let place = Place::new();
        let folder = place.path("templates/backward");
        std::fs::create_dir_all(&folder).unwrap();
        let embedded = flashtune_codegen::TemplateSet::embedded();
        let text = embedded.files().find(|(name, _)| *name == "backward/cpu.c").unwrap().1;
        assert!(text.contains(from), "{from}");
        std::fs::write(folder.join("cpu.c"), text.replace(from, to)).unwrap();
        let templates = place.path("templates");
        let arguments = backward(&["--trials", "6", "--budget-s", "20", "--templates"]);
        let tuned = place.tune(&[&arguments[..], &[templates.to_str().unwrap()]].concat());
        let said = tuned["tuned"][0]["trials"].to_string();
        assert!(said.contains("wrong answer") && said.contains(word), "{to}: {said}");
    }
}
