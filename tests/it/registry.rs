//! Bundles in registries: the one that Debian packages, and one that lies.

use crate::common::{self, Place, SMALL, fails, json};
use sha2::{Digest, Sha256};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const NAME: &str = "team/llama:h200";

fn text(path: &Path) -> &str {
    path.to_str().expect("test paths are text")
}

/// The command of somebody who allows nothing by default and has logged in nowhere.
fn strict(place: &Place, args: &[&str]) -> assert_cmd::Command {
    let mut command = place.flashtune(args);
    let variables = ["FLASHTUNE_ALLOW_UNSIGNED", "REGISTRY_AUTH_FILE", "XDG_RUNTIME_DIR"];
    for name in variables.into_iter().chain(["FLASHTUNE_REGISTRY_USER", "FLASHTUNE_REGISTRY_PASSWORD"]) {
        command.env_remove(name);
    }
    // Nothing of this machine's proxies: all registries are on it.
    command.env("NO_PROXY", "127.0.0.1").env("DOCKER_CONFIG", place.path("docker"));
    command
}

/// A signed bundle of one kernel, the key that signed it, and another one.
fn signed(place: &Place, arch: &str, name: &str) -> (PathBuf, String) {
    let (bundle, key) = (place.path(name), place.path(&format!("{name}.key")));
    let public = place.json(&["keygen", text(&key)])["public"].as_str().unwrap().to_owned();
    let build = [&["build"], SMALL, &["--arch", arch, "--out", text(&bundle)]].concat();
    json(place.flashtune(&build).arg("--json").env("SOURCE_DATE_EPOCH", "1700000000"));
    place.json(&["sign", text(&bundle), "--key", text(&key)]);
    (bundle, public)
}

/// The packaged registry on a port of its own, with its files in a folder; it ends with this.
struct Registry {
    child: Child,
    port: u16,
    files: PathBuf,
}

impl Registry {
    /// None, with the reason printed, where it is not installed; a failure where CI must have it.
    fn start(place: &Place, test: &str, password: Option<&str>) -> Option<Self> {
        let own = Path::new(common::ROOT).join(".toolchain/docker-registry/usr/bin/docker-registry");
        let program = if own.is_file() { own } else { PathBuf::from("docker-registry") };
        let files = place.path("registry");
        // A port that was free a moment ago may be taken by another test: then the next one.
        for _ in 0..5 {
            let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
            let auth = match password {
                None => String::new(),
                Some(hash) => {
                    let users = place.path("htpasswd");
                    std::fs::write(&users, format!("tuner:{hash}\n")).unwrap();
                    format!("auth: {{htpasswd: {{realm: test, path: {}}}}}\n", text(&users))
                }
            };
            let config = place.path("registry.yml");
            let written = format!(
                "version: 0.1\nlog: {{level: error}}\nstorage: {{filesystem: {{rootdirectory: {}}}}}\n\
                 http: {{addr: '127.0.0.1:{port}', secret: x}}\n{auth}",
                text(&files)
            );
            std::fs::write(&config, written).unwrap();
            let mut command = Command::new(&program);
            command.args(["serve", text(&config)]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
            let mut child = match command.spawn() {
                Ok(child) => child,
                Err(e) if std::env::var("CI").is_ok_and(|v| v == "true") => {
                    panic!("{test} needs docker-registry on CI: {e}")
                }
                Err(e) => {
                    println!(
                        "skipped {test}: docker-registry: {e} (apt-get install docker-registry, or cargo xtask test)"
                    );
                    return None;
                }
            };
            let began = Instant::now();
            while began.elapsed() < Duration::from_secs(30) && child.try_wait().unwrap().is_none() {
                if TcpStream::connect(("127.0.0.1", port)).is_ok() {
                    return Some(Self { child, port, files });
                }
                std::thread::sleep(Duration::from_millis(20));
            }
            let _ = child.kill();
            let _ = child.wait();
        }
        panic!("the registry does not start");
    }

    fn name(&self) -> String {
        format!("oci://127.0.0.1:{}/{NAME}", self.port)
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A path below a folder that ends so and is a file.
fn find(folder: &Path, wanted: &dyn Fn(&Path) -> bool) -> Option<PathBuf> {
    let entries = std::fs::read_dir(folder).ok()?.map(|e| e.unwrap().path());
    entries.into_iter().find_map(|p| if p.is_dir() { find(&p, wanted) } else { wanted(&p).then_some(p) })
}

#[test]
fn a_registry_gives_back_what_was_pushed_and_verifies() {
    let maker = Place::new();
    let Some(registry) = Registry::start(&maker, "a_registry_gives_back_what_was_pushed_and_verifies", None) else {
        return;
    };
    let name = registry.name();
    let (host, other) = (common::host_arch().to_string(), common::other_cpu_arch().to_string());
    let (bundle, key) = signed(&maker, &host, "here.ftb");
    let (elsewhere, other_key) = signed(&maker, &other, "there.ftb");
    let files = [text(&bundle), text(&elsewhere)];

    let pushed = json(strict(&maker, &["push", &name]).args(files).arg("--json"));
    let pinned = pushed["reference"].as_str().unwrap().to_owned();
    assert!(pinned.contains("/team/llama@sha256:") && pushed["bundles"][0]["signer"] == *key, "{pushed}");
    // The same bundles are the same artifact, in whatever order.
    let again = json(strict(&maker, &["push", &name]).args([files[1], files[0]]).arg("--json"));
    assert_eq!(again["digest"], pushed["digest"]);
    let manifest = find(&registry.files, &|p| std::fs::read(p).is_ok_and(|b| b.starts_with(b"{\"schemaVersion\"")));
    let manifest: serde_json::Value = serde_json::from_slice(&std::fs::read(manifest.unwrap()).unwrap()).unwrap();
    assert_eq!(manifest["artifactType"], "application/vnd.flashtune.bundle.v1");
    let archs = manifest["annotations"]["dev.flashtune.arch"].as_str().unwrap();
    assert!(archs.contains(&host) && archs.contains(&other), "{manifest}");
    let templates = manifest["layers"][0]["annotations"]["dev.flashtune.templates"].as_str().unwrap();
    assert!(templates.starts_with("forward/cpu="), "{manifest}");

    // Into a folder, byte for byte; by tag or by digest.
    let user = Place::new();
    let both = ["--trust", &key, "--trust", &other_key];
    for name in [&name, &pinned] {
        let folder = user.path("bundles");
        json(strict(&user, &["pull", name, "--to", text(&folder), "--json"]).args(both));
        for (pushed, pulled) in [(&bundle, "here.ftb"), (&elsewhere, "there.ftb")] {
            assert_eq!(std::fs::read(pushed).unwrap(), std::fs::read(folder.join(pulled)).unwrap());
        }
        std::fs::remove_dir_all(&folder).unwrap();
    }
    // Into the cache: what is for this device, of which the key of the other bundle is no matter.
    let pulled = json(strict(&user, &["pull", &name, "--trust", &key, "--json"]).env("TMPDIR", user.path("")));
    assert_eq!((&pulled["bundles"][0]["records"], pulled["left_out"].as_array().unwrap().len()), (&1.into(), 1));
    json(strict(&user, &[&["explain"], SMALL, &["--json", "--policy", "sealed"]].concat()).env("CC", common::NOWHERE));

    // What nobody vouches for is not kept; nor is there what was never pushed.
    let nobody = Place::new();
    fails(&mut strict(&nobody, &["pull", &name]), 2, &["not trusted", &key]);
    fails(
        &mut strict(&nobody, &["pull", &name, "--trust", &other_key, "--to", text(&nobody.path("b"))]),
        2,
        &["not trusted"],
    );
    fails(&mut strict(&nobody, &["pull", &name.replace("h200", "none")]), 2, &["nothing of that name"]);
    assert!(!nobody.path("b").exists() && !nobody.cache().exists());
    let unsigned = maker.path("unsigned.ftb");
    maker.json(&[&["build"], SMALL, &["--arch", &host, "--out", text(&unsigned)]].concat());
    fails(&mut strict(&maker, &["push", &name, text(&unsigned)]), 2, &["unsigned.ftb", "not signed"]);

    // A byte of a layer is another one, on the registry's own disk.
    let layer = manifest["layers"][0]["digest"].as_str().unwrap().strip_prefix("sha256:").unwrap().to_owned();
    let blob = find(&registry.files, &|p| p.ends_with(format!("{layer}/data"))).unwrap();
    let mut bytes = std::fs::read(&blob).unwrap();
    bytes[4000] ^= 1;
    std::fs::write(&blob, bytes).unwrap();
    for to in [vec![], vec!["--to", text(&nobody.path("b"))]].into_iter().map(|to| to.into_iter().map(str::to_owned)) {
        let mut pull = strict(&nobody, &["pull", &name, "--allow-unsigned"]);
        fails(pull.args(to), 2, &["the digest of a layer", &layer, "nothing was kept"]);
    }
    assert!(!nobody.path("b").exists() && !nobody.cache().exists());
    drop(registry);
    fails(&mut strict(&nobody, &["pull", &name]), 3, &["127.0.0.1", "check its name"]);
}

#[test]
fn a_registry_with_passwords_takes_those_of_docker_and_podman() {
    let place = Place::new();
    // bcrypt of `s3cret`.
    let hash = "$2b$05$upkkX4flM6e0cft3SEp4O.Dv5EalAC72J0XT8je2zAuAFuEGhBwGG";
    let test = "a_registry_with_passwords_takes_those_of_docker_and_podman";
    let Some(registry) = Registry::start(&place, test, Some(hash)) else { return };
    let (name, host) = (registry.name(), format!("127.0.0.1:{}", registry.port));
    let (bundle, key) = signed(&place, &common::host_arch().to_string(), "b.ftb");
    let push = ["push", &name, text(&bundle)];
    fails(&mut strict(&place, &push), 2, &["refuses access", "docker login", "FLASHTUNE_REGISTRY_USER"]);
    let as_user = |password: &str| {
        let mut command = strict(&place, &push);
        command.env("FLASHTUNE_REGISTRY_USER", "tuner").env("FLASHTUNE_REGISTRY_PASSWORD", password);
        command
    };
    fails(&mut as_user("wrong"), 2, &["refuses access"]);
    fails(&mut as_user(""), 2, &["FLASHTUNE_REGISTRY_PASSWORD is not set"]);
    json(as_user("s3cret").arg("--json"));
    // `tuner:s3cret`, as `docker login` and `podman login` write it.
    let config = format!("{{\"auths\": {{\"{host}\": {{\"auth\": \"dHVuZXI6czNjcmV0\"}}}}}}");
    let out = place.path("out");
    let pull = ["pull", &name, "--trust", &key, "--to", text(&out), "--json"];
    fails(&mut strict(&place, &pull), 2, &["refuses access"]);
    std::fs::create_dir_all(place.path("docker")).unwrap();
    std::fs::write(place.path("docker/config.json"), &config).unwrap();
    json(&mut strict(&place, &pull));
    std::fs::remove_dir_all(place.path("docker")).unwrap();
    std::fs::write(place.path("auth.json"), &config).unwrap();
    json(strict(&place, &pull).env("REGISTRY_AUTH_FILE", place.path("auth.json")));
    let broken = config.replace("dHVuZXI6czNjcmV0", "%%");
    std::fs::write(place.path("auth.json"), broken).unwrap();
    fails(strict(&place, &pull).env("REGISTRY_AUTH_FILE", place.path("auth.json")), 2, &["podman's auth.json", &host]);
}

/// A request: its path, and all of its head.
type Request = (String, String);

/// A server that answers each request as it is told, with bytes; what was asked is kept.
fn server(
    answer: impl Fn(&str, &mut dyn Write) -> std::io::Result<()> + Send + Sync + 'static,
) -> (u16, Arc<Mutex<Vec<Request>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let asked = Arc::new(Mutex::new(Vec::new()));
    let (answer, kept) = (Arc::new(answer), asked.clone());
    std::thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            let (answer, kept) = (answer.clone(), kept.clone());
            std::thread::spawn(move || {
                let mut stream: TcpStream = stream;
                let (mut head, mut byte) = (Vec::new(), [0]);
                while !head.ends_with(b"\r\n\r\n") && stream.read(&mut byte).is_ok_and(|n| n == 1) {
                    head.push(byte[0]);
                }
                let head = String::from_utf8_lossy(&head).into_owned();
                let path = head.split(' ').nth(1).unwrap_or_default().to_owned();
                kept.lock().unwrap().push((path.clone(), head));
                // Whoever was refused hangs up.
                let _ = answer(&path, &mut stream);
            });
        }
    });
    (port, asked)
}

fn answer(out: &mut dyn Write, status: &str, body: &[u8]) -> std::io::Result<()> {
    write!(out, "HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: {}\r\n\r\n", body.len())?;
    out.write_all(body)
}

/// A body that never ends.
fn endless(out: &mut dyn Write) -> std::io::Result<()> {
    write!(out, "HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")?;
    loop {
        out.write_all(&[b' '; 1 << 16])?;
    }
}

/// Layer and manifest, as they would be pushed.
fn artifact(file: &str, bundle: &[u8]) -> (Vec<u8>, String, String) {
    let mut header = tar::Header::new_ustar();
    header.set_size(bundle.len() as u64);
    header.set_mode(0o444);
    let mut tar = tar::Builder::new(Vec::new());
    tar.append_data(&mut header, file, bundle).unwrap();
    let layer = tar.into_inner().unwrap();
    let digest = digest(&layer);
    let blob = |kind: &str| format!("{{\"mediaType\":\"{kind}\",\"digest\":\"{digest}\",\"size\":{}}}", layer.len());
    let manifest = format!(
        "{{\"schemaVersion\":2,\"artifactType\":\"application/vnd.flashtune.bundle.v1\",\
         \"config\":{},\"layers\":[{}]}}",
        blob("application/vnd.oci.image.config.v1+json"),
        blob("application/vnd.oci.image.layer.v1.tar")
    );
    (layer, digest, manifest)
}

fn digest(bytes: &[u8]) -> String {
    format!("sha256:{}", Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect::<String>())
}

#[test]
fn a_registry_that_lies_is_refused_and_leaves_nothing() {
    let place = Place::new();
    let (bundle, key) = signed(&place, &common::host_arch().to_string(), "b.ftb");
    let (layer, blob, manifest) = artifact("b.ftb", &std::fs::read(&bundle).unwrap());
    let user = Place::new();
    // Refused soon, and nothing stays. What comes is verified before its place matters: the tampered layer alone is
    // tried into the cache, too.
    let refused = |port: u16, reference: &str, code: i32, words: &[&str]| {
        let name = format!("oci://127.0.0.1:{port}/team/llama{reference}");
        let both = words.contains(&&*blob);
        for to in [Some("--to"), None].into_iter().filter(|to| to.is_some() || both) {
            let mut pull = strict(&user, &["pull", &name, "--trust", &key]);
            if let Some(option) = to {
                pull.arg(option).arg(user.path("out"));
            }
            let began = Instant::now();
            fails(&mut pull, code, words);
            assert!(began.elapsed() < Duration::from_secs(25), "{words:?} after {:?}", began.elapsed());
            assert!(!user.path("out").exists() && !user.cache().exists(), "{words:?}");
        }
    };
    /// What the manifest says, and what is sent.
    type Body = Box<dyn Fn(&mut dyn Write) -> std::io::Result<()> + Send + Sync>;
    let serve = |manifest: String, body: Body| {
        let answers = move |path: &str, out: &mut dyn Write| match path {
            p if p.contains("/manifests/") => answer(out, "200 OK", manifest.as_bytes()),
            p if p.contains("/blobs/") => body(out),
            _ => answer(out, "200 OK", b"{}"),
        };
        server(answers).0
    };
    let whole = |bytes: Vec<u8>| -> Body { Box::new(move |out| answer(out, "200 OK", &bytes)) };

    // As it should be, first: the rest differs from this in one thing each.
    let good = serve(manifest.clone(), whole(layer.clone()));
    let name = format!("oci://127.0.0.1:{good}/team/llama:x");
    json(&mut strict(&user, &["pull", &name, "--trust", &key, "--to", text(&user.path("out")), "--json"]));
    assert_eq!(std::fs::read(user.path("out/b.ftb")).unwrap(), std::fs::read(&bundle).unwrap());
    std::fs::remove_dir_all(user.path("out")).unwrap();

    refused(good, &format!("@sha256:{}", "0".repeat(64)), 2, &["the digest of the manifest", "nothing was kept"]);
    let mut changed = layer.clone();
    changed[4000] ^= 1;
    refused(serve(manifest.clone(), whole(changed)), ":x", 2, &["the digest of a layer", &blob]);
    let cut = layer[..layer.len() / 2].to_vec();
    refused(serve(manifest.clone(), whole(cut.clone())), ":x", 2, &["the digest of a layer"]);
    let announced = layer.len();
    let hangs_up: Body = Box::new(move |out| {
        write!(out, "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: {announced}\r\n\r\n")?;
        out.write_all(&cut)
    });
    refused(serve(manifest.clone(), hangs_up), ":x", 1, &["127.0.0.1"]);
    refused(serve(manifest.clone(), Box::new(endless)), ":x", 2, &["the length of layer", "more"]);
    let size = format!("\"size\":{}", layer.len());
    let wrong = manifest.replace(&size, &format!("\"size\":{}", layer.len() + 1));
    refused(serve(wrong, whole(layer.clone())), ":x", 2, &["the length of layer"]);
    let huge = manifest.replace(&size, "\"size\":9223372036854775807");
    refused(serve(huge, whole(layer.clone())), ":x", 2, &["at most", "are taken"]);
    let (bad_layer, _, bad_manifest) = artifact("evil.txt", b"x");
    refused(serve(bad_manifest, whole(bad_layer)), ":x", 2, &["holds no bundles", "a name that no bundle has"]);
    let image = manifest.replace("vnd.flashtune.bundle.v1", "vnd.other");
    refused(serve(image, whole(layer.clone())), ":x", 2, &["holds no bundles", "vnd.other"]);
    refused(serve("<html>".to_owned(), whole(layer.clone())), ":x", 2, &["cannot be read"]);
    let (port, _) = server(|path, out| if path == "/v2/" { answer(out, "200 OK", b"") } else { endless(out) });
    refused(port, ":x", 2, &["its manifest has more bytes"]);
    let (port, _) = server(|_, out| answer(out, "500 Oops", b"\x1b[2J"));
    refused(port, ":x", 1, &["500"]);

    // Behind a signature that fits, an entry is not what it was.
    let mut signed = std::fs::read(&bundle).unwrap();
    signed[3000] ^= 1;
    let (layer, _, manifest) = artifact("b.ftb", &signed);
    refused(serve(manifest, whole(layer)), ":x", 2, &["does not match its hash"]);
}

#[test]
fn layers_may_lie_elsewhere_but_no_password_goes_there() {
    let place = Place::new();
    let (bundle, key) = signed(&place, &common::host_arch().to_string(), "b.ftb");
    let (layer, _, manifest) = artifact("b.ftb", &std::fs::read(&bundle).unwrap());
    let (store, asked_there) = server(move |_, out| answer(out, "200 OK", &layer));
    let (port, asked) = server(move |path, out| match path {
        "/v2/" => {
            write!(
                out,
                "HTTP/1.1 401 No\r\nWWW-Authenticate: Basic realm=\"x\"\r\nConnection: close\r\n\
                 Content-Length: 0\r\n\r\n"
            )
        }
        p if p.contains("/manifests/") => answer(out, "200 OK", manifest.as_bytes()),
        p if p.contains("/round") => {
            write!(out, "HTTP/1.1 307 On\r\nLocation: {p}\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
        }
        _ => write!(
            out,
            "HTTP/1.1 307 On\r\nLocation: http://127.0.0.1:{store}/x\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
        ),
    });
    let pull = |name: &str| {
        let name = format!("oci://127.0.0.1:{port}/{name}");
        let mut pull = strict(&place, &["pull", &name, "--trust", &key, "--to", text(&place.path("out")), "--json"]);
        pull.env("FLASHTUNE_REGISTRY_USER", "tuner").env("FLASHTUNE_REGISTRY_PASSWORD", "s3cret");
        pull
    };
    json(&mut pull("team/llama:x"));
    assert_eq!(std::fs::read(place.path("out/b.ftb")).unwrap(), std::fs::read(&bundle).unwrap());
    let with_password = |asked: &Mutex<Vec<Request>>| {
        asked.lock().unwrap().iter().filter(|(_, head)| head.to_lowercase().contains("\r\nauthorization:")).count()
    };
    assert!(with_password(&asked) >= 1);
    assert_eq!((with_password(&asked_there), asked_there.lock().unwrap().len()), (0, 1));
    // A circle ends.
    std::fs::remove_dir_all(place.path("out")).unwrap();
    fails(&mut pull("round/llama:x"), 1, &["redirect"]);
    assert!(!place.path("out").exists());
}
