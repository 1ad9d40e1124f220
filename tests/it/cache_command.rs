//! `flashtune cache`: what it says of a folder, finds in it, and removes from it.

use crate::common::{Place, fails};
use std::path::PathBuf;

/// Every kernel's file of a place's cache.
fn kernels(place: &Place) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut open = vec![place.cache()];
    while let Some(folder) = open.pop() {
        for path in std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()) {
            if path.is_dir() {
                open.push(path);
            } else if path.extension().is_some_and(|e| e == "art") {
                found.push(path);
            }
        }
    }
    found
}

#[test]
fn a_cache_is_told_checked_and_emptied() {
    let place = Place::new();
    let nothing = place.json(&["cache"]);
    assert_eq!((&nothing["usage"]["kernels"]["files"], &nothing["usage"]["records"]), (&0.into(), &0.into()));
    assert!(!place.cache().exists(), "looking makes no folder");
    let printed = |args: &[&str]| {
        let output = place.flashtune(args).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    assert!(printed(&["cache"]).contains("nothing yet"));

    place.tune_small();
    let usage = &place.json(&["cache", "show"])["usage"];
    let files = kernels(&place);
    let bytes: u64 = files.iter().map(|f| f.metadata().unwrap().len()).sum();
    assert_eq!(usage["kernels"], serde_json::json!({ "files": files.len(), "bytes": bytes }));
    assert_eq!((&usage["records"], &usage["named"]["files"], &usage["foreign"]), (&1.into(), &1.into(), &0.into()));
    assert!(usage["journal"]["bytes"].as_u64().unwrap() > 0 && usage["snapshot"]["files"] == 1, "{usage}");
    let told = printed(&["cache"]);
    assert!(told.contains("at most 2048 MiB") && told.contains("1 records, which processes read"), "{told}");

    let verified = &place.json(&["cache", "verify"])["verified"];
    assert_eq!((verified["kernels"].as_u64(), &verified["records"]), (Some(files.len() as u64 + 1), &1.into()));
    let mut bytes = std::fs::read(&files[0]).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&files[0], bytes).unwrap();
    fails(&mut place.flashtune(&["cache", "verify"]), 1, &["1 damaged"]);
    let found = place.flashtune(&["cache", "verify", "--json"]).output().unwrap();
    let found: serde_json::Value = serde_json::from_slice(&found.stdout).unwrap();
    assert_eq!(found["verified"]["bad"][0]["path"], files[0].to_str().unwrap());

    // All kernels were used within the hour.
    let kept = place.json(&["cache", "gc", "--limit-mib", "0"]);
    assert_eq!((&kept["removed"]["files"], &kept["kept"]["files"]), (&0.into(), &files.len().into()));

    std::fs::write(place.path("cache/notes.txt"), "mine").unwrap();
    fails(&mut place.flashtune(&["cache", "clear"]), 2, &["1 records", "--yes", "export"]);
    assert_eq!(kernels(&place).len(), files.len(), "nothing went without --yes");
    let cleared = place.json(&["cache", "clear", "--yes"]);
    assert!(cleared["removed"]["files"].as_u64().unwrap() > files.len() as u64, "{cleared}");
    assert!(kernels(&place).is_empty() && place.path("cache/notes.txt").exists());
    assert_eq!(place.json(&["list"]), serde_json::json!([]));
}
