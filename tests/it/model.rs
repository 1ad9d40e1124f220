//! `flashtune tune --model`: what a model needs, tuned and told.

use crate::common::{Place, ROOT, fails};

fn data(name: &str) -> String {
    format!("{ROOT}/tests/data/models/{name}")
}

#[test]
fn a_dry_run_lists_the_cases_and_what_is_missing_and_touches_nothing() {
    let place = Place::new();
    let plan =
        place.json(&["tune", "--dry-run", "--model", &data("gpt-oss-20b.json"), "--max-len", "1024", "--tp", "8"]);
    assert_eq!((&plan["model_type"], &plan["layers"]), (&"gpt_oss".into(), &24.into()), "{plan}");
    assert_eq!((&plan["heads"], &plan["kv_heads"]), (&8.into(), &1.into()), "{plan}");
    let needs = plan["needs"].as_array().unwrap();
    assert_eq!(needs.len(), 2, "{plan}");
    let problem = needs[1]["problem"].as_str().unwrap();
    assert!(problem.starts_with("forward-bf16-d64-window-s"), "a program with the sinks: {plan}");
    let listed: usize = needs.iter().map(|n| n["cases"].as_array().unwrap().len()).sum();
    assert_eq!(plan["cases"].as_array().unwrap().len(), listed, "{plan}");
    assert!(!plan["unsupported"].to_string().contains("sinks"), "{plan}");
    assert!(!place.cache().exists());

    let told = place.flashtune(&["tune", "--dry-run", "--model", &data("block-sparse.json")]).output().unwrap();
    let told = String::from_utf8(told.stdout).unwrap();
    assert!(told.contains("0 cases to tune") && told.contains("not supported yet: blocksparse"), "{told}");
    // Without a model the built-in set or the options' cases are listed.
    let plan = place.json(&["tune", "--dry-run", "--q-len", "64,128"]);
    assert_eq!(plan["cases"].as_array().unwrap().len(), 2, "{plan}");
    assert!(!place.cache().exists());
}

#[test]
fn a_small_model_is_tuned_and_then_answered_from_the_cache() {
    let place = Place::new();
    // The folder stands for its config.json.
    let tune = ["tune", "--model", &data("folder"), "--trials", "2", "--budget-s", "12", "--max-len", "64"];
    let first = place.json(&tune);
    let tuned = first["tuned"].as_array().unwrap();
    assert_eq!(tuned.len(), first["model"]["cases"].as_array().unwrap().len(), "{first}");
    let decode = tuned.iter().find(|t| t["shape"].as_str().unwrap().contains(" 1x64 ")).expect("a decoding case");
    assert_eq!(decode["problem"], "forward-f32-d32-causal", "{decode}");
    let again = place.json(&tune);
    assert!(again["tuned"].as_array().unwrap().iter().all(|t| t["cached"] == true), "{again}");
}

#[test]
fn a_model_that_no_kernel_serves_is_an_error_that_says_why() {
    let place = Place::new();
    let mut command = place.flashtune(&["tune", "--model", &data("block-sparse.json")]);
    fails(&mut command, 3, &["no kernel that can be tuned computes what the model needs"]);
    let told = String::from_utf8(command.output().unwrap().stdout).unwrap();
    assert!(told.contains("block-sparse masks"), "{told}");
}

#[test]
fn bad_configurations_and_options_are_usage_errors() {
    let place = Place::new();
    let good = data("llama-3.1-8b.json");
    for (args, word) in [
        (&["--model", &data("bad/heads-text.json")][..], "num_attention_heads is \"32\""),
        (&["--model", &data("bad/cut.json")], "not JSON"),
        (&["--model", &data("bad")], "config.json"),
        (&["--model", "/dev/zero"], "no file"),
        (&["--model", &good, "--tp", "3"], "--tp"),
        (&["--model", &good, "--max-len", "0"], "--max-len"),
        (&["--model", &good, "--batch", "0"], "--batch"),
        (&["--model", &good, "--heads", "4"], "--model says"),
        (&["--model", &good, "--dtype", "f16,bf16"], "--dtype"),
        (&["--tp", "2"], "--model"),
    ] {
        fails(&mut place.flashtune(&[&["tune", "--dry-run"], args].concat()), 2, &[word]);
    }
}
