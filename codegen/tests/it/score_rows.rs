//! Runs of keys are those of the mask, for random programs and for the built-in masks.

use crate::random::{DECLARATIONS, Generator};
use flashtune_codegen::Shape;
use flashtune_codegen::score::*;
use rand::Rng;
use std::ops::Range;

/// The runs of keys of all rows of one head.
fn runs(rows: &RowKeys, sizes: &Shape, data: &SideData, b: u32, h: u32) -> Vec<Range<i64>> {
    let mut roots = vec![rows.begin, rows.end];
    rows.searches.iter().for_each(|s| roots.extend(s.leading.iter().copied().chain([s.value])));
    let mut evaluator = Evaluator::new(&rows.graph, &roots, sizes, data, Precision::F32);
    let kv_len = sizes.kv_len as i64;
    (0..sizes.q_len)
        .map(|q| {
            evaluator.go(At { b, h, q, kv: 0 }, [0; 4], 0.0);
            let (mut begin, mut end) = (evaluator.int(rows.begin).max(0), evaluator.int(rows.end).min(kv_len));
            for search in &rows.searches {
                let tensor = &data.tensors[&rows.graph.declarations()[search.tensor].name];
                let Elements::Int(elements) = &tensor.elements else { panic!("searched for among {tensor:?}") };
                let value = evaluator.int(search.value);
                let leading: Vec<i64> = search.leading.iter().map(|i| evaluator.int(*i)).collect();
                let passed = |kv: &i64| {
                    let at = tensor.place(leading.iter().copied().chain([*kv])).unwrap();
                    if search.is_end { elements[at] <= value } else { elements[at] < value }
                };
                let place = (0..kv_len).take_while(passed).count() as i64;
                if search.is_end { end = end.min(place) } else { begin = begin.max(place) }
            }
            begin..end.max(begin)
        })
        .collect()
}

fn check(program: &Program, g: &mut Generator, sizes: &Shape, data: &SideData) {
    let rows = program.rows().unwrap();
    let at = g.place(sizes);
    let mut bound = Bound::new(program, sizes, data, Precision::F32).unwrap();
    let mask = bound.mask_matrix(sizes, at.b, at.h);
    let runs = runs(rows, sizes, data, at.b, at.h);
    for (q, run) in runs.iter().enumerate() {
        for kv in 0..sizes.kv_len as i64 {
            let want = mask[q * sizes.kv_len as usize + kv as usize];
            assert_eq!(run.contains(&kv), want, "{q} {kv}: {run:?} {at:?} {sizes:?} {data:?}\n{program}");
        }
    }
    if rows.nondecreasing {
        let sorted = runs.is_sorted_by(|a, b| a.start <= b.start && (a.end <= b.end || b.is_empty() || a.is_empty()));
        assert!(sorted, "{runs:?} {sizes:?} {data:?}\n{program}");
    }
    let from_first = runs.iter().all(|run| run.start == 0 || run.is_empty());
    assert!(from_first || !rows.from_first, "{runs:?} {sizes:?} {data:?}\n{program}");
    let widens = from_first && runs.is_sorted_by_key(|run| run.end);
    assert!(widens || !rows.widens, "{runs:?} {sizes:?} {data:?}\n{program}");
}

/// Conditions that bound the key, among others.
fn condition(g: &mut Generator, depth: u32) -> String {
    const KEYS: [&str; 12] = [
        "kv",
        "kv",
        "2 * kv + 1",
        "kv // 4",
        "(kv + q) // 3",
        "kv // max(w, 1)",
        "doc_kv[b, kv]",
        "doc_kv[b, kv] + 1",
        "-kv",
        "abs(kv - q)",
        "3 - doc_kv[b, kv]",
        "wide[kv]",
    ];
    const VALUES: [&str; 14] = [
        "q",
        "q",
        "q + kv_len - q_len",
        "w",
        "any",
        "q // 4",
        "(q + 3) // max(w, 1)",
        "doc_q[b, q]",
        "prefix[b]",
        "7 - q",
        "q % 5",
        "q * w",
        "wide[q]",
        "select(q < 9, w, q)",
    ];
    match if depth == 0 { 0 } else { g.rng.random_range(0..10) } {
        0..5 => {
            let (key, value) = (KEYS[g.rng.random_range(0..12)], VALUES[g.rng.random_range(0..14)]);
            let op = ["<=", "<", ">", ">=", "==", "<=", ">=", "!="][g.rng.random_range(0..8)];
            format!("{key} {op} {value}")
        }
        5 => g.mask(depth - 1).text(),
        6 => format!("{} {} {}", VALUES[g.rng.random_range(0..14)], ["<", "=="][g.rng.random_range(0..2)], "q // 2"),
        7 => format!("({} or {})", condition(g, depth - 1), condition(g, depth - 1)),
        _ => format!("({} and {})", condition(g, depth - 1), condition(g, depth - 1)),
    }
}

#[test]
fn runs_of_random_masks_are_those_of_the_mask() {
    let mut g = Generator::new(11);
    let (mut found, mut searched, mut sorted) = (0, 0, 0);
    for round in 0..6000 {
        let text = format!("{DECLARATIONS} mask = {};", condition(&mut g, round % 4));
        let program = Program::parse(&text).unwrap();
        let Some(rows) = program.rows() else { continue };
        found += 1;
        searched += u32::from(!rows.searches.is_empty());
        sorted += u32::from(rows.nondecreasing && !rows.searches.is_empty());
        for _ in 0..4 {
            let sizes = g.sizes();
            let data = g.data(&sizes);
            check(&program, &mut g, &sizes, &data);
        }
    }
    assert!(found > 1500 && searched > 300 && sorted > 100, "{found} found, {searched} searched, {sorted} sorted");
}

#[test]
fn masks_like_a_causal_one_are_known_by_their_runs() {
    let kind = |text: &str| {
        let program = Program::mask_of(text).unwrap();
        program.rows().map(|r| (r.from_first, r.widens, r.is_cheap))
    };
    for (text, want) in [
        ("kv <= q", (true, true, true)),
        ("shift: int; kv <= q + shift", (true, true, true)),
        ("kv < q + kv_len - q_len and kv <= q", (true, true, true)),
        ("prefix: i32[batch]; kv < prefix[b] or kv <= q", (true, true, true)),
        ("kv // 64 <= q // 64", (true, true, true)),
        // As many keys for every row; ends that come out of memory for each row, or by a division; runs that begin
        // somewhere.
        ("n: i32[batch]; kv < n[b]", (true, false, true)),
        ("d: i32[q_len] nondecreasing; kv <= d[q]", (true, true, false)),
        ("n: int in 1..9; kv // n <= q // n", (true, true, false)),
        ("kv <= q and q - kv < 9", (false, false, true)),
        ("kv <= 9 - q", (true, false, true)),
        ("d: i32[kv_len] nondecreasing; d[kv] <= q", (true, false, false)),
    ] {
        assert_eq!(kind(text), Some(want), "{text}");
    }
}

#[test]
fn the_masks_of_packed_and_chunked_sequences_are_runs_of_keys() {
    let mut g = Generator::new(12);
    let rows = |text: &str| Program::parse(text).unwrap().rows().map(|r| (r.searches.len(), r.nondecreasing));
    for (name, want) in [
        ("causal", Some((0, true))),
        ("sliding_window", Some((0, true))),
        ("chunked", Some((0, true))),
        ("block_local", Some((0, true))),
        ("prefix_lm", Some((0, true))),
        ("document", Some((2, true))),
        ("document_causal", Some((2, true))),
        ("dilated", None),
        ("boolean_mask", None),
    ] {
        assert_eq!(rows(builtin(name).unwrap().text), want, "{name}");
    }
    // Without the promise, or turned round, nothing can be searched for.
    assert_eq!(rows("d: i32[kv_len]; mask = d[kv] == q;"), None);
    assert_eq!(rows("d: i32[kv_len] nondecreasing; mask = d[kv] != q;"), None);
    assert_eq!(rows("d: i32[kv_len] nondecreasing; mask = d[kv] == 9 - q;"), Some((2, false)));
    assert_eq!(rows("mask = kv < 5 or kv > q;"), None);
    for name in ["chunked", "prefix_lm", "document", "document_causal"] {
        let program = Program::parse(builtin(name).unwrap().text).unwrap();
        for _ in 0..100 {
            let sizes = g.sizes();
            let chunk = g.rng.random_range(1..9);
            let prefix = (0..sizes.batch).map(|_| g.rng.random_range(0..=30)).collect();
            let data = g.data(&sizes);
            let data = data.scalar("chunk", Scalar::Int(chunk)).tensor(
                "prefix",
                &[sizes.batch as usize],
                Elements::Int(prefix),
            );
            check(&program, &mut g, &sizes, &data);
        }
    }
}
