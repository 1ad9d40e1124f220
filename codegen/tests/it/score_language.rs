//! The language: what a text means, its normal form, and what is said about a bad one.

use crate::random::{DECLARATIONS, Generator, Value};
use flashtune_codegen::score::*;
use flashtune_codegen::{Mask, Shape};

#[test]
fn the_normal_form_computes_what_was_written_and_reads_back_as_itself() {
    let mut g = Generator::new(1);
    for round in 0..2500 {
        let (mask, score) = (g.mask(1 + round % 7), g.score(1 + round % 7));
        let text = format!("{DECLARATIONS} mask = {}; score = {};", mask.text(), score.text());
        let program = Program::parse(&text).unwrap_or_else(|e| panic!("{text}\n{e}"));
        let again = Program::parse(program.text()).unwrap_or_else(|e| panic!("{}\n{e}", program.text()));
        assert_eq!(again.text(), program.text(), "{text}");
        assert_eq!(again.hash(), program.hash());

        let sizes = g.sizes();
        let data = g.data(&sizes);
        let mut bound = Bound::new(&program, &sizes, &data, Precision::F32).unwrap();
        for _ in 0..20 {
            let at = g.place(&sizes);
            let want = mask.value(at, 0.0, &sizes, &data);
            assert_eq!(
                Value::Bool(bound.visible(at)),
                want,
                "{} at {at:?} in {sizes:?}\n{}",
                mask.text(),
                program.text()
            );
            let Value::Float(want) = score.value(at, 1.25, &sizes, &data) else { panic!("a score is a float") };
            let got = bound.score(at, 1.25);
            assert!(got == want || got.is_nan() && want.is_nan(), "{}: {got} {want}\n{}", score.text(), program.text());
        }
    }
}

/// Blocks of lines: programs that mean the same, in the last line the canonical text of all.
#[test]
fn canonical_forms_are_those_of_the_file() {
    for block in include_str!("score/canonical.txt").split("\n\n") {
        let lines: Vec<&str> = block.lines().filter(|l| !l.starts_with('#') && !l.is_empty()).collect();
        let Some((want, texts)) = lines.split_last() else { continue };
        let want = if *want == "nothing" { "" } else { want };
        for text in texts {
            let program = Program::parse(text).unwrap_or_else(|e| panic!("{text}\n{e}"));
            let statements: Vec<&str> = program.text().lines().collect();
            assert_eq!(statements.join(" "), want, "from {text}");
        }
    }
}

/// Pairs of lines: a text, and what its error must hold: the place, the message, the remedy.
#[test]
fn bad_programs_say_where_and_what_was_expected() {
    let lines = include_str!("score/errors.txt").lines().filter(|l| !l.starts_with('#') && !l.is_empty());
    let lines: Vec<&str> = lines.collect();
    assert!(lines.len() > 60 && lines.len().is_multiple_of(2));
    for pair in lines.chunks(2) {
        let e = match Program::parse(pair[0]) {
            Err(e) => e.to_string(),
            Ok(p) => panic!("{} was taken as {p}", pair[0]),
        };
        for part in pair[1].split(" | ") {
            assert!(e.contains(part), "{}\ngave {e}\nwithout {part}", pair[0]);
        }
    }
}

#[test]
fn any_text_gives_a_program_or_an_error() {
    use rand::Rng;
    let mut g = Generator::new(3);
    let words = [
        "mask",
        "score",
        "=",
        "kv",
        "q",
        "(",
        ")",
        "[",
        "]",
        ",",
        ";",
        "<=",
        "and",
        "not",
        "if",
        "else",
        "min",
        "1",
        "2.5",
        "//",
        "%",
        "-",
        "x",
        ":",
        "int",
        "é",
        "float",
        "in",
        "..",
        "nondecreasing",
        "select",
        "batch",
        "*",
        "#",
        "\n",
    ];
    for _ in 0..30_000 {
        let text: Vec<&str> =
            (0..g.rng.random_range(0..14)).map(|_| words[g.rng.random_range(0..words.len())]).collect();
        if let Err(e) = Program::parse(&text.join(" ")) {
            assert!(e.place.is_some() && !e.expected.is_empty(), "{e}");
        }
    }
}

#[test]
fn programs_of_ten_thousand_operations_and_of_any_depth_are_taken() {
    let time = std::time::Instant::now();
    let parens = format!("mask = {}kv <= q{};", "(".repeat(50_000), ")".repeat(50_000));
    assert_eq!(Program::parse(&parens).unwrap(), Program::parse("mask = kv <= q;").unwrap());
    let sum: Vec<String> = (0..3400).map(|i| format!("kv // {}", i + 2)).collect();
    let deep = format!("mask = {}q{} < 7;", "abs(kv - ".repeat(5000), ")".repeat(5000));
    let chain: Vec<String> = (0..2500).map(|i| format!("kv % {} != 1", i + 2)).collect();
    let nots = format!("mask = {}kv < q;", "not ".repeat(9999));
    for text in [format!("mask = {} < q;", sum.join(" + ")), deep, format!("mask = {};", chain.join(" and ")), nots] {
        let program = Program::parse(&text).unwrap();
        assert_eq!(Program::parse(program.text()).unwrap(), program);
        TileProgram::new(&program);
    }
    // A graph that as a tree would have 2^200 leaves.
    let mut x = Expr::score();
    for _ in 0..200 {
        x = x.clone() * x + 0.5f32;
    }
    let program = ProgramBuilder::new().score_expr(&x).unwrap().build().unwrap();
    assert!(program.text().len() < 10_000);
    assert_eq!(Program::parse(program.text()).unwrap(), program);
    let too_many: Vec<String> = (0..10_000).map(|i| format!("(kv + {i}) % (q + {i})")).collect();
    let e = Program::parse(&format!("mask = {} < 1;", too_many.join(" + "))).unwrap_err().to_string();
    assert!(e.contains("side tensor"), "{e}");
    assert!(time.elapsed().as_secs() < 20, "{:?}", time.elapsed());
}

#[test]
fn builders_and_texts_give_the_same_program() {
    let distance = Expr::q() + Expr::kv_len() - Expr::q_len() - Expr::kv();
    let window = (distance.clone().ge(0) & distance.clone().lt(Expr::scalar("w"))) | Expr::kv().lt(4);
    let slope = Expr::load("slope", [Expr::h()]);
    let score = (Expr::score() - slope * distance.to_float()).max(-100.0f32);
    let built = ProgramBuilder::new()
        .declare(Declaration::scalar("w", Storage::I32).within(0, 4096))
        .and_then(|b| b.declare(Declaration::tensor("slope", Storage::Bf16, &[Axis::Heads])))
        .and_then(|b| b.mask_expr(&window))
        .and_then(|b| b.score_expr(&score))
        .and_then(ProgramBuilder::build)
        .unwrap();
    let written = Program::parse(
        "w: int in 0..4096; slope: bf16[heads]; d = q + kv_len - q_len - kv;
         mask = 0 <= d and d < w or kv < 4; score = max(score - slope[h] * d, -100.0);",
    );
    assert_eq!(built, written.unwrap());
    let unknown = ProgramBuilder::new().mask_expr(&Expr::scalar("x").lt(1)).unwrap_err().to_string();
    assert!(unknown.contains("unknown name `x`"), "{unknown}");
}

#[test]
fn masks_join_and_scores_follow_each_other() {
    let both = ProgramBuilder::new().mask("kv <= q").and_then(|b| b.mask("kv >= 2")).and_then(ProgramBuilder::build);
    assert_eq!(both.unwrap(), Program::parse("mask = 2 <= kv and kv <= q;").unwrap());
    let twice = ProgramBuilder::new().score("score * 2.0").and_then(|b| b.score("score + 1.0"));
    assert_eq!(twice.unwrap().build().unwrap(), Program::parse("score = score * 2.0 + 1.0;").unwrap());
    assert!(Program::parse("mask = true; score = score;").unwrap().is_plain());
    assert_eq!(Program::mask_of("w: int; kv < w").unwrap(), Program::parse("w: int; mask = kv < w;").unwrap());
    assert!(Program::mask_of("w: int;").unwrap_err().to_string().contains("no mask"));
}

#[test]
fn data_that_does_not_fit_names_the_tensor_and_the_axis() {
    let program = Program::parse("d: int[batch, kv_len] in 0..5 nondecreasing; s: int; mask = d[b, kv] < 3 and s < 1;");
    let program = program.unwrap();
    let sizes = Shape { batch: 2, heads: 1, kv_heads: 1, q_len: 1, kv_len: 3, mask: Mask::Full };
    let with = |shape: &[usize], x: &[i64]| {
        SideData::default().scalar("s", Scalar::Int(0)).tensor("d", shape, Elements::Int(x.to_vec()))
    };
    let error = |data: SideData| data.check(&program, &sizes).unwrap_err().to_string();
    assert!(with(&[1, 3], &[0, 1, 5]).check(&program, &sizes).is_ok());
    assert!(with(&[2, 1], &[1, 1]).check(&program, &sizes).is_ok());
    for (data, want) in [
        (with(&[3, 3], &[0; 9]), "axis 0 of the tensor `d` has length 3"),
        (with(&[1, 4], &[0; 4]), "kv_len, which is 3"),
        (with(&[3], &[0; 3]), "2 axes"),
        (with(&[1, 3], &[0; 2]), "2 elements"),
        (with(&[1, 3], &[0, 2, 1]), "decreases"),
        (with(&[1, 3], &[0, 2, 6]), "holds 6"),
        (SideData::default(), "the tensor `d` is missing"),
        (with(&[1, 3], &[0; 3]).scalar("s", Scalar::Float(1.0)), "declares it as int"),
        (with(&[1, 3], &[0; 3]).tensor("d", &[1, 3], Elements::Float(vec![0.0; 3])), "is of float"),
    ] {
        let e = error(data);
        assert!(e.contains(want), "{e}");
    }
}

#[test]
fn float_scalars_keep_their_range() {
    let program = Program::parse("cap: float in 1..50; score = cap * tanh(score / cap);").unwrap();
    assert_eq!(program.declarations()[0].to_string(), "cap: f32 in 1..50");
    let sizes = Shape { batch: 1, heads: 1, kv_heads: 1, q_len: 1, kv_len: 1, mask: Mask::Full };
    let check = |x| SideData::default().scalar("cap", x).check(&program, &sizes);
    for good in [Scalar::Float(1.0), Scalar::Float(49.5), Scalar::Int(50)] {
        check(good).unwrap();
    }
    for bad in [Scalar::Float(0.99), Scalar::Int(51), Scalar::Float(f32::NAN), Scalar::Float(f32::INFINITY)] {
        let e = check(bad).unwrap_err().to_string();
        assert!(e.contains("`cap` is") && e.contains("from 1 to 50"), "{e}");
    }
}
