//! What stored results survive: edits of templates, fields that are added, and builds that come later.
//!
//! `tests/data/v7.ftb` is a bundle as this format was first written, and stays as it is: every later build reads it.
//! `cargo test --test it outlive::the_bundle_is_written -- --ignored` wrote it, with NVRTC 13.0 and gcc.

use flashtune::{DType, DeviceSpec, Mask, Problem, Program, Shape};
use flashtune_cache::encoding::{Undecodable, decode, encode};
use flashtune_cache::{
    Artifact, Bundle, BundleContents, Conditions, DeviceFingerprint, Facts, Finalist, Key, Launches, Layers, Needed,
    Provenance, Record, RecordKey, Timeline, Trial, Trust,
};
use flashtune_codegen::{Arch, Family, Kernel, Schedule, ShapeBucket, TemplateSet};
use flashtune_runtime::compile::compile;
use serde_json::{Value, json};
use std::collections::BTreeMap;

const BUNDLE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data/v7.ftb");

/// The kernels of the bundle: their names and the sizes that they were recorded for.
const INSIDE: [(&str, &str); 4] = [
    ("forward-f32-d64-causal.cpu.generic-q64-kv126-r2x6.cpu-generic", "b1 h2/1 128x128 causal"),
    ("forward-f16-d64v32-full-s", "b1 h2/1 128x128 full"),
    ("forward-bf16-d128-causal.sm90.", "b4 h32/8 4096x4096 causal"),
    ("forward-f16-d64-full.sm80.", "b4 h32/8 4096x4096 full"),
];

fn sizes(len: u32, mask: Mask) -> Shape {
    match len {
        128 => Shape { batch: 1, heads: 2, kv_heads: 1, q_len: len, kv_len: len, mask },
        _ => Shape { batch: 4, heads: 32, kv_heads: 8, q_len: len, kv_len: len, mask },
    }
}

fn kernel(family: Family, arch: &str, problem: Problem, shape: &Shape) -> Kernel {
    let arch: Arch = arch.parse().unwrap();
    let schedule = Schedule::default_for(family, &problem, arch, &ShapeBucket::of(shape)).unwrap();
    Kernel { problem, schedule, arch }
}

fn kernels() -> [(Kernel, Shape); 4] {
    let (causal, full) = (Mask::Causal, Mask::Full);
    let program = Program::parse("slopes: f32[heads]; score = score + slopes[h] * float(kv - q);").unwrap();
    let problem = |dtype, qk, v, mask: Mask| Problem::forward_qk_v(dtype, qk, v, mask.kind()).unwrap();
    [
        (Family::ForwardCpu, "cpu-generic", problem(DType::F32, 64, 64, causal), sizes(128, causal)),
        (Family::ForwardCpu, "cpu-generic", problem(DType::F16, 64, 32, full).with_program(program), sizes(128, full)),
        (Family::ForwardSm90, "sm_90a", problem(DType::Bf16, 128, 128, causal), sizes(4096, causal)),
        (Family::ForwardSm80, "sm_90a", problem(DType::F16, 64, 64, full), sizes(4096, full)),
    ]
    .map(|(family, arch, problem, shape)| (kernel(family, arch, problem, &shape), shape))
}

fn record(kernel: &Kernel, shape: Shape, artifact: Key, templates: &TemplateSet) -> Record {
    let finalist = |schedule, median_us: f64, is_default| Finalist {
        schedule,
        median_us,
        p10_us: median_us * 0.99,
        p90_us: median_us * 1.02,
        samples: 3,
        rounds_ns: [0.99, 1.0, 1.02].map(|x| (x * 1e3 * median_us) as u64).to_vec(),
        max_error: 0.00125,
        is_default,
    };
    let other = Schedule::space(kernel.schedule.family(), &kernel.problem, kernel.arch)[1];
    let device = DeviceFingerprint {
        arch: kernel.arch,
        name: "a device".into(),
        units: 132,
        memory_bytes: 1 << 37,
        cache_bytes: 60 << 20,
        driver: "580.1".into(),
    };
    let launches = if kernel.problem.dtype == DType::F16 { Launches::Graph } else { Launches::Eager };
    Record {
        key: RecordKey { device, problem: kernel.problem, bucket: ShapeBucket::of(&shape), launches },
        schedule: kernel.schedule,
        artifact,
        finalists: vec![finalist(kernel.schedule, 100.0, true), finalist(other, 125.5, false)],
        provenance: Provenance {
            flashtune: "0.1.0".into(),
            templates: templates.hash_of(kernel.schedule.family()).into(),
            compiler: "a compiler 1".into(),
            unix_time: 1_790_000_000,
            shape,
            space: 500,
            compiled: 39,
            timed: 37,
            unfused_us: Some(1000.5),
            seconds: 6.5,
            compile_seconds: 6.0,
            device_seconds: 5.5,
            waited_seconds: 0.5,
            conditions: Conditions { sm_mhz: Some((1900, 1980)), ..Conditions::default() },
        },
        rivals: Vec::new(),
        settled: vec![Key::of(b"an earlier finding")],
    }
}

#[test]
#[ignore = "writes the file that is to stay as it is"]
fn the_bundle_is_written() {
    let templates = TemplateSet::embedded();
    let made = kernels().map(|(kernel, shape)| (compile(&kernel, &templates).unwrap(), kernel, shape));
    let records = made
        .iter()
        .map(|(artifact, kernel, shape)| record(kernel, *shape, artifact.recipe.key(), &templates))
        .collect();
    let mut load = |key: &Key| made.iter().map(|(artifact, ..)| artifact).find(|a| a.recipe.key() == *key).cloned();
    std::fs::create_dir_all(std::path::Path::new(BUNDLE).parent().unwrap()).unwrap();
    BundleContents { records, artifacts: vec![], load: &mut load, created: 1_790_000_000 }
        .write(BUNDLE.as_ref())
        .unwrap();
}

#[test]
fn a_bundle_of_before_is_read_as_it_was_written() {
    let bundle = Bundle::map(BUNDLE.as_ref()).unwrap();
    assert_eq!((bundle.record_count(), bundle.artifact_count()), (4, 4));
    let layers = Layers::open_with(None, &[BUNDLE.into()], None, &Trust::default().allow_unsigned(true)).unwrap();
    assert_eq!((layers.info()[0].records, layers.info()[0].foreign), (4, 0));
    let mut names = Vec::new();
    for item in bundle.records() {
        let (record, validity) = item.unwrap();
        assert_eq!(bundle.record(&record.key).unwrap().as_ref(), Some(&record), "its key is what it was");
        let artifact = bundle.artifact(&record.artifact).unwrap().expect("its key is what it was");
        let kernel = Kernel { problem: record.key.problem, schedule: record.schedule, arch: validity.arch };
        assert_eq!(artifact.recipe.kernel, kernel);
        artifact.args.check(&kernel).unwrap();
        assert!(artifact.bytes.starts_with(b"\x7fELF"));
        assert_eq!((record.finalists.len(), record.settled.len(), record.provenance.timed), (2, 1, 37));
        assert_eq!((record.finalists[1].median_us, record.provenance.unfused_us), (125.5, Some(1000.5)));
        names.push((kernel.name(), record.provenance.shape.to_string()));
        // It is found, whether or not the templates are still those of then.
        let found = layers.find(&Needed::new(validity.arch, &TemplateSet::embedded()), &record.key);
        let refused = found.refusals.iter().find(|r| !matches!(r.difference.field, "templates" | "abi"));
        assert!(refused.is_none() && found.matches.len() + found.refusals.len() == 1, "{found:?}");
    }
    for (start, shape) in INSIDE {
        assert!(names.iter().any(|(name, s)| name.starts_with(start) && s == shape), "{start}: {names:?}");
    }
    // The program is text, and means the same.
    let text = |record: &Record| record.key.problem.program.map(|p| p.text().to_owned());
    let programs: Vec<_> = bundle.records().filter_map(|r| text(&r.unwrap().0)).collect();
    assert_eq!(programs, [kernels()[1].0.problem.program.unwrap().text()]);
    #[cfg(target_arch = "x86_64")]
    for artifact in bundle.records().map(|r| bundle.artifact(&r.unwrap().0.artifact).unwrap().unwrap()) {
        if matches!(artifact.recipe.kernel.arch, Arch::Cpu(_)) {
            flashtune_runtime::open(DeviceSpec::Cpu).unwrap().load(&artifact).unwrap();
        }
    }
}

#[test]
fn records_outlive_edits_that_change_nothing_for_their_kernel() {
    let embedded = TemplateSet::embedded();
    let records: Vec<Record> =
        kernels().iter().map(|(kernel, shape)| record(kernel, *shape, Key::of(b"kernel"), &embedded)).collect();
    let mut none = |_: &Key| None;
    let bytes = BundleContents { records: records.clone(), artifacts: vec![], load: &mut none, created: 0 }.to_bytes();
    let bytes: &'static [u8] = Box::leak(bytes.into_boxed_slice());
    let layers = Layers::open_with(None, &[], Some(bytes), &Trust::default()).unwrap();
    // Families whose records are valid after one text of a file was replaced.
    let valid = |file: &str, from: &str, to: &str| {
        let text = embedded.files().find(|(name, _)| *name == file).unwrap().1;
        assert!(text.contains(from), "{file} has no `{from}`");
        let edited = BTreeMap::from([(file.to_owned(), text.replacen(from, to, 1))]);
        let edited = TemplateSet::overlaid(edited).unwrap();
        let mut valid = Vec::new();
        for record in &records {
            let found = layers.find(&Needed::new(record.key.device.arch, &edited), &record.key);
            assert!(found.refusals.iter().all(|r| r.difference.field == "templates"));
            valid.extend(found.matches.iter().map(|m| m.record.schedule.family().name()));
        }
        valid.sort_unstable();
        valid
    };
    let all = ["forward/cpu", "forward/cpu", "forward/sm80", "forward/sm90"];
    assert_eq!(valid("forward/sm90.cu", "// Exact attention", "// Attention"), all, "a comment");
    assert_eq!(valid("lib/cuda/attention/types.cuh", "\n", "\n\n    // of all of CUDA\n"), all, "a comment");
    assert_eq!(valid("lib/cpu/mask.h", "", "/* of the\n * cpu */\n"), all, "a comment");
    assert_eq!(valid("forward/naive.cu", "\n", "\n#define MORE\n"), all, "another family");
    assert_eq!(valid("forward/sm90/steps.cuh", "\n", "\n#define MORE\n"), all[..3], "a line of sm90");
    assert_eq!(valid("forward/sm80.cu", "\n", "\n#define MORE\n"), [all[0], all[1], all[3]], "a line of sm80");
    assert_eq!(valid("lib/cuda/attention/types.cuh", "\n", "\n#define MORE\n"), all[..2], "a line of all of CUDA");
    assert_eq!(valid("forward/cpu.c", "\n", "\n#define MORE\n"), all[2..], "a line of the cpu's");
}

/// The value as another build would write it.
fn written(value: &impl serde::Serialize, edit: impl FnOnce(&mut Value)) -> Vec<u8> {
    let mut value = serde_json::to_value(value).unwrap();
    edit(&mut value);
    as_stored(&mut value);
    encode(&value)
}

/// Hashes are texts in JSON alone.
fn as_stored(value: &mut Value) {
    match value {
        Value::Array(list) => list.iter_mut().for_each(as_stored),
        Value::Object(map) => map.values_mut().for_each(as_stored),
        Value::String(text) if text.len() == 64 && text.bytes().all(|b| b.is_ascii_hexdigit()) => {
            let byte = |i: usize| u8::from_str_radix(&text[2 * i..2 * i + 2], 16).expect("two digits");
            *value = json!((0..32).map(byte).collect::<Vec<u8>>());
        }
        _ => {}
    }
}

#[test]
fn a_field_at_its_default_is_no_part_of_a_key() {
    let (kernel, shape) = kernels()[2];
    let record = record(&kernel, shape, Key::of(b"kernel"), &TemplateSet::embedded());
    let text = serde_json::to_value(&record).unwrap();
    // What a build writes that has fields of these names, and one that does not, is the same where they are at their
    // defaults.
    let (problem, schedule) = (&text["key"]["problem"], &text["schedule"]["forward/sm90"]);
    for (of, field) in [(problem, "op"), (problem, "head_dim_v"), (problem, "program"), (schedule, "bias_stages")] {
        assert!(of.get(field).is_none() && of.is_object(), "{field}: {of}");
    }
    assert!(text["key"].get("launches").is_none() && schedule.get("trim").is_none(), "{text}");
    // One that wrote them nevertheless means the same thing, by the same key.
    let bytes = written(&record, |text| {
        text["schedule"]["forward/sm90"]["trim"] = json!(false);
        text["schedule"]["forward/sm90"]["bias_stages"] = json!(0);
        text["key"]["problem"]["head_dim_v"] = json!(128);
        text["key"]["problem"]["program"] = Value::Null;
        text["key"]["problem"]["op"] = json!("Forward");
        text["key"]["launches"] = json!("eager");
    });
    let read: Record = decode(&bytes).unwrap();
    assert_eq!((&read, read.key.key()), (&record, record.key.key()));
    // Facts that an older build did not know.
    let bytes = written(&record, |text| {
        text["provenance"].as_object_mut().unwrap().retain(|field, _| field != "conditions" && field != "unfused_us");
        text["finalists"][0].as_object_mut().unwrap().remove("max_error");
    });
    let read: Record = decode(&bytes).unwrap();
    assert_eq!(read.provenance.conditions, Conditions::default());
    assert_eq!((read.key.key(), read.schedule, read.finalists[0].max_error), (record.key.key(), record.schedule, 0.0));
}

#[test]
fn what_a_newer_build_adds_is_refused_where_it_decides_and_ignored_where_it_tells() {
    let (kernel, shape) = kernels()[2];
    let templates = TemplateSet::embedded();
    let record = record(&kernel, shape, Key::of(b"kernel"), &templates);
    for place in ["/key/problem", "/key/problem/mask", "/key/bucket", "/key/device", "/key", "/schedule/forward~1sm90"]
        .into_iter()
        .chain(["/provenance/shape", "/finalists/1/schedule/forward~1sm90"])
    {
        let bytes = written(&record, |text| text.pointer_mut(place).unwrap()["split_keys"] = json!(2));
        match decode::<Record>(&bytes) {
            Err(e @ Undecodable::Foreign(_)) => {
                let e = e.to_string();
                assert!(e.contains("`split_keys`") && e.contains("newer"), "{place}: {e}");
            }
            other => panic!("{place}: {other:?}"),
        }
    }
    for (place, value) in [
        ("/schedule", json!({"Sm100": {"stages": 2}})),
        ("/key/problem/dtype", json!("E5m2")),
        ("/key/problem/op", json!("Transpose")),
        ("/key/launches", json!("remote")),
        ("/key/device/arch", json!({"Rocm": 942})),
    ] {
        let bytes = written(&record, |text| {
            let (parent, field) = place.rsplit_once('/').unwrap();
            text.pointer_mut(parent).unwrap()[field] = value;
        });
        assert!(matches!(decode::<Record>(&bytes), Err(Undecodable::Foreign(_))), "{place}");
    }
    for place in ["", "/provenance", "/provenance/conditions", "/finalists/0"] {
        let bytes =
            written(&record, |text| text.pointer_mut(place).unwrap()["energy_joules"] = json!([1.5, {"x": null}]));
        assert_eq!(decode::<Record>(&bytes).as_ref(), Ok(&record), "{place}");
    }
    let facts = Facts { registers: 168, ..Facts::default() };
    let more = |value: &Value| written(value, |text| text["spilled_where"] = json!("loop"));
    assert_eq!(decode::<Facts>(&more(&serde_json::to_value(&facts).unwrap())), Ok(facts));
    let timeline = Timeline { unix_time: 5, ..Timeline::default() };
    assert_eq!(decode::<Timeline>(&more(&serde_json::to_value(&timeline).unwrap())), Ok(timeline));
    let trial = json!({
        "schedule": serde_json::to_value(kernel.schedule).unwrap(), "templates": "t", "compiler": "c", "unix_time": 1,
        "result": {"Failed": {"stage": "Check", "reason": "wrong"}},
    });
    assert_eq!(decode::<Trial>(&more(&trial)), decode::<Trial>(&encode(&trial)));
    assert!(decode::<Trial>(&encode(&trial)).is_ok());
    // An artifact whose argument has a segment more is not launched with fewer.
    let bundle = Bundle::map(BUNDLE.as_ref()).unwrap();
    let artifact: Artifact = bundle.artifact(&bundle.records().next().unwrap().unwrap().0.artifact).unwrap().unwrap();
    let bytes = written(&artifact, |text| text["args"]["queue"] = json!(64));
    assert!(matches!(decode::<Artifact>(&bytes), Err(Undecodable::Foreign(_))));
    let bytes = written(&artifact, |text| text["recipe"]["kernel"]["stage"] = json!(1));
    assert!(matches!(decode::<Artifact>(&bytes), Err(Undecodable::Foreign(_))));
    let bytes = written(&artifact, |text| text["source"] = json!("text"));
    assert_eq!(decode::<Artifact>(&bytes), Ok(artifact));
}
