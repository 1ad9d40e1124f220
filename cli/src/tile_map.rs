//! The tile map of a mask: which tiles a kernel skips, which it computes without a mask, and which with one.

use super::exit::usage;
use super::files;
use super::side;
use super::tensors::File;
use anyhow::Result;
use flashtune::{Problem, Shape};
use flashtune_codegen::score::{Classifier, Program, ProgramBuilder, ProgramError, TileKind, TileProgram};
use flashtune_codegen::{Error, Mask};
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

/// Options of the tile map.
#[derive(clap::Args, Debug)]
pub(crate) struct MapArgs {
    /// Draw which tiles the mask skips, leaves whole or mixes, for the first sequence and head
    #[arg(long)]
    tile_map: bool,
    /// Query and key rows of a tile, e.g. 128x64
    #[arg(long, value_name = "QxKV", default_value = "128x128", requires = "tile_map")]
    tile: String,
    /// Also write the map as SVG
    #[arg(long, value_name = "FILE", requires = "tile_map")]
    svg: Option<PathBuf>,
    /// A scalar of the score program, as NAME=NUMBER; may be repeated
    #[arg(long, value_name = "NAME=NUMBER", requires = "tile_map")]
    set: Vec<String>,
    /// A safetensors file with the tensors of the score program
    #[arg(long, value_name = "FILE", requires = "tile_map")]
    tensors: Option<PathBuf>,
}

impl MapArgs {
    /// Whether a map is wanted.
    pub(crate) fn wanted(&self) -> bool {
        self.tile_map
    }

    /// The map of a mask, and where it was written.
    pub(crate) fn map(&self, problem: &Problem, shape: &Shape) -> Result<TileMap> {
        let (block_q, block_kv) = self.blocks()?;
        let program = whole_mask(problem, shape.mask)?;
        let file = self.tensors.as_deref().map(File::read).transpose()?;
        let data = side::data(&program, &self.set, file.as_ref())?;
        let tiles = TileProgram::new(&program);
        if shape.is_empty() || shape.kv_len == 0 {
            return Err(usage("a tile map needs at least one query, one key and one head; give larger sizes"));
        }
        let count = shape.q_len.div_ceil(block_q) as u64 * shape.kv_len.div_ceil(block_kv) as u64;
        if count > 1 << 22 {
            return Err(usage(format!("{count} tiles are too many to draw; give a larger --tile or smaller lengths")));
        }
        let mut classifier = Classifier::new(&program, &tiles, shape, &data).map_err(Error::from)?;
        let rows = classifier.map(0, 0, block_q, block_kv);
        let map = TileMap { rows, block_q, block_kv, title: title(&program, shape) };
        if let Some(path) = &self.svg {
            map.write_svg(path)?;
        }
        Ok(map)
    }

    fn blocks(&self) -> Result<(u32, u32)> {
        let number = |s: &str| s.parse::<u32>().ok().filter(|n| (1..=1 << 20).contains(n));
        let found = self.tile.split_once('x').and_then(|(q, kv)| Some((number(q)?, number(kv)?)));
        found.ok_or_else(|| usage(format!("--tile {}: write it as QxKV, e.g. 128x64, from 1 to 1048576", self.tile)))
    }
}

/// The mask of a problem and a shape as one program.
fn whole_mask(problem: &Problem, mask: Mask) -> Result<Program> {
    let build = || -> Result<Program, ProgramError> {
        let distance = "distance = kv - (q + kv_len - q_len);";
        let mut builder = ProgramBuilder::new();
        if let Some(program) = problem.program {
            builder = builder.text(program.text())?;
        }
        let (left, right) = mask.window();
        if let Some(n) = left {
            builder = builder.mask(&format!("{distance} -{n} <= distance"))?;
        }
        if let Some(n) = right {
            builder = builder.mask(&format!("{distance} distance <= {n}"))?;
        }
        builder.build()?.mask_only()
    };
    Ok(build().map_err(Error::from)?)
}

fn title(program: &Program, shape: &Shape) -> String {
    // What is computed, without the declarations.
    let lines: Vec<&str> = program.text().lines().filter(|l| l.contains(" = ")).collect();
    let mut mask: String = lines.join(" ").chars().take(120).collect();
    if mask.is_empty() {
        mask = "no mask;".to_owned();
    }
    format!("{mask} {} queries, {} keys", shape.q_len, shape.kv_len)
}

/// The kinds of all tiles of one head.
pub(crate) struct TileMap {
    rows: Vec<Vec<TileKind>>,
    block_q: u32,
    block_kv: u32,
    title: String,
}

/// Tiles of a line, and lines, that fit a terminal.
const FITS: usize = 96;

impl TileMap {
    fn count(&self, kind: TileKind) -> usize {
        self.rows.iter().flatten().filter(|k| **k == kind).count()
    }

    fn summary(&self) -> String {
        let [visible, mixed, masked] =
            [TileKind::Visible, TileKind::Mixed, TileKind::Masked].map(|kind| self.count(kind));
        let part = 100.0 * (visible + mixed) as f64 / (visible + mixed + masked) as f64;
        format!(
            "tiles of {} x {}: {visible} visible, {mixed} mixed, {masked} skipped; {part:.1}% are computed",
            self.block_q, self.block_kv
        )
    }

    /// The map in letters: `#` visible, `+` mixed, `.` skipped.
    pub(crate) fn text(&self) -> String {
        let mut out = format!("{}\n{}\n", self.title, self.summary());
        if self.rows.len() > FITS || self.rows[0].len() > FITS {
            let _ = writeln!(out, "(too many tiles for a terminal: give a larger --tile, or --svg FILE)");
            return out;
        }
        for row in &self.rows {
            let line: String = row.iter().map(|kind| letter(*kind)).collect();
            let _ = writeln!(out, "{line}");
        }
        let _ = writeln!(out, "# visible, no mask code   + mixed   . skipped");
        out
    }

    /// The map for scripts.
    pub(crate) fn json(&self) -> Value {
        let rows: Vec<String> = self.rows.iter().map(|r| r.iter().map(|k| letter(*k)).collect()).collect();
        json!({
            "title": self.title, "block_q": self.block_q, "block_kv": self.block_kv,
            "visible": self.count(TileKind::Visible), "mixed": self.count(TileKind::Mixed),
            "skipped": self.count(TileKind::Masked), "rows": rows,
        })
    }

    /// The map as an image: queries downwards, keys to the right.
    fn svg(&self) -> String {
        let (height, width) = (self.rows.len(), self.rows[0].len());
        // Tiles keep their shape; the longer side is about 800 pixels.
        let unit = 800.0 / (height * self.block_q as usize).max(width * self.block_kv as usize) as f64;
        let (w, h) = (self.block_kv as f64 * unit, self.block_q as f64 * unit);
        let (left, top) = (28.0, 64.0);
        let (total_w, total_h) = ((width as f64 * w + 2.0 * left).max(560.0), height as f64 * h + top + 44.0);
        let mut out = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{total_w:.0}\" height=\"{total_h:.0}\" \
             font-family=\"sans-serif\" font-size=\"13\" fill=\"#222\">\n\
             <rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n\
             <text x=\"{left}\" y=\"20\">{}</text>\n<text x=\"{left}\" y=\"38\">{}</text>\n\
             <text x=\"{left}\" y=\"57\" fill=\"#666\">keys →</text>\n\
             <text x=\"20\" y=\"{top}\" fill=\"#666\" transform=\"rotate(-90 20 {top})\" \
             text-anchor=\"end\">← queries</text>\n",
            escape(&self.title),
            escape(&self.summary()),
        );
        for (i, row) in self.rows.iter().enumerate() {
            let mut start = 0;
            for run in row.chunk_by(|a, b| a == b) {
                let (x, y) = (left + start as f64 * w, top + i as f64 * h);
                let _ = writeln!(
                    out,
                    "<rect x=\"{x:.2}\" y=\"{y:.2}\" width=\"{:.2}\" height=\"{h:.2}\" fill=\"{}\"/>",
                    run.len() as f64 * w,
                    colour(run[0]),
                );
                start += run.len();
            }
        }
        // Lines between tiles, as long as they do not hide them.
        let (right, bottom) = (left + width as f64 * w, top + height as f64 * h);
        if w.min(h) >= 5.0 {
            let mut lines = String::new();
            for i in 0..=width {
                let _ = write!(lines, "M{0:.2} {top}V{bottom:.2}", left + i as f64 * w);
            }
            for i in 0..=height {
                let _ = write!(lines, "M{left} {0:.2}H{right:.2}", top + i as f64 * h);
            }
            let _ = writeln!(out, "<path d=\"{lines}\" stroke=\"#fff\" stroke-width=\"0.8\"/>");
        }
        let _ = writeln!(
            out,
            "<rect x=\"{left}\" y=\"{top}\" width=\"{:.2}\" height=\"{:.2}\" fill=\"none\" stroke=\"#888\"/>",
            right - left,
            bottom - top
        );
        let legend = [(TileKind::Visible, "visible"), (TileKind::Mixed, "mixed"), (TileKind::Masked, "skipped")];
        for (i, (kind, name)) in legend.into_iter().enumerate() {
            let (x, y) = (left + 110.0 * i as f64, bottom + 16.0);
            let _ = writeln!(
                out,
                "<rect x=\"{x}\" y=\"{y:.2}\" width=\"14\" height=\"14\" fill=\"{}\" stroke=\"#888\"/>\
                 <text x=\"{}\" y=\"{:.2}\">{name}</text>",
                colour(kind),
                x + 20.0,
                y + 12.0
            );
        }
        out.push_str("</svg>\n");
        out
    }

    fn write_svg(&self, path: &Path) -> Result<()> {
        files::write(path, self.svg().as_bytes())
    }
}

fn letter(kind: TileKind) -> char {
    match kind {
        TileKind::Visible => '#',
        TileKind::Mixed => '+',
        TileKind::Masked => '.',
    }
}

fn colour(kind: TileKind) -> &'static str {
    match kind {
        TileKind::Visible => "#2f6db3",
        TileKind::Mixed => "#f0a63c",
        TileKind::Masked => "#eceff2",
    }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
