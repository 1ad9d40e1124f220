//! Signed bundles: whose machine code is loaded.

use crate::common::{self, NOWHERE, Place, SMALL, fails, json};
use std::path::{Path, PathBuf};

fn text(path: &Path) -> &str {
    path.to_str().expect("test paths are text")
}

/// The command of somebody who allows nothing by default.
fn strict(place: &Place, args: &[&str]) -> assert_cmd::Command {
    let mut command = place.flashtune(args);
    command.env_remove("FLASHTUNE_ALLOW_UNSIGNED");
    command
}

fn keygen(place: &Place, name: &str) -> (PathBuf, String) {
    let file = place.path(name);
    let made = place.json(&["keygen", text(&file)]);
    (file, made["public"].as_str().unwrap().to_owned())
}

#[test]
fn a_bundle_is_used_by_those_who_trust_its_key() {
    let maker = Place::new();
    let arch = common::host_arch().to_string();
    let bundle = maker.path("b.ftb");
    maker.json(&[&["build"], SMALL, &["--arch", &arch, "--out", text(&bundle)]].concat());
    let (key, public) = keygen(&maker, "key");
    let (_, other) = keygen(&maker, "other");

    let user = Place::new();
    let explain = [&["explain"], SMALL, &["--policy", "sealed", "--bundle", text(&bundle)]].concat();
    let unsigned = ["not signed", "b.ftb", "--allow-unsigned"];
    fails(&mut strict(&user, &explain), 2, &unsigned);
    fails(&mut strict(&user, &["import", text(&bundle)]), 2, &unsigned);
    fails(strict(&user, &["list"]).env("FLASHTUNE_BUNDLES", &bundle), 2, &unsigned);
    json(strict(&user, &explain).args(["--json", "--allow-unsigned"]).env("CC", NOWHERE));

    maker.json(&["sign", text(&bundle), "--key", text(&key)]);
    fails(&mut strict(&user, &explain), 2, &[&public, "not trusted"]);
    fails(strict(&user, &explain).args(["--trust", &other]), 2, &[&public, "not trusted"]);
    let plan = json(strict(&user, &explain).args(["--json", "--trust", &public]).env("CC", NOWHERE));
    assert!(plan[0]["layer"].as_str().unwrap().contains("b.ftb"), "{plan}");
    // Through a file of keys, in the environment.
    let keys = user.path("keys");
    std::fs::write(&keys, format!("# trusted here\n{other}\n{public}\n")).unwrap();
    let mut env = strict(&user, &explain);
    json(env.arg("--json").env("FLASHTUNE_TRUSTED_KEYS", &keys).env("CC", NOWHERE));
    // What was imported is the user's own and needs no key any more.
    json(strict(&user, &["import", text(&bundle)]).args(["--json", "--trust", &public]));
    json(strict(&user, &[&["explain"], SMALL, &["--json", "--policy", "sealed"]].concat()).env("CC", NOWHERE));

    // A byte of the code is another one: no key helps.
    let mut bytes = std::fs::read(&bundle).unwrap();
    bytes[4000] ^= 1;
    std::fs::write(&bundle, bytes).unwrap();
    fails(strict(&Place::new(), &["import", text(&bundle)]).args(["--trust", &public]), 2, &["hash"]);
}

#[test]
fn keys_that_are_none_are_refused() {
    let place = Place::new();
    let (key, _) = keygen(&place, "key");
    fails(&mut place.flashtune(&["keygen", text(&key)]), 2, &["write the key"]);
    fails(&mut place.flashtune(&["list", "--trust", &"zz".repeat(32)]), 2, &["zz", "64 hexadecimal digits"]);
    let bundle = place.path("b.ftb");
    std::fs::write(&bundle, "something of value").unwrap();
    fails(&mut place.flashtune(&["sign", text(&bundle), "--key", text(&key)]), 2, &["b.ftb"]);
    fails(&mut place.flashtune(&["sign", text(&bundle), "--key", NOWHERE]), 2, &[NOWHERE]);
    assert_eq!(std::fs::read_to_string(&bundle).unwrap(), "something of value");
}
