//! What all HTML pages share: the look, escaping, and a policy under which nothing runs or loads but the page's own.

use crate::read::Error;
use base64::Engine as _;
use sha2::{Digest, Sha256};
use tera::{Context, Tera};

const STYLE: &str = include_str!("page.css");

/// Renders a page, whose template puts `policy`, `style` and `script` in their places.
///
/// The policy names style and script by their hashes: markup that got into the page in spite of escaping neither runs
/// nor fetches.
pub(crate) fn render(template: &str, script: &str, mut context: Context) -> Result<String, Error> {
    let failed = |e: tera::Error| Error::Draw(e.to_string());
    let hash = |text: &str| format!("'sha256-{}'", base64::prelude::BASE64_STANDARD.encode(Sha256::digest(text)));
    let scripts = if script.is_empty() { "'none'".to_owned() } else { hash(script) };
    let policy = format!(
        "default-src 'none'; style-src {}; script-src {scripts}; base-uri 'none'; form-action 'none'",
        hash(STYLE)
    );
    context.insert("policy", &policy);
    context.insert("style", STYLE);
    context.insert("script", script);
    let mut engine = Tera::new();
    // The name's ending turns escaping on.
    engine.add_raw_template("page.html", template).map_err(failed)?;
    engine.render("page.html", &context).map_err(failed)
}
