//! What follows from measurements.

use crate::model::{Ceilings, Derived, Latency, Measured, Point, Report};

impl Report {
    /// Computes every [`Derived`] anew from the measurements.
    pub fn derive(&mut self) {
        for point in &mut self.points {
            point.derive(&self.ceilings);
        }
    }

    /// The contenders, in order of appearance.
    pub fn contenders(&self) -> Vec<&str> {
        let mut names = Vec::new();
        for name in self.points.iter().flat_map(|p| &p.results).map(|r| r.contender.as_str()) {
            if !names.contains(&name) {
                names.push(name);
            }
        }
        names
    }
}

impl Ceilings {
    /// The matmul ceiling of a dtype in 1e12 operations per second.
    pub fn matmul_tflops(&self, dtype: &str) -> Option<f64> {
        self.matmul.iter().find(|c| c.dtype == dtype).map(|c| c.tflops)
    }

    /// The copy ceiling in 1e9 bytes per second.
    pub fn copy_gbytes_per_s(&self) -> Option<f64> {
        self.copy.as_ref().map(|c| c.gbytes_per_s)
    }

    /// The read ceiling in 1e9 bytes per second.
    pub fn read_gbytes_per_s(&self) -> Option<f64> {
        self.read.as_ref().map(|c| c.gbytes_per_s)
    }

    /// The higher of the two.
    pub fn memory_gbytes_per_s(&self) -> Option<f64> {
        self.copy_gbytes_per_s().into_iter().chain(self.read_gbytes_per_s()).reduce(f64::max)
    }
}

impl Point {
    /// The roofline in 1e12 operations per second: the lower of the matmul ceiling and what the ceiling of memory
    /// allows when only the ideal bytes move. `None` unless both were measured.
    pub fn roofline_tflops(&self, ceilings: &Ceilings) -> Option<f64> {
        let matmul = ceilings.matmul_tflops(&self.case.dtype)?;
        let memory = self.flops / self.ideal_bytes * ceilings.memory_gbytes_per_s()? / 1e3;
        Some(matmul.min(memory))
    }

    /// The result of a contender.
    pub fn result(&self, contender: &str) -> Option<&Measured> {
        self.results.iter().find(|r| r.contender == contender)
    }

    /// The fastest contender that is none of the project of this one, as the first and its variants (`flashtune`,
    /// `flashtune_128k`) are.
    pub fn best_other(&self, than: &str) -> Option<&Measured> {
        let other = |r: &&Measured| r.latency_us.is_some() && !r.contender.starts_with(than);
        self.results.iter().filter(other).min_by(|a, b| a.median_us().total_cmp(&b.median_us()))
    }

    /// The fastest contender that ran.
    pub fn best(&self) -> Option<&Measured> {
        let ran = self.results.iter().filter(|r| r.latency_us.is_some());
        ran.min_by(|a, b| a.median_us().total_cmp(&b.median_us()))
    }

    fn derive(&mut self, ceilings: &Ceilings) {
        let best = self.best().map(Measured::median_us);
        let matmul = ceilings.matmul_tflops(&self.case.dtype);
        let (copy, read) = (ceilings.copy_gbytes_per_s(), ceilings.read_gbytes_per_s());
        let roofline = self.roofline_tflops(ceilings);
        for result in &mut self.results {
            let Some(latency) = &result.latency_us else {
                result.derived = Derived::default();
                continue;
            };
            let us = latency.median;
            let (tflops, gbytes_per_s) = (self.flops / us / 1e6, self.ideal_bytes / us / 1e3);
            result.derived = Derived {
                tflops: Some(tflops),
                gbytes_per_s: Some(gbytes_per_s),
                matmul_share: matmul.map(|m| tflops / m),
                copy_share: copy.map(|c| gbytes_per_s / c),
                read_share: read.map(|c| gbytes_per_s / c),
                roofline_share: roofline.map(|r| tflops / r),
                of_best: best.map(|b| b / us),
                spread: Some(latency.spread()),
            };
        }
    }
}

impl Measured {
    /// Median time in microseconds; infinite when it did not run.
    fn median_us(&self) -> f64 {
        self.latency_us.as_ref().map_or(f64::INFINITY, |l| l.median)
    }
}

impl Latency {
    /// How far the samples, or the repeats' medians where there are several, lie apart in proportion to the median.
    fn spread(&self) -> f64 {
        if self.repeats.len() < 2 {
            return (self.p90 - self.p10) / self.median;
        }
        let least = self.repeats.iter().copied().fold(f64::INFINITY, f64::min);
        let most = self.repeats.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        (most - least) / self.median
    }
}

#[cfg(test)]
mod tests {
    use crate::read::tests::sample;

    #[test]
    fn rates_shares_and_ratios_follow_from_the_times() {
        let report = sample();
        let point = &report.points[0];
        let ours = &point.result("flashtune").unwrap().derived;
        // 1e9 operations in 10 us.
        assert_eq!(ours.tflops, Some(100.0));
        assert_eq!(ours.gbytes_per_s, Some(800.0));
        assert_eq!(ours.matmul_share, Some(0.125));
        assert_eq!(ours.copy_share, Some(0.2));
        // 8 MB for 1e9 operations at 4000 GB/s: 500 TFLOP/s, below the 800 of the matrix multiplication.
        assert_eq!(point.roofline_tflops(&report.ceilings), Some(500.0));
        assert_eq!(ours.roofline_share, Some(0.2));
        assert_eq!(ours.of_best, Some(0.5));
        assert!((ours.spread.unwrap() - 0.2).abs() < 1e-12);
        let peer = &point.result("fa3").unwrap().derived;
        assert_eq!((peer.of_best, peer.tflops), (Some(1.0), Some(200.0)));
        // Over repeats: 4.9 to 5.2 around 5.
        assert!((peer.spread.unwrap() - 0.06).abs() < 1e-9, "{peer:?}");
        assert_eq!(point.best().unwrap().contender, "fa3");
    }

    #[test]
    fn without_a_time_or_a_ceiling_nothing_is_claimed() {
        let mut report = sample();
        assert_eq!(report.points[0].result("fa4").unwrap().derived, Default::default());
        report.ceilings = Default::default();
        report.derive();
        let ours = &report.points[0].result("flashtune").unwrap().derived;
        assert!(ours.tflops.is_some());
        assert_eq!((ours.matmul_share, ours.copy_share, ours.roofline_share), (None, None, None));
    }

    #[test]
    fn contenders_keep_their_order() {
        assert_eq!(sample().contenders(), ["flashtune", "fa3", "fa4"]);
    }
}
