"""What tests compare with: attention in fp64, and unfused attention with every result rounded to the dtype."""

import numpy as np


def visible(q_len, kv_len, causal=False, window=(-1, -1), top_left=False, chunk=0):
    """Which key each query sees, ``[q_len, kv_len]``."""
    left, right = (min(n, q_len + kv_len) for n in window)
    position = np.arange(q_len)[:, None] + (0 if top_left else kv_len - q_len)
    key = np.arange(kv_len)[None, :]
    seen = np.ones((q_len, kv_len), bool)
    if causal:
        seen &= key <= position
    if left >= 0:
        seen &= key >= position - left
    if right >= 0:
        seen &= key <= position + right
    if chunk:
        seen &= key // chunk == position // chunk
    return seen


def attention(q, k, v, seen, scale=None, dtype=None):
    """O and LSE for ``[batch, heads, rows, dim]`` arrays. With a dtype scores, weights and O are rounded to it, as
    unfused attention in that dtype does; without, all is fp64. A row that sees nothing gives 0 and -inf."""
    wide = np.float64 if dtype is None else np.float32
    rounded = (lambda x: x) if dtype is None else (lambda x: x.astype(dtype).astype(wide))
    group = q.shape[1] // k.shape[1]
    q, k, v = (x.astype(wide) for x in (q, np.repeat(k, group, 1), np.repeat(v, group, 1)))
    scale = wide(1 / np.sqrt(q.shape[-1]) if scale is None else scale)
    scores = np.where(seen, rounded(rounded(q @ k.swapaxes(-1, -2)) * scale), wide(-np.inf))
    top = scores.max(-1, initial=-np.inf, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(top), top, 0))
    total = weights.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (np.log(total) + np.where(np.isfinite(top), top, 0))[..., 0]
    return rounded(rounded(weights / np.where(total > 0, total, 1)) @ v), lse


def check(case, out, lse, q, k, v, seen, scale=None):
    """Fails unless O's error is at most twice that of unfused attention in its dtype, but for half a rounding of the
    largest output, and the LSE is right to fp32. All ``[batch, heads, rows, dim]``."""
    want, want_lse = attention(q, k, v, seen, scale)
    unfused, _ = attention(q, k, v, seen, scale, out.dtype)
    ulp = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23}[out.dtype.name]
    largest = np.abs(want).max(initial=0)
    slack = (4 if out.dtype == np.float32 else 0.5) * ulp * largest + 1e-7
    error = np.abs(out.astype(np.float64) - want).max(initial=0)
    allowed = 2 * np.abs(unfused - want).max(initial=0) + slack
    case.assertLessEqual(error, allowed)
    if lse is not None:
        case.assertEqual(lse.dtype, np.float32)
        np.testing.assert_allclose(lse, want_lse, rtol=1e-5, atol=1e-5)
