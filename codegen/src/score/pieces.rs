//! A program as the words of `templates/lib/cpu/program.h`.

use super::lower::{Code, Dialect, lower};
use super::program::Program;
use super::tile::TileProgram;
use std::collections::BTreeMap;

/// The names that the CPU template pastes; for no program, which it then leaves out, all of them stand for nothing.
pub fn cpu_fields(program: Option<&Program>) -> BTreeMap<&'static str, String> {
    let flag = |on: bool| u32::from(on).to_string();
    let has = |f: fn(&Program) -> bool| flag(program.is_some_and(f));
    let mut m = BTreeMap::from([
        ("program", flag(program.is_some())),
        ("program_mask", has(|p| p.mask().is_some())),
        ("program_score", has(|p| p.score().is_some())),
        ("program_sink", has(|p| p.sink().is_some())),
    ]);
    let code = |root: fn(&Program) -> Option<super::Id>, prefix: &str| match program.and_then(|p| Some((p, root(p)?))) {
        Some((p, id)) => lower(p.graph(), &[id], Dialect::C, prefix),
        None => Code::default(),
    };
    let (mask, score, sink) = (code(Program::mask, "m"), code(Program::score, "s"), code(Program::sink, "n"));
    let result = |code: &Code, none: &str| code.results.first().cloned().unwrap_or_else(|| none.to_owned());
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
    let (tile, keys) = match program.map(TileProgram::new) {
        Some(t) => (
            lower(&t.graph, &[t.all_masked, t.all_visible], Dialect::C, "t"),
            lower(&t.graph, &[t.kv_begin, t.kv_end], Dialect::C, "k"),
        ),
        None => (Code::default(), Code::default()),
    };
    let nth = |code: &Code, i: usize| code.results.get(i).cloned().unwrap_or_else(|| "0".to_owned());
    m.extend([
        ("tile_code", tile.all()),
        ("tile_masked", nth(&tile, 0)),
        ("tile_visible", nth(&tile, 1)),
        ("keys_code", keys.all()),
        ("keys_begin", nth(&keys, 0)),
        ("keys_end", nth(&keys, 1)),
    ]);
    m
}
