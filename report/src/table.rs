//! A table, before it is written in any form.

/// What stands in a cell without a value.
pub(crate) const NONE: &str = "-";

/// A table with its heading and what to know about it.
pub(crate) struct Table {
    pub(crate) title: String,
    pub(crate) note: String,
    pub(crate) header: Vec<String>,
    pub(crate) rows: Vec<Vec<String>>,
}

impl Table {
    pub(crate) fn new(title: impl Into<String>, note: impl Into<String>, header: &[&str]) -> Self {
        let header = header.iter().map(|h| (*h).to_owned()).collect();
        Self { title: title.into(), note: note.into(), header, rows: Vec::new() }
    }

    /// Leaves out the columns that nobody filled, from the one of this index on.
    pub(crate) fn drop_empty_columns(&mut self, from: usize) {
        for column in (from..self.header.len()).rev() {
            if self.rows.iter().all(|r| r[column] == NONE) {
                self.header.remove(column);
                self.rows.iter_mut().for_each(|r| drop(r.remove(column)));
            }
        }
    }
}
