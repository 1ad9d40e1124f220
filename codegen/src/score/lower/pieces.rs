//! A program as the pieces that `program.h` and `program.cuh` paste.

use super::dense::dense_pieces;
use super::print::{Dialect, Printer};
use super::stmt::Scope;
use super::{AlongKeys, Code, lower, lower_fragments, lower_scores, slot};
use crate::score::analysis::bias::Bias;
use crate::score::analysis::rows::{KeySearch, RowKeys};
use crate::score::analysis::tile::TileProgram;
use crate::score::graph::{Graph, Node};
use crate::score::program::Program;
use crate::score::syntax::words::{Id, Unary};
use std::collections::BTreeMap;

/// C of a program whose statements cost more than this is not optimised: gcc takes 10 s for 150 calls of `tanh`, 6 s
/// for 1600 other statements, and minutes for a few times as many.
pub(super) const LONG: usize = 985;

macro_rules! pieces {
    ($($piece:ident => $name:literal,)*) => {
        /// What templates paste of a program.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
        pub(super) enum Piece {
            $($piece,)*
        }

        impl Piece {
            /// The placeholder.
            const fn name(self) -> &'static str {
                match self {
                    $(Piece::$piece => $name,)*
                }
            }
        }
    };
}

pieces! {
    Program => "program",
    ProgramMask => "program_mask",
    ProgramScore => "program_score",
    ProgramSink => "program_sink",
    ProgramFar => "program_far",
    ProgramLists => "program_lists",
    ProgramRuns => "program_runs",
    MaskRowFields => "mask_row_fields",
    MaskRowSave => "mask_row_save",
    MaskRowLoad => "mask_row_load",
    MaskResult => "mask_result",
    MaskUniform => "mask_uniform",
    MaskRow => "mask_row",
    MaskColumn => "mask_column",
    MaskElement => "mask_element",
    ScoreRowFields => "score_row_fields",
    ScoreRowSave => "score_row_save",
    ScoreRowLoad => "score_row_load",
    ScoreResult => "score_result",
    ScoreUniform => "score_uniform",
    ScoreRow => "score_row",
    ScoreColumn => "score_column",
    ScoreElement => "score_element",
    SinkResult => "sink_result",
    SinkUniform => "sink_uniform",
    SinkRow => "sink_row",
    ProgramLong => "program_long",
    SideTensors => "side_tensors",
    SideScalars => "side_scalars",
    MaskHeadFields => "mask_head_fields",
    MaskHeadNames => "mask_head_names",
    MaskHeadLoad => "mask_head_load",
    MaskRowNames => "mask_row_names",
    MaskCheap => "mask_cheap",
    MaskInputs => "mask_inputs",
    ScoreHeadFields => "score_head_fields",
    ScoreHeadNames => "score_head_names",
    ScoreHeadLoad => "score_head_load",
    ScoreRowNames => "score_row_names",
    ScoreTanh => "score_tanh",
    ScoreAlong => "score_along",
    ScorePaired => "score_paired",
    ScoreReadsAhead => "score_reads_ahead",
    ScoreTakesAhead => "score_takes_ahead",
    ScoreTakeAhead => "score_take_ahead",
    ScoreBiases => "score_biases",
    ScoreBiasPlaces => "score_bias_places",
    BiasCode => "bias_code",
    ScoreTanhMultiples => "score_tanh_multiples",
    ScoreTanhLargest => "score_tanh_largest",
    ScoreShift => "score_shift",
    ScoreShiftFactor => "score_shift_factor",
    ScoreShiftBase => "score_shift_base",
    ScoreCapped => "score_capped",
    ScoreCapBound => "score_cap_bound",
    ScoreCap => "score_cap",
    ScoreCapFactor => "score_cap_factor",
    ScoreCheap => "score_cheap",
    ScoreInputs => "score_inputs",
    SinkCode => "sink_code",
    LookedCode => "looked_code",
    LookedMasked => "looked_masked",
    LookedVisible => "looked_visible",
    ProgramDense => "program_dense",
    DenseCode => "dense_code",
    DenseNegated => "dense_negated",
    DenseAlone => "dense_alone",
    RestCode => "rest_code",
    RestResult => "rest_result",
    RestTileCode => "rest_tile_code",
    RestTileMasked => "rest_tile_masked",
    RestTileVisible => "rest_tile_visible",
    TileCode => "tile_code",
    TileMasked => "tile_masked",
    TileVisible => "tile_visible",
    KeysCode => "keys_code",
    KeysBegin => "keys_begin",
    KeysEnd => "keys_end",
    ProgramRows => "program_rows",
    ProgramSorted => "program_sorted",
    ProgramSearch => "program_search",
    ProgramFromFirst => "program_from_first",
    ProgramRowsCheap => "program_rows_cheap",
    RowsCode => "rows_code",
    RowsBegin => "rows_begin",
    RowsEnd => "rows_end",
    RowsSearches => "rows_searches",
}

type Pieces = BTreeMap<Piece, String>;

/// By placeholder.
fn named(pieces: Pieces) -> BTreeMap<&'static str, String> {
    pieces.into_iter().map(|(piece, text)| (piece.name(), text)).collect()
}

/// What the CPU template pastes; of no program, which it then leaves out, every piece is there and stands for nothing.
pub(crate) fn cpu_fields(program: Option<&Program>) -> BTreeMap<&'static str, String> {
    let mut m = flags(program);
    let code = |root: fn(&Program) -> Option<Id>| match program.and_then(|p| Some((p, root(p)?))) {
        Some((p, id)) => lower(p.graph(), &[id]),
        None => Code::default(),
    };
    let (mask, score, sink) = (code(Program::mask), code(Program::score), code(Program::sink));
    let all = [&mask, &score, &sink];
    let [m_, s_, n_] = [(&mask, "m"), (&score, "s"), (&sink, "n")].map(|(code, prefix)| code.print(Dialect::C, prefix));
    // C takes inputs as part of what is computed for a head.
    let head = |of: &Printer| of.scope(Scope::Input) + &of.scope(Scope::Head);
    let rows = |of: &Printer, line: fn(&str, &str) -> String| -> String {
        of.kept(&of.code.kept_of_row).iter().map(|(ty, name)| line(ty, name)).collect()
    };
    let field = |ty: &str, name: &str| format!("    {ty} {name}[PANEL];\n");
    let save = |_: &str, name: &str| format!("rows->{name}[lane] = {name};\n");
    let load = |ty: &str, name: &str| format!("const {ty} {name} = rows->{name}[lane + x];\n");
    m.extend([
        (Piece::MaskRowFields, rows(&m_, field)),
        (Piece::MaskRowSave, rows(&m_, save)),
        (Piece::MaskRowLoad, rows(&m_, load)),
        (Piece::MaskResult, result(&m_, "1")),
        (Piece::MaskUniform, head(&m_)),
        (Piece::MaskRow, m_.scope(Scope::Row)),
        (Piece::MaskColumn, m_.scope(Scope::Key)),
        (Piece::MaskElement, m_.scope(Scope::Score)),
        (Piece::ScoreRowFields, rows(&s_, field)),
        (Piece::ScoreRowSave, rows(&s_, save)),
        (Piece::ScoreRowLoad, rows(&s_, load)),
        (Piece::ScoreResult, result(&s_, "score")),
        (Piece::ScoreUniform, head(&s_)),
        (Piece::ScoreRow, s_.scope(Scope::Row)),
        (Piece::ScoreColumn, s_.scope(Scope::Key)),
        (Piece::ScoreElement, s_.scope(Scope::Score)),
        (Piece::SinkResult, result(&n_, "0")),
        (Piece::SinkUniform, head(&n_)),
        (Piece::SinkRow, n_.scope(Scope::Row)),
    ]);
    let tile = TileCode::of(program, Dialect::C);
    // A value that a row keeps is declared, saved and loaded.
    let kept: usize = [&mask, &score].iter().map(|code| 3 * code.kept_of_row.len()).sum();
    let statements = all.into_iter().chain([&tile.tile, &tile.keys]).map(|code| code.cost(&Scope::ALL)).sum::<usize>();
    m.extend(tile.pieces(Dialect::C));
    m.insert(Piece::ProgramLong, u32::from(statements + kept > LONG).to_string());
    named(m)
}

/// What the CUDA templates paste. `biases` are those that a kernel loads tile by tile.
pub(crate) fn cuda_fields(program: Option<&Program>, biases: &[Bias]) -> BTreeMap<&'static str, String> {
    let mut m = flags(program);
    let count = |tensors: bool| {
        let all = program.map_or(&[][..], |p| p.declarations());
        all.iter().filter(|d| d.axes.is_some() == tensors).count().max(1).to_string()
    };
    let code = |root: fn(&Program) -> Option<Id>| match program.and_then(|p| Some((p, root(p)?))) {
        Some((p, id)) => lower_fragments(p.graph(), &[id]),
        None => Code::default(),
    };
    let (mask, sink) = (code(Program::mask), code(Program::sink));
    let runs = program.is_some_and(|p| p.runs().is_some());
    m.insert(Piece::ProgramRuns, u32::from(runs).to_string());
    m.extend([(Piece::SideTensors, count(true)), (Piece::SideScalars, count(false))]);
    m.extend(mask_pieces(&mask.print(Dialect::Cuda, "m")));
    m.extend(score_pieces(program, biases));
    m.insert(Piece::BiasCode, program.map_or(String::new(), |p| bias_code(p.graph(), biases)));
    let sink = sink.print(Dialect::Cuda, "n");
    m.extend([(Piece::SinkResult, result(&sink, "0.0f")), (Piece::SinkCode, sink.all())]);
    m.extend(TileCode::of(program, Dialect::Cuda).pieces(Dialect::Cuda));
    m.extend(row_pieces(program.and_then(Program::rows)));
    m.extend(dense_pieces(program.and_then(Program::dense_mask)));
    named(m)
}

/// What a struct of kept values needs: its fields, what initialises them, and how statements find them.
fn kept(values: &[(&'static str, String)], of: &str) -> [String; 3] {
    let fields = values.iter().map(|(ty, name)| format!("    {ty} {name};\n")).collect();
    let names: Vec<&str> = values.iter().map(|(_, name)| name.as_str()).collect();
    let load = values.iter().map(|(ty, name)| format!("const {ty} {name} = {of}.{name};\n")).collect();
    [fields, names.join(", "), load]
}

fn mask_pieces(mask: &Printer) -> [(Piece, String); 13] {
    let [head_fields, head_names, head_load] = kept(&mask.kept(&mask.code.kept_of_head), "kept");
    let [row_fields, row_names, row_load] = kept(&mask.kept(&mask.code.kept_of_row), "row");
    [
        (Piece::MaskHeadFields, head_fields),
        (Piece::MaskHeadNames, head_names),
        (Piece::MaskHeadLoad, head_load),
        (Piece::MaskRowFields, row_fields),
        (Piece::MaskRowNames, row_names),
        (Piece::MaskRowLoad, row_load),
        (Piece::MaskResult, result(mask, "true")),
        (Piece::MaskCheap, mask.cheap()),
        (Piece::MaskInputs, mask.scope(Scope::Input)),
        (Piece::MaskUniform, mask.scope(Scope::Head)),
        (Piece::MaskRow, mask.scope(Scope::Row)),
        (Piece::MaskColumn, mask.scope(Scope::Key)),
        (Piece::MaskElement, mask.scope(Scope::Score)),
    ]
}

fn score_pieces(program: Option<&Program>, biases: &[Bias]) -> Vec<(Piece, String)> {
    let tanhs = program.map_or(Vec::new(), tanh_arguments);
    let code = match program.and_then(|p| Some((p, p.score()?))) {
        Some((p, id)) => lower_scores(p.graph(), &[vec![id], tanhs.clone()].concat()),
        None => Code::default(),
    };
    let score = code.print(Dialect::Cuda, "s");
    let flag = |on: bool| u32::from(on).to_string();
    let largest = score.results().iter().skip(1).fold(String::new(), |all, x| match all.is_empty() {
        true => format!("fabsf({x})"),
        false => format!("fmaxf({all}, fabsf({x}))"),
    });
    let ends = |r: &AlongKeys| (score.name(r.first), score.name(r.stride));
    let is_pair = |r: &AlongKeys| {
        let (first, stride) = ends(r);
        format!("{stride} == 1 && (u64){first} % {} == 0", 2 * r.bytes)
    };
    let paired: Vec<String> = code.along_keys.iter().map(is_pair).collect();
    // Reads of two bytes an element are kept in registers from ahead of their use.
    let is_bias = |r: &AlongKeys| biases.iter().any(|b| b.load == r.load);
    let take_ahead: String = (code.along_keys.iter().enumerate().filter(|(_, r)| r.bytes == 2 && !is_bias(r)))
        .map(|(i, r)| {
            let (first, stride) = ends(r);
            format!("ahead.template take<kPaired>({i}, {first}, {stride}, last);\n")
        })
        .collect();
    let takes_ahead = !take_ahead.is_empty() && tanhs.is_empty();
    let reads_ahead = if takes_ahead || !biases.is_empty() { code.along_keys.len() } else { 0 };
    let place =
        |b: &Bias| code.along_keys.iter().position(|r| r.load == b.load).expect("a bias is read along the keys");
    let places: Vec<String> = biases.iter().map(|b| place(b).to_string()).collect();
    let none = || "0.0f".to_owned();
    let (cap, cap_factor, bound) = match &code.capped {
        Some(c) => (score.expr(&c.cap), score.expr(&c.factor), c.bound),
        None => (none(), none(), 0.0),
    };
    // What is added is taken to units of log2 apart from the score, where it must be near.
    let shift = code.shift.as_ref().filter(|_| !program.is_some_and(|p| p.score_facts().far));
    let [shift_factor, shift_base] = shift.map_or([none(), none()], |s| s.each_ref().map(|x| score.expr(x)));
    let [head_fields, head_names, head_load] = kept(&score.kept(&code.kept_of_head), "kept");
    let [row_fields, row_names, row_load] = kept(&score.kept(&code.kept_of_row), "row");
    vec![
        (Piece::ScoreHeadFields, head_fields),
        (Piece::ScoreHeadNames, head_names),
        (Piece::ScoreHeadLoad, head_load),
        (Piece::ScoreRowFields, row_fields),
        (Piece::ScoreRowNames, row_names),
        (Piece::ScoreRowLoad, row_load),
        (Piece::ScoreResult, result(&score, "score")),
        (Piece::ScoreTanh, flag(!tanhs.is_empty())),
        (Piece::ScoreAlong, flag(!code.along_keys.is_empty())),
        (Piece::ScorePaired, if paired.is_empty() { "false".to_owned() } else { paired.join(" && ") }),
        (Piece::ScoreReadsAhead, reads_ahead.to_string()),
        (Piece::ScoreTakesAhead, flag(takes_ahead)),
        (Piece::ScoreTakeAhead, take_ahead),
        (Piece::ScoreBiases, biases.len().to_string()),
        (Piece::ScoreBiasPlaces, if places.is_empty() { "0".to_owned() } else { places.join(", ") }),
        (Piece::ScoreTanhMultiples, flag(code.multiples)),
        (Piece::ScoreTanhLargest, if largest.is_empty() { none() } else { largest }),
        (Piece::ScoreShift, flag(shift.is_some())),
        (Piece::ScoreShiftFactor, shift_factor),
        (Piece::ScoreShiftBase, shift_base),
        (Piece::ScoreCapped, flag(code.capped.is_some())),
        (Piece::ScoreCapBound, format!("{bound:?}f")),
        (Piece::ScoreCap, cap),
        (Piece::ScoreCapFactor, cap_factor),
        (Piece::ScoreCheap, score.cheap()),
        (Piece::ScoreInputs, score.scope(Scope::Input)),
        (Piece::ScoreUniform, score.scope(Scope::Head)),
        (Piece::ScoreRow, score.scope(Scope::Row)),
        (Piece::ScoreColumn, score.scope(Scope::Key)),
        (Piece::ScoreElement, score.scope(Scope::Score)),
    ]
}

/// Where each bias lies for a head: `return` for the one that is asked for.
fn bias_code(graph: &Graph, biases: &[Bias]) -> String {
    let leading: Vec<Id> = biases.iter().flat_map(|b| b.leading.iter().copied()).collect();
    let code = lower(graph, &leading);
    let code = code.print(Dialect::Cuda, "x");
    let mut names = code.results().into_iter();
    let each = biases.iter().enumerate().map(|(nth, bias)| {
        let (t, axes) = (slot(graph, bias.tensor), bias.leading.len());
        let at: Vec<String> =
            names.by_ref().take(axes).enumerate().map(|(a, name)| format!("at[{a}] = {name}; ")).collect();
        format!(
            "if (nth == {nth}) {{ i64 at[2] = {{}}; {}return bias_at<{axes}>(side->tensors[{t}], at); }}\n",
            at.concat()
        )
    });
    let each: String = each.collect();
    code.all() + &each
}

/// What `tanh` is taken of for every score; nothing if one is taken of another.
fn tanh_arguments(program: &Program) -> Vec<Id> {
    let (graph, Some(score)) = (program.graph(), program.score()) else { return Vec::new() };
    let mut needed = vec![false; graph.nodes().len()];
    needed[score.index()] = true;
    let (mut arguments, mut inside) = (Vec::new(), vec![false; graph.nodes().len()]);
    for id in graph.ids().collect::<Vec<_>>().into_iter().rev().filter(|id| id.index() <= score.index()) {
        if !needed[id.index()] {
            continue;
        }
        let mut within = inside[id.index()];
        if let Node::Unary(Unary::Tanh, x) = *graph.node(id) {
            let changes = graph.depends(x);
            if changes.score || changes.kv {
                if within {
                    return Vec::new();
                }
                arguments.push(x);
                within = true;
            }
        }
        for o in graph.node(id).operands() {
            needed[o.index()] = true;
            inside[o.index()] |= within;
        }
    }
    arguments
}

/// The ends of the range of keys of each query, where the mask leaves it one.
fn row_pieces(rows: Option<&RowKeys>) -> [(Piece, String); 9] {
    let flag = |f: fn(&RowKeys) -> bool| u32::from(rows.is_some_and(f)).to_string();
    let (mut text, mut results, mut searches) = (String::new(), Vec::new(), String::new());
    if let Some(rows) = rows {
        let of_searches = rows.searches.iter().flat_map(|s| s.leading.iter().copied().chain([s.value]));
        let roots: Vec<Id> = [rows.begin, rows.end].into_iter().chain(of_searches).collect();
        let code = lower(&rows.graph, &roots);
        let code = code.print(Dialect::Cuda, "r");
        (text, results) = (code.all(), code.results());
        let mut names = results[2..].iter();
        for search in &rows.searches {
            let leading: Vec<&str> = names.by_ref().take(search.leading.len()).map(String::as_str).collect();
            let value = names.next().expect("every search has a value");
            searches.push_str(&search_statement(&rows.graph, search, &leading, value));
        }
    }
    let nth = |i: usize| results.get(i).cloned().unwrap_or_else(|| "0".to_owned());
    [
        (Piece::ProgramRows, flag(|_| true)),
        (Piece::ProgramSorted, flag(|r| r.nondecreasing)),
        (Piece::ProgramSearch, flag(|r| !r.searches.is_empty())),
        (Piece::ProgramFromFirst, flag(|r| r.from_first)),
        (Piece::ProgramRowsCheap, flag(|r| r.is_cheap)),
        (Piece::RowsCode, text),
        (Piece::RowsBegin, nth(0)),
        (Piece::RowsEnd, nth(1)),
        (Piece::RowsSearches, searches),
    ]
}

/// Moves an end of a run to where a tensor's elements pass a value.
fn search_statement(graph: &Graph, search: &KeySearch, leading: &[&str], value: &str) -> String {
    let (t, axes) = (slot(graph, search.tensor), leading.len());
    let element = Dialect::Cuda.element(graph.declarations()[search.tensor].storage);
    let places = leading.iter().enumerate().map(|(a, index)| {
        format!("ft_clamp64({index}, side->tensors[{t}].length[{a}]) * side->tensors[{t}].stride[{a}] + ")
    });
    let (end, after, closer) = if search.is_end { ("end", "true", "min_of") } else { ("begin", "false", "max_of") };
    format!(
        "{end} = {closer}<i64>({end}, ft_find<kHalves, {after}>((const {element} *)side->tensors[{t}].data + {}0, \
         side->tensors[{t}].stride[{axes}], side->tensors[{t}].length[{axes}] - 1, {value}, within.{end}));\n",
        places.collect::<String>()
    )
}

fn flags(program: Option<&Program>) -> Pieces {
    let flag = |on: bool| u32::from(on).to_string();
    let has = |f: fn(&Program) -> bool| flag(program.is_some_and(f));
    Pieces::from([
        (Piece::Program, flag(program.is_some())),
        (Piece::ProgramMask, has(|p| p.mask().is_some())),
        (Piece::ProgramScore, has(|p| p.score().is_some())),
        (Piece::ProgramSink, has(|p| p.sink().is_some())),
        (Piece::ProgramFar, has(|p| p.score_facts().far)),
        (Piece::ProgramLists, has(|p| p.lists().is_some())),
    ])
}

pub(super) fn result(code: &Printer, none: &str) -> String {
    code.result().unwrap_or_else(|| none.to_owned())
}

/// What decides which keys a tile visits: nothing without a program.
#[derive(Default)]
struct TileCode {
    /// Whether a tile is all masked, and whether it is all visible.
    tile: Code,
    /// The same for kernels that write lists of key blocks: a warp for each tile looks at the elements that it reads.
    looked: Code,
    /// The first key, and the one behind the last.
    keys: Code,
}

impl TileCode {
    fn of(program: Option<&Program>, dialect: Dialect) -> Self {
        let Some(program) = program else { return Self::default() };
        let class = |t: &TileProgram| lower(&t.graph, &[t.all_masked, t.all_visible]);
        let t = TileProgram::new(program);
        let looks = dialect == Dialect::Cuda && program.lists().is_some();
        let looked = looks.then(|| class(&TileProgram::by_elements(program)));
        Self { tile: class(&t), looked: looked.unwrap_or_default(), keys: lower(&t.graph, &[t.kv_begin, t.kv_end]) }
    }

    fn pieces(&self, dialect: Dialect) -> Vec<(Piece, String)> {
        let of = [
            (&self.tile, "t", [Piece::TileCode, Piece::TileMasked, Piece::TileVisible]),
            (&self.keys, "k", [Piece::KeysCode, Piece::KeysBegin, Piece::KeysEnd]),
            (&self.looked, "t", [Piece::LookedCode, Piece::LookedMasked, Piece::LookedVisible]),
        ];
        // No processor writes lists.
        let of = of.into_iter().take(if dialect == Dialect::C { 2 } else { 3 });
        let pieces = of.map(|(code, prefix, [text, first, second])| {
            let code = code.print(dialect, prefix);
            let mut results = code.results().into_iter();
            let mut next = || results.next().unwrap_or_else(|| "0".to_owned());
            [(text, code.all()), (first, next()), (second, next())]
        });
        pieces.flatten().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TemplateSet;
    use std::collections::BTreeSet;

    /// The placeholders of the template files with one of these endings.
    fn placeholders(endings: &[&str]) -> BTreeSet<String> {
        let set = TemplateSet::embedded();
        let of = set.files().filter(|(name, _)| endings.iter().any(|ending| name.ends_with(ending)));
        let texts: Vec<&str> = of.map(|(_, text)| text).collect();
        assert!(!texts.is_empty(), "{endings:?}");
        let names = texts.into_iter().flat_map(|text| text.split("@{").skip(1));
        names.map(|rest| rest.split("}@").next().unwrap_or_default().trim().to_owned()).collect()
    }

    #[test]
    fn every_placeholder_has_a_piece_and_every_piece_a_placeholder() {
        let program = Program::parse("t: bf16[q_len, kv_len]; mask = kv <= q; score = score + t[q, kv];").unwrap();
        for (fields, of_program, of_language) in [
            (cpu_fields(Some(&program)), "/program.h", [".c", ".h"]),
            (cuda_fields(Some(&program), program.biases()), "/program.cuh", [".cu", ".cuh"]),
        ] {
            let pieces: BTreeSet<String> = fields.keys().map(|name| (*name).to_owned()).collect();
            let wanted = placeholders(&[of_program]);
            let (missing, unused): (Vec<_>, Vec<_>) =
                (wanted.difference(&pieces).collect(), pieces.difference(&wanted).collect());
            assert!(missing.is_empty(), "{of_program} pastes {missing:?}, which are no pieces");
            let anywhere = placeholders(&of_language);
            let unused: Vec<_> = unused.into_iter().filter(|name| !anywhere.contains(*name)).collect();
            assert!(unused.is_empty(), "no template in {of_language:?} pastes {unused:?}");
        }
    }

    #[test]
    fn without_a_program_the_same_pieces_are_there() {
        let program = Program::parse("mask = kv % 7 == 0; sink = 1.0;").unwrap();
        assert!(cpu_fields(None).keys().eq(cpu_fields(Some(&program)).keys()));
        assert!(cuda_fields(None, &[]).keys().eq(cuda_fields(Some(&program), &[]).keys()));
    }
}
