//! How numbers are written.

use crate::model::Case;

/// Three or four significant digits: `0.123`, `12.3`, `1234`.
pub(crate) fn number(x: f64) -> String {
    let digits = match x.abs() {
        0.0 => 0,
        a if !(1e-3..1e7).contains(&a) => return format!("{x:.2e}"),
        a if a < 1.0 => 3,
        a if a < 10.0 => 2,
        a if a < 1000.0 => 1,
        _ => 0,
    };
    format!("{x:.digits$}")
}

/// `12.5 %`.
pub(crate) fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

/// A length in short: `512`, `1k`, `16k`, `1M`, `1000`.
pub(crate) fn length(n: u32) -> String {
    match n {
        0 => "0".into(),
        n if n.is_multiple_of(1 << 20) => format!("{}M", n >> 20),
        n if n.is_multiple_of(1 << 10) => format!("{}k", n >> 10),
        n => n.to_string(),
    }
}

/// Bytes in binary units.
pub(crate) fn bytes(n: f64) -> String {
    for (unit, size) in [("GiB", 30), ("MiB", 20), ("KiB", 10)] {
        let size = (1u64 << size) as f64;
        if n >= size {
            return format!("{} {unit}", number(n / size));
        }
    }
    format!("{n:.0} B")
}

/// The unit of rates up to so many 1e12 operations per second, and how many of it those are.
pub(crate) fn rate_unit(most_tflops: f64) -> (&'static str, f64) {
    if most_tflops < 2.0 { ("GFLOP/s", 1e3) } else { ("TFLOP/s", 1.0) }
}

/// A rate in the unit that suits it.
pub(crate) fn rate(tflops: f64) -> String {
    let (unit, factor) = rate_unit(tflops);
    format!("{} {unit}", number(tflops * factor))
}

/// A time given in microseconds.
pub(crate) fn time(us: f64) -> String {
    match us {
        us if us >= 1e6 => format!("{} s", number(us / 1e6)),
        us if us >= 1e4 => format!("{} ms", number(us / 1e3)),
        us => format!("{} us", number(us)),
    }
}

/// A round time at a tick of an axis, given in microseconds: `5 us`, `200 ms`.
pub(crate) fn tick_time(us: f64) -> String {
    let (unit, size) = match us {
        us if us >= 1e6 => ("s", 1e6),
        us if us >= 1e3 => ("ms", 1e3),
        us if us >= 1.0 => ("us", 1.0),
        _ => ("ns", 1e-3),
    };
    format!("{:.0} {unit}", us / size)
}

impl Case {
    /// `128`, or `192/128` where V's differs.
    pub(crate) fn head_dim(&self) -> String {
        match self.head_dim_qk == self.head_dim_v {
            true => self.head_dim_qk.to_string(),
            false => format!("{}/{}", self.head_dim_qk, self.head_dim_v),
        }
    }

    /// `16`, or `32/8` with grouped KV heads.
    pub(crate) fn head_counts(&self) -> String {
        match self.heads == self.kv_heads {
            true => self.heads.to_string(),
            false => format!("{}/{}", self.heads, self.kv_heads),
        }
    }

    /// `4k`, or `1 x 8k` where lengths differ.
    pub(crate) fn lengths(&self) -> String {
        match self.q_len == self.kv_len {
            true => length(self.kv_len),
            false => format!("{} x {}", length(self.q_len), length(self.kv_len)),
        }
    }

    /// Few queries per sequence: memory bounds the time, and bandwidth is what to look at.
    pub(crate) fn is_decode(&self) -> bool {
        self.q_len <= 16 && self.q_len < self.kv_len
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short_and_honest() {
        let told = [0.0, 0.0001234, 0.1234, 1.234, 12.34, 123.4, 1234.5, 1.5e9].map(number);
        assert_eq!(told, ["0", "1.23e-4", "0.123", "1.23", "12.3", "123.4", "1234", "1.50e9"]);
        assert_eq!([512, 1024, 1000, 16384, 1 << 20].map(length), ["512", "1k", "1000", "16k", "1M"]);
        assert_eq!([12.0, 2048.0, 1.5 * (1u64 << 30) as f64].map(bytes), ["12 B", "2.00 KiB", "1.50 GiB"]);
        assert_eq!([0.5, 1.0, 200.0, 1e3, 5e6].map(tick_time), ["500 ns", "1 us", "200 us", "1 ms", "5 s"]);
        assert_eq!([3.21, 12_345.0, 2.5e6].map(time), ["3.21 us", "12.3 ms", "2.50 s"]);
    }
}
