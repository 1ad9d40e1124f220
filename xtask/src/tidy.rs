//! `cargo xtask tidy`: what no compiler looks at. Lines of code have at most 120 columns, names of tests fewer than 70
//! characters, and links of the pages lead somewhere.
//!
//! What was there before a rule is counted in `xtask/tidy.txt`, file by file. A count only ever falls: more than it
//! says is an error, fewer is one as well, which `cargo xtask tidy --lower` mends.

use anyhow::{Context, Result, bail};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Most columns of a line of code, comments included.
const COLUMNS: usize = 120;
/// The name of a test has fewer characters.
const NAME: usize = 70;
/// Endings of the files that are code. Pages have tables, whose rows cannot be broken.
const CODE: [&str; 11] = ["rs", "py", "c", "cpp", "h", "cu", "cuh", "toml", "sh", "js", "css"];
const ALLOWED: &str = "xtask/tidy.txt";
const HEAD: &str = "\
# What was there before the rules of xtask/src/tidy.rs: rule, count, file. Counts fall, and never rise.
";

/// A place that breaks a rule.
#[derive(Debug, PartialEq)]
struct Finding {
    rule: &'static str,
    file: String,
    line: usize,
    what: String,
}

/// Counts by rule and file.
type Counts = BTreeMap<(String, String), usize>;

/// Looks at every file that git knows or would add.
pub(crate) fn main(root: &Path, args: &[String]) -> Result<()> {
    let lower = match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => false,
        ["--lower"] => true,
        _ => bail!("tidy takes --lower alone: write the counts that fell to {ALLOWED}"),
    };
    let files = files(root)?;
    let mut found = Vec::new();
    for file in files.iter().filter(|file| has_ending(file, &CODE)) {
        let text = std::fs::read_to_string(root.join(file)).with_context(|| format!("cannot read {file}"))?;
        found.extend(long_lines(file, &text));
        if file.ends_with(".rs") {
            found.extend(long_names(file, &text));
        }
    }
    let pages: BTreeMap<&str, String> = files
        .iter()
        .filter(|file| file.ends_with(".md"))
        .map(|file| Ok((file.as_str(), std::fs::read_to_string(root.join(file))?)))
        .collect::<Result<_>>()?;
    for (page, text) in &pages {
        found.extend(dead_links(page, text, &pages, |path| root.join(path).exists()));
    }
    let allowed =
        read(&std::fs::read_to_string(root.join(ALLOWED)).with_context(|| format!("cannot read {ALLOWED}"))?)?;
    let (more, fewer) = compare(&found, &allowed);
    if !more.is_empty() {
        bail!("{more}A longer line is broken, a name shortened, a link mended; {ALLOWED} does not grow");
    }
    if lower {
        return std::fs::write(root.join(ALLOWED), written(&counts(&found))).context("cannot write the counts");
    }
    if !fewer.is_empty() {
        bail!("{fewer}there is less than {ALLOWED} says, which is good: cargo xtask tidy --lower");
    }
    Ok(())
}

/// The files of the checkout, without links.
fn files(root: &Path) -> Result<Vec<String>> {
    let mut git = Command::new("git");
    git.args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"]).current_dir(root);
    let out = git.output().context("cannot run git, which knows the files")?;
    if !out.status.success() {
        bail!("git does not list the files: {}", String::from_utf8_lossy(&out.stderr).trim());
    }
    let names = String::from_utf8(out.stdout).context("a file's name is not UTF-8")?;
    let is_file = |name: &&str| root.join(name).symlink_metadata().is_ok_and(|meta| meta.is_file());
    Ok(names.split_terminator('\0').filter(is_file).map(str::to_owned).collect())
}

fn has_ending(file: &str, endings: &[&str]) -> bool {
    Path::new(file).extension().and_then(|e| e.to_str()).is_some_and(|e| endings.contains(&e))
}

fn long_lines(file: &str, text: &str) -> Vec<Finding> {
    let columns = text.lines().map(|line| line.chars().count()).enumerate();
    columns
        .filter(|(_, columns)| *columns > COLUMNS)
        .map(|(i, columns)| {
            let what = format!("{columns} columns, of {COLUMNS} at most");
            Finding { rule: "columns", file: file.to_owned(), line: i + 1, what }
        })
        .collect()
}

fn long_names(file: &str, text: &str) -> Vec<Finding> {
    let mut found = Vec::new();
    let mut test = false;
    for (i, line) in text.lines().map(str::trim).enumerate() {
        match line {
            "#[test]" => test = true,
            // Other attributes, and comments, stand between the attribute and its function.
            _ if line.starts_with("#[") || line.starts_with("//") => {}
            _ => {
                let name = line.strip_prefix("fn ").and_then(|rest| rest.split('(').next()).filter(|_| test);
                if let Some(name) = name.filter(|name| name.len() >= NAME) {
                    let what = format!("the name `{name}` has {} characters, fewer than {NAME} are read", name.len());
                    found.push(Finding { rule: "names", file: file.to_owned(), line: i + 1, what });
                }
                test = false;
            }
        }
    }
    found
}

/// Links of a page to files, and to headings of pages. Those to other hosts are not followed.
fn dead_links(page: &str, text: &str, pages: &BTreeMap<&str, String>, exists: impl Fn(&Path) -> bool) -> Vec<Finding> {
    let mut found = Vec::new();
    let folder = Path::new(page).parent().unwrap_or(Path::new(""));
    for (line, target) in links(text) {
        let (path, heading) = target.split_once('#').unwrap_or((target, ""));
        let place = if path.is_empty() { PathBuf::from(page) } else { normal(&folder.join(path)) };
        let headings = || place.to_str().and_then(|place| pages.get(place)).map(|text| headings(text));
        let what = if !exists(&place) {
            format!("the link `{target}` leads to no file")
        } else if !heading.is_empty() && headings().is_some_and(|all| !all.contains(heading)) {
            format!("the link `{target}` leads to no heading")
        } else {
            continue;
        };
        found.push(Finding { rule: "links", file: page.to_owned(), line, what });
    }
    found
}

/// The lines outside of blocks of code, with their numbers.
fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut code = false;
    text.lines().enumerate().filter_map(move |(i, line)| {
        let fence = line.trim_start().starts_with("```");
        code ^= fence;
        (!code && !fence).then_some((i + 1, line))
    })
}

/// Targets of links within the tree.
fn links(text: &str) -> Vec<(usize, &str)> {
    let mut found = Vec::new();
    for (number, line) in prose(text) {
        // What lies between backticks is code: every second part.
        for part in line.split('`').step_by(2) {
            for rest in part.split("](").skip(1) {
                let target = rest.split(')').next().unwrap_or("");
                if !target.is_empty() && !target.contains(':') {
                    found.push((number, target));
                }
            }
        }
    }
    found
}

/// The anchors of a page's headings.
fn headings(text: &str) -> BTreeSet<String> {
    let all = prose(text).filter(|(_, line)| line.starts_with('#'));
    all.map(|(_, line)| anchor(line.trim_start_matches('#').trim())).collect()
}

/// A heading as renderers of Markdown make an anchor of it.
fn anchor(heading: &str) -> String {
    let kept = heading.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
    kept.flat_map(char::to_lowercase).map(|c| if c == ' ' { '-' } else { c }).collect()
}

/// A path without `.`, and without `..` but in front, where it leads out of the folder.
pub(super) fn normal(path: &Path) -> PathBuf {
    let mut parts = PathBuf::new();
    for part in path.components() {
        match part {
            std::path::Component::ParentDir if parts.file_name().is_some() => drop(parts.pop()),
            std::path::Component::CurDir => {}
            part => parts.push(part),
        }
    }
    parts
}

fn counts(found: &[Finding]) -> Counts {
    let mut counts = Counts::new();
    for finding in found {
        *counts.entry((finding.rule.to_owned(), finding.file.clone())).or_default() += 1;
    }
    counts
}

/// What is more than allowed, place by place, and what is less.
fn compare(found: &[Finding], allowed: &Counts) -> (String, String) {
    let counts = counts(found);
    let (mut more, mut fewer) = (String::new(), String::new());
    for ((rule, file), count) in &counts {
        let before = allowed.get(&(rule.clone(), file.clone())).copied().unwrap_or(0);
        if *count > before {
            writeln!(more, "{file} has {count} findings of `{rule}`, {before} before:").expect("a string takes all");
            for at in found.iter().filter(|at| at.rule == rule && at.file == *file) {
                writeln!(more, "  {file}:{}: {}", at.line, at.what).expect("a string takes all");
            }
        }
    }
    for ((rule, file), before) in allowed {
        let count = counts.get(&(rule.clone(), file.clone())).copied().unwrap_or(0);
        if count < *before {
            writeln!(fewer, "{file} has {count} findings of `{rule}`, {before} before").expect("a string takes all");
        }
    }
    (more, fewer)
}

/// Reads the counts that are allowed.
fn read(text: &str) -> Result<Counts> {
    let mut counts = Counts::new();
    for line in text.lines().filter(|line| !line.starts_with('#') && !line.trim().is_empty()) {
        let [rule, count, file] = line.splitn(3, ' ').collect::<Vec<_>>()[..] else {
            bail!("{ALLOWED} has the line `{line}`; it needs a rule, a count and a file");
        };
        let count = count.parse().with_context(|| format!("{ALLOWED}: `{count}` is not a number"))?;
        counts.insert((rule.to_owned(), file.to_owned()), count);
    }
    Ok(counts)
}

fn written(counts: &Counts) -> String {
    let lines = counts.iter().map(|((rule, file), count)| format!("{rule} {count} {file}\n"));
    lines.fold(HEAD.to_owned(), |text, line| text + &line)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_characters_and_the_last_one_allowed_passes() {
        let text = format!("{}\n{}\n{}\n", "ü".repeat(120), "x".repeat(121), "y");
        let found = long_lines("a.rs", &text);
        assert_eq!(
            found.iter().map(|f| (f.line, f.what.as_str())).collect::<Vec<_>>(),
            [(2, "121 columns, of 120 at most")]
        );
    }

    #[test]
    fn names_of_tests_are_looked_at_and_those_of_others_not() {
        let (long, short) = ("n".repeat(70), "n".repeat(69));
        let text = format!("fn {long}() {{}}\n#[test]\n#[ignore]\nfn {long}() {{\n#[test]\nfn {short}() {{\n");
        assert_eq!(long_names("a.rs", &text).iter().map(|f| f.line).collect::<Vec<_>>(), [4]);
    }

    #[test]
    fn links_lead_to_files_and_headings() {
        let other = "# Of `code` and more: 2\n```\n# no heading\n```\n".to_owned();
        let text = "[a](docs/b.md) [b](docs/b.md#of-code-and-more-2) ![c](gone.svg) `[d](gone)`\n```\n[e](gone)\n```\n\
                    [f](https://example.org/x) [`g`](docs/b.md#no-heading) [h](#here)\n# Here\n";
        let pages = BTreeMap::from([("docs/b.md", other), ("a.md", text.to_owned())]);
        let found = dead_links("a.md", text, &pages, |path| path.to_str().is_some_and(|p| pages.contains_key(p)));
        assert_eq!(
            found.iter().map(|f| (f.line, f.what.as_str())).collect::<Vec<_>>(),
            [(1, "the link `gone.svg` leads to no file"), (5, "the link `docs/b.md#no-heading` leads to no heading"),]
        );
        let back = dead_links("docs/b.md", "[x](../a.md#here)", &pages, |path| {
            path.to_str().is_some_and(|p| pages.contains_key(p))
        });
        assert_eq!(back.len(), 0, "{back:?}");
    }

    #[test]
    fn counts_may_fall_and_not_rise() {
        let at = |line| Finding { rule: "columns", file: "a.rs".into(), line, what: "wide".into() };
        let allowed = |count| read(&format!("{HEAD}columns {count} a.rs\n")).unwrap();
        let (more, fewer) = compare(&[at(3), at(9)], &allowed(1));
        assert_eq!(more, "a.rs has 2 findings of `columns`, 1 before:\n  a.rs:3: wide\n  a.rs:9: wide\n");
        assert_eq!(fewer, "");
        assert_eq!(compare(&[at(3), at(9)], &allowed(2)), Default::default());
        assert_eq!(compare(&[at(3)], &allowed(2)).1, "a.rs has 1 findings of `columns`, 2 before\n");
        assert_eq!(read(&written(&counts(&[at(3), at(9)]))).unwrap(), allowed(2));
        assert!(read("columns a.rs").is_err() && read("columns x a.rs").is_err());
    }
}
