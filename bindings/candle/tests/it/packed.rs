//! Sequences of different lengths, one after the other or in pages.

use crate::common::{Changes, alibi, assert_close, device, in_window, noise, unfused};
use candle_core::{DType, Device, Result, Tensor};
use flashtune_candle::*;

const HEADS: usize = 4;
/// Rows and keys of the sequences: some have none.
const Q: [usize; 5] = [3, 0, 17, 1, 4];
const KV: [usize; 5] = [5, 2, 17, 40, 0];

struct Pack {
    qkv: [Tensor; 3],
    ends: [Tensor; 2],
}

fn sums(lengths: &[usize]) -> Vec<u32> {
    let ends = lengths.iter().scan(0, |sum, n| {
        *sum += *n as u32;
        Some(*sum)
    });
    std::iter::once(0).chain(ends).collect()
}

fn pack(dim: usize) -> Result<Pack> {
    let of = |seed, lengths: &[usize], heads| noise(seed, &[lengths.iter().sum(), heads, dim]);
    let ends = |lengths: &[usize]| Tensor::new(sums(lengths), &device());
    Ok(Pack { qkv: [of(4, &Q, HEADS), of(5, &KV, 2), of(6, &KV, 2)], ends: [ends(&Q)?, ends(&KV)?] })
}

/// O and the log-sum-exp of each sequence by unfused attention, put together.
fn wanted(
    pack: &Pack,
    scale: f32,
    cap: Option<f32>,
    slopes: Option<&[f32]>,
    window: [Option<i64>; 2],
) -> Result<[Tensor; 2]> {
    let (mut outputs, mut logs) = (Vec::new(), Vec::new());
    let (q_sums, kv_sums) = (sums(&Q), sums(&KV));
    for (i, (&q_len, &kv_len)) in Q.iter().zip(&KV).enumerate().filter(|(_, (q, _))| **q > 0) {
        let part = |t: &Tensor, ends: &[u32], n| t.narrow(0, ends[i] as usize, n)?.unsqueeze(0);
        if kv_len == 0 {
            outputs.push(part(&pack.qkv[0], &q_sums, q_len)?.squeeze(0)?.zeros_like()?);
            logs.push(Tensor::full(f32::NEG_INFINITY, (HEADS, q_len), &device())?);
            continue;
        }
        let [q, k, v] = &pack.qkv;
        let parts = [part(q, &q_sums, q_len)?, part(k, &kv_sums, kv_len)?, part(v, &kv_sums, kv_len)?];
        let bias = slopes.map(|slopes| alibi(slopes, q_len, kv_len));
        let changes = Changes { cap, bias: bias.as_ref() };
        let visible = in_window(window[0], window[1], q_len, kv_len);
        let (o, lse) = unfused(parts.each_ref(), scale, &changes, visible)?;
        outputs.push(o.squeeze(0)?);
        logs.push(lse.squeeze(0)?);
    }
    Ok([Tensor::cat(&outputs, 0)?, Tensor::cat(&logs, 1)?])
}

#[test]
fn packs_with_empty_sequences_match_unfused() -> Result<()> {
    // Rows of 59 are copied, with zeros behind them.
    for (dim, pack) in [(59, pack(59)?), (64, pack(64)?)] {
        let ([q, k, v], [of_q, of_k]) = (&pack.qkv, &pack.ends);
        for causal in [false, true] {
            let (o, lse) = flash_attn_varlen_with_lse(q, k, v, of_q, of_k, 17, 40, 0.3, causal)?;
            let [o_wanted, lse_wanted] = wanted(&pack, 0.3, None, None, [None, causal.then_some(0)])?;
            assert_close(&format!("o, dim {dim}"), &o, &o_wanted, 2e-5);
            assert_close("lse", &lse, &lse_wanted, 2e-5);
            assert_close("alone", &flash_attn_varlen(q, k, v, of_q, of_k, 17, 40, 0.3, causal)?, &o, 0.0);
        }
    }
    Ok(())
}

#[test]
fn packs_take_windows_slopes_and_caps() -> Result<()> {
    let pack = pack(64)?;
    let ([q, k, v], [of_q, of_k]) = (&pack.qkv, &pack.ends);
    let slopes = [0.5f32, 0.25, 0.125, 0.0625];
    let on_device = &Tensor::new(&slopes, &device())?;
    let sloped = Some(&slopes[..]);
    let check = |what: &str, o: Tensor, cap, slopes, window| -> Result<()> {
        let [o_wanted, _] = wanted(&pack, 1.5, cap, slopes, window)?;
        assert_close(what, &o, &o_wanted, 2e-5);
        Ok(())
    };
    let o = flash_attn_varlen_windowed(q, k, v, of_q, of_k, 17, 40, 1.5, Some(6), Some(1))?;
    check("window", o, None, None, [Some(6), Some(1)])?;
    let o = flash_attn_varlen_alibi(q, k, v, on_device, of_q, of_k, 17, 40, 1.5, true)?;
    check("alibi", o, None, sloped, [None, Some(0)])?;
    let o = flash_attn_varlen_alibi_windowed(q, k, v, on_device, of_q, of_k, 17, 40, 1.5, Some(6), None)?;
    check("alibi in a window", o, None, sloped, [Some(6), None])?;
    let slopes = Some(on_device);
    let o = flash_attn_varlen_alibi_windowed_softcap(q, k, v, slopes, of_q, of_k, 17, 40, 1.5, Some(6), Some(0), 2.0)?;
    check("all three", o, Some(2.0), sloped, [Some(6), Some(0)])
}

#[test]
fn sums_may_be_of_any_integer() -> Result<()> {
    let pack = pack(64)?;
    let ([q, k, v], [of_q, of_k]) = (&pack.qkv, &pack.ends);
    let o = flash_attn_varlen(q, k, v, of_q, of_k, 17, 40, 0.3, true)?;
    for dtype in [DType::I32, DType::I64] {
        // On the CPU: candle has no kernel that converts u32 to i32 on a GPU.
        let converted = |t: &Tensor| t.to_device(&Device::Cpu)?.to_dtype(dtype)?.to_device(&device());
        let (of_q, of_k) = (converted(of_q)?, converted(of_k)?);
        assert_close("o", &flash_attn_varlen(q, k, v, &of_q, &of_k, 17, 40, 0.3, true)?, &o, 0.0);
    }
    Ok(())
}

#[test]
fn pages_of_several_sequences_match_packs() -> Result<()> {
    in_pages_of(64)
}

#[test]
fn pages_of_rows_of_118_bytes_match_packs() -> Result<()> {
    in_pages_of(59)
}

fn in_pages_of(dim: usize) -> Result<()> {
    let pack = pack(dim)?;
    let ([q, k, v], [of_q, of_k]) = (&pack.qkv, &pack.ends);
    let (page, width, pool) = (8, 5, 30);
    let ids = |i: usize, j: usize| (i * width + j) * 7 % pool;
    let table: Vec<u32> = (0..Q.len() * width).map(|i| ids(i / width, i % width) as u32).collect();
    let table = Tensor::from_vec(table, (Q.len(), width), &device())?;
    let in_pages = |t: &Tensor| -> Result<Tensor> {
        let mut pages = vec![Tensor::full(f32::NAN, (page, 2, dim), &device())?; pool];
        for (i, (&n, &begin)) in KV.iter().zip(&sums(&KV)).enumerate() {
            for j in 0..n.div_ceil(page) {
                let rows = (n - j * page).min(page);
                let mut part = t.narrow(0, begin as usize + j * page, rows)?;
                if rows < page {
                    let rest = Tensor::full(f32::NAN, (page - rows, 2, dim), &device())?;
                    part = Tensor::cat(&[part, rest], 0)?;
                }
                pages[ids(i, j)] = part;
            }
        }
        Tensor::stack(&pages, 0)
    };
    let (k_pages, v_pages) = (in_pages(k)?, in_pages(v)?);
    for softcap in [None, Some(2.0)] {
        let (o, lse) = flash_attn_varlen_paged_windowed_with_lse(
            q,
            &k_pages,
            &v_pages,
            of_q,
            of_k,
            &table,
            None,
            17,
            40,
            1.5,
            Some(6),
            Some(0),
            page,
            softcap,
        )?;
        let [o_wanted, lse_wanted] = wanted(&pack, 1.5, softcap, None, [Some(6), Some(0)])?;
        assert_close("o", &o, &o_wanted, 2e-5);
        assert_close("lse", &lse, &lse_wanted, 2e-5);
        // Pages with heads before tokens, as views: nothing is copied.
        let heads_first = |t: &Tensor| t.transpose(1, 2)?.contiguous()?.transpose(1, 2);
        let (k, v) = (heads_first(&k_pages)?, heads_first(&v_pages)?);
        let turned = flash_attn_varlen_paged_windowed(
            q,
            &k,
            &v,
            of_q,
            of_k,
            &table,
            None,
            17,
            40,
            1.5,
            Some(6),
            Some(0),
            page,
            softcap,
        )?;
        assert_close("heads first", &turned, &o, 1e-6);
    }
    Ok(())
}
