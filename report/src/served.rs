//! Serving, as tables: cases with names beside their aims, and the steps of a trace.

use crate::group::{Group, Kind};
use crate::model::{Point, ServedReport};
use crate::table::Table;
use crate::tables::or_none;
use crate::text;

/// A time within this part of its aim counts as reached.
const TOLERANCE: f64 = 0.01;

/// One line per case with a name: the times of all contenders, the best other one, and the aim; a table per suite.
pub(crate) fn by_name(groups: &[Group], contenders: &[&str]) -> Vec<Table> {
    let Some(first) = contenders.first() else { return Vec::new() };
    let named = groups.iter().filter(|group| group.kind == Kind::Named);
    let mut tables: Vec<Table> = named.map(|group| table(group, first, contenders)).collect();
    tables.iter_mut().for_each(|t| t.drop_empty_columns(4));
    tables
}

fn table(group: &Group, first: &str, contenders: &[&str]) -> Table {
    let note = "Microseconds of a launch, by medians. Rates count Q, K and V read once and O written once, \
                of keys that are seen. \
                Variants of the first contender are none of the others.";
    let mut table = Table::new(format!("{}, us", group.suite), note, &["#", "case", "heads", "problem"]);
    table.header.extend(contenders.iter().map(|c| (*c).to_owned()));
    table
        .header
        .extend(["best other", "of best other", "GB/s", "of read", "aim", "aim (us)", "reached"].map(str::to_owned));
    for (i, point) in group.points.iter().enumerate() {
        let c = &point.case;
        let (name, store) = (or_none(c.name.clone()), c.store.as_ref());
        let problem = format!("{} {} {}", c.dtype, c.head_dim(), c.mask);
        let problem = store.map_or(problem.clone(), |store| format!("{problem}, {store}"));
        let mut row = vec![(i + 1).to_string(), name, c.head_counts(), problem];
        row.extend(contenders.iter().map(|name| or_none(us(point, name).map(text::number))));
        let (own, other) = (us(point, first), point.best_other(first));
        let ratio = other.zip(own).and_then(|(o, own)| Some(o.latency_us.as_ref()?.median / own));
        row.push(or_none(other.map(|o| o.contender.clone())));
        row.push(or_none(ratio.map(|r| format!("{r:.2}x"))));
        let derived = point.result(first).map(|r| &r.derived);
        row.push(or_none(derived.and_then(|d| d.gbytes_per_s).map(text::number)));
        row.push(or_none(derived.and_then(|d| d.read_share).map(text::percent)));
        let limit = point.aim.as_ref().and_then(|aim| aim.us);
        row.push(or_none(point.aim.as_ref().map(|aim| aim.what.clone())));
        row.push(or_none(limit.map(text::number)));
        row.push(or_none(own.zip(limit).map(|(own, limit)| reached(own, limit))));
        table.rows.push(row);
    }
    table
}

fn us(point: &Point, contender: &str) -> Option<f64> {
    Some(point.result(contender)?.latency_us.as_ref()?.median)
}

fn reached(us: f64, limit: f64) -> String {
    match us <= limit * (1.0 + TOLERANCE) {
        true => "yes".to_owned(),
        false => format!("{:.2}x of it", us / limit),
    }
}

/// One line per kind of step.
pub(crate) fn steps(served: &ServedReport) -> Table {
    const SHOWN: [f64; 2] = [0.5, 0.95];
    let rate = served.tokens_per_s();
    let kernels = served.kernels.iter().map(|(name, launches)| format!("{name}: {launches}"));
    let note = format!(
        "{} requests of {}, {} tokens of which {} generated, in {}: {} tokens/s of attention alone. {}. Schedule {}. \
         Launches by kernel: {}.",
        served.requests,
        served.source,
        served.tokens,
        served.generated,
        text::time(served.seconds * 1e6),
        text::number(rate),
        served.model,
        served.schedule,
        kernels.collect::<Vec<_>>().join(", "),
    );
    let mut table = Table::new("Steps of a served trace", note, &["steps", "number", "tokens", "mean"]);
    table.header.extend(SHOWN.map(|p| format!("P{:.0}", p * 100.0)));
    table.header.push("tokens/s".to_owned());
    for s in &served.steps {
        let mut row = vec![s.kind.clone(), s.steps.to_string(), s.tokens.to_string(), text::time(s.mean_us)];
        row.extend(SHOWN.map(|p| or_none(s.us_at(p).map(text::time))));
        row.push(text::number(s.tokens as f64 / (s.mean_us * s.steps as f64) * 1e6));
        table.rows.push(row);
    }
    table
}

#[cfg(test)]
mod tests {
    use crate::model::Ceiling;
    use crate::read::tests::sample;
    use crate::tables::markdown;

    #[test]
    fn cases_with_names_stand_beside_their_aims() {
        let mut report = sample();
        report.ceilings.read = Some(Ceiling { gbytes_per_s: 1600.0, how: "sum".into() });
        report.derive();
        let text = markdown(&report);
        // 8 MB in 10 us beside 4 us that are aimed at.
        let row = "| 1 | 64 x 4k | 16 | bf16 128 causal, pages of 16, e4m3 | 10.0 | 5.00 | fa3 | 0.50x | 800.0 | \
                   50.0 % | 98 % of the read rate | 4.00 | 2.50x of it |";
        for words in [
            "## paged, us",
            row,
            "| case | heads | keys | contender | time (us) |",
            "| 50.0 % | 13.0 |",
            "Ceiling, read: 1600 GB/s (sum)",
        ] {
            assert!(text.contains(words), "`{words}` is not in:\n{text}");
        }
        report.points[3].aim.as_mut().unwrap().us = Some(9.95);
        let text = markdown(&report);
        assert!(text.contains("| 9.95 | yes |"), "{text}");
    }

    #[test]
    fn variants_of_the_first_contender_are_none_of_the_others() {
        let mut report = sample();
        report.points[3].results[1].contender = "flashtune_128k".into();
        assert!(report.points[3].best_other("flashtune").is_none());
        let other = sample().points[3].best_other("flashtune").map(|r| r.contender.clone());
        assert_eq!(other.as_deref(), Some("fa3"));
    }

    #[test]
    fn steps_of_a_trace_are_a_table() {
        let text = markdown(&sample());
        for words in [
            "7 requests of day.txt, 10000 tokens of which 400 generated, in 500.0 ms: 20000 tokens/s",
            "| steps | number | tokens | mean | P50 | P95 | tokens/s |",
            "| decode | 10 | 5000 | 400.0 us | 400.0 us | 800.0 us | 1250000 |",
            "forward/naive_ragged x: 20",
        ] {
            assert!(text.contains(words), "`{words}` is not in:\n{text}");
        }
    }
}
