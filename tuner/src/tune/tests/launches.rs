//! How candidates are launched: parts of the grid first, and eager launches or graphs when they are timed.

use super::*;
use crate::Search;
use flashtune_codegen::Shape;
use flashtune_runtime::Error as RuntimeError;

#[test]
fn a_part_of_the_grid_goes_first() {
    let (device, _) = paper(&[]);
    let f = fixture();
    let any: Arc<dyn Device> = device.clone();
    f.tune(&any, &job()).unwrap();
    let launches = device.rows.lock().unwrap();
    let Shape { heads, q_len, kv_len, .. } = job().shape;
    let whole = (heads * q_len) as i32;
    for schedule in schedules() {
        // Small inputs have other numbers of keys.
        let own =
            launches.iter().filter(|(s, _, keys)| *s == schedule && *keys == kv_len as i32).map(|(_, rows, _)| *rows);
        let own: Vec<i32> = own.collect();
        assert!(16 * own[0] <= whole && own[0] > 0, "{schedule}: {own:?}");
        assert!(own[1..].iter().all(|rows| *rows == whole) && own.len() > 3, "{schedule}: {own:?}");
    }
}

#[test]
fn a_result_for_graphs_and_one_for_eager_launches_do_not_answer_for_each_other() {
    let (device, _) = device(&[(1, Behaviour::Replayed { us: 60.0 }), (2, Behaviour::WrongWhenReplayed)]);
    let f = fixture();
    let graph = Job { launches: Launches::Graph, ..job() };
    let eager = f.tune(&device, &job()).unwrap();
    assert_eq!((eager.record.schedule, eager.record.key.launches), (schedules()[2], Launches::Eager), "50 us");
    // All of the space: what is far from the best as eager launches may be the best here.
    let replayed = f.tune(&device, &Job { search: Search::Even, ..graph.clone() }).unwrap();
    assert!(!replayed.cached);
    assert_eq!((replayed.record.schedule, replayed.record.key.launches), (schedules()[1], Launches::Graph));
    let (stage, reason) = failure(&replayed, schedules()[2]).expect("its replays are checked");
    assert!(stage == Stage::Check && reason.contains("two launches"), "{reason}");
    // Each answers its own question from now on, and both are published.
    for (job, outcome) in [(job(), &eager), (graph, &replayed)] {
        let again = f.tune(&device, &job).unwrap();
        assert!(again.cached && again.record == outcome.record);
    }
    let layers = Layers::open(&f.dir, &[], None).unwrap();
    let found = layers.find(&Needed::new(ARCH, templates()), &replayed.record.key);
    let found: Vec<_> = found.matches.iter().map(|m| (m.record.schedule, m.quality)).collect();
    assert_eq!(found, [(schedules()[1], MatchQuality::Exact), (schedules()[2], MatchQuality::OtherLaunches)]);
}

#[test]
fn graphs_are_refused_where_there_are_none_before_anything_runs() {
    let (device, compiler) = paper(&[]);
    device.graphs.store(false, Ordering::Relaxed);
    let f = fixture();
    let any: Arc<dyn Device> = device.clone();
    let e = f.tune(&any, &Job { launches: Launches::Graph, ..job() }).unwrap_err();
    assert!(matches!(e, Error::Runtime(RuntimeError::Codegen(_))) && e.to_string().contains("launches = graph"), "{e}");
    assert_eq!((device.launches.load(Ordering::Relaxed), compiler.compiled.load(Ordering::Relaxed)), (0, 0));
    assert!(!f.dir.base().exists());
}

#[test]
fn a_table_of_a_space_has_two_runs_of_each_and_leaves_out_no_equals() {
    // Half of them far behind, the others all alike.
    let special: Vec<_> = (1..schedules().len()).map(|i| (i, Behaviour::Right { us: [99.9, 400.0][i % 2] })).collect();
    let (device, _) = device(&special);
    let samples = |search: Search| -> Vec<u32> {
        let outcome = fixture().tune(&device, &Job { search, ..job() }).unwrap();
        let of = |t: &Trial| match t.result {
            TrialResult::Timed { samples, .. } => samples,
            TrialResult::Failed { .. } => 99,
        };
        outcome.trials.iter().map(of).collect()
    };
    assert!(samples(Search::Even).into_iter().all(|n| n >= 2));
    assert!(samples(Search::Guided).contains(&1));
}
