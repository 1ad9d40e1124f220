"""Where tests with PyTorch compute, and attention in PyTorch operations to compare with."""

import os

try:
    import torch
except ImportError:
    torch = None

DEVICE = os.environ.get("FLASHTUNE_TEST_DEVICE")
if torch is not None and DEVICE is None:
    DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

MISSING = "PyTorch is not installed"


def randn(*shape, dtype=None, seed=0):
    """Normal numbers, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype or torch.float32).to(DEVICE)


def unfused(q, k, v, seen=None, score=None, scale=None):
    """Attention of ``[batch, heads, rows, dim]`` in PyTorch operations of q's dtype, and its log-sum-exp. ``seen`` is
    True for keys that are seen, ``score`` changes the scores."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if score is not None:
        scores = score(scores)
    if seen is not None:
        scores = scores.masked_fill(~seen, float("-inf"))
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def gradients(f, *inputs, seed=9):
    """Gradients of what a function gives, weighted by fixed random numbers, by its inputs."""
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    results = f(*inputs)
    results = results if isinstance(results, tuple) else (results,)
    loss = sum((r * randn(*r.shape, seed=seed + i).to(r.dtype)).sum() for i, r in enumerate(results))
    return torch.autograd.grad(loss, inputs)


def check(case, got, ours, *inputs):
    """Fails unless ``got``, gradients or results, err at most twice as much as unfused attention in the dtype does, but
    for a rounding of the largest. ``ours`` computes them in any dtype."""
    want = ours(*(x.double() for x in inputs))
    same = ours(*inputs)
    for i, (g, w, s) in enumerate(zip(got, want, same)):
        case.assertEqual((g.shape, g.dtype), (w.shape, inputs[0].dtype))
        allowed = 2 * (s - w).abs().max().item()
        allowed += 2 * torch.finfo(g.dtype).eps * w.abs().max().item() + 1e-6
        case.assertLessEqual((g - w).abs().max().item(), allowed, i)
