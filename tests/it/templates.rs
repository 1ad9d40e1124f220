//! A folder of templates over the embedded ones, and deterministic rendering.

use crate::common::{self, Place, ROOT, SMALL, fails};
use std::path::Path;
use std::process::Command;

/// A folder with the real cpu template and a line more.
fn edited(place: &Place, line: &str) -> String {
    let folder = place.path("mine");
    std::fs::create_dir_all(folder.join("forward")).unwrap();
    let own = std::fs::read_to_string(format!("{ROOT}/templates/forward/cpu.c")).unwrap();
    std::fs::write(folder.join("forward/cpu.c"), format!("{own}\n{line}\n")).unwrap();
    folder.to_str().unwrap().to_owned()
}

#[test]
fn an_edited_template_is_rendered_and_run_without_a_rebuild() {
    let place = Place::new();
    let folder = edited(&place, "#define EDITED_BY_HAND 1");
    let emit = [&["emit"], SMALL].concat();
    let own = place.json(&emit);
    for with in [["--templates", &folder], ["--templates", &folder]] {
        let mine = place.json(&[&emit[..], &with].concat());
        assert!(mine["source"].as_str().unwrap().contains("EDITED_BY_HAND"));
        assert!(!own["source"].as_str().unwrap().contains("EDITED_BY_HAND"));
    }
    let by_variable = common::json(place.flashtune(&emit).arg("--json").env("FLASHTUNE_TEMPLATES", &folder));
    assert!(by_variable["source"].as_str().unwrap().contains("EDITED_BY_HAND"));

    let explain = [&["explain"], SMALL].concat();
    let (ours, theirs) = (place.json(&explain), place.json(&[&explain[..], &["--templates", &folder]].concat()));
    assert_ne!(ours[0]["templates"], theirs[0]["templates"]);
    // Both were compiled: what one template set made never serves another.
    for plan in [&ours, &theirs] {
        assert!(plan[0]["binary"].as_str().unwrap().contains("compiled now"), "{plan}");
    }
}

#[test]
fn a_broken_template_is_an_error_that_names_it() {
    let place = Place::new();
    let folder = edited(&place, "<% if %>");
    let explain = [&["explain"], SMALL, &["--templates", &folder]].concat();
    fails(&mut place.flashtune(&explain), 2, &["forward/cpu.c"]);
    // A name that no kernel provides is found when it is rendered, not taken for empty.
    let folder = edited(&place, "@{ block_qq }@");
    let explain = [&["explain"], SMALL, &["--templates", &folder]].concat();
    fails(&mut place.flashtune(&explain), 2, &["forward/cpu.c", "block_qq"]);
    // A template that renders but does not compile: the compiler's words.
    let folder = edited(&place, "#error spoilt on purpose");
    let explain = [&["explain"], SMALL, &["--templates", &folder]].concat();
    fails(&mut place.flashtune(&explain), 1, &["spoilt on purpose"]);
    fails(&mut place.flashtune(&["explain", "--templates", common::NOWHERE]), 2, &[common::NOWHERE]);
}

#[test]
fn rendering_gives_the_same_bytes_in_every_process() {
    let place = Place::new();
    for (arch, dtype, dim, mask) in [
        ("cpu-avx2", "f32", "64", "causal"),
        ("cpu-avx512bf16", "bf16", "40", "window:3,9"),
        ("sm_80", "f16", "128", "full"),
        ("sm_90a", "bf16", "72", "causal"),
        ("sm_86", "f32", "256", "window:-,0"),
    ] {
        let args = ["emit", "--arch", arch, "--dtype", dtype, "--head-dim", dim, "--mask", mask];
        let run = || place.flashtune(&args).output().unwrap();
        let (one, two) = (run(), run());
        assert!(one.status.success(), "{}", String::from_utf8_lossy(&one.stderr));
        assert!(one.stdout.len() > 1000 && one.stdout == two.stdout, "{args:?}");
        // And in this one.
        let arch = arch.parse().unwrap();
        let problem = flashtune::Problem::forward(
            dtype.parse().unwrap(),
            dim.parse().unwrap(),
            mask.parse::<flashtune::Mask>().unwrap().kind(),
        );
        let problem = problem.unwrap().in_default_precision(arch);
        let shape = flashtune::Shape {
            batch: 1,
            heads: 8,
            kv_heads: 8,
            q_len: 1024,
            kv_len: 1024,
            mask: mask.parse().unwrap(),
        };
        let bucket = flashtune_codegen::ShapeBucket::of(&shape);
        let family = flashtune_codegen::Family::candidates(&problem, arch)[0];
        let schedule = flashtune_codegen::Schedule::default_for(family, &problem, arch, &bucket).unwrap();
        let kernel = flashtune_codegen::Kernel { problem, schedule, arch };
        let set = flashtune_codegen::TemplateSet::embedded();
        assert_eq!(kernel.render(&set).unwrap().text.as_bytes(), one.stdout);
    }
}

/// `benches/trust.py` relies on it.
#[test]
fn faults_are_planted_into_every_family_and_not_into_the_default() {
    let Ok(python) = Command::new("python3").arg("--version").output() else {
        println!("skipped: there is no python3");
        return;
    };
    assert!(python.status.success());
    let place = Place::new();
    let (root, folder) = (ROOT, place.path("planted"));
    let command = assert_cmd::cargo::cargo_bin("flashtune");
    let code = format!(
        "from pathlib import Path; from planted import plant; plant({:?}, {:?}.split(), 'cpu', Path({:?}))",
        command.display().to_string(),
        SMALL.join(" "),
        folder.display().to_string()
    );
    let planted =
        Command::new("python3").args(["-B", "-c", &code]).current_dir(format!("{root}/benches")).output().unwrap();
    assert!(planted.status.success(), "{}", String::from_utf8_lossy(&planted.stderr));
    for name in ["cpu.c", "naive.cu", "sm80.cu", "sm90.cu"] {
        let read = |from: &Path| std::fs::read_to_string(from.join("forward").join(name)).unwrap();
        let (text, own) = (read(&folder), read(&Path::new(root).join("templates")));
        assert!(text.len() > own.len() && !text.contains("FORMULA") && !text.contains("SHIFT"), "{name}");
    }
    // The default computes, with the faults around it.
    let tune = [&["tune", "--trials", "1"], SMALL].concat();
    let done = common::json(place.flashtune(&tune).arg("--json").arg("--templates").arg(&folder));
    assert_eq!(done["tuned"][0]["trials"][0]["result"], "timed", "{done}");
}
