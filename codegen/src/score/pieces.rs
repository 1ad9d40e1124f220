//! A program as the words of `templates/lib/cpu/program.h` and `templates/lib/cuda/score/program.cuh`.

use super::bias::Bias;
use super::lower::{AlongKeys, Capped, Code, Dialect, compiling_cost, lower, lower_fragments, lower_scores, slot};
use super::program::Program;
use super::rows::{RowKeys, Search};
use super::tile::TileProgram;
use super::words::Unary;
use super::{Graph, Id, Node};
use std::collections::BTreeMap;

/// A program whose statements cost more than this is not optimised: gcc takes 10 s for 150 calls of `tanh`, 6 s for 1600 other
/// statements, and minutes for a few times as many.
const LONG: usize = 1000;

/// The names that the CPU template pastes; for no program, which it then leaves out, all of them stand for nothing.
pub fn cpu_fields(program: Option<&Program>) -> BTreeMap<&'static str, String> {
    let mut m = flags(program);
    let code = |root: fn(&Program) -> Option<Id>, prefix: &str| match program.and_then(|p| Some((p, root(p)?))) {
        Some((p, id)) => with_inputs(lower(p.graph(), &[id], Dialect::C, prefix)),
        None => Code::default(),
    };
    let (mask, score, sink) = (code(Program::mask, "m"), code(Program::score, "s"), code(Program::sink, "n"));
    let rows = |code: &Code, line: fn(&str, &str) -> String| -> String {
        code.row_live.iter().map(|(ty, name)| line(ty, name)).collect()
    };
    let field = |ty: &str, name: &str| format!("    {ty} {name}[PANEL];\n");
    let save = |_: &str, name: &str| format!("rows->{name}[lane] = {name};\n");
    let load = |ty: &str, name: &str| format!("const {ty} {name} = rows->{name}[lane + x];\n");
    m.extend([
        ("mask_row_fields", rows(&mask, field)),
        ("mask_row_save", rows(&mask, save)),
        ("mask_row_load", rows(&mask, load)),
        ("mask_result", result(&mask, "1")),
        ("mask_uniform", mask.uniform),
        ("mask_row", mask.row),
        ("mask_column", mask.column),
        ("mask_element", mask.element),
        ("score_row_fields", rows(&score, field)),
        ("score_row_save", rows(&score, save)),
        ("score_row_load", rows(&score, load)),
        ("score_result", result(&score, "score")),
        ("score_uniform", score.uniform),
        ("score_row", score.row),
        ("score_column", score.column),
        ("score_element", score.element),
        ("sink_result", result(&sink, "0")),
        ("sink_uniform", sink.uniform),
        ("sink_row", sink.row),
    ]);
    m.extend(tile_fields(program, Dialect::C));
    let long = m.values().map(|statements| compiling_cost(statements)).sum::<usize>() > LONG;
    m.insert("program_long", u32::from(long).to_string());
    m
}

/// The names that the CUDA templates paste. `biases` are those that a kernel has brought tile by tile.
pub fn cuda_fields(program: Option<&Program>, biases: &[Bias]) -> BTreeMap<&'static str, String> {
    let mut m = flags(program);
    let count = |tensors: bool| {
        let all = program.map_or(&[][..], |p| p.declarations());
        all.iter().filter(|d| d.axes.is_some() == tensors).count().max(1).to_string()
    };
    let code = |root: fn(&Program) -> Option<Id>, prefix: &str| match program.and_then(|p| Some((p, root(p)?))) {
        Some((p, id)) => lower_fragments(p.graph(), &[id], prefix),
        None => Code::default(),
    };
    let (mask, sink) = (code(Program::mask, "m"), code(Program::sink, "n"));
    let tanhs = program.map_or(Vec::new(), tanh_arguments);
    let score = match program.and_then(|p| Some((p, p.score()?))) {
        Some((p, id)) => lower_scores(p.graph(), &[vec![id], tanhs.clone()].concat(), "s"),
        None => Code::default(),
    };
    let largest = score.results.iter().skip(1).fold(String::new(), |all, x| match all.is_empty() {
        true => format!("fabsf({x})"),
        false => format!("fmaxf({all}, fabsf({x}))"),
    });
    let paired: Vec<String> = (score.along_keys.iter())
        .map(|r| format!("{} == 1 && (u64){} % {} == 0", r.stride, r.first, 2 * r.bytes))
        .collect();
    // Reads that are kept in registers from ahead of their use: of two bytes for an element.
    let is_bias = |r: &AlongKeys| biases.iter().any(|b| b.load == r.load);
    let take_ahead: String = (score.along_keys.iter().enumerate().filter(|(_, r)| r.bytes == 2 && !is_bias(r)))
        .map(|(i, r)| format!("ahead.template take<kPaired>({i}, {}, {}, last);\n", r.first, r.stride))
        .collect();
    let takes_ahead = !take_ahead.is_empty() && tanhs.is_empty();
    let reads_ahead = if takes_ahead || !biases.is_empty() { score.along_keys.len() } else { 0 };
    let place =
        |b: &Bias| score.along_keys.iter().position(|r| r.load == b.load).expect("a bias is read along the keys");
    let places: Vec<String> = biases.iter().map(|b| place(b).to_string()).collect();
    let no_cap = Capped { cap: "0.0f".to_owned(), factor: "0.0f".to_owned(), bound: 0.0 };
    let capped = score.capped.clone().unwrap_or(no_cap);
    let shift = |i: usize| score.shift.as_ref().map_or("0.0f".to_owned(), |parts| parts[i].clone());
    let lines = |live: &[(&'static str, String)], line: fn(&str, &str) -> String| -> String {
        live.iter().map(|(ty, name)| line(ty, name)).collect()
    };
    let field = |ty: &str, name: &str| format!("    {ty} {name};\n");
    let names = |live: &[(&'static str, String)]| live.iter().map(|(_, n)| n.as_str()).collect::<Vec<_>>().join(", ");
    let of_head = |ty: &str, name: &str| format!("const {ty} {name} = kept.{name};\n");
    let of_row = |ty: &str, name: &str| format!("const {ty} {name} = row.{name};\n");
    m.extend([
        ("side_tensors", count(true)),
        ("side_scalars", count(false)),
        ("mask_head_fields", lines(&mask.uniform_live, field)),
        ("mask_head_names", names(&mask.uniform_live)),
        ("mask_head_load", lines(&mask.uniform_live, of_head)),
        ("mask_row_fields", lines(&mask.row_live, field)),
        ("mask_row_names", names(&mask.row_live)),
        ("mask_row_load", lines(&mask.row_live, of_row)),
        ("mask_result", result(&mask, "true")),
        ("mask_cheap", cheap(&mask)),
        ("mask_inputs", mask.inputs),
        ("mask_uniform", mask.uniform),
        ("mask_row", mask.row),
        ("mask_column", mask.column),
        ("mask_element", mask.element),
        ("score_head_fields", lines(&score.uniform_live, field)),
        ("score_head_names", names(&score.uniform_live)),
        ("score_head_load", lines(&score.uniform_live, of_head)),
        ("score_row_fields", lines(&score.row_live, field)),
        ("score_row_names", names(&score.row_live)),
        ("score_row_load", lines(&score.row_live, of_row)),
        ("score_result", result(&score, "score")),
        ("score_tanh", u32::from(!tanhs.is_empty()).to_string()),
        ("score_along", u32::from(!score.along_keys.is_empty()).to_string()),
        ("score_paired", if paired.is_empty() { "false".to_owned() } else { paired.join(" && ") }),
        ("score_reads_ahead", reads_ahead.to_string()),
        ("score_takes_ahead", u32::from(takes_ahead).to_string()),
        ("score_take_ahead", take_ahead),
        ("score_biases", biases.len().to_string()),
        ("score_bias_places", if places.is_empty() { "0".to_owned() } else { places.join(", ") }),
        ("bias_code", program.map_or(String::new(), |p| bias_code(p.graph(), biases))),
        ("score_tanh_multiples", u32::from(score.multiples).to_string()),
        ("score_tanh_largest", if largest.is_empty() { "0.0f".to_owned() } else { largest }),
        ("score_shift", u32::from(score.shift.is_some()).to_string()),
        ("score_shift_factor", shift(0)),
        ("score_shift_base", shift(1)),
        ("score_capped", u32::from(score.capped.is_some()).to_string()),
        ("score_cap_bound", format!("{:?}f", capped.bound)),
        ("score_cap", capped.cap),
        ("score_cap_factor", capped.factor),
        ("score_cheap", cheap(&score)),
        ("score_inputs", score.inputs),
        ("score_uniform", score.uniform),
        ("score_row", score.row),
        ("score_column", score.column),
        ("score_element", score.element),
        ("sink_result", result(&sink, "0.0f")),
        ("sink_code", sink.all()),
    ]);
    m.extend(tile_fields(program, Dialect::Cuda));
    m.extend(row_fields(program.and_then(Program::rows)));
    m
}

/// Where each bias lies for a head: `return` for the one that is asked for.
fn bias_code(graph: &Graph, biases: &[Bias]) -> String {
    let leading: Vec<Id> = biases.iter().flat_map(|b| b.leading.iter().copied()).collect();
    let code = lower(graph, &leading, Dialect::Cuda, "x");
    let mut names = code.results.iter();
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

/// The ends of the run of keys that each query has, where the mask leaves it one.
fn row_fields(rows: Option<&RowKeys>) -> [(&'static str, String); 9] {
    let flag = |f: fn(&RowKeys) -> bool| u32::from(rows.is_some_and(f)).to_string();
    let (mut code, mut searches) = (Code::default(), String::new());
    if let Some(rows) = rows {
        let of_searches = rows.searches.iter().flat_map(|s| s.leading.iter().copied().chain([s.value]));
        let roots: Vec<Id> = [rows.begin, rows.end].into_iter().chain(of_searches).collect();
        code = lower(&rows.graph, &roots, Dialect::Cuda, "r");
        let mut names = code.results[2..].iter();
        for search in &rows.searches {
            let leading: Vec<&str> = names.by_ref().take(search.leading.len()).map(String::as_str).collect();
            let value = names.next().expect("every search has a value");
            searches.push_str(&search_statement(&rows.graph, search, &leading, value));
        }
    }
    let nth = |i: usize| code.results.get(i).cloned().unwrap_or_else(|| "0".to_owned());
    [
        ("program_rows", flag(|_| true)),
        ("program_sorted", flag(|r| r.nondecreasing)),
        ("program_search", flag(|r| !r.searches.is_empty())),
        ("program_from_first", flag(|r| r.from_first)),
        ("program_rows_cheap", flag(|r| r.is_cheap)),
        ("rows_code", code.all()),
        ("rows_begin", nth(0)),
        ("rows_end", nth(1)),
        ("rows_searches", searches),
    ]
}

/// Moves an end of a run to where a tensor's elements pass a value.
fn search_statement(graph: &Graph, search: &Search, leading: &[&str], value: &str) -> String {
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

fn flags(program: Option<&Program>) -> BTreeMap<&'static str, String> {
    let flag = |on: bool| u32::from(on).to_string();
    let has = |f: fn(&Program) -> bool| flag(program.is_some_and(f));
    BTreeMap::from([
        ("program", flag(program.is_some())),
        ("program_mask", has(|p| p.mask().is_some())),
        ("program_score", has(|p| p.score().is_some())),
        ("program_sink", has(|p| p.sink().is_some())),
        ("program_lists", has(|p| p.lists().is_some())),
        ("program_runs", has(|p| p.runs().is_some())),
    ])
}

fn result(code: &Code, none: &str) -> String {
    code.results.first().cloned().unwrap_or_else(|| none.to_owned())
}

/// C takes inputs as part of what is computed for a head.
fn with_inputs(code: Code) -> Code {
    Code { uniform: code.inputs.clone() + &code.uniform, ..code }
}

/// Statements for a head that cost nothing to compute again.
fn cheap(code: &Code) -> String {
    let kept =
        |line: &str| code.uniform_live.iter().any(|(ty, name)| line.starts_with(&format!("const {ty} {name} = ")));
    code.uniform.lines().filter(|line| !kept(line)).map(|line| format!("{line}\n")).collect()
}

/// What decides which keys a tile visits.
fn tile_fields(program: Option<&Program>, dialect: Dialect) -> [(&'static str, String); 9] {
    let (tile, keys) = match program.map(TileProgram::new) {
        Some(t) => (
            lower(&t.graph, &[t.all_masked, t.all_visible], dialect, "t"),
            lower(&t.graph, &[t.kv_begin, t.kv_end], dialect, "k"),
        ),
        None => (Code::default(), Code::default()),
    };
    // Who makes lists of blocks has a warp for each, which looks at what it reads of tensors.
    let looked = match program.filter(|p| dialect == Dialect::Cuda && p.lists().is_some()).map(TileProgram::by_elements)
    {
        Some(t) => lower(&t.graph, &[t.all_masked, t.all_visible], dialect, "t"),
        None => Code::default(),
    };
    let nth = |code: &Code, i: usize| code.results.get(i).cloned().unwrap_or_else(|| "0".to_owned());
    [
        ("looked_code", looked.all()),
        ("looked_masked", nth(&looked, 0)),
        ("looked_visible", nth(&looked, 1)),
        ("tile_code", tile.all()),
        ("tile_masked", nth(&tile, 0)),
        ("tile_visible", nth(&tile, 1)),
        ("keys_code", keys.all()),
        ("keys_begin", nth(&keys, 0)),
        ("keys_end", nth(&keys, 1)),
    ]
}
