//! What is not on this machine: typed errors with remedies, exit code 3, no panic.

use crate::common::{NOWHERE, Place, SMALL, fails, json};
use flashtune::{DType, DeviceSpec, Engine, Mask, MaskKind, Problem, Shape};

#[test]
fn without_a_c_compiler_the_cpu_device_says_how_to_get_one() {
    let place = Place::new();
    let explain = [&["explain"], SMALL].concat();
    fails(place.flashtune(&explain).env("CC", NOWHERE), 3, &[NOWHERE, "CC"]);
    fails(place.flashtune(&[&["tune"], SMALL].concat()).env("CC", NOWHERE), 3, &[NOWHERE]);
    fails(place.flashtune(&["check"]).env("CC", NOWHERE), 3, &[NOWHERE]);
}

#[test]
fn a_c_compiler_that_is_none_is_an_error_not_a_crash() {
    let place = Place::new();
    let explain = [&["explain"], SMALL].concat();
    let output = place.flashtune(&explain).env("CC", "/bin/false").output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(matches!(output.status.code(), Some(1 | 3)), "{stderr}");
    assert!(stderr.contains("error: ") && stderr.contains("false") && !stderr.contains("panicked"), "{stderr}");
}

#[test]
fn without_nvrtc_a_build_for_a_gpu_says_where_it_was_looked_for() {
    let place = Place::new();
    let out = place.path("x.ftb");
    let args = ["build", "--arch", "sm_80", "--out", out.to_str().unwrap()];
    fails(place.flashtune(&args).env("FLASHTUNE_NVRTC", NOWHERE), 3, &["NVRTC", NOWHERE]);
    assert!(!out.exists());
}

#[test]
fn without_a_driver_the_cuda_device_says_so() {
    if flashtune_runtime::cuda::driver_present() {
        println!("skipped: this machine has a CUDA driver");
        return;
    }
    let place = Place::new();
    let mut command = crate::common::command();
    let command = command.arg("--cache").arg(place.cache());
    fails(command.args(["explain", "--device", "cuda"]), 3, &["libcuda"]);
    // `auto` takes the CPU without a word about it being missing.
    let mut auto = crate::common::command();
    let auto = auto.arg("--cache").arg(place.cache()).args(["--device", "auto", "--json", "explain"]).args(SMALL);
    assert!(json(auto)[0]["arch"].as_str().unwrap().starts_with("cpu-"));
}

#[test]
fn an_unwritable_cache_stops_tuning_but_not_computing() {
    let place = Place::new();
    // A file where the folder should be stops root as well.
    std::fs::write(place.cache(), "a file").unwrap();
    fails(&mut place.flashtune(&[&["tune"], SMALL].concat()), 2, &["cache", "FLASHTUNE_CACHE"]);
    let (input, _) = place.inputs("in.safetensors", DType::F32, [1, 2, 16, 32], [1, 2, 16, 32]);
    let output = place.path("out.safetensors");
    let mut run = place.flashtune(&["run", input.to_str().unwrap(), "-o", output.to_str().unwrap()]);
    let done = run.output().unwrap();
    let stderr = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{stderr}");
    let warnings: Vec<&str> = stderr.lines().filter(|l| l.contains("WARN") && l.contains("kept")).collect();
    let [once] = warnings[..] else { panic!("one warning: {stderr}") };
    assert!(
        once.contains("nothing will be kept") && once.contains("cache") && once.contains("FLASHTUNE_CACHE"),
        "{once}"
    );
    assert!(output.exists());
}

#[test]
fn an_unusable_cache_is_said_at_opening_and_by_who_must_write() {
    let place = Place::new();
    std::fs::write(place.cache(), "a file").unwrap();
    let opened = Engine::builder().device(DeviceSpec::Cpu).cache_dir(place.cache()).build().unwrap();
    assert!(opened.cache_dir().is_none() && opened.layers().own().is_none());
    let problem = Problem::forward(DType::F32, 32, MaskKind::FULL).unwrap();
    let shape = Shape { batch: 1, heads: 1, kv_heads: 1, q_len: 8, kv_len: 8, mask: Mask::Full };
    let e = opened.tune(&problem, &shape).err().unwrap().to_string();
    assert!(e.contains("cache") && e.contains("set FLASHTUNE_CACHE to a folder"), "{e}");
    assert_eq!(std::fs::read_to_string(place.cache()).unwrap(), "a file");
}

#[test]
fn the_doctor_finds_what_is_there_and_says_what_to_do_about_the_rest() {
    let place = Place::new();
    let report = place.json(&["doctor"]);
    assert_eq!(report["usable"], true);
    let findings = report["findings"].as_array().unwrap();
    for what in ["cpu", "c compiler", "nvrtc", "cuda driver", "templates", "cache"] {
        assert!(findings.iter().any(|f| f["what"] == what), "{what}: {report}");
    }
    assert!(!place.cache().exists(), "looking leaves no traces");

    let mut bare = place.flashtune(&["doctor", "--json"]);
    let bare = bare.env("CC", NOWHERE).env("FLASHTUNE_NVRTC", NOWHERE).output().unwrap();
    assert_eq!(bare.status.code(), Some(3));
    let report: serde_json::Value = serde_json::from_slice(&bare.stdout).unwrap();
    for what in ["c compiler", "nvrtc"] {
        let finding = report["findings"].as_array().unwrap().iter().find(|f| f["what"] == what).unwrap();
        assert_eq!(finding["ok"], false, "{report}");
        assert!(finding["text"].as_str().unwrap().contains(NOWHERE), "{report}");
    }
}

#[test]
fn the_doctor_tells_what_a_report_of_a_fault_needs() {
    let place = Place::new();
    let text = |path: &std::path::Path| path.to_str().unwrap().to_owned();
    let (bundle, key) = (place.path("b.ftb"), place.path("key"));
    let arch = crate::common::host_arch().to_string();
    place.json(&[&["build"], SMALL, &["--arch", &arch, "--out", &text(&bundle)]].concat());
    let public = place.json(&["keygen", &text(&key)])["public"].as_str().unwrap().to_owned();
    place.json(&["sign", &text(&bundle), "--key", &text(&key)]);
    let python = place.program(
        "python",
        r#"#!/bin/sh
echo '{"python": "3.99", "program": "/opt/py/bin/python", "packages": {"torch": "9.1"},
"flashtune": {"version": "0.1", "library": "0.2"}}'
"#,
    );
    let doctor = |more: &[&str]| {
        let mut command = place.flashtune(&[&["doctor", "--python", &text(&python)], more].concat());
        command
            .env("FLASHTUNE_BUNDLES", &bundle)
            .env("FLASHTUNE_TRUSTED_KEYS", &public)
            .env("HOME", place.path("alice"));
        command.env("USER", "alice").env("FLASHTUNE_CAHCE", "/srv/alice/cache").env("CC", "cc");
        command.env_remove("FLASHTUNE_ALLOW_UNSIGNED");
        command.output().unwrap()
    };
    let report: serde_json::Value = serde_json::from_slice(&doctor(&["--json", "--policy", "sealed"]).stdout).unwrap();
    let version = env!("CARGO_PKG_VERSION");
    assert!(report["versions"]["flashtune"].as_str().unwrap().starts_with(&format!("{version} (")), "{report}");
    assert_eq!(report["versions"]["kernel ABI"], flashtune_codegen::abi::ABI_VERSION.to_string());
    let setting = |name: &str| {
        let found = report["settings"].as_array().unwrap().iter().find(|s| s["name"] == name).unwrap();
        [&found["value"], &found["from"]].map(|v| v.as_str().unwrap().to_owned())
    };
    assert_eq!(setting("policy"), ["sealed", "--policy"]);
    assert_eq!(setting("cache"), [text(&place.cache()), "--cache".to_owned()]);
    assert_eq!(setting("templates"), ["built in", "default"]);
    assert_eq!(setting("unsigned bundles"), ["false", "default"]);
    // Those who run tests may have set others.
    let unknown = report["unknown_variables"].as_array().unwrap();
    assert!(unknown.contains(&"FLASHTUNE_CAHCE".into()) && !unknown.contains(&"FLASHTUNE_BUNDLES".into()), "{report}");
    assert_eq!(report["variables"]["CC"], "cc");
    let found = &report["bundles"][0];
    assert_eq!(
        (&found["signer"], &found["from"], &found["kernels"]),
        (&public.as_str().into(), &"FLASHTUNE_BUNDLES".into(), &1.into())
    );
    assert!(found["error"].is_null() && found["root"].as_str().unwrap().len() == 64, "{found}");
    assert_eq!(report["trusted_keys"], serde_json::json!([public]));
    assert_eq!(
        (&report["python"]["packages"]["torch"], &report["python"]["flashtune"]["library"]),
        (&"9.1".into(), &"0.2".into())
    );

    let told = |output: std::process::Output| String::from_utf8(output.stdout).unwrap();
    let open = told(doctor(&[]));
    for word in [
        &public,
        "setting policy",
        "FLASHTUNE_CAHCE is set",
        "torch 9.1",
        "flashtune 0.1 with library 0.2",
        "/srv/alice",
    ] {
        assert!(open.contains(word), "{word}: {open}");
    }
    for redacted in [told(doctor(&["--redact"])), told(doctor(&["--redact", "--json"]))] {
        for secret in ["alice", &public, &text(&place.cache())] {
            assert!(!redacted.contains(secret), "{secret}: {redacted}");
        }
        assert!(redacted.contains(&public[..8]) && redacted.contains("9.1"), "{redacted}");
    }
    // An interpreter that is not there is told, and no failure.
    let none = place.json(&["doctor", "--python", NOWHERE]);
    assert!(none["python"]["error"].as_str().unwrap().contains(NOWHERE), "{none}");
}

#[test]
fn a_closed_pipe_is_no_error() {
    use std::process::{Command, Stdio};
    let place = Place::new();
    let mut child = Command::new(assert_cmd::cargo::cargo_bin("flashtune"))
        .arg("--cache")
        .arg(place.cache())
        .args(["emit", "--arch", "sm_80"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn a_build_that_takes_no_records_needs_no_cache_folder() {
    let place = Place::new();
    let bundle = place.path("built.ftb");
    let mut command = crate::common::command();
    for name in ["HOME", "XDG_CACHE_HOME", "FLASHTUNE_CACHE", "FLASHTUNE_TEMPLATES", "FLASHTUNE_BUNDLES"] {
        command.env_remove(name);
    }
    let out = bundle.to_str().unwrap();
    let args = [&["build", "--arch", "cpu-generic", "--out", out], SMALL].concat();
    command.args(args).assert().success();
    assert!(bundle.is_file());
}
