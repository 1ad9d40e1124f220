//! Which problems and sizes are measured.

use super::super::cases::{Case, CaseArgs, default_case};
use super::super::exit::usage;
use super::super::lists::Sizes;
use anyhow::Result;

/// Sizes that follow from others, so that a grid over lengths and head dims keeps the work alike.
#[derive(clap::Args, Debug, Default)]
pub(crate) struct GridArgs {
    /// Batch so that batch times rows of Q is this many (1 at least)
    #[arg(long, value_name = "N", conflicts_with = "batch")]
    tokens: Option<Sizes>,
    /// Query heads so that heads times head dim is this much
    #[arg(long, value_name = "N", conflicts_with = "heads")]
    width: Option<Sizes>,
}

impl GridArgs {
    /// Every combination of the options, each checked.
    pub(crate) fn cases(&self, args: &CaseArgs) -> Result<Vec<Case>> {
        let mut cases = args.cases(&default_case())?;
        let (tokens, width) = (one("--tokens", &self.tokens)?, one("--width", &self.width)?);
        for Case { problem, shape, .. } in &mut cases {
            if let Some(tokens) = tokens {
                shape.batch = (tokens / shape.q_len.max(1)).max(1);
            }
            if let Some(width) = width {
                let dim = problem.head_dim_qk;
                if !width.is_multiple_of(dim) {
                    return Err(usage(format!("--width {width} is no multiple of head dim {dim}")));
                }
                shape.heads = width / dim;
                if args.kv_heads.is_empty() {
                    shape.kv_heads = shape.heads;
                }
            }
            shape.validate()?;
        }
        match cases.iter().find(|c| c.shape.is_empty() || c.shape.kv_len == 0) {
            Some(empty) => Err(usage(format!("there is nothing to time in {}; name sizes of at least 1", empty.shape))),
            None => Ok(cases),
        }
    }

    /// The same for every one of some lengths: as rows of K and V, and of Q unless its number is given.
    pub(crate) fn over_lengths(&self, args: &CaseArgs, lengths: &[u32]) -> Result<Vec<Case>> {
        let list = vec![Sizes(lengths.to_vec())];
        let mut args = args.clone();
        match args.q_len.as_slice() {
            [] => args.q_len = list,
            [Sizes(one)] if one.len() == 1 => args.kv_len = list,
            _ => return Err(usage("beside --lengths, --q-len takes one number")),
        }
        self.cases(&args)
    }
}

fn one(option: &str, sizes: &Option<Sizes>) -> Result<Option<u32>> {
    match sizes.as_ref().map(|s| s.0.as_slice()) {
        None => Ok(None),
        Some([n]) if *n > 0 => Ok(Some(*n)),
        Some(_) => Err(usage(format!("{option} takes one number, at least 1"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes(n: &[u32]) -> Vec<Sizes> {
        vec![Sizes(n.to_vec())]
    }

    #[test]
    fn tokens_and_width_give_batch_and_heads() {
        let args = CaseArgs { head_dim: vec![64, 256], q_len: sizes(&[512, 32768]), ..Default::default() };
        let grid = GridArgs { tokens: Some(Sizes(vec![16384])), width: Some(Sizes(vec![2048])) };
        let cases = grid.cases(&args).unwrap();
        let told: Vec<_> = cases.iter().map(|c| (c.shape.batch, c.shape.heads, c.shape.kv_heads)).collect();
        assert_eq!(told, [(32, 32, 32), (1, 32, 32), (32, 8, 8), (1, 8, 8)]);
        let odd = CaseArgs { head_dim: vec![72], ..Default::default() };
        assert!(grid.cases(&odd).unwrap_err().to_string().contains("multiple of head dim 72"));
        let grouped = CaseArgs { kv_heads: vec![3], ..Default::default() };
        assert!(grid.cases(&grouped).unwrap_err().to_string().contains("heads"));
        let range = GridArgs { tokens: Some(Sizes(vec![1, 2])), width: None };
        assert!(range.cases(&args).unwrap_err().to_string().contains("--tokens"));
    }

    #[test]
    fn lengths_are_rows_of_q_and_kv_or_of_kv_alone() {
        let grid = GridArgs::default();
        let rows = |args: &CaseArgs| {
            let cases = grid.over_lengths(args, &[5, 9]).unwrap();
            cases.iter().map(|c| (c.shape.q_len, c.shape.kv_len)).collect::<Vec<_>>()
        };
        assert_eq!(rows(&CaseArgs::default()), [(5, 5), (9, 9)]);
        assert_eq!(rows(&CaseArgs { q_len: sizes(&[1]), ..Default::default() }), [(1, 5), (1, 9)]);
        assert!(grid.over_lengths(&CaseArgs { q_len: sizes(&[1, 2]), ..Default::default() }, &[5]).is_err());
    }
}
