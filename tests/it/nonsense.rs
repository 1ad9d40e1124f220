//! Bundles whose hashes all fit and whose content makes no sense: what a defective exporter signs is a miss or a
//! refusal.

use crate::common::{Place, SMALL, fails};
use flashtune::{DType, DeviceSpec, Engine, Mask, Policy, Problem, Shape};
use flashtune_cache::{
    Artifact, Bundle, BundleContents, CacheDir, Layers, Needed, Record, Trust, import, merge_bundles,
};
use serde_json::{Value, json};
use std::path::Path;

/// Places of a value that holds others, as JSON pointers, of numbers, booleans and texts. Of a long list the first.
fn leaves(value: &Value, at: &str, found: &mut Vec<String>) {
    match value {
        Value::Object(map) => map.iter().for_each(|(name, inner)| {
            let name = name.replace('~', "~0").replace('/', "~1");
            leaves(inner, &format!("{at}/{name}"), found);
        }),
        Value::Array(list) => {
            list.iter().take(1).enumerate().for_each(|(i, inner)| leaves(inner, &format!("{at}/{i}"), found));
        }
        Value::Null => {}
        _ => found.push(at.to_owned()),
    }
}

/// Every value with one leaf replaced by something of the same kind that nobody expects there.
fn nonsense(value: &Value) -> Vec<(String, Value)> {
    let mut places = Vec::new();
    leaves(value, "", &mut places);
    let mut all = Vec::new();
    for place in places {
        let others = match value.pointer(&place).expect("it was found there") {
            Value::Number(n) if n.is_f64() => vec![json!(-1.0)],
            Value::Number(_) => vec![json!(0), json!(u32::MAX)],
            Value::Bool(b) => vec![json!(!b)],
            Value::String(_) => vec![json!("\0".repeat(5000))],
            _ => continue,
        };
        for other in others {
            let mut changed = value.clone();
            *changed.pointer_mut(&place).expect("the same value") = other;
            all.push((place.clone(), changed));
        }
    }
    all
}

/// A bundle of one record and its artifact, as they are.
fn write(path: &Path, record: Record, artifact: &Artifact) {
    let mut load = |_: &flashtune_cache::Key| Some(artifact.clone());
    BundleContents { records: vec![record], artifacts: Vec::new(), load: &mut load, created: 1 }.write(path).unwrap();
}

#[test]
fn nonsense_with_valid_hashes_is_a_miss_or_a_refusal() {
    let place = Place::new();
    place.tune_small();
    let bundle = Bundle::map(&place.path("cache/v7/snapshot.ftb")).unwrap();
    let record = bundle.records().next().unwrap().unwrap().0;
    let artifact = bundle.artifact(&record.artifact).unwrap().unwrap();
    let problem = Problem::forward(DType::F32, 32, Mask::Causal.kind()).unwrap();
    let shape = Shape { batch: 1, heads: 2, kv_heads: 2, q_len: 128, kv_len: 128, mask: Mask::Causal };
    let path = place.path("nonsense.ftb");
    let trust = Trust::default().allow_unsigned(true);
    let (mut served, mut refused, mut skipped) = (0, 0, 0);
    let mut try_out = |what: &str, record: &Record, artifact: &Artifact| {
        write(&path, record.clone(), artifact);
        let builder = Engine::builder().device(DeviceSpec::Cpu).cache_dir(place.path("empty")).policy(Policy::Sealed);
        let engine = builder.bundle(&path).trust(trust.clone()).build().unwrap();
        match engine.plan(&problem, &shape) {
            Ok(plan) => {
                // What serves is the kernel that was asked for.
                let kernel = plan.kernel();
                assert!(kernel.problem == problem && kernel.check().is_ok(), "{what}: {}", kernel.name());
                let _ = plan.explain().to_string();
                served += 1;
            }
            Err(e) => {
                assert!(!e.to_string().is_empty());
                refused += 1;
            }
        }
        // On its way into other bundles and caches.
        let needed = Needed::new(record.key.device.arch, engine.templates());
        let dir = CacheDir::at(place.path("imported"));
        let layers = Layers::open(&dir, std::slice::from_ref(&path), None).map(|l| l.rivals(&needed, &record.key));
        drop(layers);
        let _ = merge_bundles(&[&path], &place.path("merged.ftb"), &trust);
    };
    try_out("itself", &record, &artifact);
    for (what, changed) in nonsense(&serde_json::to_value(&record).unwrap()) {
        match serde_json::from_value::<Record>(changed) {
            Ok(changed) => try_out(&what, &changed, &artifact),
            Err(_) => skipped += 1,
        }
    }
    // A kernel's bytes are only as good as who signed them; all else about it is looked at.
    let mut bare = serde_json::to_value(&artifact).unwrap();
    bare["bytes"] = json!([]);
    for (what, mut changed) in nonsense(&bare) {
        changed["bytes"] = json!(artifact.bytes);
        let Ok(changed) = serde_json::from_value::<Artifact>(changed) else { continue };
        try_out(&what, &record, &changed);
        // Under its own name it says so itself.
        try_out(&what, &Record { artifact: changed.recipe.key(), ..record.clone() }, &changed);
    }
    for bytes in [Vec::new(), b"\x7fELF".to_vec(), vec![0xff; 9999]] {
        try_out("bytes", &record, &Artifact { bytes, ..artifact.clone() });
    }
    println!("{served} served, {refused} refused, {skipped} cannot be said");
    assert!(served > 20 && refused > 20, "{served} {refused}");

    // The commands, on some of it.
    let mut changed = record.clone();
    changed.provenance.shape = Shape { batch: 0, heads: 0, kv_heads: 0, q_len: 0, kv_len: 0, mask: Mask::Full };
    changed.provenance.unix_time = u64::MAX;
    changed.finalists.iter_mut().for_each(|f| (f.median_us, f.rounds_ns) = (f64::NAN, vec![u64::MAX; 3]));
    write(&path, changed, &artifact);
    let arg = path.to_str().unwrap();
    let story = [&["explain"], SMALL, &["--story", "--timeline", "--bundle", arg]].concat();
    for args in [&story[..], &["list", "--bundle", arg], &["import", arg], &["list"], &["doctor"]] {
        let output = place.flashtune(args).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && !said.contains("panicked"), "{args:?}: {said}");
    }
    // A tuning goes by it as little as by anything else that was not measured here.
    let tuned = place.tune(&[SMALL, &["--trials", "2", "--budget-s", "10", "--force"]].concat());
    assert!(tuned["tuned"][0]["median_us"].as_f64().unwrap() > 0.0);
    std::fs::write(&path, b"FTBUNDLE").unwrap();
    fails(&mut place.flashtune(&["import", arg]), 2, &["nonsense.ftb"]);
    assert!(
        import(
            &path,
            &CacheDir::at(place.cache()),
            &Needed::new(record.key.device.arch, &flashtune_codegen::TemplateSet::embedded()),
            false,
            &trust
        )
        .is_err()
    );
}
