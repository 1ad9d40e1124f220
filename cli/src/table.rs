//! Tables for people: plain text that is also Markdown, and that fits the terminal.
//!
//! What goes to a file or another program is always one line a row. On a terminal that is too narrow for that, cells of
//! several words are wrapped; where not even words fit side by side, each row becomes a list of names and values, so
//! that a schedule's name is still one word that can be copied.

use std::fmt;

/// Columns that are always enough: a terminal may say it has none.
const NARROWEST: usize = 20;

/// A header and rows of texts.
#[derive(Debug, Clone)]
pub(crate) struct Table {
    header: Vec<String>,
    rows: Vec<Vec<String>>,
    /// Columns of the terminal; none where it goes elsewhere.
    columns: Option<usize>,
}

/// A table for standard output.
pub(crate) fn table(header: &[&str]) -> Table {
    Table { header: header.iter().map(|text| (*text).to_owned()).collect(), rows: Vec::new(), columns: columns() }
}

/// Columns of the terminal that standard output is.
pub(crate) fn columns() -> Option<usize> {
    let size = rustix::termios::tcgetwinsize(std::io::stdout()).ok()?;
    Some(usize::from(size.ws_col)).filter(|columns| *columns > 0)
}

/// Columns that a text takes.
fn width(text: &str) -> usize {
    text.chars().count()
}

impl Table {
    /// Adds a row: a cell for each column, fewer are filled up.
    pub(crate) fn add_row(&mut self, cells: impl IntoIterator<Item = impl Into<String>>) {
        let mut row: Vec<String> = cells.into_iter().map(Into::into).collect();
        row.resize(self.header.len(), String::new());
        self.rows.push(row);
    }

    /// The header and all rows.
    fn lines(&self) -> impl Iterator<Item = &Vec<String>> {
        std::iter::once(&self.header).chain(&self.rows)
    }

    /// The widest of each column, by a measure of cells.
    fn widest(&self, measure: impl Fn(&str) -> usize) -> Vec<usize> {
        let of = |column: usize| self.lines().map(|row| measure(&row[column])).max().unwrap_or(0);
        (0..self.header.len()).map(of).collect()
    }

    /// Widths of columns within a terminal: as they are, or some of them narrower, where whole words fit so.
    fn widths(&self) -> Option<Vec<usize>> {
        let mut widths = self.widest(width);
        let Some(columns) = self.columns else { return Some(widths) };
        // Two spaces and a bar for each, and a bar at the start.
        let room = columns.max(NARROWEST).saturating_sub(3 * widths.len() + 1);
        let least = self.widest(|cell| cell.split(' ').map(width).max().unwrap_or(0));
        if least.iter().sum::<usize>() > room {
            return None;
        }
        // From the widest that can give.
        while widths.iter().sum::<usize>() > room {
            let gives = (0..widths.len()).filter(|i| widths[*i] > least[*i]);
            let column = gives.max_by_key(|i| widths[*i]).expect("the least of all is within the room");
            widths[column] -= 1;
        }
        Some(widths)
    }

    /// Each row as a list.
    fn stacked(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let names = self.header.iter().map(|name| width(name)).max().unwrap_or(0);
        for (i, row) in self.rows.iter().enumerate() {
            if i > 0 {
                writeln!(f)?;
            }
            let cells = self.header.iter().zip(row).filter(|(_, cell)| !cell.is_empty());
            let lines: Vec<_> = cells.map(|(name, cell)| format!("{name:names$}  {cell}")).collect();
            write!(f, "{}", lines.join("\n"))?;
            if i + 1 < self.rows.len() {
                writeln!(f)?;
            }
        }
        Ok(())
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let Some(widths) = self.widths() else { return self.stacked(f) };
        for (i, row) in self.lines().enumerate() {
            let cells: Vec<Vec<String>> = row.iter().zip(&widths).map(|(cell, width)| wrapped(cell, *width)).collect();
            for line in 0..cells.iter().map(Vec::len).max().unwrap_or(1) {
                if i + line > 0 {
                    writeln!(f)?;
                }
                write!(f, "|")?;
                for (cell, width) in cells.iter().zip(&widths) {
                    write!(f, " {:width$} |", cell.get(line).map_or("", String::as_str))?;
                }
            }
            if i == 0 {
                writeln!(f)?;
                write!(f, "|")?;
                for width in &widths {
                    write!(f, "{:-<1$}|", "", width + 2)?;
                }
            }
        }
        Ok(())
    }
}

/// A cell in lines that are no wider; a word that is stays whole.
fn wrapped(cell: &str, most: usize) -> Vec<String> {
    if width(cell) <= most {
        return vec![cell.to_owned()];
    }
    let mut lines: Vec<String> = Vec::new();
    for word in cell.split(' ') {
        match lines.last_mut() {
            Some(line) if width(line) + 1 + width(word) <= most => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(columns: Option<usize>) -> String {
        let mut table = Table { columns, ..table(&["problem", "us", "device"]) };
        table.add_row(["bf16-d128-causal", "12.5", "NVIDIA H200 (sm_90a, 132 units)"]);
        table.add_row(["f32-d64".to_owned(), "µ".to_owned()]);
        table.to_string()
    }

    const WHOLE: &str = "\
| problem          | us   | device                          |
|------------------|------|---------------------------------|
| bf16-d128-causal | 12.5 | NVIDIA H200 (sm_90a, 132 units) |
| f32-d64          | µ    |                                 |";

    #[test]
    fn a_file_and_a_wide_terminal_get_one_line_a_row() {
        assert_eq!(of(None), WHOLE);
        assert_eq!(of(Some(61)), WHOLE);
        assert_eq!(of(Some(500)), WHOLE);
    }

    #[test]
    fn cells_of_several_words_are_wrapped() {
        let narrow = "\
| problem          | us   | device      |
|------------------|------|-------------|
| bf16-d128-causal | 12.5 | NVIDIA H200 |
|                  |      | (sm_90a,    |
|                  |      | 132 units)  |
| f32-d64          | µ    |             |";
        assert_eq!(of(Some(41)), narrow);
        for columns in 38..200 {
            assert!(of(Some(columns)).lines().all(|line| width(line) <= columns), "{columns}");
        }
    }

    #[test]
    fn words_that_do_not_fit_side_by_side_make_lists() {
        let list = "\
problem  bf16-d128-causal
us       12.5
device   NVIDIA H200 (sm_90a, 132 units)

problem  f32-d64
us       µ";
        assert_eq!(of(Some(37)), list);
        assert_eq!(of(Some(1)), list);
    }

    #[test]
    fn a_table_without_rows_is_its_header() {
        let empty = Table { columns: Some(80), ..table(&["a", ""]) };
        assert_eq!(empty.to_string(), "| a |  |\n|---|--|");
    }
}
