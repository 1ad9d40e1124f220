//! The pages in a real browser: Chromium without a window, told what to do through a pipe (DevTools protocol).
//!
//! `cargo xtask browser` finds one and runs these.

use crate::cached::tests::{HOSTILE, record};
use crate::read::tests::sample;
use crate::{CachePart, CacheReport, CachedRecord, ModelCase, UntunedCalls, cache_html, html};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// The program; set by `cargo xtask browser`.
const VARIABLE: &str = "FLASHTUNE_TEST_CHROMIUM";
/// Pages that were made elsewhere, to look at as well, separated as in `PATH`.
const PAGES: &str = "FLASHTUNE_TEST_PAGES";
/// A folder for pictures of those.
const PICTURES: &str = "FLASHTUNE_TEST_PICTURES";
const PATIENCE: Duration = Duration::from_secs(60);

struct Browser {
    child: Child,
    to: ChildStdin,
    from: Receiver<Value>,
    session: Option<String>,
    next: u64,
    /// What the page said and asked for since it was opened.
    events: Vec<Value>,
    folder: tempfile::TempDir,
}

impl Browser {
    fn start() -> Self {
        let program = std::env::var_os(VARIABLE).unwrap_or_else(|| panic!("{VARIABLE} names no browser"));
        let folder = tempfile::tempdir().unwrap();
        let mut command = Command::new("sh");
        // It takes orders on descriptor 3 and answers on 4. The pages are this program's own, so that a container that
        // has no sandbox to give does as well.
        command.args(["-c", "exec \"$@\" 3<&0 4>&1 0</dev/null 1>&2", "sh"]).arg(program);
        command.args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]);
        command.args(["--no-first-run", "--remote-debugging-pipe"]);
        command.arg(format!("--user-data-dir={}", folder.path().join("profile").display())).arg("about:blank");
        command.env("HOME", folder.path()).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().unwrap();
        let (to, out) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        let (send, from) = channel();
        std::thread::spawn(move || {
            for message in out.split(0) {
                let Ok(message) = message else { break };
                if send.send(serde_json::from_slice(&message).unwrap()).is_err() {
                    break;
                }
            }
        });
        let mut browser = Self { child, to, from, session: None, next: 0, events: Vec::new(), folder };
        let target = browser.order("Target.createTarget", json!({ "url": "about:blank" }))["targetId"].clone();
        let session = browser.order("Target.attachToTarget", json!({ "targetId": target, "flatten": true }));
        browser.session = Some(session["sessionId"].as_str().unwrap().to_owned());
        for domain in ["Page", "Runtime", "Network", "Log", "Audits"] {
            browser.order(&format!("{domain}.enable"), json!({}));
        }
        browser
    }

    fn order(&mut self, method: &str, params: Value) -> Value {
        self.next += 1;
        let mut message = json!({ "id": self.next, "method": method, "params": params });
        if let Some(session) = &self.session {
            message["sessionId"] = json!(session);
        }
        self.to.write_all(format!("{message}\0").as_bytes()).unwrap();
        let began = Instant::now();
        loop {
            let left = PATIENCE.checked_sub(began.elapsed()).unwrap_or_default();
            let mut answer = self.from.recv_timeout(left).unwrap_or_else(|e| panic!("{method}: {e}"));
            if answer["id"] == self.next {
                assert!(answer["error"].is_null(), "{method}: {answer}");
                return answer["result"].take();
            }
            self.events.push(answer);
        }
    }

    fn until(&mut self, event: &str) {
        let began = Instant::now();
        while !self.events.iter().any(|e| e["method"] == event) {
            let left = PATIENCE.checked_sub(began.elapsed()).unwrap_or_default();
            self.events.push(self.from.recv_timeout(left).unwrap_or_else(|e| panic!("{event}: {e}")));
        }
    }

    fn size(&mut self, width: u32, height: u32) {
        let size = json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 640 });
        self.order("Emulation.setDeviceMetricsOverride", size);
    }

    fn open(&mut self, page: &str) {
        let file = self.folder.path().join("page.html");
        std::fs::write(&file, page).unwrap();
        self.open_file(&file, "");
    }

    fn open_file(&mut self, file: &Path, hash: &str) {
        // Another address in between: with the hash alone it would stay where it is.
        for url in ["about:blank".to_owned(), format!("file://{}{hash}", file.display())] {
            self.events.clear();
            self.order("Page.navigate", json!({ "url": url }));
            self.until("Page.loadEventFired");
        }
    }

    /// The value of an expression in the page.
    fn value(&mut self, expression: &str) -> Value {
        let ask = json!({ "expression": expression, "returnByValue": true, "awaitPromise": true });
        let mut told = self.order("Runtime.evaluate", ask);
        assert!(told["exceptionDetails"].is_null(), "{expression}: {told}");
        told["result"]["value"].take()
    }

    /// Texts of the shown rows of a table's column.
    fn column(&mut self, section: &str, name: &str) -> Vec<String> {
        let shown = format!(
            "Array.from(document.getElementById('{section}').parentElement.querySelectorAll('tbody tr'))
                .filter(row => !row.hidden).map(row => row.querySelector('[data-name={name}]').firstChild.textContent)"
        );
        serde_json::from_value(self.value(&shown)).unwrap()
    }

    /// Moves the mouse to the middle of an element and clicks.
    fn click(&mut self, element: &str) {
        let place = format!(
            "(() => {{ const e = {element}; e.scrollIntoView({{ block: 'center', inline: 'center' }});
                const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]; }})()"
        );
        let place = self.value(&place);
        for kind in ["mousePressed", "mouseReleased"] {
            let event = json!({ "type": kind, "x": place[0], "y": place[1], "button": "left", "clickCount": 1 });
            self.order("Input.dispatchMouseEvent", event);
        }
    }

    /// All records again.
    fn filter_nothing(&mut self) {
        let input = "document.querySelector('#records ~ .tools input')";
        self.value(&format!("{input}.value = ''"));
        self.value(&format!("{input}.dispatchEvent(new Event('input'))"));
    }

    fn press(&mut self, key: &str, text: &str) {
        for kind in ["keyDown", "keyUp"] {
            let text = if kind == "keyDown" { text } else { "" };
            let code = if key == "Enter" { 13 } else { 9 };
            let event = json!({ "type": kind, "key": key, "code": key, "text": text, "windowsVirtualKeyCode": code });
            self.order("Input.dispatchKeyEvent", event);
        }
    }

    /// Nothing went wrong, nothing was asked for but the page, and it is as wide as the window.
    fn sound(&mut self, what: &str) {
        // Whatever came before the answer to this is among the events.
        let width = self.value("document.documentElement.scrollWidth - document.documentElement.clientWidth");
        let text = |e: &Value| e["params"].to_string();
        for event in &self.events {
            match event["method"].as_str().unwrap_or_default() {
                "Runtime.exceptionThrown"
                | "Runtime.consoleAPICalled"
                | "Log.entryAdded"
                | "Audits.issueAdded"
                | "Page.javascriptDialogOpening" => panic!("{what}: {}", text(event)),
                "Network.requestWillBeSent" => {
                    let url = event["params"]["request"]["url"].as_str().unwrap();
                    assert!(url == "about:blank" || url.contains(".html"), "{what}: it asks for {url}");
                }
                _ => {}
            }
        }
        assert_eq!(width, 0, "{what}: wider than the window");
    }

    /// A picture of the page's upper end, so many pixels high at most.
    fn picture(&mut self, file: &Path, most: u64) {
        use base64::Engine as _;
        let size = self.order("Page.getLayoutMetrics", json!({}))["cssContentSize"].take();
        let height = size["height"].as_f64().unwrap().min(most as f64);
        let clip = json!({ "x": 0, "y": 0, "width": size["width"], "height": height, "scale": 1 });
        let how = json!({ "format": "png", "clip": clip, "captureBeyondViewport": true });
        let data = self.order("Page.captureScreenshot", how)["data"].take();
        let bytes = base64::prelude::BASE64_STANDARD.decode(data.as_str().unwrap()).unwrap();
        std::fs::write(file, bytes).unwrap();
    }

    fn scheme(&mut self, scheme: &str) {
        let features = json!([{ "name": "prefers-color-scheme", "value": scheme }]);
        self.order("Emulation.setEmulatedMedia", json!({ "features": features }));
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Records that differ in what they are sorted by.
fn records(count: usize) -> Vec<CachedRecord> {
    let of = |n: usize| {
        let mut r = record(n);
        // 37 has no factor in common with the counts of these tests.
        let us = 50.0 + (n * 37 % count) as f64;
        let default = r.default.as_mut().unwrap();
        default.median_us = us * 1.2;
        default.rounds_us.iter_mut().for_each(|t| *t = us * 1.2);
        let winner = r.winner.as_mut().unwrap();
        winner.median_us = us;
        winner.rounds_us.iter_mut().for_each(|t| *t = us);
        if n % 10 == 3 {
            r.stale = vec!["driver was 570.86, is 580.159".to_owned()];
        }
        r
    };
    (0..count).map(of).collect()
}

fn report(count: usize) -> CacheReport {
    let records = records(count);
    let model = |n: usize| ModelCase {
        model: "llama".into(),
        used_for: "decode".into(),
        device: records[n].device.clone(),
        problem: records[n].problem.clone(),
        shape: records[n].shape.clone(),
        record: n.is_multiple_of(2).then(|| records[n].id.clone()),
        gain: n.is_multiple_of(2).then_some(1.25),
    };
    CacheReport {
        title: "What flashtune has tuned".into(),
        facts: vec![["from".into(), "~/.cache/flashtune".into()]],
        parts: vec![CachePart { name: "kernels".into(), files: 3, bytes: 3000 }],
        untuned: vec![UntunedCalls { problem: "p".into(), shape: "s".into(), calls: 7 }],
        models: (0..4.min(count)).map(model).collect(),
        records,
    }
}

#[test]
#[ignore = "needs Chromium: cargo xtask browser"]
fn records_are_sorted_filtered_opened_and_linked() {
    let mut browser = Browser::start();
    browser.size(1280, 900);
    browser.open(&cache_html(&report(40)).unwrap());
    browser.sound("the page of a cache");
    let header = |name: &str| {
        format!(
            "Array.from(document.querySelectorAll('#records ~ .scroll th button'))
                .find(b => b.textContent === '{name}')"
        )
    };
    let number = |text: &String| text.split(' ').next().unwrap().parse::<f64>().unwrap();
    let times: Vec<f64> = (0..40).map(|n| 50.0 + f64::from(n)).collect();
    browser.click(&header("Time"));
    assert_eq!(browser.column("records", "Time").iter().map(number).collect::<Vec<_>>(), times);
    // By the keyboard, the other way.
    browser.value(&format!("{}.focus()", header("Time")));
    browser.press("Enter", "\r");
    let down: Vec<f64> = times.iter().rev().copied().collect();
    assert_eq!(browser.column("records", "Time").iter().map(number).collect::<Vec<_>>(), down);
    let sorted = browser.value("document.querySelector('#records ~ .scroll th[aria-sort]').getAttribute('aria-sort')");
    assert_eq!(sorted, "descending");

    browser.click("document.querySelector('#records ~ .tools input')");
    browser.order("Input.insertText", json!({ "text": "DRIVER 13x13" }));
    assert_eq!(browser.column("records", "Shape"), ["1x32/8 13x13"]);
    let state = browser.value("document.querySelector('#records ~ .tools [role=status]').textContent");
    assert_eq!(state, "1 of 1 shown, 40 in all");
    // A link leads to its record although the filter hides it.
    browser.click("document.querySelector('#models ~ .scroll a')");
    // The page is told of the new address after the click.
    let target = "new Promise(done => setTimeout(() => {
        const row = document.querySelector(':target'); done([row.id, row.hidden]); }, 200))";
    assert_eq!(browser.value(target), json!([format!("r-{:016x}", 0), false]));

    browser.filter_nothing();
    let first = "document.querySelector('#records ~ .scroll tbody tr details')";
    assert_eq!(browser.value(&format!("{first}.querySelector('li').checkVisibility()")), false);
    browser.click(&format!("{first}.querySelector('summary')"));
    assert_eq!(browser.value(&format!("{first}.querySelector('li').checkVisibility()")), true);
    browser.sound("the page of a cache, used");
}

#[test]
#[ignore = "needs Chromium: cargo xtask browser"]
fn ten_thousand_records_open_and_are_found() {
    let mut browser = Browser::start();
    browser.size(1280, 900);
    let page = cache_html(&report(10_000)).unwrap();
    let began = Instant::now();
    browser.open(&page);
    let opened = began.elapsed();
    assert_eq!(browser.column("records", "Shape").len(), 300);
    browser.click("document.querySelector('#records ~ .tools input')");
    let began = Instant::now();
    browser.order("Input.insertText", json!({ "text": "9999x9999" }));
    assert_eq!(browser.column("records", "Shape"), ["1x32/8 9999x9999"]);
    let found = began.elapsed();
    browser.filter_nothing();
    browser.click("document.querySelector('#records ~ .tools button')");
    assert_eq!(browser.column("records", "Shape").len(), 10_000);
    browser.sound("10,000 records");
    println!("10,000 records, {} bytes: open after {opened:?}, filtered after {found:?}", page.len());
    assert!(opened < Duration::from_secs(30) && found < Duration::from_secs(10), "{opened:?} {found:?}");
}

#[test]
#[ignore = "needs Chromium: cargo xtask browser"]
fn hostile_texts_run_nothing_and_load_nothing() {
    let mut browser = Browser::start();
    let mut hostile = report(3);
    for r in &mut hostile.records {
        for field in [&mut r.problem, &mut r.shape, &mut r.device, &mut r.schedule, &mut r.id, &mut r.conditions] {
            field.push_str(HOSTILE);
        }
        r.stale = vec![HOSTILE.to_owned()];
        r.finalists[0].schedule = HOSTILE.to_owned();
    }
    hostile.title = HOSTILE.to_owned();
    hostile.facts = vec![[HOSTILE.to_owned(), HOSTILE.to_owned()]];
    browser.open(&cache_html(&hostile).unwrap());
    browser.sound("hostile texts");
    assert_eq!(browser.value("document.querySelectorAll('img').length"), 0);
    assert_eq!(browser.value("document.title"), HOSTILE);
    assert_eq!(browser.value("document.querySelectorAll('#records ~ .scroll tbody tr').length"), 3);

    // Markup that were in the page in spite of escaping: the policy lets none of it run or load.
    let page = cache_html(&report(3)).unwrap();
    let planted = "<script>document.title = 'ran'</script>\
                   <img src='https://example.com/x.png' onerror=\"document.title = 'ran'\">\
                   <style>h1 { color: rgb(1, 2, 3) }</style>";
    browser.open(&page.replace("<h1>", &format!("{planted}<h1>")));
    assert_eq!(browser.value("document.title"), "What flashtune has tuned");
    assert_ne!(browser.value("getComputedStyle(document.querySelector('h1')).color"), "rgb(1, 2, 3)");
    let refused = browser.events.iter().filter(|e| e["method"] == "Log.entryAdded").count();
    assert!(refused >= 3, "{:?}", browser.events);
    let sent = |e: &Value| e["method"] == "Network.responseReceived" && e["params"].to_string().contains("example.com");
    assert!(!browser.events.iter().any(sent));
}

#[test]
#[ignore = "needs Chromium: cargo xtask browser"]
fn pages_are_read_without_script_on_a_phone_and_in_the_dark() {
    let mut browser = Browser::start();
    let pages = [("cache", cache_html(&report(12)).unwrap()), ("bench", html(&sample()).unwrap())];
    for (name, page) in &pages {
        for width in [1920, 1280, 800, 375] {
            browser.size(width, 800);
            browser.open(page);
            browser.sound(&format!("{name}, {width} wide"));
        }
        browser.size(1280, 800);
        let mut papers = ["light", "dark"].map(|scheme| {
            browser.scheme(scheme);
            browser.open(page);
            let colours = "['color', 'backgroundColor'].map(c => getComputedStyle(document.body)[c])";
            serde_json::from_value::<[String; 2]>(browser.value(colours)).unwrap()
        });
        assert_ne!(papers[0], papers[1], "{name}");
        papers[1].reverse();
        // Dark ink on light paper, and the other way round.
        let light = |colour: &str| colour.bytes().filter(u8::is_ascii_digit).count() >= 9;
        assert!(papers.iter().all(|[ink, paper]| !light(ink) && light(paper)), "{name}: {papers:?}");
        browser.scheme("light");
    }
    browser.order("Emulation.setScriptExecutionDisabled", json!({ "value": true }));
    browser.open(&pages[0].1);
    browser.order("Emulation.setScriptExecutionDisabled", json!({ "value": false }));
    assert_eq!(browser.column("records", "Shape").len(), 12);
    assert_eq!(browser.value("document.querySelector('#records ~ .tools').hidden"), true);
}

#[test]
#[ignore = "needs Chromium: cargo xtask browser"]
fn pages_that_were_made_elsewhere_are_sound() {
    let Some(pages) = std::env::var_os(PAGES) else { return };
    let pictures = std::env::var_os(PICTURES).map(PathBuf::from);
    let mut browser = Browser::start();
    for page in std::env::split_paths(&pages) {
        let name = page.file_stem().unwrap().to_str().unwrap().to_owned();
        for (view, width, height, scheme) in
            [("", 1280, 900, "light"), ("-dark", 1280, 900, "dark"), ("-phone", 375, 800, "light")]
        {
            browser.size(width, height);
            browser.scheme(scheme);
            browser.open_file(&page.canonicalize().unwrap(), "");
            browser.sound(&format!("{name}{view}"));
            if let Some(folder) = &pictures {
                // With something of what is folded away.
                browser.value("document.querySelectorAll('details').forEach((d, i) => d.open = i == 3)");
                browser.picture(&folder.join(format!("{name}{view}.png")), 1400);
            }
        }
    }
}
