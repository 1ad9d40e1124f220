//! The cases that candle-flash-attn tests itself with.

use crate::common::{Changes, assert_close, device, in_window, unfused};
use candle_core::{DType, Result, Tensor};
use flashtune_candle::{error_of, flash_attn_varlen_paged_windowed};
use flashtune_candle::{flash_attn, flash_attn_alibi_windowed_softcap, flash_attn_varlen};

/// `0, 1, 2, ...` over three divisors: Q, K and V as `[batch, rows, heads, dim]`, laid out with heads first.
fn ramp(heads: usize, rows: usize) -> Result<[Tensor; 3]> {
    let count = (heads * rows * 8) as u32;
    let x = Tensor::arange(0u32, count, &device())?.to_dtype(DType::F16)?.reshape((1, heads, rows, 8))?;
    let of = |divisor: f64| (&x / divisor)?.transpose(1, 2);
    Ok([of(30.0)?, of(40.0)?, of(50.0)?])
}

#[test]
fn half_floats_of_dim_8_with_heads_first() -> Result<()> {
    let [q, k, v] = ramp(3, 2)?;
    let o = flash_attn(&q, &k, &v, 0.5, false)?;
    let (wanted, _) = unfused([&q, &k, &v], 0.5, &Changes::default(), |_, _| true)?;
    // The last digit of a half float of size 1.
    assert_close("o", &o, &wanted, 5e-4);
    Ok(())
}

#[test]
fn a_cap_of_5_on_scores_up_to_25() -> Result<()> {
    let [q, k, v] = ramp(3, 5)?;
    let o = flash_attn_alibi_windowed_softcap(&q, &k, &v, None, 1.0, None, None, 5.0)?;
    let changes = Changes { cap: Some(5.0), ..Changes::default() };
    let (wanted, _) = unfused([&q, &k, &v], 1.0, &changes, |_, _| true)?;
    assert_close("o", &o, &wanted, 1e-3);
    Ok(())
}

#[test]
fn one_packed_sequence_with_heads_first() -> Result<()> {
    let [q, k, v] = ramp(3, 2)?;
    let ends = Tensor::new(&[0u32, 2], &device())?;
    let packed = |t: &Tensor| t.squeeze(0);
    let o = flash_attn_varlen(&packed(&q)?, &packed(&k)?, &packed(&v)?, &ends, &ends, 32, 32, 0.5, false)?;
    let (wanted, _) = unfused([&q, &k, &v], 0.5, &Changes::default(), |_, _| true)?;
    assert_close("o", &o, &wanted.squeeze(0)?, 5e-4);
    Ok(())
}

const ROWS: usize = 296;
const PAGE: usize = 32;

/// Q of 8 heads, K and V of 2, as one batch, and pages of K and V in the order of `table` in a pool of so many.
fn pages(dim: usize, table: &[u32], pool: usize) -> Result<([Tensor; 3], [Tensor; 2])> {
    let saw = |period: usize, heads: usize, divisor: f32| {
        let middle = (period / 2) as f32;
        let data = (0..ROWS * heads * dim).map(|i| ((i % period) as f32 - middle) / middle / divisor).collect();
        Tensor::from_vec(data, (1, ROWS, heads, dim), &device())?.to_dtype(DType::BF16)
    };
    let qkv = [saw(251, 8, 1.0)?, saw(193, 2, 4.0)?, saw(193, 2, 5.0)?];
    let in_pages = |t: &Tensor| -> Result<Tensor> {
        let rows =
            t.squeeze(0)?.pad_with_zeros(0, 0, table.len() * PAGE - ROWS)?.reshape((table.len(), PAGE, 2, dim))?;
        // Pages that nobody may read hold what would be seen.
        let mut pool = vec![Tensor::full(f32::NAN, (PAGE, 2, dim), &device())?.to_dtype(DType::BF16)?; pool];
        for (i, &page) in table.iter().enumerate() {
            pool[page as usize] = rows.get(i)?;
        }
        Tensor::stack(&pool, 0)
    };
    let stores = [in_pages(&qkv[1])?, in_pages(&qkv[2])?];
    Ok((qkv, stores))
}

/// The paged call over all rows with a window of 1024 before and none behind.
fn paged(q: &Tensor, [k, v]: &[Tensor; 2], table: &[u32], ranges: Option<&Tensor>) -> Result<Tensor> {
    let ends = Tensor::new(&[0u32, ROWS as u32], &device())?;
    let table = Tensor::new(table, &device())?.unsqueeze(0)?;
    let q = q.squeeze(0)?;
    let window = [Some(1024), Some(0)];
    flash_attn_varlen_paged_windowed(
        &q, k, v, &ends, &ends, &table, ranges, ROWS, ROWS, 1.0, window[0], window[1], PAGE, None,
    )
}

#[test]
fn ranges_of_a_paged_prompt_see_each_other() -> Result<()> {
    let table: Vec<u32> = (0..ROWS.div_ceil(PAGE) as u32).collect();
    let ([q, k, v], stores) = pages(256, &table, table.len())?;
    let causal = in_window(Some(1024), Some(0), ROWS, ROWS);
    let (without, _) = unfused([&q, &k, &v], 1.0, &Changes::default(), causal)?;
    assert_close("without ranges", &paged(&q, &stores, &table, None)?, &without.squeeze(0)?, 1e-2);

    let ranges = Tensor::new(&[[[6i32, 262]]], &device())?;
    let seen = |q: i64, kv: i64| causal(q, kv) || (6..262).contains(&q) && (6..262).contains(&kv);
    let (with, _) = unfused([&q, &k, &v], 1.0, &Changes::default(), seen)?;
    assert_close("with a range", &paged(&q, &stores, &table, Some(&ranges))?, &with.squeeze(0)?, 1e-2);
    let apart = (with - without)?.abs()?.max_all()?.to_scalar::<f32>()?;
    assert!(apart > 0.05, "the range changes {apart} at most");
    Ok(())
}

/// Ten pages out of seventeen, in no order.
fn shuffled() -> Vec<u32> {
    (0..ROWS.div_ceil(PAGE) as u32).map(|i| (i * 5 + 3) % 17).collect()
}

#[test]
fn pages_in_any_order_of_dim_256() -> Result<()> {
    let ([q, k, v], stores) = pages(256, &shuffled(), 17)?;
    let (wanted, _) = unfused([&q, &k, &v], 1.0, &Changes::default(), in_window(Some(1024), Some(0), ROWS, ROWS))?;
    assert_close("o", &paged(&q, &stores, &shuffled(), None)?, &wanted.squeeze(0)?, 1e-2);
    Ok(())
}

// candle-flash-attn computes it.
#[test]
fn pages_of_dim_512_are_refused_by_name() -> Result<()> {
    let ([q, ..], stores) = pages(512, &shuffled(), 17)?;
    let e = paged(&q, &stores, &shuffled(), None).unwrap_err();
    let message = error_of(&e).expect("an error of this crate").to_string();
    assert!(message.contains("head_dim_qk") && message.contains("512"), "{message}");
    Ok(())
}
