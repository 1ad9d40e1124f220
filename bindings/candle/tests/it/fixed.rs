//! Tensors of one length each.

use crate::common::{Changes, alibi, assert_close, device, in_window, noise, tolerance, unfused};
use candle_core::{D, DType, Result, Tensor};
use flashtune_candle::*;

/// Q, K and V of some sizes: `[batch, q_len, heads, dim]`, `[batch, kv_len, kv_heads, dim]`.
fn tensors(dtype: DType, [batch, q_len, kv_len, heads, kv_heads, dim]: [usize; 6]) -> Result<[Tensor; 3]> {
    let of = |seed, rows, heads| noise(seed, &[batch, rows, heads, dim]).to_dtype(dtype);
    Ok([of(1, q_len, heads)?, of(2, kv_len, kv_heads)?, of(3, kv_len, kv_heads)?])
}

#[test]
fn types_head_dims_and_groups_of_heads_match_unfused() -> Result<()> {
    let cases = [
        (DType::F32, [2, 33, 33, 4, 2, 59]),
        (DType::F32, [1, 7, 70, 6, 1, 64]),
        (DType::F16, [1, 20, 50, 3, 3, 111]),
        (DType::BF16, [1, 1, 129, 8, 2, 128]),
        (DType::BF16, [1, 40, 40, 2, 1, 256]),
    ];
    for (dtype, sizes) in cases {
        let [q, k, v] = &tensors(dtype, sizes)?;
        let [_, q_len, kv_len, _, _, dim] = sizes;
        let scale = 1.0 / (dim as f32).sqrt();
        for causal in [false, true] {
            let (o, lse) = flash_attn_with_lse(q, k, v, scale, causal)?;
            let right = causal.then_some(0);
            let visible = in_window(None, right, q_len, kv_len);
            let (wanted, wanted_lse) = unfused([q, k, v], scale, &Changes::default(), visible)?;
            let what = format!("{dtype:?} {sizes:?} causal {causal}");
            assert_eq!((o.dtype(), lse.dtype()), (dtype, DType::F32), "{what}");
            assert_close(&what, &o, &wanted, tolerance(dtype));
            assert_close(&format!("{what}, lse"), &lse, &wanted_lse, tolerance(dtype));
            let alone = flash_attn(q, k, v, scale, causal)?;
            assert_close(&format!("{what}, without lse"), &alone, &o, 0.0);
        }
    }
    Ok(())
}

#[test]
fn windows_bound_sides_up_to_the_number_of_keys() -> Result<()> {
    let [q, k, v] = &tensors(DType::F32, [1, 50, 40, 2, 2, 64])?;
    // Beyond 40 keys a reach is no bound, though the first rows stand before all keys.
    let cases = [
        (Some(5), Some(0)),
        (Some(5), None),
        (None, Some(3)),
        (Some(41), Some(41)),
        (None, Some(40)),
        (Some(0), Some(0)),
    ];
    for (left, right) in cases {
        let (o, lse) = flash_attn_windowed_with_lse(q, k, v, 0.2, left, right)?;
        let bound = |side: Option<usize>| side.filter(|&n| n <= 40).map(|n| n as i64);
        let visible = in_window(bound(left), bound(right), 50, 40);
        let (wanted, wanted_lse) = unfused([q, k, v], 0.2, &Changes::default(), visible)?;
        let what = format!("{left:?} {right:?}");
        assert_close(&what, &o, &wanted, 2e-5);
        // Of rows without keys the reference has the logarithm of 0, too.
        assert_close(&what, &lse, &wanted_lse, 2e-5);
    }
    Ok(())
}

#[test]
fn slopes_and_caps_change_scores_in_the_order_of_flash_attn() -> Result<()> {
    let (q_len, kv_len, scale) = (24, 37, 2.0);
    let [q, k, v] = &tensors(DType::F32, [2, q_len, kv_len, 4, 2, 64])?;
    let slopes = [0.5f32, 0.25, 0.125, 0.0625];
    let on_device = Tensor::new(&slopes, &device())?;
    let bias = alibi(&slopes, q_len, kv_len);
    let sloped = Changes { bias: Some(&bias), ..Changes::default() };
    let both = Changes { bias: Some(&bias), cap: Some(3.0) };
    let capped = Changes { cap: Some(3.0), ..Changes::default() };
    let window = in_window(Some(9), Some(2), q_len, kv_len);
    let check = |what: &str, o: Tensor, changes: &Changes<'_>, visible: &dyn Fn(i64, i64) -> bool| -> Result<()> {
        let (wanted, _) = unfused([q, k, v], scale, changes, visible)?;
        assert_close(what, &o, &wanted, 2e-5);
        Ok(())
    };
    let all = |_, _| true;
    check("alibi", flash_attn_alibi(q, k, v, &on_device, scale, false)?, &sloped, &all)?;
    let causal = in_window(None, Some(0), q_len, kv_len);
    check("causal alibi", flash_attn_alibi(q, k, v, &on_device, scale, true)?, &sloped, &causal)?;
    let o = flash_attn_alibi_windowed(q, k, v, &on_device, scale, Some(9), Some(2))?;
    check("alibi in a window", o, &sloped, &window)?;
    let o = flash_attn_alibi_windowed_softcap(q, k, v, Some(&on_device), scale, Some(9), Some(2), 3.0)?;
    check("all three", o, &both, &window)?;
    let o = flash_attn_alibi_windowed_softcap(q, k, v, None, scale, None, None, 3.0)?;
    check("a cap", o, &capped, &all)?;
    let o = flash_attn_alibi_windowed_softcap(q, k, v, None, scale, None, None, 0.0)?;
    check("a cap of 0 is none", o, &Changes::default(), &all)?;
    let of_sequences = on_device.broadcast_as((2, 4))?.contiguous()?;
    check("slopes of sequences", flash_attn_alibi(q, k, v, &of_sequences, scale, false)?, &sloped, &all)
}

#[test]
fn layouts_of_any_strides_give_the_same() -> Result<()> {
    let [q, k, v] = &tensors(DType::BF16, [2, 19, 23, 4, 2, 64])?;
    let wanted = flash_attn(q, k, v, 0.125, true)?;
    let heads_first = |t: &Tensor| t.transpose(1, 2)?.contiguous()?.transpose(1, 2);
    let inside = |t: &Tensor| {
        t.pad_with_zeros(1, 2, 3)?.pad_with_zeros(2, 1, 0)?.narrow(1, 2, t.dim(1)?)?.narrow(2, 1, t.dim(2)?)
    };
    let columns = |t: &Tensor| t.transpose(1, 3)?.contiguous()?.transpose(1, 3);
    let wider = |t: &Tensor| t.pad_with_zeros(D::Minus1, 3, 5)?.narrow(D::Minus1, 3, t.dim(D::Minus1)?);
    type Lay<'a> = &'a dyn Fn(&Tensor) -> Result<Tensor>;
    let layouts: [(&str, Lay<'_>); 4] =
        [("heads first", &heads_first), ("inside", &inside), ("columns", &columns), ("off the grid", &wider)];
    for (name, layout) in layouts {
        let (q, k, v) = (layout(q)?, layout(k)?, layout(v)?);
        assert!(!q.is_contiguous(), "{name}");
        assert_close(name, &flash_attn(&q, &k, &v, 0.125, true)?, &wanted, 0.02);
    }
    let one = |t: &Tensor| t.narrow(2, 0, 1)?.broadcast_as(t.shape());
    let o = flash_attn(q, &one(k)?, &one(v)?, 0.125, true)?;
    let (wanted, _) = unfused([q, &one(k)?, &one(v)?], 0.125, &Changes::default(), in_window(None, Some(0), 19, 23))?;
    assert_close("one head for all", &o, &wanted, tolerance(DType::BF16));
    Ok(())
}

#[test]
fn no_rows_and_no_keys_are_legal() -> Result<()> {
    let [q, k, v] = &tensors(DType::F32, [1, 3, 0, 2, 2, 64])?;
    let (o, lse) = flash_attn_with_lse(q, k, v, 1.0, false)?;
    assert_close("o without keys", &o, &q.zeros_like()?, 0.0);
    assert_close("lse without keys", &lse, &Tensor::full(f32::NEG_INFINITY, (1, 2, 3), &device())?, 0.0);
    let [q, k, v] = &tensors(DType::F32, [1, 0, 3, 2, 2, 64])?;
    let (o, lse) = flash_attn_with_lse(q, k, v, 1.0, true)?;
    assert_eq!((o.dims(), lse.dims()), (&[1, 0, 2, 64][..], &[1, 2, 0][..]));
    Ok(())
}

#[test]
fn v3_gives_what_the_same_function_gives() -> Result<()> {
    let [q, k, v] = &tensors(DType::BF16, [2, 19, 23, 4, 2, 64])?;
    for packing in [false, true] {
        assert_close("o", &v3::flash_attn(q, k, v, 0.125, true, packing)?, &flash_attn(q, k, v, 0.125, true)?, 0.0);
    }
    Ok(())
}
