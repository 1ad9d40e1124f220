//! The report as one HTML page: pictures and tables, no script, nothing fetched.

use crate::figure::svg;
use crate::model::Report;
use crate::page;
use crate::read::Error;
use crate::tables::{facts, tables};
use serde::Serialize;
use tera::Context;

#[derive(Serialize)]
struct Section {
    title: String,
    note: String,
    header: Vec<String>,
    rows: Vec<Vec<String>>,
}

/// The report as one HTML document.
///
/// # Errors
/// [`Error::Draw`] when a picture cannot be drawn.
pub fn html(report: &Report) -> Result<String, Error> {
    let sections: Vec<Section> = tables(report)
        .into_iter()
        .map(|t| Section { title: t.title, note: t.note, header: t.header, rows: t.rows })
        .collect();
    let mut context = Context::new();
    context.insert("title", &report.title);
    context.insert("facts", &facts(report));
    context.insert("method", &report.method);
    context.insert("sections", &sections);
    context.insert("figure", &svg(report)?);
    page::render(include_str!("page.html"), "", context)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::read::tests::sample;

    #[test]
    fn the_page_holds_the_figure_and_all_tables_and_escapes_text() {
        let page = html(&sample()).unwrap();
        assert!(page.contains("<svg") && page.contains("</html>"));
        assert_eq!(page.matches("<h2>").count(), tables(&sample()).len());
        assert!(page.contains("w4x32-kv64") && page.contains("651 W"));
        assert!(page.contains("&lt;b&gt;cute") && !page.contains("<b>cute"), "text of an error is text");
        assert!(!page.contains("<script") && !page.contains("http://") || page.contains("http://www.w3.org"));
    }
}
