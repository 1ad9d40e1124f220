//! The file of a trace: requests by their lengths, and when they came.

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// Most tokens of a prompt or an output.
pub(crate) const MOST_TOKENS: u32 = 1 << 24;

/// One request.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Request {
    /// Tokens of the prompt.
    pub prompt: u32,
    /// Tokens that are generated, the first of them by the prompt's last row.
    pub output: u32,
    /// Seconds after the start; 0 where the file does not say it.
    pub arrival: f64,
}

impl Request {
    /// Keys in the cache when the request is done: the last token that is generated is never read.
    pub(crate) fn keys(&self) -> u32 {
        self.prompt + self.output - 1
    }
}

/// A file that is no trace.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub(crate) enum TraceError {
    /// Too few or too many numbers on a line.
    #[error(
        "line {line}: `{text}` has {found} numbers, but a request has 2 or 3; write the tokens of the prompt, \
         those of the \
         output, and if known the second of its arrival"
    )]
    Fields {
        /// Counted from 1.
        line: usize,
        /// The line.
        text: String,
        /// Numbers on it.
        found: usize,
    },
    /// A number that cannot be.
    #[error("line {line}: the {field} is `{found}`, but it is {limit}; correct the line or leave it out")]
    Value {
        /// Counted from 1.
        line: usize,
        /// Which.
        field: &'static str,
        /// What stands there.
        found: String,
        /// The rule.
        limit: String,
    },
    /// Arrivals on some lines alone.
    #[error("line {line}: it {has} arrival, other than the line before; give one on all lines or on none")]
    Mixed {
        /// Counted from 1.
        line: usize,
        /// `has an` or `has no`.
        has: &'static str,
    },
    /// No request at all.
    #[error("there is no request in it; write one a line: tokens of the prompt, tokens of the output")]
    Empty,
}

/// The requests of a file, by arrival: a line each, with blanks or commas between numbers; lines that are empty or
/// start with `#` are left out.
pub(crate) fn parse(text: &str) -> Result<Vec<Request>, TraceError> {
    let mut requests = Vec::new();
    let mut with_arrivals = None;
    for (i, text) in text.lines().map(str::trim).enumerate().filter(|(_, l)| !l.is_empty() && !l.starts_with('#')) {
        let line = i + 1;
        let words: Vec<&str> = text.split([',', ' ', '\t']).filter(|w| !w.is_empty()).collect();
        let tokens = |field, word: &str| match word.parse::<u32>() {
            Ok(n @ 1..=MOST_TOKENS) => Ok(n),
            _ => {
                let limit = format!("a whole number from 1 to {MOST_TOKENS}");
                Err(TraceError::Value { line, field, found: shortened(word), limit })
            }
        };
        let (prompt, output, arrival) = match words[..] {
            [prompt, output] => (prompt, output, None),
            [prompt, output, arrival] => (prompt, output, Some(arrival)),
            _ => return Err(TraceError::Fields { line, text: shortened(text), found: words.len() }),
        };
        if *with_arrivals.get_or_insert(arrival.is_some()) != arrival.is_some() {
            return Err(TraceError::Mixed { line, has: if arrival.is_some() { "has an" } else { "has no" } });
        }
        let second = |word: &str| match word.parse::<f64>() {
            Ok(s) if s.is_finite() && s >= 0.0 => Ok(s),
            _ => {
                let limit = "a number of seconds of at least 0".to_owned();
                Err(TraceError::Value { line, field: "arrival", found: shortened(word), limit })
            }
        };
        requests.push(Request {
            prompt: tokens("prompt", prompt)?,
            output: tokens("output", output)?,
            arrival: arrival.map_or(Ok(0.0), second)?,
        });
    }
    if requests.is_empty() {
        return Err(TraceError::Empty);
    }
    requests.sort_by(|a, b| a.arrival.total_cmp(&b.arrival));
    Ok(requests)
}

/// So many requests, each drawn from all of a trace, by arrival; the same ones for the same seed.
pub(crate) fn drawn(from: &[Request], count: usize, seed: u64) -> Vec<Request> {
    let rng = &mut StdRng::seed_from_u64(seed);
    let mut requests: Vec<Request> = (0..count).map(|_| from[rng.random_range(0..from.len())]).collect();
    requests.sort_by(|a, b| a.arrival.total_cmp(&b.arrival));
    requests
}

fn shortened(text: &str) -> String {
    match text.char_indices().nth(60) {
        Some((at, _)) => format!("{}...", &text[..at]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(prompt: u32, output: u32, arrival: f64) -> Request {
        Request { prompt, output, arrival }
    }

    #[test]
    fn lines_are_requests_by_arrival() {
        let expected = [request(7, 1, 0.0), request(300, 20, 0.0)];
        for text in ["7 1\n300 20", "# prompt, output\n\n  7,1\r\n300, 20\n", "7\t1\n300 ,20"] {
            assert_eq!(parse(text).unwrap(), expected, "{text:?}");
        }
        let timed = parse("5 5 2.5\n6 6 0\n7 7 1e-1").unwrap();
        assert_eq!(timed, [request(6, 6, 0.0), request(7, 7, 0.1), request(5, 5, 2.5)]);
        assert_eq!(request(10, 3, 0.0).keys(), 12);
    }

    #[test]
    fn errors_name_the_line_the_field_and_the_limit() {
        let value = |line, field, found: &str| {
            let limit = format!("a whole number from 1 to {MOST_TOKENS}");
            TraceError::Value { line, field, found: found.into(), limit }
        };
        for (text, error) in [
            ("", TraceError::Empty),
            ("# nothing\n", TraceError::Empty),
            ("5\n", TraceError::Fields { line: 1, text: "5".into(), found: 1 }),
            ("5 5\n\n1 2 3 4", TraceError::Fields { line: 3, text: "1 2 3 4".into(), found: 4 }),
            ("5 5\n0 5", value(2, "prompt", "0")),
            ("5 -5", value(1, "output", "-5")),
            ("5 2.5", value(1, "output", "2.5")),
            ("99999999 1", value(1, "prompt", "99999999")),
            ("5 5 1\n6 6", TraceError::Mixed { line: 2, has: "has no" }),
            ("5 5\n6 6 1", TraceError::Mixed { line: 2, has: "has an" }),
        ] {
            assert_eq!(parse(text), Err(error), "{text:?}");
        }
        for bad in ["-1", "inf", "NaN", "soon"] {
            let told = parse(&format!("5 5 {bad}")).unwrap_err().to_string();
            assert!(told.contains(&format!("the arrival is `{bad}`")) && told.contains("at least 0"), "{told}");
        }
    }

    #[test]
    fn a_draw_is_its_seeds_and_of_the_trace() {
        let from: Vec<Request> = (1..50).map(|i| request(i, i, f64::from(i % 7))).collect();
        let draw = drawn(&from, 300, 1);
        assert_eq!((draw.len(), drawn(&from, 300, 1) == draw, drawn(&from, 300, 2) == draw), (300, true, false));
        assert!(draw.iter().all(|r| from.contains(r)) && draw.is_sorted_by(|a, b| a.arrival <= b.arrival));
    }
}
