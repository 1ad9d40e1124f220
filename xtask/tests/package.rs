//! The package works where it is unpacked, and says what is in it.

use serde_json::Value;
use sha2::{Digest, Sha256};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Makes a package from the debug build, which the other tests need anyway.
fn package(out: &Path, more: &[&str]) -> PathBuf {
    let made = Command::new(env!("CARGO_BIN_EXE_xtask"))
        .args(["package", "--profile", "dev", "--out"])
        .arg(out)
        .args(more)
        .output()
        .expect("xtask starts");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(made.status.success(), "{}", text(&made.stderr));
    text(&made.stdout).lines().last().expect("it prints where the package is").into()
}

#[test]
fn the_package_runs_where_it_is_unpacked() {
    let tmp = tempfile::tempdir().unwrap();
    let folder = package(tmp.path(), &[]);
    let manifest: Value = serde_json::from_slice(&std::fs::read(folder.join("MANIFEST.json")).unwrap()).unwrap();
    assert_eq!(manifest["version"], env!("CARGO_PKG_VERSION"));
    let files = manifest["files"].as_array().unwrap();
    for file in files {
        let bytes = std::fs::read(folder.join(file["path"].as_str().unwrap())).unwrap();
        let hash: String = Sha256::digest(&bytes).iter().map(|b| format!("{b:02x}")).collect();
        assert_eq!((&file["bytes"], &file["sha256"]), (&bytes.len().into(), &hash.into()), "{file}");
    }
    for part in [
        "bin/flashtune",
        "lib/libflashtune.so",
        "include/flashtune.h",
        "python/flashtune/lib/libflashtune.so",
        "python/flashtune/__init__.py",
        "README.md",
        "LICENSE",
        "THIRD-PARTY.txt",
        "sbom.cdx.json",
        "templates/forward/cpu.c",
        "benches/peers.py",
    ] {
        assert!(files.iter().any(|f| f["path"] == part), "{part} is not in {manifest}");
    }

    let templates = files.iter().filter_map(|f| f["path"].as_str()?.strip_prefix("templates/"));
    let strange: Vec<_> = templates.filter(|name| name.ends_with(".rs") || !name.contains('/')).collect();
    assert!(strange.is_empty(), "{strange:?}");

    let doctor = Command::new(folder.join("bin/flashtune"))
        .args(["doctor", "--json", "--device", "cpu", "--templates", "templates", "--cache"])
        .arg(tmp.path().join("cache"))
        .current_dir(&folder)
        .output()
        .unwrap();
    let found: Value = serde_json::from_slice(&doctor.stdout).unwrap();
    assert_eq!(found["usable"], true, "{found}");

    python(&folder, tmp.path());

    // A package is not mixed with an older one.
    let again = Command::new(env!("CARGO_BIN_EXE_xtask")).args(["package", "--out"]).arg(tmp.path()).output().unwrap();
    let told = String::from_utf8_lossy(&again.stderr).into_owned();
    assert!(!again.status.success() && told.contains("already there"), "{told}");
}

/// The packaged Python finds the packaged library, and computes where there is NumPy.
fn python(folder: &Path, tmp: &Path) {
    if !Command::new("python3").arg("--version").output().is_ok_and(|o| o.status.success()) {
        println!("skipped: no python3");
        return;
    }
    const SCRIPT: &str = "
import flashtune
flashtune.Engine('cpu')
assert flashtune._library.find().parts[-3:] == ('flashtune', 'lib', 'libflashtune.so'), flashtune._library.find()
try:
    import numpy as np
except ImportError:
    print('no numpy')
else:
    q = np.random.default_rng(0).standard_normal((1, 5, 2, 32)).astype('float32')
    scores = np.einsum('bqhd,bkhd->bhqk', q, q) / 32 ** 0.5
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    expected = np.einsum('bhqk,bkhd->bqhd', weights / weights.sum(-1, keepdims=True), q)
    assert abs(flashtune.flash_attn_func(q, q, q) - expected).max() < 1e-5
print('done')
";
    // Where `cargo xtask python` puts NumPy when this Python has none.
    let toolchain = Path::new(env!("CARGO_MANIFEST_DIR")).join("../.toolchain/python");
    let path = std::env::join_paths([folder.join("python"), toolchain]).unwrap();
    let ran = Command::new("python3")
        .args(["-B", "-c", SCRIPT])
        .env("PYTHONPATH", path)
        .env("FLASHTUNE_CACHE", tmp.join("cache"))
        .env_remove("FLASHTUNE_LIBRARY")
        .current_dir(tmp)
        .output()
        .unwrap();
    let told = [ran.stdout, ran.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    assert!(ran.status.success() && told.contains("done"), "{told}");
}

#[test]
fn options_that_do_not_exist_are_refused() {
    for (args, word) in [(&["--frob"][..], "--frob"), (&["--out"], "--out needs a value")] {
        let out = Command::new(env!("CARGO_BIN_EXE_xtask")).arg("package").args(args).output().unwrap();
        let told = String::from_utf8_lossy(&out.stderr).into_owned();
        assert!(out.status.code() == Some(2) && told.contains(word), "{told}");
    }
}
