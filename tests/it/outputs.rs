//! What the command writes: tensor files, and JSON for scripts.

use crate::common::{self, Place};
use flashtune::DType;
use std::path::Path;

fn text(path: &Path) -> &str {
    path.to_str().expect("test paths are text")
}

/// Runs a small problem into `output`.
fn run_into(place: &Place, output: &Path) {
    let (input, _) = place.inputs("in.safetensors", DType::F32, [1, 1, 4, 32], [1, 1, 4, 32]);
    place.flashtune(&["run", text(&input), "-o", text(output)]).assert().success();
}

#[test]
#[cfg(unix)]
fn an_output_that_is_a_device_is_written_to_and_not_replaced_by_a_file() {
    let place = Place::new();
    // By way of a link, so that no failure of this test can do harm.
    let null = place.path("null");
    std::os::unix::fs::symlink("/dev/null", &null).unwrap();
    run_into(&place, &null);
    assert_eq!(std::fs::read_link(&null).unwrap(), Path::new("/dev/null"));
}

#[test]
#[cfg(unix)]
fn an_output_behind_a_link_goes_where_the_link_leads() {
    let place = Place::new();
    let (link, target) = (place.path("link"), place.path("target"));
    std::fs::write(&target, "old").unwrap();
    std::os::unix::fs::symlink(&target, &link).unwrap();
    run_into(&place, &link);
    assert!(link.is_symlink());
    let bytes = std::fs::read(&target).unwrap();
    assert!(safetensors::SafeTensors::deserialize(&bytes).unwrap().tensor("o").is_ok());
}

#[test]
#[cfg(unix)]
fn an_output_is_as_readable_as_any_new_file() {
    use std::os::unix::fs::PermissionsExt;
    let place = Place::new();
    let (output, other) = (place.path("out"), place.path("other"));
    run_into(&place, &output);
    std::fs::write(&other, "").unwrap();
    let mode = |path: &Path| path.metadata().unwrap().permissions().mode();
    assert_eq!(mode(&output), mode(&other), "that of a temporary file has stayed");
}

#[test]
fn a_list_of_schedules_for_a_script_is_json() {
    let place = Place::new();
    let names = place.json(&["emit", "--space"]);
    let lines = place.flashtune(&["emit", "--space"]).output().unwrap().stdout;
    let lines = String::from_utf8(lines).unwrap();
    let names: Vec<_> = names.as_array().unwrap().iter().map(|n| n.as_str().unwrap()).collect();
    assert!(names.len() > 1);
    assert_eq!(names.iter().collect::<std::collections::HashSet<_>>().len(), names.len(), "a name stands twice");
    assert_eq!(names, lines.lines().collect::<Vec<_>>());
}

#[test]
#[cfg(target_os = "linux")]
fn a_path_that_is_no_utf8_can_be_told_in_json() {
    use std::os::unix::ffi::OsStrExt;
    let place = Place::new();
    let (input, _) = place.inputs("in.safetensors", DType::F32, [1, 1, 4, 32], [1, 1, 4, 32]);
    let odd = |stem: &str| {
        place.path("x").with_file_name(std::ffi::OsStr::from_bytes(&[stem.as_bytes(), b"\xff.ftb"].concat()))
    };
    let told = |command: &mut assert_cmd::Command, field: &str| {
        let json = common::json(command);
        assert!(json[field].as_str().is_some_and(|path| path.ends_with("\u{fffd}.ftb")), "{json}");
    };
    told(place.flashtune(&["--json", "run", text(&input), "-o"]).arg(odd("o")), "output");
    let build = [&["--json", "build", "--arch", "cpu-generic"], common::SMALL, &["--out"]].concat();
    told(place.flashtune(&build).arg(odd("b")), "out");
    place.tune_small();
    told(place.flashtune(&["--json", "export"]).arg(odd("e")), "file");
    let tune = [&["--json", "tune"], common::SMALL, &["--trials", "1", "--budget-s", "5", "--cache"]].concat();
    let mut command = crate::common::command();
    let json = common::json(command.args(["--device", "cpu"]).args(tune).arg(odd("c")));
    assert!(json["tuned"][0]["snapshot"].as_str().is_some_and(|path| path.contains('\u{fffd}')), "{json}");
}
