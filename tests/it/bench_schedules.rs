//! `flashtune bench --schedule`: schedules that are named beside the chosen one, forward and backward.

use crate::common::{Place, fails};

const SIZES: [&str; 8] = ["--dtype", "f32", "--head-dim", "64", "--heads", "2", "--q-len", "96"];

/// The default schedule, and another one of the space.
fn space(place: &Place, op: &str) -> [String; 2] {
    let names = place.json(&[&["emit", "--space", "--op", op][..], &SIZES].concat());
    let names: Vec<String> = names.as_array().unwrap().iter().map(|n| n.as_str().unwrap().to_owned()).collect();
    assert!(names.len() > 1, "{op}: {names:?}");
    [names[0].clone(), names[1].clone()]
}

#[test]
fn schedules_that_are_named_are_checked_and_timed_beside_the_chosen_one() {
    let place = Place::new();
    for op in ["forward", "backward"] {
        let [default, other] = space(&place, op);
        let options = ["bench", "--op", op, "--rounds", "2", "--schedule", &other, "--no-ceilings"];
        let report = place.json(&[&options[..], &SIZES].concat());
        let results = report["points"][0]["results"].as_array().unwrap();
        let of = |name: &str| results.iter().find(|r| r["contender"] == name).unwrap_or_else(|| panic!("{results:?}"));
        for (contender, schedule) in [("chosen", &default), (other.as_str(), &other)] {
            let found = of(contender);
            assert!(found["latency_us"]["median"].as_f64().unwrap() > 0.0, "{found}");
            assert!(found["schedule"].as_str().unwrap().ends_with(schedule.as_str()), "{found}");
        }
        let checks = report["checks"].as_array().unwrap();
        assert!(checks.iter().any(|c| c["contender"] == other.as_str() && c["passed"] == true), "{checks:?}");
    }
}

#[test]
fn names_of_no_schedule_and_options_of_another_operation_are_refused() {
    let place = Place::new();
    let bench = |options: &[&str]| {
        let mut command = place.flashtune(&["bench", "--rounds", "2", "--no-ceilings"]);
        command.args(options).args(SIZES);
        command
    };
    for op in ["forward", "backward"] {
        fails(&mut bench(&["--op", op, "--schedule", "nothing"]), 2, &["nothing", "--schedule"]);
    }
    fails(&mut bench(&["--op", "append", "--schedule", "nothing"]), 2, &["--schedule", "appends"]);
    fails(&mut bench(&["--scratch-mib", "256"]), 2, &["--scratch-mib", "--op backward"]);
}
