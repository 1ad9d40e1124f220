//! What whoever watches a process sees: spans, metrics, and a board of them.

use crate::common::{Place, ROOT, fails};
use flashtune::{Engine, Policy};
use flashtune_codegen::{DType, Mask, Problem, Shape};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};

/// Spans that were opened, each with its fields.
type Spans = Arc<Mutex<Vec<(&'static str, BTreeMap<&'static str, String>)>>>;

struct Recorder(Spans);

struct Fields<'a>(&'a mut BTreeMap<&'static str, String>);

impl Visit for Fields<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.0.insert(field.name(), format!("{value:?}"));
    }
}

impl<S: tracing::Subscriber> Layer<S> for Recorder {
    fn on_new_span(&self, attributes: &Attributes<'_>, _: &Id, _: Context<'_, S>) {
        let mut fields = BTreeMap::new();
        attributes.record(&mut Fields(&mut fields));
        self.0.lock().unwrap().push((attributes.metadata().name(), fields));
    }
}

fn engine(place: &Place) -> Engine {
    Engine::builder()
        .device(flashtune::DeviceSpec::Cpu)
        .cache_dir(place.cache())
        .policy(Policy::Default)
        .quick_first(false)
        .build()
        .unwrap()
}

fn class() -> (Problem, Shape) {
    let mask = Mask::Causal;
    let problem = Problem::forward(DType::F32, 16, mask.kind()).unwrap();
    (problem, Shape { batch: 1, heads: 1, kv_heads: 1, q_len: 24, kv_len: 24, mask })
}

#[test]
fn spans_name_kernels_problems_and_sizes() {
    // Whether anybody wants a span is decided where it is opened first, perhaps by another test at this moment: so this
    // one runs in a process of its own.
    const CHILD: &str = "FLASHTUNE_TEST_SPANS";
    if std::env::var_os(CHILD).is_none() {
        let name = "watching::spans_name_kernels_problems_and_sizes";
        let mut child = std::process::Command::new(std::env::current_exe().unwrap());
        let done = child.args(["--exact", name]).env(CHILD, "1").output().unwrap();
        let told = String::from_utf8_lossy(&done.stdout);
        assert!(done.status.success() && told.contains("1 passed"), "{told}");
        return;
    }
    let place = Place::new();
    let spans = Spans::default();
    let (problem, shape) = class();
    let scene = |place: &Place| {
        let engine = engine(place);
        engine.plan(&problem, &shape).unwrap();
        // Noise may leave it without a result, which is no matter here.
        let job = flashtune_tuner::Job {
            max_trials: 2,
            budget: Duration::from_secs(5),
            ..flashtune_tuner::Job::of_call(problem, (&shape).into())
        };
        let _ = engine.tune_job(&job, &());
    };
    tracing::subscriber::with_default(tracing_subscriber::registry().with(Recorder(spans.clone())), || {
        scene(&place);
    });
    let spans = spans.lock().unwrap();
    let of = |name: &str| &spans.iter().find(|(n, _)| *n == name).unwrap_or_else(|| panic!("no {name}: {spans:?}")).1;
    let compile = of("flashtune.compile");
    assert!(compile["kernel"].contains("f32") && compile["background"] == "false", "{compile:?}");
    let load = of("flashtune.load");
    assert!(load["kernel"] == compile["kernel"] && load["bytes"].parse::<usize>().unwrap() > 1000, "{load:?}");
    let tune = of("flashtune.tune");
    assert_eq!((&*tune["problem"], &*tune["shape"]), (&*problem.to_string(), &*shape.to_string()));
    assert!(!tune["device"].is_empty());
}

#[test]
fn metrics_in_a_file_are_whole_and_named_after_it() {
    let place = Place::new();
    let engine = engine(&place);
    let (problem, shape) = class();
    engine.plan(&problem, &shape).unwrap();
    let file = place.path("rank0.prom");
    std::fs::write(&file, "of an earlier process").unwrap();
    engine.write_metrics(&file).unwrap();
    let text = std::fs::read_to_string(&file).unwrap();
    let lines: Vec<_> = text.lines().filter(|l| !l.starts_with('#')).collect();
    assert!(lines.iter().all(|l| l.contains(",process=\"rank0\"")), "{text}");
    assert!(
        lines.iter().any(|l| l.starts_with("flashtune_kernel_compile_seconds_count{") && l.ends_with(" 1")),
        "{text}"
    );
    let names = std::fs::read_dir(place.path("")).unwrap().map(|e| e.unwrap().file_name());
    assert_eq!(names.filter(|n| n.to_str().unwrap().starts_with("rank0")).count(), 1);
    // The command adds such files up.
    let other = place.path("rank1.prom");
    engine.write_metrics(&other).unwrap();
    let files = [&file, &other].map(|f| f.to_str().unwrap());
    let hits = place.json(&[&["cache", "hits"], &files[..]].concat());
    assert_eq!((&hits["processes"], &hits["compiled"], &hits["loaded"]), (&2.into(), &2.0.into(), &2.0.into()));
    assert!(hits["calls"]["tuned"] == 0.0 && hits["problems"].as_object().unwrap().is_empty(), "{hits}");
    let table = place.flashtune(&[&["cache", "hits"], &files[..]].concat()).output().unwrap();
    let table = String::from_utf8(table.stdout).unwrap();
    assert!(table.contains("2 processes, 0 calls and 0 refused; of 2 kernels 0.0 % were there, 2 compiled"), "{table}");
    std::fs::write(&other, "# of another program\nup 1\n").unwrap();
    fails(&mut place.flashtune(&["cache", "hits", files[1]]), 2, &["rank1.prom", "no metrics of flashtune"]);
    fails(&mut place.flashtune(&["cache", "hits", "/nonexistent/r.prom"]), 2, &["/nonexistent/r.prom"]);
    let e = engine.write_metrics(&place.path("none/rank0.prom")).unwrap_err();
    assert!(matches!(e, flashtune::Error::MetricsFile { .. }) && e.to_string().contains("none/rank0.prom"), "{e}");
}

#[test]
fn the_board_asks_for_metrics_that_there_are() {
    let place = Place::new();
    let engine = engine(&place);
    let (problem, shape) = class();
    engine.plan(&problem, &shape).unwrap();
    engine.seal(flashtune::OnMiss::Nearest).unwrap();
    let text = engine.prometheus();
    let mut there: BTreeSet<&str> = text.lines().filter_map(|l| l.strip_prefix("# TYPE ")?.split(' ').next()).collect();
    there.extend(text.lines().filter(|l| !l.starts_with('#')).filter_map(|l| l.split('{').next()));
    let board: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(format!("{ROOT}/docs/grafana.json")).unwrap()).unwrap();
    let panels = board["panels"].as_array().unwrap();
    let mut asked = 0;
    for expr in panels.iter().flat_map(|p| p["targets"].as_array().unwrap()).map(|t| t["expr"].as_str().unwrap()) {
        let word = |c: char| c.is_ascii_alphanumeric() || c == '_';
        for name in expr.split(|c| !word(c)).filter(|w| w.starts_with("flashtune_")) {
            assert!(there.contains(name), "{name} of {expr} is not in\n{text}");
            asked += 1;
        }
    }
    assert!(asked >= 15, "{asked}");
    let ids: BTreeSet<_> = panels.iter().map(|p| p["id"].as_u64().unwrap()).collect();
    assert_eq!(ids.len(), panels.len());
}
