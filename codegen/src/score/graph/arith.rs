//! What each operation means on plain numbers: the one definition that constant folding and the interpreter share.

use crate::score::syntax::words::{Binary, Unary};

/// `a op b` of integers: 64 bits, wrapping around.
///
/// # Panics
/// For an operation that integers do not have.
pub(crate) fn int(op: Binary, a: i64, b: i64) -> i64 {
    match op {
        Binary::Add => a.wrapping_add(b),
        Binary::Sub => a.wrapping_sub(b),
        Binary::Mul => a.wrapping_mul(b),
        Binary::FloorDiv => floor_div(a, b),
        Binary::Mod => floor_mod(a, b),
        Binary::Min => a.min(b),
        Binary::Max => a.max(b),
        _ => unreachable!("the checker gives integers no `{}`", op.name()),
    }
}

/// The quotient rounded down; 0 when `b` is 0.
pub(crate) fn floor_div(a: i64, b: i64) -> i64 {
    if b == 0 {
        return 0;
    }
    let (quotient, rest) = (a.wrapping_div(b), a.wrapping_rem(b));
    if rest != 0 && (rest < 0) != (b < 0) { quotient - 1 } else { quotient }
}

/// `a - b * floor_div(a, b)`: the rest with the sign of `b`; `a` when `b` is 0.
pub(crate) fn floor_mod(a: i64, b: i64) -> i64 {
    if b == 0 {
        return a;
    }
    let rest = a.wrapping_rem(b);
    if rest != 0 && (rest < 0) != (b < 0) { rest + b } else { rest }
}

/// `a op b` of floats, exact to fp64; rounding it to fp32 gives the fp32 operation, since fp64 has more than twice the
/// digits.
///
/// # Panics
/// For an operation that floats do not have.
pub(crate) fn float(op: Binary, a: f64, b: f64) -> f64 {
    match op {
        Binary::Add => a + b,
        Binary::Sub => a - b,
        Binary::Mul => a * b,
        Binary::Div => a / b,
        // As the kernels write them, for equal zeros too.
        Binary::Min => {
            if b < a || a.is_nan() {
                b
            } else {
                a
            }
        }
        Binary::Max => {
            if b > a || a.is_nan() {
                b
            } else {
                a
            }
        }
        _ => unreachable!("the checker gives floats no `{}`", op.name()),
    }
}

/// A comparison of two values of one type.
///
/// # Panics
/// When the operation is none.
pub(crate) fn compare<T: PartialOrd>(op: Binary, a: T, b: T) -> bool {
    match op {
        Binary::Lt => a < b,
        Binary::Le => a <= b,
        Binary::Eq => a == b,
        Binary::Ne => a != b,
        _ => unreachable!("`{}` is no comparison", op.name()),
    }
}

/// A function of one float.
///
/// # Panics
/// When the operation is none.
pub(crate) fn float_unary(op: Unary, x: f64) -> f64 {
    match op {
        Unary::Neg => -x,
        Unary::Abs => x.abs(),
        Unary::Exp2 => x.exp2(),
        Unary::Log2 => x.log2(),
        Unary::Tanh => x.tanh(),
        Unary::Exp => x.exp(),
        Unary::Log => x.ln(),
        Unary::Sqrt => x.sqrt(),
        Unary::Sigmoid => 1.0 / (1.0 + (-x).exp()),
        _ => unreachable!("the checker gives floats no `{}`", op.name()),
    }
}

/// A float as an int: beyond 64 bits the nearest that there is, and 0 for NaN, as Rust casts.
///
/// # Panics
/// When the operation rounds nothing.
pub(crate) fn rounded(op: Unary, x: f64) -> i64 {
    let whole = match op {
        Unary::IntFloor => x.floor(),
        Unary::IntCeil => x.ceil(),
        Unary::IntTrunc => x,
        Unary::IntRound => x.round_ties_even(),
        _ => unreachable!("`{}` rounds nothing", op.name()),
    };
    whole as i64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn division_rounds_down_and_is_defined_everywhere() {
        for (a, b, quotient, rest) in [
            (7, 2, 3, 1),
            (-7, 2, -4, 1),
            (7, -2, -4, -1),
            (-7, -2, 3, -1),
            (6, -3, -2, 0),
            (5, 0, 0, 5),
            (i64::MIN, -1, i64::MIN, 0),
        ] {
            assert_eq!((floor_div(a, b), floor_mod(a, b)), (quotient, rest), "{a} {b}");
            assert_eq!(quotient.wrapping_mul(b).wrapping_add(rest), a);
        }
    }

    #[test]
    fn floats_are_rounded_as_named_and_kept_within_64_bits() {
        let of = |x| [Unary::IntFloor, Unary::IntCeil, Unary::IntTrunc, Unary::IntRound].map(|op| rounded(op, x));
        assert_eq!(of(2.5), [2, 3, 2, 2]);
        assert_eq!(of(3.5), [3, 4, 3, 4]);
        assert_eq!(of(-2.5), [-3, -2, -2, -2]);
        assert_eq!(of(-0.0), [0; 4]);
        assert_eq!(of(f64::NAN), [0; 4]);
        assert_eq!(of(1e30), [i64::MAX; 4]);
        assert_eq!(of(f64::NEG_INFINITY), [i64::MIN; 4]);
    }

    #[test]
    fn minima_take_the_number_and_not_the_nan() {
        assert_eq!(float(Binary::Min, f64::NAN, 1.0), 1.0);
        assert_eq!(float(Binary::Max, 1.0, f64::NAN), 1.0);
    }
}
