//! Reading reports that others wrote: every number is checked before anything is computed from it.

use crate::model::{FORMAT, Latency, Report, ServedReport};

/// A report that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No JSON, or not of this form.
    #[error("it is no report: {0}; write one with `flashtune bench --report` or benches/peers.py")]
    Form(#[from] serde_json::Error),
    /// Written for another version of the format.
    #[error("its format is {found}, this build reads {FORMAT}; make it again with this version")]
    Format {
        /// The version in the file.
        found: u64,
    },
    /// A value that cannot be.
    #[error("{field} is {found}, but {expected}; correct the program that wrote it")]
    Value {
        /// Path of the field, e.g. `points[3].results[0].latency_us.median`.
        field: String,
        /// The value.
        found: String,
        /// The rule.
        expected: &'static str,
    },
    /// A picture could not be drawn.
    #[error("cannot draw the report: {0}")]
    Draw(String),
}

impl Report {
    /// Reads a report, checks its values and computes what follows from them.
    ///
    /// # Errors
    /// Names the field that cannot be, and the rule.
    pub fn from_json(text: &str) -> Result<Self, Error> {
        // The version first: another one may have other fields.
        let value: serde_json::Value = serde_json::from_str(text)?;
        if let Some(found) = value.get("format").and_then(serde_json::Value::as_u64).filter(|f| *f != FORMAT as u64) {
            return Err(Error::Format { found });
        }
        let mut report: Report = serde_json::from_value(value)?;
        report.check()?;
        report.derive();
        Ok(report)
    }

    fn check(&self) -> Result<(), Error> {
        for (i, c) in self.ceilings.matmul.iter().enumerate() {
            positive(|| format!("ceilings.matmul[{i}].tflops"), c.tflops)?;
        }
        if let Some(c) = &self.ceilings.copy {
            positive(|| "ceilings.copy.gbytes_per_s".into(), c.gbytes_per_s)?;
        }
        if let Some(c) = &self.ceilings.read {
            positive(|| "ceilings.read.gbytes_per_s".into(), c.gbytes_per_s)?;
        }
        self.served.as_ref().map_or(Ok(()), ServedReport::check)?;
        for (i, p) in self.points.iter().enumerate() {
            let at = |field: &str| format!("points[{i}].{field}");
            for (field, n) in [("flops", p.flops), ("ideal_bytes", p.ideal_bytes), ("scores_bytes", p.scores_bytes)] {
                positive(|| at(field), n)?;
            }
            if let Some(us) = p.aim.as_ref().and_then(|aim| aim.us) {
                positive(|| at("aim.us"), us)?;
            }
            let sizes = [("q_len", p.case.q_len), ("kv_len", p.case.kv_len), ("kv_heads", p.case.kv_heads)];
            for (field, n) in sizes {
                positive(|| at(&format!("case.{field}")), n as f64)?;
            }
            for (j, r) in p.results.iter().enumerate() {
                let at = |field: &str| at(&format!("results[{j}].{field}"));
                if p.results[..j].iter().any(|other| other.contender == r.contender) {
                    let expected = "every contender has one result per point";
                    return Err(Error::Value { field: at("contender"), found: r.contender.clone(), expected });
                }
                match (&r.latency_us, &r.absent) {
                    (Some(latency), _) => latency.check(&|field| at(&format!("latency_us{field}")))?,
                    (None, Some(_)) => {}
                    (None, None) => {
                        let expected = "a result has a latency or says why it has none";
                        return Err(Error::Value { field: at("absent"), found: "missing".into(), expected });
                    }
                }
                if let Some(latency) = &r.single_us {
                    latency.check(&|field| at(&format!("single_us{field}")))?;
                }
                for (field, n) in [("tile_bytes", r.tile_bytes), ("memory_bytes", r.memory_bytes)] {
                    n.map_or(Ok(()), |n| positive(|| at(field), n))?;
                }
            }
        }
        Ok(())
    }
}

impl Latency {
    fn check(&self, at: &dyn Fn(&str) -> String) -> Result<(), Error> {
        for (field, n) in [("median", self.median), ("p10", self.p10), ("p90", self.p90)] {
            positive(|| at(&format!(".{field}")), n)?;
        }
        for n in &self.repeats {
            positive(|| at(".repeats"), *n)?;
        }
        for n in &self.times {
            positive(|| at(".times"), *n)?;
        }
        if !(self.p10 <= self.median && self.median <= self.p90) {
            return Err(Error::Value {
                field: at(""),
                found: format!("p10 {}, median {}, p90 {}", self.p10, self.median, self.p90),
                expected: "they ascend",
            });
        }
        Ok(())
    }
}

impl ServedReport {
    fn check(&self) -> Result<(), Error> {
        positive(|| "served.seconds".into(), self.seconds)?;
        for (i, s) in self.steps.iter().enumerate() {
            let at = |field: &str| format!("served.steps[{i}].{field}");
            positive(|| at("steps"), s.steps as f64)?;
            positive(|| at("mean_us"), s.mean_us)?;
            for q in &s.quantiles_us {
                positive(|| at("quantiles_us"), q.value)?;
            }
        }
        Ok(())
    }
}

fn positive(field: impl Fn() -> String, n: f64) -> Result<(), Error> {
    if n.is_finite() && n > 0.0 {
        return Ok(());
    }
    Err(Error::Value { field: field(), found: n.to_string(), expected: "a finite number above 0 is needed" })
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use serde_json::{Value, json};

    /// Points of prefill, decode and serving, of three contenders, one of which did not run; and a served trace.
    pub(crate) fn sample_json() -> Value {
        let case = |q_len, kv_len| {
            json!({"dtype": "bf16", "head_dim_qk": 128, "head_dim_v": 128, "mask": "causal", "batch": 4, "heads": 16,
                   "kv_heads": 16, "q_len": q_len, "kv_len": kv_len})
        };
        let results = json!([
            {"contender": "flashtune", "schedule": "w4x32-kv64", "tile_bytes": 3.2e7, "memory_bytes": 8e6,
             "latency_us": {"median": 10.0, "p10": 9.0, "p90": 11.0, "samples": 30}},
            {"contender": "fa3",
             "latency_us": {"median": 5.0, "p10": 4.0, "p90": 6.0, "samples": 30, "repeats": [4.9, 5.0, 5.2]}},
            {"contender": "fa4", "absent": "ImportError: no module <b>cute</b> | here"},
        ]);
        let point = |suite, q_len, kv_len| {
            json!({"suite": suite, "case": case(q_len, kv_len), "flops": 1e9, "ideal_bytes": 8e6, "scores_bytes": 6.4e7,
                   "conditions": {"sm_clock_mhz": 1755.0, "power_w": 651.0, "throttle": ["power cap"]},
                   "results": results})
        };
        let mut served = point("paged", 1, 8192);
        served["case"]["name"] = json!("64 x 4k");
        served["case"]["store"] = json!("pages of 16, e4m3");
        served["aim"] = json!({"what": "98 % of the read rate", "us": 4.0});
        served["results"][0]["single_us"] = json!({"median": 13.0, "p10": 12.0, "p90": 14.0, "samples": 30});
        let times = |kind: &str, us: f64| {
            json!({"kind": kind, "steps": 10, "tokens": 5000, "mean_us": us,
                   "quantiles_us": [{"p": 0.5, "value": us}, {"p": 0.95, "value": 2.0 * us}]})
        };
        json!({
            "format": 1, "title": "Peers side by side",
            "made": {"command": "peers.py out --suite forward", "date": "2026-11-21T12:00:00Z",
                     "software": {"flashtune": "0.1.0", "torch": "2.11"}},
            "device": {"name": "NVIDIA H200", "arch": "sm_90a", "units": 132, "driver": "580.1"},
            "method": ["Medians."],
            "ceilings": {"matmul": [{"dtype": "bf16", "tflops": 800.0, "how": "cuBLAS"}],
                         "copy": {"gbytes_per_s": 4000.0, "how": "cuMemcpy"}, "read": null},
            "points": [point("forward", 1024, 1024), point("forward", 2048, 2048), point("decode", 1, 8192), served],
            "served": {"source": "day.txt", "model": "bf16, 32/8 heads, 16 layers", "requests": 7, "schedule": "ab12",
                       "tokens": 10000, "generated": 400, "seconds": 0.5,
                       "steps": [times("all", 900.0), times("decode", 400.0)],
                       "kernels": {"forward/naive_ragged x": 20}},
            "checks": [{"contender": "flashtune", "case": case(100, 100), "max_error": 1e-3, "unfused_error": 2e-3,
                        "passed": true}],
        })
    }

    pub(crate) fn sample() -> Report {
        Report::from_json(&sample_json().to_string()).unwrap()
    }

    #[test]
    fn a_report_survives_writing_and_reading() {
        let report = sample();
        let text = serde_json::to_string(&report).unwrap();
        assert_eq!(Report::from_json(&text).unwrap(), report);
        // What is derived is computed anew, whatever the file says.
        let forged = text.replace("\"tflops\":100.0", "\"tflops\":900.0");
        assert_ne!(forged, text);
        assert_eq!(Report::from_json(&forged).unwrap(), report);
    }

    #[test]
    fn what_cannot_be_is_named() {
        let told = |path: &str, value: Value| {
            let mut report = sample_json();
            *report.pointer_mut(path).unwrap() = value;
            Report::from_json(&report.to_string()).unwrap_err().to_string()
        };
        for (path, value, words) in [
            ("/points/1/results/0/latency_us/median", json!(-1.0), "points[1].results[0].latency_us.median is -1"),
            ("/points/0/results/1/latency_us/p10", json!(5.5), "they ascend"),
            ("/points/0/results/1/contender", json!("flashtune"), "one result per point"),
            ("/points/2/results/2", json!({"contender": "x"}), "points[2].results[2].absent"),
            ("/points/0/case/kv_len", json!(0), "points[0].case.kv_len"),
            ("/points/0/flops", json!(0.0), "points[0].flops"),
            ("/ceilings/copy/gbytes_per_s", json!(0.0), "ceilings.copy"),
            ("/ceilings/read", json!({"gbytes_per_s": -1.0, "how": "sum"}), "ceilings.read.gbytes_per_s is -1"),
            ("/points/3/aim/us", json!(0.0), "points[3].aim.us"),
            ("/points/3/results/0/single_us/p90", json!(1.0), "points[3].results[0].single_us is"),
            ("/served/seconds", json!(0.0), "served.seconds"),
            ("/served/steps/1/quantiles_us/0/value", json!(0.0), "served.steps[1].quantiles_us"),
            ("/format", json!(2), "its format is 2"),
            ("/points/0/case/mask", json!(7), "it is no report"),
        ] {
            let error = told(path, value);
            assert!(error.contains(words), "{path}: {error}");
        }
        assert!(Report::from_json("[1,").unwrap_err().to_string().contains("it is no report"));
    }
}
